"""Which runs are dirty: the write policy wants pages of them in storage that are not there. A dirty run is queued until
all of them are stored or have left memory.

A page is copied to the host once per use, whatever storage does. Each page that leaves memory unstored is counted by
its reason. A run whose copies fail too often while others succeed is quarantined, and retried later.
"""

from collections import OrderedDict
from itertools import islice

from kvarve.core.context import Context
from kvarve.core.copies.effects import Refusal
from kvarve.core.copies.limits import Governor, StorageState
from kvarve.core.policies import WritePolicy
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.core.tree.tree import Run
from kvarve.pages.pools import Tier

RETRY_BUDGET = 3  # copies of a run that may fail before it is quarantined
QUARANTINE_S = 60.0  # until a quarantined run is retried, unless a request uses it
LOOK = 64  # runs of a queue that one step looks at
BUSY_S = 2.0  # how long a run's next store waits for the one in flight, which may hang
LOOK_AGAIN_S = 0.1  # until a queue that found no free slots in the host is tried again


class Dirty:
    def __init__(self, context: Context, slot_pools: SlotPools, storage: StorageState, governor: Governor) -> None:
        self._context, self._storage, self._governor = context, storage, governor
        self._slot_pools = slot_pools
        self._pools = range(len(self._slot_pools.pools))
        self.hosts = [self._slot_pools.place(Tier.HOST, pool) for pool in self._pools]  # by pool, the place
        self.storages = [self._slot_pools.place(Tier.STORAGE, pool) for pool in self._pools]
        self.has_host = any(self._slot_pools.capacity[host] for host in self.hosts)
        self._has_device = self._slot_pools.memory[0] is Tier.DEVICE
        self.to_host: dict[Run, None] = {}  # runs that may have pages to copy to the host, oldest first
        self.to_store: OrderedDict[Run, None] = OrderedDict()  # dirty runs, oldest first
        self.busy: dict[Run, float] = {}  # runs with a store in flight that the next one waits for, and since when
        self.quarantined: dict[Run, float] = {}  # runs out of retry budget, with the time of their next try
        self.staged: dict[Run, None] = {}  # runs of which pages have just been copied to the host for storage
        self.blocked = [False, False]  # the host lacks slots for: [those to the host, those to store]
        self.look_again = 0.0  # when to retry a blocked queue

    def lazy(self, run: Run) -> bool:
        """Whether a run is backed up only when it is evicted."""
        return self._context.config.policies.write is WritePolicy.WRITE_BACK and not run.wanted

    def used_enough(self, run: Run) -> bool:
        """Whether a run has the uses that the write policy asks for before it backs up."""
        policies = self._context.config.policies
        selective = policies.write is WritePolicy.WRITE_THROUGH_SELECTIVE
        return run.wanted or not selective or run.uses >= policies.selective_uses

    def wants(self, run: Run) -> bool:
        """Whether a run is to be in storage now: by the policies, or since it was asked for whatever they say."""
        return run.wanted or (self.used_enough(run) and self._governor.wants(run))

    def want(self, run: Run, again: int = 0) -> None:
        """A run is to be in storage, whatever the write policy; its pages at the local positions `again` even if they
        have been stored."""
        run.wanted = True
        if again:
            run.stored = [stored & ~again for stored in run.stored]

    def missing(self, run: Run, pool: int) -> int:
        """Local positions of a run whose pages are not known to be in storage, though they are worth a copy."""
        return ~(run.stored[pool] | run.passing[pool])

    def unstored(self, run: Run) -> int:
        """How many pages of a run are in memory and not known to be in storage."""
        count = 0
        for pool, host in enumerate(self.hosts):
            if self._slot_pools.capacity[host]:
                count += (self._slot_pools.good(run, pool) & self.missing(run, pool)).bit_count()
        return count

    def lacks_above(self, run: Run) -> bool:
        """Whether storage lacks pages of chains that this run's pages rest on, as one that was attached later does."""
        at = run.parent
        while at is not None:
            if any((at.stored[pool] | at.passing[pool]).bit_count() < at.pages for pool in self._slot_pools.chains):
                return True
            at = at.parent
        return False

    def for_host(self, run: Run, pool: int) -> int:
        """Local positions of a run to copy to the host. Once per use: in a host that is smaller than the run, backups
        would otherwise evict each other for ever."""
        host = self.hosts[pool]
        if not self._slot_pools.capacity[host]:
            return 0
        sent = run.here[host] | run.coming[host] | run.backed_up_since_use[pool]
        return self._slot_pools.on(run, Tier.DEVICE, pool) & ~(sent | run.passing[pool])

    def for_storage(self, run: Run) -> tuple[list[int], list[int]]:
        """By pool, a run's dirty local positions that are not in flight: those in the host, and those that only the
        device has."""
        in_host, above = [0 for _ in self._pools], [0 for _ in self._pools]
        if self._storage.stores and run.pages and self.wants(run):
            for pool, host in enumerate(self.hosts):
                unsent = self.missing(run, pool) & ~run.coming[self.storages[pool]]
                in_host[pool] = run.here[host] & ~run.bad[host] & unsent
                if self._slot_pools.capacity[host]:
                    near = self._slot_pools.on(run, Tier.DEVICE, pool)
                    above[pool] = near & ~run.here[host] & ~run.coming[host] & unsent
        return in_host, above

    def dropped(self, run: Run, pool: int, gone: int) -> None:
        """Pages of a run (local positions) leave their last memory tier: count those that were never stored."""
        lost = (gone & self.missing(run, pool)).bit_count() if self._storage.loses() else 0
        if not lost or not self.used_enough(run):
            return
        counters, refused = self._context.counters, self._storage.refused
        if self._storage.down:
            counters.dropped_down += lost
        elif refused and self.wants(run):
            counters.dropped_full += lost if refused is Refusal.FULL else 0
            counters.dropped_read_only += lost if refused is Refusal.READ_ONLY else 0
        elif run.failed_backups >= RETRY_BUDGET:
            counters.dropped_failed += lost
        elif self.wants(run):
            counters.dropped_evicted += lost
        else:
            counters.dropped_unpaying += lost

    def reset(self) -> None:
        """Forget all stores that wait: another storage is attached, or none."""
        self.to_store.clear()
        self.busy.clear()
        self.quarantined.clear()

    def mark_dirty(self, run: Run) -> None:
        """A run may have pages to back up."""
        if not self.has_host or not run.pages or self.lazy(run):
            return
        self.quarantined.pop(run, None)
        if run not in self.to_host and self._has_device:
            self.to_host[run] = None
            self.blocked[0] = False
        if self._storage.stores and run not in self.to_store and run not in self.busy:
            self.to_store[run] = None
            self.blocked[1] = False

    def divided(self, front: Run, tail: Run) -> None:
        """A run was split: both parts stand in the queues in which it stood."""
        for line in (self.to_host, self.to_store, self.staged):
            if tail in line:
                line[front] = None
        if self.busy.pop(tail, None) is not None:  # its store may be of pages of one part
            self.to_store[front] = self.to_store[tail] = None
        if tail in self.quarantined:
            self.quarantined[front] = self.quarantined[tail]
        elif self._governor.paused:  # either part may fall into the governor's sample, though the whole did not
            self.mark_dirty(front)
            self.mark_dirty(tail)

    def removed(self, run: Run) -> None:
        """A run has left the tree."""
        for line in (self.to_host, self.to_store, self.busy, self.staged, self.quarantined):
            line.pop(run, None)

    def look(self) -> bool:
        """Whether any queue has runs, once those have come back whose time is up."""
        now = self._context.now
        for run in [*islice(self.quarantined, LOOK)] if self.quarantined else ():
            if now < self.quarantined[run]:
                break
            run.failed_backups = RETRY_BUDGET - 1
            self.mark_dirty(run)  # ends its quarantine
        while self.busy and now >= next(iter(self.busy.values())) + BUSY_S:
            self.end_store(next(iter(self.busy)))
        if not self.to_host and not self.to_store:  # the usual case: every token passes here
            return False
        if any(self.blocked) and now >= self.look_again:
            self.blocked, self.look_again = [False, False], now + LOOK_AGAIN_S
        return True

    def tried(self, run: Run, good: bool, excused: bool) -> bool:
        """Copies of a run have ended: it waits for others at the end of the queue. False if its retry budget is spent:
        it is quarantined."""
        run.failed_backups = 0 if good else run.failed_backups + (not excused)
        if not good:
            self.to_store.pop(run, None)
        if run.failed_backups < RETRY_BUDGET:
            self.mark_dirty(run)
            return True
        if run not in self.quarantined and run.pages:
            self._context.counters.given_up += 1
            for line in (self.to_host, self.to_store, self.busy):
                line.pop(run, None)
            self.quarantined[run] = self._context.now + QUARANTINE_S
        return False

    def used(self, run: Run) -> None:
        """A request resumes from a run: its retry budget is renewed, and its pages are backed up once more."""
        run.failed_backups = 0
        run.backed_up_since_use = [0] * len(self._pools)
        self.mark_dirty(run)

    def end_store(self, run: Run) -> None:
        if self.busy.pop(run, None) is not None:
            self.to_store[run] = None

    def attached(self, run: Run, wanted: bool) -> None:
        """A storage was attached, of whose content nothing is known."""
        run.stored = [0] * len(self._pools)
        run.failed_backups, run.wanted = 0, wanted

    def backed_up(self, run: Run, pool: int, local: int, again: bool = False) -> None:
        """Pages have been copied to the host, or are to be so `again`."""
        since = run.backed_up_since_use
        since[pool] = since[pool] & ~local if again else since[pool] | local

    def store(self, run: Run, pool: int, local: int) -> None:
        """Storage has a pool's pages."""
        run.stored[pool] |= local
        for tell in self._context.tell.stored:
            tell(run, pool, local)

    def lose(self, run: Run, pool: int, local: int) -> None:
        """Storage does not have them."""
        run.stored[pool] &= ~local
        self.mark_dirty(run)

    def keep(self, run: Run, pool: int, local: int) -> bool:
        """Pages are worth a copy from now on; whether some were not."""
        new = local & run.passing[pool]
        run.passing[pool] &= ~new
        return new > 0

    def pass_by(self, run: Run, pool: int, local: int) -> None:
        """Pages have come that are worth no copy."""
        run.passing[pool] |= local
