"""Copies down the tiers: which runs are dirty, which copies wait, back off or are quarantined.

A run is *dirty* if the write policy wants pages of it in storage that are not there. It is queued until all of them are
stored or have left memory; each page that leaves memory unstored is counted by its reason. A page is copied to the host
once per use, whatever storage does. A dirty page that only the device has is copied to the host when its run's turn
comes, and on to storage as soon as it is there.

When a store fails, stores back off, twice as long each time in a row; then one store is tried alone (half-open). A run
whose copies fail too often while others succeed is quarantined, and retried later.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvarve.core.copies.effects import Refusal
from kvarve.core.copies.governor import Governor
from kvarve.core.copies.host_share import HostShare
from kvarve.core.copies.in_flight import BACKUP, STORE, Edge, Op, Part, PartOutcome
from kvarve.core.core_config import HORIZON_HOSTS
from kvarve.core.policies import WritePolicy
from kvarve.core.tree.tree import NOWHERE, Run, covering, downward, root_of, upward
from kvarve.pages.boundaries import chosen, first, last, leading, members, of, ones, union
from kvarve.pages.pools import MEMORY_TIERS, Tier

if TYPE_CHECKING:
    from kvarve.core.state import State

RETRY_BUDGET = 3  # copies of a run that may fail before it is quarantined
QUARANTINE_S = 60.0  # until a quarantined run is retried, unless a request uses it
BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 30.0  # of stores: after a first failure, and at most, doubling in between
ROOM_S = 2.0  # how long evictions wait for copies of which none ends
LOOK = 64  # runs of a queue that one step looks at
BUSY_S = 2.0  # how long a run's next store waits for the one in flight, which may hang
LOOK_AGAIN_S = 0.1  # until a queue that found no free slots in the host is tried again


class Backups:
    def __init__(self, state: "State") -> None:
        self.state, self.slot_pools, self.copies, self.counters = state, state.slot_pools, state.copies, state.counters
        config = state.config
        self.pools = range(len(config.pools))
        self.pending_backup: dict[Run, None] = {}  # runs that may have pages to copy to the host, oldest first
        self.pending_store: OrderedDict[Run, None] = OrderedDict()  # dirty runs, oldest first
        self.busy: dict[Run, float] = {}  # runs with a store in flight that the next one waits for, and since when
        self.quarantined: dict[Run, float] = {}  # runs out of retry budget, with the time of their next try
        self.staged: dict[Run, None] = {}  # runs of which pages have just been copied to the host for storage
        self.to_host = 0  # pages in flight to the host
        self.storing = [0] * len(config.pools)  # by pool, pages in flight to storage
        self.staging = [0] * len(config.pools)  # by pool, pages in flight to the host that go on to storage
        self.blocked = [False, False]  # the host lacks slots for: [pending backups, pending stores]
        self.room_since = 0.0  # when copies that evictions wait for began, or the last of them ended
        self.look_again = 0.0  # when to retry a blocked queue
        self.down = False  # a storage is attached, but does not answer
        self.only_read = False  # nothing is to be stored in it
        self.refused = Refusal.NONE  # why it did not take pages of the store that ended last
        self.host_share = HostShare(state, self.slot_pools)
        self.has_host = any(self.slot_pools.capacity[self._host(pool)] for pool in self.pools)
        horizon = config.offload_horizon_bytes or HORIZON_HOSTS * self.host_share.whole_bytes
        self.governor = Governor(config.policies.offload_pays_at, horizon)
        self.reset()

    def reset(self, down: bool = False) -> None:
        """Forget all that is known of the storage: another one is attached, or none, or it is `down`."""
        self.pending_store.clear()
        self.busy.clear()
        self.quarantined.clear()
        self.down, self.refused = down, Refusal.NONE
        self.failures, self.back_off_until = 0, self.state.now  # stores that failed in a row
        self.governor.reset()

    def void(self, op: Op, gone: bool) -> None:
        """A store's storage is down, so its pages may be sent again; if it is `gone`, its share of the host is free for
        the next storage. The store still reads its source slots until it has ended."""
        assert op.run is not None
        for part in op.parts:
            for run, local in upward(op.run, part.positions) if not op.void else ():
                run.coming[self._storage(part.pool)] &= ~local
            if gone and op.counts:
                self.storing[part.pool] -= part.positions.bit_count()

    def waits(self) -> bool:
        """Whether the next steps will send a copy: not while the host lacks slots, nor once storage has failed
        `RETRY_BUDGET` stores in a row."""
        to_host, to_storage = bool(self.pending_backup), bool(self.pending_store) and self.failures < RETRY_BUDGET
        return (to_host and not self.blocked[0]) or (to_storage and not self.blocked[1])

    def dirty(self) -> int:
        """How many pages in memory are dirty."""
        if not self.down and not self.pending_store and not self.quarantined and not any(self.storing):
            return 0
        if self.only_read:
            return 0
        return sum(self._unstored(run) for run in self.slot_pools.runs() if not self._lazy(run) and self._wants(run))

    def _unstored(self, run: Run) -> int:
        """How many pages of a run are in memory and not known to be in storage."""
        count = 0
        for pool in self.pools:
            if self.slot_pools.capacity[self._host(pool)]:
                count += (self.slot_pools.good(run, pool) & self._missing(run, pool)).bit_count()
        return count

    def _missing(self, run: Run, pool: int) -> int:
        """Local positions of a run whose pages are not known to be in storage, though they are worth a copy."""
        return ~(run.stored[pool] | run.passing[pool])

    def lacks(self, run: Run) -> bool:
        """Whether storage lacks pages of chains that this run's pages rest on, as one that was attached later does."""
        at = run.parent
        while at is not None:
            if any((at.stored[pool] | at.passing[pool]).bit_count() < at.pages for pool in self.slot_pools.chains):
                return True
            at = at.parent
        return False

    def _wants(self, run: Run) -> bool:
        """Whether a run is to be in storage now: by the policies, or since it was asked for whatever they say."""
        return run.wanted or (self._used_enough(run) and self.governor.wants(run))

    @property
    def in_flight(self) -> int:
        """Pages of backups and stores in flight."""
        return self.to_host + sum(self.storing)

    def mark_dirty(self, run: Run) -> None:
        """A run may have pages to back up."""
        if not self.has_host or not run.pages or self._lazy(run):
            return
        self.quarantined.pop(run, None)
        if run not in self.pending_backup and self.slot_pools.memory[0] is Tier.DEVICE:
            self.pending_backup[run] = None
            self.blocked[0] = False
        if self._stores and run not in self.pending_store and run not in self.busy:
            self.pending_store[run] = None
            self.blocked[1] = False

    def mark_all_dirty(self) -> None:
        """Every run may have pages to back up."""
        for run in self.slot_pools.runs():
            self.mark_dirty(run)

    def _lazy(self, run: Run) -> bool:
        """Whether a run is backed up only when it is evicted."""
        return self.state.config.policies.write is WritePolicy.WRITE_BACK and not run.wanted

    def keeps_in_host(self, run: Run) -> bool:
        """Whether the write policy wants host copies of a run's device pages."""
        return not self._lazy(run) and self._used_enough(run)

    def divided(self, front: Run, tail: Run) -> None:
        """A run was split: both parts stand in the queues in which it stood."""
        for line in (self.pending_backup, self.pending_store, self.staged):
            if tail in line:
                line[front] = None
        if self.busy.pop(tail, None) is not None:  # its store may be of pages of one part
            self.pending_store[front] = self.pending_store[tail] = None
        if tail in self.quarantined:
            self.quarantined[front] = self.quarantined[tail]
        elif self.governor.paused:  # either part may fall into the governor's sample, though the whole did not
            self.mark_dirty(front)
            self.mark_dirty(tail)

    def removed(self, run: Run) -> None:
        """A run has left the tree."""
        for line in (self.pending_backup, self.pending_store, self.staged):
            line.pop(run, None)
        self.busy.pop(run, None)
        self.quarantined.pop(run, None)

    def leaving(self) -> bool:
        """Whether evictions wait for copies in flight that still end; copies that hang free no slots."""
        going_on = self.state.now < self.room_since + ROOM_S
        return going_on and any(op.leaving and not op.void for op in self.copies.ops.values())

    def make_resident(self, run: Run, place: int, local: int, slots: Sequence[int]) -> int:
        """Make pages resident at local positions of a run, in these slots, in order. Returns the positions at which it
        did; the other slots stay the caller's, as a good copy or one that is being read is resident there, or the
        chain's parent is not."""
        slot_pools, here = self.slot_pools, run.here
        if spoilt := local & run.bad[place]:
            for at in members(spoilt):
                if not self.copies.reads(place, run.slot(place, run.first + at)):
                    slot_pools.leave(run, place, run.first + at)  # the good copy replaces it
        new, on_device = local & ~here[place], slot_pools.tier(place) is Tier.DEVICE
        if new and on_device and slot_pools.is_chain(place):
            rests = not run.first or here[place] & 1 or self._on(run, place, run.first - 1)
            new &= ones(leading(here[place] | new)) if rests else 0
        if new:
            slot_pools.make_resident(run, place, new, chosen(slots, local, new))
            if on_device:
                run.backed_up_since_use[place] &= ~new
                if any(run.bad):
                    self.heal(run)
        return new

    def heal(self, run: Run) -> None:
        """Drop bad host pages of which the device has good copies, and mark them for a new backup."""
        for pool in self.pools:
            place = self._host(pool)
            for local in members(run.bad[place] & self._near(run, pool) & ~self._bad_in_use(run, pool)):
                self.slot_pools.leave(run, place, run.first + local)
                run.backed_up_since_use[pool] &= ~(1 << local)
                self.mark_dirty(run)

    def _bad_in_use(self, run: Run, pool: int) -> int:
        """Local positions of bad host pages that a copy in flight still reads, so that they cannot be replaced yet."""
        place = self._host(pool)
        bad = members(run.bad[place])
        return of(local for local in bad if self.copies.reads(place, run.slot(place, run.first + local)))

    def _on(self, run: Run, place: int, position: int) -> bool:
        run = covering(run, position)
        return bool(run.here[place] >> position - run.first & 1)

    def _near(self, run: Run, pool: int) -> int:
        """Local positions of a run on the device."""
        return self.slot_pools.on(run, Tier.DEVICE, pool)

    def _host(self, pool: int) -> int:
        return self.slot_pools.place(Tier.HOST, pool)

    def _storage(self, pool: int) -> int:
        return self.slot_pools.place(Tier.STORAGE, pool)

    # --- copies that have ended

    def ended(self, op: Op, tail: Run, outcomes: list[PartOutcome]) -> None:
        """A backup or store has ended; `tail` is its deepest run."""
        target = op.edge[1]
        if target is Tier.HOST:
            self.to_host -= op.page_count
        self.blocked = [False, False]  # the host may evict its sources now, or has pages to store
        excused = target is Tier.STORAGE and not op.void and self._storage_answered(outcomes)
        if target is Tier.STORAGE and not op.void:
            self.refused = op.refused
        touched: dict[Run, bool] = {}
        for outcome in outcomes:
            (pool, positions, _, targets), good, bad = outcome
            self.counters.failed += outcome.lost.bit_count()
            if target is Tier.STORAGE:
                self.storing[pool] -= positions.bit_count() * op.counts
                self.counters.bad_host += bad.bit_count()
            else:
                self.staging[pool] -= positions.bit_count() * op.onward
                self.counters.backed_up += good.bit_count()
            for run, local, slots in downward(tail, positions, targets):
                here, place = good >> run.first & local, self.slot_pools.place(target, pool)
                touched[run] = touched.get(run, True) and here == local
                if not op.void:
                    run.coming[place] &= ~local
                if target is Tier.STORAGE:
                    self._stored(run, pool, here, op.void)
                    # The host's copies that failed their check must not become sources again.
                    self.slot_pools.mark_bad(run, self._host(pool), bad >> run.first & local)
                else:
                    run.backed_up_since_use[pool] |= here
                    taken = self.make_resident(run, place, here, chosen(slots, local, here))
                    if left := local & ~taken:
                        self.slot_pools.give_back(place, chosen(slots, local, left), root_of(run).named)
        for run, good in touched.items():
            if target is Tier.STORAGE and self.busy.pop(run, None) is not None:
                self.pending_store[run] = None
            self.heal(run)
            run.failed_backups = 0 if good else run.failed_backups + (not excused)
            if not good:
                self.pending_store.pop(run, None)  # `mark_dirty` puts it at the end of the queue
            if run.failed_backups >= RETRY_BUDGET:
                self._quarantine_run(run)
            else:
                self.mark_dirty(run)
                if op.onward:
                    self.staged[run] = None
        if op.leaving and not op.void:
            self.room_since = self.state.now
        if op.leaving:
            self._evict_copied(op, tail, outcomes)

    def _quarantine_run(self, run: Run) -> None:
        """A run's retry budget is spent: take it out of the queues for a while."""
        if run in self.quarantined or not run.pages:
            return
        self.counters.given_up += 1
        self.pending_backup.pop(run, None)
        self.pending_store.pop(run, None)
        self.busy.pop(run, None)
        self.quarantined[run] = self.state.now + QUARANTINE_S

    def _end_quarantines(self) -> None:
        """Quarantined runs whose time is up get one more try."""
        for run in [*islice(self.quarantined, LOOK)]:
            if self.state.now < self.quarantined[run]:
                return
            run.failed_backups = RETRY_BUDGET - 1
            self.mark_dirty(run)  # ends its quarantine

    def _stored(self, run: Run, pool: int, local: int, void: bool) -> None:
        size_bytes = self.state.config.pools[pool].payload_bytes
        self.counters.stored += local.bit_count()
        self.counters.stored_bytes += local.bit_count() * size_bytes
        if local and not void:
            self.slot_pools.store(run, pool, local)
            paused = self.governor.paused
            for at in members(local) if not run.wanted else ():  # which says nothing about the policies
                self.governor.stored(run, run.key(run.first + at), size_bytes)
            if paused and not self.governor.paused:  # runs that it held back may be stored now
                self.mark_all_dirty()

    def _storage_answered(self, outcomes: list[PartOutcome]) -> bool:
        """Start or end the back-off of stores by how one of them ended. True if its failure does not count against the
        runs' retry budgets, since storage was failing before."""
        any_good = any(good for _, good, _ in outcomes)
        if not any(outcome.failed for outcome in outcomes):
            if any_good:
                self.failures, self.back_off_until = 0, self.state.now
            return False
        known = self.failures > 0 and not any_good
        if self.state.now >= self.back_off_until:  # else it was sent before this back-off began
            self.failures += 1
            self.back_off_until = self.state.now + min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** min(self.failures - 1, 10))
        return known

    def backing_off(self) -> bool:
        """Whether no store may be sent now: one has failed, and the back-off or the one try after it is under way."""
        return self.failures > 0 and (self.state.now < self.back_off_until or self._under_way())

    def _under_way(self) -> bool:
        """Whether copies to the attached storage are in flight."""
        return any(self.staging) or any(op.edge == STORE and not op.void for op in self.copies.ops.values())

    def _evict_copied(self, op: Op, tail: Run, outcomes: list[PartOutcome]) -> None:
        """The copies that an eviction waited for have landed: drop their source pages, unless they are pinned again."""
        copied = [(position, part.pool) for part, good, _ in outcomes for position in members(good)]
        for position, pool in sorted(copied, key=lambda page: -page[0]):
            place, run = self.slot_pools.place(op.edge[0], pool), tail
            while run.first > position and run.parent is not None:
                run = run.parent
            local = 1 << position - run.first
            host = self._host(pool)
            kept = run.stored[pool] if op.edge == STORE else run.here[host] & ~run.bad[host]
            if position < run.end and kept & local:
                self.slot_pools.drop(run, place, position)

    # --- sending

    def _for_host(self, run: Run, pool: int) -> int:
        """Local positions of a run to copy to the host. Once per use: in a host that is smaller than the run, backups
        would otherwise evict each other for ever."""
        host = self._host(pool)
        if not self.slot_pools.capacity[host]:
            return 0
        sent = run.here[host] | run.coming[host] | run.backed_up_since_use[pool]
        return self._near(run, pool) & ~(sent | run.passing[pool])

    def _dirty(self, run: Run) -> tuple[list[int], list[int]]:
        """By pool, a run's dirty local positions that are not in flight: those in the host, and those that only the
        device has."""
        in_host, above = [0 for _ in self.pools], [0 for _ in self.pools]
        if self._stores and run.pages and self._wants(run):
            for pool in self.pools:
                host, unsent = self._host(pool), self._missing(run, pool) & ~run.coming[self._storage(pool)]
                in_host[pool] = run.here[host] & ~run.bad[host] & unsent
                if self.slot_pools.capacity[host]:
                    above[pool] = self._near(run, pool) & ~run.here[host] & ~run.coming[host] & unsent
        return in_host, above

    def send_staged(self) -> None:
        """Send staged pages on to storage, before the host evicts them."""
        while self.staged:
            run, _ = self.staged.popitem()
            self._send(run, STORE, self._dirty(run)[0], leaving=False)

    def send_pending(self) -> None:
        """Send pending backups and stores, within the bound on pages in flight of each."""
        if self.quarantined:
            self._end_quarantines()
        while self.busy and self.state.now >= next(iter(self.busy.values())) + BUSY_S:
            run = next(iter(self.busy))
            del self.busy[run]
            self.pending_store[run] = None
        if not self.pending_backup and not self.pending_store:  # the usual case: every token passes here
            return
        if any(self.blocked) and self.state.now >= self.look_again:
            self.blocked, self.look_again = [False, False], self.state.now + LOOK_AGAIN_S
        if self.pending_backup and not self.blocked[0]:
            before = self.copies.sent
            self._send_to_host()
            self.blocked[0] = self.copies.sent == before
        if self.pending_store and not self.blocked[1] and not self.backing_off():
            before = self.copies.sent
            self._send_to_storage()
            self.blocked[1] = self.copies.sent == before and not self._under_way()

    def _send_to_host(self) -> None:
        full = [False] * len(self.pools)
        for run in [*islice(self.pending_backup, LOOK)]:
            if self.to_host >= self.state.config.backup_pages:
                return
            if run not in self.pending_backup:  # evicting for the runs before it took it out of the tree
                continue
            del self.pending_backup[run]
            if not self._used_enough(run):
                continue
            wanted = [self._for_host(run, pool) for pool in self.pools]
            while any(wanted):
                fits = [0 if full[pool] else wanted[pool] for pool in self.pools]
                if not self._send(run, BACKUP, fits, leaving=False):
                    full = [full[pool] or not self.slot_pools.unused(self._host(pool)) for pool in self.pools]
                    break
                wanted = [self._for_host(run, pool) for pool in self.pools]
                if self.to_host >= self.state.config.backup_pages:
                    break
            if any(wanted) and run.pages:
                self.pending_backup[run] = None  # at the end of the queue

    def _send_to_storage(self) -> None:
        """In order; a run that finds no slots in the stores' share of the host stays first until stores end.

        A few large stores cost less than many small ones, of which each waits for the medium. So a run whose store is
        sent here is busy until that has ended; its next one takes all that comes to the host meanwhile.
        """
        while (
            self.pending_store
            and not self.backing_off()
            and sum(self.storing) + sum(self.staging) < self.state.config.backup_pages
        ):
            run = next(iter(self.pending_store))
            in_host, above = self._dirty(run)
            if not any(in_host) and not any(above):
                del self.pending_store[run]
            elif self._send(run, STORE, in_host, leaving=False):
                del self.pending_store[run]
                self.busy[run] = self.state.now
            elif not self._send(run, BACKUP, above, leaving=False, onward=True):
                return

    def _used_enough(self, run: Run) -> bool:
        """Whether a run has the uses that the write policy asks for before it backs up."""
        selective = self.state.config.policies.write is WritePolicy.WRITE_THROUGH_SELECTIVE
        return run.wanted or not selective or run.uses >= self.state.config.policies.selective_uses

    @property
    def counts_dropped(self) -> bool:
        """Whether a page that leaves memory unstored is lost: there is a storage for it."""
        return not self.only_read and (self.copies.storage or self.down)

    @property
    def _stores(self) -> bool:
        return self.copies.storage and not self.only_read

    def count_dropped(self, run: Run, pool: int, gone: int) -> None:
        """Pages of a run (local positions) leave their last memory tier: count those that were never stored."""
        lost = (gone & self._missing(run, pool)).bit_count() if self.counts_dropped else 0
        if not lost or not self._used_enough(run):
            return
        if self.down:
            self.counters.dropped_down += lost
        elif self.refused and self._wants(run):
            self.counters.dropped_full += lost if self.refused is Refusal.FULL else 0
            self.counters.dropped_read_only += lost if self.refused is Refusal.READ_ONLY else 0
        elif run.failed_backups >= RETRY_BUDGET:
            self.counters.dropped_failed += lost
        elif self._wants(run):
            self.counters.dropped_evicted += lost
        else:
            self.counters.dropped_unpaying += lost

    def _send(self, run: Run, edge: Edge, wanted: list[int], leaving: bool, onward: bool = False) -> int:
        """Start copying local positions of a run, by pool, down one tier; returns those of which a copy has begun.

        `leaving`: an eviction waits for them; `onward`: they go on to storage.
        """
        held = union(wanted)
        # Checked here, as an eviction on the way may have sent a store.
        if not held or (edge == STORE and self.backing_off()):
            return 0
        # Reserving targets must not evict the sources, nor the host pages that a backup's chain needs before it.
        tiers = MEMORY_TIERS if edge == BACKUP and not onward else edge[:1]
        self.slot_pools.pin(run, held << run.first, tiers=tiers)
        parts, begun = list[Part](), 0
        most_bytes = self._most_bytes(edge, wanted)
        for pool, bits in enumerate(wanted):
            most = bits.bit_count() if leaving else self._may_join(parts, most_bytes, edge, pool, onward)
            if onward or edge == STORE:
                most = min(most, self.host_share.left(pool, self.storing, self.staging))
            most = min(most, bits.bit_count())
            if edge == BACKUP:
                targets = self.slot_pools.reserve(self._host(pool), most, root_of(run).named)
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
        if parts:
            op = Op(edge, parts, run=run, leaving=leaving, onward=onward)
            self.to_host += op.page_count if edge == BACKUP else 0
            if leaving and not any(op.leaving and not op.void for op in self.copies.ops.values()):
                self.room_since = self.state.now
            self.copies.send(op)
        self.slot_pools.unpin(run, held << run.first, tiers=tiers)
        return begun

    def _most_bytes(self, edge: Edge, wanted: list[int]) -> int:
        """How many bytes a copy of these local positions, by pool, may have. A small rest, such as the state behind
        the pages of a prompt, goes with it, as each copy costs an agreement and each store waits for the medium."""
        config = self.state.config
        most = config.store_bytes if edge == STORE else config.backup_bytes
        whole = sum(bits.bit_count() * pool.payload_bytes for bits, pool in zip(wanted, config.pools, strict=True))
        return whole if whole <= most + most // 4 else most

    def _may_join(self, parts: list[Part], most_bytes: int, edge: Edge, pool: int, onward: bool) -> int:
        """How many pages of a pool may join these in one copy: up to a batch, or more while their bytes are few."""
        config, size_bytes = self.state.config, self.state.config.pools[pool].payload_bytes
        pages = sum(len(part.targets) for part in parts)
        for_storage = sum(self.storing) + sum(self.staging)  # with these
        in_flight = for_storage if onward or edge == STORE else self.to_host + pages
        fit = (
            most_bytes - sum(len(part.targets) * config.pools[part.pool].payload_bytes for part in parts)
        ) // size_bytes
        return max(0, config.batch_pages - pages, min(config.backup_pages - in_flight, fit))

    def rescue(self, run: Run, place: int, lost: int, stuck: int) -> int | None:
        """Pages about to be evicted from memory: under write-back, and where pages that stay rest on them, copy them
        down first. Returns the positions that must not leave yet; None if none is to be copied, so nothing was done."""
        tier, pool = self.slot_pools.tier(place), place % len(self.pools)
        write_back = self.state.config.policies.write is WritePolicy.WRITE_BACK and run.failed_backups < RETRY_BUDGET
        want = lost & ~run.passing[pool] if write_back else stuck
        if not want:
            return None
        if tier is Tier.HOST:
            stores = self._stores and not self.backing_off() and self._wants(run)
            return self._rescue_from_host(run, pool, want) if write_back and stores else 0
        if not self.slot_pools.capacity[self._host(pool)]:
            return 0
        taken = run.coming[self._host(pool)] | self._bad_in_use(run, pool)  # no second copy to the host would be kept
        wanted = [want & ~taken if each == pool else 0 for each in self.pools]
        moving = self._send(run, BACKUP, wanted, leaving=True)
        # While the host frees slots, pages that found none yet stay rather than being lost.
        return want if self.leaving() else moving

    def _rescue_from_host(self, run: Run, pool: int, lost: int) -> int:
        """The same from the host. A chain's page takes with it all other pages of its position."""
        going = [lost if each == pool or self.slot_pools.is_chain(pool) else 0 for each in self.pools]
        hosts = [self._host(each) for each in self.pools]
        # Once per use here too: pages that evict each other from the host would be backed up for ever.
        above = [bits & self._for_host(run, each) for each, bits in zip(self.pools, going, strict=True)]
        waiting = self._send(run, BACKUP, above, leaving=False)
        below = [
            bits & ~waiting & run.here[host] & ~run.bad[host] & ~run.stored[each] & ~run.coming[self._storage(each)]
            for each, host, bits in zip(self.pools, hosts, going, strict=True)
        ]
        return lost & (waiting | self._send(run, STORE, below, leaving=True))

    def evict_ahead(self) -> None:
        """Under write-back, evict before slots are needed: a slot is free only once its page has been copied."""
        if self.state.config.policies.write is not WritePolicy.WRITE_BACK:
            return
        backing_off = self.copies.storage and self.backing_off()
        for place in range(len(self.slot_pools.capacity)):
            tier, pool = self.slot_pools.tier(place), place % len(self.pools)
            if backing_off and tier is Tier.HOST:  # its pages could not be stored, and perhaps need not go
                continue
            short = self.slot_pools.committed(place) // 8 - self.slot_pools.unused(place)
            coming = sum(
                op.of_pool(pool).bit_count()
                for op in self.copies.ops.values()
                if op.leaving and not op.void and op.edge[0] is tier
            )
            if short > coming:
                self.slot_pools.evict(place, short - coming)
