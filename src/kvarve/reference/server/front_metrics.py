"""The metrics of a front: those of its replicas in one text, and its own."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvarve.reference.server.replicas import Replica
from kvarve.reference.server.request_log import Responses

FRONT = "front"  # its own series' replica


def front_families(replicas: Iterable[Replica], responses: Responses) -> list[Metric]:
    """What the front itself knows. Responses that a replica has given are that one's."""
    up = GaugeMetricFamily("kvarve_replica_up", "1 while a replica serves.", labels=["replica"])
    busy = GaugeMetricFamily("kvarve_replica_requests", "Requests that a replica is answering.", labels=["replica"])
    starts = CounterMetricFamily("kvarve_replica_starts", "How often a replica was started.", labels=["replica"])
    for each in replicas:
        up.add_metric([str(each.number)], each.up)
        busy.add_metric([str(each.number)], each.busy)
        starts.add_metric([str(each.number)], each.starts)
    labels = ["replica", "method", "route", "status"]
    answered = CounterMetricFamily("kvarve_responses", "Responses.", labels=labels)
    rejected = CounterMetricFamily(
        "kvarve_rejected_requests", "Requests that got an error.", labels=["replica", "status"]
    )
    statuses = Counter[str]()
    for (method, route, status), count in responses.items():
        answered.add_metric([FRONT, method, route, str(status)], count)
        if status >= 400:
            statuses[str(status)] += count
    for status_text, count in statuses.items():
        rejected.add_metric([FRONT, status_text], count)
    return [up, busy, starts, answered, rejected]


def merged(texts: Sequence[tuple[int, str]], own: Iterable[Metric]) -> bytes:
    """The metrics of replicas, by their numbers, and of the front in one text. Every sample has its `replica`, and one
    under a name of vLLM's the number of its engine."""
    found: dict[str, Metric] = {}
    for number, text in texts:
        with suppress(ValueError):  # it was cut off
            for family in [*text_string_to_metric_families(text)]:
                for sample in family.samples:
                    labels = {"replica": str(number)} | sample.labels
                    labels |= {"engine": str(number)} if "engine" in sample.labels else {}
                    _metric(found, family).add_sample(sample.name, labels, sample.value)
    for family in own:
        for sample in family.samples:
            _metric(found, family).add_sample(sample.name, sample.labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Found(found))
    return generate_latest(registry)


def _metric(found: dict[str, Metric], like: Metric) -> Metric:
    return found.setdefault(like.name, Metric(like.name, like.documentation, like.type))


class _Found(Collector):
    def __init__(self, found: Mapping[str, Metric]) -> None:
        self._found = found

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return iter(self._found.values())
