"""What an engine with blocks of its own loads and saves, with a scheduler that behaves like vLLM's."""

import gc
import random
import weakref
from collections.abc import Sequence

import pytest
from simulated_vllm import ROTTEN, SimulatedRequest, SimulatedVllm, Status

from kvarve.cache.config import CacheConfig
from kvarve.cache.messages import Report
from kvarve.cache.scheduler import CacheScheduler
from kvarve.connectors.vllm.block_plan import BlockPlanner, Group, Stored, lookback_of
from kvarve.core.copies.effects import Copy
from kvarve.core.observe.reasons import Reason
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec, Tier

PAGE = 16
FULL = Group(0, "full", PAGE, None)
WINDOW = Group(1, "window", PAGE, 2)
STATE = Group(2, "state", PAGE, 1, offered=True)
HYBRID = (FULL, WINDOW, STATE)
# In the engine's numbering, group 1 may not be cached; a page is four blocks of attention and two of a window.
MIXED = (Group(0, "full", 4, None), Group(2, "window", 8, 2), Group(3, "state", PAGE, 1, offered=True))


def engine(
    groups: Sequence[Group] = HYBRID,
    *,
    storage: dict | None = None,  # type: ignore[type-arg]
    host: int = 64,
    policies: Policies = Policies(),
    **more: int,
) -> SimulatedVllm:
    pools = tuple(PoolSpec(each.name, (BufferSpec("b", (64,), "uint8"),), each.lookback) for each in groups)
    identity = ModelIdentity("test", "weights", "float32", PAGE, PAGE, pools)
    config = CacheConfig(0, 1 << 20, policies=policies)
    slots = {Tier.HOST: tuple(host for _ in groups)}
    scheduler = CacheScheduler(identity, config, slots, storage=storage is not None)
    by_number = [Group(at, g.name, g.block_tokens, g.lookback, g.offered) for at, g in enumerate(groups)]
    hashes = min(group.block_tokens for group in groups)
    planner = BlockPlanner(scheduler, by_number, hashes, tells=True)
    return SimulatedVllm(planner, by_number, PAGE, hash_tokens=hashes, storage=storage, **more)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + at // 8).randrange(97) for at in range(length)]


def settled(sim: SimulatedVllm) -> None:
    """Nothing is held that nothing uses."""
    sim.run()
    sim.evict()
    assert not any(sim.references[1:]), "every block is free at the end"
    scheduler = sim.planner._scheduler
    scheduler.audit()
    assert not scheduler.core.leases


def ask(sim: SimulatedVllm, tokens: Sequence[int], name: str, answer: int = 1) -> list[int]:
    request = sim.add(name, tokens, answer)
    sim.run()
    return request.external


@pytest.mark.parametrize("groups", [HYBRID, MIXED, (FULL,), (FULL, WINDOW), (STATE,)], ids=len)
def test_a_prompt_comes_back_from_the_host_when_the_engine_has_forgotten_it(groups: Sequence[Group]) -> None:
    sim = engine(groups)
    sim.reads = False
    assert ask(sim, prompt(70), "first") == [], "a request that may not read is saved"
    assert sim.reset()
    assert ask(sim, prompt(70), "second") == []
    sim.reads, saved = True, sim.worker.seen["device to host"]
    sim.reset()
    assert ask(sim, prompt(70), "third") == [64]
    assert ask(sim, prompt(70), "fourth") == [], "the engine has it itself now"
    assert sim.worker.seen["device to host"] == saved, "a page is saved once"
    other = sim.add("other", prompt(70), salt="tenant")
    sim.run()
    assert other.external == []
    settled(sim)


def test_each_turn_resumes_from_the_one_before_and_a_shorter_prompt_where_all_windows_were_full() -> None:
    """Every window page is saved when it is full, not only those that a prompt's end reads."""
    sim = engine((FULL, WINDOW))
    request = sim.add("first", prompt(64), 100)
    sim.run()
    for tokens, hit in ((request.tokens, 160), (request.tokens[:100], 96), (request.tokens[:64], 48)):
        sim.reset()
        assert ask(sim, tokens, str(hit)) == [hit], "a token is left to compute"
    assert ask(sim, request.tokens[:64] + prompt(40, 1), "longer") == [], "the engine's own part counts"


