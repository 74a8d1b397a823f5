"""How numbers become families of samples."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvarve.core.observe.histograms import Histogram


def gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def by(name: str, help_text: str, labels: tuple[str, ...], values: Mapping[str, float], level: bool = False) -> Metric:
    """A metric with labels; a key of `values` holds their values, with dots between them. `level`: it is a gauge."""
    family = (GaugeMetricFamily if level else CounterMetricFamily)(name, help_text, labels=labels)
    for key, value in values.items():
        family.add_metric(key.split(".", len(labels) - 1), value)
    return family


def histogram(name: str, help_text: str, found: Histogram) -> Metric:
    family = HistogramMetricFamily(name, help_text)
    family.add_metric([], found.buckets(), found.sum)
    return family


def histograms(name: str, help_text: str, label: str, found: Mapping[str, Histogram]) -> Metric:
    """One for each value of a label."""
    family = HistogramMetricFamily(name, help_text, labels=(label,))
    for value, each in found.items():
        family.add_metric([value], each.buckets(), each.sum)
    return family
