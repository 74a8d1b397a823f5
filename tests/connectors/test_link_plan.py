"""What a linker answers to SGLang's tree, by a worker in memory: sets of lengths, held until they are loaded."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_vllm import ROTTEN, SimulatedWorker

from kvarve.cache.config import CacheConfig
from kvarve.cache.messages import Report
from kvarve.cache.scheduler import CacheScheduler
from kvarve.connectors.sglang import link_plan
from kvarve.connectors.sglang.link_plan import FORGET_S, PROMISES, Chain, LinkPlanner
from kvarve.connectors.vllm.block_plan import Group
from kvarve.core.copies.effects import Copy, Ended, Verified
from kvarve.core.core_config import Slots
from kvarve.core.observe.reasons import Reason
from kvarve.core.policies import Policies
from kvarve.pages.boundaries import members, needed
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec, Tier

PAGE = 16
POOLS = {"kv": None, "swa": 2, "mamba": 1}


def chain(pages: int, seed: int = 0, first: int = 0) -> Chain:
    names = [hashlib.sha256(f"{seed} {page}".encode()).digest() for page in range(pages)]
    return Chain(b"".join(names), first)


class Linker:
    """A planner, its worker, and the engine's blocks: one for each page that is offered or loaded."""

    def __init__(self, *, storage: dict[Any, Any] | None = None, host: int = 64, **policies: Any) -> None:
        pools = tuple(PoolSpec(name, (BufferSpec("b", (64,), "uint8"),), back) for name, back in POOLS.items())
        identity = ModelIdentity("test", "weights", "float32", PAGE, PAGE, pools)
        config = CacheConfig(0, 1 << 20, policies=Policies(**policies))
        slots: Slots = {Tier.HOST: tuple(host for _ in pools)}
        self.scheduler = CacheScheduler(identity, config, slots, storage=storage is not None)
        self.planner, self.now = LinkPlanner(self.scheduler, 16), 1.0
        groups = [Group(at, name, PAGE, back) for at, (name, back) in enumerate(POOLS.items())]
        self.device = ["free"] * 1000
        self.worker = SimulatedWorker(self.device, groups, PAGE, storage)
        self.block = 0
        self.turn()

    def turn(self, ended: bool = True) -> None:
        """One turn in which all copies that are due end, or none."""
        events = [self.worker.end(op) for op in self.worker.due()] if ended else []
        plan: Any = SimpleNamespace(orders=self.planner.step(Report(events), self.now))
        self.worker.do(plan)

    def blocks(self, pages: int, of: Any) -> dict[int, int]:
        found = {}
        for page in members(pages):
            self.block += 1
            self.device[self.block], found[page] = f"{page} of {of}", self.block
        return found

    def offload(self, what: Chain, states: int = 0, seed: int = 0, before: int = 0) -> bool:
        """Pages from `what.first` on; of the last pool those of `states` (bits). The engine still has the first
        `before` pages, too."""
        mine, first = needed(what.pages, None) & ~needed(what.first, None), needed(before, None)
        pages = [self.blocks(mine, seed), self.blocks(mine, seed), self.blocks(states, seed)]
        return self.planner.offload(what, pages, lambda: [[*self.blocks(first, seed).values()] for _ in pages])

    def saved(self, what: Chain, states: int = 0, seed: int = 0, before: int = 0) -> bool:
        assert self.offload(what, states, seed, before)
        while not self.planner.ended():
            self.turn()
        return self.planner.pop()

    def lookup(self, what: Chain, rid: str = "r") -> list[int]:
        found = self.planner.lookup(rid, what, self.now)
        self.turn(ended=False)
        return found

    def load(self, what: Chain, pages: int, rid: str = "r") -> list[dict[int, int]] | None:
        end, lookbacks = what.first + pages, POOLS.values()
        lacks = [needed(end, back) & ~needed(what.first, back) for back in lookbacks]
        targets = [self.blocks(bits, "nothing") for bits in lacks]
        names = what.names[what.first * KEY_BYTES : end * KEY_BYTES]
        return targets if self.planner.load(rid, names, targets) else None

    def landed(self, index: int) -> bool | None:
        self.turn(ended=False)
        while self.planner.landed(index) is None:
            self.turn()
        landed = self.planner.landed(index)
        self.planner.finished(index)
        return landed

    def restored(self, targets: list[dict[int, int]], seed: int = 0) -> bool:
        return all(self.device[block] == f"{page} of {seed}" for each in targets for page, block in each.items())

    @property
    def leases(self) -> int:
        return len(self.scheduler.core.leases)


def test_a_lookup_has_every_length_at_which_all_pools_can_resume() -> None:
    linker = Linker()
    assert linker.saved(chain(6), states=0b101001)  # states after pages 1, 4 and 6
    assert linker.lookup(chain(6)) == [1, 4, 6]
    assert linker.lookup(chain(9)) == [1, 4, 6]
    assert linker.lookup(chain(6, first=3)) == [1, 3]
    assert linker.lookup(chain(5)) == [1, 4]
    assert linker.lookup(chain(6, seed=1)) == []


