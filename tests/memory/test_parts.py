"""Pages stored by head group: what four ranks wrote two read, and neither reads a head that is not its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvarve.memory._parts import Parts
from kvarve.pages.pools import BufferSpec, HeadGroups, ModelIdentity, PoolSpec
from kvarve.records.record import HEADER_BYTES, Stamp, record_bytes

NAMESPACE, ROOT, KEY = b"n" * 32, b"r" * 32, b"\x05" * 32
# A layer's keys of eight heads, and a convolution's channels: of eight queries, keys (two each) and values (three).
GROUPS = HeadGroups(8, ((1, (1,)), (0, (2, 2, 3))))
WHOLE = PoolSpec(
    "mixed", (BufferSpec("keys", (4, 8, 3), "bfloat16"), BufferSpec("conv", (56, 5), "float32")), None, groups=GROUPS
)


def of_rank(rank: int, ranks: int) -> PoolSpec:
    """The pool as a rank has it."""
    mine, _ = WHOLE.parts(rank, ranks)
    return replace(WHOLE, buffers=GROUPS.shapes(WHOLE.buffers, len(mine)))


def heads(content: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's part of a whole page, cut as a model's weights are: heads of each section one after the other."""
    mine, _ = WHOLE.parts(rank, ranks)
    sections = content["conv"].split([16, 16, 24])
    conv = [each[mine.start * len(each) // 8 : mine.stop * len(each) // 8] for each in sections]
    return {"keys": content["keys"][:, mine.start : mine.stop], "conv": torch.cat(conv)}


def a_record(pool: PoolSpec, content: dict[str, Tensor]) -> memoryview:
    record = memoryview(bytearray(record_bytes(pool.payload_bytes)))
    for buffer, at in zip(pool.buffers, pool.offsets(), strict=False):
        raw = content[buffer.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        record[HEADER_BYTES + at : HEADER_BYTES + at + buffer.nbytes] = raw
    return record


def a_page() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(7)
    return {
        "keys": torch.randn((4, 8, 3), generator=dice).bfloat16(),
        "conv": torch.randn((56, 5), generator=dice),
    }


def stored(store: dict[str, Any], content: dict[str, Tensor], ranks: int) -> None:
    for rank in range(ranks):
        pool = of_rank(rank, ranks)
        parts = Parts(pool, NAMESPACE, rank, ranks)
        record = a_record(pool, heads(content, rank, ranks))
        Stamp(NAMESPACE, pool.name, pool.payload_bytes, *_number(pool, rank, ranks)).seal(record, KEY)
        if parts.writes(KEY):
            store |= zip(parts.names(ROOT, KEY), map(bytes, parts.cut(record, KEY)), strict=True)


def _number(pool: PoolSpec, rank: int, ranks: int) -> tuple[int, int]:
    mine, of = pool.parts(rank, ranks)
    return mine.start, of


@pytest.mark.parametrize(("writing", "reading"), [(2, 4), (4, 2), (8, 2), (2, 16), (16, 4)])
def test_a_page_of_some_ranks_is_read_by_others_each_its_own_heads(writing: int, reading: int) -> None:
    store: dict[str, Any] = {}
    content = a_page()
    stored(store, content, writing)
    assert len(store) == 8, "one record for each head group, whoever has it"
    for rank in range(reading):
        pool = of_rank(rank, reading)
        parts, record = Parts(pool, NAMESPACE, rank, reading), memoryview(bytearray(record_bytes(pool.payload_bytes)))
        blanks = parts.blanks(record)
        for number, (name, blank) in enumerate(zip(parts.names(ROOT, KEY), blanks, strict=True)):
            blank[:] = store[name]
            assert parts.intact(number, blank, KEY)
        parts.join(blanks, record)
        assert record[HEADER_BYTES:] == a_record(pool, heads(content, rank, reading))[HEADER_BYTES:]


def test_another_group_or_page_is_not_taken_for_a_part() -> None:
    store: dict[str, Any] = {}
    stored(store, a_page(), 4)
    parts = Parts(of_rank(1, 4), NAMESPACE, 1, 4)
    mine, after = (memoryview(store[parts.names(ROOT, KEY)[n]]) for n in range(2))
    assert parts.intact(0, mine, KEY) and parts.intact(1, after, KEY)
    assert not parts.intact(0, after, KEY) and not parts.intact(0, mine, b"\x06" * 32)
    assert not Parts(of_rank(1, 4), b"m" * 32, 1, 4).intact(0, mine, KEY), "another model's"
    exact = Parts(replace(of_rank(2, 4), groups=None), NAMESPACE, 2, 4)
    assert not {*exact.names(ROOT, KEY)} & store.keys(), "the exact mode has names of its own"


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_each_part_of_each_page_has_one_rank_that_writes_it(ranks: int) -> None:
    for first in range(64):
        key = bytes([first]) * 32
        written = [
            name
            for rank in range(ranks)
            if (parts := Parts(of_rank(rank, ranks), NAMESPACE, rank, ranks)).writes(key)
            for name in parts.names(ROOT, key)
        ]
        assert len(written) == len({*written}) == 8


def test_only_pages_by_head_group_are_named_alike_for_all_numbers_of_ranks() -> None:
    def prints(groups: bool, **more: Any) -> set[bytes]:
        found = set()
        for ranks in (2, 4, 8):
            pool = of_rank(1, ranks) if groups else replace(of_rank(1, ranks), groups=None)
            found.add(ModelIdentity("a", "w", "float32", 4, 8, (pool,), ranks=ranks, **more).fingerprint())
        return found

    assert len(prints(groups=True)) == 1
    assert len(prints(groups=False)) == 3
    assert not prints(groups=True) & prints(groups=True, numerics="other")
