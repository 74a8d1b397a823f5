"""The device slots of a ready lease: those that it resumes from, and those that it computes in and then publishes; and
which windows and states of its prompt are kept: where it ends or branches off, on the way, and while there is room."""

from itertools import count

from kvarve.core.context import Context
from kvarve.core.lease import Lease, Phase
from kvarve.core.requests.paths import ON_DEVICE, Paths
from kvarve.core.tree.tree import NOWHERE, Run, covering, upward
from kvarve.pages import boundaries
from kvarve.pages.boundaries import members, needed, ones, span
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import Tier

CLAIM = "a lease is claimed, and not closed, before its pages are asked for or changed"


class Growth:
    def __init__(self, context: Context, paths: Paths) -> None:
        self._counters, self._paths, self._policies = context.counters, paths, context.config.policies
        self._page_tokens, self._grid, self._lookbacks = paths.page_tokens, paths.grid, paths.lookbacks
        self._short = [pool for pool, back in enumerate(paths.lookbacks) if back is not None]
        self._evictions, self._residency, self._dirty = paths.evictions, paths.residency, paths.dirty
        self._pools, self._chains = range(len(paths.lookbacks)), paths.slot_pools.chains

    def begin(self, lease: Lease, boundary: int, device: list[int]) -> None:
        """A lease resumes at a boundary; `device`: by pool, the pages that are there."""
        lease.boundary = lease.done = lease.grown = boundary
        lease.seen = device
        lease.snapshots = self._snapshots(lease, lease.limit)

    def offer(self, lease: Lease, boundary: int) -> None:
        """An engine is offered the pages of a boundary."""
        lease.boundary = boundary

    def resumed(self, lease: Lease) -> None:
        """Unpin the windows and states that the engine resumed from: it has copies of its own now.

        Chains stay pinned until the lease is closed, since the pages that it publishes rest on them.
        """
        assert lease.phase is Phase.READY, CLAIM
        if not lease.resumed:
            lease.resumed = True
            self._paths.hold(lease, lease.run, 0, lease.prefix_pins, ON_DEVICE)

    def extend(self, lease: Lease, tokens: bytes, replaced_bytes: int = 0, heads: bytes = b"") -> None:
        """Append tokens to the sequence of a ready lease: decoded ones, or the next turn of a session.

        `tokens` replaces the last `replaced_bytes` bytes of the sequence. More pages may be full now, so `grow` and
        `publish` may go further. Windows and states are kept at the new end alone: those at boundaries before it are
        gone, since the engine has decoded on. `heads`: of the full pages in `tokens`, as in `open`.
        """
        assert lease.phase is Phase.READY and len(tokens) % TOKEN_BYTES == 0, CLAIM
        width = self._paths.width
        pages, stays = len(lease.tokens) // width, len(lease.tokens) - replaced_bytes
        assert lease.grown * width <= stays, "what has been computed keeps its name"
        lease.replace(stays, tokens, heads)
        if replaced_bytes:  # the pages behind that are another sequence's, as is where it ended or left others
            stay = stays // width
            lease.seen = [here & ones(stay) for here in lease.seen]
            lease.branch, lease.ends = min(lease.branch, stay), lease.ends & ones(stay + 1)
        if lease.pages < pages:  # slots ran out on the way, so no later page can be kept
            return
        lease.pages = len(lease.tokens) // width
        before = ones(max(lease.grown + 1, lease.pages // self._grid * self._grid))
        anew = self._snapshots(lease, self._paths.limit(lease.tokens))
        lease.snapshots = (lease.snapshots & ones(lease.grown + 1)) | anew & ~before

    def slots(self, lease: Lease, pool: int) -> tuple[range, list[int]]:
        """The device pages of one pool that a ready lease resumes from: their positions and slots."""
        assert lease.phase is Phase.READY, CLAIM
        need = needed(lease.boundary, self._lookbacks[pool])
        positions = range(lease.boundary - need.bit_count(), lease.boundary)
        return positions, [covering(lease.run, position).slot(pool, position) for position in positions]

    def reserve(self, lease: Lease, upto: int) -> bool:
        """Reserve device slots for a ready lease to compute in: of each chain all pages before `upto`, full or not.

        False, and none reserved, if there are too few now. `grow` keeps the pages in these slots.
        """
        assert lease.phase is Phase.READY, CLAIM
        taken: dict[int, dict[int, int]] = {}
        for pool in self._chains:
            missing = span(lease.done, upto) & ~lease.seen[pool] & ~boundaries.of(lease.own[pool])
            after = self._slot_before(lease, pool, missing)
            slots = self._evictions.reserve(pool, missing.bit_count(), lease.root, after=after)
            taken[pool] = dict(zip(members(missing), slots, strict=False))
            if len(slots) < missing.bit_count():
                for place, pages in taken.items():
                    self._residency.give_back(place, [*pages.values()], lease.root)
                return False
        for pool, pages in taken.items():
            lease.own[pool].update(pages)
        return True

    def _slot_before(self, lease: Lease, pool: int, positions: int) -> int:
        """The device slot of the page before the first of these positions."""
        before = (positions & -positions).bit_length() - 2
        if before < 0:
            return NOWHERE
        own = lease.own[pool].get(before)
        return covering(lease.run, before).slot(pool, before) if own is None else own

    def block_table(self, lease: Lease, pool: int, start: int) -> list[int]:
        """The device slots of a chain's pages from `start` on, as far as a ready lease has them.

        Pages before `done`, and those resident when the lease became ready (`seen`), belong to the tree.
        """
        assert lease.phase is Phase.READY and pool in self._chains, CLAIM
        slots, own, seen = [], lease.own[pool], lease.seen[pool]
        for position in count(start):
            if position < lease.done or seen >> position & 1:
                slots.append(covering(lease.run, position).slot(pool, position))
            elif position in own:
                slots.append(own[position])
            else:
                return slots
        raise AssertionError("a count ends")

    def grow(self, lease: Lease, upto: int) -> list[dict[int, int]]:
        """Reserve device slots for the pages up to `upto` that are worth keeping.

        Returns for each pool the new slots by position, for the engine to fill before it publishes. Once slots run out
        the request goes on uncached: its later pages are not kept.
        """
        assert lease.phase is Phase.READY and upto <= lease.pages, CLAIM
        fresh: list[dict[int, int]] = [{} for _ in self._pools]
        if upto <= lease.grown:
            return fresh
        stop = upto
        if self._has_room_at(lease, upto):
            lease.passing |= 1 << upto
        wanted = [self._worth_keeping(lease, pool, lease.grown, upto) & ~lease.seen[pool] for pool in self._pools]
        for pool in self._chains:
            held = lease.own[pool]  # some may have been reserved by `reserve`
            missing = [at for at in members(wanted[pool]) if at not in held] if held else [*members(wanted[pool])]
            got = dict(zip(missing, self._evictions.reserve(pool, len(missing), lease.root), strict=False))
            fresh[pool] = {at: held.get(at, got.get(at, NOWHERE)) for at in members(wanted[pool])} if held else got
            if len(got) < len(missing):
                # No page can rest on one that is not kept, so the request is kept up to here at most.
                first_lost = missing[len(got)]
                self._counters.uncached += upto - first_lost
                upto = min(upto, first_lost)
                lease.snapshots &= ones(first_lost + 1)
                lease.passing &= ones(first_lost + 1)
                lease.pages = first_lost
        for pool in self._pools:
            if pool not in self._chains:
                fresh[pool] = self._paths.slots_for(lease, pool, wanted[pool] & ones(upto), lease.pages)
            if upto < stop:
                self._give_back(lease, pool, {at: fresh[pool].pop(at) for at in [*fresh[pool]] if at >= upto})
            lease.own[pool].update(fresh[pool])
        lease.grown = upto
        return fresh

    def _give_back(self, lease: Lease, pool: int, slots: dict[int, int]) -> None:
        """Slots just reserved are not needed; those that a lease had before stay its own."""
        new = [slot for at, slot in slots.items() if slot != NOWHERE and at not in lease.own[pool]]
        self._residency.give_back(pool, new, lease.root)

    def close(self, lease: Lease) -> None:
        """Slots that a lease still owns are free again."""
        for pool, slots in enumerate(lease.own):
            if slots:
                self._residency.give_back(pool, [*slots.values()], lease.root)
                slots.clear()

    def short(self, lease: Lease, upto: int) -> bool:
        """Whether `grow` would lack slots that are about to come free; starts the evictions, which wait for copies."""
        for pool, here in enumerate(lease.seen):
            keep = self._worth_keeping(lease, pool, lease.grown, upto) & ~here & ~boundaries.of(lease.own[pool])
            self._evictions.make_way(pool, keep.bit_count(), lease.root)
            wanted = keep.bit_count() - len(self._paths.slot_pools.free[pool])
            if wanted > 0 and self._evictions.make_room(pool, wanted) < wanted and self._paths.backups.leaving():
                return True
        return False

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the filled pages before `upto` to the tree; slots of pages that are there already are freed."""
        assert lease.phase is Phase.READY, CLAIM
        assert lease.done <= upto <= lease.grown, "pages are published after they were grown, and once"
        if upto == lease.done:
            return
        if all(not slots or max(slots) < upto for slots in lease.own):
            pages, lease.own = lease.own, [{} for _ in lease.own]
        else:
            pages = [{at: slots.pop(at) for at in [*slots] if at < upto} for slots in lease.own]
        tail, end = self._paths.insert(lease, Tier.DEVICE, pages)
        lease.done, lease.resumed = upto, True
        if kept := min(upto, end):
            self._paths.hold(lease, tail, 0, self._paths.ends(kept) | self._paths.ahead(lease.seen), ON_DEVICE)
            self._paths.tree.touch(tail, self._paths.near(kept))
        for run, _ in upward(tail, span(lease.boundary, end)):
            if self._paths.tree.brought(run, lease.priority):
                self._dirty.mark_dirty(run)  # the policy may want from the first use on what others have brought

    def note_ends(self, lease: Lease, run: Run, boundary: int) -> None:
        """A lease is about to resume at a boundary, and its prompt branches off others and ends: others will resume
        there, or on the way, where it keeps its windows and states since they take little."""
        policies, grid, left, branch = self._policies, self._grid, lease.left, lease.known
        if left is not None and left.followed and branch + left.pages < len(lease.tokens) // self._paths.width:
            branch += left.pages  # where another prompt ended, this one may only have grown
        ends = 1 << boundary if lease.reads else 0
        if policies.snapshots.ends:
            ends |= 1 << lease.pages - lease.pages % grid | 1 << lease.limit - lease.limit % grid
        if policies.snapshots.branches:
            ends |= 1 << branch - branch % grid
        if step := self._step(lease):
            ends |= boundaries.of(range(step, lease.pages + 1, step))
        lease.branch, lease.ends = branch, ends & ~1
        self._paths.mark_ends(run, lease.known, lease.ends)

    def mark(self, lease: Lease, boundary: int) -> bool:
        """Have a ready lease keep its windows and states at a boundary too, since another prompt branches off there.

        False, and nothing changed, if the lease is past the pages that this needs.
        """
        assert lease.phase is Phase.READY, CLAIM
        if lease.snapshots >> boundary & 1:
            return lease.done < boundary
        reach = max([0, *(self._lookbacks[pool] or 0 for pool in self._short)])
        if boundary > lease.pages or lease.grown > boundary - reach or lease.grown >= boundary:
            return False
        lease.snapshots |= 1 << boundary
        return True

    def _has_room_at(self, lease: Lease, boundary: int) -> bool:
        """Whether windows and states are kept at the end of a chunk for no other reason than that there is room."""
        wanted = self._policies.snapshots.chunks and boundary % self._grid == 0
        kept = (lease.snapshots | lease.passing) >> boundary & 1
        return wanted and not kept and self._evictions.has_room(lease.root)

    def _worth_keeping(self, lease: Lease, pool: int, start: int, stop: int) -> int:
        """The positions in [start, stop) of a pool that some kept boundary needs."""
        lookback = self._lookbacks[pool]
        if lookback is None:
            return span(start, stop)
        keep = 0
        for boundary in members((lease.snapshots | lease.passing) & span(start + 1, stop + lookback)):
            keep |= needed(boundary, lookback)
        return keep & span(start, stop)

    def _snapshots(self, lease: Lease, limit: int) -> int:
        """The boundaries at which a prompt's windows and states are kept."""
        shape = self._page_tokens, self._grid, self._step(lease)
        return self._policies.snapshots.boundaries(lease.pages, limit, lease.branch, *shape)

    def _step(self, lease: Lease) -> int:
        """The pages after which a prompt keeps windows and states because they take little (see `SlotPools.step`)."""
        return 0 if self._policies.snapshots.every else self._paths.slot_pools.step(lease.pages)
