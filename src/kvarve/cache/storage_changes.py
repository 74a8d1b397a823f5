"""When is a change of the storage made? In a step in which all ranks propose the same, or never.

Pure: the time is given, and storages are opened and closed by the workers.
"""

import json

from kvarve.cache.messages import ChangeMade, ChangeProposed, ChangeRefused
from kvarve.ranks.agreement import Proposal

CHANGE_S = 30.0  # how long a rank waits for the others to propose the same change of the storage


class Changes:
    """The change that this rank's worker has proposed, until it is decided."""

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
        what = [change.config.storages, policies.prefetch_policy, policies.write_policy, change.back_up]
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
