"""What went wrong in the reference's storage on 3FS, played to whole caches.

Pools that fail by themselves, lengths that do not match, and a prompt that is asked again from storage alone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# In front of the benchmarks, one of which has the name of a module here.
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from filling import POOLS, a_config, an_identity, prompt, run, settle
from hf3fs_stores import Stores, stores_in

from engines import a_model, a_request, by_hand, engines
from kvarve.model import ModelIdentity
from kvarve.prefix_cache import PrefixCache
from kvarve.testing.usrbio import Emulator, Fate, Operation

LONG_S = 60.0
LONG = prompt(8.5)
ALL = 8  # pages of it that can be resumed from


@pytest.fixture(params=["posix", pytest.param("usrbio", marks=pytest.mark.long)])
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


@pytest.mark.parametrize("put_instead", [None, b"short", bytes(100_000)], ids=["lost", "shorter", "longer"])
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_pages_of_one_pool_that_are_lost_or_of_another_length_are_computed_and_stored_again(
    stores: Stores, make: MakeCache, pool: object, put_instead: bytes | None
) -> None:
    first = make()
    run(first, LONG)
    settle(first)
    first.shutdown(5)
    store = stores.open(label=an_identity().fingerprint())
    names = [it.name for it in stores.entries() if f".{pool.name}." in it.name][-1:]  # type: ignore[attr-defined]
    assert store.delete(names) == [True]
    if put_instead is not None:
        assert store.put(names, [memoryview(put_instead)]) == [True]
    second = make()
    assert sum(run(second, LONG)) < ALL
    settle(second)
    second.flush()
    assert run(second, LONG) == (0, 0, ALL)


@pytest.mark.parametrize(
    "fate", [Fate.EIO, *(pytest.param(it, marks=pytest.mark.long) for it in (Fate.ZEROS, Fate.SHORT, Fate.HOLE_MIDDLE))]
)
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_writes_of_one_pool_that_fail_leave_no_prefix_that_lacks_it(tmp_path: Path, pool: object, fate: Fate) -> None:
    """Every page that a request resumes from is compared with its expected content (`filling`)."""
    daemon = Emulator(tmp_path)
    with stores_in(tmp_path, daemon) as stores:

        def behave(operation: Operation) -> Fate:
            places = {(it.slot.extent.number, it.slot.place * it.slot.slot_bytes): it.name for it in stores.entries()}
            number = int(operation.file.path.name.rpartition("-")[2])
            name = places.get((number, operation.offset), "")
            return fate if not operation.read and f".{pool.name}." in name else Fate.DONE  # type: ignore[attr-defined]

        daemon.behave = behave
        cache = PrefixCache(an_identity(), a_config(), storage=stores.open(label=an_identity().fingerprint()))
        run(cache, LONG), run(cache, prompt(8.5, 1))
        cache.wait(0.01)
        cache.flush()
        daemon.behave = lambda _: Fate.DONE
        run(cache, LONG), run(cache, prompt(8.5, 1))
        cache.shutdown(5)
        later = PrefixCache(an_identity(), a_config(), storage=stores.open(label=an_identity().fingerprint()))
        for _ in range(2):
            run(later, LONG)
            settle(later)
            later.flush()
        assert run(later, LONG) == (0, 0, ALL), "a cache that has not backed off stores them again"
        later.shutdown(5)


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v4", "qwen3_5", "gpt_oss", "deepseek_v32"])
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