@pytest.mark.parametrize("pages", [1, 4, 6])
def test_any_length_of_a_lookup_can_be_loaded_whatever_is_evicted_meanwhile(pages: int) -> None:
    linker = Linker()
    linker.saved(chain(6), states=0b101001)
    linker.lookup(chain(6))
    linker.scheduler.core.flush((Tier.HOST,))
    targets = linker.load(chain(6), pages)
    assert targets is not None
    linker.scheduler.core.flush((Tier.HOST,))
    linker.planner.start(1)
    assert linker.landed(1) and linker.restored(targets)
    linker.scheduler.core.flush((Tier.HOST,))
    linker.now += 1 + FORGET_S
    linker.turn()
    assert linker.leases == 0
    linker.scheduler.audit()


def test_a_load_needs_the_last_lookup_of_its_request_and_one_that_is_not_too_long_ago() -> None:
    linker = Linker()
    linker.saved(chain(4), states=0b1000)
    linker.saved(chain(4, 1), states=0b1000, seed=1)
    assert linker.load(chain(4), 4) is None
    linker.lookup(chain(4))
    linker.lookup(chain(4, 1))
    assert linker.load(chain(4), 4) is None, "it was looked up for other pages since then"
    linker.lookup(chain(4), "first")
    for other in range(PROMISES):
        linker.lookup(chain(4, 100 + other), f"{other}")  # they find nothing, which other ranks need not
    assert linker.load(chain(4), 4, "first") is None
    linker.lookup(chain(4))
    assert linker.load(chain(4), 4) is not None


def test_a_load_that_is_cancelled_holds_nothing_and_one_that_was_started_ends() -> None:
    linker = Linker()
    linker.saved(chain(4), states=0b1000)
    linker.lookup(chain(4))
    assert linker.load(chain(4), 4) is not None
    assert linker.planner.cancel("r")
    assert not linker.planner.queued and not linker.planner.cancel("r")
    linker.lookup(chain(4))
    targets = linker.load(chain(4), 4)
    linker.planner.start(1)
    assert targets is not None and not linker.planner.cancel("r")
    assert linker.landed(1) and linker.restored(targets)


def test_a_page_that_turns_out_damaged_fails_its_batch_and_is_not_found_again() -> None:
    linker = Linker()
    linker.saved(chain(4), states=0b1000)
    for slot, (key, _) in [*linker.worker.host.items()]:
        linker.worker.host[slot] = key, ROTTEN
    linker.lookup(chain(4))
    assert linker.load(chain(4), 4) is not None
    linker.planner.start(1)
    assert linker.landed(1) is False
    assert linker.lookup(chain(4)) == []
    assert linker.planner.counts["loads failed"] == 1


@pytest.mark.parametrize("came", [True, False])
def test_a_batch_goes_on_once_its_pages_are_checked_and_has_landed_if_all_have_been_copied(came: bool) -> None:
    linker = Linker()
    linker.saved(chain(4), states=0b1000)
    linker.lookup(chain(4))
    assert linker.load(chain(4), 4) is not None
    linker.planner.start(1)
    linker.turn(ended=False)
    ((op, copy),) = linker.worker.flying.items()
    assert isinstance(copy, Copy) and not linker.planner.coming(1)
    whole = (1 << len(copy.pages)) - 1
    linker.planner.step(Report([Verified(op, whole)]), linker.now)
    assert linker.planner.coming(1) and linker.planner.landed(1) is None
    linker.planner.step(Report([Ended(op, whole if came else 0)]), linker.now)
    assert linker.planner.landed(1) is came


def test_offloads_end_in_their_order_and_one_waits_for_the_pages_that_it_rests_on() -> None:
    linker = Linker()
    assert linker.offload(chain(3))
    assert linker.offload(chain(5, first=3), states=0b10000)
    linker.turn(ended=False)
    assert linker.planner.ended() == 0
    while linker.planner.ended() < 2:
        linker.turn()
    assert [linker.planner.pop(), linker.planner.pop()] == [True, True]
    assert linker.lookup(chain(5)) == [5]


def test_an_offload_without_its_parents_or_without_room_is_not_stored() -> None:
    linker = Linker(host=2)
    assert not linker.saved(chain(2, first=1), states=0b10)
    assert not linker.saved(chain(4), states=0b1000)
    assert linker.planner.counts["offloads not stored"] == 2
    linker.scheduler.audit()


def test_pages_before_an_offload_that_the_host_lacks_are_saved_from_the_engine_with_it() -> None:
    linker = Linker()
    assert linker.saved(chain(3, first=2), states=0b100, before=2)
    assert linker.lookup(chain(3)) == [3]
    targets = linker.load(chain(3), 3)
    assert targets is not None
    linker.planner.start(1)
    assert linker.landed(1) and linker.restored(targets)


