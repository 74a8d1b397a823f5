"""The script in Redis decides as the slot table does: the same history of calls has the same answers in both."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hf3fs_laws import audit, kept
from hf3fs_metadata_suite import LABEL, OTHER, K
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import KEPT, RedisServer

from kvarve.storage.hf3fs.metadata import Metadata, Slot
from kvarve.storage.hf3fs.metadata.memory_metadata import MemoryMetadata, SharedTable
from kvarve.storage.hf3fs.metadata.redis_metadata import RedisMetadata
from kvarve.storage.hf3fs.metadata.store_identity import Identity

NAMES = [f"{group}{number}" for group in ("a-", "b-", "") for number in range(5)]
names = st.lists(st.sampled_from(NAMES), max_size=5)
some = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5)
few, long_or_over = st.integers(1, 4), st.sampled_from([300.0, 300.0, 300.0, 0.0])
label, among = st.integers(0, 1), st.sets(st.integers(0, 4))
CALLS = st.one_of(
    st.tuples(st.just("reserve"), label, few, some, long_or_over),
    st.tuples(st.just("reserve"), label, few, some, long_or_over),
    st.tuples(st.just("commit"), label, few, among),
    st.tuples(st.just("commit"), label, few, among),
    st.tuples(st.just("abort"), label, few, among),
    st.tuples(st.just("lookup"), label, few, names, long_or_over),
    st.tuples(st.just("release"), label, few),
    st.tuples(st.just("touch"), label, names),
    st.tuples(st.just("delete"), label, names),
    st.tuples(st.just("delete from"), label, few, among),
    st.tuples(st.just("drop"), label, st.sampled_from([None, "a", "b"])),
)
_stores = count()


class Side:
    """One service with two labels, whose slots have the numbers by which they came."""

    def __init__(self, metadata: list[Metadata]) -> None:
        self.metadata = metadata
        self.slots: dict[Slot, int] = {}
        self.reserved: dict[tuple[int, int], dict[str, Slot]] = {}

    def known(self, answer: Any) -> Any:
        return self.slots.setdefault(answer, len(self.slots)) + 10 if isinstance(answer, Slot) else answer

    def call(self, what: str, label: int, *args: Any) -> Any:
        metadata = self.metadata[label]
        if what == "reserve":
            request, asked, for_s = args
            told = metadata.reserve(request, asked, [K] * len(asked), for_s)
            mine = self.reserved.setdefault((label, request), {})
            mine |= {name: slot for name, slot in zip(asked, told, strict=True) if isinstance(slot, Slot)}
            return [self.known(each) for each in told]
        if what in ("commit", "abort", "delete from"):
            request, chosen = args
            mine = [each for at, each in enumerate(self.reserved.get((label, request), {}).items()) if at in chosen]
            slots = [slot for _, slot in mine]
            if what == "abort":
                return metadata.abort(request, slots)
            if what == "delete from":  # the slots of these objects, or those of which they were
                return metadata.delete([name for name, _ in mine], slots)
            return metadata.commit(request, [name for name, _ in mine], slots, [self.slots[slot] for slot in slots])
        if what == "lookup":
            asked, reader, pin_s = args[1], 10 * label + args[0], args[2]
            found = metadata.lookup(asked, reader, pin_s)
            return [each and (self.known(each.slot), each.size_bytes) for each in found]
        if what == "release":
            return metadata.release(10 * label + args[0])
        return getattr(metadata, what)(*args)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), *KEPT)
    yield server
    server.close()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slots=st.integers(2, 10), quota=st.sampled_from([None, None, 2, 3]), calls=st.lists(CALLS, max_size=30))
def test_any_history_has_the_same_answers(
    server: RedisServer, tmp_path: Path, slots: int, quota: int | None, calls: list[tuple[Any, ...]]
) -> None:
    store, quota_bytes = f"store{next(_stores)}", quota and quota * K
    with ExitStack() as open_:
        theirs = []
        for each in (LABEL, OTHER):
            theirs.append(RedisMetadata(server.url(), lambda: Identity(store, True), each, slots * K, quota_bytes))
            open_.callback(theirs[-1].close)
        compare(server, store, theirs, SharedTable(slots * K, quota_bytes), calls)


def compare(
    server: RedisServer, store: str, theirs: list[RedisMetadata], shared: SharedTable, calls: list[tuple[Any, ...]]
) -> None:
    redis, table = Side([*theirs]), Side([MemoryMetadata(shared, each) for each in (LABEL, OTHER)])
    for each in calls:
        assert redis.call(*each) == table.call(*each), each
        for at in (0, 1):
            usages = [side.metadata[at].usage() for side in (redis, table)]
            assert usages[0] == usages[1]
            assert redis.metadata[at].exists(NAMES) == table.metadata[at].exists(NAMES)
    for metadata in (*redis.metadata, *table.metadata):
        metadata.release(1 << 40)  # what is over by now ends in both
    audit(shared.table)
    inside, places = kept(shared.table), ("s", "requests", "readers", "quarantine", f"lru:{K}")
    words = [("HLEN" if place == "s" else "ZCARD", f"kvarve:hf3fs:{{{store}}}:{place}") for place in places]
    assert [int(server.ask(*each)[1:]) for each in words] == [*inside[:5]]
