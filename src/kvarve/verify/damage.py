"""Pages broken on purpose, one pool after the other: a check that cannot fail is no check.

Where a check is on, damage has to be caught by it, counted, and computed anew; where there is none, or it is off, or
the damage carries a right seal, the comparison of logits has to notice.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvarve.keys import object_name
from kvarve.memory.record import HEADER_BYTES, Stamp
from kvarve.model import MEMORY_TIERS, PoolSpec, Tier
from kvarve.runtime import PrefixCache
from kvarve.verify.prover import Prover
from kvarve.verify.report import Damage
from kvarve.verify.requests import ProofRequest, differences
from kvarve.verify.veil import Veil

SALT = "damage"
Before = Callable[[ProofRequest], None]
ADVICE = (
    "try prompts of another length with --tokens (longer than what a sparse indexer picks, or shorter than what a "
    "model forgets), or another --seed"
)


def spoil(page: Tensor) -> None:
    """Other numbers that the model can compute with, in place: signs flipped, whole numbers one off, no zero left."""
    if page.dtype is torch.bool:
        page.logical_not_()
    elif page.dtype.is_floating_point:
        wide = page.float()
        page.copy_(torch.where(wide == 0, torch.ones_like(wide), -wide))
    else:
        page.copy_(torch.where(page > 0, page - 1, page + 1))


def kinds(pool: PoolSpec) -> list[str]:
    """What a page of the pool holds, without the layers' numbers: keys, values, recurrent.0 and so on."""
    return [*dict.fromkeys(buffer.name.split(".", 2)[2] for buffer in pool.buffers)]


def payload(pool: PoolSpec, record: memoryview) -> dict[str, Tensor]:
    """The buffers of a page as tensors over its record's own bytes."""
    found = {}
    for buffer, offset in zip(pool.buffers, pool.offsets(), strict=False):
        dtype, count = getattr(torch, buffer.dtype), torch.Size(buffer.shape).numel()
        found[buffer.name] = torch.frombuffer(record, dtype=dtype, count=count, offset=HEADER_BYTES + offset)
    return found


