"""Every awkward behaviour of USRBIO, and of the calls of a file system, with every kind of pool: no wrong byte, no slot
that is lost for good, no engine that does not go on."""

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hf3fs_pages import Pages
from hf3fs_stores import RESERVED, RESTING, STORED, Stores, stores_in

from kvarve.errors import StorageError
from kvarve.storage import Breaker
from kvarve.storage.file.disk import Disk
from kvarve.storage.hf3fs._hf3fs_storage import Hf3fsStorage
from tests.sim.usrbio import Emulator, Fate, Operation

LONG_S = 60.0
in_place_and_copied = pytest.mark.parametrize(
    "shared", [pytest.param(True, id="in place"), pytest.param(False, id="copied", marks=pytest.mark.long)]
)
fates = pytest.mark.parametrize(
    "fate", [it for it in Fate if it not in (Fate.LATE, Fate.LOST)], ids=lambda fate: fate.name
)
TORN = (Fate.SHORT, Fate.HOLE_MIDDLE, Fate.HOLE_END, Fate.ZEROS)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Emulator]:
    daemon = Emulator(tmp_path, seed=7)
    yield daemon
    assert not daemon.misuse
    assert not daemon.files, "every descriptor was unregistered"


@pytest.fixture
def stores(tmp_path: Path, daemon: Emulator) -> Iterator[Stores]:
    with stores_in(tmp_path, daemon) as stores:
        yield stores


def some(fate: Fate, seed: int, *, read: bool) -> Callable[[Operation], Fate]:
    """About a third of the operations of one direction end so."""
    dice = random.Random(seed)
    return lambda operation: fate if operation.read == read and dice.random() < 0.3 else Fate.DONE


def opened(stores: Stores, pages: Pages) -> Hf3fsStorage:
    storage = stores.open()
    for arena in pages.arenas:
        storage.register(arena.region)
    stores.stop_the_clock()
    return storage


def all_is_well(stores: Stores, storage: Hf3fsStorage, pages: Pages) -> None:
    """Every page can be written and read; when the quarantine is over, every slot is an object's or free."""
    stores.clock.now += 1000.0
    pages.restore()
    assert storage.put(pages.names, pages.sources) == [True] * len(pages.names)
    pages.blank()
    assert pages.right(storage.get(pages.names, pages.targets)) == len(pages.names)
    assert stores.slots() == {STORED: len(pages.names)}
    assert storage.usage().objects == len(pages.names)


@in_place_and_copied
@fates
def test_writes_that_go_wrong_cost_pages_and_never_a_byte(
    stores: Stores, daemon: Emulator, fate: Fate, shared: bool
) -> None:
    pages = Pages(shared=shared)
    storage = opened(stores, pages)
    daemon.behave = some(fate, 7, read=False)
    stored = sum(storage.put(pages.names, pages.sources))
    assert stored == len(pages.names) if fate in (Fate.DONE, Fate.ZEROS) else 0 < stored < len(pages.names)
    assert stores.slots()[RESTING] == storage.counts["unwritten"] == len(pages.names) - stored
    assert stores.slots()[RESERVED] == 0
    daemon.behave = lambda _: Fate.DONE
    pages.scribble()
    found = pages.right(storage.get(pages.names, pages.targets))
    assert found == len(pages.names) if fate is Fate.DONE else found < len(pages.names)
    assert found == stored - storage.counts["torn"]
    all_is_well(stores, storage, pages)


@in_place_and_copied
@fates
def test_reads_that_go_wrong_are_misses(stores: Stores, daemon: Emulator, fate: Fate, shared: bool) -> None:
    pages = Pages(shared=shared)
    storage = opened(stores, pages)
    assert all(storage.put(pages.names, pages.sources))
    daemon.behave = some(fate, 7, read=True)
    found = pages.right(storage.get(pages.names, pages.targets))
    assert found == len(pages.names) if fate is Fate.DONE else 0 < found < len(pages.names)
    daemon.behave = lambda _: Fate.DONE
    pages.blank()
    # What the medium says that it does not have is forgotten; an error may pass.
    again = pages.right(storage.get(pages.names, pages.targets))
    assert again == (found if fate in TORN else len(pages.names))
    assert storage.counts["torn"] == (len(pages.names) - found if fate in TORN else 0)
    all_is_well(stores, storage, pages)


