"""Copies down the tiers: what is sent when, and what follows when it has ended.

A dirty page that only the device has is copied to the host when its run's turn comes, and on to storage as soon as it
is there.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from kvarve.core.context import Context
from kvarve.core.copies.dirty import LOOK, RETRY_BUDGET, Dirty
from kvarve.core.copies.in_flight import BACKUP, STORE, Copies, Edge, Op, Part, PartOutcome
from kvarve.core.copies.limits import Governor, HostShare, StorageState
from kvarve.core.core_config import HORIZON_HOSTS
from kvarve.core.policies import WritePolicy
from kvarve.core.slots.eviction import Evictions
from kvarve.core.tree.tree import NOWHERE, Run, downward, root_of, upward
from kvarve.pages.boundaries import chosen, first, last, leading, members, of, ones, union
from kvarve.pages.pools import MEMORY_TIERS, Tier

ROOM_S = 2.0  # how long evictions wait for copies of which none ends


class Backups:
    """`storage`: how it does · `governor`: whether storing pays · `dirty`: which runs wait · `copies` in flight."""

    def __init__(self, context: Context, evictions: Evictions) -> None:
        config = context.config
        self._context, self._counters, self._evictions = context, context.counters, evictions
        self.slot_pools, self.residency = evictions.slot_pools, evictions.residency
        self.pools = range(len(config.pools))
        self._sizes = [pool.payload_bytes for pool in config.pools]
        self.storing = [0] * len(config.pools)  # by pool, pages in flight to storage
        self.staging = [0] * len(config.pools)  # by pool, pages in flight to the host that go on to storage
        self.to_host = 0  # pages in flight to the host
        self.room_since = 0.0  # when copies that evictions wait for began, or the last of them ended
        self.host_share = HostShare(config, self.slot_pools)
        horizon = config.offload_horizon_bytes or HORIZON_HOSTS * self.host_share.whole_bytes
        self.governor = Governor(config.policies.offload_pays_at, horizon)
        self.copies = Copies(self.residency)
        self.storage = StorageState(context)
        self.dirty = Dirty(context, self.slot_pools, self.storage, self.governor)
        self.storage.attached = config.storage and self.dirty.has_host
        self._hosts, self._storages = self.dirty.hosts, self.dirty.storages
        evictions.rescue, evictions.moving = self.rescue, self._moving
        self.residency.loses, self.residency.dropped = self.storage.loses, self.dirty.dropped
        self.residency.divided, self.residency.removed = self.dirty.divided, self.dirty.removed

    def void(self, op: Op, gone: bool) -> None:
        """A store's storage is down, so its pages may be sent again; if it is `gone`, its share of the host is free for
        the next storage. The store still reads its source slots until it has ended."""
        assert op.run is not None
        for part in op.parts:
            for run, local in upward(op.run, part.positions) if not op.void else ():
                run.coming[self._storages[part.pool]] &= ~local
            if gone and op.counts:
                self.storing[part.pool] -= part.positions.bit_count()

    # --- what is asked

    def waits(self) -> bool:
        """Whether the next steps will send a copy: not while the host lacks slots, nor once storage has failed
        `RETRY_BUDGET` stores in a row."""
        dirty = self.dirty
        to_storage = bool(dirty.to_store) and self.storage.failures < RETRY_BUDGET
        return (bool(dirty.to_host) and not dirty.blocked[0]) or (to_storage and not dirty.blocked[1])

    def count_dirty(self) -> int:
        """How many pages in memory are dirty."""
        dirty = self.dirty
        if not self.storage.down and not dirty.to_store and not dirty.quarantined and not any(self.storing):
            return 0
        if self.storage.only_read:
            return 0
        runs = self.residency.tree.runs()
        return sum(dirty.unstored(run) for run in runs if not dirty.lazy(run) and dirty.wants(run))

    @property
    def in_flight(self) -> int:
        """Pages of backups and stores in flight."""
        return self.to_host + sum(self.storing)

    def leaving(self) -> bool:
        """Whether evictions wait for copies in flight that still end; copies that hang free no slots."""
        return self._context.now < self.room_since + ROOM_S and bool(self.copies.leaving())

    def _moving(self) -> Iterator[tuple[Run, int, int]]:
        for op in self.copies.leaving():
            for part in op.parts if op.run is not None else ():
                assert op.run is not None
                yield op.run, self.slot_pools.place(op.edge[0], part.pool), part.positions.bit_count()

    def backing_off(self) -> bool:
        """Whether no store may be sent now: one has failed, and the back-off or the one try after it is under way."""
        storage = self.storage
        return storage.failures > 0 and (self._context.now < storage.back_off_until or self._under_way())

    def _under_way(self) -> bool:
        """Whether copies to the attached storage are in flight."""
        return any(self.staging) or any(op.edge == STORE and not op.void for op in self.copies.ops.values())

    # --- pages that come to memory

    def make_resident(self, run: Run, place: int, local: int, slots: Sequence[int]) -> int:
        """Make pages resident at local positions of a run, in these slots, in order. Returns the positions at which it
        did; the other slots stay the caller's, as a good copy or one that is being read is resident there, or the
        chain's parent is not."""
        if spoilt := local & run.bad[place]:
            for at in members(spoilt):
                if not self.copies.reads(place, run.slot(place, run.first + at)):
                    self.residency.leave(run, place, run.first + at)  # the good copy replaces it
        new, on_device = local & ~run.here[place], self.slot_pools.tier(place) is Tier.DEVICE
        if new and on_device and self.slot_pools.is_chain(place):
            above = run.parent
            rests = above is None or not run.first or run.here[place] & 1 or above.here[place] >> above.pages - 1
            new &= ones(leading(run.here[place] | new)) if rests else 0
        if new:
            self.residency.enter(run, place, new, chosen(slots, local, new))
            if run.passing[pool := place % len(self.pools)] & new:
                self.dirty.keep(run, pool, new)
            if on_device:
                if run.backed_up_since_use[pool] & new:
                    self.dirty.backed_up(run, pool, new, again=True)
                if any(run.bad):
                    self.heal(run)
        return new

    def heal(self, run: Run) -> None:
        """Drop bad host pages of which the device has good copies, and mark them for a new backup."""
        for pool, place in enumerate(self._hosts):
            near = self.slot_pools.on(run, Tier.DEVICE, pool)
            for local in members(run.bad[place] & near & ~self._bad_in_use(run, pool)):
                self.residency.leave(run, place, run.first + local)
                self.dirty.backed_up(run, pool, 1 << local, again=True)
                self.dirty.mark_dirty(run)

    def _bad_in_use(self, run: Run, pool: int) -> int:
        """Local positions of bad host pages that a copy in flight still reads, so that they cannot be replaced yet."""
        place = self._hosts[pool]
        bad = members(run.bad[place])
        return of(local for local in bad if self.copies.reads(place, run.slot(place, run.first + local)))

    # --- copies that have ended

    def ended(self, op: Op, tail: Run, outcomes: list[PartOutcome]) -> None:
        """A backup or store has ended; `tail` is its deepest run."""
        self.dirty.blocked = [False, False]  # the host may evict its sources now, or has pages to store
        stored, excused = op.edge[1] is Tier.STORAGE, False
        if not stored:
            self.to_host -= op.page_count
        elif not op.void:
            excused = self.storage.answered(outcomes, op.refused)
        touched: dict[Run, bool] = {}
        for outcome in outcomes:
            (pool, positions, _, targets), good, bad = outcome
            self._counters.failed += outcome.lost.bit_count()
            if stored:
                self.storing[pool] -= positions.bit_count() * op.counts
                self._counters.bad_host += bad.bit_count()
            else:
                self.staging[pool] -= positions.bit_count() * op.onward
                self._counters.backed_up += good.bit_count()
            for run, local, slots in downward(tail, positions, targets):
                here = good >> run.first & local
                touched[run] = touched.get(run, True) and here == local
                if not op.void:
                    run.coming[(self._storages if stored else self._hosts)[pool]] &= ~local
                if stored:
                    self._stored(run, pool, here, op.void)
                    # The host's copies that failed their check must not become sources again.
                    self.residency.mark_bad(run, self._hosts[pool], bad >> run.first & local)
                else:
                    self._backed_up(run, pool, here, dict(zip(members(local), slots, strict=True)))
        for run, good_ones in touched.items():
            if stored:
                self.dirty.end_store(run)
            self.heal(run)
            if self.dirty.tried(run, good_ones, excused) and op.onward:
                self.dirty.staged[run] = None
        if op.leaving:
            if not op.void:
                self.room_since = self._context.now
            self._evict_copied(op, tail, outcomes)

    def _stored(self, run: Run, pool: int, local: int, void: bool) -> None:
        self._counters.stored += local.bit_count()
        self._counters.stored_bytes += local.bit_count() * self._sizes[pool]
        if local and not void:
            self.dirty.store(run, pool, local)
            paused = self.governor.paused
            for at in members(local) if not run.wanted else ():  # which says nothing about the policies
                self.governor.stored(run, run.key(run.first + at), self._sizes[pool])
            if paused and not self.governor.paused:  # runs that it held back may be stored now
                for each in self.residency.tree.runs():
                    self.dirty.mark_dirty(each)

    def _backed_up(self, run: Run, pool: int, here: int, targets: dict[int, int]) -> None:
        """Pages (`here`) have been copied to the host; those that the tree does not take, or that failed, leave their
        targets free."""
        place = self._hosts[pool]
        self.dirty.backed_up(run, pool, here)
        taken = self.make_resident(run, place, here, [targets[at] for at in members(here)])
        if left := [slot for at, slot in targets.items() if not taken >> at & 1]:
            self.residency.give_back(place, left, root_of(run).named)

    def _evict_copied(self, op: Op, tail: Run, outcomes: list[PartOutcome]) -> None:
        """The copies that an eviction waited for have landed: drop their source pages, unless they are pinned again."""
        copied = [(position, part.pool) for part, good, _ in outcomes for position in members(good)]
        for position, pool in sorted(copied, key=lambda page: -page[0]):
            place, run = self.slot_pools.place(op.edge[0], pool), tail
            while run.first > position and run.parent is not None:
                run = run.parent
            host = self._hosts[pool]
            kept = run.stored[pool] if op.edge == STORE else run.here[host] & ~run.bad[host]
            if position < run.end and kept >> position - run.first & 1:
                self.residency.drop(run, place, position)

    # --- sending

    def send_staged(self) -> None:
        """Send staged pages on to storage, before the host evicts them."""
        while self.dirty.staged:
            run, _ = self.dirty.staged.popitem()
            self._send(run, STORE, self.dirty.for_storage(run)[0])

    def send_pending(self) -> None:
        """Send pending backups and stores, within the bound on pages in flight of each."""
        dirty = self.dirty
        if not dirty.look():
            return
        if dirty.to_host and not dirty.blocked[0]:
            before = self.copies.sent
            self._send_to_host()
            dirty.blocked[0] = self.copies.sent == before
        if dirty.to_store and not dirty.blocked[1] and not self.backing_off():
            before = self.copies.sent
            self._send_to_storage()
            dirty.blocked[1] = self.copies.sent == before and not self._under_way()

    def _send_to_host(self) -> None:
        full, backups, most = [False] * len(self.pools), self.dirty.to_host, self._context.config.backup_pages
        for run in [*islice(backups, LOOK)]:
            if self.to_host >= most:
                return
            if run not in backups:  # evicting for the runs before it took it out of the tree
                continue
            del backups[run]
            if not self.dirty.used_enough(run):
                continue
            wanted = [self.dirty.for_host(run, pool) for pool in self.pools]
            while any(wanted):
                fits = [0 if full[pool] else wanted[pool] for pool in self.pools]
                if not self._send(run, BACKUP, fits):
                    full = [full[pool] or not self.slot_pools.unused(self._hosts[pool]) for pool in self.pools]
                    break
                wanted = [self.dirty.for_host(run, pool) for pool in self.pools]
                if self.to_host >= most:
                    break
            if any(wanted) and run.pages:
                backups[run] = None  # at the end of the queue

    def _send_to_storage(self) -> None:
        """In order; a run that finds no slots in the stores' share of the host stays first until stores end.

        A few large stores cost less than many small ones, of which each waits for the medium. So a run whose store is
        sent here is busy until that has ended; its next one takes all that comes to the host meanwhile.
        """
        dirty, most = self.dirty, self._context.config.backup_pages
        while dirty.to_store and not self.backing_off() and sum(self.storing) + sum(self.staging) < most:
            run = next(iter(dirty.to_store))
            in_host, above = self.dirty.for_storage(run)
            if not any(in_host) and not any(above):
                del dirty.to_store[run]
            elif self._send(run, STORE, in_host):
                del dirty.to_store[run]
                dirty.busy[run] = self._context.now
            elif not self._send(run, BACKUP, above, onward=True):
                return

    def _send(self, run: Run, edge: Edge, wanted: list[int], *, leaving: bool = False, onward: bool = False) -> int:
        """Start copying local positions of a run, by pool, down one tier; returns those of which a copy has begun.

        `leaving`: an eviction waits for them; `onward`: they go on to storage.
        """
        held = union(wanted)
        # Checked here, as an eviction on the way may have sent a store.
        if not held or (edge == STORE and self.backing_off()):
            return 0
        # Reserving targets must not evict the sources, nor the host pages that a backup's chain needs before it.
        tiers = MEMORY_TIERS if edge == BACKUP and not onward else edge[:1]
        self.residency.pin(run, held << run.first, tiers=tiers)
        parts, begun, root = list[Part](), 0, root_of(run).named
        pages, left_bytes = 0, self._most_bytes(edge, wanted)
        for pool, bits in enumerate(wanted):
            most = bits.bit_count()
            if not leaving:  # up to a batch, or more while their bytes are few
                config, for_storage = self._context.config, sum(self.storing) + sum(self.staging)  # with these
                in_flight = for_storage if onward or edge == STORE else self.to_host + pages
                fit = min(config.backup_pages - in_flight, left_bytes // self._sizes[pool])
                most = min(most, max(0, config.batch_pages - pages, fit))
            if onward or edge == STORE:
                most = min(most, self.host_share.left(pool, self.storing, self.staging))
            if edge == BACKUP:
                targets = self._evictions.reserve(self._hosts[pool], most, root)
                self.staging[pool] += len(targets) if onward else 0
            else:
                targets = [NOWHERE] * most
                self.storing[pool] += most
            # Evictions take a run from the tail, backups from the front.
            local = last(bits, len(targets)) if leaving else first(bits, len(targets))
            if local:
                sources = run.slots_at(self.slot_pools.place(edge[0], pool), local)
                parts.append(Part(pool, local << run.first, sources, targets))
                run.coming[self.slot_pools.place(edge[1], pool)] |= local
                begun |= local
                pages, left_bytes = pages + len(targets), left_bytes - len(targets) * self._sizes[pool]
        if parts:
            self._start(Op(edge, parts, run=run, leaving=leaving, onward=onward))
        self.residency.unpin(run, held << run.first, tiers=tiers)
        return begun

    def _start(self, op: Op) -> None:
        self.to_host += op.page_count if op.edge == BACKUP else 0
        if op.leaving and not self.copies.leaving():
            self.room_since = self._context.now
        self.copies.send(op)

    def _most_bytes(self, edge: Edge, wanted: list[int]) -> int:
        """How many bytes a copy of these local positions, by pool, may have. A small rest, such as the state behind
        the pages of a prompt, goes with it, as each copy costs an agreement and each store waits for the medium."""
        config = self._context.config
        most = config.store_bytes if edge == STORE else config.backup_bytes
        whole = sum(bits.bit_count() * size for bits, size in zip(wanted, self._sizes, strict=True))
        return whole if whole <= most + most // 4 else most

    # --- evictions

    def rescue(self, run: Run, place: int, lost: int, stuck: int) -> int | None:
        """Pages about to be evicted from memory: under write-back, and where pages that stay rest on them, copy them
        down first. Returns the positions that must not leave yet; None if none is to be copied, so nothing was done."""
        tier, pool = self.slot_pools.tier(place), place % len(self.pools)
        write_back = self._context.config.policies.write is WritePolicy.WRITE_BACK
        write_back = write_back and run.failed_backups < RETRY_BUDGET
        want = lost & ~run.passing[pool] if write_back else stuck
        if not want:
            return None
        if tier is Tier.HOST:
            stores = write_back and self.storage.stores and not self.backing_off() and self.dirty.wants(run)
            return self._rescue_from_host(run, pool, want) if stores else 0
        if not self.slot_pools.capacity[self._hosts[pool]]:
            return 0
        taken = run.coming[self._hosts[pool]] | self._bad_in_use(run, pool)  # no second copy to the host would be kept
        wanted = [want & ~taken if each == pool else 0 for each in self.pools]
        moving = self._send(run, BACKUP, wanted, leaving=True)
        # While the host frees slots, pages that found none yet stay rather than being lost.
        return want if self.leaving() else moving

    def _rescue_from_host(self, run: Run, pool: int, lost: int) -> int:
        """The same from the host. A chain's page takes with it all other pages of its position."""
        going = [lost if each == pool or self.slot_pools.is_chain(pool) else 0 for each in self.pools]
        # Once per use here too: pages that evict each other from the host would be backed up for ever.
        above = [bits & self.dirty.for_host(run, each) for each, bits in zip(self.pools, going, strict=True)]
        waiting = self._send(run, BACKUP, above)
        below = [
            bits & ~waiting & run.here[host] & ~run.bad[host] & ~run.stored[each] & ~run.coming[self._storages[each]]
            for each, host, bits in zip(self.pools, self._hosts, going, strict=True)
        ]
        return lost & (waiting | self._send(run, STORE, below, leaving=True))

    def evict_ahead(self) -> None:
        """Under write-back, evict before slots are needed: a slot is free only once its page has been copied."""
        if self._context.config.policies.write is not WritePolicy.WRITE_BACK:
            return
        backing_off = self.storage.attached and self.backing_off()
        for place in range(len(self.slot_pools.capacity)):
            tier, pool = self.slot_pools.tier(place), place % len(self.pools)
            if backing_off and tier is Tier.HOST:  # its pages could not be stored, and perhaps need not go
                continue
            short = self.slot_pools.committed(place) // 8 - self.slot_pools.unused(place)
            coming = sum(op.of_pool(pool).bit_count() for op in self.copies.leaving() if op.edge[0] is tier)
            if short > coming:
                self._evictions.evict(place, short - coming)
