"""Stores on 3FS for tests: a folder, metadata in this process whose clock is ours, and an engine. No tests here."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hf3fs_laws import entries

from kvarve.storage import Storage
from kvarve.storage.file.disk import Disk
from kvarve.storage.hf3fs.hf3fs_backend import Settings, open_hf3fs
from kvarve.storage.hf3fs.hf3fs_storage import Hf3fsStorage
from kvarve.storage.hf3fs.metadata.entries import Entry
from kvarve.storage.hf3fs.metadata.memory_metadata import named_table
from kvarve.storage.hf3fs.slot_layout import BLOCK_BYTES, file_name, offset, owner_of
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
_numbers = itertools.count()


class Stores:
    """Opens storages in folders below one, each folder with metadata of its own, and closes them."""

    def __init__(self, folder: Path, library: Any = None) -> None:
        self.folder, self.library, self._number = folder, library, next(_numbers)
        self.clock = Clock()
        self.opened: list[tuple[str, Hf3fsStorage]] = []

    def name(self, place: str = "here") -> str:
        return f"{self._number}-{place}"

    def table(self, place: str = "here") -> Any:
        """What the metadata of a place decides by, and its lock and clock."""
        return named_table(self.name(place), CAPACITY_BYTES, None)

    def stop_the_clock(self) -> None:
        """From now on the metadata's time is ours."""
        self.table().clock = self.clock

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
        given = {"quota_bytes": None, "engine": "posix", "threads": 4, "metadata": f"memory:{self.name(place)}"}
        settings = Settings(self.folder / place, capacity_bytes, **(given | more))
        self.opened.append((place, open_hf3fs(settings, label, self.library, disk)))
        return self.opened[-1][1]

    def entries(self, place: str = "here") -> list[Entry]:
        return entries(self.table(place).table)

    def slots(self, place: str = "here") -> Counter[int]:
        """How many slots are reserved, committed and in quarantine."""
        return Counter(entry.state for entry in self.entries(place))

    def write(self, name: str, at: int, data: bytes, *, label: bytes = LABEL, place: str = "here") -> None:
        """Write into the slot of an object."""
        (slot,) = [it.slot for it in self.entries(place) if (it.home.label, it.name) == (owner_of(label), name)]
        with (self.folder / place / file_name(slot.extent)).open("r+b") as file:
            file.seek(offset(slot) + at)
            file.write(data)

    def close(self) -> None:
        for _, storage in self.opened:
            storage.close()


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
    """`library`: of USRBIO; None: the POSIX engine."""
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
