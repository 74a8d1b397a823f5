"""Chunks of an engine's host memory in a storage: which are there, and which are on their way. Knows no engine.

An engine with a host tier of its own has rows of equal size in one piece of memory. It calls from one thread, its
scheduler's, which never waits here: `lookup` answers from memory or LATER, `store` and `load` send jobs, and `ended`
tells which have ended. Calls to the storage are made by the lanes' threads, in batches.

A record is a block with the header, then the row (`memory.record`). A store writes both from where they are. A load
reads into memory of its own and copies a row only after the record has passed its check. So nothing but a copy in
memory ever writes into a row, under a lock that is shared with the deadline: a read that hangs cannot write into a row
that the engine has given to another chunk. A store that hangs may read such a row; its header has the check of the
bytes that it was to write, so what it stored is noticed, and deleted when the call returns.
"""

import hashlib
import json
import logging
import mmap
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import inf

import numpy as np
import numpy.typing as npt

from kvarve.core.copies.effects import Ended, Refusal
from kvarve.core.copies.in_flight import FETCH, PROBE, STORE
from kvarve.errors import ConfigError, StorageError
from kvarve.memory.record import BLOCK_BYTES, HEADER_BYTES, KEY_BYTES, Stamp
from kvarve.memory.seals import CHECKSUM, Seal
from kvarve.pages.keys import object_name
from kvarve.storage import Breaker, StorageUsage, Tiers
from kvarve.transfer.lanes import TOGETHER, Ends, Outcome
from kvarve.transfer.storage_connection import StorageConnection, refusal

log = logging.getLogger(__name__)

GROUP_BYTES = 4  # of a key, at its end: the number of the KV cache group
_READ_BYTES = 16 << 20  # of one call, unless a single record is larger
_HOUSEKEEPING_S = 10.0
_KNOWN_MOST = 1 << 17  # chunks known to be in storage
_FAILED_MOST = 1 << 16
_STORING_SHARE = 4  # at most one row in four waits for its store, unless a single job has more
_LEAD = bytes(BLOCK_BYTES - HEADER_BYTES)  # of the payload, so that the row begins at a block


class Found(Enum):
    """Whether a chunk is in storage. LATER: it has been asked; ask again."""

    THERE = "there"
    ABSENT = "absent"
    LATER = "later"


@dataclass(frozen=True)
class JobEnded:
    """A job that has ended, and which of its chunks are in place. `seconds` since it was sent."""

    job: int
    storing: bool
    good: tuple[bytes, ...]
    bad: tuple[bytes, ...]
    seconds: float


@dataclass(eq=False)
class _Job:
    number: int
    storing: bool
    keys: tuple[bytes, ...]
    sent: float
    epoch: bytes  # of the names of its chunks
    batches: int = 0  # that have not ended
    good: set[bytes] = field(default_factory=set)


@dataclass(eq=False)
class _Batch:
    """A part of a job: what one call to the storage moves. Its worker and the deadline share the lock."""

    op: int
    job: _Job
    keys: Sequence[bytes]
    rows: Sequence[int]
    sent: float
    began: float = inf
    good: int = 0  # chunks (bits) that are in place
    abandoned: bool = False  # its job has ended without it: nothing may be written into its rows any more
    reasons: Counter[str] = field(default_factory=Counter)  # why the others are not
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begins(self, now: float) -> bool:
        with self.lock:
            self.began = now
            return not self.abandoned

    def ends(self, good: int, reasons: Counter[str]) -> bool:
        """False: it has been abandoned before."""
        with self.lock:
            if not self.abandoned:
                self.good, self.reasons = good, reasons
            return not self.abandoned

    def abandon(self) -> None:
        with self.lock:
            self.abandoned = True
            self.reasons = Counter(late=len(self.keys) - self.good.bit_count())


@dataclass(frozen=True)
class _Question:
    keys: Sequence[bytes]
    sent: float


def namespace_of(identity: Mapping[str, object]) -> bytes:
    """32 bytes that differ whenever any field of an engine's identity differs. ConfigError: one is not plain data."""
    try:
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the identity of a model is made of plain values: {error}") from None
    return hashlib.sha256(b"kvarve-chunks/1" + text.encode()).digest()


