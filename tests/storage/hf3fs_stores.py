"""Stores on 3FS for tests: a folder, a clock that is ours, and an engine. No tests here."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from processes import PATIENCE_S

from kvarve.storage import Storage
from kvarve.storage.file.disk import Disk
from kvarve.storage.hf3fs._hf3fs_backend import Settings, open_hf3fs
from kvarve.storage.hf3fs._hf3fs_storage import Hf3fsStorage
from kvarve.storage.hf3fs._owner import Owner
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES, Slot, file_name, hash_of
from kvarve.storage.hf3fs._slot_table import Entry, SlotTable
from kvarve.testing.suite import LABEL, Damage
from kvarve.testing.suite_use import OBJECT_BYTES


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = time.monotonic() + 1000.0

    def __call__(self) -> float:
        return self.now


SLOT_BYTES = 8192  # of an object of up to 4,096 bytes
CAPACITY_BYTES = 64 << 20
RESERVED, STORED, RESTING = "reserved", "stored", "resting"


class Stores:
    """Opens storages in folders below one, and closes them. `library`: of USRBIO; None: the POSIX engine."""

    def __init__(self, folder: Path, library: Any = None) -> None:
        self.folder, self.library = folder, library
        self.clock = Clock()
        self.opened: list[tuple[str, Hf3fsStorage]] = []

    def owner(self, place: str = "here") -> Owner:
        """What this process has of a place."""
        return next(it._owner for its, it in reversed(self.opened) if its == place)

    def stop_the_clock(self) -> None:
        """From now on the time is ours."""
        self.owner().clock = self.clock

    def open(
        self,
        *,
        label: bytes = LABEL,
        description: str = "model A",
        capacity_bytes: int = CAPACITY_BYTES,
        place: str = "here",
        disk: Disk | None = None,
        **more: Any,
    ) -> Hf3fsStorage:
        given = {"quota_bytes": None, "engine": "posix", "threads": 4, "metadata": None}
        settings = Settings(self.folder / place, capacity_bytes, **(given | more))
        self.opened.append((place, open_hf3fs(settings, label, self.library, disk)))
        return self.opened[-1][1]

    def slots(self, place: str = "here") -> Counter[str]:
        """How many slots are reserved, have an object, and rest."""
        table = self.owner(place).table
        resting = sum(
            1 if isinstance(it, Entry) else len(it.unused)
            for until, it in table._resting
            if until > self.owner(place).clock()
        )
        stored = sum(entry.live for file in table.files.values() for entry in file.slots.values())
        reserved = sum(file.held for file in table.files.values())
        return +Counter({STORED: stored, RESERVED: reserved, RESTING: resting})

    def where(self, name: str, place: str = "here", label: bytes = LABEL) -> Slot:
        """The slot of an object."""
        ((slot, *_),) = self.owner(place).places(hash_of(label), [name])
        return slot

    def path(self, name: str, place: str = "here") -> Path:
        """The file that has an object."""
        return self.folder / place / file_name(self.where(name, place).extent)

    def write(self, name: str, at: int, data: bytes, *, label: bytes = LABEL, place: str = "here") -> None:
        """Write into the slot of an object."""
        slot = self.where(name, place, label)
        with (self.folder / place / file_name(slot.extent)).open("r+b") as file:
            file.seek(slot.offset + at)
            file.write(data)

    def close(self) -> None:
        for _, storage in self.opened:
            storage.close()

    def die(self, *which: Hf3fsStorage) -> None:
        """As if the process of these (or all) were killed: nothing is written down, and its locks are free."""
        for place, storage in [each for each in self.opened if not which or each[1] in which]:
            self.opened.remove((place, storage))
            storage._closed = storage._released = True
            storage._rest.set()
            storage._housekeeper.ended(PATIENCE_S)
            storage._folder.close()
            storage._engine.close()
            if storage._owner.users:
                storage._owner.users = 0
                storage._owner._end()


@contextmanager
def calling(storage: Hf3fsStorage) -> Iterator[None]:
    """As while one of its calls holds what it shares with the others."""
    with storage._lock:
        yield


def descriptors(folder: Path) -> list[Path]:
    """What this process has open below a folder."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(each.readlink())
    return [path for path in found if path.is_relative_to(folder)]


@contextmanager
def stores_in(folder: Path, library: Any = None) -> Iterator[Stores]:
    stores = Stores(folder, library)
    try:
        yield stores
    finally:
        stores.close()


def in_slots(stores: Stores) -> dict[str, Damage]:
    """What may befall an object in its slot."""

    def written(at: int, data: bytes) -> Damage:
        def damage(storage: Storage, name: str) -> None:
            (place,) = [place for place, opened in stores.opened if opened is storage]
            stores.write(name, at, data, place=place)

        return damage

    return {
        "a flipped bit": written(BLOCK_BYTES + 100, b"\xfe"),
        "a flipped bit of its header": written(40, b"\xfe"),
        "zeros": written(0, bytes(BLOCK_BYTES + OBJECT_BYTES)),
    }


def check_slots(table: SlotTable) -> None:
    """No slot is lost: each is free, at rest, or has an object."""
    slots = {entry for file in table.files.values() for entry in file.slots.values()}
    live = {entry for entry in slots if entry.live}
    free = [entry for size in table._sizes.values() for entry in size.free if entry in slots]
    resting = [entry for _, entry in table._resting if entry in slots]
    assert len(live) + len(free) + len(resting) == len(slots) == len(live.union(free, resting))
    fresh = {*(file for size in table._sizes.values() for file in size.fresh), *(it for _, it in table._resting)}
    for file in table.files.values():
        assert len(file.slots) + len(file.unused) == file.extent.places and (file in fresh or not file.unused)
    assert not any(file.held for file in table.files.values())


def keep(storage: Hf3fsStorage) -> None:
    """Look after the house now."""
    with storage._owner._keeping:  # not while its own thread does
        pass
    storage._owner.keep(storage._folder, storage._engine)
