"""What crosses between a scheduler and its worker: plain data that can be pickled, and nothing else.

To the worker: orders. They are carried out in the order in which they were given, since a change of the storage decides
to which storage the copies after it go. To the scheduler: reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvarve.cache.config import CacheConfig
from kvarve.core.copies.effects import Effect, Event


@dataclass(frozen=True)
class ChangeProposed:
    """The worker can attach the storage of its change of this number (or detach, if not `attach`), and holds it open.

    `config`: the settings once the change is made. `back_up`: all pages in memory are dirty then, whatever the write
    policy. Not `ready`: the worker cannot make the change that all ranks were asked for. `only_read`: nothing is to be
    stored in it.
    """

    change: int
    config: CacheConfig
    attach: bool = True
    back_up: bool = False
    ready: bool = True
    only_read: bool = False


@dataclass(frozen=True)
class ChangeMade:
    """The worker makes its change now: copies that follow go to its storage."""

    change: int


@dataclass(frozen=True)
class ChangeRefused:
    """The worker gives its change up, and closes its storage. `busy`: the same change may be made later."""

    change: int
    why: str
    busy: bool


class Report(NamedTuple):
    """What a worker tells its scheduler before a step: the copies that began or ended since its last report, whether
    its storage answers (true without one), and the change of the storage that it was asked for since."""

    events: Sequence[Event] = ()
    up: bool = True
    proposed: ChangeProposed | None = None


Order = Effect | ChangeMade | ChangeRefused
