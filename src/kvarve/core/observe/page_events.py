"""What enters and leaves each tier, told page by page to a listener outside. Nothing is kept without one."""

from typing import NamedTuple

from kvarve.core.context import Context
from kvarve.core.copies.limits import StorageState
from kvarve.core.slots.slot_pools import SlotPools
from kvarve.core.tree.prefix_tree import PrefixTree
from kvarve.core.tree.tree import Run
from kvarve.pages.boundaries import spans
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier


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


class PageEvents:
    """Collects what is to be told."""

    def __init__(self, context: Context, slot_pools: SlotPools, tree: PrefixTree, storage: StorageState) -> None:
        self._tiers, self._pools = (*context.config.memory, Tier.STORAGE), len(slot_pools.pools)
        self._slot_pools, self._tree, self._storage = slot_pools, tree, storage
        self._told: list[Told] = []

    def take(self) -> list[Told]:
        """What has happened since the last call, in order."""
        told, self._told = self._told, []
        return told

    def entered(self, run: Run, place: int, local: int) -> None:
        number, pool = divmod(place, self._pools)
        for start, stop in spans(local):
            keys, said = run.keys[start * KEY_BYTES : stop * KEY_BYTES], _said(run, start, stop)
            self._told.append(Moved(True, pool, self._tiers[number], keys, _before(run, start), said))

    def left(self, run: Run, place: int, local: int) -> None:
        number, pool = divmod(place, self._pools)
        for start, stop in spans(local):
            self._told.append(Moved(False, pool, self._tiers[number], run.keys[start * KEY_BYTES : stop * KEY_BYTES]))

    def stored(self, run: Run, pool: int, local: int) -> None:
        self.entered(run, self._slot_pools.place(Tier.STORAGE, pool), local)

    def lacks(self, pool: int, key: bytes) -> None:
        self._told.append(Moved(False, pool, Tier.STORAGE, key))

    def tell_all(self) -> None:
        """Begin anew, with all that is there now: of storage, what the tree knows to be there."""
        self._told = [None]
        for run in self._tree.runs():
            for place, here in enumerate(run.here):
                self.entered(run, place, here)
            for pool in range(self._pools) if self._storage.attached or self._storage.down else ():
                self.stored(run, pool, run.stored[pool])


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
