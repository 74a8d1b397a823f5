"""Several storages, the near and fast one first, as one storage. Names and bytes only.

The first tier that takes an object answers the put; the object is replicated to the other tiers in the background, and
promoted from a far tier to the nearer ones. Each tier has one replicator thread and two bounds: on the bytes of its
pending replications, and on its backlog of names, which it gets while it is down or behind. Objects of the backlog are
read from another tier once this one is up again. A tier that is down or full does not slow down the others.

`exists` waits up to `patience_s` for each tier, on the tier's own threads. While a late tier has not answered, calls
skip it: a far tier that hangs costs only the hits that it alone has.

    put ──> tier 0 ──(copy)──> tier 1            get <── tier 0 <──(promotion)── tier 1
            answers            later                     in the background ^

A delete takes effect in all tiers at once. A copy in flight is hidden, and removed when it has arrived.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvarve.errors import StorageError
from kvarve.storage._breaker import Breaker
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names, in_group
from kvarve.system.background import BackgroundCall, WorkerPool
from kvarve.system.regions import HostRegion

log = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20  # of one replicated put, unless a single object is larger
_EXISTS_THREADS = 3  # of each tier


@dataclass(frozen=True)
class _Replication:
    """An object to be written to a tier in the background."""

    name: str
    data: memoryview
    promotion: bool = False  # from a farther tier; else a copy of a put
    damaged: bool = False  # the tier's own copy is damaged and has to be deleted first
    from_backlog: bool = False


@dataclass(eq=False)
class _Replicator:
    """One tier with its pending replications, its backlog, and its late answers."""

    tier: Breaker
    exists_pool: WorkerPool
    late: set[Future[list[bool]]] = field(default_factory=set)
    pending: OrderedDict[str, _Replication] = field(default_factory=OrderedDict)  # by name, the next first
    waiting_bytes: int = 0  # of `pending`, and of objects being copied into it
    backlog: OrderedDict[str, int] = field(default_factory=OrderedDict)  # sizes in bytes by name
    in_flight: set[str] = field(default_factory=set)
    deleted_in_flight: set[str] = field(default_factory=set)  # of `in_flight`; hidden from all calls
    healthy: bool = True  # the tier has not failed since it last worked; else the backlog waits
    recoveries: int = 0  # how often it came up
    ask_usage: bool = True
    busy: bool = False
    thread: BackgroundCall[None] | None = None

    def has_work(self) -> bool:
        return bool(self.pending or self.ask_usage or (self.backlog and self.healthy))


@dataclass(eq=False)
class _Call:
    """A call in progress: the tiers' errors, and the names deleted meanwhile, which it must not replicate."""

    errors: list[StorageError] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)
    dropped: list[str | None] = field(default_factory=list)  # groups; None is all

    @contextmanager
    def tries(self) -> Iterator[None]:
        """A tier's part, which may fail: a call fails only if every tier fails."""
        try:
            yield
        except StorageError as e:
            self.errors.append(e)


