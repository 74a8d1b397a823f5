"""The miss ratio of every eviction order at many sizes of memory, beside what no cache of the size could do better."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvarve.core.slots.orders import ORDERS
from kvarve.errors import ConfigError
from kvarve.pages.sizes import Size
from kvarve.planner.belady import Belady, most_pages
from kvarve.planner.replayer import replayed
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.traces import TraceRequest
from kvarve.reports import pyplot

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
