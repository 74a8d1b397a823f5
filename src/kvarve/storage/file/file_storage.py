"""Objects in a few large files below one folder, within a capacity. Knows names and bytes only.

A put that answers True has written and synced the data, then written and synced the entries in the tables. A slot that
was given to another object may still have its old entry after a power cut: as a reader checks each object's own
checksum, that is a miss. Nothing is ever replaced.

Several processes may have one folder open. A process that fills or changes a row has locked its slot, as bytes of the
slab's file (the kernel unlocks them when it dies); a mutex excludes others while a slab is made or removed. Reading
takes no lock: after a read, the reader checks that the row still holds the same object.

A folder that may only be read, as its file system takes no writes or the operator wants that, is read without a lock
and without a trace. Other processes do not know of such a reader, so it checks each entry again after it has read.
"""

import errno
import itertools
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import not_

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names, check_pieces, in_group
from kvarve.storage.file._index import DEFAULT_THREADS, Index, Limits, Put, check_limits
from kvarve.storage.file._slab_allocator import AT_ONCE, SlabAllocator
from kvarve.storage.file._slabs import Mover, RowAddress, RowSpan, Slab
from kvarve.storage.file._table import STORED
from kvarve.storage.file.disk import FULL, Disk
from kvarve.storage.file.folder import (
    Folder,
    Medium,
    ReadOnly,
    Wanted,
    check_contents,
    check_folder,
    checked_path,
    spare_bytes,
    tries,
)

log = logging.getLogger(__name__)

_DROPPED = 1024  # objects per change that other processes wait for
_SAVE_CLOCK_NS = 30_000_000_000
_YOUNG_NS = 60_000_000_000  # the kernel has written older data of any process, even one that died