class BadDisk(Disk):
    """Its reads and writes of slots fail as `behave` says: by an errno, by half of the bytes, or by "zeros"."""

    def __init__(self) -> None:
        self.behave: Callable[[str], int | str | None] = lambda _: None
        self.bad = ""  # the name of a file that cannot be read

    def read(self, file: int, into: Sequence[memoryview], at: int) -> int:
        self._fail(errno.EIO if self.bad and Path(f"/proc/self/fd/{file}").readlink().name == self.bad else None)
        how = self.behave("read")
        if how == "zeros":
            for view in into:
                view[:] = bytes(view.nbytes)
            return sum(view.nbytes for view in into)
        if how == "half":
            return super().read(file, [into[0][: into[0].nbytes // 2]], at) and 0
        self._fail(how)
        return super().read(file, into, at)

    def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
        how = self.behave("write")
        if how == "zeros":
            return sum(map(len, data))
        if how == "half":
            super().write(file, [data[0]], at)
            return 0
        self._fail(how)
        return super().write(file, data, at)

    def sync(self, file: int) -> None:
        self._fail(self.behave("sync"))
        super().sync(file)

    def _fail(self, how: int | str | None) -> None:
        if isinstance(how, int):
            raise OSError(how, errno.errorcode[how])


def third(which: str, how: int | str) -> Callable[[str], int | str | None]:
    dice = random.Random(11)
    return lambda call: how if call == which and dice.random() < 0.3 else None


@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC, "half", "zeros"])
@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_calls_of_the_file_system_that_fail_cost_pages_and_never_a_byte(
    tmp_path: Path, call: str, how: int | str
) -> None:
    pages, disk = Pages(shared=False), BadDisk()
    with stores_in(tmp_path) as stores:
        storage = stores.open(disk=disk)
        stores.stop_the_clock()
        if call == "read":
            assert all(storage.put(pages.names, pages.sources))
        disk.behave = third(call, how)
        with suppress(StorageError):
            told = storage.put(pages.names, pages.sources)
            assert all(told) or storage.counts["no space" if how == errno.ENOSPC else "unwritten"]
        assert stores.slots()[RESERVED] == 0
        assert pages.right(storage.get(pages.names, pages.targets)) <= len(pages.names)
        disk.behave = lambda _: None
        pages.blank()
        pages.right(storage.get(pages.names, pages.targets))
        all_is_well(stores, storage, pages)


@pytest.mark.parametrize("engine", ["posix", "usrbio"])
def test_an_object_that_cannot_be_read_is_missing_alone_and_is_no_trouble_while_the_store_can_be_read(
    tmp_path: Path, engine: str
) -> None:
    disk, daemon = BadDisk(), Emulator(tmp_path)
    names, data = [f"page-{i}" for i in range(4)], [memoryview(bytes([i]) * 5000) for i in range(4)]
    with stores_in(tmp_path, daemon if engine == "usrbio" else None) as stores:
        storage = Breaker(stores.open(disk=disk), deadline_s=LONG_S)
        assert storage.put(names, data) == [True] * 4
        bad = disk.bad = stores.path("page-2").name  # each has a file of its own
        daemon.behave = lambda it: Fate.EIO if it.read and it.file.path.name == bad else Fate.DONE
        buffers = [memoryview(bytearray(5000)) for _ in names]
        for _ in range(5):
            assert storage.get(["page-2"], buffers[2:3]) == [None]
        assert storage.get(names, buffers) == [5000, 5000, None, 5000]
        assert [buffers[i] == data[i] for i in (0, 1, 3)] == [True] * 3
        assert storage.inner.counts == {"unreadable": 6} and storage.up
        disk.behave = lambda call: errno.EIO if call == "read" else None
        daemon.behave = lambda it: Fate.EIO if it.read else Fate.DONE
        assert storage.get(names, buffers) == [None] * 4
        disk.bad, disk.behave, daemon.behave = "", lambda _: None, lambda _: Fate.DONE
        assert storage.get(names, buffers) == [5000] * 4, "an error may pass"
    assert not daemon.misuse


@pytest.mark.parametrize("engine", ["posix", "usrbio"])
def test_an_object_is_stored_when_its_sync_has_succeeded_and_not_when_its_write_has(
    tmp_path: Path, engine: str
) -> None:
    disk, daemon = BadDisk(), Emulator(tmp_path)
    with stores_in(tmp_path, daemon if engine == "usrbio" else None) as stores:
        storage = stores.open(disk=disk)
        disk.behave, daemon.syncs_fail = lambda call: errno.EIO if call == "sync" else None, True
        with pytest.raises(StorageError, match="stored 0 of 1"):
            storage.put(["page"], [memoryview(b"1")])
        assert storage.exists(["page"]) == [False]
