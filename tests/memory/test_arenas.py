"""Where pages lie in host memory: in their records."""

import pytest
import torch
from pages import NAMESPACE, a_pool, filled

from kvarve.memory.arenas import HostArena
from kvarve.memory.page_copies import DeviceCopies
from kvarve.pages.pools import DTYPE_BYTES, BufferSpec, PoolSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_no_byte_belongs_to_two_buffers_or_lies_outside_of_its_pages_record(dtype: str) -> None:
    host = HostArena(a_pool("uint8", dtype, "int16"), 3, NAMESPACE)
    for slot in range(3):
        for buffer, piece in zip(host.pool.buffers, host.pieces(CPU), strict=True):
            sides = piece.storage_offset(), piece.stride(0)
            assert all(side % DTYPE_BYTES[buffer.dtype] == 0 for side in sides), "an element is not aligned"
            piece[slot] += 1
        record = bytes(host.record(slot))
        assert max(record) == 1 and sum(record) == sum(buffer.nbytes for buffer in host.pool.buffers)
        assert sum(bytes(host.memory)) == (slot + 1) * sum(record)


def test_what_a_storage_left_between_the_buffers_is_not_sealed_in() -> None:
    pool = PoolSpec("kv", (BufferSpec("a", (3,), "uint8"), BufferSpec("b", (5,), "uint8")), None)
    clean, used = HostArena(pool, 1, NAMESPACE), HostArena(pool, 1, NAMESPACE)
    used.record(0)[:] = b"\xee" * used.stride
    for host in (clean, used):
        copies = DeviceCopies([filled(pool, 1)], [host])
        copies.save({0: ([(0, 0)], [b"k" * 32])}, copies.ready())
    assert bytes(clean.record(0)) == bytes(used.record(0))
