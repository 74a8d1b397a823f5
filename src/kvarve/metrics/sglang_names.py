"""SGLang's metrics from kvarve's numbers, so that dashboards made for SGLang show a server of ours. Its HiCache's host
is ours, its storage too; a "mamba state" is a page of recurrent states."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvarve.core.observe.reasons import Reason
from kvarve.metrics.foreign import Row, told
from kvarve.metrics.snapshot import Snapshot

COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
LOAD, BACKUP, FETCH, STORE = "host-to-device", "device-to-host", "storage-to-host", "host-to-storage"
PER_GIGABYTE = 1e-9
# Tokens whose pages a request asked storage for, or was to wait for, and did without.
UNFULFILLED = (Reason.TOO_LATE, Reason.FAILED_CHECK, Reason.EVICTED_STORAGE)


def _host(what: str) -> Callable[[Snapshot], float]:
    return lambda now: now.tokens(now.under(f"{what}.host."))


def _states(what: str) -> Callable[[Snapshot], float | None]:
    return lambda now: now.cache.get(f"{what}.host.state")


def _copied(lane: str) -> Callable[[Snapshot], float]:
    return lambda now: now.tokens(now.flows[lane].pages)


def _by_source(now: Snapshot) -> Mapping[str, float]:
    tiers = {tier: now.cached(tier) for tier in ("device", "host", "storage")}
    return tiers | {"total": sum(tiers.values())}


ROWS = (
    Row("num_running_reqs", GAUGE, lambda now: now.running, "Requests being computed."),
    Row("num_queue_reqs", GAUGE, lambda now: sum(now.waiting.values()), "Requests that wait."),
    Row("token_usage", GAUGE, lambda now: now.share("pinned", "device"), "Share of the device in use, 0 to 1."),
    Row("cache_hit_rate", GAUGE, lambda now: now.hit_rate, "Share of the tokens admitted lately that were cached."),
    Row("gen_throughput", GAUGE, lambda now: now.output_rate, "Tokens of answers a second, lately."),
    Row("time_to_first_token_seconds", HISTOGRAM, lambda now: now.histograms["ttft_s"], "Seconds to the first token."),
    Row("e2e_request_latency_seconds", HISTOGRAM, lambda now: now.histograms["e2e_s"], "Seconds to the last token."),
    Row(
        "inter_token_latency_seconds",
        HISTOGRAM,
        lambda now: now.histograms["inter_token_s"],
        "Seconds between two tokens.",
    ),
    Row("prompt_tokens", COUNTER, lambda now: now.prompt_tokens, "Tokens of prompts."),
    Row("generation_tokens", COUNTER, lambda now: now.output_tokens, "Tokens of answers."),
    Row("cached_tokens", COUNTER, _by_source, "Tokens of prompts that were not computed, by tier.", "cache_source"),
    Row(
        "evicted_tokens", COUNTER, lambda now: now.tokens(now.under("evicted.device.")), "Tokens that left the device."
    ),
    Row("load_back_tokens", COUNTER, _copied(LOAD), "Tokens copied from host to device."),
    Row("hicache_host_used_tokens", GAUGE, _host("used"), "Tokens whose pages the host has."),
    Row("hicache_host_total_tokens", GAUGE, _host("most"), "Tokens for which the host can have slots."),
    Row("hicache_host_mamba_used_states", GAUGE, _states("used"), "Recurrent states that the host has."),
    Row("hicache_host_mamba_total_states", GAUGE, _states("most"), "Recurrent states for which it can have slots."),
    Row("hicache_backup_tokens", COUNTER, _copied(BACKUP), "Tokens copied from device to host."),
    Row("hicache_backup_bytes", COUNTER, lambda now: now.flows[BACKUP].bytes.sum, "Bytes of these copies."),
    Row("prefetched_tokens", COUNTER, _copied(FETCH), "Tokens copied from storage to host."),
    Row("backuped_tokens", COUNTER, _copied(STORE), "Tokens copied from host to storage."),
    Row(
        "storage_prefetch_hit_tokens",
        COUNTER,
        lambda now: now.cache["fetching_tokens"],
        "Tokens whose pages storage had, of fetches that were begun.",
    ),
    Row(
        "storage_prefetch_deferred_tokens",
        COUNTER,
        lambda now: {"host_capacity": now.cache["deferred_tokens"]},
        "The same of fetches that had to wait for slots in the host.",
        "reason",
    ),
    Row(
        "storage_prefetch_unfulfilled_tokens",
        COUNTER,
        lambda now: {why.value: now.reasons.get(why, 0) for why in UNFULFILLED},
        "Tokens that had to be computed though storage was to have their pages, by why.",
        "reason",
    ),
    Row(
        "prefetch_bandwidth",
        HISTOGRAM,
        lambda now: now.flows[FETCH].bytes_per_s,
        "GB/s of copies from storage.",
        scale=PER_GIGABYTE,
    ),
    Row(
        "backup_bandwidth",
        HISTOGRAM,
        lambda now: now.flows[STORE].bytes_per_s,
        "GB/s of copies to storage.",
        scale=PER_GIGABYTE,
    ),
)


def families(now: Snapshot) -> Iterator[Metric]:
    labels = {"model_name": now.model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
    yield from told("sglang:", ROWS, now, labels)
