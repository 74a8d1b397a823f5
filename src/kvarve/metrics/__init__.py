"""Prometheus metrics: numbers in, text out. Nothing here knows where numbers are counted, or how the text is fetched.

All numbers are read at a scrape, so counting costs the engine only its own additions. `metric_families.py` has kvarve's
names; `foreign.py` derives those of vLLM and SGLang from the same numbers, for dashboards that were made for them.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvarve.errors import ConfigError
from kvarve.metrics import foreign
from kvarve.metrics.metric_families import own
from kvarve.metrics.snapshot import Snapshot

Families = Callable[[Snapshot], Iterator[Metric]]

# Other servers whose names may be asked for.
OTHERS: Mapping[str, Families] = {"vllm": foreign.vllm, "sglang": foreign.sglang}

__all__ = ["OTHERS", "Metrics", "Snapshot", "own", "parse_compat"]


def parse_compat(setting: str) -> tuple[str, ...]:
    """The servers that a setting such as "vllm,sglang" names. ConfigError for others."""
    names = tuple(dict.fromkeys(name.strip() for name in setting.split(",") if name.strip()))
    for name in names:
        if name not in OTHERS:
            raise ConfigError(f"metrics_compat: unknown server {name!r}; known: {', '.join(OTHERS)}")
    return names


class Metrics(Collector):
    """The registry of one server; `read` returns a snapshot for each scrape."""

    def __init__(self, read: Callable[[], Snapshot], compat: str = "") -> None:
        """`compat`: other servers under whose names numbers are told too, as `parse_compat` reads it."""
        self._read, self._families = read, [own, *(OTHERS[name] for name in parse_compat(compat))]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # else registering would take a snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        for families in self._families:
            yield from families(now)
