"""Pages on their way down: what the write policy owes, evictions that wait for a copy, and pages that heal.

A run *owes* when it may have pages to back up; owing is cheap and may be in vain. Each step sends what is owed, within
a bound on what may be in flight, so a slow storage holds no more of the host than that. What is due to storage waits in
a line of its own, for when storage fails a store, stores rest: the longer, the more often in a row it fails. After each
rest one copy tries. Meanwhile pages go down to the host as ever, and leave it as ever; that is counted.
"""

from kvarve.boundaries import members, of, union
from kvarve.core.copies import BACKUP, STORE, Copies, Edge, Fate, Moving, Op
from kvarve.core.governor import Governor
from kvarve.core.policies import WritePolicy
from kvarve.core.settings import HORIZON_HOSTS, CoreConfig, Counters
from kvarve.core.shelves import Shelves
from kvarve.core.tree import NOWHERE, Run, covering
from kvarve.model import Tier

TRIES = 3  # backups of a run that may fail before it has to be used again to be tried again
REST_S, LONGEST_REST_S = 0.1, 30.0  # of stores: after a first failure, and at most, doubling in between


class Backups:
    def __init__(self, config: CoreConfig, shelves: Shelves, copies: Copies, counters: Counters) -> None:
        self.config, self.shelves, self.copies, self.counters = config, shelves, copies, counters
        self.pools = range(len(config.pools))
        self.now = 0.0
        self.owing: dict[Run, None] = {}  # oldest first
        self.due: dict[Run, None] = {}  # runs that may have pages in the host for storage, oldest first
        self.to_host = 0  # pages in flight to the host
        self.storing = [0] * len(config.pools)  # and by pool those that storage is to take
        # Of each pool in the host, what waits for storage may hold: fetches all of it, stores half.
        self.share = [
            max(int(config.host_share * room), min(room, 2 * (pool.lookback or 1)))
            for pool, room in zip(config.pools, shelves.capacity[len(config.pools) :], strict=True)
        ]
        self.store_share = [max(1, share // 2) for share in self.share]
        shelves.rescue = self.rescue
        self.has_host = any(shelves.capacity[len(config.pools) :])
        if self.has_host:
            shelves.bid_farewell = self._left
        host = shelves.capacity[len(config.pools) :]
        host_bytes = sum(pool.payload_bytes * room for pool, room in zip(config.pools, host, strict=True))
        horizon = config.offload_horizon_bytes or HORIZON_HOSTS * host_bytes
        self.governor = Governor(config.offload_pays_at, horizon)
        self.begin_anew()

    def begin_anew(self) -> None:
        """The storage is another one from now on, or none: nothing is due to it, and nothing is known of it."""
        self.due.clear()
        self.failures, self.rest_until = 0, self.now  # stores that failed in a row, with a rest after each
        self.governor.begin_anew()

    def waits(self) -> bool:
        """Whether anything waits to be sent down: for storage only as long as it is not in trouble for good."""
        return bool(self.owing) or (bool(self.due) and self.failures < TRIES)

    @property
    def flying(self) -> int:
        """Pages in flight down."""
        return self.to_host + sum(self.storing)

    def owes(self, run: Run) -> bool:
        return run in self.owing or run in self.due

    def owe(self, run: Run) -> None:
        """A run may have pages to back up."""
        late = self.config.write is WritePolicy.WRITE_BACK and not run.wanted
        if self.has_host and not late and run.pages:
            self.owing[run] = None

    def leaving(self) -> bool:
        """Whether evictions wait for copies in flight."""
        return any(op.leaving for op in self.copies.ops.values())

    def settle(self, run: Run, place: int, position: int, slot: int) -> bool:
        """Make a page resident if the laws let it be; False if its slot is not needed."""
        shelves, local = self.shelves, position - run.first
        if run.here[place] >> local & 1:
            if not run.bad[place] >> local & 1 or self.copies.reads(place, run.slot(place, position)):
                return False
            shelves.leave(run, place, position)  # a good one takes its place
        rests = position > 0 and place < len(self.pools) and shelves.is_chain(place)
        if rests and not self._on(run, place, position - 1):
            return False
        shelves.settle(run, place, position, slot)
        if place < len(self.pools):
            run.asked[place] &= ~(1 << local)
            if any(run.bad):
                self._heal(run)
        return True

    def _heal(self, run: Run) -> None:
        """Bad host pages that the device has good ones of are dropped, to be backed up anew."""
        for pool in self.pools:
            place = self._host(pool)
            for local in members(run.bad[place] & run.here[pool]):
                if not self.copies.reads(place, run.slot(place, run.first + local)):
                    self.shelves.leave(run, place, run.first + local)
                    run.asked[pool] &= ~(1 << local)
                    self.owe(run)

    def _on(self, run: Run, place: int, position: int) -> bool:
        run = covering(run, position)
        return bool(run.here[place] >> position - run.first & 1)

    def _host(self, pool: int) -> int:
        return self.shelves.place(Tier.HOST, pool)

    def _storage(self, pool: int) -> int:
        return self.shelves.place(Tier.STORAGE, pool)

    # --- what has ended

    def ended(self, op: Op, tail: Run, fates: list[Fate]) -> None:
        """A copy down has ended; `tail` is its deepest run."""
        target = op.edge[1]
        if target is Tier.HOST:
            self.to_host -= len(op.pages)
        excused = target is Tier.STORAGE and not op.void and self._storage_answered(fates)
        touched: dict[Run, bool] = {}
        for page, good, bad in fates:
            run = covering(tail, page.position)
            local = 1 << page.position - run.first
            place = self.shelves.place(target, page.pool)
            run.coming[place] &= ~local
            touched[run] = touched.get(run, True) and good
            if target is Tier.STORAGE:
                self.storing[page.pool] -= 1
                if good:
                    self._stored(run, page, op.void)
                if bad:  # the host's own bytes were not what they should be: never spread them
                    self.counters.bad_host += 1
                    self.shelves.spoil(run, self._host(page.pool), page.position)
            else:
                self.counters.backed_up += good
                run.asked[page.pool] |= local if good else 0
                if not good or not self.settle(run, place, page.position, page.target):
                    self.shelves.give_back(place, page.target)
            self.counters.failed += not good
        for run, good in touched.items():
            self._heal(run)
            if not good:
                self.due.pop(run, None)  # it stands at the end of the line from now on
            run.tries = 0 if good else run.tries + (not excused)
            if run.tries == TRIES and not good:
                self.counters.given_up += 1
                self.counters.dropped_failed += sum(
                    bits.bit_count() for pool in self.pools for bits in self._missing(run, pool)
                )
            if run.tries < TRIES:
                self.owe(run)
        if op.leaving:
            self._leave(op, tail, [page for page, good, _ in fates if good])

    def _stored(self, run: Run, page: Moving, void: bool) -> None:
        self.counters.stored += 1
        size_bytes = self.config.pools[page.pool].payload_bytes
        self.counters.stored_bytes += size_bytes
        if not void:
            run.stored[page.pool] |= 1 << page.position - run.first
            self.governor.stored(run, run.key(page.position), size_bytes)

    def _storage_answered(self, fates: list[Fate]) -> bool:
        """Stores rest, or go on, by how one of them went. True if what failed does not count as tried, since storage
        was known to be in trouble."""
        any_good = any(good for _, good, _ in fates)
        if all(good or bad for _, good, bad in fates):
            if any_good:
                self.failures, self.rest_until = 0, self.now
            return False
        known = self.failures > 0 and not any_good
        if self.now >= self.rest_until:  # else it was sent before this rest began
            self.failures += 1
            self.rest_until = self.now + min(LONGEST_REST_S, REST_S * 2 ** min(self.failures - 1, 10))
        return known

    def resting(self) -> bool:
        """Whether no store may be sent now: storage has failed one, and its rest or the one copy after it goes on."""
        return self.failures > 0 and (self.now < self.rest_until or any(self.storing))

    def _leave(self, op: Op, tail: Run, pages: list[Moving]) -> None:
        """The copies that an eviction waited for have landed: now the pages may go, if nobody took them up again."""
        for page in sorted(pages, key=lambda page: -page.position):
            place, run = self.shelves.place(op.edge[0], page.pool), tail
            while run.first > page.position and run.parent is not None:
                run = run.parent
            local = 1 << page.position - run.first
            host = self._host(page.pool)
            kept = run.stored[page.pool] if op.edge == STORE else run.here[host] & ~run.bad[host]
            if page.position < run.end and kept & local:
                self.shelves.drop(run, place, page.position)

    # --- what is sent

    def _missing(self, run: Run, pool: int) -> tuple[int, int]:
        """Local positions of a run to copy to the host, and to storage."""
        host = self._host(pool)
        # Once per use: where the host is smaller than the run, its pages would chase each other for ever.
        settled = run.here[host] | run.coming[host] | run.asked[pool]
        to_host = run.here[pool] & ~settled if self.shelves.capacity[host] else 0
        to_storage = run.here[host] & ~run.bad[host] & ~run.stored[pool] & ~run.coming[self._storage(pool)]
        return to_host, to_storage if self.copies.storage else 0

    def send_owed(self) -> None:
        """Send what the write policy wants backed up, within the bound of what may be in flight on each way."""
        if self.owing:
            self._send_to_host()
        if self.due:
            self._send_to_storage()

    def _send_to_host(self) -> None:
        if self.to_host >= self.config.backup_pages:  # the usual case: every token passes here
            return
        for run in [*self.owing]:
            if self.to_host >= self.config.backup_pages:
                return
            del self.owing[run]
            if not run.pages or not self._used_enough(run):
                continue
            each = [self._missing(run, pool) for pool in self.pools]
            missing = sum(to_host.bit_count() for to_host, _ in each)
            sent = len(self._send(run, BACKUP, [to_host for to_host, _ in each], leaving=False))
            if missing and not sent:
                run.tries += 1  # no room below: not for ever
                self.counters.dropped_no_room += missing if run.tries == TRIES else 0
            if sent < missing and run.tries < TRIES:
                self.owing[run] = None
            if any(to_storage for _, to_storage in each):
                self.due.setdefault(run)

    def _send_to_storage(self) -> None:
        """First come, first served; what finds no room in what storage may hold stays in the line, for stores end."""
        while self.due and not self.resting() and sum(self.storing) < self.config.backup_pages:
            run = next(iter(self.due))
            wanted = [self._missing(run, pool)[1] for pool in self.pools]
            if not any(wanted) or not self.governor.wants(run):
                del self.due[run]
            elif not self._send(run, STORE, wanted, leaving=False):
                return

    def _used_enough(self, run: Run) -> bool:
        """Whether the policy wants a run below before it has to leave."""
        selective = self.config.write is WritePolicy.WRITE_THROUGH_SELECTIVE and not run.wanted
        return not selective or run.uses >= self.config.selective_uses

    def _left(self, run: Run, pool: int, gone: int) -> None:
        """Pages of a run (local positions) have left their last memory tier."""
        lost = gone & ~run.stored[pool] if self.copies.storage else 0
        if not lost or not self._used_enough(run) or run.tries >= TRIES:
            return
        if self.governor.wants(run):
            self.counters.dropped_evicted += lost.bit_count()
        else:
            self.counters.dropped_unpaying += lost.bit_count()

    def _send(self, run: Run, edge: Edge, wanted: list[int], leaving: bool) -> list[Moving]:
        """Start copying local positions of a run, pool by pool, down one tier; returns what is on its way."""
        held = union(wanted)
        if not held:
            return []
        self.shelves.pin(run, held << run.first)  # finding room must not evict what it is for
        pages: list[Moving] = []
        for pool, bits in enumerate(wanted):
            source = self.shelves.place(edge[0], pool)
            room = self.config.batch_pages - len(pages) if not leaving else bits.bit_count()
            positions = [run.first + local for local in members(bits)]
            # What leaves goes from the tail; what is backed up for good comes from the front.
            positions = positions[::-1][:room] if leaving else positions[:room]
            if edge is BACKUP:
                targets = self.shelves.reserve(self._host(pool), len(positions))
            else:
                targets = [NOWHERE] * min(len(positions), max(0, self.store_share[pool] - self.storing[pool]))
                self.storing[pool] += len(targets)
            for position, slot in zip(positions, targets, strict=False):
                pages.append(Moving(pool, position, run.slot(source, position), slot))
        if pages:
            self.to_host += len(pages) if edge is BACKUP else 0
            for page in pages:
                run.coming[self.shelves.place(edge[1], page.pool)] |= 1 << page.position - run.first
            self.copies.send(Op(edge, pages, run=run, leaving=leaving))
        self.shelves.unpin(run, held << run.first)
        return pages

    def rescue(self, run: Run, place: int, lost: int, stuck: int) -> int:
        """Pages about to leave memory: under write-back, and where others rest on them, copy them down first."""
        tier, pool = divmod(place, len(self.pools))
        write_back = self.config.write is WritePolicy.WRITE_BACK and run.tries < TRIES
        want = lost if write_back else stuck
        if tier == Tier.HOST:
            stores = self.copies.storage and not self.resting() and self.governor.wants(run)
            return self._rescue_from_host(run, pool, want) if write_back and stores else 0
        if not self.shelves.capacity[self._host(pool)]:
            return 0
        wanted = [want & ~run.coming[self._host(pool)] if each == pool else 0 for each in self.pools]
        moving = _positions(run, self._send(run, BACKUP, wanted, leaving=True))
        # If the host makes room just now, what found none yet stays rather than being lost.
        return want if self.leaving() else moving

    def _rescue_from_host(self, run: Run, pool: int, lost: int) -> int:
        """What leaves the host leaves memory; where a chain's page goes, so does all that its position still has."""
        going = [lost if each == pool or self.shelves.is_chain(pool) else 0 for each in self.pools]
        hosts = [self._host(each) for each in self.pools]
        # Once per use here too: what came down and was evicted again for what comes next would come down for ever.
        above = [
            bits & run.here[each] & ~run.here[host] & ~run.coming[host] & ~run.asked[each]
            if self.shelves.capacity[host]
            else 0
            for each, host, bits in zip(self.pools, hosts, going, strict=True)
        ]
        waiting = _positions(run, self._send(run, BACKUP, above, leaving=False))  # down to the host first
        below = [
            bits & ~waiting & run.here[host] & ~run.bad[host] & ~run.stored[each] & ~run.coming[self._storage(each)]
            for each, host, bits in zip(self.pools, hosts, going, strict=True)
        ]
        return lost & (waiting | _positions(run, self._send(run, STORE, below, leaving=True)))

    def keep_room(self) -> None:
        """Under write-back a slot comes free only when its page has been copied, so start before the room is needed."""
        if self.config.write is not WritePolicy.WRITE_BACK:
            return
        resting = self.copies.storage and self.resting()
        for place, capacity in enumerate(self.shelves.capacity):
            if resting and place >= len(self.pools):  # it would be lost, and perhaps need not go
                continue
            short = capacity // 8 - len(self.shelves.free[place])
            coming = sum(len(op.pages) for op in self.copies.ops.values() if op.leaving)
            if short > coming:
                self.shelves.evict(place, short - coming)


def _positions(run: Run, pages: list[Moving]) -> int:
    """The local positions of pages of a run."""
    return of(page.position - run.first for page in pages)
