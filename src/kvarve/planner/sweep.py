"""The hit rate of every eviction order at many sizes of a tier, beside the most that any cache of the size could hit.

That is Belady's rule, for pages that form prefix chains. Between two uses of a page it either stays, and the second use
hits, or it does not; at no time do more pages stay than fit. Whenever too many would, the page whose next use is
furthest away is dropped; among equals the deepest of a prompt, so that the pages that stay are prefixes.
docs/planning.md proves that nothing hits more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, get_args

from kvarve.core.policies import Order
from kvarve.errors import ConfigError
from kvarve.pages.pools import Tier
from kvarve.pages.sizes import Size, format_size
from kvarve.planner.charts import INK, chart, line, mark
from kvarve.planner.replayer import replayed
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.traces import Infinite, TraceRequest
from kvarve.records.record import record_bytes

NEVER = 1 << 62
PAYS = 0.01  # of prompt tokens: more memory that hits less than that does not pay
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of what all pages of a trace take
COMPARED = tuple(name for name in get_args(Order) if name != "priority")  # traces know no priorities: it would be LRU


@dataclass(frozen=True)
class Point:
    """One size of a tier: the share of prompt tokens that each order hits, and the most that any can."""

    share: float
    memory: int
    hit: dict[str, float]
    bound: float


def swept(config: SimulationConfig) -> Tier:
    """The tier whose size a sweep chooses: the first one that has none."""
    for tier in Tier:
        if not getattr(config, f"{tier.name.lower()}_memory"):
            return tier
    raise ConfigError("--sweep needs a tier to size: leave out --storage-memory, or --host-memory with it")


def sized(config: SimulationConfig, tier: Tier, memory: float) -> SimulationConfig:
    """With this much memory in a tier."""
    size: dict[str, Any] = {f"{tier.name.lower()}_memory": Size(max(1, int(memory)))}
    return replace(config, **size)


class Workload:
    """The requests of a trace, and what all of their pages and states take."""

    def __init__(self, requests: Sequence[TraceRequest], config: SimulationConfig) -> None:
        self.requests, self.config = requests, config
        self.tokens = max(1, sum(request.input_length for request in requests))
        self.belady = Belady(requests, config.block_tokens, config.page_tokens)
        states = sum(pool.payload_bytes * pool.lookback for pool in config.pools if pool.lookback is not None)
        pages = sum(pool.payload_bytes for pool in config.pools if pool.lookback is None)
        self.footprint = self.belady.pages * pages + len(requests) * states  # a snapshot at each prompt's end
        infinite = Infinite(config.block_tokens)
        self.infinite = sum(infinite.hit(request) for request in requests) / self.tokens

    def hit(self, config: SimulationConfig) -> float:
        """The share of prompt tokens that a replay hits."""
        return replayed(self.requests, config).hit_rate

    def bound(self, config: SimulationConfig) -> float:
        """The largest share of prompt tokens that any cache of these sizes can hit."""
        return self.belady.hit_tokens(most_pages(config)) / self.tokens


def sweep(
    requests: Sequence[TraceRequest], config: SimulationConfig, done: Callable[[], None] = lambda: None
) -> Iterator[Point]:
    """One point after the other, smallest memory first; sizes too small for the model are left out."""
    load, tier, found = Workload(requests, config), swept(config), False
    for share in SHARES:
        try:
            given = sized(config, tier, share * load.footprint / (1 if tier is Tier.STORAGE else config.replicas))
            given.core()
        except ConfigError:
            continue
        found, hit = True, {}
        for order in COMPARED:
            hit[order] = load.hit(replace(given, policies=replace(config.policies, eviction=order)))
            done()
        yield Point(share, getattr(given, f"{tier.name.lower()}_memory"), hit, load.bound(given))
    if not found:
        raise ConfigError("the trace must be larger: even memory for all of its pages is too little for this model")


def pays_until(points: Sequence[Point]) -> Point:
    """The first point from which on more memory hits less than `PAYS` more."""
    best = [max(point.hit.values()) for point in points]
    return next(point for point, hit in zip(points, best, strict=True) if best[-1] - hit < PAYS)


def draw(points: Sequence[Point], tier: Tier, title: str, path: Path) -> None:
    """Hit rates over memory."""
    lines = {order: [point.hit[order] for point in points] for order in COMPARED}
    sizes, pays = [point.memory for point in points], pays_until(points)
    with chart(path, title, f"{tier.name.lower()} memory") as axes:
        for order, hit in lines.items():
            line(axes, sizes, hit, order)
        line(axes, sizes, [point.bound for point in points], "Belady's bound", color=INK, linestyle="--", marker="")
        mark(axes, pays.memory, f"{format_size(pays.memory)}: more adds < {PAYS:.0%}")


class Belady:
    """The uses of every page of a trace."""

    def __init__(self, requests: Sequence[TraceRequest], block_tokens: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        numbers: dict[tuple[int, int], int] = {}
        self._paths: list[list[int]] = []
        for request in requests:
            # The id of the block in which a page ends names all tokens before that end, and those of the page.
            ends = range(page_tokens, request.input_length + 1, page_tokens)
            ids = request.ids
            names = [(ids[(end - 1) // block_tokens], end) for end in ends if (end - 1) // block_tokens < len(ids)]
            self._paths.append([numbers.setdefault(name, len(numbers)) for name in names])
        # Of each page of each request, the next one that may hit it: at least one token of a prompt is computed.
        self._next: list[list[int]] = [[] for _ in requests]
        ahead = [NEVER] * len(numbers)
        for at in range(len(requests) - 1, -1, -1):
            path, most = self._paths[at], (requests[at].input_length - 1) // page_tokens
            self._next[at] = [ahead[page] for page in path]
            for page in path[:most]:
                ahead[page] = at
            for page in path[most:]:
                ahead[page] = NEVER
        self.pages = len(numbers)

    def hit_tokens(self, pages: float) -> int:
        """The most tokens that a cache of so many pages can hit."""
        stays: dict[int, int] = {}  # pages, and their next use
        furthest: list[tuple[int, int, int]] = []
        hits = 0
        for at, (path, following) in enumerate(zip(self._paths, self._next, strict=True)):
            for depth, (page, then) in enumerate(zip(path, following, strict=True)):
                hits += stays.pop(page, -1) == at
                if then < NEVER:
                    stays[page] = then
                    if pages < inf:
                        heappush(furthest, (-then, -depth, page))
            while len(stays) > pages:
                then, _, page = heappop(furthest)
                if stays.get(page) == -then:
                    del stays[page]
        return hits * self.page_tokens


def most_pages(config: SimulationConfig) -> float:
    """The most pages of a chain that all tiers of all replicas can have together."""
    pools, core = config.pools, config.core()
    chains = [number for number, pool in enumerate(pools) if pool.lookback is None]
    if not chains:
        return inf
    pages = 0
    for slots in core.slots.values():
        # Where pools share a tier, or divide it, all of its bytes could be the chain's: but for a window or a state.
        pages += min(slots[chain] if isinstance(slots, tuple) else slots.slots(chain) for chain in chains)
    record = sum(record_bytes(pools[chain].payload_bytes) for chain in chains)
    return config.replicas * pages + config.storage_memory // record
