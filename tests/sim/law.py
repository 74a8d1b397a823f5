"""An independent check of the law of admission: it shares no code with the scheduler.

No request waits if (a) there is a place for it, (b) its prompt's pages and one page of growth for each running request
that may still grow fit into free or evictable device slots, (c) it waits for no copy and for no page that a running
prompt is about to publish, and (d) it would not delay the head of the line: a request that does not fit may be passed
by those that end before its slots could be free, and by eight others. To be called right after admission.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from kvarve.core.core import Core
from kvarve.core.lease import Phase
from kvarve.core.tree.tree import Run
from kvarve.pages.pools import Tier
from kvarve.reference.engine.request_scheduler import Scheduler, Task

PASSED = 8


def waits_in_vain(scheduler: Scheduler[Any], core: Core) -> str:
    """Describes a request that waits although it could be admitted to `core`; empty if there is none."""
    here = [*scheduler.running, *scheduler.loading]
    if len(here) >= scheduler.max_running or _makes_room(core):
        return ""
    page = core.config.page_tokens
    too_large: list[tuple[int, int]] = []  # times passed, and steps until its slots could be free
    for task, wants, available, room in _asked(scheduler, core):
        if room is not None:
            too_large.append((scheduler.waiting.overtaken(task), room))
            continue
        if task.lease.phase is not Phase.QUEUED:
            continue  # it waits for a copy
        turns = _turns(task, core.config.chunk_tokens)
        if any(passed >= PASSED and turns > room for passed, room in too_large) or _is_behind(scheduler, core, task):
            continue
        if task.rejected_at is not None and not _could_have(core, task, page):
            continue  # not evictable after all: its children are in the host only, and the host is full
        return (
            f"{len(here)} of {scheduler.max_running} run, and a request of {task.length} tokens waits: it wants "
            f"{wants} with growth, and {available} could be had"
        )
    return ""


class Passes:
    """Counts the requests that pass a request that does not fit and that end after its slots could be free.

    Only certain cases count: exactly one request was admitted, and all that ran before still run.
    """

    def __init__(self) -> None:
        self.passed: dict[int, int] = {}  # by the id of a waiting task
        self._here: list[Task] = []
        self._line: list[Task] = []
        self._rooms: list[tuple[Task, int]] = []

    def before(self, scheduler: Scheduler[Any], core: Core) -> None:
        """To be called just before admission."""
        self._here, self._line = [*scheduler.running, *scheduler.loading], [*scheduler.waiting]
        self._rooms = []
        if not _makes_room(core):
            self._rooms = [
                (task, room)
                for task, _, _, room in _asked(scheduler, core)
                if room is not None
                and task.lease.phase is Phase.QUEUED
                and task.rejected_at is None
                and not _is_behind(scheduler, core, task)
            ]

    def after(self, scheduler: Scheduler[Any], core: Core) -> str:
        """Describes a request that has been passed too often; empty if there is none."""
        here, line = [*scheduler.running, *scheduler.loading], [*scheduler.waiting]
        self.passed = {id(task): self.passed.get(id(task), 0) for task in line}
        begun = [task for task in here if task not in self._here]
        if len(begun) != 1 or len(here) != len(self._here) + 1 or begun[0] not in self._line:
            return ""
        place = self._line.index(begun[0])
        turns = _turns(begun[0], core.config.chunk_tokens)
        for task, room in self._rooms:
            waits = task in line and task.lease.phase is Phase.QUEUED  # and has not turned to storage meanwhile
            if waits and self._line.index(task) < place and turns > room:
                self.passed[id(task)] += 1
                if self.passed[id(task)] > PASSED:
                    return f"a request of {task.length} tokens is passed by {self.passed[id(task)]} that hold it up"
        return ""


def _asked(scheduler: Scheduler[Any], core: Core) -> Iterator[tuple[Any, dict[int, int], dict[int, int], int | None]]:
    """For each waiting request that does not wait for storage: the slots it needs by chain, with growth; the slots that
    are free or evictable; and if these are too few, after how many steps there could be enough."""
    here = [*scheduler.running, *scheduler.loading]
    page, chunk = core.config.page_tokens, core.config.chunk_tokens
    if not len(scheduler.waiting):
        return
    stuck = _stuck(core)
    available = _available(core, stuck)
    for task in scheduler.loading:
        for pool in available:
            available[pool] -= _wants(core, task, pool, stuck)
    growth = sum(_grows(other, page) for other in here)
    for task in scheduler.waiting:
        again = task.lease.phase is Phase.PROBING and task.lease.asked_again
        if again or task.lease.phase in (Phase.QUEUED, Phase.LOADING, Phase.READY):
            wants = {pool: _wants(core, task, pool, stuck) + growth for pool in available}
            fits = all(wants[pool] <= available[pool] for pool in available)
            yield task, wants, available, None if fits else _room_after(core, wants, available, here, page, chunk)


def _turns(task: Task, chunk: int) -> int:
    """Steps until it ends, if it uses all of its max_tokens."""
    chunks = -(-max(0, task.prefill_until - task.computed) // chunk)
    replayed = max(0, task.length - max(task.prefill_until, task.computed))
    return chunks + replayed + task.max_new_tokens - task.output_tokens


def _makes_room(core: Core) -> bool:
    """Whether evictions wait for copies: a request that seems to fit may wait for them."""
    return any(op.leaving and op.edge[0] is Tier.DEVICE for op in core.copies.ops.values())


def _is_behind(scheduler: Scheduler[Any], core: Core, task: Task) -> bool:
    """Whether a running prompt is about to publish more of the task's prefix than is cached now."""
    lease = task.lease
    found = core.lookup(lease.root, lease.tokens).memory if lease.reads else 0
    width, grid = core.width, core.grid
    for other in (*scheduler.running, *scheduler.loading):
        ahead = other.lease
        if not lease.reads or ahead.root != lease.root or (other in scheduler.running and not other.prefilling):
            continue
        same = 0
        while (
            same < min(lease.limit, ahead.pages)
            and ahead.tokens[same * width : (same + 1) * width] == lease.tokens[same * width : (same + 1) * width]
        ):
            same += 1
        if same // grid * grid > max(found, ahead.done):
            return True
    return False


