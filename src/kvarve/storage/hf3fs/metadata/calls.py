"""The calls of a metadata service, each as some names and integers: what goes over a wire, whatever the wire is.

`RemoteMetadata` makes them for a client, `answer` carries them out on a table.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import gt
from typing import TypeVar

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import StorageUsage, check_names
from kvarve.storage.hf3fs.metadata.entries import PACKED
from kvarve.storage.hf3fs.metadata.service import (
    MOST_EXTENTS,
    MOST_NAMES,
    SLOT_ALIGNMENT,
    Extent,
    Found,
    Metadata,
    Slot,
)
from kvarve.storage.hf3fs.metadata.slot_table import SlotTable

MOST_SLOT_BYTES = 1 << 40
_MOST_NUMBER = 1 << 63
_NONE = PACKED.pack(0, 0, 0, 0)
# A third of the time of calling the class, in the busiest call.
_slot: Callable[[tuple[int, int, int]], Slot] = partial(tuple.__new__, Slot)
_found: Callable[[tuple[Slot, int]], Found] = partial(tuple.__new__, Found)
T = TypeVar("T")


class BadCall(Exception):
    """What came over the wire is no call."""


class RemoteMetadata(Metadata):
    """The metadata of a service that `_ask` reaches."""

    @abstractmethod
    def _ask(self, call: str, names: Sequence[str], numbers: Sequence[int]) -> list[int]:
        """The service's answer; asked again if the connection was lost. StorageError."""

    def _told(
        self, call: str, names: Sequence[str] = (), numbers: Sequence[int] = (), count: int | None = 0
    ) -> list[int]:
        """The service's answer: so many numbers (None: any number) of 63 bits. StorageError: it is none."""
        told = self._ask(call, names, numbers)
        if (count is not None and len(told) != count) or (told and not 0 <= min(told) <= max(told) < _MOST_NUMBER):
            raise _cannot_be(call)
        return told

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [*map(bool, self._told("exists", names, count=len(names)))]

    def lookup(self, names: Sequence[str], reader: int, pin_s: float) -> list[Found | None]:
        told = self._told("lookup", names, (reader, _ms(pin_s)), 4 * len(names))
        slot_bytes, sizes = told[0::4], told[3::4]
        # What a header takes of an object is not known here.
        if any(map(gt, sizes, slot_bytes)) or max(slot_bytes, default=0) > MOST_SLOT_BYTES:
            raise _cannot_be("lookup")
        slots = map(_slot, zip(slot_bytes, told[1::4], told[2::4], strict=True))
        pairs = map(_found, zip(slots, sizes, strict=True))
        if 0 in slot_bytes:
            return [pair if pair.slot.slot_bytes else None for pair in pairs]
        return [*pairs]

    def release(self, reader: int) -> None:
        self._told("release", (), (reader,))

    def reserve(self, request: int, names: Sequence[str], slot_bytes: Sequence[int], for_s: float) -> list[Slot | bool]:
        told = self._told("reserve", names, (request, _ms(for_s), *slot_bytes), 3 * len(names))
        answers = [Slot(*each) if each[0] else bool(each[1]) for each in _tuples(told, 3)]
        for answer, asked in zip(answers, slot_bytes, strict=True):
            if isinstance(answer, Slot) and (answer.slot_bytes != asked or answer.extent.number >= MOST_EXTENTS):
                raise _cannot_be("reserve")
        return answers

    def commit(self, request: int, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int]) -> list[bool]:
        return [*map(bool, self._told("commit", names, (request, *_sized(slots, sizes)), len(names)))]

    def abort(self, request: int, slots: Sequence[Slot]) -> None:
        self._told("abort", (), (request, *_flat(slots)))

    def touch(self, names: Sequence[str]) -> None:
        self._told("touch", names)

    def delete(self, names: Sequence[str], slots: Sequence[Slot] | None = None) -> list[bool]:
        return [*map(bool, self._told("delete", names, _flat(slots or ()), len(names)))]

    def drop(self, group: str | None = None) -> int:
        check_names([] if group is None else [group])
        return sum(self._told("drop", () if group is None else (group,), count=1))

    def usage(self) -> StorageUsage:
        return StorageUsage(*self._told("usage", count=4))

    def retired(self, listed: Sequence[Extent] = ()) -> list[Extent]:
        told = self._told("retired", (), _flat(listed), None)
        if len(told) % 2:
            raise _cannot_be("retired")
        return [Extent(*each) for each in _tuples(told, 2)]

    def removed(self, extents: Sequence[Extent]) -> None:
        self._told("removed", (), _flat(extents))

    def adopt(self, owner: bytes, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int]) -> list[bool]:
        return [*map(bool, self._told("adopt", (owner.hex(), *names), _sized(slots, sizes), len(names)))]

    def rebuilding(self, builder: int, for_s: float) -> bool:
        return self._told("rebuilding", (), (builder, _ms(for_s)), 1) == [1]

    def rebuilt(self, builder: int) -> None:
        self._told("rebuilt", (), (builder,))


def _cannot_be(call: str) -> StorageError:
    return StorageError(f"the metadata service answers a call of {call} with what cannot be")


def _sized(slots: Sequence[Slot], sizes: Sequence[int]) -> list[int]:
    return _flat((*slot, size) for slot, size in zip(slots, sizes, strict=True))


def _flat(tuples: Iterable[tuple[int, ...]]) -> list[int]:
    return [number for each in tuples for number in each]