class FileStorage(Storage):
    """At most `capacity_bytes` of files below `directory` (absolute; made when missing).

    The capacity bounds the whole folder with all its models: idle models' slabs are removed when space is needed.
    Objects lie in slots of whole 4 KiB. A new object evicts others by the order `eviction` (lru, lfu, s3fifo). Objects
    stored more than `ttl_s` ago are missing. `quota_bytes`: bound on the objects of one group (the part of a name
    before the first "-"); `threads`: for reads and writes, and as many for syncs. `durable`: a put answers after syncs;
    without, a power cut loses what the kernel had not written yet. `shared`: processes on several hosts use the folder,
    and locks reach all of them. `read_only`: nothing is written, whatever is put; the same, and a warning, while the
    file system takes no writes. `for_maintenance`: reads are no uses, the store does not count as open, and nothing is
    evicted.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        label: bytes,
        description: str,
        *,
        ttl_s: float | None = None,
        quota_bytes: int | None = None,
        eviction: str = "lru",
        threads: int = DEFAULT_THREADS,
        durable: bool = True,
        shared: bool = False,
        read_only: bool = False,
        for_maintenance: bool = False,
        disk: Disk | None = None,
    ) -> None:
        check_limits(ttl_s, quota_bytes, eviction, threads)
        self._disk, self._durable, self._for_maintenance = disk or Disk(), durable, for_maintenance
        ttl_ns = None if ttl_s is None else int(ttl_s * 1e9)
        self._limits = Limits(capacity_bytes, eviction, ttl_ns, quota_bytes, durable)
        # Maintenance accepts any capacity.
        bound = None if for_maintenance or read_only else capacity_bytes
        self._wanted = Wanted(checked_path(directory), bound, label, description, shared, read_only)
        check_folder(self._wanted, self._disk)
        self._reading = False  # it is open to be read alone
        self._told_gone: Folder | None = None
        self._directory = self._wanted.directory
        self._medium = Medium(self._directory)
        # To change rows a thread takes `_writing`, and `_lock` for moments. Readers need `_lock` alone, so it is not
        # held during slow work. They wait for it with `_asking` held: see `_let_readers_in`.
        self._writing, self._asking, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._saved_ns = 0
        self._mover = Mover(threads, self._lock, self._require_open)
        self._open = False
        self._folder: Folder
        self._index: Index
        self._enter(make=True)
        self._open = True
        _open_here.add(self)

    def _enter(self, *, make: bool) -> None:
        """Open the folder for this process, to be read alone if it has to be."""
        if not self._wanted.read_only:
            try:
                self._enter_to_write(make=make)
            except ReadOnly as error:
                if not self._reading:
                    log.warning("nothing is stored, and what is there can be read: %s", error)
            else:
                return
        self._enter_to_read()

    def _enter_to_read(self) -> None:
        with ExitStack() as undo, self._medium:
            folder = Folder(self._disk, self._wanted.to_read(), make=False)
            undo.callback(folder.close)
            check_contents(self._disk, folder.root, folder.wanted)
            folder.look_in()
            index = Index(folder, self._limits)
            undo.callback(index.close)
            if folder.alone():
                index.read_all()
            else:
                index.refresh()
            undo.pop_all()
        self._use(index, SlabAllocator(index, self._lock, self._let_readers_in), reading=True)

    def _use(self, index: Index, allocator: SlabAllocator, *, reading: bool) -> None:
        """Have all calls use these and their folder from now on, in place of those before."""
        left: list[Index | Folder] = [self._index, self._folder] if self._open else []
        with self._lock:
            if self._open:
                index.count_on(self._index)
            self._folder, self._index, self._allocator, self._reading = index.folder, index, allocator, reading
        for each in left:
            each.close()

    def _enter_to_write(self, *, make: bool) -> None:
        with ExitStack() as undo, self._medium:
            folder = Folder(self._disk, self._wanted, make=make)
            undo.callback(folder.close)
            with folder.mutex():
                check_contents(self._disk, folder.root, self._wanted)  # it may have changed since the first check
                folder.enter()
                index = Index(folder, self._limits)
                index.changes.require_locks()
                allocator = SlabAllocator(index, self._lock, self._let_readers_in)
                if folder.alone():
                    index.begin(repair=not self._for_maintenance)
                elif not index.changes.is_begun():
                    raise StorageError(
                        f"{folder.model.path}: processes have it open, and the file by which they see each other's "
                        f"changes was removed: end them first"
                    )
            undo.callback(index.close)
            index.refresh()  # slow if there are many objects, so without the mutex
            with folder.mutex():
                index.refresh()
                try:
                    index.repair()
                    index.publish()
                    if not self._for_maintenance:
                        index.clock.save()
                except OSError as error:  # a place that cannot be written costs only what lies there
                    if error.errno == errno.EROFS:
                        raise
                self._saved_ns = index.clock.now_ns()
                allocator.shrink()  # the capacity may be smaller than that of the last processes
            undo.pop_all()
        self._use(index, allocator, reading=False)

    def _require_in_place(self) -> None:
        """Raise StorageError unless the folder is still in its place, or was replaced by one that can be opened.

        A folder that was emptied, or made anew, is opened again; a missing one is not made, because the mount point of
        an unmounted disk must not be written to.
        """
        left = self._folder
        with self._medium:
            if left.is_in_place():
                return
            in_flight = self._disk.is_there(str(left.model.path), left.model.identity)
        with self._writing:
            with self._lock:
                self._require_open()
                if self._folder is not left:  # another thread was faster
                    return
                known, in_flight = self._index.entries, in_flight and bool(self._index.held)
            if not self._reading and self._told_gone is not left:  # each probe finds it so until it can be opened anew
                self._told_gone = left
                log.warning("%s: its contents were removed or moved away from outside", self._directory)
            if in_flight:  # opened anew, their rows could be given to other objects
                raise StorageError(f"{self._directory}: what lies in it was removed while a put was under way")
            try:
                check_folder(self._wanted, self._disk)
                self._enter(make=False)
            except StorageError as error:
                raise StorageError(
                    f"{self._directory} was removed or moved away while it was open, and cannot be opened anew: {error}"
                ) from error
            if not self._reading:
                self._index.lost += len(known.keys() - self._index.entries.keys())

    # --- the calls

    @contextmanager
    def _looking(self) -> Iterator[Index]:
        """The index with all changes so far, for moments."""
        self._require_in_place()
        with self._asking, self._lock, self._medium:
            self._require_open()
            self._index.refresh()
            yield self._index

    def _let_readers_in(self) -> None:
        """Between two moments with `_lock`: return when no reader waits for it. A thread that lets go of a lock and
        takes it at once would keep it, however often it does so."""
        with self._asking:
            pass

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._looking() as index:
            if self._limits.ttl_ns is None:
                entries = index.entries
                found = [name in entries for name in names]
            else:
                now_ns = index.clock.now_ns()
                found = [index.find(name, now_ns) is not None for name in names]
        if not all(found):
            check_names([*itertools.compress(names, map(not_, found))])  # a stored object has a legal name
        return found

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        """As the protocol; if another process evicts an object meanwhile (None), its buffer may be partly filled."""
        check_batch(names, into)
        pieces, generations, sizes = [], [], []
        answers: list[int | None] = [None] * len(names)
        with self._looking() as index:
            now_ns = index.clock.now_ns()
            for number, (name, view) in enumerate(zip(names, into, strict=True)):
                place = index.find(name, now_ns)
                if place is not None:
                    slab, row = place
                    sizes.append(int(slab.length[row]))
                    generations.append(int(slab.generation[row]))
                    pieces.append(RowSpan(number, slab, row, view[: sizes[-1]]))
        if not pieces:
            return answers
        counts, troubles = self._mover.read(pieces)
        if len(troubles) == len(pieces) and not any(piece.slab.answers() for piece in pieces):
            raise StorageError(f"{self._directory}: read 0 of {len(names)} objects: {troubles[pieces[0].number]}")
        used, gone = [], []
        with self._medium:
            removed = {slab for slab in {piece.slab for piece in pieces} if slab.is_gone()}
        with self._asking, self._lock, self._medium:
            self._require_open()
            self._index.refresh()
            for piece, generation, size_bytes in zip(pieces, generations, sizes, strict=True):
                if piece.slab in removed or not self._index.is_current((piece.slab, piece.row), generation):
                    continue
                place = piece.slab, piece.row
                # A process that writes does not know of one that only reads.
                if self._reading and not self._index.confirm(place):
                    continue
                if counts.get(piece.number) == piece.view.nbytes:
                    answers[piece.number] = size_bytes
                    used.append(place)
                else:
                    gone.append((*place, generation))
            stamps = self._index.use(used) if self._counts_uses() else []
        self._stamp(stamps)
        if gone:
            self._retire(gone)
        if removed:
            self._give_up(removed)
        return answers

    def _counts_uses(self) -> bool:
        return not self._reading and not self._for_maintenance

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        return self._put(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        """As the protocol. Nothing is copied if every piece is of whole blocks in block-aligned memory."""
        check_pieces(names, data)
        return self._put(names, data)

    def _put(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        self._require_in_place()
        if self._reading and not self._writes_again():
            return self.exists(names)
        put, first = Put(names, data), dict[str, int]()
        for number, name in enumerate(names):
            first.setdefault(name, number)
        numbers = list(first.values())
        try:
            # A second try: a slot is bad, or has no blocks on the disk, or other processes were filling all rows.
            for _ in range(2):
                self._reserve(put, numbers)
                if put.places:
                    try:
                        self._write(put)
                        self._sync(put, [(slab, slab.file) for slab in {slab for slab, _ in put.places.values()}])
                        self._commit(put)
                    except BaseException:  # also on an interrupt the rows are released
                        self._release_rows(put)
                        raise
                self._sync(put, [(slab, slab.table) for slab in put.slabs])
                self._require_synced(put)
                self._require_kept(put)
                numbers = [
                    it for it, stored in put.answers.items() if not stored and (put.contended or it in put.failed)
                ]
                put.full = any(error.errno in FULL for error in put.failed.values())
                if not numbers:
                    break
            for error in put.failed.values():
                if error.errno not in FULL:
                    raise error
        except OSError as error:
            put.failed.clear()  # they refer to this frame, and so to slabs, whose files would stay open
            put.lost.clear()
            if error.errno == errno.EROFS:
                self._turn_to_reading()
                return [False] * len(names)  # what was written may be lost in a power cut
            done = sum(put.answers.values())
            raise StorageError(f"{self._directory}: stored {done} of {len(names)} objects: {error}") from error
        self._used(put)
        return [put.answers[first[name]] for name in names]

    def touch(self, names: Sequence[str]) -> None:
        check_names(names)
        with self._looking() as index:
            now_ns = index.clock.now_ns()
            found = [place for name in dict.fromkeys(names) if (place := index.find(name, now_ns)) is not None]
            stamps = index.use(found) if self._counts_uses() else []
        self._stamp(stamps)

    def delete(self, names: Sequence[str]) -> list[bool]:
        """As the protocol; of a store that can only be read, objects are missing from now on in this process alone."""
        check_names(names)
        self._require_in_place()
        deleted: set[str] = set()
        left = [*dict.fromkeys(names)]
        try:
            with self._medium:
                for _ in tries(self._directory) if not self._reading else ():
                    with self._changing():
                        left = self._delete(left, deleted)
                    if not left:  # else another process may be about to evict some of them
                        break
        except ReadOnly:
            self._turn_to_reading()
        if self._reading:
            deleted |= self._hide(left)
        answers = []
        for name in names:
            answers.append(name in deleted)
            deleted.discard(name)  # of one name twice the first is the one
        return answers

    def _delete(self, names: Sequence[str], deleted: set[str]) -> list[str]:
        """Delete objects; returns the names of those that another process has seized."""
        left = []
        for at in range(0, len(names), AT_ONCE):
            with self._lock:
                now_ns = self._index.clock.now_ns()
                for name in names[at : at + AT_ONCE]:
                    place = self._index.find(name, now_ns)
                    if place is not None and self._index.seize(*place):
                        self._index.drop(*place)
                        deleted.add(name)
                    elif place is not None:
                        left.append(name)
        self._index.publish(self._lock)
        return left

    def _hide(self, names: Iterable[str]) -> set[str]:
        with self._looking() as index:
            now_ns = index.clock.now_ns()
            found = {name: place for name in names if (place := index.find(name, now_ns)) is not None}
            for place in found.values():
                index.hide(*place)
        return {*found}

    def drop(self, group: str | None = None) -> int:
        """As the protocol. ConfigError: the store can only be read."""
        check_names([] if group is None else [group])
        with self._looking() as index:
            names = [name for name in index.entries if in_group(name, group)]
        count = 0
        for at in range(0, len(names), _DROPPED):
            self._require_writable()
            count += sum(self.delete(names[at : at + _DROPPED]))
        self._require_writable()
        return count

    def _require_writable(self) -> None:
        if self._reading:
            raise ConfigError(f"{self._directory} can only be read: its pages cannot be removed")

    def usage(self) -> StorageUsage:
        with self._looking() as index:
            objects, size_bytes = index.count(index.clock.now_ns())
            room_bytes = None
            with suppress(OSError):
                room_bytes = max(0, spare_bytes(self._disk, self._folder.root))
            return StorageUsage(
                objects,
                size_bytes,
                None if self._reading else self._limits.capacity_bytes,
                index.evicted,
                lost=index.lost,
                damaged=index.damaged,
                room_bytes=room_bytes,
                read_only=self._reading,
            )

    def collect(self) -> dict[str, int]:
        """Free expired objects, and damaged slabs; returns the objects and the bytes. ConfigError: as `drop`."""
        self._require_in_place()
        self._require_writable()
        with self._medium, self._changing():
            with self._lock:
                index, now_ns = self._index, self._index.clock.now_ns()
                expired = index.expire(index.old(index.slabs.values(), now_ns), now_ns)
                index.publish()
            return {"expired": expired, "damaged_bytes": self._allocator.remove_damaged("kvarve storage gc")}

    def close(self) -> None:
        """Close; rows that a call is still filling stay reserved until it returns."""
        if any(slab.failed for slab in [*self._index.slabs.values()]):
            with suppress(OSError, StorageError), self._changing():
                pass  # they are dropped
        with self._writing, self._lock:
            if self._open:
                self._open = False
                with suppress(OSError):
                    if self._counts_uses():
                        self._index.clock.save()
                self._release_slabs()
                self._leave_folder()

    # --- a put, step by step

    def _reserve(self, put: Put, numbers: Iterable[int]) -> None:
        """Find stored objects, and reserve rows for the others; an object that gets no row is answered False."""
        put.begin_round()
        with self._changing(put):
            now_ns = self._allocator.begin(put)
            for number in numbers:
                name = put.names[number]
                put.answers[number] = name in self._index.entries and self._is_there(put, name, now_ns)
            self._allocator.reserve(put, [number for number in numbers if not put.answers[number]])
            self._index.publish(self._lock)  # what was evicted is gone before it is overwritten
            with self._lock:
                self._index.refresh()  # a slab may have been removed just before a row of it was seized

    def _is_there(self, put: Put, name: str, now_ns: int) -> bool:
        """Whether an object is stored. If so, it counts as used, and this put keeps it; an expired one is dropped."""
        with self._lock:
            place = self._index.find(name, now_ns)
            while place is not None and not self._index.confirm(place):
                place = self._index.find(name, now_ns)
            if place is not None:
                slab, row = place
                put.kept.add(self._index.entries[name])
                put.touched.add(slab)
                self._index.use([place])
                if slab.syncing or now_ns - int(slab.stored[row]) < _YOUNG_NS:  # another put may be syncing it
                    put.slabs.add(slab)
            elif name in self._index.entries and self._index.seize(*self._index.place(name)):
                self._index.drop(*self._index.place(name))
            return place is not None

    def _write(self, put: Put) -> None:
        pieces = [
            RowSpan(number, *place, put.data[number][0], put.data[number][1:]) for number, place in put.places.items()
        ]
        put.failed.update(self._mover.write(pieces, put.moving))

    def _release_rows(self, put: Put) -> None:
        """Free the rows once no thread writes to them any more: a write goes on if its caller is interrupted."""
        while put.moving:
            moving = put.moving.pop()
            if not moving.done():
                moving.add_done_callback(lambda _: self._release_rows(put))
                return
        with self._lock:
            self._index.release(put.places.values())
            if not self._open:
                self._leave_folder()

    def _commit(self, put: Put) -> None:
        """Publish the written objects, and release the rows of the others."""
        new, places = list[RowAddress](), [*put.places.items()]
        with self._changing(put):
            now_ns = self._index.clock.now_ns()
            for at in range(0, len(places), AT_ONCE):
                filled = defaultdict[Slab, list[int]](list)
                with self._lock:
                    for number, (slab, _) in places[at : at + AT_ONCE]:
                        there = self._index.find(put.names[number], now_ns)
                        if self._index.slabs.get(slab.number) is not slab:  # it was removed
                            put.contended = True
                        elif number in put.failed:
                            continue
                        elif there is not None:  # another put was faster
                            put.slabs.add(there[0])
                            put.answers[number] = True
                        else:
                            filled[slab].append(number)
                    for slab, some in filled.items():
                        rows = [put.places[number][1] for number in some]
                        self._index.keep(
                            slab, rows, [put.names[it] for it in some], [put.sizes[it] for it in some], now_ns
                        )
                        put.slabs.add(slab)
                        put.kept.update(slab.number << 32 | row for row in rows)
                        put.answers.update(dict.fromkeys(some, True))
                        new += [(slab, row) for row in rows]
            with self._lock:
                self._index.use(new, count=False)
            put.stored.update(new)
            self._index.publish(self._lock)
            with self._lock:
                self._index.release(put.places.values())
                self._index.retire(put.places[number] for number in put.failed)
            if now_ns - self._saved_ns > _SAVE_CLOCK_NS:
                self._saved_ns = now_ns
                self._index.clock.save()

    def _sync(self, put: Put, files: Sequence[tuple[Slab, int]]) -> None:
        """Return when files are on the medium, or it is known which are not."""
        if not self._durable:
            return
        with self._lock:
            for slab, _ in files:
                slab.syncing += 1
        try:
            ended = self._mover.sync(files)
        finally:
            with self._lock:
                for slab, _ in files:
                    slab.syncing -= 1
        put.lost.update((slab, error) for (slab, _), error in ended if error is not None)

    def _require_synced(self, put: Put) -> None:
        """OSError: a sync failed. Its slab is dropped, as any object of it may be lost."""
        if put.lost:
            put.answers.update((number, False) for number, (slab, _) in put.places.items() if slab in put.lost)
            with suppress(OSError, StorageError), self._changing():
                pass  # they are dropped
            raise next(iter(put.lost.values()))

    def _require_kept(self, put: Put) -> None:
        """OSError: the files of an object for which this put is about to answer were removed."""
        if not self._folder.is_in_place():
            raise OSError(errno.ENOENT, f"{self._folder.model.path} was removed or moved away")
        removed = [slab for slab in put.touched if slab.is_gone()]
        if removed:
            with self._lock:
                self._require_open()
                self._index.refresh()  # another process may have evicted them
                removed = [slab for slab in removed if self._index.slabs.get(slab.number) is slab]
        if removed:
            self._give_up(removed)
            raise OSError(errno.ENOENT, f"{removed[0].path} was removed or cut from outside")

    def _give_up(self, removed: Iterable[Slab]) -> None:
        if self._reading:
            with self._lock:
                for slab in removed:
                    if self._index.slabs.get(slab.number) is slab:
                        # Another model's process has evicted it, and told no reader.
                        self._index.lost += 0 if slab.is_removed() else int((slab.state == STORED).sum())
                        self._index.forget(slab)
            return
        with suppress(OSError, StorageError), self._changing():
            self._allocator.give_up(removed)

    def _used(self, put: Put) -> None:
        """Mark the objects of a put as used, the first as most recently, whether it is new or not."""
        if len(put.stored) == sum(put.answers.values()):
            return  # their entries were just written, in this order
        with self._lock:
            self._require_open()
            now_ns = self._index.clock.now_ns()
            stored = [
                self._index.find(put.names[number], now_ns) for number in sorted(put.answers) if put.answers[number]
            ]
            places = list(dict.fromkeys(place for place in stored if place))
            stamps = self._index.use(places, count=False)
        self._stamp(stamps)

    def _stamp(self, stamps: Iterable[tuple[Slab, int, int, int]]) -> None:
        with suppress(OSError):  # on a disk that became read-only the order does not matter
            for slab, row, when, uses in stamps:
                slab.stamp(row, when, uses)

    # --- a get, step by step

    def _retire(self, damaged: Sequence[tuple[Slab, int, int]]) -> None:
        """Drop objects that cannot be read, and leave their slots alone."""
        with self._lock:
            for slab, row, generation in damaged:
                if self._index.is_current((slab, row), generation):
                    self._index.damaged += 1
                    if not slab.bad:
                        slab.bad = True
                        log.warning("%s: an object in it could not be read: it is lost", slab.path)
                    if self._reading:
                        self._index.hide(slab, row)
        if self._reading:
            return
        with suppress(OSError, StorageError), self._changing(), self._lock:
            retired = []
            for slab, row, generation in damaged:
                if self._index.is_current((slab, row), generation) and self._index.seize(slab, row):
                    self._index.drop(slab, row)
                    retired.append((slab, row))
            self._index.publish()
            self._index.retire(retired)

    # --- a file system that takes no writes

    def _turn_to_reading(self) -> None:
        """A write was refused: what is stored is still there to be read."""
        with self._writing:
            self._require_open_now()
            if not self._reading:  # else another thread was faster
                log.warning("%s: its file system has become read-only: nothing is stored any more", self._directory)
                self._enter_to_read()

    def _writes_again(self) -> bool:
        """Whether a store that could only be read can be written: then it has been opened anew."""
        if self._wanted.read_only:
            return False
        with self._writing:
            self._require_open_now()
            if self._reading:
                try:
                    self._enter_to_write(make=False)
                except StorageError:
                    return False
                log.warning("%s: it can be written again", self._directory)
        return True

    # --- threads, locks, and the end

    @contextmanager
    def _changing(self, put: Put | None = None) -> Iterator[None]:
        """Exclude all other threads that change rows, and refresh the index. If that fails, the rows of `put` are
        released before another thread can seize them."""
        with self._writing:
            self._require_open_now()
            index = self._index
            try:
                with self._lock:
                    index.look_again()
                    index.refresh()
                    index.repair()
                self._allocator.drop_failed()
                yield
                index.publish(self._lock)  # what was repaired, if the caller had no changes
            except BaseException:  # also on an interrupt
                with self._lock:
                    if put is not None:
                        index.release(put.places.values())
                        put.places.clear()
                    index.revert()
                raise

    def _require_open(self) -> None:
        if not self._open:
            raise StorageError(f"{self._directory}: this storage is closed, or was opened before a fork")

    def _require_open_now(self) -> None:
        with self._lock:
            self._require_open()

    def _leave_folder(self) -> None:
        """Close the folder, unless a call is still filling a row: closed, the row could be given to another process."""
        if not self._index.held:
            self._folder.close()

    def _release_slabs(self) -> None:
        """Drop the slabs; one that is being read is closed when the read has ended."""
        self._index.close()
        self._mover.close()

    def _leave_to_parent(self) -> None:
        """In a child after fork: the folder stays the parent's, and this process must not hold on to its locks."""
        # A thread of the parent may have held them.
        self._writing, self._asking, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._mover.leave_to_parent()
        self._folder.abandon()
        if self._open:
            self._open = False
            for slab in {*self._index.slabs.values(), *self._index.held}:
                slab.close()  # a thread of the parent may have been using it, and its locks are the parent's
            self._release_slabs()


# Programs commonly fork their workers after opening a storage.
_open_here: "weakref.WeakSet[FileStorage]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for storage in list(_open_here):
        storage._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
