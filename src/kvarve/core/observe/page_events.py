"""What enters and leaves each tier, told page by page to a listener outside. Nothing is kept without one."""

from typing import TYPE_CHECKING, NamedTuple

from kvarve.core.tree.tree import Run
from kvarve.pages.boundaries import spans
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier

if TYPE_CHECKING:
    from kvarve.core.state import State


class Moved(NamedTuple):
    """Consecutive pages of one pool entered a tier or left it. A page may enter storage again while it is there."""

    entered: bool
    pool: int
    tier: Tier
    keys: bytes  # of the pages, concatenated
    parent: bytes = b""  # the key of the page before them; none before the first page
    tokens: bytes = b""  # of pages that enter: packed, as the prompt said them


Told = Moved | None
"""None: all that has been told before is void, since it cannot be told what storage has, or a listener missed some."""


class Residency:
    """Collects what is to be told."""

    def __init__(self, state: "State") -> None:
        self._state = state
        self._told: list[Told] = []

    def take(self) -> list[Told]:
        """What has happened since the last call, in order."""
        told, self._told = self._told, []
        return told

    def moved(self, run: Run, place: int, local: int, entered: bool) -> None:
        """Pages of a run at these local positions enter or leave a place, or a pool in storage."""
        number, pool = divmod(place, len(self._state.config.pools))
        memory = self._state.config.memory
        tier = memory[number] if number < len(memory) else Tier.STORAGE
        for start, stop in spans(local):
            keys = run.keys[start * KEY_BYTES : stop * KEY_BYTES]
            if entered:
                self._told.append(Moved(True, pool, tier, keys, _before(run, start), _said(run, start, stop)))
            else:
                self._told.append(Moved(False, pool, tier, keys))

    def lacks(self, pool: int, key: bytes) -> None:
        """Storage does not have a page."""
        self._told.append(Moved(False, pool, Tier.STORAGE, key))

    def tell_all(self) -> None:
        """Begin anew, with all that is there now: of storage, what the tree knows to be there."""
        self._told = [None]
        slot_pools, pools = self._state.slot_pools, range(len(self._state.config.pools))
        storage = self._state.copies.storage or self._state.backups.down
        for run in slot_pools.runs():
            for place, here in enumerate(run.here):
                self.moved(run, place, here, True)
            for pool in pools if storage else ():
                self.moved(run, slot_pools.place(Tier.STORAGE, pool), run.stored[pool], True)


def _before(run: Run, local: int) -> bytes:
    if local:
        return run.keys[(local - 1) * KEY_BYTES : local * KEY_BYTES]
    return run.parent.keys[-KEY_BYTES:] if run.first and run.parent is not None else b""


def _said(run: Run, start: int, stop: int) -> bytes:
    """The tokens of a run's pages, with the first of each page as they were before they were bound to their chunk."""
    head, width = run.head_bytes, run.width
    if len(run.heads) < stop * head:  # without bound tokens
        return run.tokens[start * width : stop * width]
    pages = range(start, stop)
    return b"".join([run.heads[at * head :][:head] + run.tokens[at * width + head : (at + 1) * width] for at in pages])
