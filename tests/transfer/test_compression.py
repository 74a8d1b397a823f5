"""A storage that compresses: the same records come out, whoever reads them, and `auto` does so only where it pays."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from compressible import MODEL, a_record
from kvarve.errors import ConfigError
from kvarve.records import encodings
from kvarve.records.encodings import codec
from kvarve.records.record import HEADER_BYTES, whole
from kvarve.records.seals import Tag
from kvarve.storage import MemoryStorage, Storage, Tiers, open_storage
from kvarve.storage._memory_storage import forget_memory
from kvarve.storage.urls import check_storage
from kvarve.system.regions import HostRegion
from kvarve.testing import ByteCapacitySuite, FaultyStorage, MakeStorage, StorageSuite
from kvarve.testing.suite import Damage, get, put
from kvarve.testing.suite_use import OBJECT_BYTES
from kvarve.transfer import compression
from kvarve.transfer.compression import BUFFERS, Compressed, compressing, totals

sys.path.append(str(Path(__file__).parents[1] / "storage"))
from memories import in_memory, memories, over_memories

pytest.importorskip("zstandard")
pytest.importorskip("lz4")
LABEL = MODEL
MIB = 1 << 20


def memory(capacity_bytes: int = 64 * MIB) -> MemoryStorage:
    return MemoryStorage(capacity_bytes, LABEL, "model A")


def records(count: int, kind: str = "bfloat16", payload_bytes: int = 40_000, **more: Any) -> dict[str, memoryview]:
    return {f"{kind}-{i}": a_record(kind, payload_bytes, i, **more)[1] for i in range(count)}


def put_all(storage: Storage, pages: dict[str, memoryview]) -> list[bool]:
    return storage.put([*pages], [*pages.values()])


def read(storage: Storage, pages: dict[str, memoryview]) -> list[int | None]:
    """The sizes; what has its whole size is checked to be the page, and no byte behind it to be written."""
    buffers = [memoryview(bytearray(b"#" * (len(page) + 64))) for page in pages.values()]
    sizes = storage.get([*pages], [buffer[: len(page)] for buffer, page in zip(buffers, pages.values(), strict=True)])
    for buffer, size, page in zip(buffers, sizes, pages.values(), strict=True):
        assert buffer[len(page) :] == b"#" * 64
        assert size != len(page) or buffer[: len(page)] == page
    return sizes


def all_right(storage: Storage, pages: dict[str, memoryview]) -> bool:
    return read(storage, pages) == [len(page) for page in pages.values()]


class TestCompressed(StorageSuite, ByteCapacitySuite):
    @pytest.fixture
    def make_storage(self) -> Iterator[MakeStorage]:
        with over_memories(lambda memory: Compressed(memory(0), "zstd")) as make:
            yield make

    @pytest.mark.long
    def test_any_history_of_calls_agrees_with_a_dict(self, make_storage: MakeStorage) -> None:
        super().test_any_history_of_calls_agrees_with_a_dict(make_storage)

    @pytest.mark.long
    def test_any_history_of_calls_agrees_with_a_dict_that_evicts(self, make_storage: MakeStorage) -> None:
        super().test_any_history_of_calls_agrees_with_a_dict_that_evicts(make_storage)

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        """Also by an encoded record that cannot be expanded."""
        inner = memory()
        put_all(Compressed(inner, "zstd"), {"a": a_record("zeros", OBJECT_BYTES // 2)[1]})
        broken = bytearray(get(inner, "a") or b"")
        broken[HEADER_BYTES + 16] ^= 0xFF  # of the first plane

        def damage(storage: Storage, name: str) -> None:
            (stored,) = memories(storage)
            assert stored.delete([name]) == put(stored, **{name: bytes(broken)}) == [True]

        return in_memory() | {"a broken record": damage}


# --- the same records


@pytest.mark.parametrize("writes", ["no", "zstd", "lz4", "auto"])
@pytest.mark.parametrize("reads", ["no", "zstd", "lz4", "auto"])
def test_every_setting_reads_what_every_other_has_written(writes: str, reads: str) -> None:
    inner = memory()
    pages = records(4) | records(2, "float32", 9000, pool="state") | records(2, "noise") | records(3, "zeros")
    for _ in range(2):  # of one name one content: what is there stays
        assert all(put_all(Compressed(inner, writes), pages))
    assert all_right(Compressed(inner, reads), pages)
    assert put_all(Compressed(inner, reads), pages) == [True] * len(pages)
    assert all_right(Compressed(inner, writes), pages)
    plain = sum(len(page) for page in pages.values())
    # `auto` does not know yet whether it would pay.
    assert inner.usage().bytes == plain if writes in ("no", "auto") else (inner.usage().bytes or 0) < plain


def test_a_tag_is_of_the_plain_record() -> None:
    pytest.importorskip("cryptography")
    mine, other = Tag(bytes(32)), Tag(b"1" * 32)
    inner, pages = memory(), records(3, seal=mine)
    put_all(Compressed(inner, "zstd"), pages)
    assert (inner.usage().bytes or 0) < sum(map(len, pages.values()))
    buffers = [memoryview(bytearray(len(page))) for page in pages.values()]
    Compressed(inner).get([*pages], buffers)
    assert [whole(buffer, mine) for buffer in buffers] == [True] * 3
    assert [whole(buffer, other) for buffer in buffers] == [False] * 3


def test_a_buffer_of_another_size_is_told_the_plain_size() -> None:
    inner, (page,) = memory(), records(1).values()
    Compressed(inner, "zstd").put(["page"], [page])
    for size in (0, 1, 255, 256, 4096, len(page) - 1, len(page), len(page) + 1, 2 * len(page)):
        buffer = bytearray(b"#" * size)
        assert Compressed(inner).get(["page"], [memoryview(buffer)]) == [len(page)]
        if size >= len(page):
            assert buffer == bytes(page) + b"#" * (size - len(page))


# --- damage


def test_without_the_library_compressed_pages_are_misses_and_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner, pages = memory(), records(2)
    put_all(Compressed(inner, "zstd"), pages)
    put_all(Compressed(inner), records(1, "noise"))
    codec.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    storage = Compressed(inner)
    assert read(storage, pages) == [None, None] and all_right(storage, records(1, "noise"))
    assert storage.counts["unread: no library"] == 2
    assert len(caplog.records) == 1 and "install the extra 'compress'" in caplog.text
    monkeypatch.undo()
    codec.cache_clear()
    assert all_right(storage, pages)


# --- memory, order and space


def watched(capacity_bytes: int = 64 * MIB) -> FaultyStorage:
    return FaultyStorage(MemoryStorage(capacity_bytes, LABEL, "model A"))


def test_more_than_a_buffer_holds_is_put_in_several_calls_of_which_the_first_names_outlive_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compression, "BUFFER_BYTES", 128 << 10)
    lent = list[HostRegion]()
    monkeypatch.setattr(MemoryStorage, "register", lambda _, region: lent.append(region))
    pages = records(12)
    inner = watched()
    storage = Compressed(inner, "zstd")
    assert put_all(storage, pages) == [True] * 12
    assert len(inner.puts) > 2 and [name for names in inner.puts[::-1] for name in names] == [*pages]
    assert len(lent) == 1, "one buffer, which a storage with a transport of its own has been told of"
    assert all_right(storage, pages)
    small = watched(7 * 28_672)  # a compressed record has seven blocks
    stored = put_all(Compressed(small, "zstd"), pages)
    assert stored == small.exists([*pages]) == [True] * 7 + [False] * 5
    twice = watched()
    assert Compressed(twice, "zstd").put([*pages, *pages], [*pages.values()] * 2) == [True] * 24
    assert len(twice.puts) == 1, "of one name twice in a call the first stays"


def test_a_record_larger_than_a_buffer_gets_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "BUFFER_BYTES", 64 << 10)
    pages = records(1) | records(2, "zeros", 500_000, pool="state")
    inner = watched()
    storage = Compressed(inner, "zstd")
    assert all(put_all(storage, records(1))) and all(put_all(storage, pages))
    assert all_right(storage, pages) and (inner.usage().bytes or 0) < 200_000


def test_calls_that_find_no_buffer_store_records_as_they_are() -> None:
    inner = watched()
    storage = Compressed(inner, "zstd")
    inner.stall("put")
    pages = records(BUFFERS + 1)
    with ThreadPoolExecutor(BUFFERS + 1) as pool:
        calls = []
        for name, page in pages.items():
            calls.append(pool.submit(storage.put, [name], [page]))
            inner.wait_for_stalled_call()
        inner.release()
        assert [call.result() for call in calls] == [[True]] * (BUFFERS + 1)
    assert all_right(storage, pages)
    sizes = [len(get(inner, name) or b"") for name in pages]
    assert sizes[-1] == len(pages["bfloat16-0"]) > max(sizes[:-1])


# --- auto


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Link(MemoryStorage):
    """A storage behind a link of so many bytes a second, in a clock's time."""

    def __init__(self, clock: Clock, rate: float) -> None:
        super().__init__(1 << 30, LABEL, "model A")
        self.clock, self.rate = clock, rate

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self.clock.now += sum(map(len, data)) / self.rate
        return super().put(names, data)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        sizes = super().get(names, into)
        self.clock.now += sum(size or 0 for size in sizes) / self.rate
        return sizes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of a machine that encodes 500 MB of records a second, and expands as many."""
    made = Clock()

    def slow(work: Callable[..., Any], size_of: Callable[..., int]) -> Callable[..., Any]:
        def worked(*args: Any) -> Any:
            made.now += size_of(*args) / 500e6
            return work(*args)

        return worked

    monkeypatch.setattr(compression, "encode", slow(encodings.encode, lambda pieces, *_: sum(map(len, pieces))))
    monkeypatch.setattr(compression, "decode", slow(encodings.decode, lambda data, into: len(into)))
    return made


def traffic(storage: Compressed, first: int, **pools: str) -> float:
    """Six calls of 2 MB for each pool, put and read again; the share of the plain bytes that was stored."""
    plain = sum(pool.plain_bytes for pool in storage.pools.values())
    stored = sum(pool.stored_bytes for pool in storage.pools.values())
    for number in range(first, first + 6):
        for pool, kind in pools.items():
            pages = {f"{pool}-{number}-{i}": a_record(kind, 256_000, i, pool)[1] for i in range(8)}
            assert all(put_all(storage, pages)) and all_right(storage, pages)
    plain = sum(pool.plain_bytes for pool in storage.pools.values()) - plain
    return (sum(pool.stored_bytes for pool in storage.pools.values()) - stored) / plain


def test_auto_decides_for_each_pool(clock: Clock) -> None:
    storage = Compressed(Link(clock, 50e6), "auto", clock=clock)
    traffic(storage, 0, kv="bfloat16", bytes="noise")
    assert storage.pools["kv"].on and not storage.pools["bytes"].on
    kv, noise = storage.pools["kv"], storage.pools["bytes"]
    assert noise.stored_bytes == noise.plain_bytes and kv.stored_bytes < 0.75 * kv.plain_bytes


@pytest.mark.long
def test_auto_changes_its_mind_with_the_link(clock: Clock) -> None:
    link = Link(clock, 50e6)
    storage = Compressed(link, "auto", clock=clock)
    traffic(storage, 0, kv="bfloat16")
    assert storage.pools["kv"].on
    link.rate = 10e9
    traffic(storage, 8, kv="bfloat16")
    traffic(storage, 16, kv="bfloat16")
    traffic(storage, 24, kv="bfloat16")
    assert not storage.pools["kv"].on
    link.rate = 50e6
    traffic(storage, 32, kv="bfloat16")
    assert storage.pools["kv"].on


# --- URLs


def test_each_tier_of_several_urls_is_compressed_as_its_own_says() -> None:
    here = uuid4().hex
    urls = [f"memory://{here}-near?capacity=64MiB", f"memory://{here}-far?capacity=64MiB&compress=zstd"]
    tiers = open_storage(urls, label=LABEL, description="model A", whole=whole, around=compressing)
    assert isinstance(tiers, Tiers)
    pages = records(4)
    put_all(tiers, pages)
    assert tiers.settle(30)
    near, far = (MemoryStorage(1 << 26, LABEL, "model A", f"{here}-{which}") for which in ("near", "far"))
    plain = sum(map(len, pages.values()))
    assert near.usage().bytes == plain and (far.usage().bytes or 0) < 0.75 * plain
    near.drop()
    assert all_right(tiers, pages)
    assert tiers.settle(30)
    assert near.usage().bytes == plain, "what the near tier had lost was promoted, expanded"
    assert totals(tiers)["attention"]["plain_bytes"] == plain
    tiers.close()
    for which in ("near", "far"):
        forget_memory(f"{here}-{which}")


def test_a_missing_library_is_told_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codec.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for compress in ("zstd", "auto"):
        url = f"file://{tmp_path}/store?capacity=64MiB&compress={compress}"
        for call in (check_storage, open_storage):
            with pytest.raises(ConfigError, match="install the extra 'compress'"):
                call(url, label=LABEL, description="model A", around=compressing)
    assert not (tmp_path / "store").exists()
    open_storage(f"file://{tmp_path}/store?capacity=64MiB", label=LABEL, description="", around=compressing).close()


def test_a_caller_whose_objects_cannot_be_compressed_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing here can be compressed"):
        open_storage(f"file://{tmp_path}/store?capacity=64MiB&compress=zstd", label=LABEL, description="model A")
    assert not (tmp_path / "store").exists()