def _stuck(core: Core) -> dict[int, dict[int, int]]:
    """By run and chain: how many device pages cannot be evicted."""
    runs: list[Run] = [*core.tree.roots.values()]
    for run in runs:
        runs.extend(run.children.values())
    found: dict[int, dict[int, int]] = {}
    for run in reversed(runs):  # children before parents
        found[id(run)] = {}
        for pool in core.slot_pools.chains:
            resident = run.here[pool].bit_length()
            rests = any(found[id(child)][pool] for child in run.children.values())
            far = len(core.pools) + pool
            only_here = run.here[pool] & ~(run.here[far] & ~run.bad[far])  # a pinned position in the host depends on it
            only_here &= (1 << run.held(Tier.HOST).bit_length()) - 1
            held = max(run.held(Tier.DEVICE).bit_length(), only_here.bit_length())
            found[id(run)][pool] = resident if rests else min(resident, held)
    return found


def _available(core: Core, stuck: dict[int, dict[int, int]]) -> dict[int, int]:
    """By chain: device slots that are free or evictable."""
    runs: list[Run] = [*core.tree.roots.values()]
    for run in runs:
        runs.extend(run.children.values())
    available = {
        pool: len(core.slot_pools.free[pool]) + sum(run.here[pool].bit_count() - stuck[id(run)][pool] for run in runs)
        for pool in core.slot_pools.chains
    }
    extents = core.slot_pools.extents[0]
    if extents is not None:
        for pool in available:
            available[pool] += extents.cut.per[pool] * _could_come(core, runs, pool)
    return available


def _could_come(core: Core, runs: list[Run], chain: int) -> int:
    """How many of the device's extents a chain could still get: those of no pool, and of another pool those that it has
    beyond its least, and beyond one for each page that is pinned, owned by a lease or about to come."""
    extents = core.slot_pools.extents[0]
    assert extents is not None
    could = len(extents.loose)
    for pool in range(len(core.pools)):
        if pool == chain:
            continue
        busy = sum((run.here[pool] & run.pins[0].held()).bit_count() for run in runs)
        busy += sum(len(lease.own[pool]) for lease in core.leases.values())
        for op in core.copies.ops.values():
            if op.edge == (Tier.HOST, Tier.DEVICE):
                busy += sum(op.owned(part).bit_count() for part in op.parts if part.pool == pool)
        could += extents.owned[pool] - max(extents.cut.least[pool], min(busy, extents.owned[pool]))
    return could


def _wants(core: Core, task: Task, pool: int, stuck: dict[int, dict[int, int]]) -> int:
    """Free or evictable slots of a chain that the task would take for its prompt and output so far."""
    lease, pages = task.lease, -(-task.length // core.config.page_tokens)
    if lease.ready:
        return sum(
            1
            for at in range(pages)
            if at >= lease.done and not lease.seen[pool] >> at & 1 and at not in lease.own[pool]
        )
    has, at = 0, 0
    run: Run | None = core.tree.roots.get(lease.root)
    while run is not None:
        run = run.children.get(lease.tokens[at * core.width : (at + 1) * core.width])
        for local in range(0 if run is None else run.pages):
            assert run is not None
            page = run.tokens[local * core.width : (local + 1) * core.width]
            if page != lease.tokens[(at + local) * core.width : (at + local + 1) * core.width]:
                return pages - has
            has += local < stuck[id(run)][pool] and at + local < pages
        at += 0 if run is None else run.pages
    loading = sum(
        core.copies.ops[number].of_pool(pool).bit_count()
        for number in lease.ops
        if core.copies.ops[number].edge == (Tier.HOST, Tier.DEVICE)
    )
    return max(0, pages - has - loading)


def _room_after(
    core: Core, wants: dict[int, int], available: dict[int, int], here: list[Task], page: int, chunk: int
) -> int:
    """Steps until there could be enough slots, if running requests use all of their max_tokens."""
    ends = []
    for task in here:
        ends.append((_turns(task, chunk), task.reserved_pages or -(-task.length // page), _grows(task, page)))
    free, turns, less = dict(available), 0, 0
    for turn, pages, grows in sorted(ends, key=lambda end: end[0]):
        if all(wants[pool] - less <= free[pool] for pool in free):
            break
        free, turns, less = {pool: slots + pages for pool, slots in free.items()}, turn, less + grows
    return turns


def _grows(task: Task, page: int) -> bool:
    """Whether it may need more pages than it has slots for."""
    last = task.prompt + task.max_new_tokens - 1  # no KV is computed for the last output token
    return max(task.reserved_pages * page, -(-task.length // page) * page) < last


def _could_have(core: Core, task: Task, page: int) -> bool:
    """Whether it would really get its slots, tried on a deep copy of the core."""
    twin = deepcopy(core)
    lease = twin.leases[task.lease.number]
    twin.claim(lease, twin.now)
    return lease.ready and twin.growth.reserve(lease, -(-task.length // page))
