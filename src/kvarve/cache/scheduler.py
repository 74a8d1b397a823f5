"""`CacheScheduler` decides which pages a request resumes from, and which copies come next; workers move the bytes.

It is the pure core with what an engine's scheduler process needs beside it: keys of prompts, the time and the inputs
that the ranks agree on, and changes of the storage. It knows no tensor, thread or file, and reads no clock. Reports of
a worker come in (`step`), orders for it go out (`take`), both plain data (`messages.py`): the worker may live in
another process. Leases stay here; across a process they are known by their number.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvarve.cache.config import CacheConfig
from kvarve.cache.messages import ChangeMade, ChangeProposed, ChangeRefused, Order, Report
from kvarve.core.audit import audit
from kvarve.core.copies.effects import canonical
from kvarve.core.core import Core, Hit
from kvarve.core.core_config import CoreConfig, Slots
from kvarve.core.lease import Ask, Lease
from kvarve.core.lease import Prompt as CorePrompt
from kvarve.core.observe import headroom
from kvarve.core.observe.headroom import Demand, pinned
from kvarve.core.policies import MEMORY_ALONE
from kvarve.core.requests.engine_blocks import EngineBlocks
from kvarve.errors import ConfigError
from kvarve.pages.keys import KEY_BYTES, TOKEN_BYTES, bind_to_chunk, heads, names, pack, root_key
from kvarve.pages.pools import ModelIdentity, Tier
from kvarve.pages.ticket import HandOverError, Ticket
from kvarve.ranks.agreement import Agreement, Proposal

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at how many slots are pinned
CHANGE_S = 30.0  # how long a rank waits for the others to propose the same change of the storage

Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True)
class Prompt:
    """Packed tokens and the root key, as the core takes them (`CacheScheduler.prompt`)."""

    root: bytes
    tokens: bytes
    page_tokens: int
    heads: bytes = b""  # what its full pages begin with, where residency is told

    @cached_property
    def keys(self) -> bytes:
        """The keys of all full pages, concatenated; computed when they are first asked for."""
        return names(self.root, b"", self.tokens, self.page_tokens)


class Changes:
    """The change of the storage that this rank's worker has proposed, until it is decided: it is made in a step in
    which all ranks propose the same, or never."""

    def __init__(self) -> None:
        self.pending: ChangeProposed | None = None
        self._until_s: float | None = None  # by the time that the ranks agree on; None before the first step

    def propose(self, change: ChangeProposed) -> None:
        """Take up a worker's proposal; it replaces one that the worker declined."""
        assert self.pending is None or not self.pending.ready, "a worker proposes one change at a time"
        self.pending, self._until_s = change, None

    @property
    def proposal(self) -> Proposal | None:
        """What this rank tells the others."""
        change = self.pending
        if change is None or not change.ready:
            return None if change is None else Proposal("", ready=False)
        if not change.attach:
            return Proposal("detach")
        policies = change.config.policies
        what = [change.config.storages, policies.storage_wait, policies.write_policy, change.back_up]
        return Proposal(json.dumps(what))

    def decide(self, granted: bool | None, now: float) -> ChangeMade | ChangeRefused | None:
        """What becomes of the pending change, by the answer of all ranks; None while it stays pending."""
        change = self.pending
        if change is None:
            return None
        if granted is None:
            self._until_s = now + CHANGE_S if self._until_s is None else self._until_s
            if now < self._until_s:
                return None
        self.pending = None
        if granted:
            return ChangeMade(change.change)
        if granted is None:
            late = f"the other ranks were not asked for the same within {CHANGE_S:g} s"
            return ChangeRefused(change.change, late, busy=True)
        return ChangeRefused(change.change, "another rank cannot do it, or was asked for something else", busy=False)