def _tuples(numbers: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(numbers)] * width, strict=True)


def _ms(seconds: float) -> int:
    return max(0, min(round(1000 * seconds), 1 << 40))


# --- the service's side


def answer(
    table: SlotTable, label: bytes, call: str, names: Sequence[str], numbers: Sequence[int], now: float
) -> list[int] | bytes:
    """Carry a call out; bytes are numbers that are packed already. BadCall: it is none, and nothing has been done."""
    carry_out = _CALLS.get(call)
    if carry_out is None:
        raise BadCall(f"there is no call {call!r}")
    if len(names) > MOST_NAMES or len(numbers) > 4 * MOST_NAMES + 2:
        raise BadCall(f"a call has at most {MOST_NAMES} names")
    if numbers and min(numbers) < 0:
        raise BadCall("a number is below zero")
    try:
        if call not in _ASKS:
            check_names(names)
    except ConfigError as error:
        raise BadCall(str(error)) from None
    return carry_out(table, label, names, numbers, now)


def _exists(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    _expect(numbers, 0)
    return [*map(int, table.exists(label, names))]


def _lookup(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> bytes:
    _expect(numbers, 2)
    reader, ms = numbers
    found = table.find(label, names, reader, ms / 1000, now)
    return b"".join([_NONE if each is None else each.packed for each in found])


def _release(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    _expect(numbers, 1)
    table.release(numbers[0], now)
    return []


def _reserve(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    _expect(numbers, 2 + len(names))
    request, ms, *slot_bytes = numbers
    if not all(0 < size <= MOST_SLOT_BYTES and not size % SLOT_ALIGNMENT for size in slot_bytes):
        raise BadCall("no slot has that size")
    answers = table.reserve(label, request, names, slot_bytes, ms / 1000, now)
    return _flat(each if isinstance(each, Slot) else (0, int(each), 0) for each in answers)


def _commit(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    if not numbers:
        raise BadCall("a commit is of a request")
    slots, sizes = _placed(names, numbers[1:])
    return [*map(int, table.commit(label, numbers[0], names, slots, sizes, now))]


def _abort(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    if len(numbers) % 3 != 1:
        raise BadCall("an abort is of a request and its slots")
    table.abort(label, numbers[0], [Slot(*each) for each in _tuples(numbers[1:], 3)], now)
    return []


def _touch(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    table.touch(label, names, now)
    return []


def _delete(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    if not numbers:
        return [*map(int, table.delete(label, names, None, now))]
    _expect(numbers, 3 * len(names))
    return [*map(int, table.delete(label, names, [Slot(*each) for each in _tuples(numbers, 3)], now))]


def _drop(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    return [table.drop(label, names[0] if names else None, now)]


def _usage(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    usage = table.usage(label)
    return [number or 0 for number in (usage.objects, usage.bytes, usage.capacity_bytes, usage.evicted)]


def _retired(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    return _flat(table.retired(_extents(numbers))[: 2 * MOST_NAMES])


def _removed(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    table.removed(_extents(numbers))
    return []


def _adopt(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    try:
        owner = bytes.fromhex(names[0])
    except (IndexError, ValueError):
        raise BadCall("the first name of an adopt is an owner, in hexadecimal") from None
    slots, sizes = _placed(names[1:], numbers)
    return [*map(int, table.adopt(owner, names[1:], slots, sizes, now))]


def _rebuilding(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    _expect(numbers, 2)
    return [int(table.rebuilding(numbers[0], numbers[1] / 1000, now))]


def _rebuilt(table: SlotTable, label: bytes, names: Sequence[str], numbers: Sequence[int], now: float) -> list[int]:
    _expect(numbers, 1)
    table.rebuilt(numbers[0])
    return []


def _expect(numbers: Sequence[int], count: int) -> None:
    if len(numbers) != count:
        raise BadCall(f"{count} numbers were to come, not {len(numbers)}")


def _placed(names: Sequence[str], numbers: Sequence[int]) -> tuple[list[Slot], list[int]]:
    """Slots, and the sizes of what is in them."""
    _expect(numbers, 4 * len(names))
    found = [*_tuples(numbers, 4)]
    for slot_bytes, _, _, size in found:
        if not 0 < slot_bytes <= MOST_SLOT_BYTES or slot_bytes % SLOT_ALIGNMENT or size > slot_bytes:
            raise BadCall("no slot has that size")
    return [Slot(*each[:3]) for each in found], [each[3] for each in found]


def _extents(numbers: Sequence[int]) -> list[Extent]:
    if len(numbers) % 2:
        raise BadCall("an extent has two numbers")
    return [Extent(*each) for each in _tuples(numbers, 2)]


_CarryOut = Callable[[SlotTable, bytes, Sequence[str], Sequence[int], float], list[int] | bytes]
_CALLS: Mapping[str, _CarryOut] = {
    "exists": _exists,
    "lookup": _lookup,
    "release": _release,
    "reserve": _reserve,
    "commit": _commit,
    "abort": _abort,
    "touch": _touch,
    "delete": _delete,
    "drop": _drop,
    "usage": _usage,
    "retired": _retired,
    "removed": _removed,
    "adopt": _adopt,
    "rebuilding": _rebuilding,
    "rebuilt": _rebuilt,
}
_ASKS = frozenset({"exists", "lookup"})  # what cannot name an object is not there
CALLS = ("hello", *_CALLS)
