"""How much host memory and storage does a target take? Replays at many sizes, and closer around the answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvarve.errors import ConfigError
from kvarve.pages.pools import Tier
from kvarve.pages.sizes import format_size
from kvarve.planner.charts import INK, chart, line, mark
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.sweep import Workload, sized
from kvarve.planner.traces import TraceRequest

SHARES = (0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.1)  # of what all pages of a trace take, and a record's header
MOST = 1 << 60  # bytes
CLOSER = 3  # halvings of the factor between two sizes, in which the answer is
REPLAYS = 2 + 2 * (len(SHARES) + CLOSER)


@dataclass(frozen=True)
class Plan:
    """Hit rates are shares of all prompt tokens. `needed` is the target's share of `reachable`, that of memory for
    everything; `host` alone reaches it, or `beside` of host memory and `storage`, unless `device` does."""

    target: float
    reachable: float
    infinite: float
    device: float
    needed: float
    host: int
    beside: int
    storage: int
    by_host: list[tuple[int, float, float]]  # host memory, its hit rate, and the most of any cache of that size
    by_storage: list[tuple[int, float, float]]  # the same of storage beside it

    @property
    def sentence(self) -> str:
        goal = f"{self.target:.0%} of what unlimited host memory hits with this device, {self.reachable:.1%}"
        if self.device >= self.needed:
            return (
                f"The device alone hits {self.device:.1%} of prompt tokens; the target is {self.needed:.1%} ({goal})."
            )
        beside = f", or {format_size(self.beside)} of it, as the device has, and {format_size(self.storage)} of storage"
        return (
            f"To hit {self.needed:.1%} of prompt tokens ({goal}) takes {format_size(self.host)} of host memory"
            f"{beside if self.beside < self.host else ''}; the device alone hits {self.device:.1%}."
        )


def plan(
    requests: Sequence[TraceRequest],
    config: SimulationConfig,
    target: float,
    done: Callable[[], None] = lambda: None,
) -> Plan:
    """Device memory is given; ConfigError if it is too small for the model, or the trace for a plan."""
    load = Workload(requests, config)
    if not load.infinite:
        raise ConfigError("the trace needs prompts that share a beginning: no memory hits any of these")

    def replay(given: SimulationConfig) -> tuple[float, float]:
        hit = load.hit(given)
        done()
        return hit, load.bound(given)

    everything = max(config.device_memory, int(SHARES[-1] * load.footprint))
    while not _fits(config, everything) and everything < MOST:  # a trace may take less than the model's smallest host
        everything *= 2
    reachable = replay(sized(config, Tier.HOST, everything))[0]
    device = replay(config)[0]
    needed = target * reachable

    def least(tier: Tier, base: SimulationConfig) -> tuple[int, list[tuple[int, float, float]]]:
        """The least memory of a tier that reaches the target, and what was tried, smallest first."""
        tried: dict[int, tuple[float, float]] = {}

        def attempt(size: float) -> float:
            if tier is Tier.HOST and not _fits(base, size):
                done()
                return 0.0
            tried[int(size)] = replay(sized(base, tier, size))
            return tried[int(size)][0]

        sizes = [share / SHARES[-1] * everything * (config.replicas if tier is Tier.STORAGE else 1) for share in SHARES]
        low, high = 0.0, sizes[-1]
        for size in sizes:
            if attempt(size) < needed:
                low = size
            elif size < high:
                high = size
        for _ in range(CLOSER if low < high else 0):
            middle = (low * high) ** 0.5 if low else high / 2
            if attempt(middle) < needed:
                low = middle
            else:
                high = middle
        return int(high), [(size, *tried[size]) for size in sorted(tried)]

    host, by_host = least(Tier.HOST, config)
    beside = min(host, config.device_memory)  # a small one
    beside = beside if _fits(config, beside) else host
    storage, by_storage = least(Tier.STORAGE, sized(config, Tier.HOST, beside))
    return Plan(target, reachable, load.infinite, device, needed, host, beside, storage, by_host, by_storage)


def _fits(config: SimulationConfig, host: float) -> bool:
    """Whether so much host memory is enough for the model."""
    try:
        sized(config, Tier.HOST, host)
    except ConfigError:
        return False
    return True


def draw(made: Plan, title: str, path: Path) -> None:
    """Hit rates over host memory, and over storage beside a small host."""
    with chart(path, title, "host memory, or storage beside it") as axes:
        for label, points in (
            ("host alone", made.by_host),
            (f"storage, host {format_size(made.beside)}", made.by_storage),
        ):
            line(axes, [size for size, _, _ in points], [hit for _, hit, _ in points], label)
        sizes, bounds = [size for size, _, _ in made.by_host], [bound for _, _, bound in made.by_host]
        line(axes, sizes, bounds, "Belady's bound (host)", color=INK, linestyle="--", marker="")
        axes.axhline(100 * made.infinite, color=INK, linewidth=1)
        axes.annotate("infinite cache", (made.by_host[0][0], 100 * made.infinite), (0, 3), textcoords="offset points")
        if made.device < made.needed:
            mark(axes, made.host, f"host alone: {format_size(made.host)}")
            mark(axes, made.storage, f"storage: {format_size(made.storage)}", right=True)
