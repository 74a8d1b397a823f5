"""Prometheus metrics: numbers in, text out. Nothing here knows where numbers are counted, or how the text is fetched.

All numbers are read at a scrape, so counting costs the engine only its own additions.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvarve.core.reasons import HITS, Reason
from kvarve.model import Tier
from kvarve.storage.base import StorageUsage

# Seconds. A warm prompt takes milliseconds on a small model, a cold long one minutes on this kind of engine.
TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# The cache's counters: the name there, the metric, its labels, its meaning.
_COPIES = {"fetched": ("storage", "host"), "loaded": ("host", "device")} | {
    "backed_up": ("device", "host"),
    "stored": ("host", "storage"),
}
_PAGE_COUNTERS = {
    "failed": ("kvarve_failed_copies", "Pages whose copy between tiers failed."),
    "late": ("kvarve_late_pages", "Pages that arrived after their request had stopped waiting; kept if they fit."),
    "duplicates": ("kvarve_duplicate_pages", "Pages computed that another request had published meanwhile."),
    "uncached": ("kvarve_uncached_pages", "Pages computed that were not kept, as no device slot was free."),
    "over_share": ("kvarve_salt_share_evicted_pages", "Pages evicted since their salt had more than its share."),
    "given_up": (
        "kvarve_given_up_backups",
        "Runs of pages quarantined since their backups failed too often; retried at the next use, or after a minute.",
    ),
    "dropped_unpaying": (
        "kvarve_offload_held_back_pages",
        "Pages that left memory without having been stored, while storing paused because it did not pay.",
    ),
    "stored_bytes": ("kvarve_offload_bytes_stored", "Bytes of pages stored."),
    "used_bytes": ("kvarve_offload_bytes_used", "Bytes of pages from storage that a request resumed from."),
    "used_tokens": ("kvarve_offload_tokens_saved", "Tokens that were not computed, since storage had their pages."),
    "strays": ("kvarve_stray_answers", "Answers about copies that were not in flight."),
}


@dataclass
class Histogram:
    """How many values fell below each bound, and their sum. One thread observes, any thread reads."""

    bounds: tuple[float, ...] = TTFT_BOUNDS_S
    counts: list[int] = field(default_factory=list)  # one per bound and one for values above all
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Values at or below each bound, as Prometheus wants them."""
        names = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


@dataclass(frozen=True)
class Snapshot:
    """All numbers at one moment."""

    model: str
    version: str
    up: bool
    running: int
    waiting: int
    requests: Mapping[str, int]  # by outcome
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    preempted: int
    reasons: Mapping[Reason, int]  # tokens of prompts
    ttft_s: Histogram
    cache: Mapping[str, float]  # PrefixCache.stats()
    storage: StorageUsage | None
    storage_up: bool | None = None  # None: there is none
    tokenizing: int = 0
    connections: int | None = None
    closed_connections: Mapping[str, int] = field(default_factory=dict)  # by reason
    rejected: Mapping[str, int] = field(default_factory=dict)  # requests, by status
    ignored_fields: Mapping[str, int] = field(default_factory=dict)  # requests that had each
    keys: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by what is counted, then by the key's name
    spans: Mapping[str, int] | None = None  # by outcome; None: no traces are sent


