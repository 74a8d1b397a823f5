"""What rank 0 has the engines of all ranks do, in one order: plain data, as JSON between processes.

Strict: a rank reads these from a socket.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from secrets import randbits
from typing import Any

import numpy as np

from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.pages.ticket import Ticket
from kvarve.reference.engine.requests import Request, Sampling

# Fields of `Request` that are JSON as they are; its listeners stay where they are.
PLAIN = ("number", "salt", "priority", "read_cache", "hand_over_s", "submitted_unix_s", "sample_of")


@dataclass(frozen=True)
class Submitted:
    """A request."""

    prompt: str  # token ids as 32-bit numbers, base64
    sampling: dict[str, Any]
    ticket: dict[str, Any] | None
    plain: dict[str, Any]

    @classmethod
    def of(cls, request: Request) -> "Submitted":
        return cls(
            base64.b64encode(np.asarray(request.prompt, dtype="<u4").tobytes()).decode(),
            asdict(request.sampling),
            None if request.ticket is None else request.ticket.json(),
            {name: getattr(request, name) for name in PLAIN},
        )

    def request(self) -> Request:
        """The request on another rank, where no one listens."""
        return Request(
            np.frombuffer(base64.b64decode(self.prompt), dtype="<u4").astype(np.int64).tolist(),
            Sampling(**{name: _tuple(value) for name, value in self.sampling.items()}),
            ticket=None if self.ticket is None else Ticket.of_json(self.ticket),
            deliver=lambda _: None,
            **self.plain,
        )


@dataclass(frozen=True)
class Aborted:
    """A request, by its number."""

    number: int


@dataclass(frozen=True)
class Evict:
    """Every unpinned page of these memory tiers goes."""

    tiers: tuple[int, ...] = MEMORY_TIERS

    def of(self) -> tuple[Tier, ...]:
        return tuple(map(Tier, self.tiers))


@dataclass(frozen=True)
class Attach:
    """Each rank opens its storage and proposes it (see `Admin.attach`)."""

    urls: tuple[str, ...]
    wait: str | None
    write: str | None
    back_up: bool


@dataclass(frozen=True)
class Detach:
    """Each rank proposes to detach its storage."""


@dataclass(frozen=True)
class Cleared:
    """The storage has been emptied."""


@dataclass(frozen=True)
class Stop:
    """This turn is the last one; the backups may take `left_s`."""

    left_s: float


Input = Submitted | Aborted | Evict | Attach | Detach | Cleared | Stop
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Submitted, Aborted, Evict, Attach, Detach, Cleared, Stop)
}


def encode(inputs: Sequence[Input]) -> bytes:
    return json.dumps([[type(each).__name__, asdict(each)] for each in inputs]).encode() if inputs else b""


def decode(said: bytes) -> list[Input]:
    """ValueError, KeyError or TypeError unless `encode` has made it."""
    if not said:
        return []
    return [
        _KINDS[kind](**{name: _tuple(value) for name, value in fields.items()}) for kind, fields in json.loads(said)
    ]


def seeded(request: Request) -> Request:
    """A request whose tokens are drawn alike on all ranks."""
    if request.sampling.temperature > 0 and request.sampling.seed is None:
        request.sampling = replace(request.sampling, seed=randbits(63))
    return request


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
