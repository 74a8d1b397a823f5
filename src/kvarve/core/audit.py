"""The laws of the core, checked page by page. Written from the design alone: it shares no code with the core.

Sets of positions are integers, as in the core, so that the laws can be checked after every input of a long life.
"""

from collections import Counter
from collections.abc import Iterator

from kvarve.core.core import Core
from kvarve.core.lease import WAITS_FOR, Phase
from kvarve.core.tree.tree import NOWHERE, Pins, Run
from kvarve.pages.pools import Tier


class BrokenLaw(AssertionError):
    """The core is in a state that its laws forbid."""


def _check(true: object, law: str) -> None:
    if not true:
        raise BrokenLaw(law)


def _tiers(core: Core) -> list[Tier]:
    """The memory tiers whose slots are the core's; the device's may be an engine's."""
    return [tier for tier in (Tier.DEVICE, Tier.HOST) if tier in core.config.slots or tier is Tier.HOST]


def _each(positions: int) -> Iterator[int]:
    position = 0
    while positions >> position:
        if positions >> position & 1:
            yield position
        position += 1


def _runs(core: Core) -> list[Run]:
    found: list[Run] = []
    stack: list[Run] = [*core.tree.roots.values()]
    for root in stack:
        _check(not root.tokens and len(root.named) == 32 and not any(root.here), "a root is no page")
    while stack:
        run = stack.pop()
        found.append(run)
        end = run.first + len(run.tokens) // run.width
        for first_page, child in run.children.items():
            _check(child.parent is run, "a child knows its parent")
            _check(child.tokens[: child.width] == first_page, "a child stands under its first page")
            _check(child.first == end, "a child begins where its parent ends")
            _check(len(child.tokens) > 0, "a run holds at least one page")
            stack.append(child)
    return found


def _shares(runs: list[Run], holds: list[tuple[Run, int]]) -> dict[int, list[int]]:
    """Sets of positions as sets of local positions, for each run by its id."""
    shares: dict[int, list[int]] = {id(run): [] for run in runs}
    for deepest, positions in holds:
        run: Run | None = deepest
        left = positions
        while left:
            _check(run is not None, "a pinned position is in the tree")
            assert run is not None
            if share := left >> run.first:  # a reference may be to a run below, even a detached one
                inside = id(run) in shares and not share >> len(run.tokens) // run.width
                _check(inside, "a pinned position is in the tree")
                shares[id(run)].append(share)
            left, run = left & (1 << run.first) - 1, run.parent
    return shares


def _audit_pins(pins: Pins, sets: list[int]) -> int:
    """The pinned positions of a run, each pinned exactly as often as leases and copies pin it."""
    held = 0
    if not sets:
        _check(not pins.held(), "pins are exactly what leases and copies hold")
    for each in sets:
        held |= each
    _check(pins.held() == held, "pins are exactly what leases and copies hold")
    for local in _each(held):
        count = sum(each >> local & 1 for each in sets)
        _check(pins.count(local) == count, "pins are exactly what leases and copies hold")
    return held


def _audit_leases(core: Core) -> None:
    for lease in core.leases.values():
        _check(lease.phase is not Phase.CLOSED, "a closed lease is gone")
        for op in lease.ops:
            waits = WAITS_FOR.get(lease.phase) == core.copies.ops[op].edge
            _check(waits, "a lease waits for the copies that its phase names")
        if lease.phase is Phase.READY and not lease.resumed and Tier.DEVICE in core.config.slots:
            for pool, spec in enumerate(core.pools):
                positions, slots = core.growth.slots(lease, pool)
                far = lease.boundary if spec.lookback is None else min(spec.lookback, lease.boundary)
                _check(len(positions) == far, "a ready lease has its pages")
                _check(len(set(slots)) == len(slots), "each page of a lease has its own slot")


