"""What went wrong in the reference's storage on 3FS, played to whole caches.

Pools that fail by themselves or come in another order, lengths that do not match, a close while pages are written, and
a prompt that is asked again from storage alone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# In front of the benchmarks, one of which has the name of a module here.
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from filling import POOLS, a_config, an_identity, prompt, run, settle, until
from hf3fs_stores import Stores, stores_in

from engines import a_model, a_request, by_hand, engines
from gates import Gate
from kvarve.model import ModelIdentity
from kvarve.prefix_cache import PrefixCache
from kvarve.storage.file.disk import Disk
from kvarve.storage.hf3fs import storage as storage_module
from kvarve.testing.usrbio import Emulator, Fate, Operation

LONG_S = 60.0
LONG = prompt(8.5)
ALL = 8  # pages of it that can be resumed from


@pytest.fixture(params=["posix", "usrbio"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    daemon = Emulator(tmp_path) if request.param == "usrbio" else None
    with stores_in(tmp_path, daemon) as stores:
        yield stores
    assert daemon is None or not daemon.misuse


MakeCache = Callable[..., PrefixCache]


@pytest.fixture
def make(stores: Stores) -> Iterator[MakeCache]:
    caches = []

    def make(identity: ModelIdentity | None = None, **more: object) -> PrefixCache:
        its = identity or an_identity()
        storage = stores.open(label=its.fingerprint(), **more)
        caches.append(PrefixCache(its, a_config(), storage=storage))
        return caches[-1]

    yield make
    for cache in caches:
        cache.shutdown(5)


def names_of(stores: Stores, pool: str) -> list[str]:
    return [it.name for it in stores.table().table._entries() if f".{pool}." in it.name]


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_pages_of_one_pool_that_are_lost_are_computed_and_stored_again(
    stores: Stores, make: MakeCache, pool: object
) -> None:
    first = make()
    run(first, LONG)
    settle(first)
    first.shutdown(5)
    lost = stores.open(label=an_identity().fingerprint())
    assert all(lost.delete(names_of(stores, pool.name)[-1:]))  # type: ignore[attr-defined]
    second = make()
    assert sum(run(second, LONG)) < ALL
    settle(second)
    second.flush()
    assert run(second, LONG) == (0, 0, ALL)


@pytest.mark.parametrize(
    "fate", [Fate.EIO, Fate.ZEROS, *(pytest.param(it, marks=pytest.mark.long) for it in (Fate.SHORT, Fate.HOLE_MIDDLE))]
)
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_writes_of_one_pool_that_fail_leave_no_prefix_that_lacks_it(tmp_path: Path, pool: object, fate: Fate) -> None:
    """Every page that a request resumes from is compared with its expected content (`filling`)."""
    daemon = Emulator(tmp_path)
    with stores_in(tmp_path, daemon) as stores:
        entries = stores.table().table._entries

        def behave(operation: Operation) -> Fate:
            reserved = {(it.slot.extent.number, it.slot.place * it.slot.slot_bytes): it.name for it in entries()}
            number = int(operation.file.path.name.rpartition("-")[2])
            name = reserved.get((number, operation.offset), "")
            return fate if not operation.read and f".{pool.name}." in name else Fate.DONE  # type: ignore[attr-defined]

        daemon.behave = behave
        cache = PrefixCache(an_identity(), a_config(), storage=stores.open(label=an_identity().fingerprint()))
        for seed in range(3):
            run(cache, prompt(8.5, seed))
        cache.wait(0.01)
        cache.flush()
        daemon.behave = lambda _: Fate.DONE
        for seed in range(3):
            run(cache, prompt(8.5, seed))
        cache.shutdown(5)
        later = PrefixCache(an_identity(), a_config(), storage=stores.open(label=an_identity().fingerprint()))
        for _ in range(2):
            run(later, LONG)
            settle(later)
            later.flush()
        assert run(later, LONG) == (0, 0, ALL), "a cache that has not backed off stores them again"
        later.shutdown(5)


def test_a_model_whose_pools_stand_in_another_order_has_pages_of_its_own(make: MakeCache) -> None:
    one, other = make(), make(an_identity(POOLS[::-1]))
    run(one, LONG)
    settle(one)
    assert run(other, LONG) == (0, 0, 0)
    settle(other)
    for cache in (one, other):
        cache.flush()
        assert run(cache, LONG) == (0, 0, ALL)


def test_an_object_of_another_length_is_a_miss(stores: Stores, make: MakeCache) -> None:
    first = make()
    run(first, LONG)
    settle(first)
    first.shutdown(5)
    store = stores.open(label=an_identity().fingerprint())
    names = names_of(stores, "attention")[:2]
    assert all(store.delete(names))
    assert all(store.put(names, [memoryview(b"short"), memoryview(bytes(100_000))]))
    second = make()
    assert sum(run(second, LONG)) < ALL
    settle(second)
    second.flush()
    assert run(second, LONG) == (0, 0, ALL)


class Held(Disk):
    gate: Gate | None = None

    def sync(self, file: int) -> None:
        if self.gate is not None:
            self.gate()
        super().sync(file)


def test_a_cache_that_is_shut_down_while_it_writes_ends_and_leaves_only_whole_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "CLOSE_S", 0.1)
    with stores_in(tmp_path) as stores:
        disk = Held()
        storage = stores.open(label=an_identity().fingerprint(), disk=disk)
        disk.gate = Gate()
        cache = PrefixCache(an_identity(), a_config(), storage=storage)
        run(cache, LONG)
        until(cache, disk.gate.begun.is_set)
        cache.shutdown(0.1)
        disk.gate.may_end.set()
        disk.gate = None
        again = PrefixCache(an_identity(), a_config(), storage=stores.open(label=an_identity().fingerprint()))
        run(again, LONG)
        settle(again)
        again.flush()
        assert run(again, LONG) == (0, 0, ALL)
        again.shutdown(5)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v4", *(pytest.param(it, marks=pytest.mark.long) for it in ("qwen3_5", "gpt_oss", "deepseek_v32"))],
)
def test_a_prompt_of_a_thousand_tokens_is_primed_flushed_and_found_in_storage(stores: Stores, family: str) -> None:
    model = a_model(family)
    with contextmanager(engines)() as make:
        engine = make(model, start=False, storage=stores.open(label=model.identity.fingerprint()))
        tokens = [(7 * i) % 251 for i in range(1000)]
        ((_, answer, first),) = by_hand(engine, a_request(tokens, 3))
        engine.cache.settle(LONG_S)
        engine.cache.flush()
        ((_, again, second),) = by_hand(engine, a_request(tokens, 3))
        assert again == answer
        assert first.usage is not None and second.usage is not None
        assert first.usage.cached == 0
        assert second.usage.storage >= 700
