"""The laws of the core, checked page by page. Written from the design alone: it shares no code with what it checks."""

from collections import Counter

from kvarve.core.cache import Core
from kvarve.core.lease import Phase
from kvarve.core.tree import Run


class BrokenLaw(AssertionError):
    """The core is in a state that its laws forbid."""


def _check(true: object, law: str) -> None:
    if not true:
        raise BrokenLaw(law)


def _runs(core: Core) -> list[Run]:
    found: list[Run] = []
    stack: list[Run] = [*core.shelves.roots.values()]
    while stack:
        run = stack.pop()
        found.append(run)
        for first_page, child in run.children.items():
            _check(child.parent is run, "a child knows its parent")
            _check(child.tokens[: child.width] == first_page, "a child stands under its first page")
            _check(child.first == run.first + len(run.tokens) // run.width, "a child begins where its parent ends")
            _check(len(child.tokens) > 0, "a run holds at least one page")
            stack.append(child)
    return found


def audit(core: Core) -> None:
    """Raise `BrokenLaw` if any law does not hold now."""
    pools, places = len(core.pools), 2 * len(core.pools)
    chains = [i for i, pool in enumerate(core.pools) if pool.lookback is None]
    runs = _runs(core)
    owners: list[Counter[int]] = [Counter(slots) for slots in core.shelves.free]
    holds: Counter[tuple[int, int]] = Counter()
    rests: Counter[tuple[int, int]] = Counter()
    by_id = {id(run): run for run in runs}

    def hold(run: Run | None, positions: int, holds: Counter[tuple[int, int]] = holds) -> None:
        position = 0
        while positions >> position:
            if positions >> position & 1:
                at = run
                while at is not None and position < at.first:
                    at = at.parent
                _check(at is not None and id(at) in by_id, "what is held is in the tree")
                assert at is not None
                holds[id(at), position - at.first] += 1
            position += 1

    for lease in core.leases.values():
        _check(lease.phase is not Phase.CLOSED, "a closed lease is gone")
        hold(lease.run, lease.held)
        hold(lease.run, lease.rests, rests)
        for pool, slots in enumerate(lease.own):
            owners[pool].update(slots.values())
        for pool, slots in enumerate(lease.landed):
            owners[pools + pool].update(slots.values())
        if lease.phase is Phase.READY and not lease.resumed:
            for pool, spec in enumerate(core.pools):
                positions, slots_ = core.slots(lease, pool)
                far = lease.boundary if spec.lookback is None else min(spec.lookback, lease.boundary)
                _check(len(positions) == far, "a ready lease has its pages")
                _check(len(set(slots_)) == len(slots_), "each page of a lease has its own slot")
    for op in core.copies.ops.values():
        if op.run is not None:
            hold(op.run, op.pinned)
        if op.edge[1] < 2 and op.edge[0] != op.edge[1]:
            for page in op.pages:
                owners[int(op.edge[1]) * pools + page.pool][page.target] += 1

    for run in runs:
        length = len(run.tokens) // run.width
        _check(len(run.keys) == 32 * length, "every page has a key")
        for local in range(length):
            _check(run.pins.count(local) == holds[id(run), local], "pins are exactly what leases and copies hold")
            _check(run.rests.count(local) == rests[id(run), local], "rests are exactly what leases rest on")
            resident = [bool(run.here[place] >> local & 1) for place in range(places)]
            for place in range(places):
                if resident[place]:
                    table = run.slots[place]
                    assert table is not None
                    owners[place][table[local]] += 1
                else:
                    _check(not run.bad[place] >> local & 1, "only a page that is here can be bad")
            above, up = (run, local - 1) if local else (run.parent, -1)
            if above is not None and up < 0:
                up = len(above.tokens) // above.width - 1
            for chain in chains:
                _check(resident[chain] or resident[pools + chain], "a position keeps its attention page in memory")
                if resident[chain] and above is not None and up >= 0:
                    _check(above.here[chain] >> up & 1, "an attention page is on the device only if its parent is")
        for bits in (*run.here, *run.bad, *run.stored, *run.coming):
            _check(bits >> length == 0, "nothing is known of positions that are not there")
        for place in range(places):
            below = sum(child.here[place] & 1 for child in run.children.values())
            _check(run.kids[place] == below, "a run knows how many pages rest on its end")

    for place, owned in enumerate(owners):
        _check(
            all(count == 1 for count in owned.values()) and set(owned) == set(range(core.shelves.capacity[place])),
            f"every slot of place {place} has exactly one owner",
        )

    # A run stands in an eviction order exactly once if it has a page to give; it may stand there in vain, not twice.
    for place, order in enumerate(core.shelves.orders):
        standing = Counter(id(run) for run in order.runs())
        _check(all(count == 1 for count in standing.values()), "no run stands twice in an eviction order")
        for run in runs:
            held = [local for local in range(len(run.tokens) // run.width) if holds[id(run), local]]
            needed = [local for local in range(len(run.tokens) // run.width) if rests[id(run), local]] + held
            here = {local for local in range(len(run.tokens) // run.width) if run.here[place] >> local & 1}
            if place % pools in chains:
                resting = any(child.here[place] & 1 for child in run.children.values())
                giveable = set() if resting else {local for local in here if not needed or local > max(needed)}
            else:
                giveable = here - set(held)
            if giveable:
                _check(standing[id(run)], "what may be evicted stands in the eviction order")
            _check(bool(run.queued >> place & 1) == bool(standing[id(run)]), "a run knows where it stands")
