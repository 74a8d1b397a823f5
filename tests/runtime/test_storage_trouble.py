"""A folder that is only read, a disk that is full, one that loses objects: what a cache makes of them, and tells."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from filling import ALL, LONG, Request, a_config, a_store, an_identity, prompt, run, settle, until

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.copies.effects import Refusal
from kvarve.pages.pools import Tier
from kvarve.storage import StorageUsage
from kvarve.storage.file.disk import Disk
from tests.sim.world.dirty import WHY


def opened(url: str) -> PrefixCache:
    return PrefixCache(an_identity(), a_config(storage=url))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir(0o700)
    return tmp_path / "store"


def contents(cache: PrefixCache) -> StorageUsage:
    """The usage of its storage but for the disk's room, which other programs take and give back."""
    usage = cache.worker.usage()
    assert usage is not None
    return replace(usage, room_bytes=None)


def test_caches_that_only_read_a_folder_find_what_another_one_stored_and_store_nothing(folder: Path) -> None:
    url = f"file://{folder}"
    one = opened(f"{url}?read_only=true")
    other = opened(f"{url}?capacity=64MiB")
    run(other, LONG)
    settle(other)
    before = contents(other)
    assert run(one, LONG) == (0, 0, ALL), "and it was there first"
    run(one, prompt(4.5, seed=7))
    settle(one)
    assert one.scheduler.core.dirty() == 0
    one.scheduler.core.flush([Tier.DEVICE, Tier.HOST])
    assert not any(one.stats()[f"dropped_{why}"] for why in WHY) and one.stats()["stored"] == 0
    assert one.worker.usage() is not None and one.worker.usage().read_only and one.up
    assert contents(other) == before
    request = Request(one, LONG).wait()
    assert one.scheduler.export(request.lease, 1e12) is None, "nobody would find what is handed over"
    request.close()
    change = one.worker.attach(a_store(), back_up=True)
    one.step()
    change.made.result(0)
    settle(one)
    assert one.stats()["stored"] > 0, "but in another storage"
    one.shutdown()
    other.shutdown()


def test_a_disk_that_takes_no_more_writes_costs_no_page_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(f"file://{folder}?capacity=64MiB")
    run(cache, LONG)
    settle(cache)

    def refused(*how: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Disk, "write", refused)
    run(cache, prompt(4.5, seed=7))
    until(cache, lambda: cache.stats()["stores_refused"] == Refusal.READ_ONLY)
    cache.scheduler.core.flush([Tier.DEVICE, Tier.HOST])
    stats = cache.stats()
    assert stats["dropped_read_only"] > 0 and stats["dropped_evicted"] == stats["dropped_failed"] == 0
    assert cache.up and run(cache, LONG) == (0, 0, ALL)
    cache.shutdown()


def test_pages_for_which_the_disk_has_no_room_are_counted_as_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the reserve of 256 MiB 408 of 408 pages were given up as `evicted`, which a faster storage would mend."""
    monkeypatch.setattr(Disk, "space", lambda disk, folder: (200 << 20, 10 << 30))
    cache = opened(f"file://{folder}?capacity=64MiB")
    run(cache, LONG)
    until(cache, lambda: cache.stats()["stores_refused"] == Refusal.FULL)
    cache.scheduler.core.flush([Tier.DEVICE, Tier.HOST])
    stats, usage = cache.stats(), cache.worker.usage()
    assert stats["dropped_full"] > 0 and stats["dropped_evicted"] == stats["dropped_failed"] == 0
    assert usage is not None and usage.room_bytes == 0 and cache.up and cache.worker.attached is not None
    assert cache.stats()["storage_room.0"] == 0
    monkeypatch.undo()
    files = cache.worker.attached.storage.inner.inner  # type: ignore[union-attr]
    files._allocator._full_until.clear()  # it asks again after some seconds
    run(cache, LONG)
    cache.scheduler.core.retry()
    until(cache, lambda: not cache.stats()["stores_refused"])
    settle(cache)
    cache.scheduler.core.flush([Tier.DEVICE, Tier.HOST])
    assert run(cache, LONG) == (0, 0, ALL)
    cache.shutdown()
