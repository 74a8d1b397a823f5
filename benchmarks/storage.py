"""How near to the disk does the file store come?

    .venv/bin/python benchmarks/storage.py [--quick] [--json FILE] [--dir FOLDER]

The limits of this run: `pwrite` and `preadv` of pages into one file that has been written before, past the page cache
(direct) and through it (buffered; reads after the page cache is dropped), by one thread and by eight. The
usual way: a file for each page, written beside and renamed, one after the other, without a sync and with one of the
file and the folder. And this store: the work of its lanes, so each page's checksum is computed before it is written and
after it is read, by one of several workers while others write or read, and a put answers when it is durable.

Then lookups and opening with a million small objects, a prompt of 4,096 tokens on its way from storage to the device
(probe, reads, checks, copies), in turns with raw reads of as many bytes, and gets with and without checks, in
turns, and puts and gets of records under a storage key beside those under a checksum, in turns. Lookups while another
thread puts into a full store, so that it evicts; the memory that a hundred thousand tenants take; and durable puts of
small pages beside those of LMDB with its own sync, in turns.
Each figure is the best of several rounds, because other work on a machine only ever makes a round slower. A ratio is
the median of those of the rounds, for the disk of a virtual machine is at times three times as fast as at others; its
limit is the better of one thread and eight at the same page size.
"""

import mmap
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch

from common import arguments, machine, show, watched, write_json
from kvarve.records.record import BLOCK_BYTES, HEADER_BYTES, Stamp
from kvarve.records.seals import CHECKSUM, KEY_BYTES, Seal, Tag
from kvarve.storage import FileStorage
from kvarve.transfer.lanes import TOGETHER
from kvarve.transfer.storage_connection import FETCHES, STORES
from pretend import PROMPT_BYTES, PROMPT_TOKENS, Restore

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGES = (64 * KIB, MIB, 4 * MIB)
THREADS = (1, 8)
PUT_PAGES, GET_PAGES = TOGETHER, 16  # pages of a call
LMDB_PAGES = 32  # pages of a put beside LMDB's
HELD = 128  # names of one question
LABEL, NAMESPACE = b"bench", b"n" * 32


@dataclass(frozen=True)
class Size:
    moved_bytes: int = 256 * MIB  # by each way of writing or reading, in each round
    compared_bytes: int = GIB  # the same at the page size of the ratios: long enough for steady state
    rounds: int = 6

    objects: int = 1_000_000
    objects_in_a_call: int = 2048
    questions: int = 400
    questions_while_full: int = 20_000
    tenants: int = 100_000

    def pages(self, page_bytes: int) -> int:
        return max(2, (self.compared_bytes if page_bytes == MIB else self.moved_bytes) // page_bytes)


QUICK = Size(
    moved_bytes=16 * MIB,
    compared_bytes=16 * MIB,
    rounds=2,
    objects=20_000,
    questions=50,
    questions_while_full=500,
    tenants=2000,
)


class Records:
    """Sealed records of one page size in page-aligned memory, as the host has them."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self.page_bytes, self.count = page_bytes, count
        self._memory = mmap.mmap(-1, page_bytes * count)
        everything = memoryview(self._memory)
        self.views = [everything[at : at + page_bytes] for at in range(0, page_bytes * count, page_bytes)]
        noise = np.random.default_rng(7).integers(0, 256, page_bytes, np.uint8).data
        self.keys = [number.to_bytes(32, "little") for number in range(count)]
        for view in self.views:
            view[:] = noise
        self.seal_with(CHECKSUM)

    def seal_with(self, seal: Seal) -> None:
        self.stamp = Stamp(NAMESPACE, "kv", self.page_bytes - HEADER_BYTES, seal=seal)
        for view, key in zip(self.views, self.keys, strict=True):
            self.stamp.seal(view, key)

    def names(self, of_round: int) -> list[str]:
        return [f"0123456789abcdef-{of_round:08x}{key.hex()[:56]}.kv.0" for key in self.keys]

    def check(self, part: slice = slice(None)) -> None:
        """Checksums, as a lane makes them before a write and verifies them after a read."""
        for view, key in zip(self.views[part], self.keys[part], strict=True):
            assert self.stamp.intact(view, key), "these are not the bytes that were written"

    def blank(self) -> None:
        for view in self.views:
            view[:BLOCK_BYTES] = bytes(BLOCK_BYTES)


@dataclass(frozen=True)
class Taken:
    seconds: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Taken:
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - start, time.process_time() - cpu)


# --- the limits, and the usual way


class Raw:
    """One preallocated file, with as many pages as there are records."""

    def __init__(self, path: Path, records: Records, direct: bool, threads: int) -> None:
        self._path, self._records, self._threads = path, records, threads
        self._flags = os.O_DIRECT if direct else 0

    def write(self) -> None:
        self._each(os.O_RDWR, os.pwrite)

    def read(self) -> None:
        self._each(os.O_RDONLY, lambda file, view, at: os.preadv(file, [view], at))

    def allocate(self) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.posix_fallocate(file, 0, self._records.page_bytes * self._records.count)
        os.fsync(file)
        os.close(file)

    def _each(self, mode: int, move: Callable[[int, memoryview, int], int]) -> None:
        size, views = self._records.page_bytes, self._records.views
        file = os.open(self._path, mode | self._flags)

        def share(thread: int) -> None:
            for number in range(thread, len(views), self._threads):
                assert move(file, views[number], number * size) == size, "a short transfer"

        try:
            if self._threads == 1:
                share(0)
            else:
                with ThreadPoolExecutor(self._threads) as pool:
                    [*pool.map(share, range(self._threads))]
        finally:
            os.close(file)


def file_per_page(folder: Path, records: Records, sync: bool) -> None:
    """As it is usually done: written beside, synced or not, renamed."""
    folder_file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for number, view in enumerate(records.views):
        beside, path = folder / "page~", folder / f"{number}.page"
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            assert os.write(file, view) == len(view)
            if sync:
                os.fsync(file)
        finally:
            os.close(file)
        beside.rename(path)
        if sync:  # or the new name may be gone after a power cut
            os.fsync(folder_file)
    os.close(folder_file)


def files_read(folder: Path, records: Records) -> None:
    for number, view in enumerate(records.views):
        file = os.open(folder / f"{number}.page", os.O_RDONLY)
        try:
            assert os.preadv(file, [view], 0) == len(view)
        finally:
            os.close(file)


def forget(*paths: Path) -> None:
    """Sync these files and drop them from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDWR)
        try:
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