def _owned(core: Core) -> Iterator[tuple[bytes, int, int]]:
    """The slots that leases and copies own: the root key of their prompt, the place and the slot."""
    pools, tiers = len(core.pools), _tiers(core)
    for lease in core.leases.values():
        for tier, pages in ((Tier.DEVICE, lease.own), (Tier.HOST, lease.landed)):
            for pool, slots in enumerate(pages):
                _check(tier in tiers or not slots, "a lease owns slots where the core has slots")
                yield from ((lease.root, tiers.index(tier) * pools + pool, slot) for slot in slots.values())
    for op in core.copies.ops.values():
        source, target = op.edge
        root = _salt(op.run) if op.run is not None else op.lease.root if op.lease is not None else b""
        for part in op.parts if target in tiers and source != target else ():
            for position, slot in zip(_each(part.positions), part.targets, strict=True):
                if not op.given.get(part.pool, 0) >> position & 1:
                    yield root, tiers.index(target) * pools + part.pool, slot


def _audit_slots(core: Core, runs: list[Run]) -> None:
    """Every slot is free, or owned by exactly one page position, lease or copy."""
    owned = [free.tolist() for free in core.slot_pools.free]
    for _, place, slot in _owned(core):
        owned[place].append(slot)
    for run in runs:
        for place, (here, table) in enumerate(zip(run.here, run.slots, strict=True)):
            if table is None:
                if here:
                    raise BrokenLaw("a resident page has a slot")
                continue
            absent = table.count(NOWHERE)
            _check(here.bit_count() == len(table) - absent, "a page has a slot if and only if it is resident")
            if absent:
                owned[place].extend([slot for slot in table if slot != NOWHERE])
                _check(all(table[local] != NOWHERE for local in _each(here)), "a resident page has a slot")
            else:
                owned[place].extend(table)
    for place, slots_ in enumerate(owned):
        slots_.sort()
        if slots_ != _slots_of(core, place):
            raise BrokenLaw(f"every slot of place {place} has exactly one owner")


def _slots_of(core: Core, place: int) -> list[int]:
    """The slots that a place has now, ascending."""
    number, pool = divmod(place, len(core.pools))
    extents = core.slot_pools.extents[number]
    if extents is None:
        return [*range(core.slot_pools.capacity[place])]
    per = extents.cut.per[pool]
    return [slot for at, has in enumerate(extents.pool_of) if has == pool for slot in range(at * per, at * per + per)]


