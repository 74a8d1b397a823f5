"""The core: which pages are where, which leases pin them, which copies come next. It knows no clock, thread, tensor,
socket or log.

Inputs come in (`lookup`, `open`, `claim`, `close`, `step`, `flush`, and those of `growth`), effects go out (`take`).
The same inputs give the same tree and the same effects, so ranks that agree on inputs cannot drift apart, any failure
replays from its seed, and the simulator runs this very code.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from kvarve.core.context import Context
from kvarve.core.copies.backups import Backups
from kvarve.core.copies.effects import Began, Effect, Ended, Event, Verified
from kvarve.core.copies.in_flight import FETCH, LOAD, PROBE, STORE, Op
from kvarve.core.core_config import CoreConfig
from kvarve.core.lease import PLAIN, WAITS_FOR, Ask, Cause, Lease, Phase, Prompt
from kvarve.core.observe.histograms import Ages
from kvarve.core.observe.hot import Hot, HotPrefix
from kvarve.core.observe.page_events import PageEvents
from kvarve.core.observe.reasons import Reason, explain
from kvarve.core.requests.engine_blocks import EngineBlocks
from kvarve.core.requests.paths import Paths
from kvarve.core.requests.prefetch import LOOK_AHEAD, Prefetch
from kvarve.core.requests.resume import Resumption
from kvarve.core.slots.candidates import Candidates
from kvarve.core.slots.eviction import Evictions
from kvarve.core.slots.residency import Residency
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.core.tree.ghosts import Ghosts
from kvarve.core.tree.prefix_tree import PrefixTree
from kvarve.core.tree.tree import same_pages, upward, walk
from kvarve.errors import ConfigError
from kvarve.pages import boundaries
from kvarve.pages.boundaries import deepest, ones
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import Tier

GHOSTS = 4  # the ghost list remembers this many times the pages that memory holds


class Hit(NamedTuple):
    """Boundaries in pages at which a prompt may resume: from the device alone, and from memory (device and host).

    `known` pages have their tokens in the tree; `by_pool` is the deepest boundary that each pool alone would allow, so
    that the limiting pool can be named.
    """

    device: int
    memory: int
    known: int
    by_pool: tuple[int, ...]


class Hottest(NamedTuple):
    """A prefix of `pages` pages from which requests resume, and how many have lately, at its end or further on.

    Of its pages `device`, `host` and `storage` are in each tier, as far as the core knows: those that every chain has
    there (any pool has, of a model without chains). `resumes`: the nearest tier from which a prompt could resume at its
    end now; None if none in memory. `key`: of its last page, "" if it left memory before it was looked at.
    """

    root: bytes
    key: bytes
    pages: int
    hits: int
    device: int
    host: int
    storage: int
    resumes: Tier | None


class Core:
    """Its parts, each of which keeps one kind of fact. Slots: `slot_pools`, `tree`, `candidates`, `residency`,
    `evictions` · copies: `backups`, `copies`, `storage`, `governor` · requests: `leases`, `paths`, `prefetch`,
    `growth`, and `engine_blocks` where an engine owns the device."""

    def __init__(self, config: CoreConfig) -> None:
        self.context = context = Context(config)
        self.counters, self.pools = context.counters, config.pools
        self.slot_pools = slot_pools = SlotPools(config)
        pages = sum(sum(slot_pools.capacity[pool :: len(self.pools)]) for pool in slot_pools.rests_on)
        ghosts = Ghosts(GHOSTS * pages, config.page_tokens * TOKEN_BYTES)
        self.tree = PrefixTree(context, ghosts)
        self.candidates = Candidates(context, slot_pools, self.tree)
        self.residency = Residency(context, slot_pools, self.tree, self.candidates)
        self.evictions = Evictions(context, self.residency)
        self.backups = Backups(context, self.evictions)
        self.copies, self.storage, self.governor = self.backups.copies, self.backups.storage, self.backups.governor
        self.leases: dict[int, Lease] = {}
        self.paths = Paths(context, self.evictions, self.backups)
        self.lookbacks, self.grid, self.width = self.paths.lookbacks, self.paths.grid, self.paths.width
        self.prefetch = Prefetch(context, self.paths, self.leases)
        resumption = Resumption if Tier.DEVICE in config.slots else EngineBlocks
        self._resumption = resumption(context, self.paths, self.prefetch)
        self.growth = self._resumption.growth
        self.ages = Ages(len(self.pools), len(config.memory), lambda: context.now)
        context.tell.add(self.ages)
        self.hot: Hot | None = None  # where it is watched
        self.page_events: PageEvents | None = None  # where they are to be told

    @property
    def config(self) -> CoreConfig:
        return self.context.config

    @property
    def now(self) -> float:
        return self.context.now

    @property
    def engine_blocks(self) -> EngineBlocks:
        assert isinstance(self._resumption, EngineBlocks), "this cache has device slots of its own"
        return self._resumption

    # --- queries: they change nothing

    def lookup(self, root: bytes, tokens: bytes, outside: Sequence[int] = ()) -> Hit:
        """How deep a prompt (packed tokens, under a root key) could resume from memory now.

        `outside`: by pool, the pages (bits) that an engine has on a device of its own.
        """
        top = self.tree.roots.get(root)
        limit = self.paths.limit(tokens)
        if top is None and not any(outside):
            return Hit(0, 0, 0, tuple(0 for _ in self.pools))
        path, known = walk(top, tokens) if top is not None else ([], 0)
        device, memory = self.paths.present(path, known, outside)
        legal = [boundaries.legal(pages, back, limit) for pages, back in zip(memory, self.lookbacks, strict=True)]
        grid = boundaries.multiples(self.grid, limit)
        both = deepest(boundaries.shared(legal, limit) & grid)
        near = device == memory  # nothing is in the host alone
        return Hit(
            both if near else deepest(boundaries.resume_at(device, self.lookbacks, limit, self.grid)),
            both,
            known,
            tuple(deepest(each & grid) for each in legal),
        )

    def idle(self) -> bool:
        """Whether no copy is in flight, except to or from a storage that is gone or down, and no pending backup can be
        sent."""
        return all(op.void for op in self.copies.ops.values()) and not self.backups.waits()

    def dirty(self) -> int:
        """How many pages in memory are dirty; 0 without a storage, but not with one that is down."""
        return self.backups.count_dirty()

    def patience_ends(self) -> float:
        """The earliest time at which a lease goes on without an event: a claimed one at its deadline, with the pages
        that it has; one whose pages are being written to storage asks for them again."""
        waiting = (lease for lease in self.leases.values() if lease.claimed and lease.phase in WAITS_FOR)
        asks_again = min((lease.ask_again for lease in self.leases.values()), default=inf)
        return min(min((lease.deadline for lease in waiting), default=inf), asks_again)

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        return self.copies.take()

    def explain(self, lease: Lease) -> dict[Reason, int]:
        """Why the tokens of a lease's prompt were cached or not: how many have each reason, which sum to the prompt. It
        tells what the lease found under its own root key when it became ready, of which later requests change nothing.
        """
        return explain(lease, self.paths)

    def hottest(self, count: int) -> list[Hottest]:
        """The prefixes that requests have resumed from most lately, at most `count` of them; none before `watch`."""
        return [] if self.hot is None else [self._hottest(each) for each in self.hot.hottest(count)]

    def _hottest(self, prefix: HotPrefix) -> Hottest:
        pages, path = prefix.pages, prefix.path()
        if path and not prefix.key:
            prefix.key = path[-1].key(pages - 1)
        device_pages, host, storage = (self.paths.whole(path, pages, tier).bit_count() for tier in Tier)
        device, memory = self.paths.present(path, pages) if path else ([0] * len(self.pools), [0] * len(self.pools))
        resumes = None
        for tier, present in ((Tier.HOST, memory), (Tier.DEVICE, device)):
            if boundaries.resume_at(present, self.lookbacks, pages, self.grid) >> pages & 1:
                resumes = tier
        return Hottest(prefix.root, prefix.key, pages, prefix.hits, device_pages, host, storage, resumes)

    # --- a request's life

    def open(self, prompt: Prompt, now: float, ask: Ask = PLAIN) -> Lease:
        """Open a lease for a request that begins to wait: pages that memory lacks are fetched from storage to the host.
        It takes no device slots before `claim`."""
        self.context.now = now
        paths = self.paths
        run, _, known = paths.find(prompt.root, prompt.tokens)
        self.counters.requests = number = self.counters.requests + 1
        limit, root = paths.limit(prompt.tokens), self.tree.root(prompt.root)
        lease = Lease(number, prompt, ask, paths.page_tokens, limit, run=root, pools=len(self.pools), now=now)
        self.leases[number] = lease
        if ask.reads:
            if not ask.again:
                for tell in self.context.tell.asked:
                    tell(run)
            self.tree.touch(run, paths.near(known))  # it will be read soon
            if self.storage.attached:
                self.prefetch.begin(lease)
        return lease

    def claim(self, lease: Lease, now: float, outside: Sequence[int] | None = None) -> bool:
        """The engine admits this request: its pages are loaded to the device, after a wait for storage of at most its
        patience. True once the lease is ready; ask again after each `step`. `outside`: what an engine has of it now."""
        self.context.now = now
        if outside is not None and lease.reads:
            lease.outside = outside
        if not lease.claimed:
            lease.claimed = True
            self.copies.hurry(lease)
            if lease.phase is Phase.QUEUED:
                self._resumption.begin(lease)
        self._resumption.check_deadline(lease)
        return lease.phase is Phase.READY

    def close(self, lease: Lease) -> None:
        """Close a lease in any phase. Its published pages stay; slots that it still owned are free at once."""
        if lease.phase is Phase.CLOSED:
            return
        self.growth.close(lease)
        self.copies.leave_all(lease)  # copies still in flight for it end without a lease
        self.prefetch.land(lease)
        self.prefetch.release(lease)
        self.paths.hold(lease, lease.run, 0, 0)
        lease.move(Cause.CLOSE)
        del self.leases[lease.number]
        self.tree.forget(lease.root)

    def step(self, events: Iterable[Event], now: float) -> None:
        """Apply events in the order given, but ends of stores first: they tell whether more may be sent. Then apply
        deadlines that have passed, and send new backups."""
        self.context.now = now
        moved = False
        for event in sorted(events, key=self._ends_no_store):
            if isinstance(event, Verified):
                self._resumption.verified(event)
                continue
            op = self._began(event) if isinstance(event, Began) else self._apply(event)
            moved = moved or (op is not None and self._makes_way(op))
        if moved:
            self.prefetch.moved()
        self.backups.send_staged()
        queued = 0
        for lease in [*self.leases.values()]:
            self._resumption.check_deadline(lease)
            self.prefetch.ask_again(lease)
            if lease.phase is Phase.QUEUED and not lease.claimed and queued < LOOK_AHEAD:
                queued += 1
                self.prefetch.look_again(lease)
            if lease.phase is Phase.LOADING and not lease.ops:  # it waits for evictions
                self._resumption.load_pages(lease)
        for lease in self.prefetch.next_in_line():
            self._resumption.fetch(lease)
        self.evictions.cut_back()  # before pages of others leave
        self.backups.evict_ahead()
        self.backups.send_pending()
        self.evictions.cut_back()

    def retry(self) -> None:
        """End the back-off of stores: one is tried in the next step."""
        self.storage.retry()

    def flush(self, tiers: Sequence[Tier]) -> int:
        """Evict every unpinned page from memory tiers; returns how many went at once."""
        before = sum(self.residency.evicted)
        for place, slots in enumerate(self.slot_pools.capacity):
            if self.slot_pools.tier(place) in tiers:
                self.evictions.evict(place, slots)
        return sum(self.residency.evicted) - before

    def attach(self, back_up: bool = False, again: bool = False) -> None:
        """Attach a storage, in place of any other, of whose content nothing is known. With `back_up`, all pages in
        memory are dirty, whatever the write policy. `again`: the same storage answers again, and
        receives the pages that it missed by the policy."""
        if not self.backups.dirty.has_host:
            raise ConfigError("storage needs a host tier, through which its pages travel")
        if not again:
            self.detach()
        self.storage.attach()
        for run in self.tree.runs():
            self.backups.dirty.attached(run, run.wanted if again else back_up)
            if back_up or again:
                self.backups.dirty.mark_dirty(run)

    def detach(self, down: bool = False) -> None:
        """Detach the storage, or note that it is `down`. Requests that wait for it go on with the pages that have
        arrived; copies in flight still have to end."""
        self.storage.detach(down)
        self.backups.dirty.reset()
        self.governor.reset()
        if not down:
            self._tell_anew()
        for number, op in self.copies.ops.items():
            if op.edge == STORE:
                self.backups.void(op, gone=not down)
            elif op.edge == FETCH:
                self.prefetch.void(number, op, gone=not down)
            op.void = op.void or Tier.STORAGE in op.edge
            op.counts = op.counts and (down or not op.void)
        for lease in self.leases.values():
            if lease.phase in (Phase.PROBING, Phase.FETCHING):
                self._resumption.stop_waiting(lease)

    def cleared(self) -> None:
        """The storage has been emptied: pages in memory are dirty again, by the policy, and stores in flight count for
        nothing, since what they wrote may have been removed."""
        if self.storage.attached:
            self.detach(down=True)
            self.attach(again=True)
            self._tell_anew()

    def _tell_anew(self) -> None:
        """What has been told of storage is void."""
        if self.page_events is not None:
            self.page_events.tell_all()

    def watch(self) -> None:
        """From now on count what requests resume from, for `hottest`: some 20 us a request."""
        if self.hot is None:
            self.hot = Hot()
            self.context.tell.add(self.hot)

    def tell(self) -> PageEvents:
        """Report from now on what enters and leaves each tier, beginning with what is there."""
        if self.page_events is None:
            self.page_events = PageEvents(self.context, self.slot_pools, self.tree, self.storage)
            self.page_events.tell_all()
            self.context.tell.add(self.page_events)
        return self.page_events

    def back_up(self) -> None:
        """Mark all pages in memory dirty, whatever the write policy."""
        for run in self.tree.runs():
            self.backups.dirty.want(run)
            self.backups.dirty.mark_dirty(run)

    def hand_over(self, lease: Lease) -> int:
        """The boundary at which another cache could resume a lease's prompt from what memory has now. All pages before
        it are dirty from now on, whatever the write policy; also those that have been stored, since the storage may
        have evicted them."""
        boundary = self.lookup(lease.root, lease.tokens).memory
        run, _, _ = self.paths.find(lease.root, lease.tokens)
        for each, share in upward(run, ones(boundary)):
            self.backups.dirty.want(each, again=share)
            self.backups.dirty.mark_dirty(each)
        return boundary

    def write_by(self, policy: str) -> None:
        """Change the write policy; pages that are dirty by the policy before it stay dirty."""
        policies = replace(self.config.policies, write_policy=policy)
        self.context.config = replace(self.config, policies=policies)

    # --- prompts that share

    def shared_prefix(self, ahead: Lease, behind: Lease) -> int:
        """The deepest boundary at which `behind` could resume from pages that `ahead` keeps."""
        if ahead.root != behind.root or not behind.reads:
            return 0
        most = min(behind.limit, ahead.pages)
        return same_pages(ahead.tokens, behind.tokens, 0, most, self.width) // self.grid * self.grid

    # --- events

    def _began(self, event: Began) -> Op | None:
        op = self.copies.ops.get(event.op)
        if op is not None and op.edge in (PROBE, FETCH):
            op.begun_s = min(op.begun_s, self.now)
            for lease in op.waiting(event.op):
                self.prefetch.began(lease)
        return op

    def _makes_way(self, op: Op) -> bool:
        """Whether those behind a copy from storage come nearer to their turn; probes of requests that are only
        asked about again never end."""
        again = op.edge == PROBE and op.lease is not None and op.lease.asked_again
        return op.edge in (PROBE, FETCH) and not op.void and not again

    def _ends_no_store(self, event: Event) -> bool:
        op = self.copies.ops.get(event.op)
        return op is None or op.edge != STORE or not isinstance(event, Ended)

    def _apply(self, end: Ended) -> Op | None:
        op = self.copies.end(end.op)
        if op is None:
            self.counters.strays += 1
            return None
        waiting = op.waiting(end.op)
        for lease in waiting:
            self.copies.leave(lease, end.op)
            if op.edge in (PROBE, FETCH):
                self.prefetch.began(lease)  # at the latest
        op.refused = end.refused
        if op.edge == LOAD:
            self._resumption.load_ended(op, end, bool(waiting))
        elif op.edge in (PROBE, FETCH):
            self._came(op, end, waiting)
        else:
            self._resumption.backed_up(op, op.outcomes(end))
        self._resumption.ended(end.op, op)
        return op

    def _came(self, op: Op, end: Ended, waiting: list[Lease]) -> None:
        """Storage has answered a probe, or its pages have come, for the leases that still wait for it."""
        outcomes = op.outcomes(end)
        if op.edge == FETCH:
            self.prefetch.arrived(end.op, op, outcomes, waiting)
        for lease in waiting:
            if not lease.ops if op.edge == FETCH else self.prefetch.answered(lease, outcomes):
                self._resumption.fetch(lease)  # if pages were lost, a shallower boundary may still be fetched