# --- one round of everything that moves pages


def moves(folder: Path, records: Records, of_round: int) -> Iterator[tuple[str, Taken]]:
    # Direct I/O comes first, and all of ours: dirty pages of the page cache keep the disk busy for a while.
    # Some disks are fast for a first amount of data only: the limit and the store take turns in going first.
    direct = [raw_moves(folder / "raw", records, direct=True), store_moves(folder / "store", records, of_round)]
    for each in direct if of_round % 2 else reversed(direct):
        yield from each
    yield from raw_moves(folder / "raw", records, direct=False)
    yield from file_moves(folder / "pages", records)


def raw_moves(path: Path, records: Records, direct: bool) -> Iterator[tuple[str, Taken]]:
    for threads in THREADS:
        raw, name = Raw(path, records, direct, threads), f"{'direct' if direct else 'buffered'}, {threads}"
        raw.allocate()
        raw.write()
        yield f"raw write, {name}", timed(raw.write)
        forget(path)
        yield f"raw read, {name}", timed(raw.read)
        path.unlink()


def file_moves(folder: Path, records: Records) -> Iterator[tuple[str, Taken]]:
    for sync in (True, False):
        folder.mkdir()
        records.check()
        name = f"file per page, {'synced' if sync else 'not synced'}"
        yield name, timed(lambda s=sync: file_per_page(folder, records, s))
        if not sync:
            forget(*folder.iterdir())
            yield "file per page, read", timed(lambda: files_read(folder, records))
        shutil.rmtree(folder)


