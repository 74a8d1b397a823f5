"""What SGLang's linker loads and offloads, call by call. Pure: no engine, tensor, thread or clock here.

SGLang owns the device. Its tree asks for all lengths at which a prompt may resume (`lookup`), takes the deepest that
all ranks have, names slots for it (`load`), and offers what it has computed (`offload`). `LinkPlanner` answers by a
`CacheScheduler` over an engine's blocks (`engine_blocks.py`). A page is named by SGLang's own chained hash at its end.

What a rank answers must not part it from the others. A lookup's lengths may differ by rank, since SGLang intersects
them. Whether `load` and `cancel` succeed follows from the calls so far alone, which are the same on all ranks: what a
lookup has found is pinned until it is loaded, or `PROMISES` later lookups have been made.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvarve.cache.messages import Order, Report
from kvarve.cache.scheduler import CacheScheduler, Prompt
from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.reasons import Reason
from kvarve.pages.blocks import NULL_BLOCK
from kvarve.pages.boundaries import members, needed, of, ones, union
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES
from kvarve.pages.pools import Tier

NAME_WORDS = KEY_BYTES // TOKEN_BYTES  # a page's name, in tokens
PROMISES = 4  # lookups whose pages stay pinned: SGLang loads right after it has looked up
FORGET_S = 10.0  # after its last lookup, a request's pages in storage are fetched no more
MOST_OFFLOADS = 64  # that have not ended: the pages of each are locked on SGLang's device

Pages = Sequence[Mapping[int, int]]  # by pool: a handle of the engine's blocks for each position
Before = Callable[[], Sequence[Sequence[int]]]  # by pool: those of a sequence's first pages, or `NULL_BLOCK`


class Chain(NamedTuple):
    """The names of a sequence's pages from its beginning on, packed, and how many are before those of a call."""

    names: bytes
    first: int

    @property
    def pages(self) -> int:
        return len(self.names) // KEY_BYTES


class _Promise(NamedTuple):
    """What a lookup has found: the lease that pins it, and the boundaries (bits) at which it may resume."""

    chain: Chain
    lease: Lease
    boundaries: int


@dataclass
class _Waiting:
    """A request that has been looked up and not been loaded: its lease fetches what storage has of its prompt."""

    lease: Lease | None = None
    seen_s: float = 0.0
    device: int = 0  # the device has that many of its pages
    pages: int = 0
    asked: bool = False  # a lease of it has read its pages
    held: bool = False  # its turn has not come: it is not forgotten
    until_s: float | None = None  # it waits for storage at most until then


@dataclass
class _Offload:
    chain: Chain
    pages: list[dict[int, int]]
    before: Before
    lease: Lease | None = None
    stored: bool | None = None  # None: it has not ended


@dataclass
class _Batch:
    """Loads that were started together."""

    leases: list[tuple[Lease, int]] = field(default_factory=list)  # and the boundary of each
    landed: bool | None = None  # None: copies still write to the device

    @property
    def verified(self) -> bool:
        """Whether all its pages have passed their check."""
        return all(lease.ready and lease.boundary == boundary for lease, boundary in self.leases)


