"""Objects of one label in the slots of a store on 3FS. The metadata says which slot, an engine moves the bytes.

A put reserves slots, writes header and bytes, waits until they are on the medium, and commits; what was not written
whole is aborted, and its slot stays in quarantine. A get looks its slots up, which pins them, reads header and bytes
together, and compares the header with the object that it wants and with the bytes that came. Whatever happened to the
slot, to its file or to the metadata, an object that is not there bit for bit is a miss, and is forgotten.
"""

import errno
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names, check_pieces, left_s
from kvarve.storage.file.disk import FULL, Disk
from kvarve.storage.file.folder import Medium
from kvarve.storage.hf3fs.hf3fs_folder import Folder
from kvarve.storage.hf3fs.io_engine import Engine, Move, Short
from kvarve.storage.hf3fs.metadata import MOST_NAMES, Extent, Metadata, Slot
from kvarve.storage.hf3fs.slot_layout import Title, file_name, offset, owner_of, read_header, slot_bytes_for, slots_of
from kvarve.system.background import BackgroundCall
from kvarve.system.regions import HostRegion

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # for calls in flight; those that hang are left behind
_PATIENCE_S = 60.0  # of a caller that has not said how long it waits
_GRACE_S = 5.0  # a slot is reserved, and an object pinned, for longer than that
_REBUILD_S = 60.0  # without news of a process that rebuilds, another one begins
_SWEEP_S = 60.0  # between two looks for files that no process needs
_REBUILDS = 5  # that begin anew since a whole file cannot be read; after that it is left out
_LOST = (errno.ENODATA, errno.ENOENT)  # a hole, an end, or no file: the object is not there


