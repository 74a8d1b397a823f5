"""What holds copies to and from storage back: a share of the host, a failing storage, and whether storing pays."""

from collections.abc import Sequence
from zlib import crc32

from kvarve.core.context import Context
from kvarve.core.copies.effects import Refusal
from kvarve.core.copies.in_flight import PartOutcome
from kvarve.core.core_config import CoreConfig
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.core.tree.tree import Run
from kvarve.pages.pools import Tier


class HostShare:
    """How much of the host copies to and from storage may hold: fetches a share of each *budget*, stores half as much.
    A budget is the bytes of a host that pools share, else one pool's slots.

    Pages are counted by pool. A share holds at least what two boundaries read of each window and state, and two
    pages of each chain, as far as the host does."""

    def __init__(self, config: CoreConfig, slot_pools: SlotPools) -> None:
        self._page_bytes = [pool.payload_bytes for pool in config.pools]
        self.budgets = [[pool] for pool in range(len(self._page_bytes))]  # the pools of each
        slots = [slot_pools.capacity[slot_pools.place(Tier.HOST, pool)] for (pool,) in self.budgets]
        few = [min(count, 2 * (pool.lookback or 1)) for pool, count in zip(config.pools, slots, strict=True)]
        whole = [count * size for count, size in zip(slots, self._page_bytes, strict=True)]
        if (extents := slot_pools.extents[-1]) is not None:
            self.budgets, whole = [[*range(len(slots))]], [extents.cut.most_bytes(self._page_bytes)]
        self.whole_bytes = sum(whole)  # of the host
        share = config.policies.host_share
        self.most = [  # by budget, bytes that fetches may hold
            max(int(share * nbytes), self._bytes(pools, few)) for pools, nbytes in zip(self.budgets, whole, strict=True)
        ]
        self._budget_of = [number for number, pools in enumerate(self.budgets) for _ in pools]

    def _bytes(self, pools: Sequence[int], pages: Sequence[int]) -> int:
        return sum(pages[pool] * self._page_bytes[pool] for pool in pools)

    def fits(self, need: Sequence[int], *held: Sequence[int]) -> bool:
        """Whether fetches may hold the pages that they need beside those that are held. A budget of which they need
        nothing may be spent."""
        return all(
            not any(need[pool] for pool in pools) or sum(self._bytes(pools, each) for each in (need, *held)) <= most
            for pools, most in zip(self.budgets, self.most, strict=True)
        )

    def left(self, pool: int, *held: Sequence[int]) -> int:
        """How many pages of a pool stores may hold beside those that are held; one of each pool fits."""
        pools, most = self.budgets[self._budget_of[pool]], self.most[self._budget_of[pool]]
        half = max(most // 2, sum(self._page_bytes[each] for each in pools))
        return max(0, half - sum(self._bytes(pools, each) for each in held)) // self._page_bytes[pool]


BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 30.0  # after a first failure, and at most, doubling in between


class StorageState:
    """What is known of the storage, and how long stores back off after one has failed: twice as long each time in a
    row; then one store is tried alone (half-open)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.attached = False  # one is attached and up
        self.down = False  # one is attached, but does not answer
        self.only_read = False  # nothing is to be stored in it
        self.refused = Refusal.NONE  # why it did not take pages of the store that ended last
        self.failures, self.back_off_until = 0, 0.0  # stores that failed in a row

    @property
    def stores(self) -> bool:
        return self.attached and not self.only_read

    def loses(self) -> bool:
        """Whether a page that leaves memory unstored is lost: there is a storage for it."""
        return not self.only_read and (self.attached or self.down)

    def attach(self) -> None:
        self.attached, self.down = True, False

    def detach(self, down: bool) -> None:
        """There is none now, or it is `down`."""
        self.attached, self.down, self.refused = False, down, Refusal.NONE
        self.failures, self.back_off_until = 0, self._context.now

    def retry(self) -> None:
        """End the back-off of stores."""
        self.back_off_until = self._context.now

    def answered(self, outcomes: Sequence[PartOutcome], refused: Refusal) -> bool:
        """Start or end the back-off of stores by how one of them ended. True if its failure does not count against the
        runs' retry budgets, since storage was failing before."""
        self.refused, now = refused, self._context.now
        any_good = any(good for _, good, _ in outcomes)
        if not any(outcome.failed for outcome in outcomes):
            if any_good:
                self.failures, self.back_off_until = 0, now
            return False
        known = self.failures > 0 and not any_good
        if now >= self.back_off_until:  # else it was sent before this back-off began
            self.failures += 1
            self.back_off_until = now + min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** min(self.failures - 1, 10))
        return known


PROVEN_USES = 2
SAMPLE = 16  # in a pause, one of this many unproven runs is stored
SAMPLED_PAGES = 1 << 14  # pages of the sample whose keys are remembered


class Governor:
    """Does it pay to store pages? Bytes stored against bytes that came back and were used, and a decision.

    A page costs a write when it is stored and saves computing when a request resumes from it, so storing pays if a
    large enough share of the stored bytes is used. That share is checked once per horizon of stored bytes; if it is too
    small, storing pauses. In a pause, runs that have been used twice are still stored, and a sample of the others,
    which shows when storing would pay again. Only the sample is judged then: proven runs say nothing about the others.
    """

    def __init__(self, pays_at: float, horizon_bytes: int) -> None:
        """Storing pays if at least `pays_at` of the bytes stored are used; 0: it always does."""
        self.pays_at, self.horizon_bytes = pays_at, max(1, horizon_bytes)
        self._sample: dict[bytes, None] = {}  # the pages' keys, oldest first
        self.reset()

    def reset(self, paused: bool = False) -> None:
        """Forget all counts; storing goes on, or is `paused`."""
        self.paused = paused
        self.stored_bytes = self.used_bytes = 0  # of the pages judged, over about a horizon
        self._sample.clear()

    @property
    def used_share(self) -> float:
        """Of the stored bytes that are judged now, the share that was used."""
        return self.used_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def wants(self, run: Run) -> bool:
        """Whether the pages of a run should be stored; the answer is the same on all ranks, and when asked again."""
        return not self.paused or run.uses >= PROVEN_USES or not crc32(run.tokens[: run.width], run.first) % SAMPLE

    def stored(self, run: Run, key: bytes, size_bytes: int) -> None:
        """A page of a run has been stored."""
        if self.paused:
            if run.uses >= PROVEN_USES:
                return
            self._sample[key] = None
            if len(self._sample) > SAMPLED_PAGES:
                del self._sample[next(iter(self._sample))]
        self.stored_bytes += size_bytes
        if self.stored_bytes >= (self.horizon_bytes // SAMPLE if self.paused else self.horizon_bytes):
            self._judge()

    def used(self, keys: Sequence[bytes], size_bytes: int) -> None:
        """A request resumes from pages that were fetched for it, each of `size_bytes`."""
        self.used_bytes += size_bytes * (sum(key in self._sample for key in keys) if self.paused else len(keys))

    def _judge(self) -> None:
        paused = self.used_share < self.pays_at
        if paused == self.paused:  # older counts weigh less, so that the decision can change
            self.stored_bytes //= 2
            self.used_bytes //= 2
            return
        self.reset(paused)