class LinkPlanner:
    """Plans for one rank; called by its engine's scheduler, in its thread."""

    def __init__(self, scheduler: CacheScheduler, page_tokens: int) -> None:
        self._page = page_tokens  # the engine's
        self._scheduler, self._blocks = scheduler, scheduler.blocks
        self._width = scheduler.identity.page_tokens  # in words, at least `NAME_WORDS`
        self._lookbacks = [pool.lookback for pool in scheduler.pools]
        self._promises: OrderedDict[str, _Promise | None] = OrderedDict()  # None: it has found nothing
        self._waiting: dict[str, _Waiting] = {}
        self._queued: dict[str, tuple[_Promise, int, Pages]] = {}
        self._batches: dict[int, _Batch] = {}
        self._offloads: deque[_Offload] = deque()
        self._up = True
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[Reason] = Counter()  # tokens in whole pages of prompts, by why they were cached or not

    # --- loads

    def seen(self, rid: str, device: int, pages: int, now: float) -> None:
        """SGLang asks for a waiting request: its prompt has that many pages, the first of which the device holds."""
        waiting = self._waiting.setdefault(rid, _Waiting())
        waiting.seen_s, waiting.device, waiting.pages = now, device, pages

    def hold(self, rid: str) -> None:
        """A request that has been looked up waits for its turn."""
        if rid in self._waiting:
            self._waiting[rid].held = True

    def waits(self, rid: str, now: float) -> bool:
        """Whether a request whose turn it is waits for storage, within its patience, which runs from the first call."""
        waiting = self._waiting.get(rid)
        if waiting is None or waiting.lease is None or waiting.lease.phase not in (Phase.PROBING, Phase.FETCHING):
            return False
        if waiting.until_s is None:
            missing = (waiting.pages - waiting.device) * self._page
            waiting.until_s = now + waiting.lease.patience.seconds(missing)
        return now < waiting.until_s

    def turn(self, rid: str, now: float) -> range:
        """A request waits no longer; returns the pages of attention that came from storage for it, from the first one
        to the last."""
        waiting = self._waiting.get(rid)
        if waiting is None:
            return range(0)
        waiting.held, waiting.seen_s = False, now
        came = 0 if waiting.lease is None else union(waiting.lease.fetched) & ~ones(waiting.device)
        return range((came & -came).bit_length() - 1 if came else 0, came.bit_length())

    def began(self, rid: str) -> None:
        """A request begins: it loads what is queued for it, or nothing."""
        if rid not in self._queued and rid in self._waiting:
            self._computed(self._waiting[rid])
            self.leave(rid)

    def leave(self, rid: str) -> None:
        """A request is aborted, or loads nothing."""
        self._drop(self._promises.pop(rid, None))
        self._forget(rid)

    def lookup(self, rid: str, chain: Chain, now: float) -> list[int]:
        """The lengths, in pages beyond `chain.first`, at which a prompt can resume from the host now. What storage has
        beyond is fetched meanwhile."""
        self._drop(self._promises.pop(rid, None))
        while len(self._promises) >= PROMISES:
            self._drop(self._promises.popitem(last=False)[1])
        prompt = self._prompt(chain.names)
        present = [needed(chain.first, back) for back in self._lookbacks]
        waiting = self._waiting.setdefault(rid, _Waiting())
        self._fetch(waiting, prompt, present, now)
        found = self._promises[rid] = self._promise(waiting, chain, prompt, present)
        return [] if found is None else [boundary - chain.first for boundary in members(found.boundaries)]

    def _fetch(self, waiting: _Waiting, prompt: Prompt, present: Sequence[int], now: float) -> None:
        """Have what storage has of a prompt fetched to the host, as long as its request is looked up."""
        waiting.seen_s = now
        if waiting.lease is not None and waiting.lease.tokens != prompt.tokens:
            self._scheduler.close(waiting.lease)
            waiting.lease = None
        if waiting.lease is None and self._scheduler.storage_up:
            waiting.lease = self._scheduler.open(prompt, present=present, again=waiting.asked)
            waiting.asked = True

    def _promise(self, waiting: _Waiting, chain: Chain, prompt: Prompt, present: Sequence[int]) -> _Promise | None:
        if self._scheduler.lookup(prompt, present=present).memory <= chain.first:
            return None
        lease = self._scheduler.open(prompt, present=present, again=waiting.asked, ask=False)
        waiting.asked = True
        self._scheduler.claim(lease)
        if lease.phase is not Phase.OFFERED:
            self._scheduler.close(lease)
            return None
        if waiting.lease is not None:
            self._scheduler.core.prefetch.fetched_by(lease, waiting.lease)
        return _Promise(chain, lease, self._blocks.choices(lease))

    def load(self, rid: str, names: bytes, pages: Pages) -> bool:
        """Queue a load of the pages of these names, the first ones that the request's last lookup was asked for, into
        the engine's blocks."""
        promise = self._promises.pop(rid, None)
        if promise is None:
            return False
        first, boundary = promise.chain.first, promise.chain.first + len(names) // KEY_BYTES
        same = promise.chain.names[first * KEY_BYTES : boundary * KEY_BYTES] == names
        if rid in self._queued or not same or not promise.boundaries >> boundary & 1:
            self._drop(promise)
            return False
        self._queued[rid] = promise, boundary, pages
        return True

    def cancel(self, rid: str) -> bool:
        """Give up a load that is queued; False if it has been started."""
        promise, *_ = self._queued.pop(rid, (None,))
        self._drop(promise)
        return promise is not None

    def start(self, index: int) -> None:
        """Start the loads that are queued, as the batch of this number."""
        batch = self._batches[index] = _Batch()
        queued, self._queued = self._queued, {}
        for rid, (promise, boundary, pages) in queued.items():
            self._blocks.choose(promise.lease, boundary)
            self._blocks.load(promise.lease, pages)
            batch.leases.append((promise.lease, boundary))
            self._forget(rid)

    @property
    def queued(self) -> bool:
        """Whether a load waits for `start`."""
        return bool(self._queued)

    def coming(self, index: int) -> bool:
        """Whether a batch has ended, or its pages have passed their check and are being copied layer by layer."""
        batch = self._batches.get(index)
        return batch is None or batch.landed is not None or batch.verified

    def landed(self, index: int) -> bool | None:
        """Whether all pages of a batch have come; None while copies may still write to the device."""
        batch = self._batches.get(index)
        return True if batch is None else batch.landed

    def finished(self, index: int) -> None:
        """The engine knows how a batch has ended."""
        self._batches.pop(index, None)

    # --- offloads

    def offload(self, chain: Chain, pages: list[dict[int, int]], before: Before) -> bool:
        """Save pages of a sequence from the engine's blocks, which keep them until the offload is `popped`; those that
        the host has already are not copied. False: too many have not ended, and this one is not queued.

        `before` tells the blocks of the pages before them, which the engine keeps as long: those that have left the
        host are saved again, as no page is kept without the pages of chains before it, or of use without its window."""
        if len(self._offloads) >= MOST_OFFLOADS:
            self.counts["offloads refused"] += 1
            return False
        self._offloads.append(_Offload(chain, pages, before))
        return True

    def ended(self) -> int:
        """How many offloads have ended and not been popped; they end in their order."""
        count = 0
        for each in self._offloads:
            if each.stored is None:
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Whether the host has the pages of the oldest offload, which has ended."""
        stored = self._offloads.popleft().stored
        assert stored is not None, "it has ended"
        return stored

    def _save(self, offload: _Offload, first: bool) -> bool:
        """Begin an offload; False if it has to wait for those before it, whose pages it rests on. `first`: there are
        none."""
        prompt, before = self._prompt(offload.chain.names), ones(offload.chain.first)
        if not first and self._scheduler.lookup(prompt).known < offload.chain.first:
            return False
        offload.lease = self._scheduler.open(prompt, read=False)
        self._scheduler.claim(offload.lease)
        there = zip(self._lookbacks, self._blocks.in_host(offload.lease), strict=True)
        lacks = [needed(offload.chain.pages, back) & before & ~here for back, here in there]
        if any(lacks):
            for pages, lost, blocks in zip(offload.pages, lacks, offload.before(), strict=True):
                pages.update((at, block) for at, block in enumerate(blocks) if lost >> at & 1 and block != NULL_BLOCK)
        self._blocks.save(offload.lease, offload.pages)
        return True

    def _stored(self, offload: _Offload) -> bool:
        """Whether the host has an offload's pages, as far as a prompt that resumes at its end reads them."""
        assert offload.lease is not None
        wanted = [
            of(pages) & needed(offload.chain.pages, back)
            for pages, back in zip(offload.pages, self._lookbacks, strict=True)
        ]
        there = self._blocks.in_host(offload.lease)
        return not any(want & ~here for want, here in zip(wanted, there, strict=True))

    # --- time passes

    def step(self, report: Report, now: float) -> list[Order]:
        """Apply what the worker reports, and hand out the orders since the last step."""
        self._scheduler.step(report, now)
        self._blocks.released()
        writing = {id(op.lease) for op in self._scheduler.core.copies.ops.values() if Tier.DEVICE in op.edge}
        for batch in self._batches.values():
            if batch.landed is None and not any(id(lease) in writing for lease, _ in batch.leases):
                batch.landed = batch.verified and all(lease.offered == lease.arrived for lease, _ in batch.leases)
                self.counts["loads" if batch.landed else "loads failed"] += len(batch.leases)
                for lease, _ in batch.leases:
                    self._explain(lease)
                    self._scheduler.close(lease)
        self._advance(writing)
        late = [rid for rid, each in self._waiting.items() if not each.held and now > each.seen_s + FORGET_S]
        for rid in late:
            self._computed(self._waiting[rid])
            self._forget(rid)
        return self._scheduler.take()

    def _advance(self, writing: set[int]) -> None:
        """End the offloads whose copies have ended, and begin those that need not wait."""
        first = True
        for each in self._offloads:
            if each.lease is not None and id(each.lease) not in writing:
                each.stored = self._stored(each)
                self.counts[f"offloads {'' if each.stored else 'not '}stored"] += 1
                self._scheduler.close(each.lease)
                each.lease = None
            elif each.stored is None and each.lease is None and not self._save(each, first):
                return
            first = first and each.stored is not None

    def uses_blocks(self) -> bool:
        """Whether copies use the engine's blocks."""
        return self._scheduler.uses_blocks()

    def stop(self) -> None:
        """Begin no copy from or to the engine's blocks of those that were asked for."""
        for rid in [*self._queued]:
            self.cancel(rid)
        self._offloads = deque(each for each in self._offloads if each.lease is not None or each.stored is not None)

    def reset(self) -> None:
        """Forget all requests and offloads; the host keeps its pages."""
        self.stop()
        for rid, waiting in [*self._waiting.items()]:
            self._computed(waiting)
            self._forget(rid)
        while self._promises:
            self._drop(self._promises.popitem()[1])
        leases = [lease for batch in self._batches.values() for lease, _ in batch.leases]
        for lease in [*leases, *(each.lease for each in self._offloads if each.lease is not None)]:
            self._scheduler.close(lease)
        self._batches.clear()
        self._offloads.clear()

    # --- behind it

    def _explain(self, lease: Lease) -> None:
        self.reasons.update(
            {
                reason: words // self._width * self._page
                for reason, words in self._scheduler.core.explain(lease).items()
                if words >= self._width
            }
        )

    def _computed(self, waiting: _Waiting) -> None:
        """Count the prompt of a request that has loaded nothing."""
        if waiting.lease is not None and waiting.lease.left is not None:
            self._explain(waiting.lease)
            return
        self.reasons[Reason.HIT_DEVICE] += waiting.device * self._page
        self.reasons[Reason.UNKNOWN] += (waiting.pages - waiting.device) * self._page

    def _prompt(self, names: bytes) -> Prompt:
        """A sequence of pages with these names, and one more token, which a request computes in any case."""
        pages = len(names) // KEY_BYTES
        words = np.zeros(pages * self._width + 1, np.uint32)
        words[:-1].reshape(pages, self._width)[:, :NAME_WORDS] = np.frombuffer(names, "<u4").reshape(pages, NAME_WORDS)
        return self._scheduler.prompt(words)

    def _drop(self, promise: _Promise | None) -> None:
        if promise is not None:
            self._scheduler.close(promise.lease)

    def _forget(self, rid: str) -> None:
        waiting = self._waiting.pop(rid, None)
        if waiting is not None and waiting.lease is not None:
            self._scheduler.close(waiting.lease)
