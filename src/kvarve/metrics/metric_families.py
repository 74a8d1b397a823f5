"""All metrics under kvarve's names."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from prometheus_client.core import InfoMetricFamily, Metric

from kvarve.core.copies.effects import Refusal
from kvarve.metrics.snapshot import DONE, Snapshot
from kvarve.metrics.told import COUNTER, GAUGE, HISTOGRAM, told
from kvarve.pages.pools import Tier
from kvarve.storage.base import StorageUsage

counter, gauge, histogram = partial(told, COUNTER), partial(told, GAUGE), partial(told, HISTOGRAM)
# The engine's histogram, the metric, its meaning.
_HISTOGRAMS = (
    ("queue_s", "kvarve_queue_seconds", "Seconds from a request's arrival until it is computed."),
    ("ttft_s", "kvarve_ttft_seconds", "Seconds from a request's arrival to its first token."),
    ("prefill_s", "kvarve_prefill_seconds", "Seconds from the begin of a request's computation to its first token."),
    ("inter_token_s", "kvarve_inter_token_seconds", "Seconds from one token of an answer to the next; one value each."),
    ("output_token_s", "kvarve_output_token_seconds", "The mean of these over an answer; one value a request."),
    ("decode_s", "kvarve_decode_seconds", "Seconds from a request's first token to its last."),
    ("e2e_s", "kvarve_e2e_seconds", "Seconds from a request's arrival to its last token."),
    ("request_prompt_tokens", "kvarve_request_prompt_tokens", "Tokens of a request's prompt; one value a prompt."),
    (
        "request_computed_tokens",
        "kvarve_request_computed_tokens",
        "Tokens of a request's prompt that were not cached when it was first admitted.",
    ),
    ("request_output_tokens", "kvarve_request_output_tokens", "Tokens of a request's answer."),
    ("turn_tokens", "kvarve_turn_tokens", "Tokens, of prompts and answers, computed in a turn of the engine."),
)
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
    "fetching_tokens": (
        "kvarve_fetching_tokens",
        "Tokens that need not be computed if fetches from storage succeed, of fetches that were begun.",
    ),
    "deferred_tokens": ("kvarve_deferred_fetch_tokens", "The same of fetches that had to wait for slots in the host."),
    "strays": ("kvarve_stray_answers", "Answers about copies that were not in flight."),
}


def own(now: Snapshot) -> Iterator[Metric]:
    """In the order of docs/metrics.md; without those of requests, where the engine is not ours."""
    yield from _about(now)
    if now.ours:
        yield from _requests(now)
    yield from _prompts(now)
    if now.ours:
        yield from _answers(now)
    yield from _memory(now)
    yield from _lanes(now)
    yield from _times(now)
    yield from _storages(now)
    if now.storage is not None:
        yield from _storage(now.storage)


def _about(now: Snapshot) -> Iterator[Metric]:
    yield InfoMetricFamily("kvarve", "What is running.", {"version": now.version, "model": now.model})
    yield gauge("kvarve_up", "1 while the engine can serve, 0 once it has broken.", now.up)


def _requests(now: Snapshot) -> Iterator[Metric]:
    outcomes = {
        "done": sum(now.ends.get(why, 0) for why in DONE),
        "aborted": now.ends.get("abort", 0),
        "failed": now.ends.get("error", 0),
    }
    help_text = "Requests that have ended, by outcome; each answer of several (n, or a list of prompts) is one."
    yield counter("kvarve_requests", help_text, outcomes, "outcome")
    help_text = "The same, by why they ended: stop and length are those that were answered in full."
    yield counter("kvarve_finished_requests", help_text, now.ends, "reason")
    yield gauge("kvarve_requests_running", "Requests being computed.", now.running)
    help_text = "Requests that wait for admission or for pages from storage."
    yield gauge("kvarve_requests_waiting", help_text, sum(now.waiting.values()))
    help_text = (
        "Requests that wait, by what for: storage_queue (a worker), storage (its answer), fetched (admission, as their "
        "pages have come from storage), load (copies from the host to the device), admission."
    )
    yield gauge("kvarve_requests_waiting_for", help_text, now.waiting, "what")
    help_text = (
        "Requests being tokenized, or waiting for that: not among those waiting, but counted towards --max-waiting."
    )
    yield gauge("kvarve_requests_tokenizing", help_text, now.tokenizing)


def _prompts(now: Snapshot) -> Iterator[Metric]:
    help_text = "Tokens of prompts of ended requests; one of several samples (n) is counted once, here and below."
    yield counter("kvarve_prompt_tokens", help_text, now.prompt_tokens)
    help_text = "Tokens of prompts of ended requests that did not have to be computed, by the tier they came from."
    cached = {tier.name.lower(): now.cached(tier.name.lower()) for tier in Tier}
    yield counter("kvarve_cached_tokens", help_text, cached, "tier")
    help_text = (
        "Tokens of prompts of ended requests, by the reason why they were cached or not; and beside them those of "
        "further samples of a prompt (another_sample)."
    )
    yield counter(
        "kvarve_explained_tokens", help_text, {why.value: some for why, some in now.reasons.items()}, "reason"
    )


def _answers(now: Snapshot) -> Iterator[Metric]:
    yield counter("kvarve_computed_tokens", "Tokens of prompts that were computed.", now.computed_tokens)
    again = "Tokens of answers that were computed again by prefill, while there was nothing else to do."
    yield counter("kvarve_recomputed_tokens", again, now.recomputed_tokens)
    yield counter("kvarve_output_tokens", "Tokens generated.", now.output_tokens)
    help_text = "Requests that were preempted; they resumed later from their cached pages."
    yield counter("kvarve_preempted_requests", help_text, now.preempted)
    for name, metric, help_text in _HISTOGRAMS:
        yield histogram(metric, help_text, now.histograms[name])
    if now.connections is not None:
        yield gauge("kvarve_connections", "Connections that are open.", now.connections)
    help_text = (
        "Connections that were closed: no headers of a request came, an answer was not read, or there were too many "
        "and these had no whole request."
    )
    yield counter("kvarve_closed_connections", help_text, now.closed_connections, "reason")
    help_text = "Responses, by method, route and status; 499 is a client that left before its answer began."
    responses = {(method, route, str(status)): count for (method, route, status), count in now.responses.items()}
    yield counter("kvarve_responses", help_text, responses, "method", "route", "status")
    rejected = Counter[str]()
    for (_, _, status), count in now.responses.items():
        if status >= 400:
            rejected[str(status)] += count
    help_text = "Requests that got an error, by status; 499 is a client that left before its answer began."
    yield counter("kvarve_rejected_requests", help_text, rejected, "status")
    help_text = "Requests with a field that was ignored, by field."
    yield counter("kvarve_ignored_fields", help_text, now.ignored_fields, "field")
    if now.spans is not None:
        help_text = "Spans of requests, by whether the collector of traces took them."
        yield counter("kvarve_spans", help_text, now.spans, "outcome")


def _memory(now: Snapshot) -> Iterator[Metric]:
    stats = now.cache
    yield gauge("kvarve_leases", "Requests that hold pages.", stats["leases"])
    place = ("tier", "pool")
    yield gauge("kvarve_page_tokens", "Tokens of a page.", stats["page_tokens"])
    yield gauge("kvarve_page_bytes", "Bytes of a page.", now.under("page_bytes."), "pool")
    help_text = "Pages before a boundary that a pool's layers still read; 0 stands for all."
    yield gauge("kvarve_page_lookback", help_text, now.under("lookback."), "pool")
    help_text = "Slots for pages that a pool has now; of memory that pools share it gets more as it needs them."
    yield gauge("kvarve_slots", help_text, now.under("slots."), *place)
    yield gauge("kvarve_slots_used", "Slots that hold a page or are reserved for one.", now.under("used."), *place)
    help_text = "Slots whose pages requests or copies need, so that they cannot be evicted; as of half a second ago."
    yield gauge("kvarve_slots_pinned", help_text, now.under("pinned."), *place)
    yield gauge("kvarve_memory_bytes", "Bytes of memory for pages.", now.under("memory_bytes."), "tier")
    used, pinned = ({tier: now.in_bytes(what, tier) for tier in now.tiers} for what in ("used", "pinned"))
    sizes = {f"{tier}.{pool}": size for tier, pools in used.items() for pool, size in pools.items()}
    yield gauge("kvarve_used_bytes", "Bytes of the slots used.", sizes, *place)
    free = {f"{tier}.{pool}": max(0.0, size - pinned[tier][pool]) for tier in used for pool, size in used[tier].items()}
    yield gauge("kvarve_evictable_bytes", "Bytes of the slots used that are not pinned.", free, *place)
    yield counter("kvarve_evicted_pages", "Pages evicted to free slots, or flushed.", now.under("evicted."), *place)
    tokens = {tier: now.tokens(now.under(f"evicted.{tier}.")) for tier in now.tiers}
    yield counter("kvarve_evicted_tokens", "Tokens whose pages of attention were evicted.", tokens, "tier")
    reasons = ("failed", "evicted", "down", "full", "read_only")
    dropped = {reason: stats[f"dropped_{reason}"] for reason in reasons}
    help_text = (
        "Pages that left memory without having been stored: their stores failed too often, or were still pending, or "
        "the storage was down, had no room, or could only be read."
    )
    yield counter("kvarve_dropped_backup_pages", help_text, dropped, "reason")
    help_text = "1 while only a sample and pages used twice are stored, since storing does not pay."
    yield gauge("kvarve_offload_paused", help_text, stats["offload_paused"])
    help_text = "Of the bytes stored lately (in a pause: of the sample), the share that was used."
    yield gauge("kvarve_offload_used_ratio", help_text, stats["offload_used_share"])
    help_text = "1 while stores back off, since storage has failed."
    yield gauge("kvarve_stores_backing_off", help_text, stats["stores_backing_off"])
    refused = {why.name.lower(): float(stats["stores_refused"] == why) for why in Refusal if why}
    help_text = "1 while storage took no pages of the last store, though it answers, by why: it is full, or only read."
    yield gauge("kvarve_stores_refused", help_text, refused, "reason")
    bad = {tier: stats[f"bad_{tier}"] for tier in ("host", "storage")}
    yield counter("kvarve_bad_pages", "Pages that failed their check when read, by their tier.", bad, "tier")
    edge = ("source", "target")
    help_text = "Pages whose bytes were compared before and after their copy (--hash-sample)."
    yield counter("kvarve_compared_pages", help_text, now.under("compared."), *edge)
    help_text = "Pages of those that a copy had altered; they were dropped."
    yield counter("kvarve_altered_pages", help_text, now.under("altered."), *edge)
    for name, (metric, help_text) in _PAGE_COUNTERS.items():
        yield counter(metric, help_text, stats[name])
    plain, smaller, on = (now.under(f"compress_{name}.") for name in ("plain_bytes", "stored_bytes", "on"))
    yield counter("kvarve_compress_plain_bytes", "Bytes of records stored, before compression.", plain, "pool")
    yield counter("kvarve_compress_stored_bytes", "Bytes of the same records as they were stored.", smaller, "pool")
    help_text = "1 while records are compressed for storage, 0 while that does not pay."
    yield gauge("kvarve_compress_on", help_text, on, "pool")


def _lanes(now: Snapshot) -> Iterator[Metric]:
    stats = now.cache
    copies = {edge: stats[name] for name, edge in _COPIES.items()}
    yield counter("kvarve_copied_pages", "Pages copied between tiers.", copies, "source", "target")
    tokens = {edge: now.tokens(now.flows["-to-".join(edge)].pages) for edge in copies}
    yield counter("kvarve_copied_tokens", "Tokens whose pages of attention were copied.", tokens, "source", "target")
    waiting, running = now.under("lane_waiting."), now.under("lane_running.")
    yield gauge("kvarve_lane_waiting", "Copies that wait in a lane.", waiting, "lane")
    yield gauge("kvarve_lane_running", "Calls of a lane that are under way.", running, "lane")
    stuck, failed = now.under("lane_stuck_s."), now.under("lane_failed.")
    help_text = "Seconds for which the oldest call of a lane has been running."
    yield gauge("kvarve_lane_stuck_seconds", help_text, stuck, "lane")
    help_text = "Copies that a lane refused, started too late or failed to do."
    yield counter("kvarve_lane_failures", help_text, failed, "lane")
    flows = now.flows
    help_text = "Seconds of a lane's calls that succeeded: checks, bytes and all."
    yield histogram("kvarve_lane_call_seconds", help_text, {lane: flows[lane].seconds for lane in flows}, "lane")
    help_text = "Bytes of pages that a call moved, on this rank."
    moving = [lane for lane in flows if "-to-" in lane]
    yield histogram("kvarve_lane_call_bytes", help_text, {lane: flows[lane].bytes for lane in moving}, "lane")
    help_text = "Bytes a second of a call."
    rates = {lane: flows[lane].bytes_per_s for lane in moving}
    yield histogram("kvarve_lane_bytes_per_second", help_text, rates, "lane")
    pages = {f"{lane}.{pool}": count for lane in moving for pool, count in flows[lane].pages.items()}
    yield counter("kvarve_lane_pages", "Pages that a lane has moved.", pages, "lane", "pool")
    probes = flows["storage-probe"]
    yield counter("kvarve_probed_pages", "Pages that storage was asked for.", probes.asked, "pool")
    yield counter("kvarve_probed_pages_found", "Those of them that it had.", probes.pages, "pool")


def _times(now: Snapshot) -> Iterator[Metric]:
    ages = now.ages
    help_text = "Seconds from a page's arrival in a tier, or that of the first page of its run, until it left."
    lifetimes = dict(zip(now.tiers, ages.lifetime_s, strict=True))
    yield histogram("kvarve_page_lifetime_seconds", help_text, lifetimes, "tier")
    help_text = "Seconds from the last use of a page until it left a tier."
    yield histogram("kvarve_page_idle_seconds", help_text, dict(zip(now.tiers, ages.idle_s, strict=True)), "tier")
    help_text = "Seconds from the last use of a prefix to the next request for it."
    yield histogram("kvarve_prefix_reuse_seconds", help_text, ages.reuse_s)
    if now.storage_up is not None:
        help_text = "Seconds for which a request waited for storage: its answers and its pages."
        yield histogram("kvarve_storage_wait_seconds", help_text, ages.storage_wait_s)


def _storages(now: Snapshot) -> Iterator[Metric]:
    """One series for each storage, nearest first, as of its last answer; none without a storage."""
    down = "1 while calls to a storage are answered by misses, as it is down."
    yield gauge("kvarve_breaker_open", down, now.under("breaker_open."), "storage")
    opened = "How often a storage was found to be down."
    yield counter("kvarve_breaker_opened", opened, now.under("breaker_opened."), "storage")
    hung = "Calls to a storage that took longer than its deadline."
    yield counter("kvarve_breaker_hung_calls", hung, now.under("breaker_hung."), "storage")
    rows = (
        (
            counter,
            "lost",
            "lost_objects",
            "Objects that a storage has lost: what says where they are is damaged or gone.",
        ),
        (counter, "damaged", "damaged_objects", "Objects of a storage whose bytes could not be read."),
        (gauge, "room", "room_bytes", "Bytes that the medium of a storage has left for it."),
        (gauge, "only_read", "read_only", "1 while a storage can only be read, or is only to be read."),
    )
    for kind, name, metric, help_text in rows:
        if values := now.under(f"storage_{name}."):
            yield kind(f"kvarve_storage_{metric}", help_text, values, "storage")
    if now.storage_up is not None:
        yield gauge("kvarve_storage_up", "1 while storage answers, 0 while it is down.", now.storage_up)


def _storage(usage: StorageUsage) -> Iterator[Metric]:
    rows = (
        (gauge, "bytes", "Bytes of objects in storage.", usage.bytes),
        (gauge, "objects", "Objects in storage, one per page and pool.", usage.objects),
        (gauge, "capacity_bytes", "Bytes that storage may hold.", usage.capacity_bytes),
        (counter, "evicted_objects", "Objects that storage evicted to free space.", usage.evicted),
    )
    for kind, name, help_text, value in rows:
        if value is not None:
            yield kind(f"kvarve_storage_{name}", help_text, value)