def test_only_what_the_engine_lacks_is_loaded() -> None:
    sim = engine((FULL,))
    ask(sim, prompt(100), "first")
    for page in [*sim.cached][3:]:
        sim.device[sim.cached.pop(page)] = "free"
    assert ask(sim, prompt(100), "again") == [48], "six pages less the three that it has"
    assert sim.worker.seen["host to device"] == 3
    settled(sim)


def test_a_load_that_fails_is_not_claimed_again() -> None:
    sim = engine((FULL,))
    ask(sim, prompt(100), "first")
    sim.reset()
    real = sim.worker.end

    def end(op: int):  # type: ignore[no-untyped-def]
        order = sim.worker.flying[op]
        ended = real(op)
        if isinstance(order, Copy) and order.target is Tier.DEVICE:
            return type(ended)(op, 0b11 & ended.good)
        return ended

    sim.worker.end = end  # type: ignore[method-assign]
    request = sim.add("again", prompt(100))
    sim.run()
    assert request.external == [96, 32]
    settled(sim)


def test_pages_come_back_from_storage_after_a_restart() -> None:
    storage: dict = {}  # type: ignore[type-arg]
    first = engine(storage=storage)
    ask(first, prompt(70), "first")
    assert storage
    second = engine(storage=storage)
    request = second.add("again", prompt(70))
    second.step()
    assert request.asks and not request.external, "it is asked to ask again while storage is read"
    second.run()
    assert request.external == [64]
    settled(second)


def test_each_page_of_storage_is_read_once_for_eight_requests() -> None:
    storage: dict = {}  # type: ignore[type-arg]
    ask(engine((FULL,), storage=storage), prompt(100), "first")
    sim = engine((FULL,), storage=storage, running=8)
    requests = [sim.add(f"{at}", prompt(100)) for at in range(8)]
    sim.run()
    assert sim.worker.seen["storage to host"] == 6
    assert all(request.external == [96] for request in requests)
    settled(sim)


def test_a_request_without_room_finds_what_has_come_to_the_host_since_it_was_asked_about() -> None:
    sim = engine()
    waits = SimulatedRequest("waits", prompt(70), 1, PAGE)
    assert sim.planner.ask(waits, 0, sim.now) == 0
    ask(sim, prompt(70), "other")
    assert sim.planner.ask(waits, 0, sim.now) == 64
    sim.planner.finished("waits")
    settled(sim)


def test_a_request_without_room_is_looked_up_in_storage_ever_less_often() -> None:
    storage: dict = {}  # type: ignore[type-arg]
    sim, waits = engine(storage=storage), SimulatedRequest("waits", prompt(70), 1, PAGE)
    asked = []
    for _ in range(200):
        asked += [sim.now] if sim.planner.ask(waits, 0, sim.now) is None else []
        sim.step()
    assert asked == [0, 1, 2, 4, 8, 16, 32]
    ask(engine(storage=storage), prompt(70), "elsewhere")
    sim.now += 50.0
    assert sim.planner.ask(waits, 0, sim.now) is None
    while (found := sim.planner.ask(waits, 0, sim.now)) is None:
        sim.step()
    assert found == 64
    sim.planner.finished("waits")
    settled(sim)


def test_a_page_that_is_bad_in_storage_is_computed_again_and_stored_again() -> None:
    storage: dict = {}  # type: ignore[type-arg]
    ask(engine(storage=storage), prompt(70), "first")
    states = [name for name in storage if name[0] == 2]
    storage |= {name: (name[1], ROTTEN) for name in states}
    sim = engine(storage=storage)
    assert ask(sim, prompt(70), "again") == [], "no boundary has a state"
    assert not [name for name in states if storage[name][1] == ROTTEN]


def test_a_storage_that_hangs_delays_a_request_by_its_patience_only() -> None:
    """The wait runs from the question, not from the engine's last step."""
    storage: dict = {}  # type: ignore[type-arg]
    ask(engine(storage=storage), prompt(70), "first")
    sim = engine(storage=storage, policies=Policies(storage_wait="3.0s"))
    sim.worker.hangs = True
    request = sim.add("first", prompt(70, 1))
    sim.run(60)
    assert request.status is Status.FINISHED and sim.now < 20
    sim.worker.hangs = False
    sim.run()
    sim.now += 10_000
    assert ask(sim, prompt(70), "again") == [64]
    settled(sim)


