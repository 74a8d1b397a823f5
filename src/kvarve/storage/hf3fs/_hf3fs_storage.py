"""Objects of one label in the slots of a store on 3FS. An `Owner` says which slots, an engine moves the bytes.

A put takes slots, writes header and bytes, waits until they are on the medium, and publishes them. A get reads both,
and compares the header with the object that it wants and with the bytes that came. Whatever happened to the slot, to
its file or to the map, an object that is not there bit for bit is a miss, and is forgotten.
"""

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names, check_pieces
from kvarve.storage.file.disk import FULL, Disk
from kvarve.storage.hf3fs._hf3fs_folder import Folder
from kvarve.storage.hf3fs._io_engine import Engine, Move
from kvarve.storage.hf3fs._owner import Owner
from kvarve.storage.hf3fs._slot_layout import Slot, Title, hash_of, read_header, slot_bytes_for
from kvarve.storage.hf3fs._slot_table import Entry
from kvarve.system.background import BackgroundCall
from kvarve.system.regions import HostRegion

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # for calls in flight; those that hang are left behind
_READY_S = 10.0  # for which an opening waits until what was there has been found
_KEEP_S = 10.0  # between two looks after the house
Pieces = Sequence[memoryview]
_LOST = (errno.ENODATA, errno.ENOENT)  # a hole, an end, or no file: the object is not there


