"""Whatever happens to a disk, no wrong page is read, confirmed pages are there, and the store continues.

The records are real ones, and the reader verifies their checksums, as the transfer engine does: a torn page may be read
as long as its own checksum reveals it.
"""

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from file_disks import table_path, total

import forks
from kvarve.memory.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Directory, Disk
from kvarve.storage.file.table import ENTRY_BYTES, Shape
from kvarve.testing.faulty_disk import Died, FaultyDisk
from kvarve.testing.suite import LABEL, OTHER_LABEL

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


def intact_anew(folder: Path, some: Sequence[Page], capacity: int = 1 << 20) -> set[Page]:
    """The pages that are there after the store has been opened anew."""
    storage = opened(folder, capacity=capacity)
    found = intact(storage, some)
    storage.close()
    return found


def die(storage: FileStorage) -> None:
    """The kernel closes all its files."""
    storage._folder.abandon()
    for slab in storage._index.slabs.values():
        slab.close()
    storage._open = False


class Quick(Disk):
    """After the cut nothing has to survive another one, so data may stay in the page cache."""

    def open(self, folder: Directory, name: str, *, direct: bool = False, **how: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(folder, name, **how)

    def allocate(self, file: int, size_bytes: int) -> None:
        os.ftruncate(file, max(size_bytes, self.size(file)))

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, folder: Directory) -> None:
        pass

    def space(self, folder: Directory) -> tuple[int, int]:
        return 1 << 50, 1 << 50


def goes_on(storage: FileStorage, folder: Path, capacity: int = CAPACITY) -> None:
    """It stores and reads new pages, within its capacity."""
    fresh = pages("full", 9001, 9002) + pages("window", 9003)
    assert store(storage, fresh) == [True] * 3
    assert intact(storage, fresh) == set(fresh)
    assert total(folder) <= capacity
    assert storage._index.states()["broken"] == 0


def opened(folder: Path, disk: Disk | None = None, label: bytes = LABEL, capacity: int = CAPACITY) -> FileStorage:
    return FileStorage(folder, capacity, label, "model A", threads=1, disk=disk or Quick())


# --- a workload, and the pages that have to be there after each of its calls


@dataclass
class History:
    """A workload's marks: after this many events of the disk, these pages were there and confirmed."""

    disk: FaultyDisk
    known: list[Page] = field(default_factory=list)
    marks: list[tuple[int, frozenset[Page]]] = field(default_factory=lambda: [(0, frozenset())])

    def mark(self, storage: FileStorage) -> None:
        there = storage.exists([page.name for page in self.known])
        kept = frozenset(page for page, found in zip(self.known, there, strict=True) if found)
        self.marks.append((len(self.disk.events), kept))

    def put(self, storage: FileStorage, some: list[Page]) -> None:
        self.known += [page for page in some if page not in self.known]
        assert all(store(storage, some))
        self.mark(storage)

    def expected(self, count: int) -> frozenset[Page]:
        """Pages confirmed before event `count`, and not deleted or evicted by a call that may have begun by then."""
        before = [kept for events, kept in self.marks if events <= count][-1]
        after = [kept for events, kept in self.marks if events >= count]
        return before & after[0] if after else before