class Stored:
    """A store for some records, and its pages moved by as many workers as a lane has."""

    def __init__(self, folder: Path, records: Records, names: Sequence[str]) -> None:
        self.folder, self.records, self.names = folder, records, names
        self.store = FileStorage(folder, 4 * records.page_bytes * records.count, LABEL, "benchmarks/storage.py")
        self._checking = threading.Lock()
        # The slots have been written before, as the raw files, and as those of any store that has been in use for long.
        for at in range(0, records.count, PUT_PAGES):
            part = slice(at, at + PUT_PAGES)
            assert all(self.store.put([f"x{name}" for name in names[part]], records.views[part]))
        self.store.delete([f"x{name}" for name in names])

    def put(self) -> Taken:
        def work(part: slice) -> None:
            with self._checking:
                self.records.check(part)
            assert all(self.store.put(self.names[part], self.records.views[part]))

        return timed(lambda: self._by_workers(STORES, work, PUT_PAGES))

    def get(self, *, check: bool) -> Taken:
        """All of it from the disk."""

        def work(part: slice) -> None:
            assert all(self.store.get(self.names[part], self.records.views[part]))
            if check:
                self.records.check(part)

        self.records.blank()
        forget(*self.folder.rglob("slab-??????"))  # not the tables, which opening reads
        taken = timed(lambda: self._by_workers(FETCHES, work, GET_PAGES))
        self.records.check()
        return taken

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def _by_workers(self, most: int, work: Callable[[slice], None], pages: int) -> None:
        with ThreadPoolExecutor(most) as workers:
            [*workers.map(work, (slice(at, at + pages) for at in range(0, self.records.count, pages)))]


def store_moves(folder: Path, records: Records, of_round: int) -> Iterator[tuple[str, Taken]]:
    stored = Stored(folder, records, records.names(of_round))
    yield "store put, durable", stored.put()
    yield "store get", stored.get(check=True)
    stored.close()
    yield "checksums", timed(records.check)


# --- many objects


