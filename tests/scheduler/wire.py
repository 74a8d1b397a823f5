"""Messages between the process of a scheduler and that of its worker and engine: pickled plain data, checked.

Each message is its length and its pickle. The reader makes no object of a class that is not in `PLAIN`.
"""

import io
import pickle
import struct
from dataclasses import is_dataclass
from typing import Any, BinaryIO, NamedTuple

from kvarve.cache import messages
from kvarve.cache.config import CacheConfig
from kvarve.cache.scheduler import Prompt
from kvarve.core.copies import effects
from kvarve.core.core import Hit
from kvarve.core.core_config import Counters
from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.headroom import Demand
from kvarve.core.observe.reasons import Reason
from kvarve.core.policies import Policies, Snapshots, WritePolicy
from kvarve.core.slots.extents import Cut
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec, Tier

LENGTH = struct.Struct("<Q")


class Number(NamedTuple):
    """A lease, as the other process knows it."""

    lease: int


class Standing(NamedTuple):
    """The fields of a lease that an engine reads."""

    number: int
    root: bytes
    tokens: bytes
    reads: bool
    counted: bool
    phase: Phase
    claimed: bool
    asked_again: bool
    promised: int
    holds: bool
    boundary: int
    done: int
    grown: int
    pages: int
    snapshots: int
    seen: tuple[int, ...]
    tiers: tuple[int, int, int]

    @classmethod
    def of(cls, lease: Lease) -> "Standing":
        read = [getattr(lease, name) for name in cls._fields[:-2]]
        return cls(*read, tuple(lease.seen), lease.from_tiers())


class Call(NamedTuple):
    """A call of the engine to its scheduler."""

    name: str
    words: tuple[Any, ...]


class Answer(NamedTuple):
    """Its value, and how those leases stand that have changed since the last answer."""

    value: Any
    leases: tuple[Standing, ...]
    trouble: str = ""


def of_module(module: Any) -> set[type]:
    """The messages that a module defines."""
    own = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__)
    return {each for each in own if is_dataclass(each) or hasattr(each, "_fields")}


MESSAGES = of_module(effects) | of_module(messages)
SETTINGS = {CacheConfig, Cut, Policies, Snapshots, WritePolicy, ModelIdentity, PoolSpec, BufferSpec, Tier}
VALUES = {Reason, effects.Refusal, Prompt, Demand, Hit, Counters, Phase, range, frozenset}
PLAIN = MESSAGES | SETTINGS | VALUES | {Number, Standing, Call, Answer}
_BY_NAME = {(each.__module__, each.__qualname__): each for each in PLAIN}


class PlainReader(pickle.Unpickler):
    """Makes plain data only, and notes of which classes."""

    def __init__(self, raw: bytes, seen: set[type]) -> None:
        super().__init__(io.BytesIO(raw))
        self._seen = seen

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _BY_NAME:
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
        self._seen.add(_BY_NAME[module, name])
        return _BY_NAME[module, name]


class Wire:
    """One end of two pipes."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self.received: set[type] = set()

    def send(self, message: Any) -> None:
        raw = pickle.dumps(message)
        self._target.write(LENGTH.pack(len(raw)) + raw)
        self._target.flush()

    def receive(self) -> Any:
        """The next message; EOFError if the other end is closed."""
        head = self._source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise EOFError("the other process has ended")
        return PlainReader(self._source.read(LENGTH.unpack(head)[0]), self.received).load()
