"""The law of admission, looked at from outside: it shares no code with what decides.

No request waits if (a) there is a place for it, (b) its prompt's pages and one page of growth for each running request
that may still grow fit into free or evictable device slots, (c) it waits for no copy and for no page that a running
prompt is about to publish, and (d) it would not hold up the head of the line: a request that does not fit is passed by
those that end before its room could be there, and by eight others at most. Asked right after requests were let in.
"""

from copy import deepcopy
from typing import Any

from kvarve.core.cache import Core
from kvarve.core.lease import Phase
from kvarve.core.tree import Run
from kvarve.engine.scheduler import Scheduler, Task
from kvarve.model import Tier

PASSED = 8


def waits_in_vain(scheduler: Scheduler[Any]) -> str:
    """Which request should not have to wait, and why not; empty if none."""
    core: Core = scheduler.cache.core
    here = [*scheduler.running, *scheduler.coming]
    line = [*scheduler.waiting]
    if not line or len(here) >= scheduler.max_running or _makes_room(core):
        return ""
    page, chunk = core.config.page_tokens, core.config.chunk_tokens
    stuck = _stuck(core)
    loose = _loose(core, stuck)
    for task in scheduler.coming:
        for pool in loose:
            loose[pool] -= _wants(core, task, pool, stuck)
    too_large: list[tuple[int, int]] = []  # how often it has been passed, and when its room could be there
    for task in line:
        if task.lease.phase is not Phase.QUEUED:  # it waits for a copy
            continue
        growth = sum(_grows(other, page) for other in here)
        wants = {pool: _wants(core, task, pool, stuck) + growth for pool in loose}
        chunks = -(-(task.goal - task.computed) // chunk)
        turns = chunks + (task.length - task.goal) + task.most - task.said
        if any(wants[pool] > loose[pool] for pool in loose):
            too_large.append((scheduler.waiting.overtaken(task), _room_after(core, wants, loose, here, page, chunk)))
            continue
        if any(passed >= PASSED and turns > room for passed, room in too_large) or _is_behind(scheduler, task):
            continue
        if task.denied is not None and not _could_have(core, task, page):
            continue  # what seemed evictable is not: only the host has what rests on it, and no room to take more
        return (
            f"{len(here)} of {scheduler.max_running} run, and a request of {task.length} tokens waits: it wants "
            f"{wants} with growth, and {loose} could be had"
        )
    return ""


def _makes_room(core: Core) -> bool:
    """Evictions that have begun and wait for copies: who seems to fit may wait for those."""
    return any(op.leaving and op.edge[0] is Tier.DEVICE for op in core.copies.ops.values())


def _is_behind(scheduler: Scheduler[Any], task: Task) -> bool:
    """Whether a running prompt is about to publish more of its prefix than it would find now."""
    core, lease = scheduler.cache.core, task.lease
    found = core.lookup(lease.root, lease.tokens).memory if lease.reads else 0
    width, grid = core.width, core.grid
    for other in (*scheduler.running, *scheduler.coming):
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
    """By run and chain, how many of its device pages cannot be evicted."""
    runs: list[Run] = [*core.shelves.roots.values()]
    for run in runs:
        runs.extend(run.children.values())
    found: dict[int, dict[int, int]] = {}
    for run in reversed(runs):  # children before parents
        found[id(run)] = {}
        for pool in core.shelves.chains:
            resident = run.here[pool].bit_length()
            rests = any(found[id(child)][pool] for child in run.children.values())
            far = len(core.pools) + pool
            only_here = run.here[pool] & ~(run.here[far] & ~run.bad[far])  # what a held position in the host rests on
            only_here &= (1 << run.held(Tier.HOST).bit_length()) - 1
            held = max(run.held(Tier.DEVICE).bit_length(), only_here.bit_length())
            found[id(run)][pool] = resident if rests else min(resident, held)
    return found


def _loose(core: Core, stuck: dict[int, dict[int, int]]) -> dict[int, int]:
    """By chain, the slots on the device that are free or could be evicted."""
    runs: list[Run] = [*core.shelves.roots.values()]
    for run in runs:
        runs.extend(run.children.values())
    return {
        pool: len(core.shelves.free[pool]) + sum(run.here[pool].bit_count() - stuck[id(run)][pool] for run in runs)
        for pool in core.shelves.chains
    }


def _wants(core: Core, task: Task, pool: int, stuck: dict[int, dict[int, int]]) -> int:
    """Slots of a chain that it would take of those that are free or evictable, for all that it has heard and said."""
    lease, pages = task.lease, -(-task.length // core.config.page_tokens)
    if lease.ready:
        return sum(
            1
            for at in range(pages)
            if at >= lease.done and not lease.seen[pool] >> at & 1 and at not in lease.own[pool]
        )
    has, at = 0, 0
    run: Run | None = core.shelves.roots.get(lease.root)
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
        page.pool == pool
        for number in lease.ops
        if core.copies.ops[number].edge == (Tier.HOST, Tier.DEVICE)
        for page in core.copies.ops[number].pages
    )
    return max(0, pages - has - loading)


def _room_after(
    core: Core, wants: dict[int, int], loose: dict[int, int], here: list[Task], page: int, chunk: int
) -> int:
    """When there could be room: after so many turns, in which those that run end as their max_tokens say."""
    ends = []
    for task in here:
        chunks = -(-max(0, task.goal - task.computed) // chunk)
        again = max(0, task.length - max(task.goal, task.computed))
        ends.append((chunks + again + task.most - task.said, task.seats or -(-task.length // page), _grows(task, page)))
    free, turns, less = dict(loose), 0, 0
    for turn, pages, grows in sorted(ends, key=lambda end: end[0]):
        if all(wants[pool] - less <= free[pool] for pool in free):
            break
        free, turns, less = {pool: slots + pages for pool, slots in free.items()}, turn, less + grows
    return turns


def _grows(task: Task, page: int) -> bool:
    """Whether it may come to need another page than it has room for."""
    last = task.prompt + task.most - 1  # of the last token that it says nothing is computed
    return max(task.seats * page, -(-task.length // page) * page) < last


def _could_have(core: Core, task: Task, page: int) -> bool:
    """Whether the room is really there, tried on a copy of everything."""
    twin = deepcopy(core)
    lease = twin.leases[task.lease.number]
    twin.claim(lease, twin.now)
    return lease.ready and twin.seat(lease, -(-task.length // page))