class Hf3fsStorage(Storage):
    """`own(folder)` is the owner of this process's files; the engine is this storage's own. `counts` has the objects
    that were not as they should be, by what was wrong."""

    def __init__(self, path: Path, label: bytes, engine: Engine, own: Callable[[Folder], Owner], disk: Disk) -> None:
        self.counts: Counter[str] = Counter()
        self._path, self._label, self._engine, self._disk = path, hash_of(label), engine, disk
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the counts, and all below
        self._left = threading.Condition(self._lock)
        self._calls = 0  # in flight
        self._closed = self._released = False
        self._entering = threading.Lock()  # held while the folder is opened anew
        self._folder = self._entered(make=True)
        self._owner = own(self._folder)
        self._rest = threading.Event()  # set when the storage is closed
        self._housekeeper = BackgroundCall("kvarve 3fs keeps house", self._keep_house)
        self._owner.ready.wait(_READY_S)

    # --- the calls

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._call():
            return [bool(places) for places in self._owner.places(self._label, names)]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        with self._call():
            return self._get(names, self._owner.find(self._label, names), into)

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        return self.put_pieces(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Pieces]) -> list[bool]:
        check_pieces(names, data)
        once, first = [*dict.fromkeys(names)], dict(zip(names[::-1], data[::-1], strict=True))
        with self._call():
            stored = dict(zip(once, self._put(once, [first[name] for name in once]), strict=True))
        return [stored[name] for name in names]

    def touch(self, names: Sequence[str]) -> None:
        check_names(names)
        with self._call():
            self._owner.find(self._label, names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._call():
            return self._delete(names)

    def drop(self, group: str | None = None) -> int:
        check_names([] if group is None else [group])
        with self._call():
            count = sum(sum(self._delete(names)) for names in self._owner.names(self._label, group))
            with self._owner.lock:
                left = self._owner.table.left(self._label, group)  # which was evicted, and can be found again
            self._wipe(self._folder_in_place(), left)
            return count

    def usage(self) -> StorageUsage:
        with self._call():
            usage, room_bytes = self._owner.usage(self._label), None
            with suppress(OSError):
                room_bytes = self._disk.space(self._folder.root)[0]
        with self._lock:
            lost, damaged = self.counts["lost"], self.counts["torn"] + self.counts["unreadable"]
        return replace(usage, lost=lost, damaged=damaged, room_bytes=room_bytes)

    def register(self, region: HostRegion) -> None:
        self._engine.register(region)

    def close(self) -> None:
        """Waits `CLOSE_S` for calls in flight: the last of those that take longer closes what they use."""
        if os.getpid() != self._pid:  # after a fork all is the parent's
            return
        with self._left:
            self._closed = True
            self._rest.set()
            if not self._left.wait_for(lambda: not self._calls, CLOSE_S):
                log.warning("%s: %d calls hang, and are left behind", self._path, self._calls)
        self._release()

    def _release(self) -> None:
        """After `close`, close what the calls use, once, when none is left."""
        with self._lock:
            if not self._closed or self._calls or self._released:
                return
            self._released = True
        self._owner.close(self._folder)
        self._folder.close()
        self._engine.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # where the lock may be held for ever
            raise StorageError(f"{self._path}: this storage was opened before a fork")
        with self._lock:
            if self._closed:
                raise StorageError(f"{self._path}: this storage is closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._left:
                self._calls -= 1
                self._left.notify_all()
            self._release()

    # --- reading

    def _get(self, names: Sequence[str], slots: Sequence[Slot | None], into: Sequence[memoryview]) -> list[int | None]:
        folder = self._folder_in_place()
        wanted = {at: Title(self._label, names[at], slot) for at, slot in enumerate(slots) if slot is not None}
        data = {at: (into[at][: title.slot.size_bytes],) for at, title in wanted.items()}
        moves, troubles = _moves(folder, wanted, data)
        no_file = sum(isinstance(error, FileNotFoundError) for error in troubles.values())
        self._engine.read([move for move in moves.values() if not move.rest_bytes])
        for move in moves.values():
            if rest_bytes := move.rest_bytes:  # which the check needs: memory for one at a time
                move.pieces = (*move.pieces, memoryview(bytearray(rest_bytes)))
                self._engine.read([move])
                move.pieces = move.pieces[:1]
        troubles |= {number: move.trouble for number, move in moves.items() if move.trouble is not None}
        failed = [trouble for trouble in troubles.values() if trouble.errno not in _LOST]
        intact = {number for number, move in moves.items() if move.intact}
        gone = [it for it in wanted if it not in intact and (it not in troubles or troubles[it].errno in _LOST)]
        self._count("lost", no_file)
        self._count("torn", len(gone))
        self._count("unreadable", len(failed))
        if gone:
            log.warning("%s: %d objects are not as they were written, and are forgotten", self._path, len(gone))
            with suppress(StorageError):
                self._owner.remove([wanted[number] for number in gone])
        if len(failed) == len(wanted) - no_file and any(error.errno != errno.EIO for error in failed):  # not of slots
            raise StorageError(f"{self._path}: read 0 of {len(names)} objects: {failed[0]}") from failed[0]
        return [wanted[number].slot.size_bytes if number in intact else None for number in range(len(names))]

    # --- writing

    def _put(self, names: Sequence[str], data: Sequence[Pieces]) -> list[bool]:
        folder = self._folder_in_place()
        sizes = [sum(piece.nbytes for piece in pieces) for pieces in data]
        slots, lost = self._owner.reserve(self._label, dict(zip(names, map(slot_bytes_for, sizes), strict=True)))
        answers = [slot is True for slot in slots]
        unwritten = {number: slot for number, slot in enumerate(slots) if isinstance(slot, Entry)}
        try:
            self._wipe(folder, lost)
            self._owner.take_out(folder)
            for number, entry in unwritten.items():
                entry.size_bytes = sizes[number]
            wanted = {number: entry.title for number, entry in unwritten.items()}
            moves, troubles = _moves(folder, wanted, dict(enumerate(data)), create=True)
            self._engine.write([*moves.values()])
            troubles |= {number: move.trouble for number, move in moves.items() if move.trouble is not None}
            written = [number for number in wanted if number not in troubles]
            known = self._owner.commit(self._label, names, [unwritten.pop(number) for number in written])
            for number in written:
                answers[number] = known[number]
        finally:
            self._owner.abort(unwritten.values())
        failed = [trouble for trouble in troubles.values() if trouble.errno not in FULL]
        self._count("no space", len(troubles) - len(failed))
        self._count("unwritten", len(failed))
        if failed and not any(answers[number] for number in wanted):
            told = f"stored {sum(answers)} of {len(names)} objects"
            raise StorageError(f"{self._path}: {told}: {failed[0]}") from failed[0]
        return answers

    def _delete(self, names: Sequence[str]) -> list[bool]:
        places = dict(zip(names, self._owner.places(self._label, names), strict=True))
        gone = [Title(self._label, name, slot) for name, slots in places.items() for slot in slots]
        folder = self._folder_in_place()
        self._owner.remove(gone, lambda: self._wipe(folder, gone))
        return [bool(places.pop(name, ())) for name in names]

    def _wipe(self, folder: Folder, objects: Sequence[Title]) -> None:
        """Write over the headers of slots that still have these objects, also in files of others: else a process that
        starts would find them again. Where that fails, it may."""
        moves, _ = _moves(folder, dict(enumerate(objects)))
        self._engine.read([*moves.values()])
        found = {number: read_header(move.header, objects[number].slot.extent) for number, move in moves.items()}
        self._engine.write([moves[at] for at, title in found.items() if title and title[:3] == objects[at][:3]])

    # --- the folder

    def _entered(self, *, make: bool) -> Folder:
        folder = Folder(self._disk, self._path, self._engine, make=make)
        self._engine.enter(folder)
        return folder

    def _folder_in_place(self) -> Folder:
        """The folder, opened anew if its file system was mounted anew. StorageError: it is gone."""
        folder = self._folder
        if folder.is_in_place():
            return folder
        with self._entering:
            if self._folder is folder:
                self._folder = self._entered(make=False)
                log.warning("%s: its file system was mounted anew", self._path)
            return self._folder

    def _keep_house(self) -> None:
        while not self._rest.is_set():
            try:
                with self._call():
                    self._owner.keep(self._folder_in_place(), self._engine)
            except Exception as error:  # what is wrong today may be well at the next look
                if not self._rest.is_set():
                    bug = not isinstance(error, StorageError)
                    log.log(logging.ERROR if bug else logging.INFO, "%s: %s", self._path, error, exc_info=bug)
            self._owner.ready.set()
            self._rest.wait(_KEEP_S)

    def _count(self, what: str, objects: int) -> None:
        if objects:
            with self._lock:
                self.counts[what] += objects


def _moves(
    folder: Folder, objects: Mapping[int, Title], data: Mapping[int, Pieces] | None = None, *, create: bool = False
) -> tuple[dict[int, Move], dict[int, OSError]]:
    """The moves of objects, or (without `data`) of their headers alone; and why files cannot be opened."""
    moves, troubles = dict[int, Move](), dict[int, OSError]()
    for at, title in objects.items():
        try:
            file, offset = folder.file(title.slot.extent, create=create), title.slot.offset
            moves[at] = Move(file, offset, data[at], title) if data is not None else Move(file, offset, (), None)
        except OSError as error:
            troubles[at] = error
    return moves, troubles