class Hf3fsStorage(Storage):
    """`open_metadata()` opens the metadata of the folder's store for `label`; the engine is this storage's own.
    `counts` has the objects that were not as they should be, by what was wrong."""

    def __init__(
        self,
        path: Path,
        label: bytes,
        engine: Engine,
        open_metadata: Callable[[], Metadata],
        disk: Disk | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._path, self._owner, self._engine, self._disk = path, owner_of(label), engine, disk or Disk()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the counts, and all below
        self._left = threading.Condition(self._lock)
        self._calls = 0  # in flight
        self._closed = self._released = False
        self._rebuilds = 0
        self._entering = threading.Lock()  # held while the folder is opened anew
        self._folder = self._entered(make=True)
        try:
            self._metadata = open_metadata()
        except BaseException:
            engine.close()
            raise
        self._rest = threading.Event()  # set when the storage is closed
        self._housekeeper = BackgroundCall("kvarve 3fs keeps house", self._keep_house)

    # --- the calls

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._call():
            return [found for some in _parts(names) for found in self._metadata.exists(some)]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        sizes: list[int | None] = []
        with self._call():
            for at in range(0, len(names), MOST_NAMES):
                some = slice(at, at + MOST_NAMES)
                sizes += self._get(names[some], into[some], len(sizes), len(names))
        return sizes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        return self._put_all(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        check_pieces(names, data)
        return self._put_all(names, data)

    def touch(self, names: Sequence[str]) -> None:
        check_names(names)
        with self._call():
            for some in reversed(_parts(names)):
                self._metadata.touch(some)

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        with self._call():
            return [gone for some in _parts(names) for gone in self._metadata.delete(some)]

    def drop(self, group: str | None = None) -> int:
        check_names([] if group is None else [group])
        with self._call():
            return self._metadata.drop(group)

    def usage(self) -> StorageUsage:
        with self._call():
            usage, room_bytes = self._metadata.usage(), None
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
                log.warning("%s: %d calls hang, and are left behind", self._path, self._calls)
        self._release()

    def _release(self) -> None:
        """After `close`, close what the calls use, once, when none is left."""
        with self._lock:
            if not self._closed or self._calls or self._released:
                return
            self._released = True
        self._folder.close()
        self._engine.close()
        self._metadata.close()

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

    def _get(self, names: Sequence[str], into: Sequence[memoryview], done: int, all_names: int) -> list[int | None]:
        folder, reader = self._folder_in_place(), secrets.randbits(63)
        sizes: list[int | None] = [None] * len(names)
        moves: dict[int, Move] = {}
        gone, failed = list[int](), list[OSError]()
        found = self._metadata.lookup(names, reader, min(left_s(), _PATIENCE_S) + _GRACE_S)
        try:
            for number, it in enumerate(found):
                if it is None:
                    continue
                try:
                    file = folder.file(it.slot.extent)
                except FileNotFoundError:
                    gone.append(number)
                    continue
                except OSError as error:
                    failed.append(error)
                    continue
                title = Title(self._owner, names[number], it.slot, it.size_bytes)
                moves[number] = Move(file, offset(it.slot), (into[number][: it.size_bytes],), title)
            self._engine.read([move for move in moves.values() if not move.rest_bytes])
            for move in moves.values():
                if rest_bytes := move.rest_bytes:  # which the check needs: memory for one at a time
                    move.pieces = (*move.pieces, memoryview(bytearray(rest_bytes)))
                    self._engine.read([move])
                    move.pieces = move.pieces[:1]
            for number, move in moves.items():
                if move.intact:
                    assert move.title is not None
                    sizes[number] = move.title.size_bytes
                elif move.trouble is None or move.trouble.errno in _LOST:
                    gone.append(number)
        except OSError as error:
            raise StorageError(f"{self._path}: read {done} of {all_names} objects: {error}") from error
        finally:
            if not any(move.late for move in moves.values()):  # else the pins end by themselves
                with suppress(StorageError):
                    self._metadata.release(reader)
        if gone:
            log.warning("%s: %d objects are not as they were written, and are forgotten", self._path, len(gone))
            self._count("torn", len(gone))
            with suppress(StorageError):
                slots = [it.slot for number in gone if (it := found[number]) is not None]
                self._metadata.delete([names[number] for number in gone], slots)
        tried = len(failed) + len(moves)
        failed += [move.trouble for move in moves.values() if move.trouble and move.trouble.errno not in _LOST]
        self._count("unreadable", len(failed))
        if failed and len(failed) == tried and not self._can_read(folder, failed):
            raise StorageError(f"{self._path}: read {done} of {all_names} objects: {failed[0]}") from failed[0]
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

    def _put_all(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        with self._call():
            first: dict[str, int] = {}
            for number, name in enumerate(names):
                first.setdefault(name, number)
            unique, stored = [*first], dict[str, bool]()
            for some in _parts(unique):
                answers = self._put(some, [data[first[name]] for name in some], sum(stored.values()), len(names))
                stored |= zip(some, answers, strict=True)
        return [stored[name] for name in names]

    def _put(self, names: Sequence[str], data: Sequence[Sequence[memoryview]], done: int, all_names: int) -> list[bool]:
        folder, request = self._folder_in_place(), secrets.randbits(63)
        sizes = [sum(piece.nbytes for piece in pieces) for pieces in data]
        slots = self._reserved(folder, request, names, sizes)
        moves: dict[int, Move] = {}
        unwritten = {number: slot for number, slot in enumerate(slots) if not isinstance(slot, bool)}
        answers, full, failed = [slot is True for slot in slots], 0, list[OSError]()
        try:
            for number, slot in unwritten.items():
                title = Title(self._owner, names[number], slot, sizes[number])
                try:
                    file = folder.file(slot.extent, create=True)
                except OSError as error:
                    if error.errno in FULL:
                        full += 1
                    else:
                        failed.append(error)
                    continue
                moves[number] = Move(file, offset(slot), data[number], title)
            self._engine.write([*moves.values()])
            written = {number: unwritten[number] for number, move in moves.items() if move.trouble is None}
            committed = self._metadata.commit(
                request, [names[i] for i in written], [*written.values()], [sizes[i] for i in written]
            )
            for number, known in zip(written, committed, strict=True):
                del unwritten[number]
                answers[number] = known
            self._count("too late", len(committed) - sum(committed))
            if committed and True in slots:  # in the order of this call, and not of its two parts
                with suppress(StorageError):
                    self._metadata.touch(names)
        except OSError as error:
            raise StorageError(f"{self._path}: stored {done} of {all_names} objects: {error}") from error
        finally:
            if unwritten:
                with suppress(StorageError):  # then the reservation ends at its deadline
                    self._metadata.abort(request, [*unwritten.values()])
        troubles = [move.trouble for number, move in moves.items() if number in unwritten and move.trouble is not None]
        failed += [error for error in troubles if error.errno not in FULL]
        self._count("no space", full + sum(error.errno in FULL for error in troubles))
        self._count("unwritten", len(failed))
        wrote = any(answers[number] for number in moves)
        if failed and (not wrote or any(error.errno == errno.ETIMEDOUT for error in failed)):  # it hangs, or has failed
            told = done + sum(answers)
            raise StorageError(f"{self._path}: stored {told} of {all_names} objects: {failed[0]}") from failed[0]
        return answers

    def _reserved(self, folder: Folder, request: int, names: Sequence[str], sizes: Sequence[int]) -> list[Slot | bool]:
        """A slot for each object that is not there; False where there is no room, also after files of other sizes have
        been removed."""
        for_s = min(left_s(), _PATIENCE_S) + _GRACE_S
        slot_bytes = [slot_bytes_for(size) for size in sizes]
        slots = self._metadata.reserve(request, names, slot_bytes, for_s)
        while False in slots and self._removed(folder):
            slots = self._metadata.reserve(request, names, slot_bytes, for_s)
        return slots

    def _removed(self, folder: Folder, listed: Sequence[Extent] = ()) -> bool:
        """Remove the files of extents that are retired; whether there was any."""
        extents = self._metadata.retired(listed)
        with Medium(self._path):
            for extent in extents:
                folder.remove(extent)
        if extents:
            self._metadata.removed(extents)
        return bool(extents)

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

    # --- in the background

    def _keep_house(self) -> None:
        """Find the objects that the metadata has forgotten, and remove the files that it does not know."""
        while True:
            try:
                with self._call():
                    self._rebuild()
                    folder = self._folder_in_place()
                    with Medium(self._path):
                        listed = [*folder.forget_removed()]
                    for at in range(0, len(listed), MOST_NAMES):
                        self._removed(folder, listed[at : at + MOST_NAMES])
            except StorageError as error:
                if not self._rest.is_set():
                    log.info("%s: %s", self._path, error)
            if self._rest.wait(_SWEEP_S):
                return

    def _rebuild(self) -> None:
        """Read the headers of all slots and tell the metadata, if it has lost them and no other process does so. A file
        that cannot be read at all may come back, but all wait for it, and so it is left out in the end."""
        builder = secrets.randbits(63)
        if not self._metadata.rebuilding(builder, _REBUILD_S):
            return
        folder, until = self._folder_in_place(), time.monotonic() + _REBUILD_S / 2
        with Medium(self._path):
            extents = folder.extents()
        adopted, unreadable = 0, dict[Extent, OSError]()
        for extent, file_bytes in extents.items():
            slots = [*slots_of(extent, file_bytes)]
            for at in range(0, len(slots), MOST_NAMES // 16):
                try:
                    titles = self._titles(folder, extent, slots[at : at + MOST_NAMES // 16])
                except OSError as error:
                    unreadable[extent] = error
                    titles = []
                for owner in dict.fromkeys(it.owner for it in titles):
                    its = [it for it in titles if it.owner == owner]
                    names, found = [it.name for it in its], [it.slot for it in its]
                    adopted += sum(self._metadata.adopt(owner, names, found, [it.size_bytes for it in its]))
                if self._rest.is_set():
                    return  # the next process that asks goes on
                if time.monotonic() > until:
                    until = time.monotonic() + _REBUILD_S / 2
                    if not self._metadata.rebuilding(builder, _REBUILD_S):
                        return
        self._rebuilds += 1
        for extent, why in unreadable.items():
            if self._rebuilds < _REBUILDS or len(unreadable) == len(extents):
                raise StorageError(f"{self._path}: the metadata has lost its objects, and {why}") from why
            log.warning("%s: what is in %s is lost: %s", self._path, file_name(extent), why)
            self._count("lost", sum(1 for _ in slots_of(extent, extents[extent])))
        self._metadata.rebuilt(builder)
        self._count("found again", adopted)
        log.warning("%s: the metadata had lost its objects: %d were found again", self._path, adopted)

    def _titles(self, folder: Folder, extent: Extent, slots: Sequence[Slot]) -> list[Title]:
        """The objects in these slots, as their headers say; a get will check their bytes. OSError: none can be read."""
        try:
            file = folder.file(extent)
        except FileNotFoundError:
            return []
        moves = [Move(file, offset(slot), (), None) for slot in slots]
        self._engine.read(moves)
        failed = [move.trouble for move in moves if move.trouble is not None and not isinstance(move.trouble, Short)]
        if failed and len(failed) == len(moves):  # a single slot that cannot be read has no object, as in a get
            raise failed[0]
        self._count("unreadable", len(failed))
        titles = []
        for slot, move in zip(slots, moves, strict=True):
            title = read_header(move.header)
            if title is not None and title.slot[:2] == slot[:2]:
                titles.append(title)
        return titles

    def _count(self, what: str, objects: int) -> None:
        if objects:
            with self._lock:
                self.counts[what] += objects


def _parts(names: Sequence[str]) -> list[Sequence[str]]:
    """Names in batches that the metadata takes; one empty batch of none, so that a closed storage is noticed."""
    return [names[at : at + MOST_NAMES] for at in range(0, max(1, len(names)), MOST_NAMES)]
