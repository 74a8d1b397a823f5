"""All numbers of a server at one moment, and the sums over them that several metrics show."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvarve.core.observe.histograms import Ages, Histogram
from kvarve.core.observe.reasons import HITS, Reason
from kvarve.storage.base import StorageUsage
from kvarve.transfer.flows import Flow

DONE = ("stop", "length")  # why a request has ended that was answered in full


@dataclass(frozen=True)
class Snapshot:
    model: str
    version: str
    up: bool
    prompt_tokens: int
    reasons: Mapping[Reason, int]  # tokens of prompts
    cache: Mapping[str, float]  # PrefixCache.stats()
    ages: Ages
    flows: Mapping[str, Flow]  # by lane
    storage: StorageUsage | None = None
    storage_up: bool | None = None  # None: there is none
    storage_kinds: tuple[str, ...] = ()  # schemes of its URLs, nearest first
    dtype: str = ""
    ours: bool = True  # the engine, of whose requests the rest tells
    histograms: Mapping[str, Histogram] = field(default_factory=dict)  # those of `EngineCounts`, by name
    running: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)  # by what they wait for
    ends: Mapping[str, int] = field(default_factory=dict)  # requests, by why they ended
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preempted: int = 0
    output_rate: float = 0.0  # tokens a second, lately
    hit_rate: float = 0.0  # of the tokens of prompts admitted lately, the share that was cached
    tokenizing: int = 0
    connections: int | None = None
    closed_connections: Mapping[str, int] = field(default_factory=dict)  # by reason
    responses: Mapping[tuple[str, str, int], int] = field(default_factory=dict)  # by method, route and status
    ignored_fields: Mapping[str, int] = field(default_factory=dict)  # requests that had each
    spans: Mapping[str, int] | None = None  # by outcome; None: no traces are sent

    def under(self, prefix: str) -> dict[str, float]:
        """The figures of the cache whose names begin with a prefix, by the rest of their names."""
        return {name[len(prefix) :]: value for name, value in self.cache.items() if name.startswith(prefix)}

    @property
    def chain(self) -> str:
        """The first pool of which a prompt needs all pages: its pages count tokens. "" if there is none."""
        return next((pool for pool, pages in self.under("lookback.").items() if not pages), "")

    def tokens(self, pages: Mapping[str, float]) -> float:
        """The tokens of pages by pool."""
        return pages.get(self.chain, 0) * self.cache["page_tokens"]

    def cached(self, tier: str) -> int:
        """Tokens of prompts that came from a tier."""
        return self.reasons.get(next(hit for hit in HITS if hit.value == f"hit_{tier}"), 0)

    def in_bytes(self, what: str, tier: str) -> dict[str, float]:
        """ "used" or "pinned" slots of a tier as bytes, by pool."""
        size = self.under(f"slot_bytes.{tier}.")
        return {pool: count * size[pool] for pool, count in self.under(f"{what}.{tier}.").items()}

    def share(self, what: str, tier: str) -> float:
        """The same as a share of the tier."""
        total = self.cache.get(f"memory_bytes.{tier}", 0)
        return min(1.0, sum(self.in_bytes(what, tier).values()) / total) if total else 0.0

    @property
    def tiers(self) -> Iterator[str]:
        return iter(self.under("memory_bytes."))
