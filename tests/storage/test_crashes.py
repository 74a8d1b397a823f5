"""Whatever happens to a disk, no wrong page is read, confirmed pages are there, and the store continues.

The records are real ones, and the reader verifies their checksums, as the transfer engine does: a torn page may be read
as long as its own checksum reveals it.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import inspect_files
import pytest
from file_disks import model_of, table_path, total
from file_pages import CAPACITY, Page, goes_on, intact, names, opened, pages, store

import forks
from kvarve.storage import FileStorage
from kvarve.testing.suite import OTHER_LABEL
from tests.sim.faulty_disk import Died, FaultyDisk

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


@pytest.mark.parametrize("every", [31, pytest.param(4, marks=pytest.mark.long)])
def test_after_a_cut_at_any_event_what_was_confirmed_is_there_and_nothing_is_wrong(history, scratch, every):
    """The power is cut at every event, with another outcome at each: all outcomes at all events take minutes."""
    expected_in_all = missing_in_all = 0
    for begin, (fate, seed) in enumerate([("killed", 0), ("dropped", 0), ("torn", 0), ("torn", 1)]):
        for count in range(begin, len(history.disk.events) + 1, every):
            folder = scratch()
            history.disk.after(count, folder, fate, seed)
            storage = opened(folder)
            assert total(folder) <= CAPACITY
            assert all(table_path(path).exists() for path in model_of(folder).glob("slab-??????")), "without a table"
            assert inspect_files.rows(storage)["reserved"] == 0
            expected = history.expected(count)
            missing = expected - intact(storage, history.known)
            assert len(missing) <= len(expected) / 100, f"cut before event {count}, {fate}, seed {seed}: {missing}"
            goes_on(storage, folder)
            storage.close()
            expected_in_all, missing_in_all = expected_in_all + len(expected), missing_in_all + len(missing)
    print(f"{expected_in_all} pages expected, {missing_in_all} missing")


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.long)])
def test_a_process_that_dies_at_any_event_leaves_the_others_a_store_that_works(scratch, every):
    """Also while it makes or removes a slab: what it leaves is room for the others."""
    base, mine = pages("full", *range(16)) + pages("window", 0, 1), pages("full", 20, 21, 22) + pages("state", 5, 6)
    died, count = True, 0
    while died:
        folder = scratch()
        survivor = opened(folder)
        assert all(store(survivor, base))
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
        evicted = survivor.exists(names([page for page in base if page != base[3]])).count(False)
        assert len(intact(survivor, base)) >= len(base) - 1 - evicted
        assert intact(survivor, confirmed) == {page for page in confirmed if survivor.exists([page.name]) == [True]}
        for turn in range(3):
            inspect_files.retry(survivor)
            assert store(survivor, pages("full", *range(300 + turn * 12, 312 + turn * 12))) == [True] * 12
        goes_on(survivor, folder)
        known = sum(shape.bytes for shape in inspect_files.slabs(survivor).values())
        assert known == sum(path.stat().st_size for path in folder.rglob("slab-*")), f"dies at its event {count}"
        survivor.close()
        storage = opened(folder)
        assert inspect_files.rows(storage)["reserved"] == 0
        assert intact(storage, pages("full", 335, 334)) == {*pages("full", 335, 334)}
        storage.close()
        count += every
    assert count > 40


# --- real processes

CHILD = """
import random, sys
sys.path[:0] = sys.argv[1].split(":")
from file_pages import *
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


def test_processes_that_put_get_and_evict_and_are_killed_leave_no_wrong_page_and_no_lost_room(tmp_path):
    seed, folder = 434, tmp_path / "store"
    storage = opened(folder)
    beside = child(folder, 100_000, seed=1, rounds=25)
    assert beside.stdout is not None
    with child(folder, 0, seed, 5000) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        lines = [process.stdout.readline() for _ in range(8)]
        process.kill()
    intact(storage, [Page(int(line.split()[0]), line.split()[1]) for line in lines])  # no wrong page is accepted
    _, *lines, last = beside.communicate(timeout=200)[0].splitlines()
    assert (beside.returncode, last) == (0, "closed")
    confirmed = [Page(int(line.split()[0]), line.split()[1]) for line in lines]
    found = intact(storage, confirmed)
    assert found == {page for page in confirmed if storage.exists([page.name]) == [True]}
    assert (storage.usage().damaged, storage.usage().lost, inspect_files.rows(storage)["retired"]) == (0, 0, 0)
    goes_on(storage, folder)
    storage.close()
