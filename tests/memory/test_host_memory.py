"""Host memory is of the size that was asked, and pinned where there is a GPU, until it is closed."""

import gc
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from kvarve.cache.config import CacheConfig
from kvarve.cache.worker import CacheWorker
from kvarve.errors import KvarveError, StorageError
from kvarve.memory.arenas import DeviceArena
from kvarve.memory.device_memory import OnGpu
from kvarve.memory.host_memory import MAPPED, PORTABLE, HostMemory
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec
from kvarve.storage import MemoryStorage
from kvarve.system.regions import HostRegion

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ODD = 5 * mmap.PAGESIZE + 192  # neither a power of two nor whole pages
SMALL = PoolSpec("small", (BufferSpec("layers.0.keys", (4,), "float32"),), None)
LARGE = PoolSpec("large", (BufferSpec("layers.0.values", (4, 4096), "float32"),), None)


class CudaRuntime:
    """The two calls of the CUDA runtime that are used, on a machine that can pin `limit` bytes."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.pinned = limit, dict[int, tuple[int, int]]()
        self.most = 0  # pieces of memory that were pinned at once

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self.limit:
            return 2
        assert address not in self.pinned
        self.pinned[address] = nbytes, flags
        self.most = max(self.most, len(self.pinned))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        if any(int(start, 16) <= address < int(end, 16) for start, end in ranges):  # else it is too late
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


def test_memory_that_code_of_a_gpu_may_still_reach_stays_pinned() -> None:
    runtime = CudaRuntime()
    memory = HostMemory(ODD, CUDA, runtime)
    reachable = OnGpu(memory.tensor.data_ptr(), ODD, memory)  # which a tensor of a GPU owns
    del memory
    gc.collect()
    assert runtime.pinned
    del reachable
    gc.collect()
    assert not runtime.pinned


def test_a_forked_child_finds_zeros_and_moves_no_page_of_its_parent() -> None:
    memory = HostMemory(ODD, CPU)
    memory.bytes[:] = bytes([7]) * ODD
    if not (child := os.fork()):
        os._exit(any(memory.bytes))
    memory.bytes[0] = 8
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child has what its parent's devices write"
    assert bytes(memory.bytes) == b"\x08" + bytes([7]) * (ODD - 1)


class Unwilling(MemoryStorage):
    """Takes no memory."""

    def register(self, region: HostRegion) -> None:
        raise StorageError("no such transport")


@pytest.mark.parametrize(
    ("limit", "trouble", "most"),
    [(1 << 20, "CUDA cannot pin", 1), (1 << 40, "it was removed", 2), (1 << 40, "no such transport", 2)],
    ids=["a-later-pool", "opening-the-storage", "connecting-it"],
)
def test_a_worker_that_cannot_be_made_leaves_nothing_pinned_and_no_thread(
    limit: int, trouble: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise StorageError("it was removed")

    runtime, before = CudaRuntime(limit), {*threading.enumerate()}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("kvarve.cache.worker.device_bytes", lambda _: None)
    monkeypatch.setattr("kvarve.cache.worker.DeviceArena", lambda pool, slots, _: DeviceArena(pool, slots))
    monkeypatch.setattr("kvarve.cache.worker.open_guarded", gone)
    identity = ModelIdentity("test", "w1", "float32", 64, 128, (SMALL, LARGE))
    config = CacheConfig(1 << 20, 16 << 20, "file:///tmp/none?capacity=1GiB" if "removed" in trouble else None)
    given = Unwilling(1 << 24, identity.fingerprint(), "test") if "transport" in trouble else None
    with pytest.raises(KvarveError, match=trouble) as kept:
        CacheWorker(identity, config, device="cuda", storage=given)
    assert runtime.most == most
    assert not runtime.pinned, f"while the traceback of {kept.value} still refers to all that was made"
    assert before.issuperset(threading.enumerate())
