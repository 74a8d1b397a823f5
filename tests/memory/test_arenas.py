"""Where pages lie: in records, or in another layout from which the same records are made."""

import threading

import pytest
import torch
from pages import NAMESPACE, a_pool, filled

from kvarve.errors import ConfigError
from kvarve.memory.arenas import HostArena
from kvarve.memory.host_memory import zeros
from kvarve.memory.layouts import LAYOUTS, PAGE_FIRST_DIRECT, spans
from kvarve.memory.page_copies import DeviceCopies
from kvarve.pages.pools import DTYPE_BYTES, BufferSpec, PoolSpec

CPU = torch.device("cpu")
KV = PoolSpec(
    "kv", tuple(BufferSpec(f"layers.{n}.{what}", (4, 3, 5), "int16") for n in range(2) for what in "kv"), None
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_no_byte_of_a_layout_belongs_to_two_pieces_or_lies_outside(layout: str, dtype: str) -> None:
    pool, slots = a_pool("uint8", dtype, "int16"), 3
    nbytes, found = spans(layout, pool, slots)
    seen = torch.zeros(nbytes, dtype=torch.int64)
    for buffer, span in zip(pool.buffers, found, strict=True):
        assert all(side % DTYPE_BYTES[buffer.dtype] == 0 for side in span), "an element is not aligned"
        for page in range(slots):
            for entry in range(buffer.shape[0]):
                start = span.start + page * span.page + entry * span.entry
                seen[start : start + buffer.nbytes // buffer.shape[0]] += 1
    assert int(seen.max()) == 1
    assert int(seen.sum()) == slots * sum(buffer.nbytes for buffer in pool.buffers)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_layout_makes_the_same_records_and_takes_them_back(layout: str, dtype: str) -> None:
    pool, slots = a_pool("uint8", dtype, "float64"), 4
    device, keys = filled(pool, slots), [bytes([slot]) * 32 for slot in range(slots)]
    direct, other = HostArena(pool, slots, NAMESPACE), HostArena(pool, slots, NAMESPACE, layout=layout)
    for host in (direct, other):
        copies = DeviceCopies([device], [host])
        copies.save({0: ([(slot, slots - 1 - slot) for slot in range(slots)], keys)}, copies.ready())
    expected = [bytes(direct.record(slot)) for slot in range(slots)]
    assert [bytes(other.record(slot)) for slot in range(slots)] == expected
    assert all(other.intact(slot, keys[slots - 1 - slot]) for slot in range(slots))

    back = HostArena(pool, slots, NAMESPACE, layout=layout)  # from storage, to other slots
    for slot in range(slots):
        record = back.blank((slot + 1) % slots)
        record[:] = expected[slot]
        back.put((slot + 1) % slots, record)
    assert [bytes(back.record((slot + 1) % slots)) for slot in range(slots)] == expected


def test_what_a_storage_left_between_the_buffers_is_not_sealed_in() -> None:
    pool = PoolSpec("kv", (BufferSpec("a", (3,), "uint8"), BufferSpec("b", (5,), "uint8")), None)
    clean, used = HostArena(pool, 1, NAMESPACE), HostArena(pool, 1, NAMESPACE)
    used.blank(0)[:] = b"\xee" * used.stride
    for host in (clean, used):
        copies = DeviceCopies([filled(pool, 1)], [host])
        copies.save({0: ([(0, 0)], [b"k" * 32])}, copies.ready())
    assert bytes(clean.record(0)) == bytes(used.record(0))


def test_a_layout_that_does_not_exist_is_refused_as_a_setting() -> None:
    with pytest.raises(ConfigError, match="unknown host layout 'head_first'; known: page_first_direct, page_first, "):
        HostArena(KV, 1, NAMESPACE, layout="head_first")
    assert HostArena(KV, 1, NAMESPACE).layout == PAGE_FIRST_DIRECT


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != PAGE_FIRST_DIRECT])
def test_a_thread_seals_and_checks_all_pages_in_memory_that_it_shares_with_no_other(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = list[int]()
    monkeypatch.setattr("kvarve.memory.arenas.zeros", lambda size: mapped.append(size) or zeros(size))
    host, keys = HostArena(KV, 6, NAMESPACE, layout=layout), [bytes([slot]) * 32 for slot in range(6)]
    for slot in range(6):
        for piece in host.pieces(CPU):
            piece[slot] = slot
        host.seal(slot, keys[slot])
    assert [host.intact(slot, keys[2]) for slot in range(6)] == [slot == 2 for slot in range(6)]
    kept, expected = host.record(3), bytes(host.record(3))
    assert mapped[1:] == [host.stride] * 2, "a record that is kept is nobody else's"
    other = threading.Thread(target=lambda: [host.intact(slot, keys[slot]) for slot in (4, 5)])
    other.start()
    other.join()
    assert host.intact(1, keys[1])
    assert mapped == [host.stride] * 4
    assert bytes(kept) == expected
