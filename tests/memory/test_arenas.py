"""Where pages lie: views into records, and copies that change nothing but what they are for."""

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.memory.arenas import DeviceArena, HostArena, to_device, to_host
from kvarve.memory.record import BLOCK_BYTES, HEADER_BYTES, record_bytes
from kvarve.model import BUFFER_ALIGNMENT, DTYPE_BYTES, BufferSpec, PoolSpec

NAMESPACE = b"m" * 32
SHAPES = [(1,), (3, 5), (2, 1, 7), (70,)]


def a_pool(*dtypes: str) -> PoolSpec:
    wanted = [(dtype, shape) for dtype in dtypes for shape in SHAPES]
    buffers = [BufferSpec(f"layers.{i}.{dtype}", shape, dtype) for i, (dtype, shape) in enumerate(wanted)]
    return PoolSpec("attention", tuple(buffers), lookback=None)


def noise(buffer: BufferSpec, seed: int) -> Tensor:
    """Any bits at all, so a float may be no number; but a bool is 0 or 1."""
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


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_what_is_written_to_a_view_stands_in_the_record(dtype: str) -> None:
    pool, slots = a_pool(dtype, "int16"), 5
    host = HostArena(pool, slots, NAMESPACE)
    for number, buffer in enumerate(pool.buffers):
        assert host.buffers[buffer.name].shape == (slots, *buffer.shape)
        for slot in range(slots):
            host.buffers[buffer.name][slot] = noise(buffer, 100 * number + slot)
    for slot in range(slots):
        for number, (buffer, found) in enumerate(zip(pool.buffers, in_record(host, slot), strict=True)):
            assert found == raw(noise(buffer, 100 * number + slot)).tobytes()
        assert bytes(host.record(slot)[:HEADER_BYTES]) == bytes(HEADER_BYTES), "a view reaches into the header"


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_what_is_written_to_a_record_is_seen_in_the_views(dtype: str) -> None:
    pool = a_pool(dtype)
    host = HostArena(pool, 3, NAMESPACE)
    for number, (buffer, offset) in enumerate(zip(pool.buffers, pool.offsets(), strict=False)):
        start = HEADER_BYTES + offset
        host.record(1)[start : start + buffer.nbytes] = raw(noise(buffer, number)).tobytes()
    for number, buffer in enumerate(pool.buffers):
        assert raw(host.buffers[buffer.name][1]).tobytes() == raw(noise(buffer, number)).tobytes()
        assert not raw(host.buffers[buffer.name][0]).any()
        assert not raw(host.buffers[buffer.name][2]).any()


def test_records_lie_one_behind_the_other_on_whole_pages_of_memory() -> None:
    host = HostArena(a_pool("float32", "uint8"), 4, NAMESPACE)
    starts = [torch.frombuffer(host.record(slot), dtype=torch.uint8).data_ptr() for slot in range(4)]
    assert all(start % BLOCK_BYTES == 0 for start in starts)
    assert [start - starts[0] for start in starts] == [slot * host.stride for slot in range(4)]
    assert host.stride == record_bytes(host.pool.payload_bytes)
    assert all(view.data_ptr() % BUFFER_ALIGNMENT == 0 for view in host.buffers.values())


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_pages_come_back_bit_for_bit_and_their_neighbours_are_not_touched(dtype: str) -> None:
    pool, rng = a_pool(dtype, "uint8"), random.Random(dtype)
    device, host, back = filled(pool, 9), HostArena(pool, 11, NAMESPACE), DeviceArena(pool, 10)
    for slot in range(11):
        host.record(slot)[:] = b"\xaa" * host.stride
    for tensor in back.buffers.values():
        tensor.view(torch.uint8).fill_(1)
    before = {name: tensor.clone() for name, tensor in device.buffers.items()}

    there, here, home = rng.sample(range(9), 5), rng.sample(range(11), 5), rng.sample(range(10), 5)
    keys = [bytes([i]) * 32 for i in range(5)]
    to_host(device, host, list(zip(there, here, strict=True)), keys)
    for slot in range(11):
        if slot in here:
            assert host.stamp.intact(host.record(slot), keys[here.index(slot)])
            assert in_record(host, slot) == [
                raw(before[buffer.name][there[here.index(slot)]]).tobytes() for buffer in pool.buffers
            ]
        else:
            assert bytes(host.record(slot)) == b"\xaa" * host.stride
    to_device(host, back, list(zip(here, home, strict=True)))
    for name, tensor in back.buffers.items():
        for slot in range(10):
            expected = before[name][there[home.index(slot)]] if slot in home else None
            assert raw(tensor[slot]).tobytes() == (
                raw(expected).tobytes() if expected is not None else b"\1" * raw(tensor[slot]).size
            )
    for name, tensor in device.buffers.items():
        assert raw(tensor).tobytes() == raw(before[name]).tobytes(), "the source was changed"


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([*DTYPE_BYTES]), st.lists(st.integers(1, 9), min_size=1, max_size=4)), max_size=4
    ),
    st.permutations(range(4)),
)
def test_any_layout_of_buffers_survives_the_way_to_the_host_and_back(
    layout: list[tuple[str, list[int]]], order: list[int]
) -> None:
    buffers = [BufferSpec("first", (3,), "uint8")]
    buffers += [BufferSpec(f"b{i}", tuple(shape), dtype) for i, (dtype, shape) in enumerate(layout)]
    pool = PoolSpec("any", tuple(buffers), lookback=1)
    device, host, back = filled(pool, 4), HostArena(pool, 4, NAMESPACE), DeviceArena(pool, 4)
    to_host(device, host, list(enumerate(order)), [bytes(32)] * 4)
    to_device(host, back, [(slot, 3 - slot) for slot in range(4)])
    for slot, other in enumerate(order):
        for name, tensor in device.buffers.items():
            assert raw(back.buffers[name][3 - other]).tobytes() == raw(tensor[slot]).tobytes()


def test_more_memory_than_there_is_address_space_is_refused_as_a_setting() -> None:
    with pytest.raises(ConfigError, match="not enough host memory for"):
        HostArena(a_pool("float32"), 1 << 52, NAMESPACE)
    with pytest.raises(ConfigError, match="no memory on cpu for"):
        DeviceArena(a_pool("float32"), 1 << 52)
