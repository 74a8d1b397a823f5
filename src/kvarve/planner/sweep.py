"""The miss ratio of every eviction order at many sizes of memory, beside what no cache of the size could do better.

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
from typing import Any

from kvarve.core.slots.orders import ORDERS
from kvarve.errors import ConfigError
from kvarve.pages.sizes import Size
from kvarve.planner.replayer import replayed
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.traces import TraceRequest
from kvarve.records.record import record_bytes

NEVER = 1 << 62
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of what all pages of a trace take
COMPARED = tuple(name for name in ORDERS if name != "priority")  # traces know no priorities: it would be LRU


@dataclass(frozen=True)
class Point:
    """One size of device memory: the share of prompt tokens that each order misses, and the least that any can."""

    share: float
    device_memory: int
    missed: dict[str, float]
    bound: float


def sweep(
    requests: Sequence[TraceRequest], config: SimulationConfig, done: Callable[[], None] = lambda: None
) -> Iterator[Point]:
    """One point after the other, smallest memory first; sizes too small for the model are left out."""
    tokens = max(1, sum(request.input_length for request in requests))
    belady = Belady(requests, config.block_tokens, config.page_tokens)
    states = sum(pool.payload_bytes * pool.lookback for pool in config.pools if pool.lookback is not None)
    pages = sum(pool.payload_bytes for pool in config.pools if pool.lookback is None)
    footprint = (belady.pages * pages + len(requests) * states) / config.replicas  # a snapshot at each prompt's end
    found = False
    for share in SHARES:
        try:
            sized = replace(config, device_memory=Size(max(1, int(share * footprint))))
        except ConfigError:
            continue
        found, missed = True, {}
        for order in COMPARED:
            policies = replace(config.policies, eviction=order)
            missed[order] = 1 - replayed(requests, replace(sized, policies=policies)).hit_rate
            done()
        yield Point(share, sized.device_memory, missed, 1 - belady.hit_tokens(most_pages(sized)) / tokens)
    if not found:
        raise ConfigError("the trace is too small: even memory for all of its pages is too little for this model")


def pyplot() -> Any:
    """matplotlib's, which draws into files. It is slow to import, and ImportError says that it is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Miss ratios over memory."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    sizes = [point.device_memory / 1e9 for point in points]
    for order in COMPARED:
        axes.plot(sizes, [100 * point.missed[order] for point in points], marker="o", markersize=3, label=order)
    axes.plot(sizes, [100 * point.bound for point in points], "k--", linewidth=1, label="Belady's bound")
    axes.set(xscale="log", xlabel="device memory, GB", ylabel="missed, % of prompt tokens", title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


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
