"""Room for slabs in a folder: how large they are made, when one gives way to another class, and that nothing is left.

All of it with the folder's mutex held. The store's lock, which is all that readers need, is held for moments, as making
and removing files is slow.
"""

import errno
import logging
import secrets
import threading
from contextlib import suppress

from kvarve.storage.books import Books, Call, Place, Wanted
from kvarve.storage.changes import LINE_BYTES
from kvarve.storage.folder import slab_numbers, slab_path
from kvarve.storage.orders import age_of
from kvarve.storage.slabs import Broken, Slab, unlink
from kvarve.storage.table import Shape, slot_bytes_for

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
# A slab is a 16th of the capacity but not above 256 MiB, until there are 16 of these; from then on it is a 16th of all
# that there are. So a large store has some hundreds, each an open file, and one that is never filled takes little.
_SLAB_BYTES = 256 << 20
_SHARE = 16
_TRY_AGAIN_NS = 10_000_000_000  # a class that found no room for a slab asks for one again after so long


class Room:
    def __init__(self, books: Books, lock: threading.Lock) -> None:
        self._books, self._folder, self._lock = books, books.folder, lock
        self._full_until: dict[int, int] = {}  # slot bytes: store time
        self._told: set[int] = set()  # slot bytes

    def seat(self, call: Call, name: str, size_bytes: int) -> Place | None:
        """A row for a new object, held from now on; None if there is no room for it."""
        while True:
            with self._lock:
                found = self._books.seat(call, name, size_bytes)
            if not isinstance(found, Wanted):
                if found is None:
                    self._tell_if_never(slot_bytes_for(size_bytes))
                return found
            if found.instead is not None and not self._swap(found):
                call.stuck.add(found.slot_bytes)
            if found.instead is None and not self._grow(found.slot_bytes):
                call.grown.add(found.slot_bytes)

    def _tell_if_never(self, slot_bytes: int) -> None:
        """Say once that nothing of this size can be stored: there is nothing that could be evicted for it."""
        with self._lock:
            mine = [slab.shape for slab in self._books.slabs.values()]
        if slot_bytes in self._told or any(shape.slot_bytes == slot_bytes for shape in mine):
            return
        self._told.add(slot_bytes)
        others_bytes = self._folder.bytes() - sum(shape.bytes for shape in mine)
        log.warning(
            "%s: nothing of %d bytes can be stored: other models that are in use have %d of %d bytes, or the disk is "
            "full; give it more capacity, or another folder",
            self._folder.directory,
            slot_bytes,
            others_bytes,
            self._books.limits.capacity_bytes,
        )

    def _grow(self, slot_bytes: int) -> bool:
        """One more slab of a class, if there is room; another model that nobody uses makes room."""
        now_ns = self._books.clock.now_ns()
        if self._full_until.get(slot_bytes, 0) > now_ns:
            return False
        self._find_lost()
        while True:
            room_bytes = self._room_bytes()
            with self._lock:
                shape = self._shape_for(slot_bytes, room_bytes)
            if shape is not None or not self._folder.remove_unused():
                break
        slab = None
        while slab is None and shape is not None:
            try:
                slab = self._new_slab(shape)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                # The disk is smaller than the capacity: perhaps there is room for a part.
                shape = Shape(slot_bytes, shape.slots // 4) if shape.slots >= 4 else None
        if slab is None:
            self._full_until[slot_bytes] = now_ns + _TRY_AGAIN_NS
            return False
        with self._lock:
            self._books.add(slab, empty=True)
        return True

    def _swap(self, wanted: Wanted) -> bool:
        """Empty a slab of another class and make one of this class in its place, unless that gives too little room."""
        assert wanted.instead is not None
        room_bytes = self._room_bytes()
        with self._lock:
            room_bytes += sum(
                slab.shape.bytes
                for slab in self._books.slabs.values()
                if slab.shape.slot_bytes != wanted.slot_bytes and self._books.may_go(slab)
            )
            if self._shape_for(wanted.slot_bytes, room_bytes) is None:
                return False
        self.remove(wanted.instead)
        if self._grow(wanted.slot_bytes):
            return True
        room_bytes = self._room_bytes()
        with self._lock:  # where there is room and still no slab, the disk is full, whatever is removed
            return self._shape_for(wanted.slot_bytes, room_bytes) is None

    def remove(self, slab: Slab) -> None:
        """Evict all that a slab holds, and the slab."""
        with self._lock:
            self._books.remove(slab)
        unlink(slab.disk, slab.path)
        self._full_until.clear()

    def shrink(self) -> None:
        """The capacity may be smaller than it was when all this was stored."""
        excess = self._folder.bytes() - self._books.limits.capacity_bytes
        while excess > 0 and self._folder.remove_unused():
            excess = self._folder.bytes() - self._books.limits.capacity_bytes
        while excess > 0:
            with self._lock:
                movable = [slab for slab in self._books.slabs.values() if self._books.may_go(slab)]
                coldest = min(movable, key=lambda slab: (self._books.is_last(slab), age_of(slab)), default=None)
            if coldest is None:
                break
            excess -= coldest.shape.bytes
            self.remove(coldest)

    def _room_bytes(self) -> int:
        """How large a new slab may be, beside what the other processes have to be told of it."""
        return self._books.limits.capacity_bytes - self._folder.bytes() - LINE_BYTES

    def _shape_for(self, slot_bytes: int, room_bytes: int) -> Shape | None:
        """What a new slab of a class may be like; None if there is no room for one that is worth it."""
        held_bytes = sum(slab.shape.bytes for slab in self._books.slabs.values())
        usual_bytes = max(min(_SLAB_BYTES, self._books.limits.capacity_bytes // _SHARE), held_bytes // _SHARE)
        usual = Shape(slot_bytes, max(1, Shape.within(slot_bytes, usual_bytes).slots))
        possible = Shape.within(slot_bytes, room_bytes)
        slots = min(usual.slots, possible.slots)
        first = all(slab.shape.slot_bytes != slot_bytes for slab in self._books.slabs.values())
        return Shape(slot_bytes, slots) if slots >= (1 if first else (usual.slots + 1) // 2) else None

    def _find_lost(self) -> None:
        """Slabs of which nobody has heard, or not any more: a process died, or could not write, while it made or
        removed them, or they could not be opened. They are room like others, and what lies in them is what it says."""
        disk, known = self._folder.disk, self._books.changes.known()
        for number in slab_numbers(disk, self._folder.model):
            if number in known or number in self._books.slabs:
                continue
            path = slab_path(self._folder.model, number)
            with suppress(OSError):  # it stays in the way, and is asked for again the next time
                try:
                    slab = Slab.open(disk, path, number, self._books.owner)
                except Broken:
                    unlink(disk, path)
                else:
                    if disk.size(slab.file) == slab.shape.slots_bytes:  # else it would grow, beyond what there is room
                        with self._lock:
                            self._books.add(slab, empty=False)

    def _new_slab(self, shape: Shape) -> Slab:
        there = slab_numbers(self._folder.disk, self._folder.model)
        number = next(number for number in range(len(there) + 1) if number not in there)
        identity = secrets.randbits(64) | 1
        return Slab.create(
            self._folder.disk, slab_path(self._folder.model, number), number, shape, self._books.owner, identity
        )