def run_workload(root: Path) -> History:
    """Pages of three sizes, read, deleted, evicted; opened twice; another model is opened and closed."""
    history = History(FaultyDisk(root))
    disk = history.disk
    other = opened(root, disk, OTHER_LABEL)
    store(other, pages("full", 500, 501))
    other.close()
    storage = opened(root, disk)
    for turn in range(4):
        history.put(storage, pages("full", *range(turn * 3, turn * 3 + 3)) + pages("window", turn))
        intact(storage, pages("full", 0, turn * 3))
        history.mark(storage)
    storage.delete([page.name for page in pages("full", 1, 4)])
    history.mark(storage)
    history.put(storage, pages("state", 0))
    history.put(storage, pages("full", 1, 0, 20) + pages("window", 0))  # one of them anew, two that are there
    storage.close()
    history.mark(storage := opened(root, disk))
    for turn in range(7):
        history.put(storage, pages("state", turn + 1) + pages("full", *range(30 + turn * 4, 34 + turn * 4)))
    storage.close()
    return history


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    root = tmp_path_factory.mktemp("workload")
    history = run_workload(root)
    kinds = {event.kind for event in history.disk.events}
    assert kinds >= {"create", "allocate", "write", "sync", "rename", "unlink", "make_folder", "sync_folder"}
    assert len(history.marks[-1][1]) < len(history.known)  # some had to be evicted
    return history


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A fresh folder each time; the previous one is removed."""
    count = 0

    def fresh() -> Path:
        nonlocal count
        shutil.rmtree(tmp_path / str(count), ignore_errors=True)
        count += 1
        return tmp_path / str(count)

    yield fresh
    shutil.rmtree(tmp_path / str(count), ignore_errors=True)


FATES = [("killed", 0), ("dropped", 0), ("torn", 0), ("torn", 1)]


@pytest.mark.parametrize(("fate", "seed"), FATES, ids=str)
def test_after_a_cut_at_any_event_what_was_confirmed_is_there_and_nothing_is_wrong(
    history: History, scratch: Callable[[], Path], fate: str, seed: int
) -> None:
    """The power is cut at every event, with another outcome at each: all outcomes at all events take minutes."""
    expected_in_all = missing_in_all = 0
    points = range(FATES.index((fate, seed)), len(history.disk.events) + 1, len(FATES))
    for count in points:
        folder = scratch()
        history.disk.after(count, folder, fate, seed)
        storage = opened(folder)
        assert total(folder) <= CAPACITY
        slabs = storage._folder.model.path.glob("slab-??????")
        assert all(table_path(path).exists() for path in slabs), "slots without a table"
        assert storage._index.states()["reserved"] == 0
        expected = history.expected(count)
        found = intact(storage, history.known)
        expected_in_all += len(expected)
        missing = expected - found
        missing_in_all += len(missing)
        assert len(missing) <= len(expected) / 100, f"cut before event {count}, {fate}, seed {seed}: {missing} are gone"
        goes_on(storage, folder)
        storage.close()
    assert len(points) > 100
    print(f"{len(points)} points, {expected_in_all} pages expected, {missing_in_all} missing")


def test_a_process_that_dies_at_any_event_leaves_the_others_a_store_that_works(scratch: Callable[[], Path]) -> None:
    base, mine = pages("full", *range(8)) + pages("window", 0, 1), pages("full", 20, 21, 22) + pages("state", 5)
    died = True
    count = 0
    while died:
        folder = scratch()
        survivor = opened(folder)
        assert all(store(survivor, base))
        there = survivor.exists([page.name for page in base])
        disk = FaultyDisk(folder)
        disk.dies_at = count
        died, confirmed = False, []
        try:
            dying = opened(folder, disk)
            for turn in range(2):
                some = [Page(page.number + 100 * turn, page.pool) for page in mine]
                confirmed += [page for page, done in zip(some, store(dying, some), strict=True) if done]
                intact(dying, base[:2])
                dying.delete([base[3].name])
            dying.close()
        except Died:
            died = True
        assert all(there)
        kept = intact(survivor, [page for page in base if page != base[3]])
        assert len(kept) >= len(base) - 1 - survivor_lost(survivor, base)
        assert intact(survivor, confirmed) == {page for page in confirmed if survivor.exists([page.name]) == [True]}
        for turn in range(6):
            assert store(survivor, pages("full", *range(300 + turn * 6, 306 + turn * 6))) == [True] * 6
        goes_on(survivor, folder)
        survivor.close()
        storage = opened(folder)
        assert storage._index.states()["reserved"] == 0
        assert intact(storage, pages("full", 335, 334)) == set(pages("full", 335, 334))
        storage.close()
        count += 1
    assert count > 40


def survivor_lost(storage: FileStorage, some: Sequence[Page]) -> int:
    """How many were evicted to store the pages of the process that died."""
    return storage.exists([page.name for page in some if page != some[3]]).count(False)


# --- damage to stored files


@dataclass(frozen=True)
class Slot:
    """Where a page lies."""

    page: Page
    path: Path
    shape: Shape
    row: int

    @property
    def table(self) -> Path:
        return table_path(self.path)


def filled(folder: Path) -> list[Slot]:
    storage = opened(folder)
    some = pages("full", *range(12)) + pages("window", *range(6)) + pages("state", *range(3))
    assert all(store(storage, some))
    slots = []
    for page in some:
        slab, row = storage._index.place(page.name)
        slots.append(Slot(page, slab.path.relative_to(folder), slab.shape, row))
    storage.close()
    return slots


def hit_by(slots: Sequence[Slot], path: Path, at: int) -> set[Page]:
    """The pages that a change of this byte may harm: of a slot, an entry, or with a table's header a whole slab."""
    return {
        slot.page
        for slot in slots
        if (path == slot.path and 0 <= at - slot.shape.slot_at(slot.row) < slot.shape.slot_bytes)
        or (path == slot.table and (at < ENTRY_BYTES or 0 <= at - slot.shape.entry_at(slot.row) < ENTRY_BYTES))
    }


def exchange(one: Path, at: int, other: Path, there: int, size: int) -> None:
    first, second = one.read_bytes()[at : at + size], other.read_bytes()[there : there + size]
    for path, place, data in ((one, at, second), (other, there, first)):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(data)