def _audit_extents(core: Core) -> None:
    """A tier that pools share has no more extents than its budget, each of one pool or of none."""
    for number, extents in enumerate(core.slot_pools.extents):
        if extents is None:
            continue
        pools = range(len(core.pools))
        counts = [extents.pool_of.count(pool) for pool in pools]
        loose = [at for at, has in enumerate(extents.pool_of) if has not in pools]
        _check(len(extents.pool_of) == extents.cut.count, "a tier has the extents of its budget")
        _check(sorted(extents.loose) == loose, "an extent is of one pool, or loose")
        _check(counts == extents.owned, "the extents of each pool are counted")
        lacks = sum(max(0, least - has) for least, has in zip(extents.cut.least, counts, strict=True))
        _check(len(loose) >= lacks, "each pool can have its least")
        for pool in pools:
            per, place = extents.cut.per[pool], number * len(core.pools) + pool
            _check(counts[pool] * per <= core.slot_pools.capacity[place], "a pool has at most its most")
            free = Counter(slot // per for slot in core.slot_pools.free[place])
            for at, has in enumerate(extents.pool_of):
                if has == pool:
                    _check(extents.in_use(at) == per - free[at], "the slots in use of an extent are counted")


def _audit_counts(core: Core, runs: list[Run]) -> None:
    """The counts of copies in flight, of host slots that they hold, and of bad pages are right."""
    pools = len(core.pools)
    fetching, storing, staging, down = [0] * pools, [0] * pools, [0] * pools, 0
    for op in core.copies.ops.values():
        if op.edge == (Tier.STORAGE, Tier.HOST):
            for part in op.parts:
                fetching[part.pool] += part.positions.bit_count() * op.counts
        elif op.edge[1] > op.edge[0] and op.lease is None:
            down += op.page_count * op.counts
            for part in op.parts:
                storing[part.pool] += part.positions.bit_count() * (op.counts and op.edge[1] is Tier.STORAGE)
                staging[part.pool] += part.positions.bit_count() * op.onward
    for lease in core.leases.values():
        for pool in range(pools):
            fetching[pool] += lease.lent[pool]
    _check(core.prefetch.held == fetching, "host slots held by fetches are counted")
    _check(core.backups.storing == storing, "pages in flight to storage are counted")
    _check(core.backups.staging == staging, "pages in flight to the host for storage are counted")
    _check(core.backups.in_flight == down, "pages of backups and stores in flight are counted")
    share = core.backups.host_share
    _check(sorted(pool for some in share.budgets for pool in some) == [*range(pools)], "each pool has one budget")
    for some, most in zip(share.budgets, share.most, strict=True):
        held = sum(fetching[pool] * core.pools[pool].payload_bytes for pool in some)
        _check(held <= most, "fetches keep to their share of the host")
    bad_pages = sum(bits.bit_count() for run in runs for bits in run.bad)
    _check(core.residency.bad_pages == bad_pages, "bad pages are counted")


def _audit_lines(core: Core, runs: list[Run]) -> None:
    """Runs know which of their pages are in flight down, and those that wait are in the tree."""
    pools, tiers, dirty = len(core.pools), [*_tiers(core), Tier.STORAGE], core.backups.dirty
    coming: dict[tuple[int, int], int] = {}
    for op in core.copies.ops.values():
        down = op.edge[1] > op.edge[0] and op.lease is None
        for pool, position in [(part.pool, at) for part in op.parts for at in _each(part.positions)] if down else ():
            run = op.run
            while run is not None and position < run.first:
                run = run.parent
            assert run is not None, "a pinned position is in the tree"
            if op.void:  # its storage is gone or down
                continue
            what, bit = (id(run), tiers.index(op.edge[1]) * pools + pool), 1 << position - run.first
            _check(not coming.get(what, 0) & bit, "no page is copied twice to one tier")
            coming[what] = coming.get(what, 0) | bit
    for run in runs:
        for place, bits in enumerate(run.coming):
            if bits != coming.get((id(run), place), 0):
                raise BrokenLaw("a run knows which of its pages are in flight down")
    alive, storage = {id(run) for run in runs}, range((len(tiers) - 1) * pools, len(tiers) * pools)
    for line in (dirty.to_host, dirty.to_store, dirty.busy, dirty.quarantined):
        _check(all(id(run) in alive for run in line), "a queued run is in the tree")
    for run in dirty.busy:
        _check(any((id(run), place) in coming for place in storage), "a busy run has a store in flight")
        _check(run not in dirty.to_store, "a busy run is in no queue of stores")
    for stores in (dirty.to_store, dirty.busy):
        _check(stores.keys().isdisjoint(dirty.quarantined), "a quarantined run is in no queue")


def _salt(run: Run) -> bytes:
    while run.parent is not None:
        run = run.parent
    return run.named


def _audit_shares(core: Core, runs: list[Run]) -> dict[tuple[bytes, int], int]:
    """A salt is charged for the slots of its pages, leases and copies, and for nothing else. Returns by salt and place
    the bytes by which the salt exceeds its share of the budget there, without those that wait for a copy to leave."""
    shares, pools, tiers = core.candidates.salt_shares, len(core.pools), _tiers(core)
    if shares is None:
        return {}
    has, leaving = Counter[tuple[bytes, int]](), Counter[tuple[bytes, int]]()
    for run in runs:
        coming, host = 0, range(tiers.index(Tier.HOST) * pools, (tiers.index(Tier.HOST) + 1) * pools)
        for place in host:
            coming |= run.coming[place]
        for place, here in enumerate(run.here):
            has[_salt(run), place] += here.bit_count()
            if place in host:  # a page leaves the host once other pages of its position have been copied there
                leaving[_salt(run), place] += (here & coming).bit_count()
    has.update((root, place) for root, place, _ in _owned(core))
    for op in core.copies.ops.values():
        for part in op.parts if op.leaving and op.run is not None else ():
            assert op.run is not None
            leaving[_salt(op.run), tiers.index(op.edge[0]) * pools + part.pool] += part.positions.bit_count()
    salts = {salt for (salt, _), count in has.items() if count}
    _check(shares.held.keys() == salts, "a salt is known while it has anything")
    over: dict[tuple[bytes, int], int] = {}
    for salt, held in shares.held.items():
        for places, most, charged in zip(shares.places, shares.most, held, strict=True):
            sizes = [core.pools[place % pools].payload_bytes for place in places]
            counts = [has[salt, place] for place in places]
            _check(charged == sum(map(int.__mul__, sizes, counts)), "a salt is charged for what it has")
            going = sum(leaving[salt, place] * size for place, size in zip(places, sizes, strict=True))
            over |= {(salt, place): charged - going - most for place in places if charged - going > most}
    return over


def _standing(core: Core, runs: list[Run]) -> dict[int, int]:
    """The orders in which runs stand, as bits by the run's id: no run twice in one."""
    standing, behind = {id(run): 0 for run in runs}, 2 * len(_tiers(core)) * len(core.pools)
    orders = [*core.candidates.orders.items()]
    for own in core.candidates.of_salt.values():
        orders += [(behind + number, order) for number, order in own.items()]
    for number, order in orders:
        for run in order.runs():
            if id(run) in standing:
                _check(not standing[id(run)] >> number & 1, "no run stands twice in an eviction order")
                standing[id(run)] |= 1 << number
    return standing


def _held(core: Core, runs: list[Run]) -> Iterator[tuple[list[int], list[int]]]:
    """By memory tier, the local positions of each run at which all pages are pinned, and at which chains are."""
    shares = []
    for tier in _tiers(core):
        holds = [(lease.run, lease.held, lease.prefix_pins) for lease in core.leases.values() if tier in lease.tiers]
        reads = [(op.run, op.pinned) for op in core.copies.ops.values() if op.run is not None and op.edge[0] == tier]
        reads += [(op.run, op.filling) for op in core.copies.ops.values() if op.run is not None and op.edge[1] == tier]
        pins = _shares(runs, [(run, held) for run, held, _ in holds] + reads)
        shares.append((pins, _shares(runs, [(run, chains) for run, _, chains in holds])))
    for run in runs:
        pinned = [_audit_pins(run.pins[tier], pins[id(run)]) for tier, (pins, _) in enumerate(shares)]
        yield pinned, [_audit_pins(run.prefix_pins[tier], of[id(run)]) for tier, (_, of) in enumerate(shares)]


def _audit_run(core: Core, run: Run, chains: list[int]) -> None:
    """A position's chains are in memory, and on the device without a gap; nothing is known behind a run's end."""
    length, pools, tiers = len(run.tokens) // run.width, len(core.pools), _tiers(core)
    _check(len(run.named) % 32 == 0 and len(run.named) <= 32 * max(1, length), "only pages have keys")
    known = 0
    for bits in (*run.here, *run.stored, *run.coming, *run.backed_up_since_use, *run.passing, run.ends):
        known |= bits
    _check(not known >> length, "no bits are set beyond a run's end")
    _check(
        not any(bad & ~here for bad, here in zip(run.bad, run.here, strict=True)), "only a page that is here can be bad"
    )
    for chain in chains:
        anywhere = 0
        for number in range(len(tiers)):
            anywhere |= run.here[number * pools + chain]
        _check(anywhere == (1 << length) - 1, "a position keeps its attention page in memory")
        near, above = run.here[chain] if Tier.DEVICE in tiers else 0, run.parent
        _check(not near & near + 1, "an attention page is on the device only if its parent is")
        if near and above is not None and above.tokens:
            parent = above.here[chain] >> len(above.tokens) // above.width - 1 & 1
            _check(parent, "an attention page is on the device only if its parent is")
    resting = [sum(child.here[place] & 1 for child in run.children.values()) for place in range(len(run.here))]
    _check(run.kids == resting, "a run knows how many pages rest on its end")


def _chain_may_go(run: Run, place: int, pools: int, needed: list[int]) -> int:
    """The pages of a chain that may leave a place. Pages that another tier's copies and leases need stay in memory, if
    only here."""
    only_here, needed_there = run.here[place], 0
    for there, positions in enumerate(needed):
        if there != place // pools:
            other = there * pools + place % pools
            only_here &= ~(run.here[other] & ~run.bad[other])
            needed_there = max(needed_there, positions.bit_length())
    stays = only_here & (1 << needed_there) - 1
    return 0 if run.kids[place] else run.here[place] >> max(needed[place // pools].bit_length(), stays.bit_length())


def _spare(run: Run, lookback: int | None, may_go: int) -> int:
    """Of windows or states that may go, those that no likely resumption reads."""
    assert lookback is not None
    for end in _each(run.ends | 1 << len(run.tokens) // run.width - 1):
        for read in range(max(0, end + 1 - lookback), end + 1):
            may_go &= ~(1 << read)
    return may_go


def _stuck(run: Run, place: int, pools: int) -> int:
    """Pages of a chain on which a page of another tier rests: they stay, unless a copy finds a slot."""
    elsewhere, stuck, here = 0, 0, run.here[place]
    for other in range(place % pools, len(run.here), pools):
        if other != place:
            elsewhere |= run.here[other] & ~run.bad[other]
            stuck |= here if run.kids[other] else (1 << run.here[other].bit_length()) - 1
    return (1 << (stuck & here & ~elsewhere).bit_length()) - 1


def audit(core: Core, stepped: bool = False) -> None:
    """Raise `BrokenLaw` if any law does not hold now; `stepped`: a step has just ended."""
    pools, runs = len(core.pools), _runs(core)
    chains = [i for i, pool in enumerate(core.pools) if pool.lookback is None]
    _audit_leases(core)
    _audit_slots(core, runs)
    _audit_extents(core)
    _audit_counts(core, runs)
    _audit_lines(core, runs)
    over, standing = _audit_shares(core, runs), _standing(core, runs)
    for run, (pinned, prefixes) in zip(runs, _held(core, runs), strict=True):
        _audit_run(core, run, chains)
        needed = [both | prefix for both, prefix in zip(pinned, prefixes, strict=True)]
        giveable = 0
        for place, here in enumerate(run.here):
            chain = place % pools in chains
            may_go = _chain_may_go(run, place, pools, needed) if chain else here & ~pinned[place // pools]
            giveable |= (may_go > 0) << place
            if may_go and not chain:
                giveable |= (_spare(run, core.pools[place % pools].lookback, may_go) > 0) << len(run.here) + place
            if may_go and stepped and (_salt(run), place) in over:
                loose = may_go & ~_stuck(run, place, pools) if chain else may_go
                _check(not loose or core.backups.leaving(), "a salt beyond its share has nothing left that may leave")
        if _salt(run) in core.candidates.of_salt:
            giveable |= giveable << 2 * len(run.here)
        # One without an evictable page may stand there too, once.
        _check(not giveable & ~standing[id(run)], "a run with an evictable page stands in the eviction order")
        _check(run.queued == standing[id(run)], "a run knows in which eviction orders it stands")
