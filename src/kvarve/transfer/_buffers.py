"""Memory for records on their way, which calls that hang keep to themselves."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvarve.system.regions import HostRegion


class Buffers:
    """At most `most` pieces of memory, made when they are needed first, aligned for direct I/O and told to a storage by
    `register`; each of `size_bytes`, or more if a single record is larger. After a fork they are the parent's."""

    def __init__(self, most: int, size_bytes: int, register: Callable[[HostRegion], None]) -> None:
        self._most, self.size_bytes, self._register, self._process = most, size_bytes, register, os.getpid()
        self._left, self._free = most, list[memoryview]()
        self._replaced: list[memoryview] = []  # a storage may have registered them, so they stay where they are
        self._came_back = threading.Condition()

    def take(self, size_bytes: int, within_s: float = 0.0, leave: int = 0) -> memoryview | None:
        """A buffer of at least `size_bytes`; None if none is free within the time, beside those to `leave` for others,
        or no memory is left for now."""
        if os.getpid() != self._process:
            return None
        with self._came_back:
            if not self._came_back.wait_for(lambda: len(self._free) + self._left > leave, within_s):
                return None
            if self._free:
                buffer = self._free.pop()
                if buffer.nbytes >= size_bytes:
                    return buffer
                self._replaced.append(buffer)
            else:
                self._left -= 1
        try:
            buffer = memoryview(mmap.mmap(-1, max(self.size_bytes, size_bytes)))
        except OSError:
            with self._came_back:
                self._left += 1
            return None
        self._register(HostRegion(buffer))
        return buffer

    @contextmanager
    def taken(self, size_bytes: int) -> Iterator[memoryview | None]:
        """The same for a block, if one is free now and it is for any bytes."""
        buffer = self.take(size_bytes) if size_bytes else None
        try:
            yield buffer
        finally:
            if buffer is not None:
                self.give_back(buffer)

    def give_back(self, buffer: memoryview) -> None:
        with self._came_back:
            self._free.append(buffer)
            self._came_back.notify_all()

    def wait_for_all(self, within_s: float) -> bool:
        """Wait until no call has a buffer; False if that takes longer."""
        with self._came_back:
            return self._came_back.wait_for(lambda: len(self._free) + self._left == self._most, within_s)
