"""Pages damaged on purpose, pool by pool: a check that cannot fail is no check.

A check that is on has to catch the damage and count it, and the page has to be recomputed. Where there is no check, or
it is off, or the damaged page has a valid checksum, the comparison of logits has to notice.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.memory.record import HEADER_BYTES, Stamp
from kvarve.pages.pools import MEMORY_TIERS, PoolSpec, Tier
from kvarve.reference.verify.proof_requests import ProofRequest, differences
from kvarve.reference.verify.prover import Prover
from kvarve.reference.verify.report import Damage
from kvarve.storage.altered import AlteredStorage

SALT = "damage"
Before = Callable[[ProofRequest], None]
ADVICE = (
    "try prompts of another length with --tokens (longer than what a sparse indexer picks, or shorter than what a "
    "model forgets), or another --seed"
)


def spoil(page: Tensor) -> None:
    """Change all numbers to valid others, in place: signs flipped, integers one off, zeros made ones."""
    if page.dtype is torch.bool:
        page.logical_not_()
    elif page.dtype.is_floating_point:
        wide = page.float()
        page.copy_(torch.where(wide == 0, torch.ones_like(wide), -wide))
    else:
        page.copy_(torch.where(page > 0, page - 1, page + 1))


def kinds(pool: PoolSpec) -> list[str]:
    """The kinds of buffers in a page of the pool, without layer numbers: keys, values, recurrent.0 and so on."""
    return [*dict.fromkeys(buffer.name.split(".", 2)[2] for buffer in pool.buffers)]


def payload(pool: PoolSpec, record: memoryview) -> dict[str, Tensor]:
    """The buffers of a page as tensors over its record's own bytes."""
    found = {}
    for buffer, offset in zip(pool.buffers, pool.offsets(), strict=False):
        dtype, count = getattr(torch, buffer.dtype), torch.Size(buffer.shape).numel()
        found[buffer.name] = torch.frombuffer(record, dtype=dtype, count=count, offset=HEADER_BYTES + offset)
    return found


