"""A cache over two storages: a page that one has lost is read from the other, and put back."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from filling import (
    ALL,
    LONG,
    a_config,
    a_store,
    an_identity,
    nothing_is_left,
    prompt,
    run,
    settle,
    until,
)

from gates import lose_patience_with_stalled_calls
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.storage import Breaker, Tiers, open_storage
from kvarve.storage._memory_storage import forget_memory
from kvarve.transfer.storage_connection import FETCHES


class Places:
    def __init__(self) -> None:
        self.names = [uuid4().hex for _ in range(2)]
        self.near, self.far = (f"memory://{name}?capacity=64MiB" for name in self.names)

    def run(self, *urls: str) -> tuple[int, int, int]:
        """The long prompt through a fresh cache; its pages from device, host and storage. None may be bad."""
        cache = PrefixCache(an_identity(), a_config(storage=urls))
        found = run(cache, LONG)
        settle(cache)
        assert cache.stats()["bad_storage"] == cache.stats()["lane_failed.storage-to-host"] == 0
        assert nothing_is_left(cache)
        cache.shutdown()
        return found

    def lose(self, number: int) -> None:
        forget_memory(self.names[number])


@pytest.fixture
def places() -> Iterator[Places]:
    places = Places()
    yield places
    for number in range(2):
        places.lose(number)


def test_a_near_storage_that_was_lost_is_filled_from_the_far_one(places: Places) -> None:
    assert places.run(places.near, places.far) == (0, 0, 0)
    assert places.run(places.far) == (0, 0, ALL), "it has all pages too"
    places.lose(0)
    assert places.run(places.near, places.far) == (0, 0, ALL)
    places.lose(1)
    assert places.run(places.near) == (0, 0, ALL)


def test_pages_that_the_near_storage_damaged_come_from_the_far_one_and_are_mended(places: Places) -> None:
    places.run(places.near, places.far)
    identity = an_identity()
    near = open_storage(places.near, label=identity.fingerprint(), description="test")
    objects = near._region.objects  # type: ignore[attr-defined]
    for number, (name, data) in enumerate(objects.items()):
        objects[name] = bytes(len(data)) if number % 2 else data[:-1]
    assert places.run(places.near, places.far) == (0, 0, ALL)
    places.lose(1)
    assert places.run(places.near, places.far) == (0, 0, ALL)


@pytest.fixture
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PrefixCache]]:
    """A near storage, a far one, and a cache over both with a deadline in seconds."""
    near, far = a_store(), a_store()
    lose_patience_with_stalled_calls(monkeypatch, far)
    tiers = Tiers([Breaker(each, deadline_s=60.0) for each in (near, far)])
    config = a_config(storage_deadline_s=request.param, storage_wait="all")
    cache = PrefixCache(an_identity(), config, storage=tiers)
    run(cache, LONG)
    settle(cache)
    cache.flush()
    yield near, far, cache
    settle(cache)
    assert nothing_is_left(cache)
    cache.shutdown()


@pytest.mark.parametrize("two", [60.0], indirect=True)
def test_a_far_storage_that_does_not_answer_costs_nothing_of_what_the_near_one_has(
    two: tuple[PrefixCache],
) -> None:
    _, far, cache = two
    far.stall()
    for number in range(FETCHES + 1):
        run(cache, prompt(8.5, seed=20 + number))
        cache.flush()
        assert run(cache, LONG) == (0, 0, ALL)
        cache.flush()
    far.release()


@pytest.mark.parametrize("two", [0.2], indirect=True)
def test_new_workers_replace_those_that_hang_reading_from_a_far_storage(
    two: tuple[PrefixCache],
) -> None:
    near, far, cache = two
    others = [prompt(8.5, seed=20 + number) for number in range(FETCHES)]
    known = {*near.inner._region.objects}  # type: ignore[attr-defined]
    for tokens in others:
        run(cache, tokens)
    settle(cache)
    cache.flush()
    near.inner.delete([name for name in near.inner._region.objects if name not in known])  # type: ignore[attr-defined]
    far.stall("get")
    asking = [cache.open(tokens) for tokens in others]
    until(cache, lambda: far.counts["stall: get"] >= len(asking))
    until(cache, lambda: cache.stats()["lane_stuck_s.storage-to-host"] > 0.2)
    assert run(cache, LONG) == (0, 0, ALL), "though the three fetch workers still hang"
    far.release()
    for lease in asking:
        cache.close(lease)
