"""A span for each request that asks for answers, sent to an OpenTelemetry collector by OTLP over HTTP.

A span is made when its request has ended; a thread of the SDK sends them in batches. Its attributes are OpenTelemetry's
conventions for generative AI, and the older names that vLLM and SGLang give. It has no text, token, salt or key.
A collector that does not answer costs spans, which are counted, and one line in the log until it answers again.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from kvarve import __version__
from kvarve.errors import ConfigError
from kvarve.reference.engine.requests import Finish
from kvarve.reference.server.answers import Answer
from kvarve.settings.options import needs
from kvarve.storage.urls import shown
from kvarve.system.background import BackgroundCall

log = logging.getLogger(__name__)

PATH = "/v1/traces"  # where collectors listen, unless the URL has a path
MOST_PATH = 200  # characters, in spans and in the log
MOST_SPANS = 2048  # that wait for the collector; the SDK's own queue is as long
CLOSE_S = 3.0  # how long the last spans may take at shutdown
PARENT = (b"traceparent", b"tracestate")  # W3C's headers of the caller's span

Attributes = dict[str, Any]


def check_endpoint(url: str) -> str:
    """The URL that spans are sent to. ConfigError if it is none, or the extra is missing."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"--otlp-traces-endpoint: {shown(url)!r} must be the URL of a collector that takes OTLP over HTTP, such as "
            f"http://127.0.0.1:4318"
        )
    with needs("otel", "--otlp-traces-endpoint"):
        import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    return url if parts.path not in ("", "/") else parts._replace(path=PATH).geturl()


class Traces:
    """Sends spans to one collector, until `close`. `add` belongs to the event loop's thread."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`model`: the served model name. Further settings are OpenTelemetry's own variables, such as
        OTEL_EXPORTER_OTLP_HEADERS and OTEL_SERVICE_NAME."""
        url = check_endpoint(endpoint)
        self._model, self._shown = model, shown(url)
        self.ended = self.sent = self.failed = 0  # spans: made, taken by the collector, and not
        self._down = False
        api, sdk = import_module("opentelemetry.trace"), import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        resources = import_module("opentelemetry.sdk.resources")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log every failure, and its queue
        self._exporter = otlp.OTLPSpanExporter(endpoint=url)
        self._good = export.SpanExportResult.SUCCESS
        resource = resources.Resource.create({"service.version": __version__})
        if resource.attributes.get("service.name", "").startswith("unknown_service"):
            resource = resource.merge(resources.Resource({"service.name": "kvarve"}))
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(self, max_queue_size=MOST_SPANS))
        self._tracer = self._provider.get_tracer("kvarve", __version__)
        self._parent = propagation.TraceContextTextMapPropagator()
        self._server, self._error = api.SpanKind.SERVER, api.Status(api.StatusCode.ERROR)

    def add(self, scope: Scope, status: int, began_ns: int, attributes: Attributes) -> None:
        """A request has ended. `began_ns`: in Unix time; the headers of the `scope` may name the caller's span."""
        if self.ended - self.sent - self.failed >= MOST_SPANS:  # the collector is gone, or too slow
            self.ended, self.failed = self.ended + 1, self.failed + 1
            return
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in PARENT}
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            context=self._parent.extract(carrier),
            kind=self._server,
            start_time=began_ns,
            attributes={
                "gen_ai.provider.name": "kvarve",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "http.request.method": scope["method"],
                "url.path": scope["path"][:MOST_PATH],
                "http.response.status_code": status,
                **({"error.type": str(status)} if status >= 500 else {}),
                **attributes,
            },
        )
        if status >= 500 or "error.type" in attributes:
            span.set_status(self._error)
        self.ended += span.is_recording()  # else the sampler has left it out
        span.end()

    def counts(self) -> dict[str, int]:
        """Spans by what became of them; those that wait are in neither."""
        return {"sent": self.sent, "lost": self.failed}

    def close(self) -> None:
        """Send the spans that wait, for a few seconds at most."""
        BackgroundCall("kvarve last spans", self._provider.shutdown).ended(CLOSE_S)

    # --- what the SDK's thread calls: the interface of an exporter

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._exporter.export(spans)
        if result is self._good:
            self.sent += len(spans)
            if self._down:
                log.warning("the collector of traces %s answers again", self._shown)
            self._down = False
            return result
        self.failed += len(spans)
        if not self._down:
            log.warning("the collector of traces %s takes no spans: they are lost until it does", self._shown)
        self._down = True
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def told(operation: str, number: str, answer: Answer | None) -> Attributes:
    """What a span says of a request: one of `operation`, with this id, and as far as it came. Times in seconds."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.id": number,
        "gen_ai.response.id": number,
    }
    if answer is None or answer.prepared is None or not answer.choices:
        return found
    sampling, request = answer.prepared.samplings[0], answer.prepared.request
    count = len(answer.choices) // len(answer.prepared.prompts)
    asked = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or None,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed,
        "stream": bool(request.stream),
        "n": count,
        "choice.count": count if count > 1 else None,
    }
    found |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
    ends = [one.finish for one in answer.choices]
    found["gen_ai.response.finish_reasons"] = [end.value for end in ends if end is not None]
    if Finish.ERROR in ends:
        found["error.type"] = "engine"
    if all(one.usage is None for one in answer.choices):
        return found
    usage = answer.usage()
    tiers = usage.details()
    tokens = {
        "input_tokens": usage.prompt,
        "output_tokens": usage.completion,
        "cache_read.input_tokens": sum(tiers.values()),
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "cached_tokens": sum(tiers.values()),
    }
    found |= {f"gen_ai.usage.{name}": count for name, count in tokens.items()}
    found |= {f"kvarve.usage.cached_tokens.{tier}": count for tier, count in tiers.items()}
    return found | _latencies(answer)


def _latencies(answer: Answer) -> Attributes:
    """Where the time of a request went, under vLLM's and SGLang's names. A request of several answers queues until the
    first of them is admitted, and decodes until the last one has ended."""
    end = max(one.seconds for one in answer.choices) or answer.seconds
    queued, first = answer.queued_s, answer.first_seconds
    times = {"e2e": end, "time_in_queue": queued, "time_to_first_token": first}
    if queued is not None:
        times["time_in_model_inference"] = end - queued
    if queued is not None and first is not None:
        times |= {"time_in_model_prefill": first - queued, "time_in_model_decode": end - first}
    found = {f"gen_ai.latency.{name}": seconds for name, seconds in times.items() if seconds is not None}
    return found if first is None else found | {"gen_ai.response.time_to_first_chunk": first}
