"""Host memory is of the size that was asked, and pinned where there is a GPU, until it is closed."""

import mmap
import re

import pytest
import torch

from kvarve.errors import ConfigError
from kvarve.memory.host_memory import MAPPED, PORTABLE, HostMemory

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ODD = 5 * mmap.PAGESIZE + 192  # neither a power of two nor whole pages


class CudaRuntime:
    """The two calls of the CUDA runtime that are used, on a machine that can pin `limit` bytes."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.pinned = limit, dict[int, tuple[int, int]]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self.limit:
            return 2
        assert address not in self.pinned
        self.pinned[address] = nbytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_exactly_the_bytes_that_were_asked_are_pinned_until_they_are_closed() -> None:
    runtime = CudaRuntime()
    memory = HostMemory(ODD, CUDA, runtime)
    assert runtime.pinned == {memory.tensor.data_ptr(): (ODD, PORTABLE | MAPPED)}
    assert len(memory.bytes) == memory.tensor.nbytes == ODD
    memory.close()
    memory.close()
    assert not runtime.pinned
    memory.bytes[ODD - 1] = 7  # views stay valid
    assert int(memory.tensor[-1]) == 7


def test_memory_for_the_cpu_is_not_pinned() -> None:
    runtime = CudaRuntime()
    memory = HostMemory(ODD, CPU, runtime)
    assert not runtime.pinned and memory.on(CPU) is memory.tensor
    memory.close()


def test_memory_that_cannot_be_pinned_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match=re.escape("error 2): give less host memory, or raise the limit of locked")):
        HostMemory(ODD, CUDA, CudaRuntime(limit=ODD - 1))
