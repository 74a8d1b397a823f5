"""What every storage backend must do. A backend's tests subclass these and say how to make one:

    class TestMyStorage(StorageSuite, CapacitySuite):
        @pytest.fixture
        def make_storage(self) -> Iterator[MakeStorage]: ...

`make_storage` opens a storage at a `place` (any short name); opening a place again finds its objects, and the fixture
closes and removes everything. A backend that other processes can open says with `url_of` how, and `damages` says how
its objects may be damaged. `TtlSuite` and `QuotaSuite` are for backends with such limits. `CapacitySuite` is for those
that evict exactly while all objects are small and of one size; one that rounds sizes up overrides `capacity_for`.
`ByteCapacitySuite` is for those that count the bytes of objects of any size.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import Storage
from kvarve.testing.suite_use import (
    LABEL,
    OTHER_LABEL,
    Damage,
    DamageSuite,
    MakeAging,
    MakeStorage,
    QuotaSuite,
    TtlSuite,
    UrlOf,
    evicted,
    get,
    holds,
    put,
    there,
)

BAD_NAMES = ["", ".", "..", "../up", "a/b", "a\\b", "a b", "a\n", "a\0", "é", "a~", "x" * 201]


class StorageSuite(DamageSuite):
    """Names and bytes: what is put comes back whole, from any thread and after opening again, and only to its owner."""

    @pytest.mark.parametrize("size_bytes", [0, 1, 4 << 10, (1 << 20) + 3])
    def test_what_is_put_comes_back(self, make_storage: MakeStorage, size_bytes: int) -> None:
        storage = make_storage()
        data = (b"0123456789abcdef-" * (size_bytes // 17 + 1))[:size_bytes]
        assert put(storage, page=data) == [True]
        assert storage.exists(["page"]) == [True]
        assert get(storage, "page") == data

    def test_what_was_never_put_is_a_miss(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        buffer = bytearray(b"untouched")
        assert storage.exists(["page"]) == [False]
        assert storage.get(["page"], [memoryview(buffer)]) == [None]
        assert storage.delete(["page"]) == [False]
        assert buffer == b"untouched"

    def test_a_put_replaces_nothing(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, page=b"first")
        assert put(storage, page=b"a second one", other=b"2") == [True, True]
        assert get(storage, "page") == b"first"
        assert holds(storage, 2, 6)
        storage.delete(["page"])
        assert put(storage, page=b"a second one") == [True]
        assert get(storage, "page") == b"a second one"

    @pytest.mark.parametrize("sizes", [(3,), (0, 5), (1, 4 << 10, 7), (4 << 10, 1 << 20, 4 << 10)])
    def test_what_is_put_in_pieces_comes_back_as_one(self, make_storage: MakeStorage, sizes: tuple[int, ...]) -> None:
        storage = make_storage()
        pieces = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
        views = [memoryview(piece) for piece in pieces]
        assert storage.put_pieces(["page", "other"], [views, views[:1]]) == [True, True]
        assert (get(storage, "page"), get(storage, "other")) == (b"".join(pieces), pieces[0])
        with pytest.raises(ConfigError, match="cannot name an object"):
            storage.put_pieces(["a/b"], [views])

    def test_the_first_of_one_name_in_a_call_stays(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        assert storage.put(["page", "page"], [memoryview(b"first"), memoryview(b"second")]) == [True, True]
        assert get(storage, "page") == b"first"

    def test_what_is_deleted_is_gone(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, a=b"1", b=b"2")
        assert storage.delete(["a", "c"]) == [True, False]
        assert storage.exists(["a", "b"]) == [False, True]
        assert get(storage, "a") is None
        assert holds(storage, 1, 1)

    def test_a_group_is_dropped_alone_and_a_label_whole(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        names = ["aa-1", "aa-2", "a-1", "aa"]
        put(storage, **dict.fromkeys(names, b"1"))
        assert storage.drop("aa") == 2
        assert there(storage, *names) == "a-1 aa"
        assert (storage.drop("aa"), storage.drop(), storage.drop()) == (0, 2, 0)
        assert there(storage, *names) == ""
        assert put(storage, **{"aa-1": b"new"}) == [True]
        assert get(storage, "aa-1") == b"new"

    def test_another_labels_objects_are_not_dropped(self, make_storage: MakeStorage) -> None:
        storage, other = make_storage(place="one"), make_storage(label=OTHER_LABEL, place="another")
        put(storage, page=b"1")
        put(other, page=b"2")
        storage.drop()
        assert get(other, "page") == b"2"

    def test_a_touch_changes_no_object(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, a=b"1", b=b"2")
        storage.touch(["b", "x", "a", "b"])
        storage.touch([])
        assert (there(storage, *"abx"), get(storage, "a"), get(storage, "b")) == ("a b", b"1", b"2")
        with pytest.raises(ConfigError, match="cannot name an object"):
            storage.touch(["a/b"])

    def test_a_larger_buffer_keeps_its_end(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, page=b"four")
        buffer = bytearray(b"........")
        assert storage.get(["page"], [memoryview(buffer)]) == [4]
        assert buffer == b"four...."

    def test_a_smaller_buffer_is_filled_and_told_the_whole_size(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, page=b"twelve bytes")
        buffer = bytearray(b"........")
        assert storage.get(["page"], [memoryview(buffer)[:6]]) == [12]
        assert buffer == b"twelve.."
        assert storage.get(["page"], [memoryview(bytearray())]) == [12]

    def test_a_batch_answers_each_name_in_its_place(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        assert put(storage, a=b"1", b=b"", d=b"333") == [True] * 3
        buffers = [bytearray(3) for _ in range(5)]
        assert storage.exists(["a", "x", "b", "d", "a"]) == [True, False, True, True, True]
        assert storage.get(["a", "x", "b", "d", "a"], [memoryview(buffer) for buffer in buffers]) == [1, None, 0, 3, 1]
        assert [bytes(buffer) for buffer in buffers] == [b"1\0\0", b"\0\0\0", b"\0\0\0", b"333", b"1\0\0"]

    def test_an_empty_batch_has_an_empty_answer(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        assert (storage.exists([]), storage.get([], []), storage.put([], []), storage.delete([])) == ([], [], [], [])

    def test_names_of_every_legal_character_differ(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        names = ["a", "aa", ".a", "-a", "_", "...", "0", "kvarve.json", "A" * 200, "a" * 199 + "-", "abc.def-1_2"]
        assert all(put(storage, **{name: name.encode() for name in names}))
        assert [get(storage, name) for name in names] == [name.encode() for name in names]

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_a_name_that_cannot_be_is_refused_before_anything_is_done(
        self, make_storage: MakeStorage, name: str
    ) -> None:
        storage = make_storage()
        put(storage, good=b"old")
        one = memoryview(bytearray(1))
        calls: list[Callable[[], object]] = [
            lambda: storage.put(["good", name], [one, one]),
            lambda: storage.get(["good", name], [one, one]),
            lambda: storage.delete(["good", name]),
            lambda: storage.exists(["good", name]),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="cannot name an object"):
                call()
        assert get(storage, "good") == b"old"
        assert bytes(one) == b"\0"

    def test_usage_counts_what_is_there(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        assert holds(storage, 0, 0) and evicted(storage, 0)
        put(storage, a=b"12345", b=b"", c=b"123")
        assert holds(storage, 3, 8) and evicted(storage, 0)

    def test_opening_again_finds_what_was_stored(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, a=b"first", b=b"")
        storage.close()
        again = make_storage()
        assert (get(again, "a"), get(again, "b"), get(again, "c")) == (b"first", b"", None)
        assert holds(again, 2, 5)

    def test_two_places_share_nothing(self, make_storage: MakeStorage) -> None:
        put(make_storage(place="one"), a=b"1")
        assert get(make_storage(place="two"), "a") is None

    def test_pages_of_another_model_are_never_seen_and_kept(self, make_storage: MakeStorage) -> None:
        """A backend has a place of its own for each model, or refuses the second one."""
        storage = make_storage(description="model A, page 64")
        put(storage, a=b"kept")
        storage.close()
        try:
            other = make_storage(label=OTHER_LABEL, description="model B, page 128")
        except StorageError as refusal:
            told = str(refusal)
            assert all(part in told for part in ("model A, page 64", "model B, page 128", "another", "empty"))
            assert "\n" not in told
        else:
            assert other.exists(["a"]) == [False]
            assert put(other, a=b"of model B") == [True]
            other.close()
        assert get(make_storage(description="the same in other words"), "a") == b"kept"

    @pytest.mark.parametrize("label", [b"", b"x" * 65])
    def test_a_label_has_1_to_64_bytes(self, make_storage: MakeStorage, label: bytes) -> None:
        with pytest.raises(ConfigError, match="label"):
            make_storage(label=label)

    def test_closing_twice_is_closing_and_later_calls_are_told(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        put(storage, a=b"1")
        storage.close()
        storage.close()
        one = memoryview(bytearray(1))
        calls: list[Callable[[], object]] = [
            lambda: storage.exists(["a"]),
            lambda: storage.get(["a"], [one]),
            lambda: storage.put(["a"], [one]),
            lambda: storage.put([], []),
            lambda: storage.delete(["a"]),
            storage.drop,
            storage.usage,
        ]
        for call in calls:
            with pytest.raises(StorageError, match="closed"):
                call()
        assert get(make_storage(), "a") == b"1"

    def test_threads_that_store_and_delete_never_show_a_reader_half_an_object(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        names = [f"page-{i}" for i in range(6)]
        start = threading.Barrier(8, timeout=60)

        def write(worker: int) -> None:
            start.wait()
            for turn in range(40):
                fills = [(worker * 40 + turn + i) % 251 for i in range(len(names))]
                storage.put(names, [memoryview(bytes([fill]) * (5000 + fill)) for fill in fills])
                storage.delete(names[worker : worker + 2])

        def read(worker: int) -> None:
            buffers = [bytearray(8192) for _ in names]
            start.wait()
            for _ in range(60):
                storage.exists(names)
                for size, buffer in zip(storage.get(names, [memoryview(b) for b in buffers]), buffers, strict=True):
                    assert size is None or buffer[:size] == bytes([buffer[0]]) * (5000 + buffer[0])

        with ThreadPoolExecutor(8) as pool:
            work = [pool.submit((write, read)[worker % 2], worker // 2) for worker in range(8)]
        for ended in work:
            ended.result()
        found = [get(storage, name) for name in names]
        assert holds(storage, sum(data is not None for data in found), sum(len(data or b"") for data in found))

    def test_an_object_that_is_put_again_is_never_missing(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        storage.put(["page"], [memoryview(bytes([7]) * 20_000)])
        start = threading.Barrier(2, timeout=60)

        def write() -> None:
            start.wait()
            for turn in range(150):
                assert storage.put(["page"], [memoryview(bytes([turn]) * 20_000)]) == [True]

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            buffer = bytearray(20_000)
            start.wait()
            for _ in range(300):
                assert storage.get(["page"], [memoryview(buffer)]) == [20_000]
                assert buffer == bytes([7]) * 20_000
        writing.result()

    def test_any_history_of_calls_agrees_with_a_dict(self, make_storage: MakeStorage) -> None:
        run_against_a_dict(make_storage, capacity_bytes=1 << 20)


class CapacitySuite:
    """A bounded storage evicts the least recently used object. All objects are of 10 bytes.

    `keeps_named`: a put evicts no object that it names, not even before it has come to it.
    """

    keeps_named = False

    def capacity_for(self, objects: int) -> int:
        """The capacity for exactly this many objects of 1 to 10 bytes."""
        return 10 * objects

    @pytest.fixture
    def make_small(self, make_storage: MakeStorage) -> Callable[..., Storage]:
        """Opens a storage for a number of objects."""
        return lambda objects: make_storage(capacity_bytes=self.capacity_for(objects))

    @pytest.mark.parametrize(
        ("use", "left"),
        [
            (lambda storage: storage.exists(["a"]), "b c d"),
            (lambda storage: get(storage, "a"), "a c d"),
            (lambda storage: put(storage, a=bytes(10)), "a c d"),
        ],
        ids=["asking is no use", "reading is one", "so is putting again"],
    )
    def test_what_was_used_longest_ago_is_evicted_first(
        self, make_small: Callable[..., Storage], use: Callable[[Storage], object], left: str
    ) -> None:
        storage = make_small(3)
        for name in "abc":
            put(storage, **{name: bytes(10)})
        use(storage)
        assert put(storage, d=bytes(10)) == [True]
        assert there(storage, *"abcd") == left
        usage = storage.usage()
        assert (usage.objects, usage.bytes, usage.capacity_bytes, usage.evicted) == (3, 30, self.capacity_for(3), 1)

    def test_the_beginning_of_a_batch_is_evicted_last(self, make_small: Callable[..., Storage]) -> None:
        storage = make_small(3)
        put(storage, a=bytes(10), b=bytes(10), c=bytes(10))
        put(storage, d=bytes(10))
        assert there(storage, *"abcd") == "a b d"
        storage.get(["d", "b", "a"], [memoryview(bytearray(10))] * 3)
        put(storage, e=bytes(10))
        assert there(storage, *"abcde") == "b d e"

    def test_the_order_of_use_survives_opening_again(self, make_small: Callable[..., Storage]) -> None:
        storage = make_small(3)
        put(storage, a=bytes(10), b=bytes(10), c=bytes(10))
        get(storage, "c")
        storage.close()
        again = make_small(3)
        put(again, d=bytes(10))
        assert there(again, *"abcd") == "a c d"

    def test_opening_again_with_less_room_keeps_what_was_used_last(self, make_small: Callable[..., Storage]) -> None:
        storage = make_small(3)
        for name in "abc":
            put(storage, **{name: bytes(10)})
        storage.close()
        again = make_small(2)
        assert there(again, *"abc") == "b c"
        assert again.usage().bytes == 20

    @pytest.mark.parametrize("capacity_bytes", [0, -1])
    def test_a_storage_without_room_is_refused(self, make_storage: MakeStorage, capacity_bytes: int) -> None:
        with pytest.raises(ConfigError, match="capacity above zero"):
            make_storage(capacity_bytes=capacity_bytes)

    def test_a_call_does_not_evict_what_it_has_answered_for(self, make_small: Callable[..., Storage]) -> None:
        storage = make_small(2)
        put(storage, a=bytes(10), b=bytes(10))
        assert put(storage, b=bytes(10), c=bytes(10), d=bytes(10)) == [True, True, False]
        assert there(storage, *"abcd") == "b c"

    def test_a_touch_is_a_use(self, make_small: Callable[..., Storage]) -> None:
        storage = make_small(3)
        for name in "abc":
            put(storage, **{name: bytes(10)})
        storage.touch(["b", "a", "x", "b"])
        put(storage, d=bytes(10))
        put(storage, e=bytes(10))
        assert there(storage, *"abcde") == "b d e"

    def test_threads_that_compete_for_space_leave_the_index_right(self, make_small: Callable[..., Storage]) -> None:
        storage = make_small(6)
        start = threading.Barrier(4, timeout=60)

        def write_and_read(worker: int) -> None:
            buffer = memoryview(bytearray(10))
            start.wait()
            for turn in range(60):
                name = f"page-{(worker * 17 + turn) % 20}"
                assert storage.put([name], [memoryview(bytes([turn]) * 10)]) == [True]
                (size,) = storage.get([name], [buffer])
                assert size is None or bytes(buffer[:size]) == bytes(buffer[:1]) * 10

        with ThreadPoolExecutor(4) as pool:
            work = [pool.submit(write_and_read, worker) for worker in range(4)]
        for ended in work:
            ended.result()
        found = [get(storage, f"page-{i}") for i in range(20)]
        usage = storage.usage()
        assert usage.bytes == sum(len(data or b"") for data in found) <= 60
        assert usage.objects == sum(data is not None for data in found)

    def test_any_history_of_calls_agrees_with_a_dict_that_evicts(self, make_storage: MakeStorage) -> None:
        run_against_a_dict(make_storage, self.capacity_for(5), most=5, keeps_named=self.keeps_named)


class ByteCapacitySuite(CapacitySuite):
    """The capacity bounds the bytes of objects of any size."""

    def test_one_large_object_pushes_out_several(self, make_storage: MakeStorage) -> None:
        storage = make_storage(capacity_bytes=30)
        for name in "abc":
            put(storage, **{name: bytes(10)})
        assert put(storage, d=bytes(11)) == [True]
        assert there(storage, *"abcd") == "c d"

    def test_an_object_larger_than_all_there_is_finds_no_room_and_evicts_nothing(
        self, make_storage: MakeStorage
    ) -> None:
        storage = make_storage(capacity_bytes=30)
        put(storage, a=b"old", b=bytes(20))
        assert put(storage, c=bytes(31)) == [False]
        assert get(storage, "a") == b"old"
        assert there(storage, "b") == "b"
        assert put(storage, c=bytes(30)) == [True]
        assert there(storage, *"abc") == "c"

    def test_a_batch_does_not_evict_itself(self, make_storage: MakeStorage) -> None:
        storage = make_storage(capacity_bytes=30)
        put(storage, old=bytes(10))
        assert put(storage, a=bytes(20), b=bytes(20), c=bytes(10)) == [True, False, True]
        assert there(storage, *"abc", "old") == "a c"

    def test_any_history_of_calls_agrees_with_a_dict_that_evicts(self, make_storage: MakeStorage) -> None:
        run_against_a_dict(make_storage, capacity_bytes=100)


_places = itertools.count()
_names = st.sampled_from([f"page-{i}" for i in range(8)])


def run_against_a_dict(
    make_storage: MakeStorage, capacity_bytes: int, most: int | None = None, *, keeps_named: bool = False
) -> None:
    """Let hypothesis look for a history of calls after which the storage and a plain model of it disagree.

    The model holds `capacity_bytes`, or at most `most` objects of 10 bytes each. `keeps_named`: see `CapacitySuite`.
    """
    limit = capacity_bytes if most is None else most
    sizes = st.integers(0, 60) if most is None else st.just(10)
    objects = st.builds(lambda fill, size_bytes: bytes([fill]) * size_bytes, st.integers(0, 255), sizes)

    def cost(data: bytes) -> int:
        return len(data) if most is None else 1

    class History(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.place = f"history-{next(_places)}"
            self.model: OrderedDict[str, bytes] = OrderedDict()  # the next to be evicted comes first
            self.storage = self.opened()

        def opened(self) -> Storage:
            return make_storage(place=self.place, capacity_bytes=capacity_bytes)

        def teardown(self) -> None:
            self.storage.close()

        @rule(batch=st.lists(st.tuples(_names, objects), max_size=4))
        def put(self, batch: list[tuple[str, bytes]]) -> None:
            expected = []
            mine = [name for name, _ in batch if keeps_named and name in self.model]
            for name, data in batch:
                if name not in self.model:
                    fixed = sum(cost(self.model[other]) for other in {*mine})
                    if fixed + cost(data) > limit:
                        expected.append(False)
                        continue
                    loose = [other for other in self.model if other not in mine]
                    while sum(map(cost, self.model.values())) + cost(data) > limit:
                        del self.model[loose.pop(0)]
                    self.model[name] = data
                expected.append(True)
                if name not in mine:
                    mine.append(name)
            self.used([name for name in dict.fromkeys(name for name, _ in batch) if name in self.model])
            answer = self.storage.put([name for name, _ in batch], [memoryview(data) for _, data in batch])
            assert answer == expected

        @rule(names=st.lists(_names, max_size=4), buffer_bytes=st.integers(0, 80))
        def get(self, names: list[str], buffer_bytes: int) -> None:
            buffers = [bytearray(buffer_bytes) for _ in names]
            sizes = self.storage.get(names, [memoryview(buffer) for buffer in buffers])
            assert sizes == [len(self.model[name]) if name in self.model else None for name in names]
            for name, buffer in zip(names, buffers, strict=True):
                data = self.model.get(name, b"")[:buffer_bytes]
                assert bytes(buffer) == data + bytes(buffer_bytes - len(data))
            self.used([name for name in names if name in self.model])

        @rule(names=st.lists(_names, max_size=3))
        def delete(self, names: list[str]) -> None:
            assert self.storage.delete(names) == [self.model.pop(name, None) is not None for name in names]

        @rule()
        def open_again(self) -> None:
            self.storage.close()
            self.storage = self.opened()

        @invariant()
        def the_index_agrees(self) -> None:
            assert holds(self.storage, len(self.model), sum(map(len, self.model.values())))
            names = [f"page-{i}" for i in range(8)]
            assert self.storage.exists(names) == [name in self.model for name in names]

        def used(self, names: list[str]) -> None:
            for name in reversed(names):
                self.model.move_to_end(name)

    machine: Any = History
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None, print_blob=True)
    )


__all__ = [
    "LABEL",
    "OTHER_LABEL",
    "ByteCapacitySuite",
    "CapacitySuite",
    "Damage",
    "MakeAging",
    "MakeStorage",
    "QuotaSuite",
    "StorageSuite",
    "TtlSuite",
    "UrlOf",
    "get",
    "put",
    "there",
]
