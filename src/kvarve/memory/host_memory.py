"""Host memory, and its registration with CUDA, so that kernels of the GPU read and write it themselves."""

import mmap
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.memory.device_memory import OnGpu
from kvarve.pages.sizes import format_size
from kvarve.system.regions import HostRegion

PORTABLE, MAPPED = 1, 2  # flags of cudaHostRegister: for all contexts; in the GPU's address space
_MADV_WIPEONFORK = 18  # on Linux; not in the standard library


class HostMemory:
    """Memory of exactly `nbytes`, page-aligned and zero. On the CPU the system commits it as it is first written, by
    2 MiB where it has huge pages; for a GPU all of it is pinned. (torch's pinned memory would be rounded up to a power
    of two.) On Linux no forked child has it, unless it is a storage's `region`.
    """

    def __init__(self, nbytes: int, device: torch.device, cudart: Any = None, region: HostRegion | None = None) -> None:
        """`cudart`: the CUDA runtime, torch's by default. `region`: memory that is there already; anonymous
        memory by default. ConfigError: there is not so much."""
        try:
            self.region = region or HostRegion(memoryview(_kept(nbytes)))
        except (OSError, ValueError, OverflowError) as e:
            raise ConfigError(
                f"host memory cannot be had: {e}: give less, or raise the limits of this process (ulimit -v, ulimit -d)"
            ) from e
        self.bytes = self.region.memory
        self.tensor = torch.frombuffer(self.bytes, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostMemory] | None = None
        if device.type == "cuda":
            runtime = cudart if cudart is not None else torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self.tensor.data_ptr()
            error = int(runtime.cudaHostRegister(address, nbytes, PORTABLE | MAPPED))
            if error:
                raise ConfigError(
                    f"CUDA cannot pin {format_size(nbytes)} of host memory (error {error}): give less host memory, or "
                    f"raise the limit of locked memory (ulimit -l)"
                )
            # However this object ends, CUDA forgets the memory before it is unmapped and its address given to another.
            self._unpin = weakref.finalize(self, _unpin, runtime, address, self.bytes)
            self._unpin.atexit = False  # the system does it then

    def on(self, device: torch.device) -> Tensor:
        """All bytes as a tensor that code of the device may read and write: on a GPU, over the same addresses."""
        if device.type != "cuda":
            return self.tensor
        found = torch.as_tensor(OnGpu(self.tensor.data_ptr(), len(self.bytes), self), device=device)
        assert found.data_ptr() == self.tensor.data_ptr(), "the GPU has registered memory at the host's addresses"
        return found

    def close(self) -> None:
        """Unpin it; no copy of the GPU may be under way. The memory is freed with the last view of it."""
        if self._unpin is not None:
            self._unpin()  # once


def zeros(nbytes: int) -> memoryview:
    """Memory for a while, on whole pages for direct I/O: huge ones where the system has them, since small ones would
    cost more than what is written to them."""
    return memoryview(_anonymous(nbytes)) if nbytes else memoryview(b"")


def _anonymous(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _kept(nbytes: int) -> mmap.mmap:
    """Memory that devices and network cards know by its physical pages. A fork would share these with the child, and
    give this process others as soon as it writes; so the child finds zeros, or nothing where a kernel cannot do that.
    """
    memory = _anonymous(nbytes)
    for advice in (_MADV_WIPEONFORK, mmap.MADV_DONTFORK) if sys.platform == "linux" else ():
        with suppress(OSError):
            memory.madvise(advice)
            break
    return memory


def _unpin(cudart: Any, address: int, memory: memoryview) -> None:
    """`memory` is what is at the address: the call that is to come keeps it mapped."""
    cudart.cudaHostUnregister(address)
