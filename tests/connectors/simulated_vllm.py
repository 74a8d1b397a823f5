"""A scheduler and a worker as vLLM has them, as far as a connector can tell, in memory and without a model.

Honest about what is awkward there: one pool of blocks for all groups, with block 0 for nothing; blocks are free for
others as soon as no reference is left; a request whose load failed is asked about again at once; a request that was
told to ask again is asked about in every step; the blocks of an aborted request that loads stay taken until its load
has ended; a state's block leaves the row after the step that offered it; rows of windows lose their first blocks.

What a block holds is a text that says what it should be, and which weights it and its prefix were computed with, so
that one wrong page is seen at once. The engine's own cache does not look at weights, as vLLM's does not.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvarve.cache.messages import Order, Report
from kvarve.connectors.vllm.block_plan import BlockPlanner, Group, Offer, Plan, Scheduled
from kvarve.core.copies.effects import Copy, Ended, Hurry, Probe
from kvarve.pages.blocks import NULL_BLOCK, blocks_of
from kvarve.pages.boundaries import legal, members, needed, of, shared
from kvarve.pages.pools import Tier

FREE, FLYING, ROTTEN = "free", "flying", "rotten"
BY = " by "


class Status(Enum):
    WAITING = "waiting"
    REMOTE = "waiting for its load"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class SimulatedRequest:
    request_id: str
    tokens: list[int]
    answer: int  # tokens to decode
    hash_tokens: int
    salt: str = ""
    computed: int = 0
    status: Status = Status.WAITING
    rows: list[list[int]] = field(default_factory=list)
    asks: int = 0
    external: list[int] = field(default_factory=list)  # tokens of each load that began
    local: int = 0  # those of them that the engine had
    by: frozenset[int] = frozenset()  # the weights that it has been computed with, and
    asked_by: int = 0  # those when it was asked about
    preempted: int = 0

    def __post_init__(self) -> None:
        self.total = len(self.tokens) + self.answer
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        while (len(self._hashes) + 1) * self.hash_tokens <= len(self.tokens):
            self._hashes.append(self.named((len(self._hashes) + 1) * self.hash_tokens))
        return self._hashes

    def named(self, tokens: int) -> bytes:
        return hashlib.sha256(f"{self.salt} {self.tokens[:tokens]}".encode()).digest()


class SimulatedWorker:
    """The host, the storage and the copies in flight of one rank. A copy reads its source when it ends."""

    def __init__(self, device: list[str], groups: Sequence[Group], page_tokens: int, storage: dict | None) -> None:
        self.device, self.groups, self.page_tokens = device, groups, page_tokens
        self.host: dict[tuple[int, int], tuple[bytes, object]] = {}
        self.storage = storage
        self.hangs = False  # the storage
        self.flying: dict[int, Order] = {}
        self.sources: dict[int, list[object]] = {}
        self.spoil: Callable[[Copy], bool] = lambda copy: False  # whether a copy loses a page
        self.seen: Counter[str] = Counter()

    def do(self, plan: Plan) -> None:
        for order in plan.orders:
            if isinstance(order, Hurry):
                continue
            assert isinstance(order, Copy | Probe)
            self.flying[order.op] = order
            if isinstance(order, Copy):
                self.sources[order.op] = [self._read(order, page) for page in order.pages]
                if order.target is Tier.DEVICE:
                    for page in order.pages:
                        for block in self._blocks(page.pool, page.target):
                            assert self.device[block] != FREE, "a load goes to blocks of a request"

    def end(self, op: int) -> Ended:
        order = self.flying.pop(op)
        if isinstance(order, Probe):
            there = [self.storage is not None and (page.pool, page.key) in self.storage for page in order.pages]
            return Ended(op, sum(here << at for at, here in enumerate(there)))
        assert isinstance(order, Copy)
        spoiled = self.spoil(order)
        good = bad = 0
        for at, (page, before) in enumerate(zip(order.pages, self.sources.pop(op), strict=True)):
            content = self._read(order, page)
            if order.source is Tier.DEVICE:
                assert content == before, "the blocks of a page keep their bytes until the copy has ended"
                content = (page.key, content)
            if spoiled and not at:
                content = (page.key, ROTTEN)
            if content is None or content[0] != page.key:  # type: ignore[index]
                continue
            if content[1] == ROTTEN:  # type: ignore[index]
                bad |= 1 << at
                if order.source is Tier.STORAGE and self.storage is not None:
                    self.storage.pop((page.pool, page.key), None)
                continue
            good |= 1 << at
            self._write(order, page, content)
        self.seen[f"{order.source.name.lower()} to {order.target.name.lower()}"] += good.bit_count()
        return Ended(op, good, bad)

    def due(self) -> list[int]:
        """The copies that can end."""
        return [
            op
            for op, order in self.flying.items()
            if not self.hangs or (isinstance(order, Copy) and Tier.STORAGE not in (order.source, order.target))
        ]

    def _blocks(self, pool: int, handle: int) -> list[int]:
        pieces = self.groups[pool].blocks(self.page_tokens)
        return [block for block in blocks_of(handle, pieces) if block != NULL_BLOCK]

    def _read(self, copy: Copy, page) -> object:  # type: ignore[no-untyped-def]
        if copy.source is Tier.DEVICE:
            return tuple(self.device[block] for block in self._blocks(page.pool, page.source))
        if copy.source is Tier.HOST:
            return self.host.get((page.pool, page.source))
        return (self.storage or {}).get((page.pool, page.key))

    def _write(self, copy: Copy, page, content) -> None:  # type: ignore[no-untyped-def]
        if copy.target is Tier.DEVICE:
            pieces = self.groups[page.pool].blocks(self.page_tokens)
            for block, text in zip(blocks_of(page.target, pieces), content[1], strict=True):
                if block != NULL_BLOCK:
                    self.device[block] = text
        elif copy.target is Tier.HOST:
            self.host[page.pool, page.target] = content
        else:
            assert self.storage is not None
            self.storage.setdefault((page.pool, page.key), content)


class SimulatedVllm:
    """`step` schedules, runs the worker, and applies what it reports."""

    def __init__(
        self,
        planner: BlockPlanner,
        groups: Sequence[Group],
        page_tokens: int,
        *,
        blocks: int = 64,
        hash_tokens: int = 0,
        chunk: int = 64,
        running: int = 4,
        storage: dict | None = None,
    ) -> None:
        self.planner, self.groups, self.page = planner, groups, page_tokens
        self.hash_tokens = hash_tokens or min(group.block_tokens for group in groups)
        self.chunk, self.most = chunk, running
        self.device = [FREE] * blocks
        self.references = [0] * blocks
        self.references[NULL_BLOCK] = 1
        self.cached: dict[tuple[int, bytes], int] = {}  # by group and hash: the block, oldest first
        self.worker = SimulatedWorker(self.device, groups, page_tokens, storage)
        self.requests: dict[str, SimulatedRequest] = {}
        self.waiting: list[SimulatedRequest] = []
        self.running: list[SimulatedRequest] = []
        self._received: dict[str, bool] = {}  # loads that have ended: whether all of it came
        self._void: set[str] = set()  # requests whose loads are of no use when they end
        self.reads, self.knows = True, True  # whether requests may hit kvarve's cache; and what computes them
        self.weights, self.stale = 0, False  # and whether the engine's own cache may have pages of others
        self.now = 0.0
        self.choose: Callable[[list[int]], list[int]] = lambda due: due  # which copies end in a step
        self.seen: Counter[str] = Counter()

    def add(self, name: str, tokens: Sequence[int], answer: int = 4, salt: str = "") -> SimulatedRequest:
        request = SimulatedRequest(name, [*tokens], answer, self.hash_tokens, salt)
        self.requests[name] = request
        self.waiting.append(request)
        return request

    def run(self, steps: int = 2000) -> None:
        """Step until no request is left, and no copy."""
        for _ in range(steps):
            if not self.requests and not (self.planner.busy() and not self.worker.hangs):
                return
            self.step()
        left = [(each.request_id, each.status.value, each.asks) for each in self.requests.values()]
        raise AssertionError(f"requests hang: {left}")

    def step(self) -> None:
        self.now += 0.25
        scheduled, offers = self._schedule()
        plan = self.planner.plan(scheduled, offers, self.now)
        assert all(self.references[block] for block in plan.held), "what is held is still the request's"
        for block in plan.held:
            self.references[block] += 1
        self._release(plan.freed)
        for name, part in scheduled.items():
            self._forward(self.requests[name], part)
        self.worker.do(plan)
        landed = self.planner.ended(Report([*map(self.worker.end, self.choose(self.worker.due()))]), self.now)
        self._release(landed.freed)
        received = {name: name not in landed.failed | self._void for name in landed.received}
        self._void -= landed.received
        for name, good in received.items():
            request = self.requests[name]  # as vLLM asserts
            if request.status is Status.REMOTE:
                self._received[name] = good
            else:
                assert request.status is Status.FINISHED
                self._free(request)
                del self.requests[name]
        for name in scheduled:
            if name in self.requests:
                self._advance(self.requests[name])

    def abort(self, name: str) -> None:
        request = self.requests[name]
        loading = request.status is Status.REMOTE and name not in self._received
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._finish(request, keep=loading)
        self.seen["aborted"] += 1

    def preempt(self, request: SimulatedRequest) -> None:
        self.running.remove(request)
        self._free(request)
        request.computed, request.status = 0, Status.WAITING
        request.preempted += 1
        self.waiting.insert(0, request)
        self.seen["preempted"] += 1

    def reset(self) -> bool:
        """Forget what is cached; False if blocks are in use, as in vLLM."""
        if any(self.references[1:]):
            return False
        for block in self.cached.values():
            self.device[block] = FREE
        self.cached.clear()
        self.stale = False
        return True

    def change(self) -> None:
        """Other weights, and the engine forgets its cache if it can."""
        self.weights += 1
        for name in self.planner.loaded():
            if name in self._received:
                self._received[name] = False
            else:
                self._void.add(name)
        self.stale = not self.reset()
        self.planner.reset(str(self.weights))

    def evict(self, many: int = 1 << 20) -> None:
        for page in [*self.cached]:
            if many and not self.references[self.cached[page]]:
                self.device[self.cached.pop(page)] = FREE
                many -= 1

    # --- scheduling

    def _schedule(self) -> tuple[dict[str, Scheduled], dict[str, list[Offer]]]:
        scheduled: dict[str, Scheduled] = {}
        offers: dict[str, list[Offer]] = {}
        preempted = self.seen["preempted"]
        for request in [*self.running]:
            while request in self.running and not self._take(request, scheduled, offers):
                victim = self.running[-1]
                scheduled.pop(victim.request_id, None)
                offers.pop(victim.request_id, None)
                self.preempt(victim)
                if victim is request:
                    break
        for request in sorted(self.waiting, key=lambda each: not each.rows):  # first those that hold blocks
            if len(self.running) >= self.most or self.seen["preempted"] > preempted:
                break
            if request.status is Status.REMOTE and not self._promote(request):
                continue
            if not request.computed:
                local, rows = self._local(request)
                request.asks += 1
                assert request.asks < 1000, "no request is asked about for ever"
                salt = "" if self.knows and not (self.stale and local) else None
                external = self.planner.ask(request, local, self.now, self.reads, lambda salt=salt: salt)
                if external is None:
                    continue
                full = self._room(request, local + external, rows, local)
                if full is None:
                    break
                request.rows, request.local, request.by, request.asked_by = full, local, frozenset(), self.weights
                self.planner.allocated(request, request.rows, external)
                if external:
                    assert local + external < request.num_tokens and not (local + external) % self.page
                    request.computed, request.status = local + external, Status.REMOTE
                    request.external.append(external)
                    self.planner.sources(request.request_id)
                    continue
                request.computed = local
                self._check(request)
            if not self._take(request, scheduled, offers):
                self._free(request)
                request.computed = 0
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.status = Status.RUNNING
        return scheduled, offers

    def _promote(self, request: SimulatedRequest) -> bool:
        if request.request_id not in self._received:
            return False
        good = self._received.pop(request.request_id)
        request.status = Status.WAITING
        if good:
            self._cache(request)
            self._check(request)
            self.planner.allocated(request, request.rows, 0)
        else:
            self.seen["failed loads"] += 1
            self._free(request)
            request.computed = 0
        return True

    def _local(self, request: SimulatedRequest) -> tuple[int, list[dict[int, int]]]:
        """The engine's own prefix in tokens, and by group the blocks that it reads, by position."""
        limit = (request.num_tokens - 1) // self.page
        sets, found = [], []
        for at, group in enumerate(self.groups):
            here: dict[int, int] = {}
            for block in range(limit * self.page // group.block_tokens):
                name = (at, request.named((block + 1) * group.block_tokens))
                if name in self.cached:
                    here[block] = self.cached[name]
            per = self.page // group.block_tokens
            pages = of(page for page in range(limit) if self._whole(group, here, page, per))
            sets.append(legal(pages, group.lookback, limit))
            found.append(here)
        boundary = shared(sets, limit).bit_length() - 1
        rows: list[dict[int, int]] = []
        for group, here in zip(self.groups, found, strict=True):
            rows.append({block: here[block] for block in self._read(group, boundary * self.page)})
        return boundary * self.page, rows

    def _read(self, group: Group, tokens: int) -> Iterator[int]:
        """The blocks, by position, that a request reads which resumes after so many tokens."""
        per = self.page // group.block_tokens
        for page in members(needed(tokens // self.page, group.lookback)):
            yield from [(page + 1) * per - 1] if group.offered else range(page * per, (page + 1) * per)

    def _whole(self, group: Group, here: dict[int, int], page: int, per: int) -> bool:
        return (page + 1) * per - 1 in here if group.offered else all(page * per + i in here for i in range(per))

    def _room(
        self, request: SimulatedRequest, tokens: int, rows: list[dict[int, int]], local: int
    ) -> list[list[int]] | None:
        """Rows for the first `tokens` tokens, of which the engine has the blocks in `rows`; None: too few are free."""
        full: list[list[int]] = []
        missing = []
        for at, group in enumerate(self.groups):
            row = [NULL_BLOCK] * -(-tokens // group.block_tokens)
            for block, number in rows[at].items():
                row[block] = number
            if tokens > local:
                missing += [(at, block) for block in self._read(group, tokens) if row[block] == NULL_BLOCK]
            full.append(row)
        for row in full:
            for number in row:
                self._hold(number)
        blocks = self._blocks(len(missing))
        if blocks is None:
            for row in full:
                self._release([number for number in row if number])
            return None
        for (at, block), number in zip(missing, blocks, strict=True):
            full[at][block] = number
            self.device[number] = "being loaded"
        return full

    def _take(self, request: SimulatedRequest, scheduled: dict[str, Scheduled], offers: dict[str, list[Offer]]) -> bool:
        """Schedule a request's next tokens, with blocks for them."""
        start, stop = request.computed, self._end(request)
        wanted: list[tuple[int, int]] = []
        for at, group in enumerate(self.groups):
            row = request.rows[at]
            ends = -(-stop // group.block_tokens)
            first = len(row)
            if group.offered:
                first = ends if start % group.block_tokens else ends - 1
            new = range(first, ends)
            wanted += [(at, block) for block in new]
        blocks = self._blocks(len(wanted))
        if blocks is None:
            return False
        gone: list[int] = []
        for at, group in enumerate(self.groups):
            row = request.rows[at]
            row += [NULL_BLOCK] * (-(-stop // group.block_tokens) - len(row))
            if group.lookback is not None and not group.offered:
                first = max(0, start - (group.lookback * self.page)) // group.block_tokens
                for block in range(first):  # the window has passed them
                    gone.append(row[block])
                    row[block] = NULL_BLOCK
        for (at, block), number in zip(wanted, blocks, strict=True):
            group = self.groups[at]
            row = request.rows[at]
            if group.offered:
                for before in range(block):
                    gone.append(row[before])
                    row[before] = NULL_BLOCK
            row[block] = number
            self.device[number] = "being computed"
        self._release([number for number in gone if number])
        name = request.request_id
        scheduled[name] = Scheduled(start, stop - start, [[*row] for row in request.rows])
        if stop % self.page == 0:
            offered = [
                Offer(group.number, request.rows[at][-1], stop) for at, group in enumerate(self.groups) if group.offered
            ]
            if offered:
                offers[name] = offered
        return True

    def _forward(self, request: SimulatedRequest, part: Scheduled) -> None:
        stop = part.computed + part.tokens
        request.by |= {self.weights}
        by = BY + " ".join(map(str, sorted(request.by)))
        for at, group in enumerate(self.groups):
            row = part.rows[at]
            if group.offered:
                self.device[row[-1]] = self._text(at, request, stop) + by
                continue
            for block in range(part.computed // group.block_tokens, -(-stop // group.block_tokens)):
                self.device[row[block]] = self._text(at, request, min(stop, (block + 1) * group.block_tokens)) + by

    def _advance(self, request: SimulatedRequest) -> None:
        if request.status is not Status.RUNNING:
            return
        request.computed = self._end(request)
        self._cache(request)
        if request.computed == request.num_tokens:
            if request.num_tokens == request.total:
                self.running.remove(request)
                self._finish(request, keep=False)
            else:
                request.tokens.append(sum(request.tokens[-3:]) % 97)

    def _end(self, request: SimulatedRequest) -> int:
        """The token up to which its next step computes; states are kept where pages end, so steps end there."""
        start = request.computed
        stop = min(request.num_tokens, start + self.chunk)
        if any(group.offered for group in self.groups):
            stop = min(stop, (start // self.page + 1) * self.page)
        return stop

    def _finish(self, request: SimulatedRequest, keep: bool) -> None:
        request.status = Status.FINISHED
        self._received.pop(request.request_id, None)
        self.planner.finished(request.request_id)
        if not keep:
            self._free(request)
            del self.requests[request.request_id]

    # --- blocks

    def _text(self, at: int, request: SimulatedRequest, tokens: int) -> str:
        return f"{at}: {request.named(tokens).hex()[:16]} at {tokens}"

    def _check(self, request: SimulatedRequest) -> None:
        """What the request resumes from is what it names."""
        for at, group in enumerate(self.groups):
            for block in self._read(group, request.computed):
                found, _, by = self.device[request.rows[at][block]].partition(BY)
                due = self._text(at, request, (block + 1) * group.block_tokens)
                assert found == due, f"{request.request_id} reads {found!r}, not {due!r}"
                ours = block * group.block_tokens >= request.local
                assert not ours or by == str(request.asked_by), f"{request.request_id} is brought pages of {by}"
                request.by |= {*map(int, by.split())}

    def _cache(self, request: SimulatedRequest) -> None:
        for at, group in enumerate(self.groups):
            for block, number in enumerate(request.rows[at]):
                tokens = (block + 1) * group.block_tokens
                if number == NULL_BLOCK or tokens > request.computed:
                    continue
                if group.offered and self.device[number].partition(BY)[0] != self._text(at, request, tokens):
                    continue
                self.cached.setdefault((at, request.named(tokens)), number)

    def _blocks(self, many: int) -> list[int] | None:
        taken = set(self.cached.values())
        free = [at for at, users in enumerate(self.references) if not users and at not in taken]
        for page in [*self.cached]:
            if len(free) >= many:
                break
            if not self.references[self.cached[page]]:
                free.append(self.cached.pop(page))
        if len(free) < many:
            return None
        for number in free[:many]:
            self._hold(number)
        return free[:many]

    def _hold(self, number: int) -> None:
        if number != NULL_BLOCK:
            self.references[number] += 1

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.references[number] -= 1
            assert self.references[number] >= 0, "references are given back once"
            if not self.references[number] and number not in self.cached.values():
                self.device[number] = FREE

    def _free(self, request: SimulatedRequest) -> None:
        self._release([number for row in request.rows for number in row if number])
        request.rows = []
