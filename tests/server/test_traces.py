"""Spans of requests, as a real collector gets them: OTLP over HTTP, parsed by its own schema."""

import logging
import queue
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from servers import settings
from talk import CHAT, COMPLETIONS, LONG_S, complete, stream, until

from kvarve.errors import ConfigError
from kvarve.reference.server.serve import Server, check_settings
from kvarve.reference.server.spans import MOST_SPANS, Traces, check_endpoint, told

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TIERS = ("device", "host", "storage")


class Collector:
    """Takes spans as OpenTelemetry's collector does; answers with `status`."""

    def __init__(self) -> None:
        self.spans: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                if collector.status == 200:
                    collector.take(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put(
                        {
                            "resource": {each.key: value(each.value) for each in resource.resource.attributes},
                            "name": span.name,
                            "kind": span.kind,
                            "status": span.status.code,
                            "trace": span.trace_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                            "raw": span.SerializeToString(),
                        }
                        | {each.key: value(each.value) for each in span.attributes}
                    )

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def value(given: Any) -> Any:
    kind = given.WhichOneof("value")
    return [value(each) for each in given.array_value.values] if kind == "array_value" else getattr(given, kind)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches leave at once, by OpenTelemetry's own settings."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")


@pytest.fixture
def traced(checkpoint: Path, collector: Collector, quick: None, tmp_path: Path) -> Iterator[httpx.Client]:
    with (
        Server(settings(checkpoint, tmp_path / "pages", otlp_traces_endpoint=collector.url)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def test_a_span_has_the_callers_trace_and_what_became_of_the_request(
    traced: httpx.Client, collector: Collector, song: str
) -> None:
    prompt, headers = song * 4, {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "n": 2}
    complete(traced, prompt, max_tokens=1)
    first = collector.spans.get(timeout=LONG_S)
    assert traced.post(COMPLETIONS, json=body, headers=headers).status_code == 200
    span = collector.spans.get(timeout=LONG_S)
    assert (span["trace"], span["parent"]) == (TRACE, PARENT)
    assert first["trace"] != TRACE and first["parent"] == "" and re.fullmatch("[0-9a-f]{32}", first["trace"])
    assert (span["name"], span["kind"], span["status"]) == ("text_completion singer", 2, 0)  # SERVER, UNSET
    assert span["resource"]["service.name"] == "kvarve"
    want = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvarve",
        "gen_ai.request.id": "cmpl-one",
        "gen_ai.request.model": "singer",
        "gen_ai.response.model": "singer",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.n": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "http.response.status_code": 200,
        "url.path": COMPLETIONS,
    }
    assert {name: span[name] for name in want} == want


def test_a_span_counts_tokens_by_tier_and_its_latencies_add_up(
    traced: httpx.Client, collector: Collector, song: str
) -> None:
    prompt = song * 4
    for tiers in ("", "device", "device,host"):
        if tiers:
            assert traced.post("/flush_cache", params={"tiers": tiers}).status_code == 200
        answer = complete(traced, prompt, max_tokens=4)
        span = collector.spans.get(timeout=LONG_S)
        usage = answer["usage"]
        for names, count in (
            (("prompt_tokens", "input_tokens"), usage["prompt_tokens"]),
            (("completion_tokens", "output_tokens"), 4),
            (("cached_tokens", "cache_read.input_tokens"), usage["prompt_tokens_details"]["cached_tokens"]),
        ):
            assert [span[f"gen_ai.usage.{name}"] for name in names] == [count, count]
        assert {tier: span[f"kvarve.usage.cached_tokens.{tier}"] for tier in TIERS} == usage["kvarve"]["cached_tokens"]
        times = {name: span[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
        inside = {name: span[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode", "inference")}
        assert 0 < times["time_in_queue"] < times["time_to_first_token"] < times["e2e"] <= span["seconds"]
        assert inside["prefill"] + times["time_in_queue"] == pytest.approx(times["time_to_first_token"])
        assert inside["prefill"] + inside["decode"] == pytest.approx(inside["inference"])
        assert span["gen_ai.response.time_to_first_chunk"] == times["time_to_first_token"]
    assert usage["kvarve"]["cached_tokens"]["storage"] > 0, "the last one came from storage"


def test_spans_have_no_text_salt_or_key(traced: httpx.Client, collector: Collector, song: str) -> None:
    secret = {"cache_salt": "pepper-and-salt", "stop": ["the-stop-text"], "user": "a-user", "max_tokens": 3}
    headers = {"Authorization": "Bearer a-key-of-mine"}
    message = {"role": "user", "content": "a-word " + song}
    assert traced.post(CHAT, json={"messages": [message], **secret}, headers=headers).status_code == 200
    answer = stream(traced, COMPLETIONS, {"prompt": "a-word " + song, **secret, "max_tokens": 12})
    text = "".join(chunk["choices"][0]["text"] for chunk in answer if chunk["choices"])
    assert text[:10] in song * 2
    raw = [collector.spans.get(timeout=LONG_S)["raw"] for _ in range(2)]
    for word in ("pepper", "the-stop-text", "a-user", "a-key", "a-word", "åkern", text[:10]):
        assert all(word.encode() not in span for span in raw), word


def test_a_refused_request_has_a_span_and_a_look_at_the_health_has_none(
    traced: httpx.Client, collector: Collector
) -> None:
    assert traced.get("/health").status_code == 200
    assert traced.get("/v1/models").status_code == 200
    assert traced.post(COMPLETIONS, content=b"{").status_code == 400
    assert traced.post("/generate", json={"text": ""}).status_code == 400
    found = [collector.spans.get(timeout=LONG_S) for _ in range(2)]
    assert {(span["url.path"], span["http.response.status_code"]) for span in found} == {
        (COMPLETIONS, 400),
        ("/generate", 400),
    }
    assert all(span["status"] == 0 and "gen_ai.usage.input_tokens" not in span for span in found)
    assert collector.spans.empty()


def test_a_dead_collector_costs_counted_spans_and_one_warning_and_nothing_else(
    traced: httpx.Client, collector: Collector, song: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        collector.status = 400  # not retried
        for at in range(2):
            complete(traced, song, max_tokens=1)
            until(traced, lambda now, at=at: now.get("kvarve_spans_total.lost", 0) == at + 1)  # type: ignore[misc]
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [record.name for record in told] == ["kvarve.reference.server.spans"]
        assert "takes no spans" in told[0].getMessage() and collector.url in told[0].getMessage()
        collector.status = 200
        complete(traced, song, max_tokens=1)
        assert collector.spans.get(timeout=LONG_S)["gen_ai.usage.output_tokens"] == 1
        assert until(traced, lambda now: now["kvarve_spans_total.sent"] == 1)["kvarve_spans_total.lost"] == 2


def test_spans_wait_for_a_collector_that_hangs_up_to_a_bound(collector: Collector) -> None:
    goes_on = threading.Event()
    take, collector.take = collector.take, lambda body: goes_on.wait(LONG_S) and take(body)  # type: ignore[method-assign]
    traces = Traces(collector.url, "singer")
    for _ in range(MOST_SPANS + 3):
        traces.add({"headers": (), "method": "POST", "path": COMPLETIONS}, 200, 0, told("chat", "one", None))
    assert traces.counts() == {"sent": 0, "lost": 3}
    goes_on.set()
    for _ in range(MOST_SPANS):
        assert collector.spans.get(timeout=LONG_S)["name"] == "chat singer"
    traces.close()
    assert collector.spans.empty() and traces.counts()["lost"] == 3


def test_an_endpoint_is_checked_before_anything_starts(checkpoint: Path) -> None:
    for good, url in (
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://h:1/otlp/v1/traces", "http://h:1/otlp/v1/traces"),
    ):
        assert check_endpoint(good) == url
    for bad in ("", "localhost:4317", "grpc://h:4317", "http://", "http://h:x", "http://[", "ftp://user:word@h"):
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint") as e:
            check_settings(settings(checkpoint, otlp_traces_endpoint=bad))
        assert "word" not in str(e.value)
