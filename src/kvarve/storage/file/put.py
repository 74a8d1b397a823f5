"""One put to a file store: what it has been given, and how far it has come."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvarve.storage.file.slabs import RowAddress, Slab


@dataclass(eq=False)
class Put:
    """One put, in one or two rounds. Objects have their numbers in the call. It may not evict what it answers for."""

    names: Sequence[str] = ()
    data: Sequence[Sequence[memoryview]] = ()
    answers: dict[int, bool] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)  # entries of what was there already, and of what it stored
    stored: set[RowAddress] = field(default_factory=set)
    touched: set[Slab] = field(default_factory=set)  # of all objects that it answers for
    of_group: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # slot bytes reserved
    freed_bytes: int = 0  # of the disk, by slabs that it removed
    low: bool = False  # the disk is as full as it may be, so only rows whose blocks are allocated are usable
    full: bool = False  # the disk had no blocks for a free row, so only rows that were filled before are usable

    # Of the round:
    places: dict[int, RowAddress] = field(default_factory=dict)  # rows to be filled
    failed: dict[int, OSError] = field(default_factory=dict)
    moving: list[Future[OSError | None]] = field(default_factory=list)  # writes in flight
    slabs: set[Slab] = field(default_factory=set)  # with objects that it answers for and that may not be synced yet
    lost: dict[Slab, OSError] = field(default_factory=dict)  # slabs of which a sync failed
    busy: set[Slab] = field(default_factory=set)  # slabs of which other processes are filling the last free rows
    contended: bool = False  # other processes had all rows, or removed a slab

    def __post_init__(self) -> None:
        self.sizes = [sum([view.nbytes for view in pieces]) for pieces in self.data]

    def begin_round(self) -> None:
        for of_round in (self.places, self.failed, self.moving, self.slabs, self.busy, self.of_group):
            of_round.clear()
        self.contended = False
