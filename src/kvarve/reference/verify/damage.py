"""Pages damaged on purpose, pool by pool: a check that cannot fail is no check.

A check that is on has to catch the damage and count it, and the page has to be recomputed. Where there is no check, or
it is off, or the damaged page has a valid checksum, the comparison of logits has to notice.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Lease
from kvarve.pages.pools import MEMORY_TIERS, PoolSpec, Tier
from kvarve.records.record import HEADER_BYTES, Stamp
from kvarve.reference.verify.prover import Prover, key_of
from kvarve.reference.verify.report import Damage
from kvarve.reference.verify.watched import Answer, WatchedEngine, differences
from kvarve.storage.altered import AlteredStorage

SALT = "damage"
Before = Callable[[Lease], None]
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

    def __init__(self, prover: Prover, engine: WatchedEngine) -> None:
        self.prover, self.engine, self.plan = prover, engine, prover.plan
        self.pools = prover.model.layout.pools
        self.whole = self.plan.whole
        # One token after the pages reads a state that is soon overwritten; many read pages that only some tokens pick,
        # or that are read only when several tokens become one entry.
        behind = (1, max(1, self.plan.chunk // 2))
        self.prompt, self.longer = (self.plan.prompt(self.whole + tokens) for tokens in behind)
        prover.check(prover.run(engine, self.prompt, SALT))
        engine.written()
        self.at = self.whole // self.plan.page - 1
        self.known = prover.prompt(engine, self.prompt, SALT)
        self.key = key_of(self.known, self.at)
        self.rng = random.Random(self.plan.seed)

    def name(self, pool: PoolSpec) -> str:
        return self.prover.name(self.known, self.at, pool)

    def records(self, pool: PoolSpec) -> list[memoryview]:
        """The page in host memory."""
        return self.engine.cache.worker.records(pool.name, self.key)

    def ask(self, before: Before | None = None, longer: bool = False) -> Answer:
        return self.prover.run(self.engine, self.longer if longer else self.prompt, SALT, before=before)

    def healthy(self, empty: tuple[Tier, ...] = ()) -> Answer:
        """Asked again, the prompt resumes in full with the right logits."""
        if empty:
            self.engine.empty(empty)
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

    def noticed(self, row: Damage, answer: Answer, alone: bool = False) -> None:
        """The logits have to differ while the damage is there; damage to one kind of buffer `alone` may be idle."""
        if not self._wrong(row, answer) and not row.troubles and not self._wrong(row, self.ask(longer=True)):
            row.idle = alone
            if not alone:
                row.troubles.append(f"no answer depends on it, so the proof says nothing about it: {ADVICE}")
        self.prover.tick(self.prover.row)

    def _wrong(self, row: Damage, answer: Answer) -> bool:
        self.prover.row.requests += 1
        if answer.usage.cached != self.whole:
            row.troubles.append(f"the page was not used: resumed after {answer.usage.cached} of {self.whole} tokens")
        return bool(differences(answer.found, self.prover.uncached(answer.prompt)))

    def caught(self, row: Damage, counter: str) -> None:
        """Asked now, a check has to count the damage, and the logits have to be right."""
        before = self.engine.stats()[counter]
        answer = self.prover.check(self.ask())
        if self.engine.stats()[counter] <= before:
            row.troubles.append("the check did not catch it")
        elif differences(answer.found, self.prover.uncached(self.prompt)):
            row.troubles.append("it was caught, but the logits are wrong")
        elif answer.usage.cached >= self.whole:
            row.troubles.append("it was caught, but the page was used")


def on_the_device(target: _Target) -> None:
    """The device has no check: a damaged page has to change logits, and each kind of buffer in it should."""
    for pool in target.pools:
        several = kinds(pool) if len(kinds(pool)) > 1 else []
        for kind in ("a page", *several):
            with target.damage(pool, kind, "device", "noticed", "none") as row, ExitStack() as undo:
                target.noticed(row, target.ask(_spoils(target.engine.cache, pool, kind, undo)), alone=kind in several)
    target.healthy()


def _spoils(cache: PrefixCache, pool: PoolSpec, kind: str, undo: ExitStack) -> Before:
    """Spoils a request's page before it is read, all of it or one kind of buffer, until `undo` is closed."""

    def spoil_it(lease: Lease) -> None:
        slot = cache.pages(lease)[pool.name][1][-1]
        for name, slots in cache.worker.arena(pool.name).items():
            if kind in ("a page", name.split(".", 2)[2]):
                undo.callback(slots[slot].copy_, slots[slot].clone())
                spoil(slots[slot])

    return spoil_it


def in_the_host_checked(target: _Target) -> None:
    for pool in target.pools:
        with target.damage(pool, "a bit", "host", "caught", "on") as row:
            target.engine.empty([Tier.DEVICE])
            for record in target.records(pool):
                target.flip(record, pool)
            target.caught(row, "bad_host")
            target.engine.written()
            before = target.engine.stats()["bad_host"]
            target.healthy((Tier.DEVICE,))
            if target.engine.stats()["bad_host"] > before:
                row.troubles.append("the page was not recomputed")


def in_the_host_unchecked(target: _Target) -> None:
    for pool in target.pools:
        with target.damage(pool, "a page", "host", "noticed", "off") as row:
            target.engine.empty([Tier.DEVICE])
            with ExitStack() as undo:
                for record in target.records(pool):
                    undo.callback(record.__setitem__, slice(None), bytes(record))
                    for page in payload(pool, record).values():
                        spoil(page)
                target.noticed(row, target.ask())
            target.engine.empty([Tier.DEVICE])
    target.healthy((Tier.DEVICE,))


def in_storage(target: _Target, store: AlteredStorage) -> None:
    """Damage to stored bytes is caught; a wrong page with a valid checksum is noticed."""
    identity = target.prover.model.identity

    def write(data: bytes, pool: PoolSpec) -> None:
        target.engine.empty()
        target.prover.write(target.engine, store, target.name(pool), data, pool)

    def other(pool: PoolSpec) -> bytes:
        """The same pool's page of another position in the prompt, or another pool's of the same position."""
        names = [
            target.prover.name(target.known, 0, pool),
            *(target.name(each) for each in target.pools if each is not pool),
        ]
        return next((data for data in map(store.read, names) if data is not None), b"")

    for pool in target.pools:
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
                write(data, pool)
                target.caught(row, "bad_storage")
                target.engine.written()
                if store.read(target.name(pool)) != good:
                    row.troubles.append("the page was not recomputed and stored with the same bits")
                    store.write({target.name(pool): good})
                target.healthy(MEMORY_TIERS)
        with target.damage(pool, "a sealed page", "storage", "noticed", "on") as row:
            forged = memoryview(bytearray(good))
            for page in payload(pool, forged).values():
                spoil(page)
            rank = 0 if pool.replicated else target.prover.rank
            Stamp(identity.fingerprint(), pool.name, pool.payload_bytes, rank, target.prover.ranks).seal(
                forged, target.key
            )
            write(bytes(forged), pool)
            target.noticed(row, target.ask())
            write(good, pool)


def damages(prover: Prover) -> None:
    """All damages, on two caches: one that checks its host memory, and one that does not."""
    with prover.path("damage", "pages damaged on purpose, see below"):
        with prover.store() as store, prover.engine(store, keep_states=prover.at_chunks) as engine:
            target = _Target(prover, engine)
            on_the_device(target)
            in_the_host_checked(target)
            in_storage(target, store)
        with prover.store() as store, prover.engine(store, keep_states=prover.at_chunks, verify_host=False) as engine:
            in_the_host_unchecked(_Target(prover, engine))