def test_every_token_of_a_prompt_is_counted_once_with_the_reason_why_it_was_cached_or_not() -> None:
    sim = engine()
    ask(sim, prompt(70), "first")
    assert sim.planner.reasons == {Reason.NEVER_SEEN: 64, Reason.BELOW_GRID: 6}
    sim.planner.reasons.clear()
    ask(sim, prompt(70), "on the device")
    assert sim.planner.reasons == {Reason.HIT_DEVICE: 64, Reason.BELOW_GRID: 6}
    sim.planner.reasons.clear()
    sim.reset()
    sim.worker.spoil = lambda copy: copy.target is Tier.DEVICE and copy.op % 2 == 0
    for name in ("one", "other"):
        ask(sim, prompt(70), name)
        sim.reset()
    assert sim.planner.reasons.total() == 140, "those of a request whose load failed, too"
    assert {Reason.HIT_HOST, Reason.FAILED_CHECK, Reason.BELOW_GRID} == {*sim.planner.reasons}
    settled(sim)


def test_blocks_of_a_request_that_ends_are_held_until_its_copies_have() -> None:
    sim = engine()
    sim.choose = lambda due: []
    sim.add("first", prompt(40), 1)
    for _ in range(6):
        sim.step()
    assert not sim.requests and any(sim.references[1:]) and sim.planner.busy()
    sim.choose = lambda due: due
    settled(sim)
    assert not sim.planner.busy()


@pytest.mark.parametrize("loaded", [False, True], ids=["under way", "loaded"])
def test_pages_of_a_load_for_a_request_that_has_not_run_go_with_the_weights(loaded: bool) -> None:
    sim = engine()
    ask(sim, prompt(70), "first")
    sim.reset()
    request = sim.add("again", prompt(70))
    if loaded:
        while "again" not in sim._received:
            sim.step()
    else:
        sim.choose = lambda due: []
        sim.step()
    assert request.external == [64] and list(sim.planner.loaded()) == ["again"] and not request.by
    sim.change()
    sim.choose = lambda due: due
    sim.run()
    assert request.by == {sim.weights} and sim.seen["failed loads"] == 1 and not sim.planner.loaded()
    sim.reset()
    assert ask(sim, prompt(70), "third") == [64], "and are saved"
    settled(sim)


def test_a_request_in_the_midst_of_which_the_weights_change_saves_nothing_more() -> None:
    storage: dict = {}  # type: ignore[type-arg]
    sim = engine(storage=storage, chunk=16)
    sim.add("first", prompt(70))
    for _ in range(3):
        sim.step()
    before = sim.worker.seen["device to host"]
    assert before
    sim.change()
    sim.run()
    assert sim.worker.seen["device to host"] <= before + len(HYBRID), "but what was under way"
    assert ask(sim, prompt(70), "again") == [], "the engine has it, of both"
    assert sim.worker.seen["device to host"] <= before + len(HYBRID), "nor of a request that rests on what it has left"
    sim.reset()
    assert ask(sim, prompt(70), "third") == []
    sim.reset()
    assert ask(sim, prompt(70), "fourth") == [64]
    settled(sim)


def test_pages_of_a_request_whose_salt_is_not_known_are_neither_read_nor_saved() -> None:
    sim = engine(storage={})
    ask(sim, prompt(70), "first")
    sim.reset()
    saved, sim.knows = sim.worker.seen["device to host"], False
    assert ask(sim, prompt(70), "second") == ask(sim, prompt(90), "third") == []
    assert sim.worker.seen["device to host"] == saved
    sim.reset()
    sim.knows = True
    assert ask(sim, prompt(70), "fourth") == [64]
    settled(sim)


def test_copies_to_a_storage_that_hangs_keep_no_engine_busy_and_go_on_beside_it() -> None:
    """vLLM can neither pause nor sleep while it is busy, and until then it steps, on and on."""
    storage: dict = {}  # type: ignore[type-arg]
    sim = engine(storage=storage)
    sim.worker.hangs = True
    ask(sim, prompt(70), "first")
    scheduler = sim.planner._scheduler
    assert not sim.planner.busy() and scheduler.core.copies.ops and not sim.planner.idle()
    sim.worker.hangs = False
    while not sim.planner.idle():
        plan = sim.planner.plan({}, {}, sim.now)
        assert not plan.held, "no block of the engine's"
        sim.worker.do(plan)
        assert not any(sim.planner.ended(Report([*map(sim.worker.end, sim.worker.due())]), sim.now))
    assert len(storage) == 4 * len(HYBRID)


