"""Chunks of an engine's host memory in a storage: which are there, and which are on their way. Knows no engine.

An engine with a host tier of its own has rows of equal size in one piece of memory. It calls from one thread, its
scheduler's, which never waits here: `lookup` answers from memory or LATER, `store` and `load` send jobs, and `ended`
tells which have ended. A job is one or several flights of the storage's road.

A record is a block with the header, then the row (`records.record`). A store writes both from where they are, and may
still read a row when it was given up: its header has the check of the bytes that it was to write, so what it stored is
noticed, and deleted when the call returns.
"""

import hashlib
import json
import mmap
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import repeat
from math import inf

import numpy as np
import numpy.typing as npt

from kvarve.core.copies.in_flight import PROBE
from kvarve.errors import ConfigError
from kvarve.records.record import BLOCK_BYTES, HEADER_BYTES, KEY_BYTES
from kvarve.records.seals import CHECKSUM, Seal
from kvarve.storage import Breaker, StorageUsage, Tiers
from kvarve.transfer.lanes import TOGETHER
from kvarve.transfer.storage_road import BUFFER_BYTES, Became, Flight, Kind, Move, StorageRoad

GROUP_BYTES = 4  # of a key, at its end: the number of the KV cache group
_HOUSEKEEPING_S = 10.0
_KNOWN_MOST = 1 << 17  # chunks known to be in storage
_FAILED_MOST = 1 << 16
_STORING_SHARE = 4  # at most one row in four waits for its store, unless a single job has more
_LEAD = bytes(BLOCK_BYTES - HEADER_BYTES)  # of the payload, so that the row begins at a block
_WORDS: Mapping[Became, str] = {"damaged": "corrupt", "failed": "error"}


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
    """A part of a job: what one call to the storage moves."""

    move: Move
    job: _Job
    keys: Sequence[bytes]


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
            raise ConfigError(f"rows must be whole blocks of {BLOCK_BYTES} bytes, not {rows.shape} by {rows.strides}")
        self.counts: Counter[str] = Counter()  # chunks, by what became of them
        self.usage: StorageUsage | None = None  # as the storage last answered
        self._namespace, self._seal, self._rows = namespace, seal, rows
        self._row_bytes = rows.shape[1]
        self._loaded_together = max(1, BUFFER_BYTES // (BLOCK_BYTES + self._row_bytes))
        self._storing_most = max(1, len(rows) // _STORING_SHARE)
        self._deadline_s, self._clock = deadline_s, clock
        self._kinds: dict[int, Kind] = {}  # by group
        self._there: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = b""  # in the names of chunks, since all were forgotten
        self._failed: OrderedDict[bytes, None] = OrderedDict()  # misses until they are stored anew
        self._asked: dict[bytes, bool] = {}  # waiting for an answer (True), or known to be absent while anyone needs it
        self._askers: dict[bytes, set[str]] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._unsent: list[bytes] = []
        self._touched: dict[bytes, None] = {}
        self._housekept = -inf
        self._housekeeping: Flight[StorageUsage] | None = None
        self._questions: list[tuple[Flight[list[bool]], Sequence[bytes]]] = []
        self._batches: list[_Batch] = []
        self._jobs: dict[int, _Job] = {}
        self._progress = {True: -inf, False: -inf}  # when a batch last ended, by whether it stores
        self._storing = 0  # rows that wait for their store
        self._done: list[JobEnded] = []
        self._closed = False
        self._road = StorageRoad(storage, deadline_s=deadline_s, clock=clock)

    # --- is it there?

    def lookup(self, key: bytes, asker: str) -> Found:
        """Whether a chunk is in storage. What an asker has been told stays so until it is forgotten, or a job has
        failed or succeeded since."""
        if key in self._failed or not self._road.storage.up:
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
            self._questions.append((self._road.exists(self._names(keys, self._epoch), self._deadline_s), keys))
        if now - self._housekept >= _HOUSEKEEPING_S and self._housekeeping is None and self._road.storage.up:
            touched, self._touched, self._housekept = [*self._touched], {}, now
            keep = partial(self._keep_house, touched, self._epoch)
            self._housekeeping = self._road.call(PROBE, keep, self._deadline_s)

    # --- jobs

    def store(self, job: int, keys: Collection[bytes], rows: Sequence[int]) -> None:
        """Store chunks from these rows, which stay as they are until the job has ended."""
        sent = _Job(job, True, tuple(keys), self._clock(), self._epoch)
        missing = [(key, row) for key, row in zip(sent.keys, rows, strict=True) if key not in self._there]
        sent.good.update(key for key in sent.keys if key in self._there)
        self.counts["store: there already"] += len(sent.good)
        up = self._road.storage.up
        room = max(0, self._storing_most - self._storing) if self._storing else len(missing)
        room = min(room, len(missing)) if up else 0
        self.counts["store: behind" if up else "store: down"] += len(missing) - room
        self._start(sent, missing[:room], TOGETHER)

    def load(self, job: int, keys: Collection[bytes], rows: Sequence[int]) -> None:
        """Load chunks into these rows, which the engine leaves alone until the job has ended."""
        sent = _Job(job, False, tuple(keys), self._clock(), self._epoch)
        wanted = [*zip(sent.keys, rows, strict=True)]
        if not self._road.storage.up:
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
        return next(self._names([key], self._epoch))

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has ended, or a deadline may have passed; False after `timeout_s`."""
        return self._road.wait(max(0.0, min(timeout_s, self._left_s())))

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when all jobs have ended, at the latest after the deadline: then the rest is given up."""
        end = self._clock() + (self._deadline_s if timeout_s is None else timeout_s)
        while self._jobs:
            self._collect()
            left_s = end - self._clock()
            if left_s <= 0:
                self._give_up([*self._batches])
            elif self._jobs:
                self.wait(min(left_s, 0.1))

    def forget_all(self, epoch: bytes) -> None:
        """Name chunks anew from now on, with this `epoch`: none that is stored by now is found any more. Loads under
        way fail; stores keep the names that they began with."""
        self._epoch = epoch
        self._give_up([batch for batch in self._batches if not batch.job.storing])
        for known in (self._there, self._failed, self._touched, self._questions):
            known.clear()
        self._unsent = [key for key, waits in self._asked.items() if waits]

    def close(self, timeout_s: float = 5.0) -> None:
        """Let jobs end within `timeout_s`, then close the storage. Nothing touches the rows afterwards, except a write
        that hangs, which may still read them."""
        if self._closed:
            return
        self._closed = True
        self.drain(min(timeout_s, self._deadline_s))
        self._road.close(timeout_s)

    # --- inside

    def _start(self, job: _Job, chunks: Sequence[tuple[bytes, int]], together: int) -> None:
        self._jobs[job.number] = job
        self._storing += len(job.keys) if job.storing else 0
        for at in range(0, len(chunks), together):
            keys, rows = zip(*chunks[at : at + together], strict=True)
            objects = [self._named(key, job.epoch) for key in keys]
            if job.storing:
                move = self._road.put(objects, partial(self._sealed, objects, rows))
            else:
                move = self._road.get(objects, partial(self._land, rows))
            self._batches.append(_Batch(move, job, keys))
            job.batches += 1
        if not job.batches:
            self._finish(job)

    def _collect(self) -> None:
        self._road.collect()
        now = self._clock()
        if self._housekeeping is not None and self._housekeeping.ended.is_set():
            self.usage, self._housekeeping = self._housekeeping.answer or self.usage, None
        for batch in [batch for batch in self._batches if batch.move.ended.is_set()]:
            self._progress[batch.job.storing] = now
            self._end(batch)
        self._give_up([batch for batch in self._batches if now > self._late_at(batch)])
        for question in [*self._questions]:
            flight, keys = question
            if flight.ended.is_set() or now > flight.sent + self._deadline_s:
                flight.give_up()
                self._questions.remove(question)
                self._answer(keys, flight.answer or repeat(False))

    def _late_at(self, batch: _Batch) -> float:
        """When a batch is given up: it hangs, or it waits behind others of which none has ended for so long."""
        began, sent = batch.move.began, batch.move.sent
        since = began if began < inf else max(sent, self._progress[batch.job.storing])
        return since + self._deadline_s

    def _left_s(self) -> float:
        late = [self._late_at(batch) for batch in self._batches]
        late += [flight.sent + self._deadline_s for flight, _ in self._questions]
        return min(late, default=inf) - self._clock()

    def _answer(self, keys: Sequence[bytes], answer: Iterable[bool]) -> None:
        for key, there in zip(keys, answer):  # noqa: B905  it goes on for ever if nothing was answered
            if key not in self._asked:  # stored meanwhile
                continue
            if there:
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
            batch.move.give_up()
            self._end(batch)

    def _end(self, batch: _Batch) -> None:
        self._batches.remove(batch)
        job, move = batch.job, batch.move
        job.good.update(key for key, became in zip(batch.keys, move.became, strict=True) if became == "done")
        self.counts.update(f"{'store' if job.storing else 'load'}: {_WORDS.get(each, each)}" for each in move.became)
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

    def _named(self, key: bytes, epoch: bytes) -> tuple[Kind, bytes]:
        """A chunk's kind, and the key in its record."""
        group, digest = int.from_bytes(key[-GROUP_BYTES:], "big"), key[:-GROUP_BYTES]
        kind = self._kinds.get(group)
        if kind is None:
            pool = f"group{group}"
            root = hashlib.sha256(self._namespace + pool.encode()).digest()
            size = len(_LEAD) + self._row_bytes
            kind = self._kinds[group] = Kind(self._namespace, pool, size, seal=self._seal, root=root)
        return kind, digest if len(digest) == KEY_BYTES and not epoch else hashlib.sha256(epoch + digest).digest()

    # --- on the lanes' threads

    def _names(self, keys: Sequence[bytes], epoch: bytes) -> Iterator[str]:
        for key in keys:
            kind, digest = self._named(key, epoch)
            yield kind.name(digest)

    def _keep_house(self, touched: Sequence[bytes], epoch: bytes) -> StorageUsage:
        self._road.storage.touch([*self._names(touched, epoch)])
        return self._road.storage.usage()

    def _sealed(
        self, objects: Sequence[tuple[Kind, bytes]], rows: Sequence[int]
    ) -> list[tuple[memoryview, memoryview]]:
        headers = memoryview(mmap.mmap(-1, len(rows) * BLOCK_BYTES))
        pieces = list[tuple[memoryview, memoryview]]()
        for at, ((kind, digest), row) in enumerate(zip(objects, rows, strict=True)):
            header, data = headers[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], memoryview(self._rows[row])
            header[:HEADER_BYTES] = kind.stamp.sealed(digest, _LEAD, data)
            pieces.append((header, data))
        return pieces

    def _land(self, rows: Sequence[int], i: int, payload: memoryview) -> None:
        np.copyto(self._rows[rows[i]], np.frombuffer(payload, np.uint8)[len(_LEAD) :])