def test_a_request_waits_for_storage_until_its_pages_have_come_or_its_patience_ends() -> None:
    storage = dict[Any, Any]()
    before = Linker(storage=storage)
    assert before.saved(chain(4), states=0b1000)
    while before.worker.due():
        before.turn()
    for patience, came in (("1s", True), ("1s", False), ("none", False)):
        linker = Linker(storage=storage, storage_wait=patience)
        linker.planner.seen("r", 0, 4, linker.now)
        assert linker.lookup(chain(4)) == []
        linker.planner.hold("r")
        assert linker.planner.waits("r", linker.now) is (patience != "none")
        while came and linker.planner.waits("r", linker.now):
            linker.turn()
        linker.now += FORGET_S + 1
        linker.turn(ended=False)
        assert not linker.planner.waits("r", linker.now) and linker.leases == 1, "its turn has not come"
        assert linker.planner.turn("r", linker.now) == (range(4) if came else range(0))
        assert linker.lookup(chain(4)) == ([4] if came else [])
        linker.planner.began("r")
        assert not linker.leases and linker.planner.reasons.total() == 4 * 16


def test_offloads_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_plan, "MOST_OFFLOADS", 2)
    linker = Linker()
    assert [linker.offload(chain(1, seed)) for seed in range(3)] == [True, True, False]
    assert linker.planner.counts["offloads refused"] == 1


def test_pages_that_the_host_has_are_not_copied_again() -> None:
    linker = Linker()
    linker.saved(chain(4), states=0b1000)
    seen = linker.worker.seen.copy()
    assert linker.saved(chain(4), states=0b1000)
    assert linker.worker.seen == seen


def test_what_storage_has_comes_to_the_host_while_a_request_waits_and_is_counted_as_used() -> None:
    storage: dict[Any, Any] = {}
    before = Linker(storage=storage)
    before.saved(chain(4), states=0b1000)
    while not before.scheduler.core.idle():
        before.turn()
    linker = Linker(storage=storage)
    assert linker.lookup(chain(4)) == []
    while not linker.scheduler.core.idle():
        linker.turn()
    assert linker.lookup(chain(4)) == [4]
    assert linker.load(chain(4), 4) is not None
    linker.planner.start(1)
    assert linker.landed(1)
    assert linker.scheduler.core.counters.used_tokens == 4 * PAGE
    assert linker.leases == 0


def test_a_storage_that_hangs_keeps_no_lookup_and_no_request_for_ever() -> None:
    linker = Linker(storage={})
    linker.worker.hangs = True
    assert linker.lookup(chain(4)) == []
    assert linker.leases == 1
    linker.now += 1 + FORGET_S
    linker.turn()
    assert linker.leases == 0


def test_after_a_reset_nothing_is_held_and_the_host_has_its_pages() -> None:
    linker = Linker()
    linker.saved(chain(4), states=0b1000)
    linker.offload(chain(2, 1), states=0b10, seed=1)
    linker.lookup(chain(4))
    assert linker.load(chain(4), 4) is not None
    linker.lookup(chain(4), "other")
    linker.planner.stop()
    assert not linker.planner.queued
    while linker.planner.uses_blocks():
        linker.turn()
    linker.planner.reset()
    assert linker.planner.ended() == linker.leases == 0
    assert linker.lookup(chain(4)) == [4]


def test_a_copy_is_named_by_sglangs_hashes_alone() -> None:
    orders = []
    for _ in range(2):
        linker = Linker()
        linker.offload(chain(2), states=0b10)
        linker.turn(ended=False)
        orders += [order for order in linker.worker.flying.values() if isinstance(order, Copy)]
    assert {page.key for page in orders[0].pages} == {page.key for page in orders[1].pages}


@pytest.mark.parametrize("storage", [None, {}], ids=["host", "storage"])
def test_tokens_of_prompts_are_counted_once_by_where_they_came_from(storage: dict[Any, Any] | None) -> None:
    linker, prompt = Linker(storage=storage), chain(4)
    assert linker.saved(prompt, states=1 << 3)
    linker.planner.seen("r", 1, 4, linker.now)
    linker.lookup(chain(4, first=1))
    assert linker.load(chain(4, first=1), 3) is not None
    linker.planner.start(1)
    while linker.planner.landed(1) is None:
        linker.turn()
    assert linker.planner.reasons == {Reason.HIT_DEVICE: PAGE, Reason.HIT_HOST: 3 * PAGE}
    linker.planner.seen("of the device", 4, 4, linker.now)  # it is never looked up
    for _ in range(2):  # it waits
        linker.planner.seen("new", 0, 2, linker.now)
        linker.lookup(chain(2, seed=1), "new")
    linker.now += FORGET_S + 1
    linker.turn()
    assert linker.planner.reasons[Reason.HIT_DEVICE] == 5 * PAGE and linker.planner.reasons.total() == 10 * PAGE
