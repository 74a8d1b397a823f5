"""The numbers of one server at one moment, for its metrics."""

import time
from collections.abc import Mapping
from dataclasses import fields

from kvarve import __version__
from kvarve.core.observe.histograms import Histogram
from kvarve.errors import StorageError
from kvarve.metrics import Snapshot
from kvarve.reference.engine.engine import Engine
from kvarve.reference.server.connections import Connections


def snapshot(
    engine: Engine,
    name: str,
    *,
    connections: Connections | None,
    tokenizing: int,
    responses: Mapping[tuple[str, str, int], int],
    ignored_fields: Mapping[str, int],
    spans: Mapping[str, int] | None = None,
) -> Snapshot:
    """From any thread. `name`: of the model, as clients know it."""
    cache, counts = engine.cache, engine.counts
    try:
        storage = cache.worker.usage()  # first: it may be slow, and the rest is one consistent snapshot
    except StorageError:  # closed, or the medium is gone: the scrape has the rest
        storage = None
    attached, now = cache.worker.attached, time.monotonic()
    admitted = counts.admitted_rate.total(now)
    return Snapshot(
        model=name,
        version=__version__,
        up=not engine.broken,
        running=engine.load()[0],
        waiting=engine.waiting(),
        ends={finish.value: count for finish, count in counts.ends.items()},
        prompt_tokens=counts.prompt_tokens,
        computed_tokens=counts.computed_tokens,
        output_tokens=counts.output_tokens,
        preempted=counts.preempted,
        reasons=dict(counts.reasons),
        histograms={
            each.name: value for each in fields(counts) if isinstance(value := getattr(counts, each.name), Histogram)
        },
        cache=cache.stats(),
        ages=cache.scheduler.core.slot_pools.ages,
        flows=cache.worker.flows(),
        storage=storage,
        storage_up=cache.up if attached is not None else None,
        storage_kinds=()
        if attached is None
        else tuple(url.partition("://")[0] if "://" in url else "file" for url in attached.urls),
        dtype=engine.model.identity.dtype,
        output_rate=counts.output_rate.per_second(now),
        hit_rate=counts.cached_rate.total(now) / admitted if admitted else 0.0,
        tokenizing=tokenizing,
        connections=None if connections is None else len(connections),
        closed_connections={} if connections is None else dict(connections.closed),
        responses=dict(responses),
        ignored_fields=ignored_fields,
        spans=spans,
    )
