"""Anonymous host memory, and its registration with CUDA, so that kernels of the GPU read and write it themselves."""

import mmap
from typing import Any

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.sizes import format_size

PORTABLE, MAPPED = 1, 2  # flags of cudaHostRegister: for all contexts; in the GPU's address space


class HostMemory:
    """Memory of exactly `nbytes`, page-aligned and zero. On the CPU the system commits each page as it is first
    written; for a GPU all of it is pinned. (torch's pinned memory would be rounded up to a power of two.)
    """

    def __init__(self, nbytes: int, device: torch.device, cudart: Any = None) -> None:
        """`cudart`: the CUDA runtime, torch's unless given. ConfigError: there is not so much memory."""
        try:
            self._memory = mmap.mmap(-1, nbytes)
        except (OSError, ValueError, OverflowError) as e:
            raise ConfigError(f"not enough host memory: {e}") from e
        self.bytes = memoryview(self._memory)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._address, self._registered, self._cudart = self.tensor.data_ptr(), False, cudart
        if device.type == "cuda":
            self._cudart = cudart if cudart is not None else torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(self._cudart.cudaHostRegister(self._address, nbytes, PORTABLE | MAPPED))
            if error:
                raise ConfigError(
                    f"CUDA cannot pin {format_size(nbytes)} of host memory (error {error}): give less host memory, or "
                    f"raise the limit of locked memory (ulimit -l)"
                )
            self._registered = True

    def on(self, device: torch.device) -> Tensor:
        """All bytes as a tensor that code of the device may read and write: on a GPU, over the same addresses."""
        if device.type != "cuda":
            return self.tensor
        found = torch.as_tensor(_Registered(self._address, len(self.bytes)), device=device)
        assert found.data_ptr() == self._address, "the GPU has registered memory at the host's addresses"
        return found

    def close(self) -> None:
        """Unpin it; no copy of the GPU may be under way. The memory is freed with the last view of it."""
        if self._registered:
            self._registered = False
            self._cudart.cudaHostUnregister(self._address)


class _Registered:
    """Registered host memory, as torch takes memory of a GPU that another library owns."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
