"""Storages in a row, the near and fast one first: one storage to whoever uses it. Names and bytes only.

What is put is answered by the first tier that takes it, and carried to the others behind the caller's back; what a far
tier had is carried to the nearer ones. Each tier has one thread that carries to it, and two bounds: of the bytes that
wait, and of the names that it is owed because it was down or behind. What is owed is read from another tier when this
one is up again. A tier that is down or full takes nothing from the rest.

Who asks what is there waits a moment for each tier, on threads that are the tier's own. One that is late is passed
over, and nobody else waits for it, nor reads from it or writes to it, until it has answered: a far tier that hangs
costs what only that one has.

    put ──> tier 0 ──(copy)──> tier 1            get <── tier 0 <──(promotion)── tier 1
            answers            later                     nobody waits for this ^

A delete is everywhere at once, also where a copy is on its way: that one is removed when it has arrived, and nobody
sees it until then.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvarve.errors import StorageError
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names
from kvarve.storage.breaker import Breaker
from kvarve.storage.crew import Crew

log = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20  # that one put carries, unless a single object is larger
_ASKING = 3  # threads of a tier that ask it what is there


@dataclass(frozen=True)
class Part:
    """One tier, for people. `owed`: how many objects it is to get when it takes them again."""

    usage: StorageUsage
    up: bool
    last_error: str
    since: float
    waiting_bytes: int
    owed: int


@dataclass(frozen=True)
class _Errand:
    """An object on its way to a tier."""

    name: str
    data: memoryview
    promotion: bool = False  # from a farther tier; else what somebody has put
    damaged: bool = False  # what the tier has of that name has to go first
    owed: bool = False  # since the tier was down or behind


@dataclass(eq=False)
class _Replicator:
    """What waits for one tier, what is on its way to it, and what it has not answered in time."""

    tier: Breaker
    asking: Crew
    late: set[Future[list[bool]]] = field(default_factory=set)
    errands: OrderedDict[str, _Errand] = field(default_factory=OrderedDict)  # by name, the next first
    waiting_bytes: int = 0  # of the errands, and of those that are being copied
    owed: OrderedDict[str, int] = field(default_factory=OrderedDict)  # sizes in bytes by name
    on_the_way: set[str] = field(default_factory=set)
    doomed: set[str] = field(default_factory=set)  # of those: deleted meanwhile, so not there for anybody
    hopeful: bool = True  # it has not failed since it was last known to work
    ups: int = 0  # how often it came up
    usage: StorageUsage = field(default_factory=lambda: StorageUsage(0, 0, None, 0))  # when it was last asked
    ask_usage: bool = True
    busy: bool = False
    thread: threading.Thread | None = None

    def has_work(self) -> bool:
        return bool(self.errands or self.ask_usage or (self.owed and self.hopeful))


@dataclass(eq=False)
class _Call:
    """A put or get that will have something carried, unless it is deleted before."""

    deleted: set[str] = field(default_factory=set)


class Tiers(Storage):
    """`tiers`, nearest first, as one storage. They are its own from then on, and their `changed` too.

    exists: in any. get: from the first that has it in the buffer's size and whole; if none has, what the first that
    has anything answers. put: True as soon as one tier has it; the others get it later. delete: from all. usage: of the
    first; `parts` says all. A call raises when every tier raised.

    `whole(record)` says whether some bytes can be what was put: what cannot is asked from the next tier, and mended
    where it lay. Without it nothing is judged, and nothing promoted. `changed` is called when any tier has gone down or
    up, as a breaker calls it. Each tier may be behind by `waiting_bytes` (or a single object) and by `owed` objects.
    `patience_s`: for which a tier may think about what it has.
    """

    def __init__(
        self,
        tiers: Sequence[Breaker],
        *,
        whole: Callable[[memoryview], bool] | None = None,
        changed: Callable[[], None] = lambda: None,
        waiting_bytes: int = 64 << 20,
        owed: int = 1 << 16,
        patience_s: float = 1.0,
        close_s: float = 5.0,
    ) -> None:
        assert tiers
        self._patience_s = patience_s
        self.changed = changed
        self.counts: Counter[str] = Counter()
        self._whole, self._most_bytes, self._most_owed, self._close_s = whole, waiting_bytes, owed, close_s
        self._lock = threading.Lock()  # never held while a tier is asked anything, `up` neither
        self._moved = threading.Condition(self._lock)
        self._calls: set[_Call] = set()
        self._deleting: Counter[str] = Counter()
        self._closed = False
        self._replicators = [_Replicator(tier, Crew(_ASKING, "kvarve asks a tier")) for tier in tiers]
        for number, replicator in enumerate(self._replicators):
            replicator.tier.changed = self._turned
            replicator.thread = threading.Thread(
                target=self._replicate, args=(replicator,), name=f"kvarve carries to tier {number}", daemon=True
            )
        for replicator in self._replicators:
            assert replicator.thread is not None
            replicator.thread.start()

    # --- for people, and for whoever decides whether to ask at all

    @property
    def up(self) -> bool:
        """Whether any tier is."""
        ups = [replicator.tier.up for replicator in self._replicators]  # of each, since that is how a hang is noticed
        return any(ups)

    def look(self) -> None:
        """Ask each tier once; see `Breaker.look`."""
        for replicator in self._replicators:
            replicator.tier.look()

    @property
    def last_error(self) -> str:
        told = ((number, replicator.tier.last_error) for number, replicator in enumerate(self._replicators))
        return "; ".join(f"tier {number}: {error}" for number, error in told if error)

    @property
    def since(self) -> float:
        """When a tier last went down or up."""
        return max(replicator.tier.since for replicator in self._replicators)

    def parts(self) -> list[Part]:
        """Each tier, nearest first. What it holds is of the last time this was asked: a tier that hangs cannot tell."""
        parts = []
        for replicator in self._replicators:
            tier = replicator.tier
            up = tier.up
            with self._lock:
                known = (
                    replicator.usage,
                    up,
                    tier.last_error,
                    tier.since,
                    replicator.waiting_bytes,
                    len(replicator.owed),
                )
                parts.append(Part(*known))
                replicator.ask_usage = not self._closed
                self._moved.notify_all()
        return parts

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything that can be carried has been; False if that takes longer."""
        with self._lock:
            return self._moved.wait_for(
                lambda: not any(replicator.has_work() or replicator.busy for replicator in self._replicators), timeout_s
            )

    # --- a storage

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        self._check_open()
        found = [False] * len(names)
        errors: list[StorageError] = []
        for replicator in self._replicators:
            asked = self._visible(replicator, names, [i for i, there in enumerate(found) if not there])
            if asked:
                with _collected(errors):
                    for i, there in zip(asked, self._ask(replicator, [names[i] for i in asked]), strict=True):
                        found[i] = there
        self._raise_if_all(errors)
        return found

    def _ask(self, replicator: _Replicator, names: Sequence[str]) -> list[bool]:
        """What a tier has of these; nothing, if it does not say so in time."""
        if not replicator.late:
            answer = replicator.asking.submit(replicator.tier.exists, names)
            if wait([answer], self._patience_s).done:
                return answer.result()
            with self._lock:
                replicator.late.add(answer)
            answer.add_done_callback(lambda it: self._answered(replicator, it))
        with self._lock:
            self.counts["exists missed: late"] += len(names)
        return [False] * len(names)

    def _passed_over(self, replicator: _Replicator) -> bool:
        """Whether a tier is late, and not all of them are."""
        return bool(replicator.late) and not all(each.late for each in self._replicators)

    def _answered(self, replicator: _Replicator, answer: Future[list[bool]]) -> None:
        with self._lock:
            replicator.late.discard(answer)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        sizes: list[int | None] = [None] * len(names)
        good = [False] * len(names)
        bad: list[list[int]] = [[] for _ in self._replicators]  # what each tier has and should not
        missed: list[list[int]] = [[] for _ in self._replicators]
        errors: list[StorageError] = []
        with self._ongoing() as call:
            for number, replicator in enumerate(self._replicators):
                asked = self._visible(replicator, names, [i for i, well in enumerate(good) if not well])
                if not asked or self._passed_over(replicator):
                    continue
                # What a nearer tier had stays the answer unless this one has better, so it is read beside it.
                views = [into[i] if sizes[i] is None else memoryview(bytearray(into[i].nbytes)) for i in asked]
                with _collected(errors):
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
            self._raise_if_all(errors)
            if self._whole is not None:
                for replicator, wrong, absent in zip(self._replicators, bad, missed, strict=True):
                    self._promote(call, replicator, [(names[i], into[i]) for i in absent if good[i]], damaged=False)
                    self._promote(call, replicator, [(names[i], into[i]) for i in wrong if good[i]], damaged=True)
        return sizes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        stored = [False] * len(names)
        taken: list[list[int]] = [[] for _ in self._replicators]
        no_room: list[list[int]] = [[] for _ in self._replicators]
        errors: list[StorageError] = []
        with self._ongoing() as call:
            for number, replicator in enumerate(self._replicators):
                asked = self._visible(replicator, names, [i for i, done in enumerate(stored) if not done])
                if not asked or self._passed_over(replicator):
                    continue
                up = replicator.tier.up
                with _collected(errors):
                    answers = replicator.tier.put([names[i] for i in asked], [data[i] for i in asked])
                    up = up and replicator.tier.up  # else it did not even look for room
                    for i, done in zip(asked, answers, strict=True):
                        stored[i] = done
                        if done:
                            taken[number].append(i)
                        elif up:
                            no_room[number].append(i)
            self._raise_if_all(errors)
            for replicator, has, full in zip(self._replicators, taken, no_room, strict=True):
                told = {*has, *full}
                self._copy(
                    call, replicator, [(names[i], data[i]) for i in range(len(names)) if stored[i] and i not in told]
                )
        return stored

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        self._check_open()
        errors: list[StorageError] = []
        removed = [False] * len(names)
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
                with _collected(errors):
                    for i, was in zip(visible, replicator.tier.delete([names[i] for i in visible]), strict=True):
                        removed[i] |= was
        finally:
            with self._lock:  # what a put has stored in one tier before we came there is not carried to the others
                self._deleting -= Counter({*names})
                for call in self._calls:
                    call.deleted.update(names)
        self._raise_if_all(errors)
        return removed

    def usage(self) -> StorageUsage:
        """Of the first tier: what is elsewhere is partly the same. `parts` tells all."""
        self._check_open()
        return self._replicators[0].tier.usage()

    def register(self, memory: memoryview) -> None:
        for replicator in self._replicators:
            replicator.tier.register(memory)

    def close(self) -> None:
        """Carry what waits, within `close_s`, then close every tier. What is still owed is owed no more."""
        with self._lock:
            self._closed = True
            self._moved.notify_all()
        end = time.monotonic() + self._close_s
        for replicator in self._replicators:
            assert replicator.thread is not None
            replicator.thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            for number, replicator in enumerate(self._replicators):
                lost = len(replicator.errands) + len(replicator.owed)
                replicator.errands.clear()
                replicator.owed.clear()
                replicator.waiting_bytes = 0
                if lost:
                    self.counts["dropped: closed"] += lost
                    log.warning("tier %d never got %d objects", number, lost)
        errors: list[StorageError] = []
        for replicator in self._replicators:
            replicator.asking.leave()
            with _collected(errors):
                replicator.tier.close()
        for error in errors:
            raise error

    # --- a call

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("these storages are closed")

    def _can_be(self, data: memoryview) -> bool:
        return self._whole is None or self._whole(data)

    def _raise_if_all(self, errors: Sequence[StorageError]) -> None:
        if len(errors) == len(self._replicators):
            raise errors[0]

    @contextmanager
    def _ongoing(self) -> Iterator[_Call]:
        call = _Call()
        with self._lock:
            self._check_open()
            self._calls.add(call)
        try:
            yield call
        finally:
            with self._lock:
                self._calls.remove(call)

    def _visible(self, replicator: _Replicator, names: Sequence[str], wanted: list[int]) -> list[int]:
        """Those of the wanted whose copies in this tier are not about to go."""
        if not replicator.doomed:
            return wanted
        with self._lock:
            return [i for i in wanted if names[i] not in replicator.doomed]

    def _copy(self, call: _Call, replicator: _Replicator, objects: Sequence[tuple[str, memoryview]]) -> None:
        """Have what was put carried to a tier too; where too much waits already, it is owed."""
        if not objects:
            return
        ups = replicator.ups
        up = replicator.tier.up
        for name, view in objects:
            if up and self._send(call, replicator, _Errand(name, view)):
                continue
            with self._lock:
                if self._wanted(call, name):
                    self.counts["owed: too much waits" if up else "owed: down"] += 1
                    replicator.hopeful &= up or replicator.ups != ups
                    self._owe(replicator, name, view.nbytes)

    def _promote(
        self, call: _Call, replicator: _Replicator, objects: Sequence[tuple[str, memoryview]], *, damaged: bool
    ) -> None:
        """Have what came from a farther tier carried to this one, if it is up and not behind."""
        if not objects:
            return
        up = replicator.tier.up
        for name, view in objects:
            if not up or not self._send(call, replicator, _Errand(name, view, promotion=True, damaged=damaged)):
                with self._lock:
                    self.counts[f"promotion dropped: {'too much waits' if up else 'down'}"] += 1

    def _send(self, call: _Call, replicator: _Replicator, errand: _Errand) -> bool:
        """Put an errand in line, with bytes of its own since the buffer is the caller's; False if too much waits."""
        size_bytes = errand.data.nbytes
        with self._lock:
            if not self._wanted(call, errand.name):
                return True
            before = replicator.errands.get(errand.name)
            if before is not None:
                replicator.errands[errand.name] = replace(before, damaged=before.damaged or errand.damaged)
                return True
            if replicator.waiting_bytes and replicator.waiting_bytes + size_bytes > self._most_bytes:
                return False
            replicator.waiting_bytes += size_bytes
        errand = replace(errand, data=memoryview(bytes(errand.data)))  # not under the lock: others have calls to make
        with self._lock:
            if self._wanted(call, errand.name) and errand.name not in replicator.errands:
                replicator.errands[errand.name] = errand
                self._moved.notify_all()
            else:
                replicator.waiting_bytes -= size_bytes
        return True

    # --- all of it under the lock

    def _wanted(self, call: _Call, name: str) -> bool:
        return name not in call.deleted and name not in self._deleting and not self._closed

    def _owe(self, replicator: _Replicator, name: str, size_bytes: int) -> None:
        replicator.owed[name] = size_bytes
        while len(replicator.owed) > self._most_owed:
            replicator.owed.popitem(last=False)
            self.counts["owed no more: too many"] += 1
        self._moved.notify_all()

    def _forget(self, replicator: _Replicator, names: set[str]) -> None:
        """Nothing of these goes to the tier any more, and what is on its way is there for nobody."""
        for name in names:
            errand = replicator.errands.pop(name, None)
            replicator.waiting_bytes -= errand.data.nbytes if errand else 0
            replicator.owed.pop(name, None)
        replicator.doomed |= names & replicator.on_the_way

    def _take(self, replicator: _Replicator) -> tuple[list[_Errand], list[tuple[str, int]]]:
        """The next that go to a tier together: what waits, or if nothing does what is owed."""
        errands: list[_Errand] = []
        owed: list[tuple[str, int]] = []
        room = _BATCH_BYTES
        while replicator.errands and (not errands or room >= next(iter(replicator.errands.values())).data.nbytes):
            errands.append(replicator.errands.popitem(last=False)[1])
            room -= errands[-1].data.nbytes
        while not errands and replicator.owed and (not owed or room >= next(iter(replicator.owed.values()))):
            owed.append(replicator.owed.popitem(last=False))
            room -= owed[-1][1]
        replicator.on_the_way = {errand.name for errand in errands} | {name for name, _ in owed}
        replicator.waiting_bytes -= sum(errand.data.nbytes for errand in errands)
        return errands, owed

    # --- the threads that carry

    def _turned(self) -> None:
        """A tier has gone down or up, says its breaker. That one went down is for whoever tries it to find out."""
        ups = [replicator.tier.up for replicator in self._replicators]
        with self._lock:
            for replicator, up in zip(self._replicators, ups, strict=True):
                if up:
                    replicator.ups += 1
                    replicator.hopeful = True
            self._moved.notify_all()
        self.changed()

    def _replicate(self, replicator: _Replicator) -> None:
        while True:
            with self._lock:
                self._moved.wait_for(lambda: replicator.has_work() or self._closed)
                if self._closed and not replicator.errands:  # what is owed may be a whole disk's worth
                    return
                errands, owed = self._take(replicator)
                ups, ask_usage = replicator.ups, replicator.ask_usage
                replicator.busy, replicator.ask_usage = True, False
            try:
                errands += self._fetched(replicator, owed)
                if errands:
                    self._deliver(replicator, errands, ups)
                if ask_usage:
                    with _collected([]):
                        replicator.usage = replicator.tier.usage()
            except Exception:  # or this tier would get nothing any more
                log.exception("a bug on the way to a tier")
            self._remove_doomed(replicator)

    def _fetched(self, replicator: _Replicator, owed: Sequence[tuple[str, int]]) -> list[_Errand]:
        """What a tier is owed, read from the nearest other that has it."""
        found: list[_Errand] = []
        for name, size_bytes in owed:
            buffer = memoryview(bytearray(size_bytes))
            for other in self._replicators:
                if other is replicator or not self._visible(other, [name], [0]):
                    continue
                with _collected([]):
                    if other.tier.get([name], [buffer]) == [size_bytes] and self._can_be(buffer):
                        found.append(_Errand(name, buffer, owed=True))
                        break
        with self._lock:
            self.counts["owed no more: gone"] += len(owed) - len(found)
        return found

    def _deliver(self, replicator: _Replicator, errands: Sequence[_Errand], ups: int) -> None:
        names = [errand.name for errand in errands]
        damaged = [errand.name for errand in errands if errand.damaged]
        well = replicator.tier.up
        try:
            if damaged:
                replicator.tier.delete(damaged)
            stored = replicator.tier.put(names, [errand.data for errand in errands])
        except StorageError:  # the breaker has written it down
            well, stored = False, [False] * len(names)
        lost = not well or not replicator.tier.up  # else it has looked for room
        with self._lock:
            for errand, done in zip(errands, stored, strict=True):
                if done:
                    self.counts["promoted" if errand.promotion else "copied"] += 1
                elif not lost:
                    self.counts["dropped: no room"] += 1
                elif errand.promotion:
                    self.counts["promotion dropped: down"] += 1
                elif self._closed:
                    self.counts["dropped: closed"] += 1
                elif errand.name not in replicator.doomed:
                    self.counts["owed: down"] += not errand.owed
                    self._owe(replicator, errand.name, errand.data.nbytes)
            if any(stored):
                replicator.hopeful = True
            elif lost:
                replicator.hopeful &= replicator.ups != ups  # it may have come up since we tried

    def _remove_doomed(self, replicator: _Replicator) -> None:
        """What was deleted while it was on its way has arrived: now it goes, and only then others are carried."""
        while True:
            with self._lock:
                doomed = sorted(replicator.doomed)
                if not doomed:
                    replicator.on_the_way, replicator.busy = set(), False
                    self._moved.notify_all()
                    return
            try:
                replicator.tier.delete(doomed)
            except StorageError:  # it is found again, then; whoever takes offence deletes it again
                pass
            except Exception:  # as above
                log.exception("a bug in a tier")
            with self._lock:
                replicator.doomed.difference_update(doomed)


@contextmanager
def _collected(errors: list[StorageError]) -> Iterator[None]:
    """Trouble of one tier is no trouble yet."""
    try:
        yield
    except StorageError as e:
        errors.append(e)
