"""The scheduler: the line of those that wait, those that run, and the room that both have on the device.

It carries out what `admission.py` decides, on any cache that keeps the core's promises. It knows leases and numbers; it
knows no tensor, no text and no thread, so the world of `kvarve.testing` hunts in this very code.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from kvarve.core.cache import Core
from kvarve.core.copies import PROBE
from kvarve.core.headroom import Headroom, copying, making_room
from kvarve.core.lease import Lease, Phase
from kvarve.engine.admission import OVERTAKEN, Running, Waiting, begins, gives_way

T = TypeVar("T")

LOOK_AHEAD = 16  # so many of those who wait longest are looked at for what they would find in memory
STALL_S = 60.0  # how long a request waits for room that a copy holds which does not end
FROM_STORAGE = (Phase.PROBING, Phase.FETCHING)
STALLED = "a copy that does not end holds the device memory that this request needs"
NEVER = 1 << 62  # when a request began that has not begun


class Cache(Protocol):
    """What the scheduler needs of a cache (`runtime.PrefixCache`)."""

    @property
    def core(self) -> Core: ...
    def claim(self, lease: Lease) -> bool: ...
    def seat(self, lease: Lease, upto: int) -> bool: ...
    def mark(self, lease: Lease, boundary: int) -> bool: ...
    def close(self, lease: Lease) -> None: ...


class Task:
    """A request as far as it is scheduled: its lease, and how much it has computed and may still want."""

    def __init__(self, lease: Lease, prompt: int, most: int) -> None:
        """`prompt`: its tokens; `most`: how many an answer may have."""
        self.lease = lease
        self.prompt = self.prefill_until = prompt  # up to there it is computed in chunks, then token by token
        self.most = most
        self.seats = 0  # pages that it has room for
        self.admitted_seq = NEVER  # counts those that began before it did so first
        self.stalled_s: float | None = None  # since when it has not found the room that should be there
        self.denied: object = None  # how things stood when it found less room than there seemed to be
        self.retried: object = None  # how they stood when it was tried again all the same, since it needed less by then
        self.found = -1, 0  # the shape of the tree, and how many of its pages were in memory then
        self.partings: dict[int, int] = {}  # by another's lease: where the two prompts part

    @property
    def output_tokens(self) -> int:
        """Tokens of its answer so far."""
        raise NotImplementedError

    @property
    def computed(self) -> int:
        """Tokens that its state knows, while it runs."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Tokens of its prompt and of what it has said: all of them are computed before it says more."""
        return self.prompt + self.output_tokens

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_until

    @property
    def left(self) -> int:
        """Tokens that it may still say."""
        return self.most - self.output_tokens


class Line(Generic[T]):
    """Those who wait. Who finds more in memory may go first, but nobody is overtaken for ever."""

    def __init__(self) -> None:
        self._waiting: list[T] = []
        self._overtaken: dict[int, int] = {}  # by id: how often somebody who came later went first

    def __iter__(self) -> Iterator[T]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def overtaken(self, who: T) -> int:
        return self._overtaken.get(id(who), 0)

    def join(self, who: T) -> None:
        self._waiting.append(who)

    def rejoin(self, who: T) -> None:
        """Who had its turn already and lost it comes before all others, but for those who lost theirs before."""
        at = next((at for at, each in enumerate(self._waiting) if not self._due(each)), len(self._waiting))
        self._waiting.insert(at, who)
        self._overtaken[id(who)] = OVERTAKEN

    def leave(self, who: T) -> None:
        """Somebody goes away without having had its turn."""
        self._waiting.remove(who)
        self._overtaken.pop(id(who), None)

    def go(self, who: T, freely: Iterable[T] = ()) -> None:
        """Somebody's turn has come; those of `freely` are not held up by it."""
        spared = {*map(id, freely)}
        for each in self._waiting[: self._waiting.index(who)]:
            if id(each) not in spared:
                self._overtaken[id(each)] = self.overtaken(each) + 1
        self.leave(who)

    def order(self, found: Callable[[T], int]) -> list[T]:
        """All who wait, whose turn it is first: who has been overtaken often enough, then who has most in memory."""
        due = [each for each in self._waiting if self._due(each)]
        rest = [each for each in self._waiting if not self._due(each)] if due else self._waiting
        near = sorted(rest[:LOOK_AHEAD], key=found, reverse=True) if len(rest) > 1 else rest[:LOOK_AHEAD]
        return due + near + rest[LOOK_AHEAD:]

    def _due(self, who: T) -> bool:
        return self.overtaken(who) >= OVERTAKEN