class _Patient:
    """One prompt in a cache, all of it known, of whose pages each pool's last before the boundary is to be damaged."""

    def __init__(self, prover: Prover, cache: PrefixCache) -> None:
        self.prover, self.cache, self.plan = prover, cache, prover.plan
        self.whole = self.plan.whole
        # One token behind the pages sees a state that is soon forgotten; many see what only some tokens pick, and what
        # is read only when several tokens become one entry.
        behind = (1, max(1, self.plan.chunk // 2))
        self.prompt, self.longer = (self.plan.prompt(self.whole + tokens) for tokens in behind)
        self.lease = prover.check(prover.run(cache, self.prompt, SALT)).lease
        prover.settle(cache)
        self.key = self.lease.key(self.whole // self.plan.page - 1)
        self.rng = random.Random(self.plan.seed)

    def name(self, pool: PoolSpec) -> str:
        return object_name(self.lease.root, self.key, pool.name)

    def ask(self, before: Before | None = None, longer: bool = False) -> ProofRequest:
        return self.prover.run(self.cache, self.longer if longer else self.prompt, SALT, before=before)

    def healthy(self, empty: tuple[Tier, ...] = ()) -> ProofRequest:
        """Asked again it resumes in full and says what it has to."""
        if empty:
            self.prover.empty(self.cache, empty)
        return self.prover.check(self.ask(), self.whole, Tier(len(empty)), "asked again")

    def flip(self, record: bytearray | memoryview, pool: PoolSpec) -> None:
        """One bit somewhere in what the page holds."""
        at = HEADER_BYTES + self.rng.randrange(pool.payload_bytes)
        record[at] ^= 1 << self.rng.randrange(8)

    @contextmanager
    def damage(self, pool: PoolSpec, what: str, where: str, expected: str, check: str) -> Iterator[Damage]:
        row = Damage(pool.name, what, where, expected, check)
        self.prover.report.damages.append(row)
        try:
            yield row
        except Exception as e:  # noqa: BLE001  whatever a broken cache does is what we look for
            row.troubles.append(f"{type(e).__name__}: {e}")

    def noticed(self, row: Damage, request: ProofRequest, alone: bool = False) -> None:
        """The comparison has to say that something is wrong, while the damage is still there; one kind of numbers
        `alone` may be idle."""
        if not self._wrong(row, request) and not row.troubles and not self._wrong(row, self.ask(longer=True)):
            row.idle = alone
            if not alone:
                row.troubles.append(f"no answer depends on it, so the proof says nothing about it: {ADVICE}")
        self.prover.tick(self.prover.row)

    def _wrong(self, row: Damage, request: ProofRequest) -> bool:
        self.prover.row.requests += 1
        if sum(request.from_tiers()) != self.whole:
            row.troubles.append(f"it was not used: resumed after {sum(request.from_tiers())} of {self.whole} tokens")
        return bool(differences(request.transcript, self.prover.uncached(request.prompt)))

    def caught(self, row: Damage, counter: str, before: float, request: ProofRequest) -> None:
        """The check has to have counted it, and the answer is right all the same."""
        self.prover.check(request)
        if self.cache.stats()[counter] <= before:
            row.troubles.append("the check did not catch it")
        elif differences(request.transcript, self.prover.uncached(self.prompt)):
            row.troubles.append("it was caught, and the logits are wrong all the same")
        elif sum(request.from_tiers()) >= self.whole:
            row.troubles.append("it was caught, and used all the same")


def on_the_device(patient: _Patient) -> None:
    """No check stands between the device and the model: a page has to matter, and each kind of numbers in it should."""
    for pool in patient.cache.pools:
        several = kinds(pool) if len(kinds(pool)) > 1 else []
        for kind in ("a page", *several):
            with patient.damage(pool, kind, "device", "noticed", "none") as row, _undone() as undo:
                request = patient.ask(_spoils(patient.cache, pool, kind, undo))
                patient.noticed(row, request, alone=kind in several)
    patient.healthy()


def _spoils(cache: PrefixCache, pool: PoolSpec, kind: str, undo: list[tuple[Tensor, Tensor]]) -> Before:
    """What spoils a page of a request before it is read, all of it or one kind of numbers in it."""

    def spoil_it(request: ProofRequest) -> None:
        slot = cache.pages(request.lease)[pool.name][1][-1]
        for name, slots in cache.arena(pool.name).items():
            if kind in ("a page", name.split(".", 2)[2]):
                undo.append((slots[slot], slots[slot].clone()))
                spoil(slots[slot])

    return spoil_it


@contextmanager
def _undone() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Puts back what is on the list."""
    undo: list[tuple[Tensor, Tensor]] = []
    try:
        yield undo
    finally:
        for page, good in undo:
            page.copy_(good)


def in_the_host_checked(patient: _Patient) -> None:
    for pool in patient.cache.pools:
        with patient.damage(pool, "a bit", "host", "caught", "on") as row:
            patient.prover.empty(patient.cache, [Tier.DEVICE])
            records = patient.cache.records(pool.name, patient.key)
            for record in records:
                patient.flip(record, pool)
            before = patient.cache.stats()["bad_host"]
            patient.caught(row, "bad_host", before, patient.ask())
            patient.prover.settle(patient.cache)
            before = patient.cache.stats()["bad_host"]
            patient.healthy((Tier.DEVICE,))
            if patient.cache.stats()["bad_host"] > before:
                row.troubles.append("it was not computed anew")


def in_the_host_unchecked(patient: _Patient) -> None:
    for pool in patient.cache.pools:
        with patient.damage(pool, "a page", "host", "noticed", "off") as row:
            patient.prover.empty(patient.cache, [Tier.DEVICE])
            good = [(record, bytes(record)) for record in patient.cache.records(pool.name, patient.key)]
            try:
                for record, _ in good:
                    for page in payload(pool, record).values():
                        spoil(page)
                patient.noticed(row, patient.ask())
            finally:
                for record, bytes_ in good:
                    record[:] = bytes_
            patient.prover.empty(patient.cache, [Tier.DEVICE])
    patient.healthy((Tier.DEVICE,))


def in_storage(patient: _Patient, store: Veil) -> None:
    """Whatever a medium can do to bytes is caught; what carries a right seal is noticed."""
    identity = patient.prover.model.identity
    pools = patient.cache.pools

    def other(pool: PoolSpec) -> bytes:
        """The same pool's page of another place in the prompt, or another pool's of the same place."""
        names = [
            object_name(patient.lease.root, patient.lease.key(0), pool.name),
            *(patient.name(each) for each in pools if each is not pool),
        ]
        return next((data for data in map(store.read, names) if data is not None), b"")

    for pool in pools:
        good = store.read(patient.name(pool))
        if good is None:
            with patient.damage(pool, "a page", "storage", "caught", "on") as row:
                row.troubles.append("it is not in storage")
            continue
        bit, header = bytearray(good), bytearray(good)
        patient.flip(bit, pool)
        header[patient.rng.randrange(HEADER_BYTES)] ^= 1
        damages = {"a bit": bytes(bit), "the header": bytes(header), "its end": good[:-1], "all of it": other(pool)}
        for what, data in damages.items():
            with patient.damage(pool, what, "storage", "caught", "on") as row:
                patient.prover.empty(patient.cache)
                store.write(patient.name(pool), data)
                before = patient.cache.stats()["bad_storage"]
                patient.caught(row, "bad_storage", before, patient.ask())
                patient.prover.settle(patient.cache)
                if store.read(patient.name(pool)) != good:
                    row.troubles.append("it was not computed anew and stored, bit for bit as it had been")
                    store.write(patient.name(pool), good)
                patient.healthy(MEMORY_TIERS)
        with patient.damage(pool, "a sealed page", "storage", "noticed", "on") as row:
            patient.prover.empty(patient.cache)
            forged = memoryview(bytearray(good))
            for page in payload(pool, forged).values():
                spoil(page)
            Stamp(identity.fingerprint(), pool.name, pool.payload_bytes).seal(forged, patient.key)
            store.write(patient.name(pool), bytes(forged))
            patient.noticed(row, patient.ask())
            patient.prover.empty(patient.cache)
            store.write(patient.name(pool), good)


def damages(prover: Prover) -> None:
    """All of them, on two caches: one that checks its host memory, and one that does not."""
    with prover.path("damage", "pages broken on purpose, see below"):
        with prover.store() as store, prover.cache(store, snapshot_every=prover.plan.chunk) as cache:
            patient = _Patient(prover, cache)
            on_the_device(patient)
            in_the_host_checked(patient)
            in_storage(patient, store)
        with prover.store() as store, prover.cache(store, snapshot_every=prover.plan.chunk, verify_host=False) as cache:
            in_the_host_unchecked(_Patient(prover, cache))
