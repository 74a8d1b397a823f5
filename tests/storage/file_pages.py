"""Real records of pages in a file store, verified when read as the transfer engine does. No tests here."""

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from file_disks import total
from inspect_files import Steps, rows

from disks import WithoutSync
from kvarve.records.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Directory, Disk
from kvarve.testing.suite import LABEL

CAPACITY = 240 << 10
NAMESPACE = bytes(32)
PAYLOADS = {"full": 3000, "window": 7000, "state": 20_000}
STAMPS = {pool: Stamp(NAMESPACE, pool, payload) for pool, payload in PAYLOADS.items()}


@dataclass(frozen=True)
class Page:
    number: int
    pool: str

    @property
    def key(self) -> bytes:
        return hashlib.sha256(f"{self.number} {self.pool}".encode()).digest()

    @property
    def name(self) -> str:
        return f"{'0123456789abcdef'}-{self.key.hex()}.{self.pool}.0"

    def record(self) -> memoryview:
        record = memoryview(bytearray(record_bytes(PAYLOADS[self.pool])))
        payload = hashlib.shake_256(self.key).digest(PAYLOADS[self.pool])
        record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        STAMPS[self.pool].seal(record, self.key)
        return record


def pages(pool: str, *numbers: int) -> list[Page]:
    return [Page(number, pool) for number in numbers]


def store(storage: FileStorage, some: Sequence[Page]) -> list[bool]:
    return storage.put([page.name for page in some], [page.record() for page in some])


def intact(storage: FileStorage, some: Sequence[Page]) -> set[Page]:
    """The pages that are read and accepted; their bytes have to be their own."""
    records = [memoryview(bytearray(record_bytes(PAYLOADS[page.pool]))) for page in some]
    sizes = storage.get([page.name for page in some], records)
    found = set()
    for page, record, size in zip(some, records, sizes, strict=True):
        if size == len(record) and STAMPS[page.pool].intact(record, page.key):
            assert record == page.record(), f"{page}: another page's bytes were accepted"
            found.add(page)
        elif size is not None:
            storage.delete([page.name])
    return found


def names(some: Sequence[Page]) -> list[str]:
    return [page.name for page in some]


def filling(storage: FileStorage, some: Sequence[Page]) -> Steps:
    return Steps(storage, {page.name: page.record() for page in some})


def intact_anew(folder: Path, some: Sequence[Page], capacity: int = 1 << 20) -> set[Page]:
    """The pages that are there after the store has been opened anew."""
    storage = opened(folder, capacity=capacity)
    found = intact(storage, some)
    storage.close()
    return found


class Quick(WithoutSync):
    """After the cut nothing has to survive another one, so data may stay in the page cache."""

    def open(self, folder: Directory, name: str, *, direct: bool = False, **how: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(folder, name, **how)

    def allocate(self, file: int, size_bytes: int) -> None:
        os.ftruncate(file, max(size_bytes, self.size(file)))


def opened(folder: Path, disk: Disk | None = None, label: bytes = LABEL, capacity: int = CAPACITY) -> FileStorage:
    return FileStorage(folder, capacity, label, "model A", threads=1, disk=disk or Quick())


def goes_on(storage: FileStorage, folder: Path, capacity: int = CAPACITY) -> None:
    """It stores and reads new pages, within its capacity."""
    fresh = pages("full", 9001, 9002) + pages("window", 9003)
    assert store(storage, fresh) == [True] * 3
    assert intact(storage, fresh) == set(fresh)
    assert total(folder) <= capacity
    assert rows(storage)["broken"] == 0
