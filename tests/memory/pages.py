"""Pools of odd shapes, pages of any bits, and all ways to copy them."""

from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarve.memory._kernel_copies import by_kernel, triton
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.page_copies import ByGather, ByPiece, Way
from kvarve.pages.pools import BUFFER_ALIGNMENT, BufferSpec, PoolSpec
from kvarve.records.record import HEADER_BYTES

NAMESPACE = b"m" * 32
# Of the CPU's memory: where there is a GPU, the kernel is compiled for that (test_kernel_copies.py).
MOVERS: dict[str, Way] = {"by piece": ByPiece, "by gather": ByGather}
if triton is not None and not torch.cuda.is_available():
    MOVERS["by kernel"] = partial(by_kernel, programs=2)
SHAPES = [(1,), (3, 5), (2, 1, 7), (70,)]


def a_pool(*dtypes: str) -> PoolSpec:
    wanted = [(dtype, shape) for dtype in dtypes for shape in SHAPES]
    buffers = [BufferSpec(f"layers.{i}.{dtype}", shape, dtype) for i, (dtype, shape) in enumerate(wanted)]
    return PoolSpec("attention", tuple(buffers), lookback=None)


def noise(buffer: BufferSpec, seed: int) -> Tensor:
    """Any bits at all, so a float may be NaN; but a bool is 0 or 1."""
    raw = np.random.default_rng(seed).integers(0, 2 if buffer.dtype == "bool" else 256, buffer.nbytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, buffer.dtype)).view(buffer.shape)


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def filled(pool: PoolSpec, slots: int) -> DeviceArena:
    device = DeviceArena(pool, slots)
    for number, buffer in enumerate(pool.buffers):
        for slot in range(slots):
            device.buffers[buffer.name][slot] = noise(buffer, 1000 * number + slot)
    return device


def in_record(host: HostArena, slot: int) -> list[bytes]:
    """Each buffer's bytes, found by the layout that the record's documentation gives."""
    record, found, at = bytes(host.record(slot)), [], HEADER_BYTES
    for buffer in host.pool.buffers:
        found.append(record[at : at + buffer.nbytes])
        at += -(-buffer.nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
    return found
