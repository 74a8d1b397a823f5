"""A cache under a storage key takes pages that were sealed with it, and counts all others as bad."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from filling import ALL, HOST_ROOM, LONG, ROOM, an_identity, run, settle

from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cli.main import main
from kvarve.storage._memory_storage import forget_memory

pytest.importorskip("cryptography")


@pytest.fixture
def url():
    name = uuid4().hex
    yield f"memory://{name}?capacity=64MiB"
    forget_memory(name)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str | None]:
    for number in (1, 2):
        (tmp_path / f"key{number}").write_bytes(bytes([number]) * 32)
        (tmp_path / f"key{number}").chmod(0o600)
    return {"none": None, "one": str(tmp_path / "key1"), "two": str(tmp_path / "key2")}


@pytest.fixture
def make() -> Iterator[Callable[..., PrefixCache]]:
    caches: list[PrefixCache] = []

    def made(url: str, key: str | None) -> PrefixCache:
        caches.append(PrefixCache(an_identity(), CacheConfig(ROOM, HOST_ROOM, url, storage_key=key)))
        return caches[-1]

    yield made
    for cache in caches:
        cache.shutdown(5)


@pytest.mark.parametrize(("writer", "reader"), [("none", "one"), ("two", "one"), ("one", "none"), ("one", "one")])
def test_pages_of_another_key_are_computed_anew_and_taken_from_then_on(
    make: Callable[..., PrefixCache], url: str, keys: dict[str, str | None], writer: str, reader: str
) -> None:
    planter = make(url, keys[writer])
    assert run(planter, LONG) == (0, 0, 0)
    settle(planter)
    planter.shutdown(5)
    cache = make(url, keys[reader])
    if writer == reader:
        assert run(cache, LONG) == (0, 0, ALL)
        assert cache.scheduler.core.counters.bad_storage == 0
        return
    assert run(cache, LONG) == (0, 0, 0)
    assert cache.scheduler.core.counters.bad_storage >= ALL
    settle(cache)
    cache.flush()
    assert run(cache, LONG) == (0, 0, ALL), "its own pages have taken the place of the planted ones"


def test_verify_needs_the_key_of_what_was_sealed_with_one(
    make: Callable[..., PrefixCache], keys: dict[str, str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "store"
    cache = make(f"file://{folder}?capacity=64MiB", keys["one"])
    run(cache, LONG)
    settle(cache)
    cache.shutdown(5)

    def verify(*words: str) -> tuple[int, str]:
        code = main(["storage", "verify", str(folder), *words])
        return code, capsys.readouterr().out

    code, told = verify()
    assert code == 0 and "sealed with a key: not checked (--storage-key)" in told
    code, told = verify("--storage-key", str(keys["one"]))
    assert code == 0 and "none damaged" in told and "not checked" not in told
    code, told = verify("--storage-key", str(keys["two"]))
    assert code == 1 and "its seal or its checksum is wrong" in told
