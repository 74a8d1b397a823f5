"""How numbers become families of samples."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvarve.core.observe.histograms import Histogram

Kind = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
Found = float | Histogram | Mapping[Any, float] | Mapping[Any, Histogram]

COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


def told(
    kind: Kind,
    name: str,
    help_text: str,
    found: Found,
    *labels: str,
    server: Mapping[str, str] | None = None,
    scale: float = 1.0,
) -> Metric:
    """A number, or one for each key, which holds the values of the `labels`, with dots between them if it is a text.
    Each sample also has the labels of the `server`. `scale`: of what is in a histogram."""
    server = server or {}
    family: Any = kind(name, help_text, labels=[*server, *labels])
    for key, number in found.items() if isinstance(found, Mapping) else [((), found)]:
        values = [*server.values(), *(key.split(".", len(labels) - 1) if isinstance(key, str) else key)]
        if isinstance(number, Histogram):
            family.add_metric(values, number.buckets(scale), number.sum * scale)
        else:
            family.add_metric(values, number)
    made: Metric = family
    return made
