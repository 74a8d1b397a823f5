"""Does it pay to bring pages to storage? Bytes that went down against bytes that came back to be used, and a decision.

A page costs a write when it goes down and saves computing when a request resumes from it, so what pays is told by the
share of what was stored that is used. Over a horizon of stored bytes that is looked at once; where it is too small,
storing pauses. Two kinds go down all the same: what has been used twice, for it has proven itself, and a sample of the
rest, which tells when storing would pay again. While it pauses only the sample is judged: what has proven itself says
nothing about the others.
"""

from collections.abc import Sequence
from zlib import crc32

from kvarve.core.tree import Run

PROVEN_USES = 2
SAMPLE = 16  # of the runs that have not proven themselves, one in so many is stored in a pause
SAMPLED_PAGES = 1 << 14  # of so many pages of the sample it is remembered that they were


class Governor:
    def __init__(self, pays_at: float, horizon_bytes: int) -> None:
        """Storing pays where at least `pays_at` of the bytes stored are used; 0: it always does."""
        self.pays_at, self.horizon_bytes = pays_at, max(1, horizon_bytes)
        self._sample: dict[bytes, None] = {}  # the pages' keys, oldest first
        self.reset()

    def reset(self, paused: bool = False) -> None:
        """Nothing is known; storing goes on, or pauses."""
        self.paused = paused
        self.stored_bytes = self.used_bytes = 0  # of what is judged, since a while ago
        self._sample.clear()

    @property
    def used_share(self) -> float:
        """Of the bytes that are judged now, the share that was used."""
        return self.used_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def wants(self, run: Run) -> bool:
        """Whether the pages of a run should go to storage. All ranks say the same of it, and whoever asks again."""
        return not self.paused or run.uses >= PROVEN_USES or not crc32(run.tokens[: run.width], run.first) % SAMPLE

    def stored(self, run: Run, key: bytes, size_bytes: int) -> None:
        """A page of a run has gone to storage."""
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
        """A request resumes from pages that have come from storage for it, each of so many bytes."""
        self.used_bytes += size_bytes * (sum(key in self._sample for key in keys) if self.paused else len(keys))

    def _judge(self) -> None:
        paused = self.used_share < self.pays_at
        if paused == self.paused:  # half of what has been seen is forgotten, so that times may change
            self.stored_bytes //= 2
            self.used_bytes //= 2
            return
        self.reset(paused)