class CacheScheduler:
    """Decides for one rank of one model; its worker has the same identity and settings.

    A request's life: `open`, then `step` and `claim` until ready, `pages` to resume from, `grow` and `publish` for each
    chunk computed, `close`. After any of these the orders in `take` go to the worker. What needs no keys, names of
    pools, agreed time or ranks is asked of its `core`.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        config: CacheConfig,
        slots: Slots,
        *,
        storage: bool = False,
        only_read: bool = False,
        agreement: Agreement | None = None,
        prefill_tokens: int = 0,
    ) -> None:
        """`slots`: of each memory tier and pool, as the worker has them (`CacheWorker.slots`); without the device, the
        nearest tier is an engine's. `storage`: whether the worker begins with one; `only_read`: in which nothing is
        to be stored. `prefill_tokens`: what the engine computes at once, if that is more than the identity's chunk."""
        self.identity, self.config = identity, config
        self.pools = identity.pools
        self.now = 0.0  # the ranks agree on the time in each step
        self.agreement = agreement or Agreement()
        self._early: list[Lease] = []  # opened before the first step, which sets their deadlines
        self._namespace = identity.fingerprint()
        shape = (self.pools, slots, identity.page_tokens, identity.chunk_tokens)
        self.core = Core(CoreConfig(*shape, storage=storage, policies=config.policies, prefill_tokens=prefill_tokens))
        self._attached = storage
        self.core.storage.only_read = only_read
        self._changes = Changes()
        self._orders: list[Order] = []  # not taken yet; those of the core come after them
        self._pinned, self._look_s = [0] * len(self.core.slot_pools.capacity), 0.0  # and when to look again

    # --- a request's life

    def lookup(self, tokens: Tokens | Prompt, salt: str = "", present: Sequence[int] = ()) -> Hit:
        """How deep a prompt could resume now, in pages; changes nothing. `present`: by pool, the pages (bits) that an
        engine has on a device of its own."""
        known = tokens if isinstance(tokens, Prompt) else self.prompt(tokens, salt)
        return self.core.lookup(known.root, known.tokens, present)

    def prompt(self, tokens: Tokens, salt: str = "") -> Prompt:
        """Prepare a prompt for `open`; from any thread, since a long prompt takes a while.

        ConfigError if a token is no number of 32 bits or the salt cannot be encoded.
        """
        try:
            packed, root = pack(tokens), root_key(self._namespace, salt)
        except (ValueError, TypeError, OverflowError, AttributeError) as e:
            raise ConfigError(f"tokens must be numbers of 32 bits, and the salt text: {e}") from None
        return Prompt(root, self._known_by(packed), self.identity.page_tokens, self._heads(packed))

    def open(
        self,
        tokens: Tokens | Prompt,
        salt: str = "",
        read: bool = True,
        priority: int = 0,
        ticket: Ticket | None = None,
        unix_s: float = 0.0,
        present: Sequence[int] = (),
        again: bool = False,
        ask: bool = True,
    ) -> Lease:
        """Open a lease for a request that begins to wait: its pages in storage are prefetched. With `read` false it
        resumes from nothing; pages used at a high `priority` are evicted last, if eviction is by priority.

        With a `ticket` it waits for storage, if need be, until the ticket's time, but no longer than for a call that
        hangs; `unix_s` is the Unix time of the request, on all ranks the same. ConfigError for a ticket of another
        prompt, salt, model, layout or sharding. `present`: what an engine has of the prompt, as in `lookup`. `again`:
        the request has had another lease for this prompt (see `Core.open`). Unless `ask`, storage is not asked for it.
        """
        known = tokens if isinstance(tokens, Prompt) else self.prompt(tokens, salt)
        patience, expected = self.config.policies.patience() if ask else MEMORY_ALONE, (0, 0.0)
        if ticket is not None:
            self.check_ticket(ticket, known)
            coming_s = min(ticket.until_s - unix_s, self.config.policies.storage_deadline_s)
            patience = replace(patience, base_s=max(patience.base_s, coming_s))
            expected = ticket.boundary, max(0.0, coming_s)
        named = known.keys if ticket is not None else b""
        asked = Ask(patience, read, priority, present, expected, again)
        lease = self.core.open(CorePrompt(known.root, known.tokens, known.heads, named), self.now, asked)
        if not self.now:
            self._early.append(lease)
        return lease

    def claim(self, lease: Lease, present: Sequence[int] | None = None) -> bool:
        """The engine admits this request, so its pages are loaded to the device; True once the lease is ready.

        Ask again after each `step` (see `Core.claim`). Over an engine's blocks: with what the engine has now
        (`present`) and holds until it closes the lease; a lease that is OFFERED then waits for `blocks.load`.
        """
        return self.core.claim(lease, self.now, present)

    @property
    def blocks(self) -> EngineBlocks:
        """Where an engine has blocks of its own: what it loads into these and saves from them."""
        return self.core.engine_blocks

    def uses_blocks(self) -> bool:
        """Whether a copy in flight uses an engine's blocks."""
        return any(Tier.DEVICE in op.edge for op in self.core.copies.ops.values())

    def freed(self) -> list[tuple[int, int]]:
        """The host's slots (pool, slot) that have become free since the last call; the first call has none."""
        slot_pools = self.core.slot_pools
        freed, slot_pools.freed = slot_pools.freed or [], []
        tiers = ((slot_pools.tier(place), place % len(self.pools), slot) for place, slot in freed)
        return [(pool, slot) for tier, pool, slot in tiers if tier is Tier.HOST]

    def extend(self, lease: Lease, tokens: Tokens, replaced: int = 0) -> None:
        """Append tokens to the sequence of a ready lease, in place of its last `replaced` ones (`Growth.extend`)."""
        chunk_bytes = self.identity.chunk_tokens * TOKEN_BYTES
        stays = len(lease.tokens) - replaced * TOKEN_BYTES
        whole = stays // chunk_bytes * chunk_bytes
        packed = lease.tokens[whole:stays] + pack(tokens)
        self.core.growth.extend(lease, self._known_by(packed), len(lease.tokens) - whole, self._heads(packed))

    def pages(self, lease: Lease) -> dict[str, tuple[range, list[int]]]:
        """The pages that a ready lease resumes from: for each pool the positions and their device slots."""
        return {pool.name: self._own_device().growth.slots(lease, i) for i, pool in enumerate(self.pools)}

    def grow(self, lease: Lease, upto: int) -> dict[str, dict[int, int]]:
        """Reserve slots for the pages up to `upto` that are worth keeping: for each pool the device slots by position.

        If slots run out fewer pages are kept, and none beyond `lease.pages`. Never waits: under write-back ask
        `Growth.short` first.
        """
        fresh = self._own_device().growth.grow(lease, min(upto, lease.pages))
        return {pool.name: slots for pool, slots in zip(self.pools, fresh, strict=True)}

    def publish(self, lease: Lease, upto: int) -> None:
        """Give the filled pages before `upto` to the tree, where other requests find them."""
        self._own_device().growth.publish(lease, upto)

    def close(self, lease: Lease) -> None:
        """End a request: unpin its pages, and free the slots that it has not published."""
        self.core.close(lease)

    def export(self, lease: Lease, until_s: float, prompt: Prompt | None = None) -> Ticket | None:
        """Hand a ready lease's prompt over: a ticket for the pages that have been published, which go to storage now
        whatever the write policy, and are expected there until `until_s` (Unix time). If the lease has grown beyond its
        `prompt`, the pages of the answer go to storage too, but the ticket is for the prompt. None without a storage in
        which pages are stored.
        """
        if not self._attached or self.core.storage.only_read:
            return None
        boundary, identity = self.core.hand_over(lease), self.identity
        if prompt is not None:
            boundary = min(boundary, self.core.lookup(prompt.root, prompt.tokens).memory)
        key = lease.key(boundary - 1).hex() if boundary else ""
        model = self._namespace.hex()
        return Ticket(lease.root.hex(), key, boundary, until_s, model, identity.layout, identity.ranks)

    def check_ticket(self, ticket: Ticket, prompt: Prompt) -> None:
        """HandOverError unless `open` takes this ticket for a prompt; from any thread, since it hashes the prompt."""
        ticket.check(self.identity, prompt.root)
        end = ticket.boundary * KEY_BYTES
        if len(prompt.keys) < end or prompt.keys[max(0, end - KEY_BYTES) : end].hex() != ticket.key:
            raise HandOverError("the ticket is of another beginning: it needs the prompt that was prefilled, or more")

    def _own_device(self) -> Core:
        assert Tier.DEVICE in self.core.config.slots, "an engine owns the device and its slots"
        return self.core

    # --- what admission asks

    def capacity_tokens(self) -> int:
        """The longest sequence that fits on the device, in tokens."""
        slot_pools = self._own_device().slot_pools
        pages = min((slot_pools.capacity[pool] for pool in slot_pools.chains), default=1 << 40)
        return pages * self.identity.page_tokens

    def demand(self, asked: Sequence[tuple[Lease, int]]) -> Demand:
        """The loose device slots, and how many each lease would take up to a page (see `headroom.demand`)."""
        return headroom.demand(self._own_device(), asked)

    def device_state(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """What a request waits for that got too few device slots (see `headroom.device_state`)."""
        return headroom.device_state(self._own_device())

    def making_room(self) -> bool:
        """Whether evictions wait for copies in flight (see `headroom.making_room`)."""
        return headroom.making_room(self.core)

    def copying(self) -> bool:
        """Whether copies in flight pin device pages or own device slots."""
        return headroom.copying(self.core)

    def found(self, lease: Lease) -> int:
        """The boundary at which a lease's prompt could resume from memory now."""
        return self.core.lookup(lease.root, lease.tokens).memory

    def shape(self) -> int:
        """A number that changes with every page position that enters or leaves the tree, as `found` may then."""
        return self.core.tree.shape

    def shared_prefix(self, ahead: Lease, behind: Lease) -> int:
        """The deepest boundary at which `behind` could resume from pages that `ahead` keeps."""
        return self.core.shared_prefix(ahead, behind)

    def mark(self, lease: Lease, boundary: int) -> bool:
        """Have a ready lease keep its windows and states at a boundary too (see `Growth.mark`)."""
        return self.core.growth.mark(lease, boundary)

    # --- time passes

    def step(self, report: Report, now: float, says: bytes = b"") -> bytes:
        """Once per turn of the engine, at this rank's time `now`: apply what the worker reports, as far as all ranks
        agree on it; then what is due. Returns what rank 0 says to all ranks for this turn, here or there."""
        if report.proposed is not None:
            self._changes.propose(report.proposed)
        agreed = self.agreement.agree(
            report.events, now, report.up, self._changes.proposal, waiting=self._waiting(), says=says
        )
        self.now = agreed.now
        while self._early:
            self.core.prefetch.postpone(self._early.pop(), self.now)
        self.core.step(agreed.events, self.now)
        if self._changes.pending is None or not self._decide(self._changes.pending, agreed.granted):
            self._follow_storage(agreed.up)
        if self.now >= self._look_s:
            self._pinned, self._look_s = pinned(self.core), self.now + LOOK_S
        return agreed.said

    def _waiting(self) -> bool:
        """Whether anything waits for the ranks to agree: a copy or probe in flight, or an engine that computes
        nothing."""
        return bool(self.core.copies.ops) or not any(lease.ready for lease in self.core.leases.values())

    def take(self) -> list[Order]:
        """The orders since the last call, for the worker to carry out in this order."""
        orders, self._orders = [*self._orders, *self.core.take()], []
        for order in orders if self.agreement.ranks > 1 else ():
            if not isinstance(order, ChangeMade | ChangeRefused):  # of what only this rank may have proposed
                self.agreement.note(canonical(order))
        return orders

    def moved(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The device's extents that have left a pool since the last call, and those that have joined one (see
        `Extents.moved`)."""
        extents = self.core.slot_pools.extents[0]
        if extents is None or Tier.DEVICE not in self.core.config.slots:
            return [], []
        return extents.moved()

    @property
    def storage_up(self) -> bool:
        """Whether a storage is attached and answers, by what the ranks agreed on."""
        return self.core.storage.attached

    # --- changes of the storage

    def _decide(self, change: ChangeProposed, granted: bool | None) -> bool:
        """Make a change that all ranks propose, or give it up; whether it was made."""
        decision = self._changes.decide(granted, self.now)
        if decision is None:
            return False
        made = isinstance(decision, ChangeMade)
        if made:
            self.core.write_by(change.config.policies.write_policy)  # first: it decides which pages are dirty
            self.core.storage.only_read = change.only_read
            if change.attach:
                self.core.attach(change.back_up)
            else:
                self.core.detach()
            self.config, self._attached = change.config, change.attach
        self._orders += [*self.core.take(), decision]  # copies sent before it go to the storage before
        if made:
            self.core.step((), self.now)  # the copies that follow from it are sent at once
        return made

    def _follow_storage(self, up: bool) -> None:
        """Go on without a storage that is down on any rank; once it is up again dirty pages go there."""
        if not self._attached or up == self.storage_up:
            return
        log.warning("storage %s", "is back: it gets what was written meanwhile" if up else "is down: on without it")
        if up:
            self.core.attach(again=True)
        else:
            self.core.detach(down=True)
        self.core.step((), self.now)

    # --- figures

    def stats(self) -> dict[str, float]:
        """Counters, levels and sizes by name; a lookback of 0 stands for all pages. Where pools share a tier, `slots`
        are what a pool has of it now, and `most` what it can have."""
        stats: dict[str, float] = asdict(self.core.counters)
        for pool in self.pools:
            stats[f"page_bytes.{pool.name}"] = pool.payload_bytes
            stats[f"lookback.{pool.name}"] = pool.lookback or 0
        slot_pools = self.core.slot_pools
        places = [f"{tier.name.lower()}.{pool.name}" for tier in slot_pools.memory for pool in self.pools]
        for number, name in enumerate(places):
            stats[f"slots.{name}"] = slot_pools.committed(number)
            stats[f"used.{name}"] = slot_pools.committed(number) - len(slot_pools.free[number])
            stats[f"evicted.{name}"] = self.core.residency.evicted[number]
            stats[f"most.{name}"] = slot_pools.capacity[number]
            stats[f"pinned.{name}"] = self._pinned[number]
        for tier, extents in zip(slot_pools.memory, slot_pools.extents, strict=True):
            cut, name, whole = None if extents is None else extents.cut, tier.name.lower(), 0
            for at, pool in enumerate(self.pools):
                size = pool.payload_bytes if cut is None else cut.nbytes // cut.per[at]
                stats[f"slot_bytes.{name}.{pool.name}"] = size
                whole += size * int(stats[f"most.{name}.{pool.name}"])
            stats[f"memory_bytes.{name}"] = whole if cut is None else cut.count * cut.nbytes
        stats["page_tokens"] = self.identity.page_tokens
        stats["offload_paused"] = self.core.governor.paused
        stats["offload_used_share"] = self.core.governor.used_share
        stats["stores_backing_off"] = self.core.backups.backing_off()
        stats["stores_refused"] = self.core.storage.refused
        stats["leases"] = len(self.core.leases)
        return stats

    def audit(self) -> None:
        """Check the laws of the core (`core/audit.py`), page by page. BrokenLaw, an assertion: a bug."""
        audit(self.core)

    def _heads(self, packed: bytes) -> bytes:
        return heads(packed, self.identity.page_tokens) if self.core.page_events is not None else b""

    def _known_by(self, packed: bytes) -> bytes:
        return bind_to_chunk(packed, self.identity.page_tokens, self.identity.chunk_tokens)
