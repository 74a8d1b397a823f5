"""The heap of a long-running process with many threads: the C library's, Python's garbage collector, and memory that
goes back to the system."""

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ARENA_MAX = -8  # of mallopt(3), in glibc
HEAPS = 2


def bound_heaps() -> bool:
    """Have all threads share a few heaps; False if the C library has no such setting. Call it before they start.

    glibc gives threads heaps of their own, up to eight for each core, and memory that is free in one cannot be used by
    another: a server whose threads allocate and free the same amounts grows for hours. MALLOC_ARENA_MAX takes
    precedence.
    """
    if sys.platform != "linux" or "MALLOC_ARENA_MAX" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and one heap
    return mallopt is not None and mallopt(_ARENA_MAX, HEAPS) == 1


@contextmanager
def importing() -> Iterator[None]:
    """Imports, during which nothing is collected: all that they make stays, and looking through it again and again
    takes a fifth of the time that torch and transformers take (measured on 2 cores)."""
    collects, there = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > there:
            gc.freeze()
        if collects:
            gc.enable()


def spare_from_collection() -> None:
    """Have the garbage collector look through none of the objects that there are now. Call it when all is loaded.

    torch, transformers and a model are some hundred thousand objects that stay: a full collection that walks them stops
    all threads of a server, for up to 0.4 s (measured on 2 cores).
    """
    gc.collect()
    gc.freeze()


def discard(address: int, nbytes: int) -> None:
    """Give the system all whole pages of this memory, whose contents are lost; they come back as they are written."""
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + nbytes) // page * page
    if sys.platform == "linux" and start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