class ChunkStore:
    """The chunks of one namespace in `storage`, which it owns, and `rows` [rows, bytes] of the engine's memory.

    A key is a hash of all tokens up to the chunk's end, then four bytes: the KV cache group. A call that takes longer
    than `deadline_s`, or waits so long without progress of any, is given up: its chunks are misses.

    ConfigError: rows that a record cannot hold. StorageError: the system starts no more threads.
    """

    def __init__(
        self,
        storage: Breaker | Tiers,
        rows: npt.NDArray[np.uint8],
        namespace: bytes,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        seal: Seal = CHECKSUM,
    ) -> None:
        if rows.ndim != 2 or not rows.shape[1] or rows.shape[1] % BLOCK_BYTES or rows.strides[1] != 1:
            raise ConfigError(f"rows are of whole blocks of {BLOCK_BYTES} bytes, not {rows.shape} by {rows.strides}")
        self.counts: Counter[str] = Counter()  # chunks, by what became of them
        self.usage: StorageUsage | None = None  # as the storage last answered
        self._storage, self._namespace, self._seal = storage, namespace, seal
        self._rows: npt.NDArray[np.uint8] | None = rows
        self._row_bytes = rows.shape[1]
        self._record_bytes = BLOCK_BYTES + self._row_bytes
        self._loaded_together = max(1, _READ_BYTES // self._record_bytes)
        self._storing_most = max(1, len(rows) // _STORING_SHARE)
        self._deadline_s, self._clock = deadline_s, clock
        self._stamps: dict[int, tuple[Stamp, bytes]] = {}  # and the root of its names, by group
        self._checking = threading.Lock()  # one worker seals at a time, so that the first one's write starts early
        self._here = threading.local()
        # Everything below belongs to the engine's thread.
        self._there: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = b""  # in the names of chunks, since all were forgotten
        self._failed: OrderedDict[bytes, None] = OrderedDict()  # misses until they are stored anew
        self._asked: dict[bytes, bool] = {}  # waiting for an answer (True), or known to be absent while anyone needs it
        self._askers: dict[bytes, set[str]] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._unsent: list[bytes] = []
        self._touched: dict[bytes, None] = {}
        self._housekept = -inf
        self._housekeeping: int | None = None
        self._questions: dict[int, _Question] = {}
        self._batches: dict[int, _Batch] = {}
        self._jobs: dict[int, _Job] = {}
        self._progress = {True: -inf, False: -inf}  # when a batch last ended, by whether it stores
        self._storing = 0  # rows that wait for their store
        self._done: list[JobEnded] = []
        self._op = 0
        self._ends = Ends()
        self._connection = StorageConnection(storage, self._ends, deadline_s=deadline_s, clock=clock)

    # --- is it there?

    def lookup(self, key: bytes, asker: str) -> Found:
        """Whether a chunk is in storage. What an asker has been told stays so until it is forgotten, or a job has
        failed or succeeded since."""
        if key in self._failed or not self._storage.up:
            return Found.ABSENT
        if key in self._there:
            self._there.move_to_end(key)
            return Found.THERE
        waits = self._asked.get(key)
        if waits is None:
            waits = self._asked[key] = True
            self._unsent.append(key)
        self._askers.setdefault(key, set()).add(asker)
        self._asked_by.setdefault(asker, set()).add(key)
        return Found.LATER if waits else Found.ABSENT

    def forget(self, asker: str) -> None:
        """An asker is gone, and with the last one of a chunk the knowledge that the chunk is absent."""
        for key in self._asked_by.pop(asker, ()):
            askers = self._askers[key]
            askers.discard(asker)
            if not askers:
                del self._askers[key]
                if self._asked.get(key) is False:
                    del self._asked[key]

    def touch(self, keys: Collection[bytes]) -> None:
        """These chunks are in use, though not read from storage."""
        if len(self._touched) < _KNOWN_MOST:
            self._touched.update((key, None) for key in keys if key in self._there)

    def flush(self) -> None:
        """Send what has been asked since the last call, as one question; and from time to time, what is in use."""
        now = self._clock()
        if self._unsent:
            keys, self._unsent = self._unsent, []
            op, epoch = self._next_op(), self._epoch
            self._questions[op] = _Question(keys, now)
            self._connection.lanes[PROBE].send(op, lambda: self._ask(keys, epoch), self._deadline_s)
        if now - self._housekept >= _HOUSEKEEPING_S and self._housekeeping is None and self._storage.up:
            touched, self._touched, self._housekept = [*self._touched], {}, now
            op, epoch = self._next_op(), self._epoch
            self._housekeeping = op
            self._connection.lanes[PROBE].send(op, lambda: self._keep_house(touched, epoch), self._deadline_s)

    # --- jobs

    def store(self, job: int, keys: Collection[bytes], rows: Sequence[int]) -> None:
        """Store chunks from these rows, which stay as they are until the job has ended."""
        sent = _Job(job, True, tuple(keys), self._clock(), self._epoch)
        missing = [(key, row) for key, row in zip(sent.keys, rows, strict=True) if key not in self._there]
        sent.good.update(key for key in sent.keys if key in self._there)
        self.counts["store: there already"] += len(sent.good)
        up = self._storage.up
        room = max(0, self._storing_most - self._storing) if self._storing else len(missing)
        room = min(room, len(missing)) if up else 0
        self.counts["store: behind" if up else "store: down"] += len(missing) - room
        self._start(sent, missing[:room], TOGETHER)

    def load(self, job: int, keys: Collection[bytes], rows: Sequence[int]) -> None:
        """Load chunks into these rows, which the engine leaves alone until the job has ended."""
        sent = _Job(job, False, tuple(keys), self._clock(), self._epoch)
        wanted = [*zip(sent.keys, rows, strict=True)]
        if not self._storage.up:
            self.counts["load: down"] += len(wanted)
            wanted = []
        self._start(sent, wanted, self._loaded_together)

    def ended(self) -> list[JobEnded]:
        """The jobs that have ended since the last call. Also sees to deadlines: call it in every step."""
        self._collect()
        done, self._done = self._done, []
        return done

    def name(self, key: bytes) -> str:
        """The name of a chunk's object in the storage."""
        return self._named(key, self._epoch)[2]

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has ended, or a deadline may have passed; False after `timeout_s`."""
        return self._ends.wait(max(0.0, min(timeout_s, self._left_s())))

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when all jobs have ended, at the latest after the deadline: then the rest is given up."""
        end = self._clock() + (self._deadline_s if timeout_s is None else timeout_s)
        while self._jobs:
            self._collect()
            left_s = end - self._clock()
            if left_s <= 0:
                self._give_up([*self._batches.values()])
            elif self._jobs:
                self.wait(min(left_s, 0.1))

    def forget_all(self, epoch: bytes) -> None:
        """Name chunks anew from now on, with this `epoch`: none that is stored by now is found any more. Loads under
        way fail; stores keep the names that they began with."""
        self._epoch = epoch
        self._give_up([batch for batch in self._batches.values() if not batch.job.storing])
        for known in (self._there, self._failed, self._touched, self._questions):
            known.clear()
        self._unsent = [key for key, waits in self._asked.items() if waits]

    def close(self, timeout_s: float = 5.0) -> None:
        """Let jobs end within `timeout_s`, then close the storage. Nothing touches the rows afterwards, except a write
        that hangs, which may still read them."""
        if self._rows is None:
            return
        self.drain(min(timeout_s, self._deadline_s))
        self._rows = None
        try:
            self._connection.close(0.1 if not self._storage.up else timeout_s, timeout_s)
        except StorageError as error:
            log.warning("the storage could not be closed: %s", error)

    # --- inside, on the engine's thread

    def _next_op(self) -> int:
        self._op += 1
        return self._op

    def _start(self, job: _Job, chunks: Sequence[tuple[bytes, int]], together: int) -> None:
        self._jobs[job.number] = job
        self._storing += len(job.keys) if job.storing else 0
        batches = []
        for at in range(0, len(chunks), together):
            part = chunks[at : at + together]
            batch = _Batch(self._next_op(), job, [key for key, _ in part], [row for _, row in part], job.sent)
            batches.append(batch)
            self._batches[batch.op] = batch
        job.batches = len(batches)
        for batch in batches:
            if job.storing:  # a put is durable when it returns, so a few large ones are cheaper
                self._connection.lanes[STORE].send_part(batch.op, self._put, batch, len(batch.keys), inf)
            else:
                self._connection.lanes[FETCH].send(batch.op, partial(self._get, batch), inf)
        if not batches:
            self._finish(job)

    def _collect(self) -> None:
        for event in self._ends.collect():
            if not isinstance(event, Ended):
                continue
            if event.op == self._housekeeping:
                self._housekeeping = None
            elif event.op in self._questions:
                self._answer(event.op, event.good)
            elif event.op in self._batches:
                self._end(self._batches[event.op])
        now = self._clock()
        self._give_up([batch for batch in self._batches.values() if now > self._late_at(batch)])
        for op in [op for op, asked in self._questions.items() if now > asked.sent + self._deadline_s]:
            self._answer(op, 0)

    def _late_at(self, batch: _Batch) -> float:
        """When a batch is given up: it hangs, or it waits behind others of which none has ended for so long."""
        since = batch.began if batch.began < inf else max(batch.sent, self._progress[batch.job.storing])
        return since + self._deadline_s

    def _left_s(self) -> float:
        late = [self._late_at(batch) for batch in self._batches.values()]
        late += [asked.sent + self._deadline_s for asked in self._questions.values()]
        return min(late, default=inf) - self._clock()

    def _answer(self, op: int, good: int) -> None:
        for i, key in enumerate(self._questions.pop(op).keys):
            if key not in self._asked:  # stored meanwhile
                continue
            if good >> i & 1:
                self._know(key)
            elif key in self._askers:
                self._asked[key] = False
            else:
                del self._asked[key]

    def _know(self, key: bytes) -> None:
        """A chunk is in storage."""
        self._there[key] = None
        self._there.move_to_end(key)
        if len(self._there) > _KNOWN_MOST:
            self._there.popitem(last=False)
        self._failed.pop(key, None)
        self._asked.pop(key, None)

    def _fail(self, key: bytes) -> None:
        """A chunk could not be loaded: else the engine would ask for it again, and again."""
        self._there.pop(key, None)
        self._failed[key] = None
        self._failed.move_to_end(key)
        if len(self._failed) > _FAILED_MOST:
            self._failed.popitem(last=False)

    def _give_up(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            batch.abandon()
            self._end(batch, progress=False)

    def _end(self, batch: _Batch, *, progress: bool = True) -> None:
        del self._batches[batch.op]
        job = batch.job
        if progress:
            self._progress[job.storing] = self._clock()
        job.good.update(key for i, key in enumerate(batch.keys) if batch.good >> i & 1)
        bad = len(batch.keys) - batch.good.bit_count()
        for why, count in (
            *batch.reasons.items(),
            ("error", bad - batch.reasons.total()),
            ("done", len(batch.keys) - bad),
        ):
            self.counts[f"{'store' if job.storing else 'load'}: {why}"] += count
        job.batches -= 1
        if not job.batches:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._storing -= len(job.keys) if job.storing else 0
        bad = tuple(key for key in job.keys if key not in job.good)
        if job.storing:
            for key in job.good if job.epoch == self._epoch else ():
                self._know(key)
        else:
            for key in bad:
                self._fail(key)
        good = tuple(key for key in job.keys if key in job.good)
        self._done.append(JobEnded(job.number, job.storing, good, bad, self._clock() - job.sent))

    # --- on the lanes' threads

    def _named(self, key: bytes, epoch: bytes) -> tuple[Stamp, bytes, str]:
        """A chunk's stamp, the key in its record, and the name of its object."""
        group, digest = int.from_bytes(key[-GROUP_BYTES:], "big"), key[:-GROUP_BYTES]
        digest = digest if len(digest) == KEY_BYTES and not epoch else hashlib.sha256(epoch + digest).digest()
        pool = f"group{group}"
        known = self._stamps.get(group)
        if known is None:
            stamp = Stamp(self._namespace, pool, len(_LEAD) + self._row_bytes, seal=self._seal)
            known = self._stamps[group] = (stamp, hashlib.sha256(self._namespace + pool.encode()).digest())
        stamp, root = known
        return stamp, digest, object_name(root, digest, pool)

    def _ask(self, keys: Sequence[bytes], epoch: bytes) -> tuple[int, int]:
        there = self._storage.exists([self._named(key, epoch)[2] for key in keys])
        return sum(found << i for i, found in enumerate(there)), 0

    def _keep_house(self, touched: Sequence[bytes], epoch: bytes) -> tuple[int, int]:
        self._storage.touch([self._named(key, epoch)[2] for key in touched])
        self.usage = self._storage.usage()
        return 0, 0

    def _put(self, batches: Sequence[_Batch]) -> list[Outcome]:
        begun = [batch for batch in batches if batch.begins(self._clock())]
        names, pieces = list[str](), list[tuple[memoryview, memoryview]]()
        rows = self._rows
        if rows is not None and begun:
            with self._checking:
                headers = memoryview(mmap.mmap(-1, sum(len(batch.keys) for batch in begun) * BLOCK_BYTES))
                for batch in begun:
                    for key, row in zip(batch.keys, batch.rows, strict=True):
                        stamp, digest, name = self._named(key, batch.job.epoch)
                        header, data = headers[:BLOCK_BYTES], memoryview(rows[row])
                        header[:HEADER_BYTES] = stamp.sealed(digest, _LEAD, data)
                        names.append(name)
                        pieces.append((header, data))
                        headers = headers[BLOCK_BYTES:]
            answers = self._storage.put_pieces(names, pieces)
            read_only = not all(answers) and refusal(self._storage) is Refusal.READ_ONLY
            stored = iter(answers)
            doubtful = list[str]()
            for batch in begun:
                good = sum(next(stored) << i for i in range(len(batch.keys)))
                reasons = Counter({"read only" if read_only else "no space": len(batch.keys) - good.bit_count()})
                if not batch.ends(good, reasons):  # its rows may have got other bytes before they were written
                    doubtful += [self._named(key, batch.job.epoch)[2] for key in batch.keys]
            self._delete(doubtful)
        return [(0, 0) for _ in batches]

    def _get(self, batch: _Batch) -> tuple[int, int]:
        rows = self._rows
        if not batch.begins(self._clock()) or rows is None:
            return 0, 0
        named = [self._named(key, batch.job.epoch) for key in batch.keys]
        records = self._bounce(len(batch.keys))
        sizes = self._storage.get([name for _, _, name in named], records)
        good, reasons, corrupt = 0, Counter[str](), list[str]()
        for i, ((stamp, digest, name), record, size) in enumerate(zip(named, records, sizes, strict=True)):
            if size is None:
                reasons["missing"] += 1
            elif size != len(record) or not stamp.intact(record, digest):
                reasons["corrupt"] += 1
                corrupt.append(name)
            else:
                payload = np.frombuffer(record, np.uint8)[BLOCK_BYTES:]
                with batch.lock:  # the engine may use the row for another chunk once the batch is abandoned
                    if batch.abandoned:
                        break
                    np.copyto(rows[batch.rows[i]], payload)
                    good |= 1 << i
                    batch.good = good
        batch.ends(good, reasons)
        self._delete(corrupt)  # so that the chunk is stored anew
        return 0, 0

    def _bounce(self, count: int) -> list[memoryview]:
        """This thread's own memory for records, aligned for direct I/O."""
        memory: memoryview | None = getattr(self._here, "bounce", None)
        if memory is None or memory.nbytes < count * self._record_bytes:
            memory = self._here.bounce = memoryview(mmap.mmap(-1, self._loaded_together * self._record_bytes))
        return [memory[at * self._record_bytes : (at + 1) * self._record_bytes] for at in range(count)]

    def _delete(self, names: Sequence[str]) -> None:
        if names:
            try:
                self._storage.delete(names)
            except StorageError as error:
                log.warning("%d damaged chunks could not be deleted: %s", len(names), error)
