"""What one process has of a store: the files that are its own, the objects in them, and the map that says where all
others are (docs/decisions/0020-metadata-of-3fs.md).

A process that is alone has no map but the table of its files, which are all there are; its storages share it. Of
several, each holds leases in the map for owners, whose names are in those of its files. A process takes over the files
of an owner whose lease nobody holds: of this machine soon, of another one after `ORPHAN_S`.
"""

import errno
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from kvarve.errors import StorageError
from kvarve.storage.base import StorageUsage, in_group
from kvarve.storage.file.folder import Medium
from kvarve.storage.hf3fs._hf3fs_folder import STORE_FILE, Folder
from kvarve.storage.hf3fs._io_engine import Engine, Move
from kvarve.storage.hf3fs._redis_map import LEASE_S, RedisMap, map_settings
from kvarve.storage.hf3fs._slot_layout import Extent, Slot, Title, read_header
from kvarve.storage.hf3fs._slot_table import EXTENT_BYTES, Entry, SlotTable

log = logging.getLogger(__name__)

ORPHAN_S = 600.0
_MOST_USES = 1 << 16  # that are told at once
_alone = WeakValueDictionary[str, "Owner"]()  # of this process, by the stores' names
_opening = threading.Lock()  # guards these


class Owner:
    """`end()` is called once, when the last storage is closed. Used by several threads."""

    def __init__(
        self, machine: str, capacity_bytes: int, quota_bytes: int | None, map_: RedisMap | None, end: Callable[[], None]
    ) -> None:
        self.capacity_bytes, self._quota_bytes = capacity_bytes, quota_bytes
        self.map, self.users, self._end = map_, 1, end
        self._machine = int.from_bytes(hashlib.sha256(machine.encode()).digest()[:4], "big")
        self.table = SlotTable(quota_bytes, shared=map_ is not None, first=time.time_ns() // 1000)
        self.clock: Callable[[], float] = time.monotonic
        self.ready = threading.Event()  # set when what was there has been looked through once
        self.lock = threading.Lock()  # guards the table, and what others are to be told of
        self._used: defaultdict[int, list[Slot]] = defaultdict(list)
        self._keeping = threading.Lock()  # held while a storage keeps house; guards all below
        self.ids: set[int] = set()
        self._renewed = self.clock()
        self._published = True  # whether the map knows all that we have
        self._holders: dict[int, bytes] = {}  # of owners that are not ours
        self._free_since: dict[int, float] = {}

    # --- objects

    def places(self, label: bytes, names: Sequence[str]) -> list[list[Slot]]:
        """All slots that are said to have each object."""
        if self.map is not None:
            return self.map.find(label, names)
        with self.lock:
            return [[entry.slot] if entry else [] for entry in self.table.find(label, names)]

    def names(self, label: bytes, group: str | None) -> Iterable[Sequence[str]]:
        """Those of a label's objects, or of one of its groups, in parts."""
        if self.map is not None:
            return self.map.names(label, group)
        with self.lock:
            return [[name for name in self.table.objects.get(label, ()) if in_group(name, group)]]

    def find(self, label: bytes, names: Sequence[str]) -> list[Slot | None]:
        """Where each object is, which is a use."""
        slots = [some[0] if some else None for some in self.places(label, names)]
        with self.lock:
            self._use([slot for slot in slots if slot is not None])
        return slots

    def remove(self, objects: Sequence[Title], wipe: Callable[[], object] = lambda: None) -> None:
        """These are not in their slots any more; `wipe()` is called between the map and our table, which gives the
        slots again. StorageError: the map has not heard of it, and ours are as before."""
        if self.map is not None:
            self.map.withdraw(objects)
        wipe()
        with self.lock:
            for title in objects:
                entry = self.table.at(title.slot)
                if entry and entry.title[:2] == title[:2]:  # a slot that has another object keeps it
                    self.table.remove(entry, self.clock())

    def usage(self, label: bytes) -> StorageUsage:
        """Of several processes none counts what others have."""
        with self.lock:
            table, objects = self.table, self.table.objects.get(label, ())
            known, size_bytes = (len(objects), table.bytes[label]) if self.map is None else (None, None)
            return StorageUsage(known, size_bytes, self.capacity_bytes, table.evictions[label])

    # --- writing

    def reserve(self, label: bytes, slot_bytes: Mapping[str, int]) -> tuple[list[Entry | bool], list[Title]]:
        """A slot for each object; True where it is there already (a use), False where there is no room. And what was
        ours and is not in the map: it was deleted there, or lost."""
        names = [*slot_bytes]
        told = self.places(label, names)
        if not self.ids or self.clock() - self._renewed > LEASE_S / 2:  # this process has stood still
            with self._keeping:
                self._renew()
        with self.lock:
            now, before, table = self.clock(), self.table.tick(), self.table
            lost = [it for it, slots in zip(table.find(label, names), told, strict=True) if it and not slots]
            titles = [entry.title for entry in lost]
            for entry in lost:
                table.remove(entry, now)
            self._use([slots[0] for slots in told if slots])
            answers: list[Entry | bool] = [bool(slots) for slots in told]
            for at, name in enumerate(names):
                answers[at] = answers[at] or table.reserve(label, name, slot_bytes[name], now, before) or False
        return answers, titles

    def commit(self, label: bytes, names: Sequence[str], written: Sequence[Entry]) -> list[bool]:
        """Which of the names are there, now that these slots have their objects."""
        with self.lock:
            for entry in written:
                self.table.commit(entry, self.clock())
            found = self.table.find(label, names)
            self.table.use(entry for entry in reversed(found) if entry is not None)
            live = [entry for entry in written if entry.live]
        self._publish(live)
        return [entry is not None for entry in found]

    def abort(self, entries: Iterable[Entry]) -> None:
        """These were not written, or their writes may still come."""
        with self.lock:
            for entry in entries:
                self.table.abort(entry, self.clock())

    def take_out(self, folder: Folder) -> None:
        """Tell the map what has left, and remove the files that have. What fails is done by the next call."""
        table = self.table
        with self.lock:
            evicted, table.evicted = table.evicted, []
        try:
            if self.map is not None:
                self.map.withdraw(evicted)
        except StorageError:
            with self.lock:
                table.evicted += evicted
            raise
        with Medium(folder.path):
            for extent in [*table.retired]:
                folder.remove(extent)
                table.retired.discard(extent)

    def _publish(self, entries: Sequence[Entry]) -> None:
        """Tell the map where these objects are."""
        if self.map is not None:
            try:
                self.map.publish(entry.title for entry in entries)
            except StorageError:
                self._published = False
                raise

    def _use(self, slots: Sequence[Slot]) -> None:
        """These objects are used now, the first one last, with the lock held. The owners of others' are told."""
        mine = []
        for slot in reversed(slots):
            if entry := self.table.at(slot):
                mine.append(entry)
            elif slot.extent.owner in self._holders and len(uses := self._used[slot.extent.owner]) < _MOST_USES:
                uses.append(slot)
        self.table.use(mine)

    # --- keeping house

    def keep(self, folder: Folder, engine: Engine) -> None:
        """Hold what is ours, take over what nobody holds, tell and hear what was used, and keep to the capacity."""
        if not self._keeping.acquire(blocking=False):
            return
        try:
            with Medium(folder.path):
                listed = folder.extents()
                self._claim({extent.owner for extent in listed})
                self._balance(listed)  # before headers are read, which takes long, and others store
                self._adopt(folder, engine, listed)
            if self.map is not None:
                with self.lock:
                    told, self._used = self._used, defaultdict(list)
                self.map.tell_used(told)
                for slots in self.map.used(self.ids):
                    with self.lock:
                        self._use(slots[::-1])
            self._balance(listed)
            self.take_out(folder)
            if not self._published:
                with self.lock:
                    every = [entry for objects in self.table.objects.values() for entry in objects.values()]
                self._published = True
                self._publish(every)
        finally:
            self._keeping.release()

    def close(self, folder: Folder) -> None:
        with self.lock:
            self.users -= 1
            if self.users:
                return
        try:
            with suppress(StorageError), self._keeping, Medium(folder.path):
                folder.save_uses(self.table.owner, self.table.uses())
                if self.map is not None:
                    self.map.let_go([*self.ids])
        finally:
            self._end()

    def _claim(self, owners: set[int]) -> None:
        """Hold what is ours, and take over those of these owners whom nobody has held for long enough."""
        others, now, soon_s = sorted(owners - self.ids), self.clock(), LEASE_S if self.ready.is_set() else 0.0
        if self.map is not None:
            self._holders = {it: by for it, by in zip(others, self.map.holders(others), strict=True) if by}
            self._free_since = {it: self._free_since.get(it, now) for it in others if it not in self._holders}
            waits_s = {it: soon_s if it >> 32 == self._machine else ORPHAN_S for it in self._free_since}
            others = [it for it, since in self._free_since.items() if now - since >= waits_s[it]]
        self._renew(others)

    def _renew(self, more: Iterable[int] = ()) -> None:
        """Say that we hold what is ours, and `more`. What another process holds meanwhile is its own."""
        now, held, fresh = self.clock(), self.ids.union(more), False
        # New files are of an owner of this machine, which takes them over soonest.
        own = [it for it in held if it >> 32 == self._machine] or [self._machine << 32 | secrets.randbits(32)]
        self.table.owner = min(own)
        held.add(self.table.owner)
        if self.map is not None:
            held, fresh = self.map.hold([*held])
        gone, self.ids, self._renewed = self.ids - held, held, now
        self._published = self._published and not fresh  # else the map may have lost everything
        if gone:
            log.warning("3FS: the files of %d owners are another process's now", len(gone))
            with self.lock:
                self.table.forget(gone, now)
        if self.table.owner not in held:
            self._renew()

    def _adopt(self, folder: Folder, engine: Engine, listed: dict[Extent, int]) -> None:
        """Files that are ours by now, with the objects that their headers name."""
        found, table = 0, self.table
        new = [it for it in listed if it.owner in self.ids and it.number not in table.known]
        uses = {number: use for owner in {it.owner for it in new} for number, use in folder.uses(owner).items()}
        try:
            for extent in new:
                with suppress(OSError):  # which may pass
                    titles = _titles(folder, engine, extent, listed[extent])
                    with self.lock:
                        found += table.adopt(extent, titles, uses, self.clock())
                if self.clock() - self._renewed > LEASE_S / 4:
                    self._renew()
        finally:
            with self.lock:
                table.known &= {extent.number for extent in listed} | {*table.files}
                if found:
                    table.sort()
            if found:
                log.info("%s: %d objects were found again", folder.path, found)
                self._published = False

    def _balance(self, listed: Iterable[Extent]) -> None:
        """Keep to the capacity, of which every process may have its part: one that has less may have a file more than
        there is room for, and whoever has most gives one back."""
        with self.lock:
            table, others = self.table, Counter[object]()
            for extent in listed:
                if extent.number not in table.known:
                    others[self._holders.get(extent.owner, extent.owner)] += extent.bytes
            processes = 1 + len({*self._holders.values()})
            part = min(self.capacity_bytes // processes, table.own_bytes + EXTENT_BYTES) if processes > 1 else 0
            table.limit_bytes = max(part, self.capacity_bytes - others.total())
            if table.own_bytes >= max(others.values(), default=0):
                table.shrink(self.clock())
            table.quota_bytes = self._quota_bytes and self._quota_bytes // processes


def own(setting: str | None, capacity_bytes: int, quota_bytes: int | None, folder: Folder) -> Owner:
    """All of a store, for a process that is alone with it (the storages of one share it), or its part, if it shares a
    map. ConfigError; StorageError: the store is another's, or its map does not answer."""
    machine = folder.disk.machine()
    if setting is not None:
        settings = map_settings(setting)
        store = folder.identity(f"all that share {settings.where}/{settings.database}")
        shared = RedisMap(settings, store, secrets.token_hex(8).encode())
        try:
            shared.holders([0])
        except BaseException:
            shared.close()
            raise
        return Owner(machine, capacity_bytes, quota_bytes, shared, shared.close)
    with _opening:
        store = folder.identity(f"one process of {machine}")
        if (owner := _alone.get(store)) is not None:
            with owner.lock:
                if owner.users:  # else it is being closed, and its lock still held
                    owner.users += 1
                    owner.capacity_bytes = capacity_bytes
                    return owner
        with Medium(folder.path):
            lock = folder.disk.open(folder.root, STORE_FILE)
            if not folder.disk.lock(lock, wait=False):
                folder.disk.close(lock)
                said = "is used by another process: several share a store by a map, metadata=redis://..."
                raise StorageError(f"{folder.path} {said}")
        owner = Owner(machine, capacity_bytes, quota_bytes, None, lambda: folder.disk.close(lock))
        _alone[store] = owner
        return owner


def _titles(folder: Folder, engine: Engine, extent: Extent, file_bytes: int) -> list[Title]:
    """The objects of a file, as the headers of its slots say; a get will check their bytes. OSError: none can be read;
    a single slot that cannot has no object, as in a get."""
    file, places = folder.file(extent), min(extent.places, -(-file_bytes // extent.slot_bytes))
    moves = [Move(file, place * extent.slot_bytes, (), None) for place in range(places)]
    engine.read(moves)
    failed = [it.trouble for it in moves if it.trouble is not None and it.trouble.errno != errno.ENODATA]
    if failed and len(failed) == places:
        raise failed[0]
    found = [(read_header(move.header, extent), move.offset) for move in moves]
    return [title for title, offset in found if title is not None and title.slot.offset == offset]