def harm(folder: Path, slots: Sequence[Slot], rng: random.Random) -> set[Page]:
    """A random damage; returns the pages that it may have hit."""
    kinds = ["flip", "flip in a table", "swap pages", "swap entries", "truncate", "truncate a table", "zeros"]
    kind = rng.choice([*kinds, "small files"])
    one, other = rng.sample(list(slots), 2)
    name = one.table if kind.endswith("table") else one.path
    path = folder / name
    if kind.startswith("flip"):
        at = rng.randrange(path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        return hit_by(slots, name, at)
    if kind == "swap pages":
        size = min(one.shape.slot_bytes, other.shape.slot_bytes)
        exchange(path, one.shape.slot_at(one.row), folder / other.path, other.shape.slot_at(other.row), size)
        return {one.page, other.page}
    if kind == "swap entries":
        places = one.shape.entry_at(one.row), other.shape.entry_at(other.row)
        exchange(folder / one.table, places[0], folder / other.table, places[1], ENTRY_BYTES)
        return {one.page, other.page}
    if kind.startswith("truncate"):
        size = rng.randrange(path.stat().st_size)
        os.truncate(path, size)
        return {
            slot.page
            for slot in slots
            if slot.path == one.path
            and (name == slot.table or slot.shape.slot_at(slot.row) + slot.shape.slot_bytes > size)
        }
    if kind == "zeros":
        at, end = one.shape.slot_at(one.row), one.shape.slot_at(one.row) + one.shape.slot_bytes
        data = bytearray(path.read_bytes())
        data[at:end] = bytes(end - at)
        path.write_bytes(data)
        return {one.page}
    small = rng.choice([path.with_name("changes"), path.with_name("clock")])
    small.write_bytes(rng.randbytes(rng.randrange(300)))
    return set()


def test_damage_to_the_files_costs_what_it_hits_and_nothing_else(tmp_path: Path, scratch: Callable[[], Path]) -> None:
    source = tmp_path / "source"
    slots = filled(source)
    everybody = [slot.page for slot in slots]
    for seed in range(100):
        rng = random.Random(seed)
        folder = scratch()
        shutil.copytree(source, folder)
        hit = set().union(*(harm(folder, slots, rng) for _ in range(rng.randint(1, 2))))
        storage = opened(folder)
        missing = set(everybody) - intact(storage, everybody) - hit
        assert not missing, f"seed {seed}: {missing} are gone, hit were {hit}"
        goes_on(storage, folder)
        storage.close()


def test_pages_that_another_model_left_under_the_same_names_are_not_accepted(tmp_path: Path) -> None:
    slots = filled(tmp_path / "a")
    other = opened(tmp_path / "b", label=OTHER_LABEL)
    store(other, pages("full", 0))
    other.close()
    (target,) = (tmp_path / "b" / "models").iterdir()
    for path in (slots[0].path, slots[0].table):
        shutil.copy(tmp_path / "a" / path, target / path.name)
    other = opened(tmp_path / "b", label=OTHER_LABEL)
    assert not any(other.exists([slot.page.name for slot in slots]))
    goes_on(other, tmp_path / "b")
    other.close()


# --- real processes

CHILD = """
import random, sys
sys.path[:0] = sys.argv[1].split(":")
from test_crashes import *
folder, first, seed, rounds = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
rng = random.Random(seed)
storage = FileStorage(folder, CAPACITY, LABEL, "model A", disk=Quick())
recent = []
print("open", flush=True)
for turn in range(rounds):
    pools = [rng.choice(["full", "full", "window", "state"]) for _ in range(rng.randint(1, 4))]
    some = [Page(first + turn * 4 + i, pool) for i, pool in enumerate(pools)]
    for page, done in zip(some, store(storage, some)):
        if done:
            print(page.number, page.pool, flush=True)
    recent = (recent + some)[-12:]
    intact(storage, rng.sample(recent, min(3, len(recent))))
    if turn % 7 == 3:
        storage.delete([rng.choice(recent).name])
storage.close()
print("closed", flush=True)
"""


def child(folder: Path, first: int, seed: int, rounds: int) -> "subprocess.Popen[str]":
    folders = ":".join(str(Path(__file__).parents[up]) for up in (0, 1))
    arguments = [folders, str(folder), str(first), str(seed), str(rounds)]
    return forks.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)


def test_processes_that_are_killed_while_they_put_leave_no_wrong_page_and_no_lost_room(tmp_path: Path) -> None:
    seed = 434
    rng = random.Random(seed)
    folder = tmp_path / "store"
    storage = opened(folder)
    for life in range(8):
        with child(folder, life * 10_000, seed + life, 5000) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            confirmed = []
            for _ in range(rng.randint(1, 60)):
                number, pool = process.stdout.readline().split()
                confirmed.append(Page(int(number), pool))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        intact(storage, confirmed)  # asserts that no wrong page is accepted
        goes_on(storage, folder)
        storage.delete([page.name for page in pages("full", 9001, 9002) + pages("window", 9003)])
        if life % 3 == 2:
            storage.close()
            storage = opened(folder)
    states = storage._index.states()
    assert states["retired"] == 0
    storage.close()


def test_two_processes_put_get_and_evict_on_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    processes = [child(folder, first, seed=first, rounds=150) for first in (0, 100_000)]
    said = [process.communicate(timeout=200)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(lines[-1] == "closed" for lines in said)
    confirmed = [Page(int(line.split()[0]), line.split()[1]) for lines in said for line in lines[1:-1]]
    storage = opened(folder)
    found = intact(storage, confirmed)
    assert found == {page for page in confirmed if storage.exists([page.name]) == [True]}
    assert len(found) == storage.usage().objects > 5
    assert (storage.usage().damaged, storage.usage().lost) == (0, 0)
    goes_on(storage, folder)
    storage.close()
