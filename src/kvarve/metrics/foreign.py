"""vLLM's and SGLang's metrics from kvarve's numbers, so that dashboards made for these show a server of kvarve.

kvarve has no connector that vLLM's names tell from its cache: its device is vLLM's own cache, its host and storage are
what an offloading connector has, the host as primary tier. The host of SGLang's HiCache is ours, its storage too; a
"mamba state" is a page of recurrent states.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import Metric

from kvarve.core.observe.histograms import Histogram
from kvarve.core.observe.reasons import Reason
from kvarve.metrics.snapshot import Snapshot
from kvarve.metrics.told import COUNTER, GAUGE, HISTOGRAM, Found, Kind, told

Read = Callable[[Snapshot], Found | None]

LOAD, BACKUP = "host-to-device", "device-to-host"
FETCH, STORE, PROBE = "storage-to-host", "host-to-storage", "storage-probe"
PER_GIGABYTE = 1e-9
# Tokens whose pages a request asked storage for, or was to wait for, and did without.
UNFULFILLED = (Reason.TOO_LATE, Reason.FAILED_CHECK, Reason.EVICTED_STORAGE)


class Row(NamedTuple):
    """A metric: its name there, and how it follows from our numbers. `read`: a number, or numbers by the value of
    `label`; None leaves it out now. `scale`: of what is in a histogram."""

    name: str
    kind: Kind
    read: Read
    help_text: str
    label: str = ""
    scale: float = 1.0


def _of_requests(name: str, ours: str, help_text: str) -> Row:
    return Row(name, HISTOGRAM, lambda now: now.histograms[ours], help_text)


def _of_tier(name: str, read: Callable[[Snapshot], float | Histogram], help_text: str, kind: Kind = COUNTER) -> Row:
    """Of what vLLM calls a secondary tier, as which it knows the storage."""

    def by_tier(now: Snapshot) -> Found:
        kinds = ["fs" if kind == "file" else kind for kind in now.storage_kinds]
        return {f"1:{'+'.join(kinds)}": read(now)} if kinds else {}  # type: ignore[return-value]

    return Row(f"kv_offload_tiering_{name}", kind, by_tier, help_text, "tier")


def _bandwidth(what: str, lane: str, help_text: str) -> Row:
    return Row(f"{what}_bandwidth", HISTOGRAM, lambda now: now.flows[lane].bytes_per_s, help_text, scale=PER_GIGABYTE)


def _waiting(now: Snapshot, *what: str) -> float:
    return sum(now.waiting.get(each, 0) for each in what)


def _all_waiting(now: Snapshot) -> float:
    return sum(now.waiting.values())


def _by_reason(now: Snapshot) -> Mapping[str, float]:
    deferred = _waiting(now, "storage_queue", "storage", "load")
    return {"capacity": _waiting(now, "admission", "fetched"), "deferred": deferred}


def _by_stage(now: Snapshot) -> Mapping[str, float]:
    stages = {"waiting_to_start": "storage_queue", "in_progress": "storage", "completed_waiting": "fetched"}
    return {stage: _waiting(now, what) for stage, what in stages.items()}


def _missed_device(now: Snapshot) -> int:
    return now.prompt_tokens - now.cached("device")


def _cached_behind(now: Snapshot) -> int:
    return now.cached("host") + now.cached("storage")


def _by_tier(now: Snapshot) -> dict[str, float]:
    return {tier: now.cached(tier) for tier in ("device", "host", "storage")}


def _with_total(now: Snapshot) -> Mapping[str, float]:
    return _by_tier(now) | {"total": sum(_by_tier(now).values())}


def _sources(now: Snapshot) -> Mapping[str, float]:
    near, far = now.cached("device"), _cached_behind(now)
    return {"local_compute": now.prompt_tokens - near - far, "local_cache_hit": near, "external_kv_transfer": far}


def _cached_sources(now: Snapshot) -> Mapping[str, float]:
    found, local = _by_tier(now), now.storage_kinds == ("file",)
    far = found.pop("storage")
    return found | {"disk": far * local, "external_unspecified": far * (not local)}


def _directions(now: Snapshot) -> Mapping[str, float]:
    return {"CPU_to_GPU": now.flows[LOAD].bytes.sum, "GPU_to_CPU": now.flows[BACKUP].bytes.sum}


def _unfulfilled(now: Snapshot) -> Mapping[str, float]:
    return {why.value: now.reasons.get(why, 0) for why in UNFULFILLED}


def _deferred(now: Snapshot) -> Mapping[str, float]:
    return {"host_capacity": now.cache["deferred_tokens"]}


def _tokens(what: str) -> Callable[[Snapshot], float]:
    return lambda now: now.tokens(now.under(f"{what}."))


def _states(what: str) -> Callable[[Snapshot], float | None]:
    return lambda now: now.cache.get(f"{what}.host.state")


def _copied(lane: str) -> Callable[[Snapshot], float]:
    return lambda now: now.tokens(now.flows[lane].pages)


def _bytes(lane: str) -> Callable[[Snapshot], float]:
    return lambda now: now.flows[lane].bytes.sum


def _seconds(lane: str) -> Callable[[Snapshot], float]:
    return lambda now: now.flows[lane].seconds.sum


def _failed(lane: str) -> Callable[[Snapshot], float]:
    return lambda now: now.cache.get(f"lane_failed.{lane}", 0)


_BY_REASON = "Requests that wait for admission (capacity), or for their pages (deferred)."
_HOST_SHARE = "Share of the host that requests and copies need, 0 to 1."
_UNUSED_AT_END, _ON_DEVICE = "How long unused at their end.", "How long pages were on the device."
VLLM = (
    Row("num_requests_running", GAUGE, lambda now: now.running, "Requests being computed."),
    Row("num_requests_waiting", GAUGE, _all_waiting, "Requests that wait."),
    Row("num_requests_waiting_by_reason", GAUGE, _by_reason, _BY_REASON, "reason"),
    Row(
        "num_requests_kv_fetch_by_stage",
        GAUGE,
        _by_stage,
        "Requests that wait, by where their fetch from storage stands.",
        "stage",
    ),
    Row("kv_cache_usage_perc", GAUGE, lambda now: now.share("pinned", "device"), "Share of the device in use, 0 to 1."),
    Row("prefix_cache_queries", COUNTER, lambda now: now.prompt_tokens, "Tokens of prompts."),
    Row("prefix_cache_hits", COUNTER, lambda now: now.cached("device"), "Those of them whose pages the device had."),
    Row("external_prefix_cache_queries", COUNTER, _missed_device, "Those of them whose pages the device lacked."),
    Row("external_prefix_cache_hits", COUNTER, _cached_behind, "Those of these whose pages host or storage had."),
    Row("prompt_tokens", COUNTER, lambda now: now.prompt_tokens, "Tokens of prompts."),
    Row("prompt_tokens_by_source", COUNTER, _sources, "The same, by where their pages came from.", "source"),
    Row(
        "prompt_tokens_cached",
        COUNTER,
        lambda now: sum(_by_tier(now).values()),
        "Tokens of prompts that were not computed.",
    ),
    Row("prompt_tokens_cached_by_source", COUNTER, _cached_sources, "The same, by tier.", "source"),
    Row("generation_tokens", COUNTER, lambda now: now.output_tokens, "Tokens of answers."),
    Row("num_preemptions", COUNTER, lambda now: now.preempted, "Preemptions."),
    Row("request_success", COUNTER, lambda now: now.ends, "Requests that have ended, by why.", "finished_reason"),
    _of_requests("time_to_first_token_seconds", "ttft_s", "Seconds to the first token."),
    _of_requests("inter_token_latency_seconds", "inter_token_s", "Seconds between two tokens."),
    _of_requests("request_time_per_output_token_seconds", "output_token_s", "The mean of these over a request."),
    _of_requests("e2e_request_latency_seconds", "e2e_s", "Seconds to the last token."),
    _of_requests("request_queue_time_seconds", "queue_s", "Seconds until a request is computed."),
    _of_requests("request_prefill_time_seconds", "prefill_s", "Seconds from then to its first token."),
    _of_requests("request_decode_time_seconds", "decode_s", "Seconds from its first token to its last."),
    _of_requests("request_inference_time_seconds", "inference_s", "The two together."),
    _of_requests("request_prompt_tokens", "request_prompt_tokens", "Tokens of a request's prompt."),
    _of_requests("request_generation_tokens", "request_output_tokens", "Tokens of a request's answer."),
    _of_requests(
        "request_prefill_kv_computed_tokens", "request_computed_tokens", "Tokens of a prompt that were not cached."
    ),
    _of_requests("iteration_tokens_total", "turn_tokens", "Tokens that a turn of the engine computed."),
    Row("kv_block_lifetime_seconds", HISTOGRAM, lambda now: now.ages.lifetime_s[0], _ON_DEVICE),
    Row("kv_block_idle_before_evict_seconds", HISTOGRAM, lambda now: now.ages.idle_s[0], _UNUSED_AT_END),
    Row("kv_block_reuse_gap_seconds", HISTOGRAM, lambda now: now.ages.reuse_s, "Seconds between two uses of a prefix."),
    Row("kv_offload_load_bytes", COUNTER, _bytes(LOAD), "Bytes from host to device."),
    Row("kv_offload_load_time", COUNTER, _seconds(LOAD), "Seconds of these copies."),
    Row("kv_offload_load_size", HISTOGRAM, lambda now: now.flows[LOAD].bytes, "Bytes of one of them."),
    Row("kv_offload_store_bytes", COUNTER, _bytes(BACKUP), "Bytes from device to host."),
    Row("kv_offload_store_time", COUNTER, _seconds(BACKUP), "Seconds of these copies."),
    Row("kv_offload_store_size", HISTOGRAM, lambda now: now.flows[BACKUP].bytes, "Bytes of one of them."),
    Row("kv_offload_total_bytes", COUNTER, _directions, "Bytes between device and host.", "transfer_type"),
    Row("kv_offload_cpu_cache_usage_perc", GAUGE, lambda now: now.share("pinned", "host"), _HOST_SHARE),
    _of_tier("read_bytes", _bytes(FETCH), "Bytes from storage to host."),
    _of_tier("read_time", _seconds(FETCH), "Seconds of these copies."),
    _of_tier("write_bytes", _bytes(STORE), "Bytes from host to storage."),
    _of_tier("write_time", _seconds(STORE), "Seconds of these copies."),
    _of_tier("chunk_queries", lambda now: now.flows[PROBE].asked.total(), "Pages that storage was asked for."),
    _of_tier("chunk_hits", lambda now: now.flows[PROBE].pages.total(), "Those of them that it had."),
    _of_tier(
        "lookup_sync_delay_seconds",
        lambda now: now.flows[PROBE].seconds,
        "Seconds of one question to storage.",
        HISTOGRAM,
    ),
    _of_tier(
        "lookup_async_delay_seconds",
        lambda now: now.ages.storage_wait_s,
        "Seconds for which a request waited for storage.",
        HISTOGRAM,
    ),
    _of_tier("promotion_job_failures", _failed(FETCH), "Copies from storage that failed."),
    _of_tier("cascade_job_failures", _failed(STORE), "Copies to storage that failed."),
)
_HIT = "Tokens whose pages storage had, of fetches that were begun."
_DEFERRED = "The same of fetches that had to wait for slots in the host."
_UNFULFILLED = "Tokens that had to be computed though storage was to have their pages, by why."
SGLANG = (
    Row("num_running_reqs", GAUGE, lambda now: now.running, "Requests being computed."),
    Row("num_queue_reqs", GAUGE, _all_waiting, "Requests that wait."),
    Row("token_usage", GAUGE, lambda now: now.share("pinned", "device"), "Share of the device in use, 0 to 1."),
    Row("cache_hit_rate", GAUGE, lambda now: now.hit_rate, "Share of the tokens admitted lately that were cached."),
    Row("gen_throughput", GAUGE, lambda now: now.output_rate, "Tokens of answers a second, lately."),
    _of_requests("time_to_first_token_seconds", "ttft_s", "Seconds to the first token."),
    _of_requests("e2e_request_latency_seconds", "e2e_s", "Seconds to the last token."),
    _of_requests("inter_token_latency_seconds", "inter_token_s", "Seconds between two tokens."),
    Row("prompt_tokens", COUNTER, lambda now: now.prompt_tokens, "Tokens of prompts."),
    Row("generation_tokens", COUNTER, lambda now: now.output_tokens, "Tokens of answers."),
    Row("cached_tokens", COUNTER, _with_total, "Tokens of prompts that were not computed, by tier.", "cache_source"),
    Row("evicted_tokens", COUNTER, _tokens("evicted.device"), "Tokens that left the device."),
    Row("load_back_tokens", COUNTER, _copied(LOAD), "Tokens copied from host to device."),
    Row("hicache_host_used_tokens", GAUGE, _tokens("used.host"), "Tokens whose pages the host has."),
    Row("hicache_host_total_tokens", GAUGE, _tokens("most.host"), "Tokens for which the host can have slots."),
    Row("hicache_host_mamba_used_states", GAUGE, _states("used"), "Recurrent states that the host has."),
    Row("hicache_host_mamba_total_states", GAUGE, _states("most"), "Recurrent states for which it can have slots."),
    Row("hicache_backup_tokens", COUNTER, _copied(BACKUP), "Tokens copied from device to host."),
    Row("hicache_backup_bytes", COUNTER, _bytes(BACKUP), "Bytes of these copies."),
    Row("prefetched_tokens", COUNTER, _copied(FETCH), "Tokens copied from storage to host."),
    Row("backuped_tokens", COUNTER, _copied(STORE), "Tokens copied from host to storage."),
    Row("storage_prefetch_hit_tokens", COUNTER, lambda now: now.cache["fetching_tokens"], _HIT),
    Row("storage_prefetch_deferred_tokens", COUNTER, _deferred, _DEFERRED, "reason"),
    Row("storage_prefetch_unfulfilled_tokens", COUNTER, _unfulfilled, _UNFULFILLED, "reason"),
    _bandwidth("prefetch", FETCH, "GB/s of copies from storage."),
    _bandwidth("backup", STORE, "GB/s of copies to storage."),
)


def _told(prefix: str, rows: Sequence[Row], now: Snapshot, server: Mapping[str, str]) -> Iterator[Metric]:
    """Families of these rows, each sample with the labels of the `server`."""
    for row in rows:
        if (found := row.read(now)) is not None:
            labels = [row.label] if row.label else []
            yield told(row.kind, prefix + row.name, row.help_text, found, *labels, server=server, scale=row.scale)


def vllm(now: Snapshot) -> Iterator[Metric]:
    labels = {"model_name": now.model, "engine": "0"}
    yield from _told("vllm:", VLLM, now, labels)
    facts = {
        "block_size": f"{now.cache['page_tokens']:.0f}",
        "cache_dtype": now.dtype,
        "enable_prefix_caching": "True",
        "num_gpu_blocks": f"{now.cache.get(f'most.device.{now.chain}', 0):.0f}",
        "num_cpu_blocks": f"{now.cache.get(f'most.host.{now.chain}', 0):.0f}",
    }
    yield told(GAUGE, "vllm:cache_config_info", "How the cache is divided.", 1, server=labels | facts)
    grouped = Counter[tuple[str, ...]]()
    for (method, route, status), count in now.responses.items():
        grouped[route, method, f"{status // 100}xx"] += count
    # The names of the middleware by which vLLM counts responses; its dashboards divide by them.
    yield told(COUNTER, "http_requests", "Responses.", grouped, "handler", "method", "status")


def sglang(now: Snapshot) -> Iterator[Metric]:
    labels = {"model_name": now.model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
    yield from _told("sglang:", SGLANG, now, labels)
