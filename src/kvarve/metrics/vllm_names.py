"""vLLM's metrics from kvarve's numbers, so that dashboards made for vLLM show a server of ours.

kvarve has no connector that vLLM's names tell from its cache: its device is vLLM's own cache, its host and storage are
what an offloading connector has, the host as primary tier.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvarve.core.observe.histograms import Histogram
from kvarve.metrics.foreign import Row, told
from kvarve.metrics.snapshot import Snapshot

COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
LOAD, STORE = "host-to-device", "device-to-host"
READ, WRITE, PROBE = "storage-to-host", "host-to-storage", "storage-probe"


def _of_requests(name: str, ours: str, help_text: str) -> Row:
    return Row(name, HISTOGRAM, lambda now: now.histograms[ours], help_text)


def _tier(now: Snapshot) -> str:
    """The storage as vLLM names a secondary tier."""
    return "1:" + "+".join("fs" if kind == "file" else kind for kind in now.storage_kinds)


def _by_tier(now: Snapshot, number: float) -> Mapping[str, float]:
    return {_tier(now): number} if now.storage_kinds else {}


def _waiting(now: Snapshot, *what: str) -> float:
    return sum(now.waiting.get(each, 0) for each in what)


def _missed_device(now: Snapshot) -> int:
    return now.prompt_tokens - now.cached("device")


def _sources(now: Snapshot) -> Mapping[str, float]:
    near, far = now.cached("device"), now.cached("host") + now.cached("storage")
    return {
        "local_compute": now.prompt_tokens - near - far,
        "local_cache_hit": near,
        "external_kv_transfer": far,
    }


def _cached_sources(now: Snapshot) -> Mapping[str, float]:
    local = now.storage_kinds == ("file",)
    far = now.cached("storage")
    return {
        "device": now.cached("device"),
        "host": now.cached("host"),
        "disk": far * local,
        "external_unspecified": far * (not local),
    }


def _lookups(now: Snapshot, found: Histogram) -> Mapping[str, Histogram]:
    return {_tier(now): found} if now.storage_kinds else {}


ROWS = (
    Row("num_requests_running", GAUGE, lambda now: now.running, "Requests being computed."),
    Row("num_requests_waiting", GAUGE, lambda now: sum(now.waiting.values()), "Requests that wait."),
    Row(
        "num_requests_waiting_by_reason",
        GAUGE,
        lambda now: {
            "capacity": _waiting(now, "admission", "fetched"),
            "deferred": _waiting(now, "storage_queue", "storage", "load"),
        },
        "Requests that wait for admission (capacity), or for their pages (deferred).",
        "reason",
    ),
    Row(
        "num_requests_kv_fetch_by_stage",
        GAUGE,
        lambda now: {
            "waiting_to_start": _waiting(now, "storage_queue"),
            "in_progress": _waiting(now, "storage"),
            "completed_waiting": _waiting(now, "fetched"),
        },
        "Requests that wait, by where their fetch from storage stands.",
        "stage",
    ),
    Row("kv_cache_usage_perc", GAUGE, lambda now: now.share("pinned", "device"), "Share of the device in use, 0 to 1."),
    Row("prefix_cache_queries", COUNTER, lambda now: now.prompt_tokens, "Tokens of prompts."),
    Row("prefix_cache_hits", COUNTER, lambda now: now.cached("device"), "Those of them whose pages the device had."),
    Row("external_prefix_cache_queries", COUNTER, _missed_device, "Those of them whose pages the device lacked."),
    Row(
        "external_prefix_cache_hits",
        COUNTER,
        lambda now: now.cached("host") + now.cached("storage"),
        "Those of these whose pages host or storage had.",
    ),
    Row("prompt_tokens", COUNTER, lambda now: now.prompt_tokens, "Tokens of prompts."),
    Row("prompt_tokens_by_source", COUNTER, _sources, "The same, by where their pages came from.", "source"),
    Row(
        "prompt_tokens_cached",
        COUNTER,
        lambda now: sum(now.cached(tier) for tier in ("device", "host", "storage")),
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
    Row(
        "kv_block_lifetime_seconds", HISTOGRAM, lambda now: now.ages.lifetime_s[0], "How long pages were on the device."
    ),
    Row(
        "kv_block_idle_before_evict_seconds", HISTOGRAM, lambda now: now.ages.idle_s[0], "How long unused at their end."
    ),
    Row("kv_block_reuse_gap_seconds", HISTOGRAM, lambda now: now.ages.reuse_s, "Seconds between two uses of a prefix."),
    Row("kv_offload_load_bytes", COUNTER, lambda now: now.flows[LOAD].bytes.sum, "Bytes from host to device."),
    Row("kv_offload_load_time", COUNTER, lambda now: now.flows[LOAD].seconds.sum, "Seconds of these copies."),
    Row("kv_offload_load_size", HISTOGRAM, lambda now: now.flows[LOAD].bytes, "Bytes of one of them."),
    Row("kv_offload_store_bytes", COUNTER, lambda now: now.flows[STORE].bytes.sum, "Bytes from device to host."),
    Row("kv_offload_store_time", COUNTER, lambda now: now.flows[STORE].seconds.sum, "Seconds of these copies."),
    Row("kv_offload_store_size", HISTOGRAM, lambda now: now.flows[STORE].bytes, "Bytes of one of them."),
    Row(
        "kv_offload_total_bytes",
        COUNTER,
        lambda now: {"CPU_to_GPU": now.flows[LOAD].bytes.sum, "GPU_to_CPU": now.flows[STORE].bytes.sum},
        "Bytes between device and host.",
        "transfer_type",
    ),
    Row(
        "kv_offload_cpu_cache_usage_perc",
        GAUGE,
        lambda now: now.share("pinned", "host"),
        "Share of the host that requests and copies need, 0 to 1.",
    ),
    Row(
        "kv_offload_tiering_read_bytes",
        COUNTER,
        lambda now: _by_tier(now, now.flows[READ].bytes.sum),
        "Bytes from storage to host.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_read_time",
        COUNTER,
        lambda now: _by_tier(now, now.flows[READ].seconds.sum),
        "Seconds of these copies.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_write_bytes",
        COUNTER,
        lambda now: _by_tier(now, now.flows[WRITE].bytes.sum),
        "Bytes from host to storage.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_write_time",
        COUNTER,
        lambda now: _by_tier(now, now.flows[WRITE].seconds.sum),
        "Seconds of these copies.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_chunk_queries",
        COUNTER,
        lambda now: _by_tier(now, now.flows[PROBE].asked.total()),
        "Pages that storage was asked for.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_chunk_hits",
        COUNTER,
        lambda now: _by_tier(now, now.flows[PROBE].pages.total()),
        "Those of them that it had.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_lookup_sync_delay_seconds",
        HISTOGRAM,
        lambda now: _lookups(now, now.flows[PROBE].seconds),
        "Seconds of one question to storage.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_lookup_async_delay_seconds",
        HISTOGRAM,
        lambda now: _lookups(now, now.ages.storage_wait_s),
        "Seconds for which a request waited for storage.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_promotion_job_failures",
        COUNTER,
        lambda now: _by_tier(now, now.cache.get(f"lane_failed.{READ}", 0)),
        "Copies from storage that failed.",
        "tier",
    ),
    Row(
        "kv_offload_tiering_cascade_job_failures",
        COUNTER,
        lambda now: _by_tier(now, now.cache.get(f"lane_failed.{WRITE}", 0)),
        "Copies to storage that failed.",
        "tier",
    ),
)


def families(now: Snapshot) -> Iterator[Metric]:
    labels = {"model_name": now.model, "engine": "0"}
    yield from told("vllm:", ROWS, now, labels)
    facts = {
        "block_size": f"{now.cache['page_tokens']:.0f}",
        "cache_dtype": now.dtype,
        "enable_prefix_caching": "True",
        "num_gpu_blocks": f"{now.cache.get(f'most.device.{now.chain}', 0):.0f}",
        "num_cpu_blocks": f"{now.cache.get(f'most.host.{now.chain}', 0):.0f}",
    }
    info = Row("cache_config_info", GAUGE, lambda now: 1, "How the cache is divided.", constant=tuple(facts.items()))
    yield from told("vllm:", [info], now, labels)
    # The names of the middleware by which vLLM counts responses; its dashboards divide by them.
    responses = CounterMetricFamily("http_requests", "Responses.", labels=("handler", "method", "status"))
    grouped = Counter[tuple[str, str, str]]()
    for (method, route, status), count in now.responses.items():
        grouped[route, method, f"{status // 100}xx"] += count
    for place, count in grouped.items():
        responses.add_metric(place, count)
    yield responses
