"""Which slot holds which object, as one service tells all processes that share a store. It moves no bytes of objects.

A slot is free, reserved, committed or in quarantine:

    free        -- reserve --> reserved     by one request, until its deadline
    reserved    -- commit  --> committed    only under the epoch that the reservation gave
    reserved    -- abort, or its deadline has passed --> quarantine
    committed   -- delete, evicted, drop    --> free, or quarantine while a reader has it pinned
    quarantine  -- longer than any write or read takes --> free

Every reservation of a slot gives it another epoch, and the epoch stands in the header of what is written to it: a
writer that comes late, or a reader of what the service has forgotten, finds an epoch that is not its own.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvarve.storage.base import StorageUsage

SLOT_ALIGNMENT = 4096
_PLACE_BITS = 12
MOST_PLACES = 1 << _PLACE_BITS  # slots of an extent
MOST_EXTENTS = 1 << 50  # numbers of extents are below
MOST_NAMES = 4096  # of a call, and as many slots or extents


class Extent(NamedTuple):
    """Up to 4,096 slots of one size in one file, which is removed whole when their room goes to another size. No number
    is given twice, so that a file that is removed is gone for good, whatever process still has it open."""

    slot_bytes: int
    number: int


class Slot(NamedTuple):
    """Room for one object, header included: `slot_bytes` (a multiple of 4,096) at `place` of `extent`. `number` has
    both. `epoch`: 63 bits, never given twice."""

    slot_bytes: int
    number: int
    epoch: int

    @property
    def extent(self) -> Extent:
        return Extent(self.slot_bytes, self.number >> _PLACE_BITS)

    @property
    def place(self) -> int:
        """The slot begins `place * slot_bytes` into the extent's file."""
        return self.number & (MOST_PLACES - 1)


class Found(NamedTuple):
    """A committed object: its slot, and its own size without the slot's header."""

    slot: Slot
    size_bytes: int


def first_numbers(now: float) -> tuple[int, int]:
    """The epoch and the extent after which a service counts that knows no other: an epoch from the clock, which is
    ahead of all that were given, and a random extent, far from all whose files may still be there."""
    return int(1e6 * now), secrets.randbelow(1 << 40)


class Metadata(Protocol):
    """The slots of one store, for one owner (a label's hash). Calls come from several threads, and are over within
    `left_s()`.

    Every method takes a batch of up to `MOST_NAMES`. StorageError: the service cannot be reached, or does not answer in
    time; what was asked for may have been done, and may be asked for again. The first name of a call counts as the most
    recently used.
    """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each object is committed; no use, no pin."""
        ...

    def lookup(self, names: Sequence[str], reader: int, pin_s: float) -> list[Found | None]:
        """Where each object is, which counts as its use. Its slot is not given to another object until
        `release(reader)`, or `pin_s` have passed; `reader` is a random number of 63 bits for this call."""
        ...

    def release(self, reader: int) -> None:
        """The reads of this lookup are over."""
        ...

    def reserve(self, request: int, names: Sequence[str], slot_bytes: Sequence[int], for_s: float) -> list[Slot | bool]:
        """A slot for each object that is to be written within `for_s`. True: it is committed already (a use). False:
        there is no room, even after evicting (objects of this call are not), or not before what is `retired` is gone.

        Asked again with the same `request` (a random number of 63 bits), it answers the same slots. Two requests may
        each have a slot for one name; the first commit stays.
        """
        ...

    def commit(self, request: int, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int]) -> list[bool]:
        """The objects are written, and on the medium. True: the object can be found, here or (another writer's commit
        came first) elsewhere. False: the slot is not this request's any more. May be repeated."""
        ...

    def abort(self, request: int, slots: Sequence[Slot]) -> None:
        """These were not written, or not wholly, or their writes may still come: each goes into quarantine."""
        ...

    def touch(self, names: Sequence[str]) -> None: ...

    def delete(self, names: Sequence[str], slots: Sequence[Slot] | None = None) -> list[bool]:
        """Whether each object was there, and is not now; of those in other slots than `slots`, if given, none is: what
        was wrong with a slot is not true of an object that was stored anew."""
        ...

    def drop(self, group: str | None = None) -> int: ...

    def usage(self) -> StorageUsage: ...

    def retired(self, listed: Sequence[Extent] = ()) -> list[Extent]:
        """Extents whose files are to be removed: those emptied for the sake of another size, and those of `listed`
        (extents whose files the caller has seen) that the service does not know, unless it may have forgotten them."""
        ...

    def removed(self, extents: Sequence[Extent]) -> None:
        """The files of these retired extents are gone: their room is there for other slots. May be repeated. A
        `reserve` that answered False may be asked again."""
        ...

    def adopt(self, owner: bytes, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int]) -> list[bool]:
        """Objects, also another owner's, that were found in slots after the service had lost what it knew: True where
        the object is committed there now. Not where the name or the slot is in use. Epochs given later are above all
        that were adopted."""
        ...

    def rebuilding(self, builder: int, for_s: float) -> bool:
        """Whether this caller has to find the objects of a store that the service knows nothing of, from now on for
        `for_s` (asked again, for longer); of several callers only one has. `rebuilt` ends it."""
        ...

    def rebuilt(self, builder: int) -> None: ...

    def close(self) -> None:
        """May be called twice."""
        ...
