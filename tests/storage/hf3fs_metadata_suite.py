"""What every metadata service has to do, whatever keeps it. A class of a backend says how it is opened and lost."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

import pytest

from kvarve.errors import StorageError
from kvarve.storage.hf3fs.metadata import MOST_NAMES, Extent, Metadata, Slot, open_metadata

K = 4096
LABEL, OTHER = b"\x01" * 32, b"\x02" * 32
LONG_S = 300.0


class Open(Protocol):
    def __call__(self, slots: int = 64, label: bytes = LABEL, quota: int | None = None) -> Metadata:
        """The same store each time."""
        ...


@contextmanager
def opening(setting: str, folder: Path) -> Iterator[Open]:
    """Opens the metadata of a store, and closes it."""
    with ExitStack() as stack:

        def make(slots: int = 64, label: bytes = LABEL, quota: int | None = None) -> Metadata:
            metadata = open_metadata(setting, folder, label, slots * K, quota and quota * K)
            stack.callback(metadata.close)
            return metadata

        yield make


_numbers = count(1)


def number() -> int:
    """Of a request, reader or builder."""
    return (1 << 62) + next(_numbers)


def store(metadata: Metadata, *names: str, slots: int = 1) -> list[bool]:
    """Reserve and commit; where there is no room, once more after the files of retired extents are gone."""
    request, sizes = number(), [slots * K] * len(names)
    given = metadata.reserve(request, names, sizes, LONG_S)
    if False in given and (retired := metadata.retired()):
        metadata.removed(retired)
        given = metadata.reserve(request, names, sizes, LONG_S)
    mine = [(name, slot) for name, slot in zip(names, given, strict=True) if isinstance(slot, Slot)]
    done = metadata.commit(request, [n for n, _ in mine], [s for _, s in mine], [slots * K - 5] * len(mine))
    assert all(done)
    return [slot is not False for slot in given]


def there(metadata: Metadata, *names: str) -> str:
    return " ".join(name for name, found in zip(names, metadata.exists(names), strict=True) if found)


def look(metadata: Metadata, *names: str, pin_s: float = LONG_S) -> tuple[int, list[Slot | None]]:
    reader = number()
    return reader, [found and found.slot for found in metadata.lookup(names, reader, pin_s)]


CALLS: dict[str, Callable[[Metadata], object]] = {
    "exists": lambda metadata: metadata.exists(["a"]),
    "lookup": lambda metadata: metadata.lookup(["a"], 1, 1.0),
    "release": lambda metadata: metadata.release(1),
    "reserve": lambda metadata: metadata.reserve(1, ["a"], [2 * K], 1.0),
    "commit": lambda metadata: metadata.commit(1, ["a"], [Slot(K, 1, 1)], [1]),
    "abort": lambda metadata: metadata.abort(1, [Slot(K, 1, 1)]),
    "touch": lambda metadata: metadata.touch(["a"]),
    "delete": lambda metadata: metadata.delete(["a"]),
    "drop": lambda metadata: metadata.drop(),
    "usage": lambda metadata: metadata.usage(),
    "retired": lambda metadata: metadata.retired([Extent(K, 1)]),
    "removed": lambda metadata: metadata.removed([Extent(K, 1)]),
    "adopt": lambda metadata: metadata.adopt(LABEL, ["a"], [Slot(K, 1, 1)], [1]),
    "rebuilding": lambda metadata: metadata.rebuilding(1, 1.0),
    "rebuilt": lambda metadata: metadata.rebuilt(1),
}


class MetadataSuite:
    @pytest.fixture
    def open_(self) -> Open:
        raise NotImplementedError

    def lose(self) -> None:
        """The service forgets all that it knew; what is open goes on."""
        raise NotImplementedError

    def test_a_committed_object_is_found_in_its_slot_with_its_size(self, open_: Open) -> None:
        metadata, request = open_(), number()
        a, b = metadata.reserve(request, ["a", "b"], [K, 3 * K], LONG_S)
        assert isinstance(a, Slot)
        assert isinstance(b, Slot)
        assert (a.slot_bytes, b.slot_bytes) == (K, 3 * K)
        assert len({(slot.slot_bytes, slot.number) for slot in (a, b)}) == 2
        assert there(metadata, "a", "b") == "", "it is not found before it is committed"
        assert metadata.commit(request, ["b", "a"], [b, a], [3 * K, 17]) == [True, True]
        assert metadata.lookup(["a", "x", "b"], number(), LONG_S) == [(a, 17), None, (b, 3 * K)]
        assert metadata.exists(["b", "x", "a"]) == [True, False, True]
        assert metadata.usage().objects == 2
        assert metadata.usage().bytes == 3 * K + 17
        assert metadata.usage().capacity_bytes == 64 * K

    def test_a_call_with_no_name_or_as_many_as_there_may_be_is_answered(self, open_: Open) -> None:
        metadata = open_(MOST_NAMES)
        assert not metadata.rebuilding(number(), LONG_S), "a new store has nothing to rebuild"
        assert metadata.exists([]) == metadata.lookup([], 1, 1.0) == metadata.reserve(1, [], [], 1.0) == []
        assert metadata.commit(1, [], [], []) == metadata.delete([]) == metadata.retired() == []
        metadata.abort(1, []), metadata.touch([]), metadata.release(5), metadata.removed([])
        names = [f"n{i}" for i in range(MOST_NAMES)]
        assert all(store(metadata, *names))
        assert metadata.exists([*names[1:], "none"]) == [True] * (MOST_NAMES - 1) + [False]
        metadata.touch(names)
        reader, found = look(metadata, *names)
        assert len(found) == MOST_NAMES and all(found)
        assert store(metadata, "more") == [False], "all slots are read"
        metadata.release(reader)
        assert store(metadata, "more") == [True]
        assert metadata.delete(names) == [True] * (MOST_NAMES - 1) + [False], "the last name was the oldest"

    def test_a_commit_under_another_epoch_or_of_another_request_is_refused(self, open_: Open) -> None:
        metadata, request = open_(), number()
        (slot,) = metadata.reserve(request, ["x"], [K], LONG_S)
        assert metadata.commit(request, ["x"], [slot._replace(epoch=slot.epoch - 1)], [1]) == [False]
        assert metadata.commit(number(), ["x"], [slot], [1]) == [False]
        assert metadata.commit(request, ["y"], [slot], [1]) == [False]
        assert there(metadata, "x", "y") == ""
        assert metadata.commit(request, ["x"], [slot], [1]) == [True]

    def test_a_reservation_whose_deadline_has_passed_is_over_and_its_slot_in_quarantine(self, open_: Open) -> None:
        metadata, request = open_(1), number()
        (slot,) = metadata.reserve(request, ["x"], [K], 0.0)
        assert metadata.commit(request, ["x"], [slot], [1]) == [False]
        assert metadata.reserve(number(), ["y"], [K], LONG_S) == [False], "the write may still come"

    def test_epochs_and_slots_after_a_loss_are_new(self, open_: Open) -> None:
        metadata = open_(4)
        seen: list[Slot] = []
        for _ in range(3):
            for name in "abcd":
                metadata.delete([name])
                given = metadata.reserve(number(), [name], [K], LONG_S)
                seen += [slot for slot in given if isinstance(slot, Slot)]
            self.lose()
        assert len(seen) == 12
        assert len({slot.epoch for slot in seen}) == 12
        assert len({slot.number for slot in seen}) == 12, "no file comes back under its name"

    def test_the_least_recently_used_is_evicted_and_the_first_name_of_a_call_last(self, open_: Open) -> None:
        metadata = open_(4)
        store(metadata, "a", "b", "c", "d")  # of which a was used last
        store(metadata, "e")
        assert there(metadata, *"abcde") == "a b c e"
        metadata.touch(["c", "b"])
        reader, _ = look(metadata, "a")
        metadata.release(reader)
        assert metadata.exists(["e"]) == [True], "which is no use"
        store(metadata, "f")
        assert there(metadata, *"abcef") == "a b c f"
        store(metadata, "g", "h")
        assert there(metadata, *"abcfgh") == "a f g h"
        assert metadata.usage().evicted == 4

    def test_what_is_pinned_is_not_evicted_until_its_reader_lets_go_or_its_time_is_over(self, open_: Open) -> None:
        metadata = open_(2)
        store(metadata, "a", "b")
        reader, _ = look(metadata, "a", "b")
        another, _ = look(metadata, "b")
        assert store(metadata, "c") == [False]
        metadata.release(reader)
        metadata.release(reader)
        assert store(metadata, "c") == [True]
        assert there(metadata, "a", "b", "c") == "b c"
        metadata.release(another)
        look(metadata, "b", "c", pin_s=0.0)
        assert store(metadata, "d") == [True]

    def test_room_moves_to_another_size_when_its_files_are_gone(self, open_: Open) -> None:
        metadata, small = open_(8), [f"s{i}" for i in range(8)]
        assert all(store(metadata, *small))
        request = number()
        assert metadata.reserve(request, ["large"], [4 * K], LONG_S) == [False]
        retired = metadata.retired()
        assert len(retired) == 4
        assert metadata.reserve(request, ["large"], [4 * K], LONG_S) == [False], "the files are still there"
        metadata.removed(retired)
        metadata.removed(retired)
        (slot,) = metadata.reserve(request, ["large"], [4 * K], LONG_S)
        assert isinstance(slot, Slot)
        assert slot.extent not in retired
        assert metadata.retired() == []
        assert sum(metadata.exists(small)) == 4
        metadata.commit(request, ["large"], [slot], [1])
        assert store(metadata, "other", slots=2) == [True]

    def test_room_of_a_size_that_nobody_uses_any_more_moves_though_there_is_something_to_evict(
        self, open_: Open
    ) -> None:
        metadata = open_(8)
        store(metadata, *(f"old{i}" for i in range(7)))
        for i in range(200):  # each of the old ones was not used for more than twice as long
            assert store(metadata, f"new{i}", slots=1) == [True]
        for i in range(300):
            assert any(store(metadata, f"large{i}", slots=2) for _ in range(3))
        assert metadata.usage().objects == 4

    def test_a_group_has_its_quota_and_evicts_its_own(self, open_: Open) -> None:
        metadata = open_(8, quota=2)
        store(metadata, "g-1", "h-1", "plain")
        store(metadata, "g-2")
        store(metadata, "g-3")
        assert there(metadata, "g-1", "g-2", "g-3", "h-1", "plain") == "g-2 g-3 h-1 plain"
        request = number()
        assert metadata.reserve(request, ["g-4", "g-5", "g-6"], [K] * 3, LONG_S)[2] is False
        assert store(metadata, "g-7") == [False], "what is reserved counts"
        assert store(metadata, "h-2", slots=2) == [True]
        assert there(metadata, "h-1", "h-2") == "h-2"
        assert store(metadata, "i-1", slots=3) == [False]

    def test_a_store_opened_with_less_room_keeps_what_was_used_last(self, open_: Open) -> None:
        metadata, names = open_(8), [f"n{i}" for i in range(8)]
        for name in names:
            store(metadata, name)
        assert store(metadata, "x", slots=9) == [False], "an object larger than the store evicts nothing"
        smaller = open_(3)
        assert there(smaller, *names) == "n5 n6 n7"
        assert len(smaller.retired()) == 5
        smaller.removed(smaller.retired())
        assert store(smaller, "more") == [True]
        assert there(smaller, *names) == "n6 n7"

    def test_what_was_found_again_is_not_evicted_while_its_slots_wait_for_late_writes(self, open_: Open) -> None:
        metadata = open_(4)
        store(metadata, *"abcd")
        _, slots = look(metadata, *"abcd")
        found = [slot for slot in slots if slot]
        self.lose()
        builder = number()
        assert metadata.rebuilding(builder, LONG_S)
        assert metadata.adopt(LABEL, [*"abcd"], found, [1] * 4) == [True] * 4
        metadata.rebuilt(builder)
        assert store(metadata, "e") == [False]
        assert there(metadata, *"abcde") == "a b c d"
        metadata.delete(["a"])
        assert store(metadata, "e") == [False], "a write of its earlier life may still come"

    def test_after_close_every_call_is_an_error(self, open_: Open) -> None:
        metadata = open_()
        metadata.close()
        metadata.close()
        for call in CALLS.values():
            with pytest.raises(StorageError):
                call(metadata)
        assert not open_().exists(["a"])[0]

    def test_after_a_loss_one_builder_finds_the_objects_again(self, open_: Open) -> None:
        metadata = open_(8)
        store(metadata, "a", "b", "c")
        _, slots = look(metadata, "a", "b", "c")
        extents = [slot.extent for slot in slots if slot]
        self.lose()
        one, two = number(), number()
        assert there(metadata, *"abc") == ""
        assert metadata.rebuilding(one, LONG_S)
        assert not metadata.rebuilding(two, LONG_S)
        assert metadata.rebuilding(one, 0.0), "which ends its time"
        assert metadata.rebuilding(two, LONG_S)
        assert metadata.retired(extents) == [], "nothing is removed that may be needed"
        assert metadata.adopt(LABEL, ["a", "b"], slots[:2], [11, 12]) == [True, True]
        assert metadata.adopt(LABEL, ["a", "x"], [slots[2], slots[1]], [11, 12]) == [False, False], "both are in use"
        metadata.rebuilt(one)
        assert metadata.rebuilding(two, LONG_S)
        metadata.rebuilt(two)
        assert not metadata.rebuilding(two, LONG_S)
        assert metadata.retired(extents) == [extents[2]]
        assert metadata.adopt(LABEL, ["c"], [slots[2]], [13]) == [False], "it is too late"
        assert metadata.lookup(["a", "b"], number(), LONG_S) == [(slots[0], 11), (slots[1], 12)]
        (slot,) = metadata.reserve(number(), ["d"], [K], LONG_S)
        assert slot.epoch > max(each.epoch for each in slots[:2])
        assert slot.extent not in extents
