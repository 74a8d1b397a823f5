"""An independent account of dirty pages: each is stored, waits for its store, or is counted when it leaves memory.

The account reads from the tree which pages are in memory, and derives what the policy wants from when they came there.
"""

from collections.abc import Iterable

from kvarve.core.core import Core
from kvarve.core.policies import WritePolicy
from kvarve.core.tree.tree import Run
from kvarve.pages.pools import Tier

Name = tuple[int, int, int]  # a page: a number for its root and tokens, its position, its pool
# Counters of pages that left memory unstored; a page whose only copy, in the host, was bad is lost as well.
WHY = ("failed", "evicted", "unpaying", "down", "full", "read_only")
REASONS = (*(f"dropped_{why}" for why in WHY), "bad_host")


class Dirty:
    """The pages in memory that storage does not have, of one core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._spared: set[Name] = set()  # in memory since before this storage, and not to be backed up
        self._memory: set[Name] = set()
        self._unstored: set[Name] = set()  # at the last check; each has to be counted if it leaves memory
        self._counted = 0
        self._numbers: dict[tuple[int, bytes], int] = {}  # by the number of the page above, and the page's tokens

    def begin_anew(self, back_up: bool) -> None:
        """A storage was attached or detached; `back_up`: pages in memory are to be stored."""
        self._spared = set() if back_up else {*self._memory}
        self._unstored = set()

    def look(self, runs: Iterable[Run], stored: int) -> None:
        """Check after an input in which stores and fetches have shown `stored` pages to be in storage."""
        core, memory, unstored = self._core, set[Name](), set[Name]()
        expects = not core.storage.only_read and (core.storage.attached or core.storage.down)
        for run in runs:
            self._look_at(run, memory, unstored)
        counted = sum(getattr(core.counters, reason) for reason in REASONS)
        gone = len(self._unstored - memory)
        assert counted - self._counted >= gone - stored, (
            f"what leaves memory unstored is counted: {gone} left, {stored} stored, {counted - self._counted} counted"
        )
        self._counted, self._memory = counted, memory
        self._unstored = unstored if expects else set()
        self._spared &= memory

    def _look_at(self, run: Run, memory: set[Name], unstored: set[Name]) -> None:
        core = self._core
        slot_pools = core.slot_pools
        if not run.pages:
            return
        wants = run.wanted or core.governor.wants(run)
        used_enough = (
            core.config.policies.write is not WritePolicy.WRITE_THROUGH_SELECTIVE
            or run.wanted
            or run.uses >= core.config.policies.selective_uses
        )
        through = core.config.policies.write is not WritePolicy.WRITE_BACK or run.wanted
        dirty = core.backups.dirty
        lines = (dirty.to_host, dirty.to_store, dirty.busy, dirty.quarantined)
        waits = any(run in line for line in lines)
        numbers = self._numbers_of(run)
        for pool in range(len(core.pools)):
            host = slot_pools.place(Tier.HOST, pool)
            near = run.here[pool] if Tier.DEVICE in core.config.slots else 0
            far = run.here[host]
            good = near | far & ~run.bad[host]
            on_its_way = run.coming[host] | run.coming[slot_pools.place(Tier.STORAGE, pool)]
            on_its_way |= self._healing(run, host)
            for local in range((near | far).bit_length()):
                if not (near | far) >> local & 1:
                    continue
                name = numbers[local], run.first + local, pool
                memory.add(name)
                if run.stored[pool] >> local & 1 or not good >> local & 1 or not used_enough:
                    continue
                if run.passing[pool] >> local & 1:
                    assert not self._read_at_an_end(run, pool, local), "where a prompt ended is worth a copy"
                    continue
                if name not in self._spared:
                    unstored.add(name)
                    stores = core.storage.attached and not core.storage.only_read
                    can = stores and wants and through and slot_pools.capacity[host]
                    assert not can or waits or on_its_way >> local & 1, "what is dirty waits to be stored"

    def _read_at_an_end(self, run: Run, pool: int, local: int) -> bool:
        lookback = self._core.pools[pool].lookback
        return lookback is None or any(run.ends >> last & 1 for last in range(local, local + lookback))

    def _healing(self, run: Run, place: int) -> int:
        """Positions of bad host pages that a copy still reads: they are copied down again when it has ended."""
        bits, table = run.bad[place], run.slots[place]
        assert not bits or table is not None
        return sum(
            1 << local
            for local in range(bits.bit_length())
            if bits >> local & 1 and table is not None and self._core.copies.reads(place, table[local])
        )

    def _numbers_of(self, run: Run) -> list[int]:
        """A number for each page of a run, equal for equal tokens under the same root."""
        above = 0
        if run.parent is not None:
            above = self._numbers_of(run.parent)[-1] if run.parent.pages else self._number(0, run.parent.named)
        numbers = []
        for local in range(run.pages):
            above = self._number(above, run.tokens[local * run.width : (local + 1) * run.width])
            numbers.append(above)
        return numbers

    def _number(self, above: int, tokens: bytes) -> int:
        return self._numbers.setdefault((above, tokens), len(self._numbers) + 1)
