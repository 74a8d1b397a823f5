"""Objects of one label in the slots of a store on 3FS. An `Owner` says which slots, an engine moves the bytes.

A put takes slots, writes header and bytes, waits until they are on the medium, and publishes them; what was not written
whole leaves its slot at rest. A get reads header and bytes together, and compares the header with the object that it
wants and with the bytes that came. Whatever happened to the slot, to its file or to the map, an object that is not
there bit for bit is a miss, and is forgotten.
"""

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names, check_pieces
from kvarve.storage.file.disk import FULL, Disk
from kvarve.storage.hf3fs._hf3fs_folder import Folder
from kvarve.storage.hf3fs._io_engine import Engine, Move, Short
from kvarve.storage.hf3fs._owner import Owner
from kvarve.storage.hf3fs._slot_layout import Slot, Title, hash_of, slot_bytes_for
from kvarve.storage.hf3fs._slot_table import Entry
from kvarve.system.background import BackgroundCall
from kvarve.system.regions import HostRegion

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # for calls in flight; those that hang are left behind
_READY_S = 10.0  # for which an opening waits until what was there has been found
_KEEP_S = 10.0  # between two looks after the house
_LOST = (errno.ENODATA, errno.ENOENT)  # a hole, an end, or no file: the object is not there


class Hf3fsStorage(Storage):
    """`own(folder)` is the owner of this process's files; the engine is this storage's own. `counts` has the objects
    that were not as they should be, by what was wrong."""

    def __init__(
        self, path: Path, label: bytes, engine: Engine, own: Callable[[Folder], Owner], disk: Disk | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._path, self._label, self._engine, self._disk = path, hash_of(label), engine, disk or Disk()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the counts, and all below
        self._left = threading.Condition(self._lock)
        self._calls = 0  # in flight
        self._closed = self._released = self._hung = False
        self._entering = threading.Lock()  # held while the folder is opened anew
        self._folder = self._entered(make=True)
        try:
            self._owner = own(self._folder)
        except BaseException:
            engine.close()
            raise
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
            slots, pinned = self._owner.find(self._label, names)
            try:
                return self._get(names, slots, into)
            finally:
                self._owner.let_go(pinned)

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        return self.put_pieces(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        check_pieces(names, data)
        first: dict[str, int] = {}
        for number, name in enumerate(names):
            first.setdefault(name, number)
        with self._call():
            answers = self._put([*first], [data[number] for number in first.values()])
        stored = dict(zip(first, answers, strict=True))
        return [stored[name] for name in names]

    def touch(self, names: Sequence[str]) -> None:
        check_names(names)
        with self._call():
            self._owner.let_go(self._owner.find(self._label, names)[1])

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._call():
            return self._delete(names)

    def drop(self, group: str | None = None) -> int:
        check_names([] if group is None else [group])
        with self._call():
            return sum(sum(self._delete(names)) for names in self._owner.names(self._label, group))

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
            self._left.wait_for(lambda: not self._calls, CLOSE_S)
            if self._calls:
                self._hung = True
                log.warning("%s: %d calls hang, and are left behind", self._path, self._calls)
        self._release()

    def _release(self) -> None:
        """After `close`, close what the calls use, once, when none is left."""
        with self._lock:
            if not self._closed or self._calls or self._released:
                return
            self._released = True
        self._owner.close(self._folder, clean=not self._hung)
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
        sizes: list[int | None] = [None] * len(names)
        moves: dict[int, Move] = {}
        gone, failed = list[int](), list[OSError]()
        try:
            for number, slot in enumerate(slots):
                if slot is None:
                    continue
                try:
                    file = folder.file(slot.extent)
                except FileNotFoundError:
                    gone.append(number)
                except OSError as error:
                    failed.append(error)
                else:
                    title = Title(self._label, names[number], slot)
                    moves[number] = Move(file, slot.offset, (into[number][: slot.size_bytes],), title)
            self._count("lost", len(gone))
            self._engine.read([move for move in moves.values() if not move.rest_bytes])
            for number, move in moves.items():
                if rest_bytes := move.rest_bytes:  # which the check needs: memory for one at a time
                    move.pieces = (*move.pieces, memoryview(bytearray(rest_bytes)))
                    self._engine.read([move])
                    move.pieces = move.pieces[:1]
                if move.intact:
                    sizes[number] = move.object_bytes
                elif move.trouble is None or move.trouble.errno in _LOST:
                    gone.append(number)
        except OSError as error:
            raise StorageError(f"{self._path}: read 0 of {len(names)} objects: {error}") from error
        if gone:
            log.warning("%s: %d objects are not as they were written, and are forgotten", self._path, len(gone))
            self._count("torn", len(gone))
            with suppress(StorageError):
                wrong = [(names[number], slot) for number in gone if (slot := slots[number]) is not None]
                self._owner.let_go(self._owner.remove(self._label, wrong))
        tried = len(failed) + len(moves)
        failed += [move.trouble for move in moves.values() if move.trouble and move.trouble.errno not in _LOST]
        self._count("unreadable", len(failed))
        if failed and len(failed) == tried and not self._can_read(folder, failed):
            raise StorageError(f"{self._path}: read 0 of {len(names)} objects: {failed[0]}") from failed[0]
        return sizes

    def _can_read(self, folder: Folder, failed: Sequence[OSError]) -> bool:
        """Whether the store can be read, so that reads which failed are of single objects and no trouble of all."""
        if any(error.errno != errno.EIO for error in failed):
            return False
        try:
            look = Move(folder.marker(), 0, (), None)
        except OSError:
            return False
        self._engine.read([look])
        return look.trouble is None or isinstance(look.trouble, Short)  # it is shorter than a header

    # --- writing

    def _put(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        folder = self._folder_in_place()
        sizes = [sum(piece.nbytes for piece in pieces) for pieces in data]
        slot_bytes = [slot_bytes_for(size) for size in sizes]
        slots = self._owner.reserve(folder, self._engine, self._label, names, slot_bytes)
        unwritten = {number: slot for number, slot in enumerate(slots) if isinstance(slot, Entry)}
        answers, full, failed = [slot is True for slot in slots], 0, list[OSError]()
        moves: dict[int, Move] = {}
        try:
            for number, entry in unwritten.items():
                entry.size_bytes = sizes[number]
                try:
                    file = folder.file(entry.slot.extent, create=True)
                except OSError as error:
                    if error.errno in FULL:
                        full += 1
                    else:
                        failed.append(error)
                    continue
                title = Title(self._label, names[number], entry.slot)
                moves[number] = Move(file, entry.slot.offset, data[number], title)
            self._engine.write([*moves.values()])
            written = [number for number, move in moves.items() if move.trouble is None]
            committed = [unwritten.pop(number) for number in written]
            known = self._owner.commit(self._label, names, committed)
            for number in written:
                answers[number] = known[number]
            self._count("too late", len(written) - sum(answers[number] for number in written))
        except OSError as error:
            raise StorageError(f"{self._path}: stored {sum(answers)} of {len(names)} objects: {error}") from error
        finally:
            self._owner.abort(unwritten.values())
        troubles = [move.trouble for number, move in moves.items() if number in unwritten and move.trouble is not None]
        failed += [error for error in troubles if error.errno not in FULL]
        self._count("no space", full + sum(error.errno in FULL for error in troubles))
        self._count("unwritten", len(failed))
        wrote = any(answers[number] for number in moves)
        if failed and (not wrote or any(error.errno == errno.ETIMEDOUT for error in failed)):  # it hangs, or has failed
            told = f"stored {sum(answers)} of {len(names)} objects"
            raise StorageError(f"{self._path}: {told}: {failed[0]}") from failed[0]
        return answers

    def _delete(self, names: Sequence[str]) -> list[bool]:
        folder = self._folder_in_place()
        places = dict(zip(names, self._owner.places(self._label, names), strict=True))
        gone = [(name, slot) for name, slots in places.items() for slot in slots]
        self._owner.wipe(folder, self._engine, self._owner.remove(self._label, gone))
        return [bool(places.pop(name, ())) for name in names]

    # --- the folder

    def _entered(self, *, make: bool) -> Folder:
        engine = self._engine
        folder = Folder(
            self._disk, self._path, make=make, direct=engine.direct, opened=engine.opened, closing=engine.closing
        )
        engine.enter(folder)
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