@pytest.mark.parametrize("seed", [pytest.param(at, marks=pytest.mark.long if at > 12 else []) for at in range(40)])
def test_a_life_full_of_trouble_reads_no_wrong_page_and_ends_every_request(seed: int) -> None:
    """Few blocks and few host slots, prompts that share, copies that end late or fail, aborts, evictions, resets."""
    dice = random.Random(seed)
    groups = dice.choice([HYBRID, MIXED, (FULL, WINDOW), (FULL,)])
    storage: dict | None = {} if dice.random() < 0.6 else None  # type: ignore[type-arg]
    pieces = sum(PAGE // group.block_tokens for group in groups)
    sim = engine(
        groups,
        storage=storage,
        host=dice.choice([6, 16, 40]),
        blocks=pieces * dice.choice([9, 12, 20]) + 1,
        chunk=dice.choice([8, 16, 48]),
        policies=Policies(write_policy=dice.choice(["through", "back"])),
    )
    sim.choose = lambda due: [op for op in due if dice.random() < 0.5]
    sim.worker.spoil = lambda copy: dice.random() < 0.08
    for number in range(30):
        length = dice.randrange(8, 110)
        sim.add(str(number), prompt(length, dice.randrange(3)), dice.randrange(1, 20))
        for _ in range(dice.randrange(8)):
            sim.step()
            if dice.random() < 0.1 and sim.requests:
                name = dice.choice([*sim.requests])
                if sim.requests[name].status is not Status.FINISHED:
                    sim.abort(name)
            if dice.random() < 0.05 and sim.running:
                sim.preempt(dice.choice(sim.running))
            if dice.random() < 0.1:
                sim.evict(dice.randrange(20))
            if dice.random() < 0.05:
                sim.worker.hangs = storage is not None and not sim.worker.hangs
            if dice.random() < 0.05:
                sim.change()
    sim.run()
    sim.worker.hangs, sim.choose = False, lambda due: due
    settled(sim)


def test_what_is_told_of_the_host_is_what_it_has() -> None:
    """Pages come from the engine and from storage, and go when the host is full."""
    storage: dict = {}  # type: ignore[type-arg]
    told: set[tuple[int, bytes]] = set()
    for sim in (engine(storage=storage, host=8), engine(storage=storage, host=8)):
        sim.planner.take_changes()
        told.clear()
        seen = {True: 0, False: 0}
        for number in range(12):
            ask(sim, prompt(70, number % 5), str(number))
            sim.reset()
            for change in sim.planner.take_changes():
                page, here = (change.pool, change.name), isinstance(change, Stored)
                assert (page in told) != here, "a page comes before it goes, and goes before it comes again"
                (told.add if here else told.discard)(page)
                seen[here] += 1
        assert min(seen.values()) > 5
        core = sim.planner._scheduler.core
        there = sum(run.here[place].bit_count() for run in core.tree.runs() for place in range(3))
        assert len(told) == there


def test_pages_in_the_host_keep_no_request_alive() -> None:
    sim = engine()
    request = weakref.ref(sim.add("a", prompt(70, 1), 1))
    sim.run()
    assert sim.planner.take_changes()
    gc.collect()
    assert request() is None


def test_a_lookback_by_the_kind_of_group_and_what_cannot_be_paged_is_refused() -> None:
    assert lookback_of("full_attention", 128) is None
    assert lookback_of("mamba", 640) == 1
    assert lookback_of("sliding_window", 128, 128) == 1
    assert lookback_of("sliding_window", 16, 130) == 9
    with pytest.raises(ConfigError, match="'unknown'"):
        lookback_of("unknown", 16)
    with pytest.raises(ConfigError, match="multiple of 32"):
        BlockPlanner(engine((FULL,)).planner._scheduler, (FULL,), 32)


def test_a_page_that_is_a_part_of_a_block_is_a_cell_of_it_and_a_state_all_of_its_block() -> None:
    attention, state = Group(0, "attention", 40, None), Group(1, "state", 40, 1, offered=True)
    assert [attention.cells(8), attention.blocks(8), state.cells(8), state.blocks(8)] == [5, 1, 1, 1]
    row = [0, 7, 9]
    assert [attention.of(row, page, 8) for page in (0, 6, 14, 15)] == [[0], [7 * 5 + 1], [9 * 5 + 4], []]
    assert [state.of(row, page, 8) for page in (4, 5, 9, 10)] == [[0], [7], [7], [9]]
