"""The device slots of a ready lease: those that it resumes from, and those that it computes in and then publishes."""

from itertools import count

from kvarve.core.requests.lease import Lease, Phase
from kvarve.core.requests.resume import ON_DEVICE, Resuming
from kvarve.core.tree.tree import NOWHERE, covering, upward
from kvarve.pages import boundaries
from kvarve.pages.boundaries import members, needed, ones, span
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES
from kvarve.pages.pools import Tier


class Growing(Resuming):
    def resumed(self, lease: Lease) -> None:
        """Unpin the windows and states that the engine resumed from: it has copies of its own now.

        Chains stay pinned until the lease is closed, since the pages that it publishes rest on them.
        """
        assert lease.phase is Phase.READY
        if not lease.resumed:
            lease.resumed = True
            self.paths.hold(lease, lease.run, 0, lease.prefix_pins, ON_DEVICE)

    def extend(self, lease: Lease, tokens: bytes, replaced_bytes: int = 0, heads: bytes = b"") -> None:
        """Append tokens to the sequence of a ready lease: decoded ones, or the next turn of a session.

        `tokens` replaces the last `replaced_bytes` bytes of the sequence. More pages may be full now, so `grow` and
        `publish` may go further. Windows and states are kept at the new end alone: those at boundaries before it are
        gone, since the engine has decoded on. `heads`: of the full pages in `tokens`, as in `open`.
        """
        assert lease.phase is Phase.READY and len(tokens) % TOKEN_BYTES == 0
        pages, stays = len(lease.tokens) // self.width, len(lease.tokens) - replaced_bytes
        assert lease.grown * self.width <= stays, "what has been computed keeps its name"
        lease.tokens = lease.tokens[:stays] + tokens
        stay = stays // self.width
        lease.named = lease.named[: stay * KEY_BYTES]
        lease.heads = lease.heads[: stay * lease.run.head_bytes] + heads
        if replaced_bytes:  # the pages behind that are another sequence's, as is where it ended or left others
            lease.seen = [here & ones(stay) for here in lease.seen]
            lease.branch, lease.ends = min(lease.branch, stay), lease.ends & ones(stay + 1)
        if lease.pages < pages:  # slots ran out on the way, so no later page can be kept
            return
        lease.pages = len(lease.tokens) // self.width
        before = ones(max(lease.grown + 1, lease.pages // self.grid * self.grid))
        lease.snapshots = (lease.snapshots & ones(lease.grown + 1)) | self._snapshots(lease) & ~before

    def slots(self, lease: Lease, pool: int) -> tuple[range, list[int]]:
        """The device pages of one pool that a ready lease resumes from: their positions and slots."""
        assert lease.phase is Phase.READY
        need = needed(lease.boundary, self.lookbacks[pool])
        positions = range(lease.boundary - need.bit_count(), lease.boundary)
        return positions, [covering(lease.run, position).slot(pool, position) for position in positions]

    def reserve(self, lease: Lease, upto: int) -> bool:
        """Reserve device slots for a ready lease to compute in: of each chain all pages before `upto`, full or not.

        False, and none reserved, if there are too few now. `grow` keeps the pages in these slots.
        """
        assert lease.phase is Phase.READY
        taken: dict[int, dict[int, int]] = {}
        for pool in self.slot_pools.chains:
            missing = span(lease.done, upto) & ~lease.seen[pool] & ~boundaries.of(lease.own[pool])
            if missing:
                before = self._slot_before(lease, pool, missing)
                self.slot_pools.straighten(pool, missing.bit_count(), lease.root, before)
            slots = self.slot_pools.reserve(pool, missing.bit_count(), lease.root)
            taken[pool] = dict(zip(members(missing), slots, strict=False))
            if len(slots) < missing.bit_count():
                for place, pages in taken.items():
                    self.slot_pools.give_back(place, [*pages.values()], lease.root)
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
        assert lease.phase is Phase.READY and pool in self.slot_pools.chains
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
        assert lease.phase is Phase.READY and upto <= lease.pages
        fresh: list[dict[int, int]] = [{} for _ in self.pools]
        if upto <= lease.grown:
            return fresh
        stop = upto
        if self._has_room_at(lease, upto):
            lease.passing |= 1 << upto
        wanted = [
            self._worth_keeping(lease, pool, lease.grown, upto) & ~lease.seen[pool] for pool in range(len(self.pools))
        ]
        for pool in self.slot_pools.chains:
            held = lease.own[pool]  # some may have been reserved by `reserve`
            missing = [at for at in members(wanted[pool]) if at not in held] if held else [*members(wanted[pool])]
            got = dict(zip(missing, self.slot_pools.reserve(pool, len(missing), lease.root), strict=False))
            fresh[pool] = {at: held.get(at, got.get(at, NOWHERE)) for at in members(wanted[pool])} if held else got
            if len(got) < len(missing):
                # No page can rest on one that is not kept, so the request is kept up to here at most.
                first_lost = missing[len(got)]
                self.counters.uncached += upto - first_lost
                upto = min(upto, first_lost)
                lease.snapshots &= ones(first_lost + 1)
                lease.passing &= ones(first_lost + 1)
                lease.pages = first_lost
        for pool in range(len(self.pools)):
            if pool not in self.slot_pools.chains:
                fresh[pool] = self.paths.slots_for(lease, pool, wanted[pool] & ones(upto), lease.pages)
            for position in [at for at in fresh[pool] if at >= upto] if upto < stop else ():
                slot = fresh[pool].pop(position)
                if slot != NOWHERE and position not in lease.own[pool]:
                    self.slot_pools.give_back(pool, [slot], lease.root)
            lease.own[pool].update(fresh[pool])
        lease.grown = upto
        return fresh

    def short(self, lease: Lease, upto: int) -> bool:
        """Whether `grow` would lack slots that are about to come free; starts the evictions, which wait for copies."""
        for pool, here in enumerate(lease.seen):
            keep = self._worth_keeping(lease, pool, lease.grown, upto) & ~here & ~boundaries.of(lease.own[pool])
            self.slot_pools.make_way(pool, keep.bit_count(), lease.root)
            wanted = keep.bit_count() - len(self.slot_pools.free[pool])
            if wanted > 0 and self.slot_pools.make_room(pool, wanted) < wanted and self.backups.leaving():
                return True
        return False

    def keepable(self, lease: Lease) -> int:
        """The page up to which this request can be kept: all its full pages, unless slots ran out on the way."""
        return lease.pages

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the filled pages before `upto` to the tree; slots of pages that are there already are freed."""
        assert lease.phase is Phase.READY and lease.done <= upto <= lease.grown
        if upto == lease.done:
            return
        if all(not slots or max(slots) < upto for slots in lease.own):
            pages, lease.own = lease.own, [{} for _ in lease.own]
        else:
            pages = [{at: slots.pop(at) for at in [*slots] if at < upto} for slots in lease.own]
        tail, end = self.paths.insert(lease, Tier.DEVICE, pages)
        lease.done, lease.resumed = upto, True
        if kept := min(upto, end):
            self.paths.hold(lease, tail, 0, self.paths.ends(kept) | self.paths.ahead(lease.seen), ON_DEVICE)
            self.slot_pools.touch(tail, self.paths.near(kept))
        for run, _ in upward(tail, span(lease.boundary, end)):
            if not run.uses:
                run.uses = 1
                self.backups.mark_dirty(run)  # the policy may want from the first use on what others have brought
            run.priority = max(run.priority, lease.priority)

    def mark(self, lease: Lease, boundary: int) -> bool:
        """Have a ready lease keep its windows and states at a boundary too, since another prompt branches off there.

        False, and nothing changed, if the lease is past the pages that this needs.
        """
        assert lease.phase is Phase.READY
        if lease.snapshots >> boundary & 1:
            return lease.done < boundary
        reach = [lookback for lookback in self.lookbacks if lookback is not None]
        if boundary > lease.pages or lease.grown > boundary - max(reach, default=0) or lease.grown >= boundary:
            return False
        lease.snapshots |= 1 << boundary
        return True

    def _has_room_at(self, lease: Lease, boundary: int) -> bool:
        """Whether windows and states are kept at the end of a chunk for no other reason than that there is room."""
        policies, kept = self.config.policies, lease.snapshots | lease.passing
        if not policies.snapshot_chunks or boundary % self.grid or kept >> boundary & 1:
            return False
        kept &= ones(boundary)
        saved = (boundary - max(lease.boundary, kept.bit_length() - 1)) * self.config.page_tokens
        return saved >= policies.snapshot_gap and self.slot_pools.has_room(lease.root)

    def _worth_keeping(self, lease: Lease, pool: int, start: int, stop: int) -> int:
        """The positions in [start, stop) of a pool that some kept boundary needs."""
        lookback = self.lookbacks[pool]
        if lookback is None:
            return span(start, stop)
        keep = 0
        for boundary in members((lease.snapshots | lease.passing) & span(start + 1, stop + lookback)):
            keep |= needed(boundary, lookback)
        return keep & span(start, stop)
