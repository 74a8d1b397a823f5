"""What is known of the storage, and how long stores back off after one has failed: twice as long each time in a row;
then one store is tried alone (half-open)."""

from collections.abc import Sequence

from kvarve.core.context import Context
from kvarve.core.copies.effects import Refusal
from kvarve.core.copies.in_flight import PartOutcome

BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 30.0  # after a first failure, and at most, doubling in between


class StorageState:
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
