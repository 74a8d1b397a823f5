"""The scheduler: the queue of waiting requests, the running requests, and the device slots that both hold.

It carries out what `admission.py` decides, on any cache that keeps the core's promises. It knows leases and numbers, no
tensor, text or thread, so the World (`tests/sim`) tests this very code.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.headroom import Demand
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.reference.engine.admission import OVERTAKEN, Running, Waiting, begins, youngest

T = TypeVar("T")

LOOK_AHEAD = 16  # the requests that wait longest, which are sorted by their pages in memory
STALL_S = 60.0  # how long a request waits for slots that are held by a copy that does not end
FROM_STORAGE = (Phase.PROBING, Phase.FETCHING)
STALLED = "a copy that does not end holds the device memory that this request needs"
NEVER = 1 << 62  # `admitted_seq` of a request that has never been admitted


class Cache(Protocol):
    """Holds and frees the pages of leases (see `PrefixCache`)."""

    def claim(self, lease: Lease) -> bool: ...
    def reserve(self, lease: Lease, upto: int) -> bool: ...
    def close(self, lease: Lease) -> None: ...


class Memory(Protocol):
    """Knows which pages are where, and what room there is (see `CacheScheduler`)."""

    def demand(self, asked: Sequence[tuple[Lease, int]]) -> Demand: ...
    def device_state(self) -> object: ...
    def making_room(self) -> bool: ...
    def copying(self) -> bool: ...
    def found(self, lease: Lease) -> int: ...
    def shape(self) -> int: ...
    def shared_prefix(self, ahead: Lease, behind: Lease) -> int: ...
    def mark(self, lease: Lease, boundary: int) -> bool: ...


class Task:
    """A request as the scheduler sees it: its lease, the tokens that it has computed and those that it may need."""

    def __init__(self, lease: Lease, prompt: int, max_new_tokens: int) -> None:
        """`prompt`: its tokens."""
        self.lease = lease
        self.prompt = self.prefill_until = prompt  # computed in chunks up to there, then token by token
        self.max_new_tokens = max_new_tokens
        self.reserved_pages = 0  # pages that it has slots for
        self.admitted_seq = NEVER  # its place in the order of first admissions
        self.stalled_s: float | None = None  # since when the slots that should be free are not
        self.rejected_at: object = None  # the state of the device when it got fewer slots than seemed available
        self.retried_at: object = None  # the state when it was retried all the same, as it needed fewer by then
        self.found = -1, 0  # the shape of the tree, and how many of its pages were in memory then
        self.shared_prefixes: dict[int, int] = {}  # by another lease's number: pages that both prompts share

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
        """Tokens of its prompt and of its answer so far: all of them are computed before the next is sampled."""
        return self.prompt + self.output_tokens

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_until


class WaitingQueue(list[T]):
    """A request with more pages in memory may go first; none is overtaken more than `OVERTAKEN` times."""

    def __init__(self) -> None:
        super().__init__()
        self._overtaken: dict[int, int] = {}  # by id: how often a later request went first

    def overtaken(self, request: T) -> int:
        return self._overtaken.get(id(request), 0)

    def rejoin(self, request: T) -> None:
        """A request that lost its turn goes to the front, behind others that have been overtaken as often as may be."""
        at = next((at for at, each in enumerate(self) if not self._due(each)), len(self))
        self.insert(at, request)
        self._overtaken[id(request)] = OVERTAKEN

    def leave(self, request: T) -> None:
        """A request leaves without having been admitted."""
        self.remove(request)
        self._overtaken.pop(id(request), None)

    def go(self, request: T, not_delayed: Iterable[T] = ()) -> None:
        """A request is admitted, which overtakes those before it, except those of `not_delayed`."""
        spared = {*map(id, not_delayed)}
        for each in self[: self.index(request)]:
            if id(each) not in spared:
                self._overtaken[id(each)] = self.overtaken(each) + 1
        self.leave(request)

    def order(self, found: Callable[[T], int]) -> list[T]:
        """All requests, first those overtaken as often as may be, then those with most pages in memory."""
        due = [each for each in self if self._due(each)]
        rest = [each for each in self if not self._due(each)] if due else self
        near = sorted(rest[:LOOK_AHEAD], key=found, reverse=True) if len(rest) > 1 else rest[:LOOK_AHEAD]
        return due + near + rest[LOOK_AHEAD:]

    def _due(self, request: T) -> bool:
        return self.overtaken(request) >= OVERTAKEN


Each = TypeVar("Each", bound=Task)


class Scheduler(Generic[Each]):
    """Admits requests and finds slots for those that run. A request in the queue holds nothing on the device."""

    def __init__(
        self,
        cache: Cache,
        memory: Memory,
        *,
        max_running: int,
        page_tokens: int,
        chunk_tokens: int,
        reopen: Callable[[Each], Lease],
        begin: Callable[[Each], None],
        stop: Callable[[Each], None],
        fail: Callable[[Each, str], None],
        clock: Callable[[], float],
    ) -> None:
        """`reopen` opens a new lease for a request that waits again, and sets its `prefill_until`. `begin` gets each
        request that runs from now on, `stop` each that is preempted, `fail` each for which no slots come free."""
        self._cache, self._memory, self.max_running = cache, memory, max_running
        self._page, self._chunk = page_tokens, chunk_tokens
        self._reopen, self._begin, self._stop, self._fail, self._clock = reopen, begin, stop, fail, clock
        self.waiting: WaitingQueue[Each] = WaitingQueue()
        self.loading: list[Each] = []  # admitted, waiting only for their own copies
        self.running: deque[Each] = deque()  # the first is prefilled first
        self.preempted = 0
        self._admitted = 0
        self._refused: object = None  # the input of the last decision that admitted none

    def join(self, task: Each) -> None:
        self.waiting.append(task)

    def leave(self, task: Each) -> None:
        """A request has ended, wherever it was."""
        if task in self.running:
            self.running.remove(task)
        elif task in self.loading:
            self.loading.remove(task)
        else:
            self.waiting.leave(task)

    # --- beginning

    def admit(self) -> None:
        """Admit all requests that may begin (`admission.py`); those that wait for copies run from a later turn."""
        for task in [*self.loading]:
            if task in self.loading:  # else it gave its slots back to one before it
                self._start(task)
        if self.running:
            for task in self.waiting:
                task.stalled_s = None
        reclaimed = False
        while True:
            while self._free_places() > 0 and self._admit_some():
                pass
            if not reclaimed and not self.running and not self.loading:  # once a turn: it may be fetched again
                reclaimed = True
                if self._reclaim():
                    continue
            late = [task for task in self.waiting if task.lease.ready]
            if not late:
                return
            for task in late:  # its pages came from storage, but it does not fit: it gives its slots to others
                self._wait_again(task)

    def _free_places(self) -> int:
        return self.max_running - len(self.running) - len(self.loading)

    def _admit_some(self) -> bool:
        """One round of decisions; whether it admitted a request, so that another round is worth it."""
        line = [*self.waiting]
        if not line:
            return False
        heads, state = self._heads(), self._state()
        asked = [(task.lease, self._pages(task.length)) for task in (*self.loading, *line)]
        available, all_needs = self._memory.demand(asked)
        for needs in all_needs[: len(self.loading)]:
            available = [slots - need for slots, need in zip(available, needs, strict=True)]
        wanted = all_needs[len(self.loading) :]
        growth = sum(self._grows(task) for task in (*self.running, *self.loading))
        if not any(
            all(need + growth <= slots for need, slots in zip(needs, available, strict=True)) for needs in wanted
        ):
            return False  # the usual case where many wait
        ahead = [lease.done for leases in heads.values() for lease in leases]
        phases = [(task.lease.number, task.lease.phase) for task in line]
        rejected = [self._is_rejected(task, state, needs) for task, needs in zip(line, wanted, strict=True)]
        seen = state, available, growth, wanted, self._memory.shape(), ahead, phases, rejected
        if seen == self._refused:
            return False
        running = [
            Running(task.reserved_pages or self._pages(task.length), self._turns(task), self._grows(task))
            for task in (*self.running, *self.loading)
        ]
        fetching = sum(task.lease.claimed and not task.lease.on_device for task in line)
        waiting = [
            Waiting(
                needs,
                self._turns(task),
                self.waiting.overtaken(task),
                self._grows(task),
                again or self._waits(task, heads, fetching),
                task.lease.phase in FROM_STORAGE and not (task.lease.phase is Phase.PROBING and task.lease.asked_again),
            )
            for task, needs, again in zip(line, wanted, rejected, strict=True)
        ]
        numbers = {id(task): at for at, task in enumerate(line)}
        order = [numbers[id(task)] for task in self.waiting.order(self._found)]
        turns = begins(self._free_places(), available, waiting, order, running)
        self._refused = None if turns else seen
        for number, (at, not_delayed) in enumerate(turns):
            task = line[at]
            if number and self._waits(task, heads, fetching):  # for one that was just admitted
                break
            self._admit_one(task, [line[other] for other in not_delayed])
            if task not in self.loading and task not in self.running:  # it waits for storage after all
                break
            heads.setdefault(self._head(task.lease), []).append(task.lease)
        # Decisions after a request that was not admitted had counted on its end: the next round makes them anew.
        return bool(turns)

    def _admit_one(self, task: Each, not_delayed: list[Each]) -> None:
        """Admit a request, unless its policy is to wait for storage all the same."""
        self._cache.claim(task.lease)
        if task.lease.on_device:
            self.waiting.go(task, not_delayed)
            self.loading.append(task)
            task.stalled_s = None
            self._start(task)

    def _start(self, task: Each) -> None:
        """Run a request, if its pages are on the device and there are slots for all of its prompt."""
        if not task.lease.on_device:  # its copies brought fewer pages than memory had, so it asks storage again
            self._requeue(task)
            return
        if not task.lease.ready:
            return
        if not self._take_slots(task):
            again, patient = task.stalled_s is not None, self._is_patient(task)
            if patient and self._memory.making_room():
                return
            if self.running:
                before, resumed = self._needs(task), task.lease.boundary
                self._requeue(task)
                after, resumes = self._needs(task), self._resumes_at(task)
                state = self._state(), after
                fewer = any(less < more for less, more in zip(after, before, strict=True))
                if task.retried_at != state and (fewer or resumes > resumed):
                    task.retried_at = state  # another request has published what it lacked
                else:
                    task.rejected_at = *state, resumes
            elif not patient:
                self._fail(task, STALLED)
            elif again:  # its own pins may hold what came to the device since it became ready
                self._wait_again(task)
                self._cache.claim(task.lease)
            return
        self.loading.remove(task)
        self.running.append(task)
        task.reserved_pages = self._pages(task.length)
        task.stalled_s = task.rejected_at = task.retried_at = None
        if task.admitted_seq == NEVER:
            self._admitted += 1
            task.admitted_seq = self._admitted
        self._begin(task)

    def _is_patient(self, task: Each) -> bool:
        """Whether a request waits on for slots that should be free; it waits from the first such question on."""
        task.stalled_s = self._clock() if task.stalled_s is None else task.stalled_s
        return self._clock() - task.stalled_s < STALL_S

    def _take_slots(self, task: Each) -> bool:
        pages = self._pages(task.length)
        if self._cache.reserve(task.lease, pages):
            return True
        if self.running or self._memory.making_room():
            return False
        self._release_others(task)  # slots have become fewer, and only waiting requests can give some back
        return self._cache.reserve(task.lease, pages)

    def _reclaim(self) -> bool:
        """Nothing runs: release the slots of other waiting requests for the first. Whether to decide again."""
        line = [task for task in self.waiting.order(self._found) if task.lease.phase not in FROM_STORAGE]
        if not line:
            return False
        first = line[0]
        if self._release_others(first) or first.rejected_at is not None:
            first.rejected_at = None
            return True
        if first.lease.holds:  # what came from storage for it may hold what it needs itself
            self._wait_again(first)
            return True
        if self._is_patient(first):
            return False
        self._fail(first, STALLED)
        return True

    def _release_others(self, task: Each) -> bool:
        """Release the slots of other waiting requests; whether there were any. An admitted request loses none to one
        admitted later, or two of them would take slots from each other for ever."""
        earlier = self.loading.index(task) + 1 if task in self.loading else 0
        loading = self.loading[earlier:]
        for other in loading:
            self._requeue(other)
        holders = [
            other for other in self.waiting if other is not task and (other.lease.on_device or other.lease.holds)
        ]
        for other in holders:
            self._wait_again(other)
        return bool(loading or holders)

    def _needs(self, task: Each) -> list[int]:
        return self._memory.demand([(task.lease, self._pages(task.length))]).needs[0]

    def _state(self) -> object:
        """What has to change, or else the request's needs, before a rejected request is tried again."""
        # Probes are not part of it: each try sends one, so two denied requests would retry each other for ever.
        return self._memory.device_state(), len(self.running), len(self.loading)

    def _is_rejected(self, task: Each, state: object, needs: list[int]) -> bool:
        """Whether a request got fewer slots than seemed available, and would again."""
        return task.rejected_at is not None and task.rejected_at == (state, needs, self._resumes_at(task))

    def _resumes_at(self, task: Each) -> int:
        """Where a request would resume: the windows and states there, which it would pin, may be what it lacked."""
        return self._memory.found(task.lease) if task.lease.reads else 0

    # --- what a request would find and need

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _grows(self, task: Each) -> bool:
        """Whether it may need another page later; its last token is never computed."""
        return self._pages(task.prompt + task.max_new_tokens - 1) > max(task.reserved_pages, self._pages(task.length))

    def _turns(self, task: Each) -> int:
        """After how many turns it has ended, if its answer is as long as it may be."""
        chunks = -(-max(0, task.prefill_until - task.computed) // self._chunk)
        replayed = task.length - max(task.prefill_until, task.computed)  # one token a turn
        return chunks + max(0, replayed) + task.max_new_tokens - task.output_tokens

    def _found(self, task: Each) -> int:
        """How many pages a waiting request would find in memory."""
        lease, shape = task.lease, self._memory.shape()
        if not lease.reads:
            return 0
        if task.found[0] != shape:
            task.found = shape, self._memory.found(lease)
        return max(lease.promised, task.found[1])

    def _waits(self, task: Each, heads: Mapping[tuple[bytes, bytes], list[Lease]], fetching: int) -> bool:
        """Whether a request waits for a copy, or for pages that a prompt before it is about to publish."""
        lease = task.lease
        if lease.claimed and not lease.on_device:
            return True
        if not lease.claimed and lease.phase is not Phase.QUEUED and fetching >= self.max_running:
            return True
        return any(self._is_behind(task, other) for other in heads.get(self._head(lease), ()))

    def _heads(self) -> dict[tuple[bytes, bytes], list[Lease]]:
        """The leases whose prompts are being computed, by root and first page."""
        heads: dict[tuple[bytes, bytes], list[Lease]] = {}
        for task in (*self.running, *self.loading):
            if task in self.loading or task.prefilling:
                heads.setdefault(self._head(task.lease), []).append(task.lease)
        return heads

    def _head(self, lease: Lease) -> tuple[bytes, bytes]:
        return lease.root, lease.tokens[: self._page * TOKEN_BYTES]

    def _is_behind(self, task: Each, other: Lease) -> bool:
        """Whether the other lease's prompt will publish more of a waiting request's prefix than memory has now.

        That ends when it has published so far or has closed, so no request waits for ever.
        """
        if other.number not in task.shared_prefixes:
            task.shared_prefixes[other.number] = self._memory.shared_prefix(other, task.lease)
        shared_prefix = task.shared_prefixes[other.number]
        if shared_prefix <= other.done or shared_prefix <= self._memory.found(task.lease):
            return False
        return not other.ready or self._memory.mark(other, shared_prefix)

    # --- slots for running requests

    def reserved(self, task: Each) -> bool:
        """Whether a running request has a slot for one more token, if need be after preempting others."""
        upto = task.computed // self._page + 1
        while task.reserved_pages < upto:
            if self._cache.reserve(task.lease, upto):
                task.reserved_pages, task.stalled_s = upto, None
                break
            patient = self._is_patient(task)
            if patient and self._memory.making_room():
                return False
            holders = [*reversed(self.loading), *self.running]
            if len(holders) == 1:  # only waiting requests and copies can give some back
                if self._release_others(task):
                    continue
                if patient and self._memory.copying():
                    return False
            last = holders[youngest([each.admitted_seq for each in holders])]
            self.preempt(last)
            if last is task:
                return False
        return True

    def preempt(self, task: Each) -> None:
        """A request gives its slots back, and resumes later from its cached pages."""
        if task in self.running:
            self.running.remove(task)
            self.preempted += 1
            self._stop(task)
            self._wait_again(task)
            self.waiting.rejoin(task)
        else:
            self._requeue(task)

    def _requeue(self, task: Each) -> None:
        self.loading.remove(task)
        self._wait_again(task)
        self.waiting.rejoin(task)

    def _wait_again(self, task: Each) -> None:
        """Wait again, with a new lease."""
        self._cache.close(task.lease)
        task.reserved_pages, task.found = 0, (-1, 0)
        task.shared_prefixes.clear()
        task.lease = self._reopen(task)


def within(budget: int, pieces: Iterable[tuple[T, int]]) -> Iterator[T]:
    """The first pieces of work (what, tokens) that fit into a budget together, and always the first one."""
    first = True
    for what, tokens in pieces:
        if tokens > budget and not first:
            return
        yield what
        first, budget = False, budget - tokens