class _Target:
    """One prompt, fully cached, whose last page before the boundary is damaged in each pool."""

    def __init__(self, prover: Prover, cache: PrefixCache) -> None:
        self.prover, self.cache, self.plan = prover, cache, prover.plan
        self.whole = self.plan.whole
        # One token after the pages reads a state that is soon overwritten; many read pages that only some tokens pick,
        # or that are read only when several tokens become one entry.
        behind = (1, max(1, self.plan.chunk // 2))
        self.prompt, self.longer = (self.plan.prompt(self.whole + tokens) for tokens in behind)
        self.lease = prover.check(prover.run(cache, self.prompt, SALT)).lease
        prover.settle(cache)
        self.at = self.whole // self.plan.page - 1
        self.key = self.lease.key(self.at)
        self.rng = random.Random(self.plan.seed)

    def name(self, pool: PoolSpec) -> str:
        return self.prover.name(self.lease, self.at, pool)

    def ask(self, before: Before | None = None, longer: bool = False) -> ProofRequest:
        return self.prover.run(self.cache, self.longer if longer else self.prompt, SALT, before=before)

    def healthy(self, empty: tuple[Tier, ...] = ()) -> ProofRequest:
        """Asked again, the prompt resumes in full with the right logits."""
        if empty:
            self.prover.empty(self.cache, empty)
        return self.prover.check(self.ask(), self.whole, Tier(len(empty)), "asked again")

    def flip(self, record: bytearray | memoryview, pool: PoolSpec) -> None:
        """Flip one random bit of the page's payload."""
        at = HEADER_BYTES + self.rng.randrange(pool.payload_bytes)
        record[at] ^= 1 << self.rng.randrange(8)

    @contextmanager
    def damage(self, pool: PoolSpec, what: str, where: str, expected: str, check: str) -> Iterator[Damage]:
        row = Damage(pool.name, what, where, expected, check)
        self.prover.report.damages.append(row)
        try:
            yield row
        except Exception as e:  # noqa: BLE001  any failure of a broken cache is a finding
            row.troubles.append(f"{type(e).__name__}: {e}")

    def noticed(self, row: Damage, request: ProofRequest, alone: bool = False) -> None:
        """The logits have to differ while the damage is there; damage to one kind of buffer `alone` may be idle."""
        if not self._wrong(row, request) and not row.troubles and not self._wrong(row, self.ask(longer=True)):
            row.idle = alone
            if not alone:
                row.troubles.append(f"no answer depends on it, so the proof says nothing about it: {ADVICE}")
        self.prover.tick(self.prover.row)

    def _wrong(self, row: Damage, request: ProofRequest) -> bool:
        self.prover.row.requests += 1
        if sum(request.from_tiers()) != self.whole:
            row.troubles.append(
                f"the page was not used: resumed after {sum(request.from_tiers())} of {self.whole} tokens"
            )
        return bool(differences(request.transcript, self.prover.uncached(request.prompt)))

    def caught(self, row: Damage, counter: str, before: float, request: ProofRequest) -> None:
        """The check has to have counted the damage, and the logits have to be right."""
        self.prover.check(request)
        if self.cache.stats()[counter] <= before:
            row.troubles.append("the check did not catch it")
        elif differences(request.transcript, self.prover.uncached(self.prompt)):
            row.troubles.append("it was caught, but the logits are wrong")
        elif sum(request.from_tiers()) >= self.whole:
            row.troubles.append("it was caught, but the page was used")


def on_the_device(target: _Target) -> None:
    """The device has no check: a damaged page has to change logits, and each kind of buffer in it should."""
    for pool in target.cache.identity.pools:
        several = kinds(pool) if len(kinds(pool)) > 1 else []
        for kind in ("a page", *several):
            with target.damage(pool, kind, "device", "noticed", "none") as row, _undone() as undo:
                request = target.ask(_spoils(target.cache, pool, kind, undo))
                target.noticed(row, request, alone=kind in several)
    target.healthy()


def _spoils(cache: PrefixCache, pool: PoolSpec, kind: str, undo: list[tuple[Tensor, Tensor]]) -> Before:
    """Spoils a request's page before it is read, all of it or one kind of buffer."""

    def spoil_it(request: ProofRequest) -> None:
        slot = cache.pages(request.lease)[pool.name][1][-1]
        for name, slots in cache.worker.arena(pool.name).items():
            if kind in ("a page", name.split(".", 2)[2]):
                undo.append((slots[slot], slots[slot].clone()))
                spoil(slots[slot])

    return spoil_it


@contextmanager
def _undone() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Restores the pages on the list at the end."""
    undo: list[tuple[Tensor, Tensor]] = []
    try:
        yield undo
    finally:
        for page, good in undo:
            page.copy_(good)


def in_the_host_checked(target: _Target) -> None:
    for pool in target.cache.identity.pools:
        with target.damage(pool, "a bit", "host", "caught", "on") as row:
            target.prover.empty(target.cache, [Tier.DEVICE])
            records = target.cache.worker.records(pool.name, target.key)
            for record in records:
                target.flip(record, pool)
            before = target.cache.stats()["bad_host"]
            target.caught(row, "bad_host", before, target.ask())
            target.prover.settle(target.cache)
            before = target.cache.stats()["bad_host"]
            target.healthy((Tier.DEVICE,))
            if target.cache.stats()["bad_host"] > before:
                row.troubles.append("the page was not recomputed")


def in_the_host_unchecked(target: _Target) -> None:
    for pool in target.cache.identity.pools:
        with target.damage(pool, "a page", "host", "noticed", "off") as row:
            target.prover.empty(target.cache, [Tier.DEVICE])
            good = [(record, bytes(record)) for record in target.cache.worker.records(pool.name, target.key)]
            try:
                for record, _ in good:
                    for page in payload(pool, record).values():
                        spoil(page)
                target.noticed(row, target.ask())
            finally:
                for record, bytes_ in good:
                    record[:] = bytes_
            target.prover.empty(target.cache, [Tier.DEVICE])
    target.healthy((Tier.DEVICE,))


def in_storage(target: _Target, store: AlteredStorage) -> None:
    """Damage to stored bytes is caught; a wrong page with a valid checksum is noticed."""
    identity = target.prover.model.identity
    pools = target.cache.identity.pools

    def other(pool: PoolSpec) -> bytes:
        """The same pool's page of another position in the prompt, or another pool's of the same position."""
        names = [
            target.prover.name(target.lease, 0, pool),
            *(target.name(each) for each in pools if each is not pool),
        ]
        return next((data for data in map(store.read, names) if data is not None), b"")

    for pool in pools:
        good = store.read(target.name(pool))
        if good is None:
            with target.damage(pool, "a page", "storage", "caught", "on") as row:
                row.troubles.append("it is not in storage")
            continue
        bit, header = bytearray(good), bytearray(good)
        target.flip(bit, pool)
        header[target.rng.randrange(HEADER_BYTES)] ^= 1
        damages = {"a bit": bytes(bit), "the header": bytes(header), "its end": good[:-1], "all of it": other(pool)}
        for what, data in damages.items():
            with target.damage(pool, what, "storage", "caught", "on") as row:
                target.prover.empty(target.cache)
                target.prover.write(store, target.name(pool), data, pool)
                before = target.cache.stats()["bad_storage"]
                target.caught(row, "bad_storage", before, target.ask())
                target.prover.settle(target.cache)
                if store.read(target.name(pool)) != good:
                    row.troubles.append("the page was not recomputed and stored with the same bits")
                    store.write({target.name(pool): good})
                target.healthy(MEMORY_TIERS)
        with target.damage(pool, "a sealed page", "storage", "noticed", "on") as row:
            target.prover.empty(target.cache)
            forged = memoryview(bytearray(good))
            for page in payload(pool, forged).values():
                spoil(page)
            rank = 0 if pool.replicated else target.prover.rank
            Stamp(identity.fingerprint(), pool.name, pool.payload_bytes, rank, target.prover.ranks).seal(
                forged, target.key
            )
            target.prover.write(store, target.name(pool), bytes(forged), pool)
            target.noticed(row, target.ask())
            target.prover.empty(target.cache)
            target.prover.write(store, target.name(pool), good, pool)


def damages(prover: Prover) -> None:
    """All damages, on two caches: one that checks its host memory, and one that does not."""
    with prover.path("damage", "pages damaged on purpose, see below"):
        with prover.store() as store, prover.cache(store, snapshot_every=prover.plan.chunk) as cache:
            target = _Target(prover, cache)
            on_the_device(target)
            in_the_host_checked(target)
            in_storage(target, store)
        with prover.store() as store, prover.cache(store, snapshot_every=prover.plan.chunk, verify_host=False) as cache:
            in_the_host_unchecked(_Target(prover, cache))
