"""A cache over a storage that compresses: every page that it resumes from is the page that was computed."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import filling
import numpy as np
import pytest
import torch
from filling import ALL, LONG, an_identity, run, settle
from torch import Tensor

import kvarve.cache.worker
from compressible import numbers
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cli.main import main
from kvarve.errors import ConfigError
from kvarve.pages.pools import BufferSpec, PoolSpec
from kvarve.records.encodings import codec, plain_bytes
from kvarve.storage import MemoryStorage
from kvarve.storage._memory_storage import forget_memory

pytest.importorskip("zstandard")
pytest.importorskip("lz4")
KV = PoolSpec("attention", tuple(BufferSpec(each, (64, 2, 64), "bfloat16") for each in "kv"), None)
STATE = PoolSpec("state", (BufferSpec("s", (4, 40, 40), "float32"), BufferSpec("c", (100,), "bfloat16")), 1)
ROOM = 4 << 20
PLACE = "memory://{}?capacity=64MiB{}"


def a_page(pool: PoolSpec, buffer: BufferSpec, tokens: Sequence[int], salt: str, rank: int = 0) -> Tensor:
    told = f"{pool.name} {buffer.name} {salt} {rank} ".encode() + np.asarray(tokens, np.int64).tobytes()
    seed = int.from_bytes(hashlib.sha256(told).digest()[:8], "little")
    raw = np.frombuffer(bytearray(numbers(buffer.dtype, buffer.nbytes, seed)), np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, buffer.dtype)).view(buffer.shape)


@pytest.fixture(autouse=True)
def _pages_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "page_bytes", a_page)


@pytest.fixture
def make() -> Iterator[Callable[..., PrefixCache]]:
    caches: list[PrefixCache] = []

    def made(*urls: str, **settings: Any) -> PrefixCache:
        config = CacheConfig(ROOM, 2 * ROOM, urls, **settings)
        caches.append(PrefixCache(an_identity((KV, STATE)), config))
        return caches[-1]

    yield made
    for cache in caches:
        cache.shutdown(5)


@pytest.fixture
def here() -> Iterator[str]:
    name = uuid4().hex
    yield name
    forget_memory(name)


def of(name: str) -> MemoryStorage:
    return MemoryStorage(64 << 20, an_identity((KV, STATE)).fingerprint(), "test", name)


def turned(cache: PrefixCache) -> tuple[int, int, int]:
    """The long prompt through a cache that is then shut down; its pages from device, host and storage."""
    found = run(cache, LONG)
    cache.shutdown(30)
    assert cache.scheduler.core.counters.bad_storage == 0
    return found


@pytest.mark.parametrize(("writes", "reads"), [("zstd", "no"), ("no", "zstd"), ("lz4", "auto")])
def test_pages_come_back_after_a_restart_with_any_other_setting(
    make: Callable[..., PrefixCache], here: str, writes: str, reads: str
) -> None:
    assert turned(make(PLACE.format(here, f"&compress={writes}"))) == (0, 0, 0)
    encoded = [plain_bytes(memoryview(data), len(data)) is not None for data in of(here)._region.objects.values()]  # type: ignore[union-attr]
    assert all(encoded) if writes == "zstd" else any(encoded) == (writes != "no")
    assert turned(make(PLACE.format(here, f"&compress={reads}"))) == (0, 0, ALL)


def test_verify_and_stat_know_compressed_pages_and_change_nothing(
    make: Callable[..., PrefixCache],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "store"
    cache = make(f"file://{folder}?capacity=64MiB&compress=zstd")
    run(cache, LONG)
    settle(cache)
    totals = {name: value for name, value in cache.stats().items() if name.startswith("compress_")}
    assert totals["compress_stored_bytes.attention"] < 0.72 * totals["compress_plain_bytes.attention"]
    assert totals["compress_on.attention"] == 1
    cache.shutdown(5)

    def command(*words: str) -> tuple[int, str]:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        code = main(["storage", words[0], str(folder), *words[1:]])
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return code, capsys.readouterr().out

    assert command("stat")[0] == command("ls")[0] == 0
    code, told = command("verify")
    assert code == 0 and "none damaged" in told
    slab = max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(slab.read_bytes())
    data[data.index(b"kvarvepg") + 6000] ^= 1
    slab.write_bytes(data)
    code, told = command("verify")
    assert code == 1 and "1 damaged" in told
    codec.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    code, told = command("verify")
    assert code == 0 and "compressed: not checked (install the extra 'compress')" in told
    codec.cache_clear()


def test_the_buffers_count_as_memory(make: Callable[..., PrefixCache], here: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(kvarve.cache.worker, "host_bytes", lambda: 3 * ROOM + 1)
    assert turned(make(PLACE.format(here, ""))) == (0, 0, 0)
    with pytest.raises(ConfigError, match="must be at most this machine's"):
        make(PLACE.format(here, "&compress=zstd"))
