"""What an engine with blocks of its own loads and saves, step by step. Pure: no engine, tensor, thread or clock here.

The engine (vLLM) owns the blocks, finds its own cached prefixes and schedules; behind it stand kvarve's host memory and
storage. `BlockPlanner` answers the engine's questions by a `CacheScheduler` over an engine's blocks
(`engine_blocks.py`):

1. `ask`: how many tokens beyond the engine's own prefix can be loaded? One boundary for all groups. None: ask again.
2. `allocated`: the engine has blocks for them, and which; or it wants nothing loaded.
3. `plan`, once a step: pages that are full after this step are saved; the orders for the worker and its loads.
4. `ended`: what the workers report. Blocks whose copies have ended are the engine's again.
5. `finished`: the request has ended, whatever its state.

A page is as long as the tokens between two places where the engine's own prefixes may end: its scheduler block, a
common multiple of all groups' blocks, or a part of a block, if the engine hits inside of blocks. It is named by the
engine's own chained hash at its end, in which the salt, adapters and images already are. Blocks that a copy uses must
not be given to other pages before `Plan.freed` names them: the engine holds references to `Plan.held` until then.

Where a page lies is named by *cells*: a block has as many as it has pages, one unless pages are parts of blocks. So a
cell is a block's number, times its cells, plus the place of the cell in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvarve.cache.messages import Order, Report
from kvarve.cache.scheduler import CacheScheduler, Prompt
from kvarve.core.copies.effects import Copy, Ended, Page
from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.reasons import Reason
from kvarve.core.requests.prefetch import LOOK_AGAIN_S
from kvarve.errors import ConfigError
from kvarve.pages.blocks import NULL_BLOCK, blocks_of, handle_of
from kvarve.pages.boundaries import members, needed, ones, union
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import Tier, window_lookback

HASH_WORDS = 8  # the longest hash of a page, in tokens

Rows = Sequence[Sequence[int]]  # by group of the engine: the blocks of a request, by position


@dataclass(frozen=True)
class Group:
    """One of the engine's cache groups that may be cached: a pool of kvarve.

    `number`: its place among the engine's groups. `lookback`: pages before a boundary that a resumed request reads,
    None for all. `offered`: its pages are saved only when the engine names the block, since a state's block is not
    told by its position.
    """

    number: int
    name: str
    block_tokens: int
    lookback: int | None
    offered: bool = False
    kind: str = ""  # in the engine's words
    window_tokens: int | None = None

    def cells(self, page_tokens: int) -> int:
        """How many pages a block has. A state is all of its block, wherever in the block it was computed up to."""
        return 1 if self.offered else max(1, self.block_tokens // page_tokens)

    def blocks(self, page_tokens: int) -> int:
        """How many blocks a page is in: of a state only the last one, at the page's end."""
        return 1 if self.offered else max(1, page_tokens // self.block_tokens)

    def of(self, row: Sequence[int], page: int, page_tokens: int) -> Sequence[int]:
        """The cells of a page in a request's row; fewer if the row ends before."""
        end, cells = -(-(page + 1) * page_tokens // self.block_tokens), self.cells(page_tokens)
        blocks = row[end - self.blocks(page_tokens) : end]
        return [block and block * cells + page % cells for block in blocks] if cells > 1 else blocks


def lookback_of(kind: str, page_tokens: int, window_tokens: int | None = None) -> int | None:
    """The lookback of a group by its kind, in vLLM's words. ConfigError for a kind that is not known.

    A chunk of local attention may begin anywhere before the boundary, so it is treated as a window of its size.
    """
    if kind in ("full_attention", "mla_attention", "sink_full_attention"):
        return None
    if kind == "mamba":
        return 1
    if kind in ("sliding_window", "sliding_window_mla", "chunked_local_attention") and window_tokens:
        return window_lookback(window_tokens, page_tokens)
    raise ConfigError(f"kvarve cannot know which pages a cache group of kind {kind!r} reads: remove the connector")


class Request(Protocol):
    """What the planner reads of an engine's request; it may grow while it is decoded."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class Scheduled(NamedTuple):
    """One request in a step: tokens computed before the step, tokens that the step computes, and its blocks."""

    computed: int
    tokens: int
    rows: Rows


class Offer(NamedTuple):
    """A group's state after `tokens` tokens is in `block` once the step has run."""

    group: int
    block: int
    tokens: int


class Stored(NamedTuple):
    """A page of one group that the host has got: `name` is the engine's hash at its end, `parent` at its start."""

    request: Request
    pool: int
    page: int
    name: bytes
    parent: bytes | None


class Removed(NamedTuple):
    """A page of one group that the host has given up. It knows no request, which would live as long as the page."""

    pool: int
    name: bytes


@dataclass
class Plan:
    """What a step's worker does, and what the engine does with its blocks beside it; plain data.

    `orders` are carried out in this order, those that copy from the engine's blocks after the step's forward. `salts`:
    by copy to or from the engine, the request whose pages it moves, and their salt, if they have one. References to the
    blocks in `held` are taken now, to those in `freed` given back.
    """

    orders: list[Order] = field(default_factory=list)
    salts: dict[int, tuple[Request, str]] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


class Landed(NamedTuple):
    """What a report brings: blocks to which references are given back; requests whose loads have ended, and those of
    them that lack a page."""

    freed: list[int]
    received: set[str]
    failed: set[str]


@dataclass
class _Standing:
    """Where a request stands with the planner."""

    request: Request
    salt: str | None  # None: what it computes is not saved
    lease: Lease
    computed: int  # the engine's own prefix when it asked, in tokens
    named: int  # pages whose names the lease has
    asked_s: float  # when it was looked up last
    waits_s: float = 0.0  # how long the engine had been asking by then, without room for it
    claimed: int = 0  # the boundary that was claimed and is being loaded, in pages
    allocated: bool = False  # the engine has said which blocks the request has
    loads: bool = False  # pages are loaded for it, and no step has been planned for it since
    landed: int = 0  # pages before it have been in the host, of all groups that need every page
    saved: int = 0  # the same or on their way there: they are offered no more, even if the host has evicted them
    offered: int = 0  # pages that have been offered for saving


class BlockPlanner:
    """Plans for one engine; called by the engine's scheduler, in its process and thread."""

    def __init__(
        self, scheduler: CacheScheduler, groups: Sequence[Group], hash_tokens: int, tells: bool = False
    ) -> None:
        """`groups` as the scheduler's pools; `hash_tokens`: of a request's block hashes. `tells`: `take_changes` is
        called. ConfigError if a page cannot be named by the hashes."""
        self._scheduler, self._groups, self._epoch, self._tells = scheduler, tuple(groups), "", tells
        self.page_tokens = self._page = scheduler.identity.page_tokens
        assert [group.name for group in groups] == [pool.name for pool in scheduler.pools]
        assert [group.lookback for group in groups] == [pool.lookback for pool in scheduler.pools]
        if self._page < HASH_WORDS or self._page % hash_tokens:
            raise ConfigError(
                f"a page of {self._page} tokens cannot be named by hashes of {hash_tokens}: choose a block size that "
                f"is a multiple of {hash_tokens} and at least {HASH_WORDS}"
            )
        if any(self._page % group.block_tokens and group.block_tokens % self._page for group in groups):
            raise ConfigError(f"a page of {self._page} tokens must be whole blocks in every group, or a part of one")
        self._hashes = self._page // hash_tokens
        self._pieces = [group.blocks(self._page) for group in groups]
        self._cells = [group.cells(self._page) for group in groups]
        self._standing: dict[str, _Standing] = {}
        self._ceiling: dict[str, int] = {}  # by request: claim no more than this, in pages, since a load failed
        self._loads: dict[int, tuple[str, int]] = {}  # by copy that loads: its request, and how many pages it has
        self._freed: list[int] = []
        # If they are told: pages that are copied to the host, by copy; those in its slots, by pool and slot.
        self._copies: dict[int, list[tuple[Page, Stored]]] = {}
        self._in_host: dict[tuple[int, int], Removed] = {}
        self._changes: list[Stored | Removed] = []
        self._explained: set[str] = set()  # requests whose tokens have been counted
        self._up, self._now = True, 0.0
        self.failed_loads = 0
        self.reasons: Counter[Reason] = Counter()  # prompt tokens, by why they were cached or not at first

    # --- what the engine asks

    def ask(
        self, request: Request, computed: int, now: float, read: bool = True, salt: Callable[[], str | None] = str
    ) -> int | None:
        """Tokens that can be loaded beyond the `computed` ones that the engine has itself; None: ask again later.
        `salt` says what tells its pages apart beside the engine's hashes; None: that is not known, or the engine's own
        prefix may be another's, so its pages are neither read nor saved. It is called when the answer is made.

        The answer is a promise until the request is asked about again, finishes, or gets blocks.
        """
        self._now = now
        standing, waits_s = self._standing.get(request.request_id), 0.0
        if standing is not None and not standing.allocated and self._may_find_more(standing):
            waits_s = standing.waits_s + now - standing.asked_s
        if standing is not None and (standing.allocated or standing.computed != computed or waits_s):
            # It was preempted, its load failed, or what there is of it has changed: what was claimed is void.
            self._close(request.request_id)
            standing = None
        if standing is None:
            standing = self._open(request, salt(), computed, read and not computed % self._page)
            standing.waits_s = waits_s
        lease = standing.lease
        if not self._scheduler.claim(lease) and lease.phase is not Phase.OFFERED:
            return None
        return lease.boundary * self._page - computed if lease.phase is Phase.OFFERED else 0

    def allocated(self, request: Request, rows: Rows, external: int) -> None:
        """The engine has allocated blocks, `external` tokens of them to be loaded (0: none, whatever was claimed)."""
        standing = self._standing.get(request.request_id)
        if standing is None:  # the engine has not asked, so what would tell its pages apart is not known
            standing = self._open(request, None, 0, False)
        lease = standing.lease
        standing.allocated = True
        if not external:
            if lease.phase is Phase.OFFERED:
                self._scheduler.blocks.load(lease, [{} for _ in self._groups])
            elif lease.phase is not Phase.READY:
                self._close(request.request_id)
                self._open(request, standing.salt, standing.computed, False).allocated = True
            return
        assert lease.phase is Phase.OFFERED, "the engine loads what was claimed"
        assert lease.boundary * self._page == standing.computed + external, "the engine loads all that was claimed"
        standing.claimed, standing.loads = lease.boundary, True
        targets: list[dict[int, int]] = []
        for pool, pages in enumerate(lease.offered):
            group = self._groups[pool]
            found = {at: group.of(rows[group.number], at, self._page) for at in members(pages)}
            assert all(len(blocks) == self._pieces[pool] for blocks in found.values()), "a page has all its blocks"
            targets.append({at: handle_of(blocks) for at, blocks in found.items()})
        self._scheduler.blocks.load(lease, targets)
        (op,) = lease.ops
        self._loads[op] = request.request_id, sum(map(len, targets))

    def sources(self, request_id: str) -> dict[Tier, int]:
        """Of the tokens that are being loaded for a request, how many were in the host and how many in storage."""
        standing = self._standing[request_id]
        beyond = ones(standing.claimed) & ~ones(standing.computed // self._page)
        stored = (union(standing.lease.fetched) & beyond).bit_count()
        found = {Tier.HOST: beyond.bit_count() - stored, Tier.STORAGE: stored}
        return {tier: pages * self._page for tier, pages in found.items() if pages}

    def plan(self, scheduled: Mapping[str, Scheduled], offers: Mapping[str, Sequence[Offer]], now: float) -> Plan:
        """Plan a step: save what is full after it, and hand out all orders since the last."""
        self._now = now
        self._step(Report(up=self._up))
        for request_id in {**scheduled, **offers}:
            if (standing := self._standing.get(request_id)) is not None:
                standing.loads &= request_id not in scheduled
                self._save(standing, scheduled.get(request_id), offers.get(request_id, ()))
        plan = Plan(self._scheduler.take())
        salted = {each.lease.number: (each.request, each.salt) for each in self._standing.values() if each.salt}
        for order in plan.orders:
            if self._tells and isinstance(order, Copy) and order.target is Tier.HOST:
                self._note(order)
            if isinstance(order, Copy) and Tier.DEVICE in (order.source, order.target):
                lease = self._scheduler.core.copies.ops[order.op].lease if salted else None
                if lease is not None and lease.number in salted:
                    plan.salts[order.op] = salted[lease.number]
                for page in order.pages:
                    plan.held += self._blocks(page.pool, page.target if order.target is Tier.DEVICE else page.source)
        plan.freed, self._freed = self._freed, []
        return plan

    def ended(self, report: Report, now: float) -> Landed:
        """Apply what all workers report."""
        self._up, self._now = report.up, now
        self._note_freed()  # before the slots are filled again
        received, failed = set[str](), set[str]()
        for event in report.events if self._copies or self._loads else ():
            if isinstance(event, Ended):
                for at, (page, stored) in enumerate(self._copies.pop(event.op, ())):
                    if event.good >> at & 1:
                        self._in_host[page.pool, page.target] = Removed(stored.pool, stored.name)
                        self._changes.append(stored)
                if event.op in self._loads:
                    request, pages = self._loads.pop(event.op)
                    (received if event.good.bit_count() == pages else failed).add(request)
        self._step(report)
        freed, self._freed = self._freed, []
        return Landed(freed, received | failed, failed)

    def take_changes(self) -> list[Stored | Removed]:
        """The pages that the host has got or given up since the last call, in order."""
        self._note_freed()
        changes, self._changes = self._changes, []
        return changes

    def finished(self, request_id: str) -> None:
        """A request has ended, in any state; copies in flight still hold their blocks."""
        self._close(request_id)
        self._ceiling.pop(request_id, None)
        self._explained.discard(request_id)

    def reset(self, epoch: str) -> None:
        """Forget all that is cached, for requests from now on: their pages are named with this `epoch`, so that pages
        in storage, which other engines may share, are not found either. Requests that have pages by now save none any
        more, as those rest on what is forgotten; those of `loaded` have to be computed anew.
        """
        self._epoch = epoch
        for request_id, standing in [*self._standing.items()]:
            if standing.lease.ready or standing.lease.phase is Phase.LOADING:
                standing.salt = None
            else:
                self._close(request_id)
        self._scheduler.core.flush((Tier.HOST,))

    def loaded(self) -> dict[str, tuple[Request, str | None]]:
        """The requests for which pages have been loaded, or are being loaded, and nothing has been computed since; and
        their salts. When the weights change, these pages are of no use."""
        return {name: (each.request, each.salt) for name, each in self._standing.items() if each.loads}

    def salts(self, request_ids: Iterable[str]) -> dict[str, str]:
        """The salts of these requests, of those that have one."""
        standing = {name: self._standing[name] for name in request_ids if name in self._standing}
        return {name: each.salt for name, each in standing.items() if each.salt}

    def distrust(self, request_id: str) -> None:
        """Save no page of a request any more."""
        if request_id in self._standing:
            self._standing[request_id].salt = None

    def busy(self) -> bool:
        """Whether copies use the engine's blocks or are about to, so that steps have to go on even without requests.
        Copies between the host and storage use none."""
        return self._scheduler.uses_blocks()

    def idle(self) -> bool:
        """Whether no copy is in flight and none is due."""
        return self._scheduler.core.idle()

    # --- behind it

    def _step(self, report: Report) -> None:
        self._scheduler.step(report, self._now)
        for standing in self._standing.values():
            if standing.claimed and standing.lease.ready:
                if standing.lease.boundary < standing.claimed:
                    # The engine computes the request anew and asks again at once: it gets less, or it would ask for
                    # ever.
                    self._ceiling[standing.request.request_id] = standing.lease.boundary
                    self.failed_loads += 1
                standing.claimed = 0
            if standing.allocated and standing.lease.ready and standing.request.request_id not in self._explained:
                self._explain(standing)
        for release in self._scheduler.blocks.released():
            for pool, handle in release.pages:
                self._freed += self._blocks(pool, handle)

    def _may_find_more(self, standing: _Standing) -> bool:
        """Whether a request for which the engine has no room yet is worth another look: more pages are in the host than
        it was offered, or storage was asked long ago. Ever less often, as the engine lets others go first meanwhile."""
        lease, waited_s = standing.lease, self._now - standing.asked_s
        if not lease.reads or lease.phase not in (Phase.READY, Phase.OFFERED) or not waited_s:
            return False
        if self._scheduler.storage_up and waited_s >= max(LOOK_AGAIN_S, standing.waits_s):
            return True
        prompt = Prompt(lease.root, lease.tokens, self._page)
        more = self._scheduler.lookup(prompt, present=lease.outside).memory - lease.boundary
        return more * self._page >= max(1, self._scheduler.config.policies.load_at_least)

    def _explain(self, standing: _Standing) -> None:
        """Count why a request's tokens were cached or not; of one that is preempted or fails to load, once."""
        self._explained.add(standing.request.request_id)
        self.reasons.update(self._scheduler.core.explain(standing.lease))

    def _blocks(self, pool: int, handle: int) -> list[int]:
        cells = blocks_of(handle, self._pieces[pool])
        return [cell // self._cells[pool] for cell in cells if cell != NULL_BLOCK]

    def _open(self, request: Request, salt: str | None, computed: int, read: bool) -> _Standing:
        """Open and claim a lease for a request, of which the engine has the pages before `computed`."""
        read = read and salt is not None
        self._step(Report(up=self._up))  # it waits for storage from now on, not from the last step
        tokens = request.num_tokens
        if (ceiling := self._ceiling.get(request.request_id)) is not None:
            tokens = min(tokens, ceiling * self._page + 1)  # the name of one more token is never read
            read = read and computed < ceiling * self._page
        named = min(tokens // self._page, len(request.block_hashes) // self._hashes)
        words = np.concatenate([self._words(request, 0, named), np.zeros(tokens - named * self._page, np.uint32)])
        present = [needed(computed // self._page, group.lookback) for group in self._groups]
        prompt = self._scheduler.prompt(words, f"{self._epoch} {salt or ''}" if self._epoch or salt else "")
        lease = self._scheduler.open(prompt, read=read, present=present)
        self._scheduler.claim(lease, present)
        standing = self._standing[request.request_id] = _Standing(request, salt, lease, computed, named, self._now)
        return standing

    def _words(self, request: Request, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """The tokens by which kvarve names pages: the engine's hash at the page's end, then zeros."""
        words = np.zeros((stop - start, self._page), "<u4")
        hashes = [bytes(request.block_hashes[(page + 1) * self._hashes - 1]) for page in range(start, stop)]
        if any(len(each) > HASH_WORDS * TOKEN_BYTES for each in hashes):
            raise ConfigError(f"block hashes must have at most {HASH_WORDS * TOKEN_BYTES} bytes: choose sha256")
        joined = b"".join(each.ljust(HASH_WORDS * TOKEN_BYTES, b"\0") for each in hashes)
        words[:, :HASH_WORDS] = np.frombuffer(joined, "<u4").reshape(-1, HASH_WORDS)
        return words.reshape(-1)

    def _save(self, standing: _Standing, scheduled: Scheduled | None, offers: Sequence[Offer]) -> None:
        lease = standing.lease
        if not (lease.ready and standing.allocated) or standing.salt is None:
            return
        full = len(standing.request.block_hashes) // self._hashes
        if scheduled is not None:
            full = min(full, (scheduled.computed + scheduled.tokens) // self._page)
        else:
            full = min(full, standing.offered)
        # A state is what its name says where a step's chunk starts or ends, and nothing is known of one elsewhere.
        ends = {scheduled.computed, scheduled.computed + scheduled.tokens} if scheduled is not None else set[int]()
        states = [
            offer
            for offer in offers
            if not offer.tokens % self._page and offer.tokens <= full * self._page and offer.tokens in ends
        ]
        if full <= standing.offered and not states:
            return
        if full > standing.named:
            spare = len(lease.tokens) // TOKEN_BYTES - standing.named * self._page
            self._scheduler.extend(lease, self._words(standing.request, standing.named, full), spare)
            standing.named = full
        pages: list[dict[int, int]] = []
        for group, pieces in zip(self._groups, self._pieces, strict=True):
            mine: dict[int, int] = {}
            if group.offered:
                for offer in states:
                    if offer.group == group.number and offer.block != NULL_BLOCK:
                        mine[offer.tokens // self._page - 1] = handle_of([offer.block])
            elif scheduled is not None:
                row = scheduled.rows[group.number]
                for at in range(standing.saved, full):
                    blocks = group.of(row, at, self._page)
                    if len(blocks) == pieces and NULL_BLOCK not in blocks:
                        mine[at] = handle_of(blocks)
            pages.append(mine)
        self._scheduler.blocks.save(lease, pages)
        standing.offered = max(full, standing.offered)
        standing.landed = max(standing.landed, self._scheduler.blocks.kept(lease, coming=False))
        standing.saved = max(standing.landed, min(standing.offered, self._scheduler.blocks.kept(lease)))

    def _note(self, copy: Copy) -> None:
        """Remember what a copy brings to the host, to tell it when it has ended."""
        lease = self._scheduler.core.copies.ops[copy.op].lease
        standing = next((each for each in self._standing.values() if each.lease is lease), None)
        if lease is None or standing is None:
            return
        hashes, found = standing.request.block_hashes, []
        positions = {lease.key(at): at for at in range(lease.pages)}
        for page in copy.pages:
            at = positions[page.key]
            parent = bytes(hashes[at * self._hashes - 1]) if at else None
            name = bytes(hashes[(at + 1) * self._hashes - 1])
            found.append((page, Stored(standing.request, page.pool, at, name, parent)))
        self._copies[copy.op] = found

    def _note_freed(self) -> None:
        for place in self._scheduler.freed() if self._tells else ():
            if (removed := self._in_host.pop(place, None)) is not None:
                self._changes.append(removed)

    def _close(self, request_id: str) -> None:
        standing = self._standing.pop(request_id, None)
        if standing is not None:
            self._scheduler.close(standing.lease)
