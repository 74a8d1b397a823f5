"""Pages that are equal on all ranks are written to storage once, and read by all: to one storage object, and to a store
on 3FS that each rank has opened."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filling import STATE, a_store, an_identity

sys.path.append(str(Path(__file__).parents[1] / "storage"))
from hf3fs_stores import stores_in

from kvarve.core.copies.effects import Copy, Ended, Page
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.page_copies import DeviceCopies
from kvarve.pages.keys import extend, pack, root_key
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier
from kvarve.storage import Storage
from kvarve.transfer.transfer_engine import TransferEngine
from tests.sim.usrbio import Emulator

LATENTS = PoolSpec("latents", (BufferSpec("kv", (6,), "float32"),), None, replicated=True)
POOLS = (LATENTS, STATE)
PAGES, RANKS = 8, 2
ROOT = root_key(b"ranks")
KEYS = extend(ROOT, pack(range(PAGES * 64)), 64)


class Rank:
    """One rank's arenas and transfer engine; its latents are replicated, its states are its own."""

    def __init__(self, rank: int, store: Storage) -> None:
        namespace = an_identity(POOLS).fingerprint()
        self.device = [DeviceArena(pool, PAGES, "cpu") for pool in POOLS]
        self.host = [HostArena(pool, PAGES, namespace, rank, RANKS) for pool in POOLS]
        self.transfers = TransferEngine(self.device, self.host)
        self.transfers.attach(self.transfers.connect(store))
        for pool, arena in enumerate(self.device):
            for buffer in arena.buffers.values():
                buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape) + 100 * rank * pool)
        copies, slots = DeviceCopies(self.device, self.host), [(slot, slot) for slot in range(PAGES)]
        copies.save(dict.fromkeys(range(len(POOLS)), (slots, KEYS)), copies.ready())

    def copy(self, source: Tier, target: Tier) -> tuple[int, int]:
        """All pages of both pools along an edge: those that arrived, and those that were bad."""
        pages = tuple(Page(pool, key, slot, slot) for pool in range(2) for slot, key in enumerate(KEYS))
        self.transfers.send(Copy(1, source, target, pages, ROOT))
        while True:
            assert self.transfers.ends.wait(20)
            for event in self.transfers.collect():
                if isinstance(event, Ended):
                    return event.good, event.bad


@pytest.fixture(params=["memory", "posix", "usrbio"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Storage]]:
    """The store, as a rank opens it."""
    if request.param == "memory":
        shared = a_store(identity=an_identity(POOLS))
        yield lambda: shared
        return
    with stores_in(tmp_path, Emulator(tmp_path) if request.param == "usrbio" else None) as stores:
        yield lambda: stores.open(label=an_identity(POOLS).fingerprint())


def test_pages_that_all_ranks_hold_are_written_once_and_read_by_all(open_store: Callable[[], Storage]) -> None:
    ranks = [Rank(rank, open_store()) for rank in range(RANKS)]
    everything = (1 << 2 * PAGES) - 1
    try:
        for rank in ranks:
            assert rank.copy(Tier.HOST, Tier.STORAGE) == (everything, 0)
        assert open_store().usage().objects == PAGES + RANKS * PAGES, "latents once, states for each rank"
        for rank in ranks:
            before = [bytes(arena.record(slot)) for arena in rank.host for slot in range(PAGES)]
            for arena in rank.host:
                for slot in range(PAGES):
                    arena.record(slot)[:] = bytes(len(arena.record(slot)))
            assert rank.copy(Tier.STORAGE, Tier.HOST) == (everything, 0)
            assert [bytes(arena.record(slot)) for arena in rank.host for slot in range(PAGES)] == before
    finally:
        for rank in ranks:
            rank.transfers.close(5)


def test_each_rank_writes_a_part_of_what_all_hold() -> None:
    parts = []
    for rank in range(RANKS):
        store = a_store(identity=an_identity(POOLS))
        one = Rank(rank, store)
        try:
            one.copy(Tier.HOST, Tier.STORAGE)
            parts.append(store.usage().objects - PAGES)
        finally:
            one.transfers.close(5)
    assert sum(parts) == PAGES and all(parts), parts