def many(folder: Path, size: Size) -> dict[str, float]:
    """Microseconds of a question about 128 names among a million, also while the store is full and evicts, and seconds
    of opening."""
    store = FileStorage(folder, 16 * size.objects * BLOCK_BYTES, LABEL, "benchmarks/storage.py")
    names = [f"0123456789abcdef-{number:064x}.kv.0" for number in range(size.objects)]
    view = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    calls = range(0, size.objects, size.objects_in_a_call)
    for at in watched(calls, "call", len(calls)):
        some = names[at : at + size.objects_in_a_call]
        assert all(store.put(some, [view] * len(some)))
    found = [seconds for seconds, answers in asked(store, names, size.questions) if sum(answers) == HELD // 2]
    assert len(found) == size.questions
    store.close()
    opened = list[float]()
    for _ in range(3):
        start = time.perf_counter()
        store = FileStorage(folder, 16 * size.objects * BLOCK_BYTES, LABEL, "benchmarks/storage.py")
        opened.append(time.perf_counter() - start)
        assert store.usage().objects == size.objects
        store.close()
    full_s = holds_while_full(folder, names, view, size)
    return {
        "holds_128_us": 1e6 * float(np.median(found)),
        "holds_128_full_p999_us": 1e6 * float(np.quantile(full_s, 0.999)),
        "recovery_s": min(opened),
    }


def asked(store: FileStorage, names: Sequence[str], questions: int) -> Iterator[tuple[float, list[bool]]]:
    """Seconds and answers of questions about 128 names: half of them were stored, the others never."""
    dice = random.Random(7)
    for _ in range(questions):
        some = dice.sample(names, HELD // 2) + [f"absent-{dice.random()}" for _ in range(HELD // 2)]
        dice.shuffle(some)
        start = time.perf_counter()
        answers = store.exists(some)
        yield time.perf_counter() - start, answers


def holds_while_full(folder: Path, names: Sequence[str], view: memoryview, size: Size) -> list[float]:
    """Seconds of each question, while another thread stores pages for which others are evicted."""
    capacity_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    store = FileStorage(folder, capacity_bytes, LABEL, "benchmarks/storage.py")
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            new = [f"fedcba9876543210-{number + each:064x}.kv.0" for each in range(PUT_PAGES)]
            assert all(store.put(new, [view] * len(new)))
            number += len(new)

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write)
        while not store.usage().evicted and not writing.done():  # free rows are filled first
            time.sleep(0.01)
        before = store.usage().evicted
        found = list[float]()
        while not found or (store.usage().evicted == before and not writing.done()):  # a busy machine evicts later
            found += [seconds for seconds, _ in asked(store, names, size.questions_while_full)]
        ended.set()
        writing.result()
    store.close()
    return found


def tenants_mb(folder: Path, size: Size) -> float:
    """MB by which a process grows that stores one page for each of many salts, under a quota."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_store_tenants, args=(folder, size.tenants, there))
    child.start()
    there.close()
    grown: float = here.recv()
    child.join()
    return grown


def _store_tenants(folder: Path, tenants: int, told: Connection) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    view = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    store = FileStorage(folder, 16 * tenants * BLOCK_BYTES, LABEL, "benchmarks/storage.py", quota_bytes=MIB)
    everyone = tenants + PUT_PAGES
    for at in range(0, everyone, PUT_PAGES):
        names = [f"{salt:016x}-{salt:064x}.kv.0" for salt in range(at, min(everyone, at + PUT_PAGES))]
        assert all(store.put(names, [view] * len(names)))
        if not at:  # what one call takes, however many tenants there are
            before = resident_bytes()
    assert store.usage().objects == everyone
    told.send((resident_bytes() - before) / 1e6)
    store.close()


# --- LMDB


def beside_lmdb(folder: Path, size: Size, rounds: int) -> dict[str, list[float]]:
    """Seconds of durable puts of small pages by a storage's workers, and of LMDB's with its own sync, in turns; a first
    round only warms up, so that both write where they have written before."""
    import lmdb  # here, as other benchmarks use other parts of this file

    records, found = Records(64 * KIB, size.moved_bytes // (64 * KIB)), dict[str, list[float]]()
    store = FileStorage(folder / "ours", 4 * records.page_bytes * records.count, LABEL, "benchmarks/storage.py")
    (folder / "lmdb").mkdir()
    database = lmdb.open(str(folder / "lmdb"), map_size=4 * records.page_bytes * records.count)
    parts = [slice(at, at + LMDB_PAGES) for at in range(0, records.count, LMDB_PAGES)]

    def ours(names: list[str], part: slice) -> None:
        assert all(store.put(names[part], records.views[part]))

    def theirs(names: list[str], part: slice) -> None:
        with database.begin(write=True) as writing:
            for name, view in zip(names[part], records.views[part], strict=True):
                assert writing.put(name.encode(), view)

    def by_workers(put: Callable[[list[str], slice], None], names: list[str]) -> None:
        with ThreadPoolExecutor(STORES) as workers:
            [*workers.map(partial(put, names), parts)]

    ways = {"ours": ours, "lmdb": theirs}
    for number in range(rounds + 1):
        names = records.names(number)
        for way in sorted(ways, reverse=bool(number % 2)):
            seconds = timed(partial(by_workers, ways[way], names)).seconds
            if number:
                found.setdefault(way, []).append(seconds)
        store.delete(names)
        with database.begin(write=True) as writing:
            for name in names:
                writing.delete(name.encode())
    store.close()
    database.close()
    return found


# --- all of it

Figures = dict[tuple[str, int], list[Taken]]  # by what, and page size


def restored(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of the restore of a prompt, and of raw reads of as many bytes, in turns; a first round only warms up."""
    restore, records = Restore(f"file://{folder / 'restored'}?capacity=2GiB"), Records(MIB, PROMPT_BYTES // MIB)
    limits, found = [Raw(folder / "raw", records, True, threads) for threads in THREADS], dict[str, list[float]]()
    limits[0].allocate()
    limits[0].write()
    ways = {"restore": restore.round, "raw": lambda: min(timed(limit.read).seconds for limit in limits)}
    for number in range(rounds + 1):
        for name in sorted(ways, reverse=bool(number % 2)):
            seconds = ways[name]()
            if number:
                found.setdefault(name, []).append(seconds)
    restore.cache.shutdown()
    return found


def checked(folder: Path, size: Size, rounds: int) -> dict[bool, list[float]]:
    """Seconds of gets that check what they read, and of some that do not, in turns; a first round only warms up."""
    records, found = Records(MIB, size.pages(MIB)), dict[bool, list[float]]()
    stored = Stored(folder / "checked", records, records.names(0))
    stored.put()
    for number in range(rounds + 1):
        for check in (True, False) if number % 2 else (False, True):
            taken = stored.get(check=check)
            if number:
                found.setdefault(check, []).append(taken.seconds)
    stored.close()
    return found


def keyed(folder: Path, size: Size, rounds: int) -> dict[str, list[float]]:
    """Seconds of puts and gets, with their checks, under a storage key and under a checksum, in turns; a first round
    only warms up."""
    records, found = Records(MIB, size.pages(MIB)), dict[str, list[float]]()
    stored = Stored(folder / "keyed", records, records.names(0))
    seals: dict[str, Seal] = {"keyed": Tag(os.urandom(KEY_BYTES)), "plain": CHECKSUM}
    for number in range(rounds + 1):
        for way in sorted(seals, reverse=bool(number % 2)):
            records.seal_with(seals[way])
            stored.names = [f"{way[0]}{name}" for name in records.names(number)]
            for what, taken in (("put", stored.put()), ("get", stored.get(check=True))):
                if number:
                    found.setdefault(f"{way} {what}", []).append(taken.seconds)
            stored.store.delete(stored.names)
    stored.close()
    return found


def measure(size: Size, folder: Path) -> Figures:
    """Every way of moving pages in every round; a first round only warms up."""
    figures: Figures = {}
    stock = {page: Records(page, size.pages(page)) for page in PAGES}
    for number in watched(range(size.rounds + 1), "round", size.rounds + 1):
        for page, records in stock.items():
            for what, taken in moves(folder, records, number):
                if number:
                    figures.setdefault((what, page), []).append(taken)
    return figures


def ratios_of(
    figures: Figures,
    checks: dict[bool, list[float]],
    restores: dict[str, list[float]],
    objects: dict[str, float],
    keys: dict[str, list[float]],
    puts: dict[str, list[float]],
    size: Size,
) -> dict[str, float]:
    def seconds(*ways: str) -> list[float]:
        """Of each round, by the fastest of these ways."""
        rounds = zip(*(figures[way, MIB] for way in ways), strict=True)
        return [min(taken.seconds for taken in each) for each in rounds]

    def over(limits: list[float], ours: list[float]) -> float:
        return median(limit / mine for limit, mine in zip(limits, ours, strict=True))

    def speed(ours: str, *limits: str) -> float:
        return over(seconds(*limits), seconds(ours))

    return {
        "durable_put_over_raw": speed("store put, durable", *(f"raw write, direct, {threads}" for threads in THREADS)),
        "cold_get_over_raw": speed("store get", *(f"raw read, direct, {threads}" for threads in THREADS)),
        "durable_put_over_file_per_page": speed("store put, durable", "file per page, synced"),
        "put_small_over_lmdb": over(puts["lmdb"], puts["ours"]),
        "holds_128_us": objects["holds_128_us"],
        "holds_128_full_p999_us": objects["holds_128_full_p999_us"],
        "tenants_100k_mb": objects["tenants_mb"] * 100_000 / size.tenants,
        "recovery_1m_s": objects["recovery_s"] * 1e6 / size.objects,
        # The time that checking adds to reading, since one worker checks while others read.
        "checksum_share": max(0.0, 1 - over(checks[False], checks[True])),
        "restore_over_raw": over(restores["raw"], restores["restore"]),
        "keyed_over_plain": min(over(keys[f"plain {what}"], keys[f"keyed {what}"]) for what in ("put", "get")),
    }


def main() -> int:
    parser = arguments("How near to the disk does the file store come?")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where the files are written; a temporary folder")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=args.dir) as name:
        folder = Path(name)
        objects = many(folder / "many", size)
        shutil.rmtree(folder / "many")
        objects["tenants_mb"] = tenants_mb(folder / "tenants", size)
        shutil.rmtree(folder / "tenants")
        puts = beside_lmdb(folder, size, 3 * size.rounds)
        restores = restored(folder, 3 * size.rounds)
        checks = checked(folder, size, 3 * size.rounds)
        keys = keyed(folder, size, 2 * size.rounds)
        figures = measure(size, folder)
    rows = []
    for what in dict.fromkeys(what for what, _ in figures):
        row: dict[str, object] = {"what": what}
        for page in PAGES:
            moved, all_taken = page * size.pages(page), figures[what, page]
            row[f"GB/s at {page // KIB} KiB"] = moved / min(taken.seconds for taken in all_taken) / 1e9
        cpu_s = min(taken.cpu_s for taken in figures[what, MIB])
        row["CPU ms per GiB"] = 1000 * cpu_s * GIB / (MIB * size.pages(MIB))
        rows.append(row)
    ratios = ratios_of(figures, checks, restores, objects, keys, puts, size)
    moved = f"{size.moved_bytes // MIB} MiB a time, {size.compared_bytes // MIB} at 1 MiB"
    show(f"{moved}; best of {size.rounds}; CPU at 1 MiB", rows)
    restore_ms = 1000 * min(restores["restore"])
    print(f"a prompt of {PROMPT_TOKENS} tokens, {PROMPT_BYTES // MIB} MiB, from storage: {restore_ms:.1f} ms")
    print(f"{size.objects:,} objects: opened in {objects['recovery_s']:.2f} s")
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