class Tiers(Storage):
    """`tiers`, nearest first, as one storage, which owns them and sets their `changed`.

    exists: in any. get: from the first that has it in the buffer's size and whole; if none has, what the first that
    has anything answers. put: True as soon as one tier has it; the others get it later. delete, drop: from all. usage:
    of the first. A call raises when every tier raised.

    `whole(record)` tells whether bytes can be what was put. A copy that fails it is read from the next tier and then
    repaired; without it copies are not judged, and none is promoted. `changed` is called when any tier has gone down or
    up, as a breaker calls it. Each tier may be behind by `waiting_bytes` (or a single object) and by a `backlog` of
    objects. `patience_s`: how long `exists` waits for a tier.
    """

    def __init__(
        self,
        tiers: Sequence[Breaker],
        *,
        whole: Callable[[memoryview], bool] | None = None,
        changed: Callable[[], None] = lambda: None,
        waiting_bytes: int = 64 << 20,
        backlog: int = 1 << 16,
        patience_s: float = 1.0,
        close_s: float = 5.0,
    ) -> None:
        assert tiers
        self._patience_s = patience_s
        self.changed = changed
        self.counts: Counter[str] = Counter()
        self._whole, self._max_waiting_bytes, self._max_backlog, self._close_s = whole, waiting_bytes, backlog, close_s
        self._lock = threading.Lock()  # never held during a call into a tier, nor a read of `up`
        self._moved = threading.Condition(self._lock)
        self._calls: set[_Call] = set()
        self._deleting: Counter[str] = Counter()
        self._closed = False
        self._replicators = [_Replicator(tier, WorkerPool(_EXISTS_THREADS, "kvarve asks a tier")) for tier in tiers]
        for number, replicator in enumerate(self._replicators):
            replicator.tier.changed = self._on_tier_changed
            work = partial(self._replicate, replicator)
            replicator.thread = BackgroundCall(f"kvarve replicates to tier {number}", work)

    # --- for people, and for callers that skip a storage that is down

    @property
    def up(self) -> bool:
        """Whether any tier is up."""
        ups = [replicator.tier.up for replicator in self._replicators]  # of all: reading `up` notices a hang
        return any(ups)

    def look(self) -> None:
        """Ask each tier once; see `Breaker.look`."""
        for replicator in self._replicators:
            replicator.tier.look()

    @property
    def tiers(self) -> list[Breaker]:
        """Nearest first."""
        return [replicator.tier for replicator in self._replicators]

    @property
    def last_error(self) -> str:
        errors = ((number, replicator.tier.last_error) for number, replicator in enumerate(self._replicators))
        return "; ".join(f"tier {number}: {error}" for number, error in errors if error)

    @property
    def since(self) -> float:
        """When a tier last went down or up."""
        return max(replicator.tier.since for replicator in self._replicators)

    def settle(self, timeout_s: float) -> bool:
        """Wait until no tier has work that it can do; False if that takes longer."""
        with self._lock:
            return self._moved.wait_for(
                lambda: not any(replicator.has_work() or replicator.busy for replicator in self._replicators), timeout_s
            )

    # --- a storage

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        found = [False] * len(names)
        with self._ongoing() as call:
            for replicator in self._replicators:
                if asked := self._visible(replicator, names, [i for i, there in enumerate(found) if not there]):
                    with call.tries():
                        for i, there in zip(asked, self._ask(replicator, [names[i] for i in asked]), strict=True):
                            found[i] = there
        return found

    def _ask(self, replicator: _Replicator, names: Sequence[str]) -> list[bool]:
        """Which of these a tier has; none of them if it is late."""
        if not replicator.late:
            answer = replicator.exists_pool.run(lambda: replicator.tier.exists(names))
            if wait([answer], self._patience_s).done:
                return answer.result()
            with self._lock:
                replicator.late.add(answer)
            answer.add_done_callback(lambda it: self._answered(replicator, it))
        with self._lock:
            self.counts["exists missed: late"] += len(names)
        return [False] * len(names)

    def _passed_over(self, replicator: _Replicator) -> bool:
        """Whether calls skip a tier: it is late, and another is not."""
        return bool(replicator.late) and not all(each.late for each in self._replicators)

    def _answered(self, replicator: _Replicator, answer: Future[list[bool]]) -> None:
        with self._lock:
            replicator.late.discard(answer)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        sizes: list[int | None] = [None] * len(names)
        good = [False] * len(names)
        bad: list[list[int]] = [[] for _ in self._replicators]  # damaged or of another size
        missed: list[list[int]] = [[] for _ in self._replicators]
        with self._ongoing() as call:
            for number, replicator in enumerate(self._replicators):
                asked = self._visible(replicator, names, [i for i, well in enumerate(good) if not well])
                if not asked or self._passed_over(replicator):
                    continue
                # The answer of a nearer tier stands unless this one has a good copy, so that is read into other memory.
                views = [into[i] if sizes[i] is None else memoryview(bytearray(into[i].nbytes)) for i in asked]
                with call.tries():
                    answers = replicator.tier.get([names[i] for i in asked], views)
                    for i, view, size in zip(asked, views, answers, strict=True):
                        if size is None:
                            missed[number].append(i)
                            continue
                        good[i] = size == into[i].nbytes and self._can_be(view)
                        if not good[i]:
                            bad[number].append(i)
                        if good[i] and view is not into[i]:
                            into[i][:] = view
                        if good[i] or sizes[i] is None:
                            sizes[i] = size
            if self._whole is not None:
                for replicator, wrong, absent in zip(self._replicators, bad, missed, strict=True):
                    promoted = [(i, False) for i in absent if good[i]] + [(i, True) for i in wrong if good[i]]
                    self._hand_on(
                        call, replicator, [_Replication(names[i], into[i], True, damaged) for i, damaged in promoted]
                    )
        return sizes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        stored = [False] * len(names)
        taken: list[list[int]] = [[] for _ in self._replicators]
        rejected: list[list[int]] = [[] for _ in self._replicators]
        with self._ongoing() as call:
            for number, replicator in enumerate(self._replicators):
                asked = self._visible(replicator, names, [i for i, done in enumerate(stored) if not done])
                if not asked or self._passed_over(replicator):
                    continue
                up = replicator.tier.up
                with call.tries():
                    answers = replicator.tier.put([names[i] for i in asked], [data[i] for i in asked])
                    up = up and replicator.tier.up  # else it may not have looked for space
                    for i, done in zip(asked, answers, strict=True):
                        stored[i] = done
                        if done:
                            taken[number].append(i)
                        elif up:
                            rejected[number].append(i)
            for replicator, has, full in zip(self._replicators, taken, rejected, strict=True):
                left = [i for i, done in enumerate(stored) if done and i not in {*has, *full}]
                self._hand_on(call, replicator, [_Replication(names[i], data[i]) for i in left])
        return stored

    def touch(self, names: Sequence[str]) -> None:
        check_names(names)
        with self._ongoing() as call:
            for replicator in self._replicators:
                if not self._passed_over(replicator):
                    with call.tries():
                        replicator.tier.touch(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        removed = [False] * len(names)
        with self._ongoing() as call:
            everything = list(range(len(names)))
            asked = [self._visible(replicator, names, everything) for replicator in self._replicators]
            with self._lock:
                self._deleting.update({*names})
                for replicator in self._replicators:
                    self._forget(replicator, {*names})
            try:
                for replicator, visible in zip(self._replicators, asked, strict=True):
                    if not visible:
                        continue
                    with call.tries():
                        for i, was in zip(visible, replicator.tier.delete([names[i] for i in visible]), strict=True):
                            removed[i] |= was
            finally:
                with self._lock:  # a put that stored in one tier before this delete must not replicate it
                    self._deleting -= Counter({*names})
                    for each in self._calls:
                        each.deleted.update(names)
        return removed

    def drop(self, group: str | None = None) -> int:
        """From all; the answer is the largest of the tiers'. A tier that fails keeps its own, which a warning says."""
        check_names([] if group is None else [group])
        counts = [0]
        with self._ongoing() as call:
            with self._lock:
                for replicator in self._replicators:
                    known = {*replicator.pending, *replicator.backlog, *replicator.in_flight}
                    self._forget(replicator, {name for name in known if in_group(name, group)})
                for each in self._calls:
                    each.dropped.append(group)
            for replicator in self._replicators:
                with call.tries():
                    counts.append(replicator.tier.drop(group))
        for error in call.errors:
            log.warning("a tier keeps objects that were dropped: %s", error)
        return max(counts)

    def usage(self) -> StorageUsage:
        """Of the first tier, as the others hold partly the same objects; each has its own by `Breaker.known`. What is
        lost and damaged is that of all, and of the others as of the previous call, since a tier that hangs cannot
        answer; `read_only` if all are."""
        self._check_open()
        first = self._replicators[0].tier.usage()
        with self._lock:
            for replicator in self._replicators[1:]:
                replicator.ask_usage = True
            self._moved.notify_all()
        all_ = [first, *(replicator.tier.known for replicator in self._replicators[1:])]
        return replace(
            first,
            lost=_total([each.lost for each in all_]),
            damaged=_total([each.damaged for each in all_]),
            read_only=all(each.read_only for each in all_) if first.read_only else first.read_only,
        )

    def register(self, region: HostRegion) -> None:
        for replicator in self._replicators:
            replicator.tier.register(region)

    def close(self) -> None:
        """Write what is pending, within `close_s`, then close every tier. Backlogs are dropped."""
        with self._lock:
            self._closed = True
            self._moved.notify_all()
        end = time.monotonic() + self._close_s
        for replicator in self._replicators:
            assert replicator.thread is not None
            replicator.thread.ended(max(0.0, end - time.monotonic()))
        with self._lock:
            for number, replicator in enumerate(self._replicators):
                lost = len(replicator.pending) + len(replicator.backlog)
                replicator.pending.clear()
                replicator.backlog.clear()
                replicator.waiting_bytes = 0
                if lost:
                    self.counts["dropped: closed"] += lost
                    log.warning("tier %d never got %d objects", number, lost)
        closing = _Call()
        for replicator in self._replicators:
            replicator.exists_pool.shutdown()
            with closing.tries():
                replicator.tier.close()
        for error in closing.errors:
            raise error

    # --- a call

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("these storages are closed")

    def _can_be(self, data: memoryview) -> bool:
        return self._whole is None or self._whole(data)

    @contextmanager
    def _ongoing(self) -> Iterator[_Call]:
        """A call of the tiers, which raises if every tier has."""
        call = _Call()
        with self._lock:
            self._check_open()
            self._calls.add(call)
        try:
            yield call
        finally:
            with self._lock:
                self._calls.remove(call)
        if call.errors:
            self._check_open()  # else what only a tier that is closed by now has would be a miss
        if len(call.errors) == len(self._replicators):
            raise call.errors[0]

    def _visible(self, replicator: _Replicator, names: Sequence[str], wanted: list[int]) -> list[int]:
        """The wanted without those deleted while in flight to this tier."""
        if not replicator.deleted_in_flight:
            return wanted
        with self._lock:
            return [i for i in wanted if names[i] not in replicator.deleted_in_flight]

    def _hand_on(self, call: _Call, replicator: _Replicator, replications: Sequence[_Replication]) -> None:
        """Replicate what was put to another tier, or what came from a farther tier to this one. If the tier is down or
        too much is pending, what was put joins its backlog."""
        if not replications:
            return
        recoveries, up = replicator.recoveries, replicator.tier.up
        why = "behind" if up else "down"
        for each in replications:
            if up and self._send(call, replicator, each):
                continue
            with self._lock:
                if each.promotion:
                    self.counts[f"promotion dropped: {why}"] += 1
                elif self._wanted(call, each.name):
                    self.counts[f"backlog: {why}"] += 1
                    replicator.healthy &= up or replicator.recoveries != recoveries
                    self._add_to_backlog(replicator, each.name, each.data.nbytes)

    def _send(self, call: _Call, replicator: _Replicator, replication: _Replication) -> bool:
        """Add to the pending, with a copy of the bytes as the buffer is the caller's; False if too much is pending."""
        size_bytes = replication.data.nbytes
        with self._lock:
            if not self._wanted(call, replication.name):
                return True
            before = replicator.pending.get(replication.name)
            if before is not None:
                replicator.pending[replication.name] = replace(before, damaged=before.damaged or replication.damaged)
                return True
            if replicator.waiting_bytes and replicator.waiting_bytes + size_bytes > self._max_waiting_bytes:
                return False
            replicator.waiting_bytes += size_bytes
        # Without the lock, so that other calls go on.
        replication = replace(replication, data=memoryview(bytes(replication.data)))
        with self._lock:
            if self._wanted(call, replication.name) and replication.name not in replicator.pending:
                replicator.pending[replication.name] = replication
                self._moved.notify_all()
            else:
                replicator.waiting_bytes -= size_bytes
        return True

    # --- with the lock held

    def _wanted(self, call: _Call, name: str) -> bool:
        if name in call.deleted or name in self._deleting or self._closed:
            return False
        return not any(in_group(name, group) for group in call.dropped)

    def _add_to_backlog(self, replicator: _Replicator, name: str, size_bytes: int) -> None:
        replicator.backlog[name] = size_bytes
        while len(replicator.backlog) > self._max_backlog:
            replicator.backlog.popitem(last=False)
            self.counts["dropped: backlog full"] += 1
        self._moved.notify_all()

    def _forget(self, replicator: _Replicator, names: set[str]) -> None:
        """Drop these from pending and backlog, and hide those in flight."""
        for name in names:
            replication = replicator.pending.pop(name, None)
            replicator.waiting_bytes -= replication.data.nbytes if replication else 0
            replicator.backlog.pop(name, None)
        replicator.deleted_in_flight |= names & replicator.in_flight

    def _take(self, replicator: _Replicator) -> tuple[list[_Replication], list[tuple[str, int]]]:
        """The next batch for a tier: pending replications, or if there are none, names of the backlog."""
        batch: list[_Replication] = []
        wanted: list[tuple[str, int]] = []
        left_bytes = _BATCH_BYTES
        while replicator.pending and (not batch or left_bytes >= next(iter(replicator.pending.values())).data.nbytes):
            batch.append(replicator.pending.popitem(last=False)[1])
            left_bytes -= batch[-1].data.nbytes
        backlog = replicator.backlog
        while not batch and backlog and (not wanted or left_bytes >= next(iter(backlog.values()))):
            wanted.append(backlog.popitem(last=False))
            left_bytes -= wanted[-1][1]
        replicator.in_flight = {replication.name for replication in batch} | {name for name, _ in wanted}
        replicator.waiting_bytes -= sum(replication.data.nbytes for replication in batch)
        return batch, wanted

    # --- the replicator threads

    def _on_tier_changed(self) -> None:
        """A tier has gone down or up, says its breaker. A tier that is down becomes unhealthy with the next put."""
        ups = [replicator.tier.up for replicator in self._replicators]
        with self._lock:
            for replicator, up in zip(self._replicators, ups, strict=True):
                if up:
                    replicator.recoveries += 1
                    replicator.healthy = True
            self._moved.notify_all()
        self.changed()

    def _replicate(self, replicator: _Replicator) -> None:
        while True:
            with self._lock:
                self._moved.wait_for(lambda: replicator.has_work() or self._closed)
                if self._closed and not replicator.pending:  # a backlog may be a whole disk
                    return
                replications, backlog = self._take(replicator)
                recoveries, ask_usage = replicator.recoveries, replicator.ask_usage
                replicator.busy, replicator.ask_usage = True, False
            try:
                replications += self._read_backlog(replicator, backlog)
                if replications:
                    self._deliver(replicator, replications, recoveries)
                if ask_usage:
                    with suppress(StorageError):
                        replicator.tier.usage()
            except Exception:  # else this tier would get nothing any more
                log.exception("a bug in the replication to a tier")
            self._remove_deleted_in_flight(replicator)

    def _read_backlog(self, replicator: _Replicator, backlog: Sequence[tuple[str, int]]) -> list[_Replication]:
        """Objects of the backlog, each read from the nearest other tier that has it."""
        found: list[_Replication] = []
        for name, size_bytes in backlog:
            buffer = memoryview(bytearray(size_bytes))
            for other in self._replicators:
                if other is replicator or not self._visible(other, [name], [0]):
                    continue
                with suppress(StorageError):
                    if other.tier.get([name], [buffer]) == [size_bytes] and self._can_be(buffer):
                        found.append(_Replication(name, buffer, from_backlog=True))
                        break
        with self._lock:
            self.counts["dropped: gone from all tiers"] += len(backlog) - len(found)
        return found

    def _deliver(self, replicator: _Replicator, replications: Sequence[_Replication], recoveries: int) -> None:
        names = [replication.name for replication in replications]
        damaged = [replication.name for replication in replications if replication.damaged]
        well = replicator.tier.up
        try:
            if damaged:
                replicator.tier.delete(damaged)
            stored = replicator.tier.put(names, [replication.data for replication in replications])
        except StorageError:  # the breaker counts and logs it
            well, stored = False, [False] * len(names)
        lost = not well or not replicator.tier.up  # else the tier has looked for space
        with self._lock:
            for replication, done in zip(replications, stored, strict=True):
                if done:
                    self.counts["promoted" if replication.promotion else "copied"] += 1
                elif not lost:
                    self.counts["dropped: no space"] += 1
                elif replication.promotion:
                    self.counts["promotion dropped: down"] += 1
                elif self._closed:
                    self.counts["dropped: closed"] += 1
                elif replication.name not in replicator.deleted_in_flight:
                    self.counts["backlog: down"] += not replication.from_backlog
                    self._add_to_backlog(replicator, replication.name, replication.data.nbytes)
            if any(stored):
                replicator.healthy = True
            elif lost:
                replicator.healthy &= replicator.recoveries != recoveries  # it may have come up since the put

    def _remove_deleted_in_flight(self, replicator: _Replicator) -> None:
        """Remove the copies deleted while in flight, before the next batch."""
        while True:
            with self._lock:
                deleted_in_flight = sorted(replicator.deleted_in_flight)
                if not deleted_in_flight:
                    replicator.in_flight, replicator.busy = set(), False
                    self._moved.notify_all()
                    return
            try:
                with suppress(StorageError):  # then the copy stays visible until it is deleted again
                    replicator.tier.delete(deleted_in_flight)
            except Exception:  # as above
                log.exception("a bug in a tier")
            with self._lock:
                replicator.deleted_in_flight.difference_update(deleted_in_flight)


def _total(counts: Sequence[int | None]) -> int | None:
    """None if no storage tells."""
    told = [count for count in counts if count is not None]
    return sum(told) if told else None
