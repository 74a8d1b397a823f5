"""What the connector counts, as vLLM's log and Prometheus have it."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests": "Requests that asked.",
    "failed_loads": "Requests whose load failed, and whose prompt was computed.",
    "fetched": "Pages copied from storage to the host.",
    "loaded": "Pages copied from the host to the engine.",
    "backed_up": "Pages copied from the engine to the host.",
    "stored": "Pages copied from the host to storage.",
    "bad_storage": "Pages that failed their check when read from storage.",
    "bad_host": "Pages that failed their check when read from the host.",
    "failed": "Pages whose copy failed.",
    "dropped_full": "Pages that left memory unstored, as storage had no room.",
    "dropped_read_only": "Pages that left memory unstored, as storage could only be read.",
    "uncached": "Pages that were not kept, as no slot was free.",
}


@dataclass
class KvarveStats(KVConnectorStats):
    """`counts` by name and prompt tokens by their `reasons` since the last interval; `usage` of the host by group, of
    1."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        if not other.is_empty():
            sums = {}
            for name in ("counts", "reasons"):
                sums[name] = Counter(self.data.get(name, {}))
                sums[name].update(other.data.get(name, {}))
            self.data = {name: dict(sum_) for name, sum_ in sums.items()} | {"usage": other.data.get("usage", {})}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        told = {name: value for name, value in self.data.get("counts", {}).items() if value}
        return told | {f"tokens {name}": count for name, count in self.data.get("reasons", {}).items()}

    def is_empty(self) -> bool:
        return not self.data


class KvarveMetrics(KVConnectorPromMetrics):
    """The same for Prometheus: `vllm:kvarve_NAME`, `vllm:kvarve_explained_tokens{reason}` and
    `vllm:kvarve_host_usage{group}`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvarve_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._explained = self._counter_cls(
            name="vllm:kvarve_explained_tokens",
            documentation="Prompt tokens by the reason why they were cached or not.",
            labelnames=[*labelnames, "reason"],
        )
        self._usage = self._gauge_cls(
            name="vllm:kvarve_host_usage",
            documentation="Of the host's memory, the share that pages of a cache group take.",
            labelnames=[*labelnames, "group"],
            multiprocess_mode="mostrecent",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.get("counts", {}).items():
            if name in self._counters and count > 0:
                self._counters[name].labels(*values).inc(count)
        for reason, count in transfer_stats_data.get("reasons", {}).items():
            self._explained.labels(*values, reason).inc(count)
        for group, usage in transfer_stats_data.get("usage", {}).items():
            self._usage.labels(*values, group).set(usage)
