"""Requests go through cores, in the order of their time, and a report says what they hit.

Where no speed is given, copies and computing take no time, so the figures show the effect of the tree, the eviction
order and the memory sizes, but not of waiting. With speeds, a replica computes one prompt at a time, in the order in
which they came; copies of one kind follow one another; pages are fetched from storage while their request waits for its
turn.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from kvarve.core.copies.effects import Began, Copy, Ended, Event, Hurry, Page, Probe, Refusal, Transfer
from kvarve.core.core import Core
from kvarve.core.lease import Ask, Lease, Prompt
from kvarve.core.observe.reasons import Reason, explain
from kvarve.core.policies import WAIT_COMPLETE
from kvarve.pages.keys import TOKEN_BYTES, bind_to_chunk, object_name, root_key
from kvarve.pages.pools import PoolSpec, Tier
from kvarve.planner.routing import PrefixRouter
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.traces import Advance, Infinite, Prompts, TraceRequest, block_size, read_trace
from kvarve.records.record import record_bytes
from kvarve.storage.base import LruIndex

MODEL = b"kvarve-simulate"
SEED = 7  # of random routing


@dataclass
class SimulationReport:
    """The result of a replay. `infinite_hit_tokens`: the hits of a cache of full blocks that never evicts."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys((tier.name.lower() for tier in Tier), 0))
    reasons: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Reason})  # of all tokens
    infinite_hit_tokens: int = 0
    cost: float = 0.0  # of computing all prompts, in pages at a prompt's beginning
    saved_cost: float = 0.0  # of the pages that hits saved
    unique_blocks: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("exists", "get", "put"), 0))
    storage_price: float | None = None  # of these and of the bytes that were read, if their prices are given
    uncached_pages: int = 0
    stored_bytes: int = 0
    used_bytes: int = 0  # of pages from storage that a request resumed from
    paused_requests: int = 0  # while storing paused, since it did not pay
    by_replica: list[int] = field(default_factory=list)  # requests
    ttfts: list[float] = field(default_factory=list, repr=False)  # seconds from arrival to the end of prefill, if timed

    @property
    def hit_rate(self) -> float:
        """Tokens found in any tier, of all prompt tokens."""
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)

    @property
    def infinite_hit_rate(self) -> float:
        return self.infinite_hit_tokens / max(1, self.prompt_tokens)

    @property
    def saved_rate(self) -> float:
        return self.saved_cost / max(1.0, self.cost)

    @property
    def ttft_s(self) -> dict[str, float]:
        """Mean and quantiles; empty where computing takes no time."""
        ordered = sorted(self.ttfts)
        if not ordered:
            return {}
        quantiles = {f"p{part}": ordered[part * (len(ordered) - 1) // 100] for part in (50, 90, 99)}
        return {"mean": fmean(ordered)} | quantiles

    def as_json(self) -> dict[str, Any]:
        derived = ("hit_rate", "infinite_hit_rate", "saved_rate", "ttft_s")
        row = asdict(self) | {name: getattr(self, name) for name in derived}
        del row["ttfts"]
        return row


class Transfers:
    """Copies of names alone, to and from a storage with LRU eviction."""

    def __init__(self, pools: tuple[PoolSpec, ...], storage: LruIndex, report: SimulationReport) -> None:
        self._names = [pool.name for pool in pools]
        self._payloads = [pool.payload_bytes for pool in pools]
        self._records = [record_bytes(pool.payload_bytes) for pool in pools]
        self.storage, self.moved_bytes, self.asked = storage, report.moved_bytes, report.asked

    def nbytes(self, effect: Transfer) -> int:
        """That a transfer moves, if all of its pages are there."""
        if isinstance(effect, Probe):
            return 0
        sizes = self._records if Tier.STORAGE in (effect.source, effect.target) else self._payloads
        return sum(sizes[page.pool] for page in effect.pages)

    def answer(self, effect: Transfer) -> Ended:
        if isinstance(effect, Probe):
            self.asked["exists"] += len(effect.pages)
            return Ended(effect.op, self._there([self._name(effect.root, page) for page in effect.pages]))
        sizes, good = self._payloads, (1 << len(effect.pages)) - 1
        if Tier.STORAGE in (effect.source, effect.target):
            sizes = self._records
            good = self._store(effect) if effect.target is Tier.STORAGE else self._fetch(effect)
        edge = f"{effect.source.name}_to_{effect.target.name}".lower()
        moved = sum(sizes[page.pool] for i, page in enumerate(effect.pages) if good >> i & 1)
        self.moved_bytes[edge] = self.moved_bytes.get(edge, 0) + moved
        full = effect.target is Tier.STORAGE and good + 1 < 1 << len(effect.pages)
        return Ended(effect.op, good, refused=Refusal.FULL if full else Refusal.NONE)

    def _name(self, root: bytes, page: Page) -> str:
        return object_name(root, page.key, self._names[page.pool])

    def _there(self, names: list[str]) -> int:
        return sum(1 << i for i, name in enumerate(names) if name in self.storage.entries)

    def _fetch(self, copy: Copy) -> int:
        names = [self._name(copy.root, page) for page in copy.pages]
        self.asked["get"] += len(names)
        self.storage.touch(names)
        return self._there(names)

    def _store(self, copy: Copy) -> int:
        """As a storage backend does it: an object that exists is kept, and no page evicts one of its own batch."""
        good, mine = 0, dict[str, None]()
        for i, page in enumerate(copy.pages):
            name, size = self._name(copy.root, page), self._records[page.pool]
            if name not in self.storage.entries:
                victims = self.storage.victims(size, mine)
                if victims is None:
                    continue
                for victim in victims:
                    self.storage.drop(victim)
                self.storage.evicted += len(victims)
                self.storage.add(name, size)
                self.asked["put"] += 1
                mine[name] = None
            good |= 1 << i
        self.storage.touch([*mine])
        return good


class Clock:
    """What happens later, in the order of its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, time: float, work: Callable[[], None]) -> None:
        heappush(self._later, (time, next(self._number), work))

    def until(self, time: float) -> None:
        """Let everything happen that comes before, or at, a time."""
        while self._later and self._later[0][0] <= time:
            self.now, _, work = heappop(self._later)
            work()
        self.now = max(self.now, time) if time < inf else self.now


class Replica:
    """One server: a core, its copies, and the requests that wait for it."""

    def __init__(self, config: SimulationConfig, clock: Clock, storage: LruIndex, report: SimulationReport) -> None:
        self.core, self.work, self.requests = Core(config.core()), 0, 0
        self._config, self._clock, self._report = config, clock, report
        self._transfers = Transfers(self.core.pools, storage, report)
        self._patience = config.policies.patience() if config.late else WAIT_COMPLETE
        self._waiting: deque[tuple[TraceRequest, int, float, Lease]] = deque()
        below = Reason.EVICTED_HOST if config.host_memory else Reason.EVICTED_DEVICE
        self._gone = Reason.EVICTED_STORAGE if config.storage_memory else below
        self._computing = False
        self._chunk = config.grid // config.page_tokens  # pages
        self._flying = 0  # transfers that take time
        self._free_at: dict[tuple[Tier, Tier], float] = {}  # when the last copy of a kind ends

    def take(self, request: TraceRequest, seen: int, root: bytes, packed: bytes) -> None:
        """A request has come, of whose tokens earlier ones had `seen`."""
        self.requests += 1
        lease = self.core.open(Prompt(root, packed), self._clock.now, Ask(self._patience))
        self._waiting.append((request, seen, self._clock.now, lease))
        if len(self._waiting) > 1 or self._computing:
            self._settle()  # its pages are fetched meanwhile
        self._go_on()

    def _go_on(self) -> None:
        """Claim and compute the requests that wait, until one of them has to wait for a copy or for its own end."""
        while self._waiting and not self._computing:
            request, seen, came, lease = self._waiting[0]
            if not self.core.claim(lease, self._clock.now):
                if self._step() or not self._flying:
                    continue
                if (ends := self.core.patience_ends()) < inf:
                    self._clock.at(ends, self._time_passed)
                return
            self._waiting.popleft()
            self._count(request, seen, lease)
            if speed := self._config.prefill_tokens_per_s:
                self._computing = True
                computed = request.input_length - lease.boundary * self._config.page_tokens
                self._clock.at(self._clock.now + computed / speed, partial(self._end, lease, came))
            else:
                self._finish(lease)

    def _end(self, lease: Lease, came: float) -> None:
        """A prompt has been computed, which took time."""
        self._computing = False
        self._report.ttfts.append(self._clock.now - came)
        self._finish(lease)
        self._go_on()

    def _finish(self, lease: Lease) -> None:
        core = self.core
        chunk, pages = self._chunk, lease.pages
        chunks = range(lease.done + chunk, pages, chunk) if core.evictions.has_room(lease.root) else ()
        for upto in (*chunks, pages):
            core.growth.grow(lease, min(upto, lease.pages) // chunk * chunk)  # pages are kept in whole chunks
        core.growth.publish(lease, lease.grown)
        core.close(lease)
        self._settle()
        resting = 0  # steps in a row that ended nothing: stores that were refused back off, and no time passes here
        while not core.idle() and not self._flying and resting < 2:
            resting = 0 if self._step() else resting + 1
        self._report.paused_requests += core.governor.paused

    def _count(self, request: TraceRequest, seen: int, lease: Lease) -> None:
        """A request begins to compute: that is what it resumed from. A core may have forgotten what left long ago; the
        trace has not."""
        report, page = self._report, self._config.page_tokens
        for tier, pages in zip(Tier, lease.from_tiers(), strict=True):
            report.hit_tokens[tier.name.lower()] += pages * page
        reasons = Counter(explain(lease, self.core.paths))
        if unknown := reasons.pop(Reason.UNKNOWN, 0):  # at the end of what could be hit
            last = lease.limit * page // self._config.grid * self._config.grid
            reasons[Reason.NEVER_SEEN] += (new := min(unknown, max(0, last - seen)))
            reasons[self._gone] += unknown - new
        for reason, tokens in reasons.items():
            report.reasons[reason.value] += tokens
        report.cost += self._config.cost(request.input_length // page)
        report.saved_cost += self._config.cost(lease.boundary)
        self.work += request.input_length - lease.boundary * page

    # --- transfers

    def _settle(self) -> None:
        """Let the core ask for all that it can ask for now."""
        while self._step():
            pass

    def _step(self) -> bool:
        """Begin the copies that the core asks for; returns whether any has ended at once."""
        ended = [end for each in self.core.take() if not isinstance(each, Hurry) for end in self._begin(each)]
        self.core.step(ended, self._clock.now)
        return bool(ended)

    def _begin(self, effect: Transfer) -> list[Event]:
        """The answer to a transfer that takes no time; none if it ends later."""
        edge = (Tier.STORAGE, Tier.HOST) if isinstance(effect, Probe) else (effect.source, effect.target)
        storage = Tier.STORAGE in edge
        speed = self._config.storage_bytes_per_s if storage else self._config.host_bytes_per_s
        nbytes = self._transfers.nbytes(effect)
        if not speed or not nbytes:
            return [self._transfers.answer(effect)]
        begins = max(self._clock.now, self._free_at.get(edge, 0.0))
        self._free_at[edge] = ends = begins + nbytes / speed
        self._flying += 1
        self._clock.at(ends, lambda: self._ended(effect))
        if begins > self._clock.now:
            self._clock.at(begins, lambda: self.core.step([Began(effect.op)], self._clock.now))
            return []
        return [Began(effect.op)]

    def _ended(self, effect: Transfer) -> None:
        self._flying -= 1
        self.core.step([self._transfers.answer(effect)], self._clock.now)
        self._time_passed()

    def _time_passed(self) -> None:
        self._settle()
        self._go_on()


def replay(
    trace_path: str | Path,
    config: SimulationConfig,
    *,
    limit: int | None = None,
    advance: Advance = lambda done, size: None,
) -> SimulationReport:
    """Run a trace, or its first `limit` requests, through new cores; ConfigError if it is not a trace."""
    requests, config = requests_of(Path(trace_path), config, limit, advance)
    return replayed(requests, config)


def requests_of(
    path: Path, config: SimulationConfig, limit: int | None = None, advance: Advance = lambda done, size: None
) -> tuple[Iterable[TraceRequest], SimulationConfig]:
    """The first requests of a trace, and the settings with the size of its blocks."""
    if (said := block_size(path, config.page_tokens)) is not None:
        config = replace(config, block_tokens=said)
    return islice(read_trace(path, config.block_tokens, advance), limit), config


def replayed(requests: Iterable[TraceRequest], config: SimulationConfig) -> SimulationReport:
    """Run requests, in the order of their time, through new cores."""
    report, clock, storage = SimulationReport(), Clock(), LruIndex(config.storage_memory)
    replicas = [Replica(config, clock, storage, report) for _ in range(config.replicas)]
    by_prefix, dice = PrefixRouter(), random.Random(SEED) if config.routing == "random" else None
    prompts, infinite = Prompts(config.block_tokens), Infinite(config.block_tokens)
    for request in requests:
        clock.until(request.timestamp_ms / 1000)
        packed = bind_to_chunk(prompts.packed(request), config.page_tokens, config.grid)
        root = root_key(MODEL + request.salt.encode(errors="surrogatepass"))
        if len(replicas) == 1:
            chosen = 0
        elif dice is not None:
            chosen = dice.randrange(len(replicas))
        else:
            chosen = by_prefix.choose(root, packed, [TOKEN_BYTES * each.work for each in replicas])
        seen = infinite.hit(request)
        replicas[chosen].take(request, seen, root, packed)
        report.requests += 1
        report.prompt_tokens += request.input_length
        report.output_tokens += request.output_length
        report.infinite_hit_tokens += seen
    clock.until(inf)
    report.unique_blocks = len(infinite.seen)
    report.by_replica = [each.requests for each in replicas]
    for core in (each.core for each in replicas):
        report.uncached_pages += core.counters.uncached
        report.stored_bytes += core.counters.stored_bytes
        report.used_bytes += core.counters.used_bytes
        for place, capacity in enumerate(core.slot_pools.capacity):
            if capacity:  # where pools share a tier, what they have in the end
                name = f"{Tier(place // len(core.pools)).name.lower()}.{core.pools[place % len(core.pools)].name}"
                for counts, pages in (
                    (report.slots, core.slot_pools.committed(place)),
                    (report.evicted, core.residency.evicted[place]),
                ):
                    counts[name] = counts.get(name, 0) + pages
    if config.storage_memory:
        report.evicted["storage"] = storage.evicted
    if config.prices:
        put, ask, byte = config.prices
        read, asked = report.moved_bytes.get("storage_to_host", 0), report.asked
        report.storage_price = asked["put"] * put + (asked["get"] + asked["exists"]) * ask + read * byte
    return report