class Metrics(Collector):
    """The registry of one server; `read` returns a snapshot for each scrape."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # else registering would take a snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield InfoMetricFamily("kvarve", "What is running.", {"version": now.version, "model": now.model})
        yield _gauge("kvarve_up", "1 while the engine can serve, 0 once it has broken.", now.up)
        yield from _requests(now)
        yield from _cache(now.cache)
        if now.storage_up is not None:
            yield _gauge("kvarve_storage_up", "1 while storage answers, 0 while it is down.", now.storage_up)
        if now.storage is not None:
            yield from _storage(now.storage)


def _requests(now: Snapshot) -> Iterator[Metric]:
    yield _by("kvarve_requests", "Requests that have ended, by outcome.", ("outcome",), now.requests)
    yield _gauge("kvarve_requests_running", "Requests being computed.", now.running)
    yield _gauge("kvarve_requests_waiting", "Requests that wait for admission or for pages from storage.", now.waiting)
    help_text = "Requests being tokenized, or waiting for that; they count as waiting, too."
    yield _gauge("kvarve_requests_tokenizing", help_text, now.tokenizing)
    yield _counter("kvarve_prompt_tokens", "Tokens of prompts of ended requests.", now.prompt_tokens)
    help_text = "Tokens of prompts of ended requests that did not have to be computed, by the tier they came from."
    cached = {tier.name.lower(): now.reasons.get(hit, 0) for tier, hit in zip(Tier, HITS, strict=True)}
    yield _by("kvarve_cached_tokens", help_text, ("tier",), cached)
    help_text = "Tokens of prompts of ended requests, by the reason why they were cached or not."
    yield _by("kvarve_explained_tokens", help_text, ("reason",), {why.value: some for why, some in now.reasons.items()})
    yield _counter("kvarve_computed_tokens", "Tokens of prompts that were computed.", now.computed_tokens)
    yield _counter("kvarve_output_tokens", "Tokens generated.", now.output_tokens)
    help_text = "Requests that were preempted; they resumed later from their cached pages."
    yield _counter("kvarve_preempted_requests", help_text, now.preempted)
    if now.connections is not None:
        yield _gauge("kvarve_connections", "Connections that are open.", now.connections)
    help_text = (
        "Connections that were closed: no headers of a request came, an answer was not read, or there were too many "
        "and these had no whole request."
    )
    yield _by("kvarve_closed_connections", help_text, ("reason",), now.closed_connections)
    help_text = "Requests that got an error, by status; 499 is a client that left before its answer began."
    yield _by("kvarve_rejected_requests", help_text, ("status",), now.rejected)
    help_text = "Requests with a field that was ignored, by field."
    yield _by("kvarve_ignored_fields", help_text, ("field",), now.ignored_fields)
    yield from _keys(now.keys)
    if now.spans is not None:
        help_text = "Spans of requests, by whether the collector of traces took them."
        yield _by("kvarve_spans", help_text, ("outcome",), now.spans)
    ttft = HistogramMetricFamily("kvarve_ttft_seconds", "Seconds from a request's arrival to its first token.")
    ttft.add_metric([], now.ttft_s.buckets(), now.ttft_s.sum)
    yield ttft


def _keys(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    told: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("requests", "Requests that an API key has sent, by the key's name.", ("key",)),
        ("prompt_tokens", "Tokens of prompts, by the name of the key that sent them.", ("key",)),
        ("output_tokens", "Tokens generated, by the name of the key that asked for them.", ("key",)),
        ("refused", "Requests that a limit of their key has refused, by key and limit.", ("key", "limit")),
    )
    if any(counts.values()):
        for name, help_text, labels in told:
            yield _by(f"kvarve_key_{name}", help_text, labels, counts[name])
        help_text = "Requests of an API key that have not ended, by the key's name."
        yield _by("kvarve_key_running", help_text, ("key",), counts["running"], gauge=True)


def _cache(stats: Mapping[str, float]) -> Iterator[Metric]:
    yield _gauge("kvarve_leases", "Requests that hold pages.", stats["leases"])
    place = ("tier", "pool")
    yield _gauge("kvarve_page_tokens", "Tokens of a page.", stats["page_tokens"])
    yield _by("kvarve_page_bytes", "Bytes of a page.", ("pool",), _under("page_bytes.", stats), gauge=True)
    help_text = "Pages before a boundary that a pool's layers still read; 0 stands for all."
    yield _by("kvarve_page_lookback", help_text, ("pool",), _under("lookback.", stats), gauge=True)
    yield _by("kvarve_slots", "Slots for pages.", place, _under("slots.", stats), gauge=True)
    yield _by(
        "kvarve_slots_used", "Slots that hold a page or are reserved for one.", place, _under("used.", stats), True
    )
    yield _by("kvarve_evicted_pages", "Pages evicted to free slots, or flushed.", place, _under("evicted.", stats))
    copies = CounterMetricFamily("kvarve_copied_pages", "Pages copied between tiers.", labels=("source", "target"))
    for name, edge in _COPIES.items():
        copies.add_metric(edge, stats[name])
    yield copies
    dropped = {reason: stats[f"dropped_{reason}"] for reason in ("failed", "evicted", "down")}
    help_text = (
        "Pages that left memory without having been stored: their stores failed too often, or were still pending, or "
        "the storage was down."
    )
    yield _by("kvarve_dropped_backup_pages", help_text, ("reason",), dropped)
    help_text = "1 while only a sample and pages used twice are stored, since storing does not pay."
    yield _gauge("kvarve_offload_paused", help_text, stats["offload_paused"])
    help_text = "Of the bytes stored lately (in a pause: of the sample), the share that was used."
    yield _gauge("kvarve_offload_used_ratio", help_text, stats["offload_used_share"])
    help_text = "1 while stores back off, since storage has failed."
    yield _gauge("kvarve_stores_backing_off", help_text, stats["stores_backing_off"])
    bad = {tier: stats[f"bad_{tier}"] for tier in ("host", "storage")}
    yield _by("kvarve_bad_pages", "Pages that failed their check when read, by their tier.", ("tier",), bad)
    for name, (metric, help_text) in _PAGE_COUNTERS.items():
        yield _counter(metric, help_text, stats[name])
    waiting, failed = _under("lane_waiting.", stats), _under("lane_failed.", stats)
    yield _by("kvarve_lane_waiting", "Copies that wait in a lane.", ("lane",), waiting, gauge=True)
    stuck = _under("lane_stuck_s.", stats)
    help_text = "Seconds for which the oldest call of a lane has been running."
    yield _by("kvarve_lane_stuck_seconds", help_text, ("lane",), stuck, gauge=True)
    plain, smaller, on = (_under(f"compress_{name}.", stats) for name in ("plain_bytes", "stored_bytes", "on"))
    yield _by("kvarve_compress_plain_bytes", "Bytes of records stored, before compression.", ("pool",), plain)
    yield _by("kvarve_compress_stored_bytes", "Bytes of the same records as they were stored.", ("pool",), smaller)
    help_text = "1 while records are compressed for storage, 0 while that does not pay."
    yield _by("kvarve_compress_on", help_text, ("pool",), on, gauge=True)
    help_text = "Copies that a lane refused, started too late or failed to do."
    yield _by("kvarve_lane_failures", help_text, ("lane",), failed)


def _storage(usage: StorageUsage) -> Iterator[Metric]:
    told: tuple[tuple[Callable[[str, str, float], Metric], str, str, float | None], ...] = (
        (_gauge, "bytes", "Bytes of objects in storage.", usage.bytes),
        (_gauge, "objects", "Objects in storage, one per page and pool.", usage.objects),
        (_gauge, "capacity_bytes", "Bytes that storage may hold.", usage.capacity_bytes),
        (_counter, "evicted_objects", "Objects that storage evicted to free space.", usage.evicted),
    )
    for kind, name, help_text, value in told:
        if value is not None:
            yield kind(f"kvarve_storage_{name}", help_text, value)


def _under(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)}


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _by(name: str, help_text: str, labels: tuple[str, ...], values: Mapping[str, float], gauge: bool = False) -> Metric:
    """A metric with labels; a key of `values` holds their values, with dots between them."""
    family = (GaugeMetricFamily if gauge else CounterMetricFamily)(name, help_text, labels=labels)
    for key, value in values.items():
        family.add_metric(key.split(".", len(labels) - 1), value)
    return family
