"""Does it pay to store pages? Bytes stored against bytes that came back and were used, and a decision.

A page costs a write when it is stored and saves computing when a request resumes from it, so storing pays if a large
enough share of the stored bytes is used. That share is checked once per horizon of stored bytes; if it is too small,
storing pauses. In a pause, runs that have been used twice are still stored, and a sample of the others, which shows
when storing would pay again. Only the sample is judged then: proven runs say nothing about the others.
"""

from collections.abc import Sequence
from zlib import crc32

from kvarve.core.tree.tree import Run

PROVEN_USES = 2
SAMPLE = 16  # in a pause, one of this many unproven runs is stored
SAMPLED_PAGES = 1 << 14  # pages of the sample whose keys are remembered


class Governor:
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
