"""Requests, connections and responses, under kvarve's names."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric

from kvarve.metrics.samples import by, counter, gauge, histogram
from kvarve.metrics.snapshot import DONE, Snapshot
from kvarve.pages.pools import Tier

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


def families(now: Snapshot) -> Iterator[Metric]:
    yield InfoMetricFamily("kvarve", "What is running.", {"version": now.version, "model": now.model})
    yield gauge("kvarve_up", "1 while the engine can serve, 0 once it has broken.", now.up)
    outcomes = {
        "done": sum(now.ends.get(why, 0) for why in DONE),
        "aborted": now.ends.get("abort", 0),
        "failed": now.ends.get("error", 0),
    }
    help_text = "Requests that have ended, by outcome; each answer of several (n, or a list of prompts) is one."
    yield by("kvarve_requests", help_text, ("outcome",), outcomes)
    help_text = "The same, by why they ended: stop and length are those that were answered in full."
    yield by("kvarve_finished_requests", help_text, ("reason",), now.ends)
    yield gauge("kvarve_requests_running", "Requests being computed.", now.running)
    help_text = "Requests that wait for admission or for pages from storage."
    yield gauge("kvarve_requests_waiting", help_text, sum(now.waiting.values()))
    help_text = (
        "Requests that wait, by what for: storage_queue (a worker), storage (its answer), fetched (admission, as their "
        "pages have come from storage), load (copies from the host to the device), admission."
    )
    yield by("kvarve_requests_waiting_for", help_text, ("what",), now.waiting, level=True)
    help_text = (
        "Requests being tokenized, or waiting for that: not among those waiting, but counted towards --max-waiting."
    )
    yield gauge("kvarve_requests_tokenizing", help_text, now.tokenizing)
    help_text = "Tokens of prompts of ended requests; one of several samples (n) is counted once, here and below."
    yield counter("kvarve_prompt_tokens", help_text, now.prompt_tokens)
    help_text = "Tokens of prompts of ended requests that did not have to be computed, by the tier they came from."
    cached = {tier.name.lower(): now.cached(tier.name.lower()) for tier in Tier}
    yield by("kvarve_cached_tokens", help_text, ("tier",), cached)
    help_text = (
        "Tokens of prompts of ended requests, by the reason why they were cached or not; and beside them those of "
        "further samples of a prompt (another_sample)."
    )
    yield by("kvarve_explained_tokens", help_text, ("reason",), {why.value: some for why, some in now.reasons.items()})
    yield counter("kvarve_computed_tokens", "Tokens of prompts that were computed.", now.computed_tokens)
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
    yield by("kvarve_closed_connections", help_text, ("reason",), now.closed_connections)
    help_text = "Responses, by method, route and status; 499 is a client that left before its answer began."
    responses = CounterMetricFamily("kvarve_responses", help_text, labels=("method", "route", "status"))
    rejected = Counter[str]()
    for (method, route, status), count in now.responses.items():
        responses.add_metric([method, route, str(status)], count)
        if status >= 400:
            rejected[str(status)] += count
    yield responses
    help_text = "Requests that got an error, by status; 499 is a client that left before its answer began."
    yield by("kvarve_rejected_requests", help_text, ("status",), rejected)
    help_text = "Requests with a field that was ignored, by field."
    yield by("kvarve_ignored_fields", help_text, ("field",), now.ignored_fields)
    if now.spans is not None:
        help_text = "Spans of requests, by whether the collector of traces took them."
        yield by("kvarve_spans", help_text, ("outcome",), now.spans)
