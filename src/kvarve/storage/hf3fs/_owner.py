"""What one process has of a store: the files that are its own, the objects in them, and the map that says where all
others are (docs/decisions/0020-metadata-of-3fs.md).

A process that is alone has no map but the table of its files, which are all there are; its storages share it. Of
several, each holds leases in the map for owners, whose names are in those of its files. A process takes over the files
of an owner whose lease nobody holds: of this machine soon, of another one after `ORPHAN_S`.
"""

import hashlib
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvarve.errors import StorageError
from kvarve.storage.base import StorageUsage, in_group
from kvarve.storage.file.folder import Medium
from kvarve.storage.hf3fs._hf3fs_folder import Folder
from kvarve.storage.hf3fs._io_engine import Engine, Move, Short
from kvarve.storage.hf3fs._redis_map import LEASE_S, Placed, RedisMap
from kvarve.storage.hf3fs._slot_layout import Extent, Slot, Title, read_header
from kvarve.storage.hf3fs._slot_table import EXTENT_BYTES, Entry, SlotTable

log = logging.getLogger(__name__)

ORPHAN_S = 600.0
_MOST_USES = 1 << 16  # that are told at once
_HEADERS = 256  # that are read at once


class Owner:
    """`end()` is called once, when the last storage is closed. Used by several threads."""

    def __init__(
        self,
        capacity_bytes: int,
        quota_bytes: int | None,
        map_: RedisMap | None,
        machine: str,
        end: Callable[[], object],
    ) -> None:
        self._machine = int.from_bytes(hashlib.sha256(machine.encode()).digest()[:4], "big")
        self.map, self.users, self._end, self._quota_bytes = map_, 1, end, quota_bytes
        self.table = SlotTable(capacity_bytes, quota_bytes, shared=map_ is not None)
        start = time.time() - time.monotonic()
        self.clock: Callable[[], float] = lambda: start + time.monotonic()  # which is never set back
        self.ready = threading.Event()  # set when what was there has been looked through once
        self.lock = threading.Lock()  # guards the table, and what others are to be told of
        self._used: defaultdict[int, list[Slot]] = defaultdict(list)
        self._keeping = threading.Lock()  # held while a storage keeps house; guards all below
        self.ids: set[int] = set()
        self._renewed = self.clock()
        self._published = True  # whether the map knows all that we have
        self._holders: dict[int, bytes] = {}  # of owners that are not ours
        self._free_since: dict[int, float] = {}
        self._orders: dict[int, dict[int, int] | None] = {}

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

    def find(self, label: bytes, names: Sequence[str]) -> tuple[list[Slot | None], list[Entry]]:
        """Where each object is, which is a use; and what `let_go` takes when it has been read."""
        slots = [some[0] if some else None for some in self.places(label, names)]
        with self.lock:
            mine = self._use(slot for slot in slots if slot is not None)
            self.table.pin(mine)
        return slots, mine

    def let_go(self, entries: Iterable[Entry]) -> None:
        with self.lock:
            self.table.unpin(entries, self.clock())

    def remove(self, label: bytes, objects: Sequence[tuple[str, Slot]]) -> list[Entry]:
        """The slots have their objects no more. Returns ours, whose slots may be given again after `let_go`.
        StorageError: ours are as they were."""
        placed = [(label, *each) for each in objects]
        if self.map is not None:
            self.map.change(withdraw=placed, gone=[it for it in placed if it[2].extent.owner not in self.ids])
        with self.lock:
            return self._remove(placed)

    def wipe(self, folder: Folder, engine: Engine, removed: Sequence[Entry]) -> None:
        """Write over the headers of slots, else their objects would be found again, and let go of them. Where that
        fails, they may be."""
        try:
            moves = []
            for entry in removed:
                with suppress(OSError):
                    moves.append(Move(folder.file(entry.file.extent), entry.slot.offset, (), None))
            if moves:
                engine.write(moves)
        finally:
            self.let_go(removed)

    def usage(self, label: bytes) -> StorageUsage:
        """Of several processes none counts what others have."""
        with self.lock:
            table, objects = self.table, self.table.objects.get(label, ())
            known, size_bytes = (len(objects), table.bytes[label]) if self.map is None else (None, None)
            return StorageUsage(known, size_bytes, table.capacity_bytes, table.evictions[label])

    # --- writing

    def reserve(
        self, folder: Folder, engine: Engine, label: bytes, names: Sequence[str], slot_bytes: Sequence[int]
    ) -> list[Entry | bool]:
        """A slot for each object; True where it is there already (a use), False where there is no room."""
        told = self.places(label, names)
        if not self.ids or self.clock() - self._renewed > LEASE_S / 2:  # this process has stood still
            with self._keeping:
                self._renew()
        with self.lock:
            now = self.clock()
            # What is ours and not in the map was deleted there, or lost.
            lost = [it for it, slots in zip(self.table.find(label, names), told, strict=True) if it and not slots]
            lost = self._remove((label, it.name, it.slot) for it in lost)
            kept = self._use(slots[0] for slots in told if slots)
            self.table.pin(kept)
            answers: list[Entry | bool] = [bool(slots) for slots in told]
            for at, name in enumerate(names):
                answers[at] = answers[at] or self.table.reserve(label, name, slot_bytes[at], now) or False
            self.table.unpin(kept, now)
        try:
            self.wipe(folder, engine, lost)
            self._take_out(folder)
        except BaseException:
            self.abort([entry for entry in answers if isinstance(entry, Entry)])
            raise
        return answers

    def commit(self, label: bytes, names: Sequence[str], written: Sequence[Entry]) -> list[bool]:
        """Which of the names are there, now that these slots have their objects."""
        with self.lock:
            now = self.clock()
            for entry in written:
                self.table.commit(entry, now)
            found = self.table.find(label, names)
            self.table.use([entry for entry in found if entry is not None], now)
            placed = [(label, entry.name, entry.slot) for entry in written if entry.live]
        self._publish(placed)
        return [entry is not None for entry in found]

    def abort(self, entries: Iterable[Entry]) -> None:
        """These were not written, or their writes may still come."""
        with self.lock:
            for entry in entries:
                self.table.abort(entry, self.clock())

    # --- keeping house

    def keep(self, folder: Folder, engine: Engine) -> None:
        """Hold what is ours, take over what nobody holds, tell and hear what was used, and keep to the capacity."""
        if not self._keeping.acquire(blocking=False):
            return
        try:
            with Medium(folder.path):
                listed = folder.forget_removed()
                self._claim(folder, listed)
                self._renew()
                self._balance(listed)  # before headers are read, which takes long, and others store
                self._adopt(folder, engine, listed)
            self._hear(folder, engine)
            self._balance(listed)
            self._take_out(folder)
            if not self._published:
                self._published = True
                with self.lock:
                    every = [entry for objects in self.table.objects.values() for entry in objects.values()]
                    placed = [(entry.label, entry.name, entry.slot) for entry in every]
                self._publish(placed)
        finally:
            self._keeping.release()

    def close(self, folder: Folder, *, clean: bool) -> None:
        """`clean`: no call hangs that may still write."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
        with suppress(StorageError), self._keeping, Medium(folder.path):
            ids = [*self.ids]
            if self.map is not None:
                ids = [it for it, holder in zip(ids, self.map.holders(ids), strict=True) if holder == self.map.token]
            # Of files that were not read the order would say that they have nothing.
            unread = {it.owner for it in folder.extents() if it.number not in self.table.known} if clean else {*ids}
            for owner in {*ids} - unread:
                with self.lock:
                    order = self.table.order(owner, self.clock())
                if order is not None:
                    folder.save_order(owner, order)
            if self.map is not None:
                self.map.let_go(ids)
        self._end()

    def _claim(self, folder: Folder, listed: Iterable[Extent]) -> None:
        """Take over owners whom nobody holds."""
        unknown = sorted({extent.owner for extent in listed} - self.ids)
        holders = self.map.holders(unknown) if self.map else [None] * len(unknown)
        self._holders = {owner: it for owner, it in zip(unknown, holders, strict=True) if it}
        now = self.clock()
        self._free_since = {owner: self._free_since.get(owner, now) for owner in unknown if owner not in self._holders}
        for owner, since in self._free_since.items():
            wait_s = ORPHAN_S if owner >> 32 != self._machine else LEASE_S if self.ready.is_set() else 0.0
            if self.map is None or (now - since >= wait_s and self.map.take(owner)):
                self.ids.add(owner)
                places = sum(extent.places for extent in listed if extent.owner == owner)
                self._orders[owner] = folder.order(owner, places)

    def _renew(self) -> None:
        """Say that we hold what is ours. What another process holds meanwhile is its own."""
        now = self.clock()
        if self.map is not None:
            for owner, held_by in zip(ids := [*self.ids], self.map.holders(ids), strict=True):
                holder = held_by
                if holder is None:  # the map may have lost everything
                    self._published = False
                    holder = self.map.token if self.map.take(owner) else self.map.holders([owner])[0]
                if holder is None:
                    raise StorageError("the Redis of this store neither gives a lease nor says whose it is")
                if holder != self.map.token:
                    log.warning("3FS: the files of owner %x are another process's now", owner)
                    with self.lock:
                        self.ids.discard(owner)
                        self.table.forget(owner, now)
            self.map.go_on([*self.ids])
        here = [owner for owner in self.ids if owner >> 32 == self._machine]  # which this machine takes over soonest
        if not here:
            here = [self._machine << 32 | secrets.randbits(32)]
            if self.map is not None and not self.map.take(here[0]):
                raise StorageError("the Redis of this store takes no more entries")
            self.ids.add(here[0])
        self.table.owner = min(here)
        self._renewed = now

    def _adopt(self, folder: Folder, engine: Engine, listed: dict[Extent, int]) -> None:
        """Files that are ours by now, with the objects that their headers name."""
        found, table = 0, self.table
        try:
            for extent, file_bytes in listed.items():
                if extent.owner in self.ids and extent.number not in table.known:
                    with suppress(OSError):  # which may pass
                        titles = _titles(folder, engine, extent, file_bytes)
                        with self.lock:
                            found += table.adopt(extent, titles, self._orders.get(extent.owner), self.clock())
                            table.others_bytes -= extent.bytes
                    if self.clock() - self._renewed > LEASE_S / 4:
                        self._renew()
        finally:
            with self.lock:
                table.known &= {extent.number for extent in listed} | {*table.files}
                if found:
                    table.in_order()
            unread = {extent.owner for extent in listed if extent.number not in table.known}
            self._orders = {owner: order for owner, order in self._orders.items() if owner in unread}
            if found:
                log.info("%s: %d objects were found again", folder.path, found)
                self._published = False

    def _hear(self, folder: Folder, engine: Engine) -> None:
        """What others have used of this process, and found to be wrong; and tell them the same."""
        if self.map is None:
            return
        for gone in self.map.news("gone", [*self.ids]):
            with self.lock:
                mine = self._remove(gone)
            self.wipe(folder, engine, mine)
        with self.lock:
            told, self._used = self._used, defaultdict(list)
        self.map.tell_used(told)
        for used in self.map.news("used", [*self.ids]):
            with self.lock:
                self._use(slot for _, _, slot in used)

    def _balance(self, listed: Iterable[Extent]) -> None:
        """Keep to the capacity, of which every process may have its part: one that has less may have a file more than
        there is room for, and whoever has most gives one back."""
        with self.lock:
            table, others = self.table, Counter[object]()
            for extent in listed:
                if extent.number not in table.known:
                    others[self._holders.get(extent.owner, extent.owner)] += extent.bytes
            processes = 1 + len({*self._holders.values()})
            spare = table.capacity_bytes - others.total() - table.own_bytes
            if spare < 0 and table.own_bytes >= max(others.values(), default=0):
                table.shrink(-spare, self.clock())
                spare = table.capacity_bytes - others.total() - table.own_bytes
            poor = table.capacity_bytes // processes - table.own_bytes if processes > 1 and spare >= 0 else 0
            table.others_bytes = others.total() - max(0, min(poor, EXTENT_BYTES) - spare)
            table.quota_bytes = self._quota_bytes and self._quota_bytes // processes

    def _take_out(self, folder: Folder) -> None:
        """Tell the map what has left, and remove the files that have. What fails is done by the next call."""
        table = self.table
        with self.lock:
            evicted, retired, table.evicted, table.retired = table.evicted, table.retired, [], []
        try:
            if self.map is not None:
                self.map.change(withdraw=[(entry.label, entry.name, entry.slot) for entry in evicted])
            evicted = []
            with Medium(folder.path):
                while retired:
                    folder.remove(retired[-1])
                    retired.pop()
        finally:
            with self.lock:
                table.evicted += evicted
                table.retired += retired

    def _publish(self, placed: Sequence[Placed]) -> None:
        """Tell the map where these objects are."""
        if self.map is not None:
            try:
                self.map.change(publish=placed)
            except StorageError:
                self._published = False
                raise

    # --- inside, under the lock

    def _use(self, slots: Iterable[Slot]) -> list[Entry]:
        """Ours of these, whose objects are used now. The owners of others are told."""
        mine = []
        for slot in slots:
            if entry := self.table.at(slot):
                mine.append(entry)
            elif slot.extent.owner in self._holders and len(uses := self._used[slot.extent.owner]) < _MOST_USES:
                uses.append(slot)
        self.table.use(mine, self.clock())
        return mine

    def _remove(self, placed: Iterable[Placed]) -> list[Entry]:
        """Ours of these, pinned, and without an object. A slot that has another object keeps it."""
        found = ((self.table.at(slot), label, name) for label, name, slot in placed)
        mine = [*dict.fromkeys(it for it, *title in found if it and [it.label, it.name] == title)]
        self.table.pin(mine)
        for entry in mine:
            self.table.remove(entry, self.clock())
        return mine


def _titles(folder: Folder, engine: Engine, extent: Extent, file_bytes: int) -> list[Title]:
    """The objects of a file, as the headers of its slots say; a get will check their bytes. OSError: none can be read;
    a single slot that cannot has no object, as in a get."""
    file, titles, failed = folder.file(extent), list[Title](), list[OSError]()
    places = range(min(extent.places, -(-file_bytes // extent.slot_bytes)))
    for at in range(0, len(places), _HEADERS):
        moves = [Move(file, place * extent.slot_bytes, (), None) for place in places[at : at + _HEADERS]]
        engine.read(moves)
        failed += [it.trouble for it in moves if it.trouble is not None and not isinstance(it.trouble, Short)]
        for move in moves:
            title = read_header(move.header, extent)
            if title is not None and title.slot.offset == move.offset:
                titles.append(title)
    if failed and len(failed) == len(places):
        raise failed[0]
    return titles