Each = TypeVar("Each", bound=Task)


class Scheduler(Generic[Each]):
    """Lets requests begin and makes room for those that run. What waits in the line holds nothing on the device."""

    def __init__(
        self,
        cache: Cache,
        *,
        max_running: int,
        page_tokens: int,
        chunk_tokens: int,
        again: Callable[[Each], Lease],
        begin: Callable[[Each], None],
        stop: Callable[[Each], None],
        fail: Callable[[Each, str], None],
        clock: Callable[[], float],
    ) -> None:
        """`again` opens a new lease for a request that goes on later, and says what its goal is then. `begin` is told
        of a request that runs from now on, `stop` of one that is preempted, `fail` of one that finds no room at all."""
        self.cache, self.max_running = cache, max_running
        self._page, self._chunk = page_tokens, chunk_tokens
        self._again, self._begin, self._stop, self._fail, self._clock = again, begin, stop, fail, clock
        self.waiting: Line[Each] = Line()
        self.coming: list[Each] = []  # they have a place and room, and wait only for their own copies
        self.running: deque[Each] = deque()  # the first is prefilled first
        self.preempted = 0
        self._admitted = 0
        self._vain: object = None  # what there was to decide when nothing could begin

    def join(self, task: Each) -> None:
        self.waiting.join(task)

    def leave(self, task: Each) -> None:
        """A request has ended, wherever it was."""
        if task in self.running:
            self.running.remove(task)
        elif task in self.coming:
            self.coming.remove(task)
        else:
            self.waiting.leave(task)

    # --- beginning

    def admit(self) -> None:
        """Let all begin that may (`admission.py`); those whose pages have to be brought first begin in a later turn."""
        for task in [*self.coming]:
            if task in self.coming:  # else it has made way for one before it
                self._seat(task)
        if self.running:
            for task in self.waiting:
                task.stalled_s = None
        way_made = False
        while True:
            while self._places() > 0 and self._admit_some():
                pass
            if not way_made and not self.running and not self.coming:  # once a turn: what is given up may come again
                way_made = True
                if self._make_way():
                    continue
            late = [task for task in self.waiting if task.lease.ready]
            if not late:
                return
            for task in late:  # what storage sent for it has come, but it does not fit: it gives room to others
                self._renew(task)

    def _places(self) -> int:
        return self.max_running - len(self.running) - len(self.coming)

    def _admit_some(self) -> bool:
        """One round of decisions; whether there may be others now."""
        line = [*self.waiting]
        if not line:
            return False
        heads, state = self._heads(), self._state()
        core = self.cache.core
        headroom = Headroom(core)
        loose = [*headroom.loose]
        for task in self.coming:
            needs = headroom.needs(task.lease, self._pages(task.length))
            loose = [slots - need for slots, need in zip(loose, needs, strict=True)]
        wanted = [headroom.needs(task.lease, self._pages(task.length)) for task in line]
        growth = sum(self._grows(task) for task in (*self.running, *self.coming))
        if not any(all(need + growth <= slots for need, slots in zip(needs, loose, strict=True)) for needs in wanted):
            return False  # the usual case where many wait
        ahead = [lease.done for leases in heads.values() for lease in leases]
        phases = [(task.lease.number, task.lease.phase) for task in line]
        seen = state, loose, growth, wanted, core.slot_pools.shape, ahead, phases
        if seen == self._vain:
            return False
        running = [
            Running(task.seats or self._pages(task.length), self._turns(task), self._grows(task))
            for task in (*self.running, *self.coming)
        ]
        fetching = sum(task.lease.claimed and not task.lease.on_device for task in line)
        waiting = [
            Waiting(
                needs,
                self._turns(task),
                self.waiting.overtaken(task),
                self._grows(task),
                task.denied == (state, needs) or self._waits(task, heads, fetching),
                task.lease.phase in FROM_STORAGE,
            )
            for task, needs in zip(line, wanted, strict=True)
        ]
        numbers = {id(task): at for at, task in enumerate(line)}
        order = [numbers[id(task)] for task in self.waiting.order(self._found)]
        turns = begins(self._places(), loose, waiting, order, running)
        self._vain = None if turns else seen
        for number, (at, freely) in enumerate(turns):
            task = line[at]
            if number and self._waits(task, heads, fetching):  # for one that has just begun
                continue
            self._give_place(task, [line[other] for other in freely])
            if task in self.coming or task in self.running:
                heads.setdefault(self._head(task.lease), []).append(task.lease)
        return bool(turns)

    def _give_place(self, task: Each, freely: list[Each]) -> None:
        """The turn of a request has come, unless it is patient and waits for storage all the same."""
        self.cache.claim(task.lease)
        if task.lease.on_device:
            self.waiting.go(task, freely)
            self.coming.append(task)
            task.stalled_s = None
            self._seat(task)

    def _seat(self, task: Each) -> None:
        """Let a request run, if its pages are here and there is room for all of its prompt."""
        if not task.lease.on_device:  # its copies have brought less than memory promised, so it asks storage again
            self._send_back(task)
            return
        if not task.lease.ready:
            return
        if not self._takes_seats(task):
            again = task.stalled_s is not None
            task.stalled_s = self._clock() if task.stalled_s is None else task.stalled_s
            patient = self._clock() - task.stalled_s < STALL_S
            if patient and making_room(self.cache.core):
                return
            if self.running:
                before = self._needs(task)
                self._send_back(task)
                after = self._needs(task)
                now = self._state(), after
                if task.retried != now and any(less < more for less, more in zip(after, before, strict=True)):
                    task.retried = now  # others have published what it lacked
                else:
                    task.denied = now
            elif not patient:
                self._fail(task, STALLED)
            elif again:  # it may hold itself what has come to the device since it became ready
                self._renew(task)
                self.cache.claim(task.lease)
            return
        self.coming.remove(task)
        self.running.append(task)
        task.seats, task.stalled_s, task.denied, task.retried = self._pages(task.length), None, None, None
        if task.admitted_seq == NEVER:
            self._admitted += 1
            task.admitted_seq = self._admitted
        self._begin(task)

    def _takes_seats(self, task: Each) -> bool:
        pages = self._pages(task.length)
        if self.cache.seat(task.lease, pages):
            return True
        if self.running or making_room(self.cache.core):
            return False
        self._clear(task)  # there is less room than there was, and only those that wait can give some back
        return self.cache.seat(task.lease, pages)

    def _make_way(self) -> bool:
        """Nothing runs, and the first in line does not fit: what others hold that wait is given back for it. Whether
        there is something new to decide."""
        line = [task for task in self.waiting.order(self._found) if task.lease.phase not in FROM_STORAGE]
        if not line:
            return False
        first = line[0]
        if self._clear(first) or first.denied is not None:
            first.denied = None
            return True
        first.stalled_s = self._clock() if first.stalled_s is None else first.stalled_s
        stalled = self._clock() - first.stalled_s >= STALL_S
        if stalled:
            self._fail(first, STALLED)
        return stalled

    def _clear(self, task: Each) -> bool:
        """Others that wait give back what they hold; whether there were any. A request that has its place keeps it from
        those whose turn came later, or two of them would take it from each other for ever."""
        earlier = self.coming.index(task) + 1 if task in self.coming else 0
        coming = self.coming[earlier:]
        for other in coming:
            self._send_back(other)
        holders = [
            other for other in self.waiting if other is not task and (other.lease.on_device or other.lease.holds)
        ]
        for other in holders:
            self._renew(other)
        return bool(coming or holders)

    def _needs(self, task: Each) -> list[int]:
        return Headroom(self.cache.core).needs(task.lease, self._pages(task.length))

    def _state(self) -> object:
        """What has to change, or what the request needs, before one that found no room is tried again."""
        core = self.cache.core
        free = [len(core.slot_pools.free[pool]) for pool in core.slot_pools.chains]
        # Probes hold no slots, and each try sends one: two denied requests would retry each other for ever.
        copies = frozenset(number for number, op in core.copies.ops.items() if op.edge != PROBE)
        return free, copies, len(self.running), len(self.coming)

    # --- what a request would find and want

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _grows(self, task: Each) -> bool:
        """Whether it may come to need another page; of its last token nothing is computed."""
        return self._pages(task.prompt + task.most - 1) > max(task.seats, self._pages(task.length))

    def _turns(self, task: Each) -> int:
        """After how many turns it has ended, if it says all that it may."""
        chunks = -(-max(0, task.prefill_until - task.computed) // self._chunk)
        again = task.length - max(task.prefill_until, task.computed)  # said once more, token by token
        return chunks + max(0, again) + task.most - task.output_tokens

    def _found(self, task: Each) -> int:
        """How many pages a waiting request would find in memory."""
        lease, shape = task.lease, self.cache.core.slot_pools.shape
        if not lease.reads:
            return 0
        if task.found[0] != shape:
            task.found = shape, self.cache.core.lookup(lease.root, lease.tokens).memory
        return max(lease.promised, task.found[1])

    def _waits(self, task: Each, heads: Mapping[tuple[bytes, bytes], list[Lease]], fetching: int) -> bool:
        """Whether a request waits for a copy, or for what a prompt before it is about to publish."""
        lease = task.lease
        if lease.claimed and not lease.on_device:
            return True
        if not lease.claimed and lease.phase is not Phase.QUEUED and fetching >= self.max_running:
            return True
        return any(self._is_behind(task, other) for other in heads.get(self._head(lease), ()))

    def _heads(self) -> dict[tuple[bytes, bytes], list[Lease]]:
        """The prompts that are being computed, by how they begin."""
        heads: dict[tuple[bytes, bytes], list[Lease]] = {}
        for task in (*self.running, *self.coming):
            if task in self.coming or task.prefilling:
                heads.setdefault(self._head(task.lease), []).append(task.lease)
        return heads

    def _head(self, lease: Lease) -> tuple[bytes, bytes]:
        return lease.root, lease.tokens[: self.cache.core.width]

    def _is_behind(self, task: Each, other: Lease) -> bool:
        """Whether another computes more of a waiting request's prefix than it would find now.

        It ends when that one has come so far, or goes away; so no request waits for ever.
        """
        core = self.cache.core
        if other.number not in task.partings:
            task.partings[other.number] = core.parting(other, task.lease)
        parting = task.partings[other.number]
        if parting <= other.done or parting <= core.lookup(task.lease.root, task.lease.tokens).memory:
            return False
        return not other.ready or self.cache.mark(other, parting)

    # --- room for those that run

    def seated(self, task: Each) -> bool:
        """Whether a running request has room for one more token, after others have given way for it."""
        upto = task.computed // self._page + 1
        while task.seats < upto:
            if self.cache.seat(task.lease, upto):
                task.seats, task.stalled_s = upto, None
                break
            task.stalled_s = self._clock() if task.stalled_s is None else task.stalled_s
            patient = self._clock() - task.stalled_s < STALL_S
            if patient and making_room(self.cache.core):
                return False
            holders = [*reversed(self.coming), *self.running]
            if len(holders) == 1:  # only those that wait can give some back, and copies
                if self._clear(task):
                    continue
                if patient and copying(self.cache.core):
                    return False
            last = holders[gives_way([each.admitted_seq for each in holders])]
            self.preempt(last)
            if last is task:
                return False
        return True

    def preempt(self, task: Each) -> None:
        """A request gives its room back, and goes on later from what is kept of it."""
        if task in self.running:
            self.running.remove(task)
            self.preempted += 1
            self._stop(task)
            self._renew(task)
            self.waiting.rejoin(task)
        else:
            self._send_back(task)

    def _send_back(self, task: Each) -> None:
        self.coming.remove(task)
        self._renew(task)
        self.waiting.rejoin(task)

    def _renew(self, task: Each) -> None:
        """Begin to wait again."""
        self.cache.close(task.lease)
        task.seats, task.found = 0, (-1, 0)
        task.partings.clear()
        task.lease = self._again(task)


def within(budget: int, pieces: Iterable[tuple[T, int]]) -> Iterator[T]:
    """The first pieces of work (what, tokens) that fit into a budget together, and at least one."""
    first = True
    for what, tokens in pieces:
        if tokens > budget and not first:
            return
        yield what
        first, budget = False, budget - tokens
