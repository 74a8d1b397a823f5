"""A metric of another server's as a row: its name there, what kind it is, and how it follows from our numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvarve.core.observe.histograms import Histogram
from kvarve.metrics.snapshot import Snapshot

Found = float | Histogram | Mapping[str, float] | Mapping[str, Histogram]


class Row(NamedTuple):
    """`read`: a number, or numbers by the value of `label`; None leaves it out now. `scale`: of what is in a
    histogram."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
    read: Callable[[Snapshot], Found | None]
    help_text: str
    label: str = ""
    constant: tuple[tuple[str, str], ...] = ()  # other labels
    scale: float = 1.0


def told(prefix: str, rows: Sequence[Row], now: Snapshot, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Families of these rows, each sample with the `labels` of the server."""
    for row in rows:
        found = row.read(now)
        if found is None:
            continue
        own = dict(labels) | dict(row.constant)
        names = [*own, *([row.label] if row.label else [])]
        family = row.kind(prefix + row.name, row.help_text, labels=names)
        for value, number in found.items() if isinstance(found, Mapping) else [(None, found)]:
            values = [*own.values(), *([] if value is None else [value])]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(number, Histogram)
                family.add_metric(values, number.buckets(row.scale), number.sum * row.scale)
            else:
                assert not isinstance(number, Histogram)
                family.add_metric(values, number)
        yield family
