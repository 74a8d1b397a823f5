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


@dataclass(frozen=True)
class Submitted:
    """A request: what `Request` says of it, but for its listeners."""

    number: int
    prompt: str  # token ids as 32-bit numbers, base64
    sampling: dict[str, Any]
    salt: str
    priority: int
    read_cache: bool
    hand_over_s: float | None
    ticket: dict[str, Any] | None
    submitted_unix_s: float
    sample_of: int | None

    @classmethod
    def of(cls, request: Request) -> "Submitted":
        return cls(
            request.number,
            base64.b64encode(np.asarray(request.prompt, dtype="<u4").tobytes()).decode(),
            asdict(request.sampling),
            request.salt,
            request.priority,
            request.read_cache,
            request.hand_over_s,
            None if request.ticket is None else request.ticket.json(),
            request.submitted_unix_s,
            request.sample_of,
        )

    def request(self) -> Request:
        """The request on another rank, where no one listens."""
        lists = ("logit_bias", "stop", "stop_token_ids")
        sampling = {name: _tuple(value) if name in lists else value for name, value in self.sampling.items()}
        return Request(
            np.frombuffer(base64.b64decode(self.prompt), dtype="<u4").astype(np.int64).tolist(),
            Sampling(**sampling),
            self.salt,
            self.priority,
            self.read_cache,
            deliver=lambda _: None,
            hand_over_s=self.hand_over_s,
            ticket=None if self.ticket is None else Ticket.of_json(self.ticket),
            number=self.number,
            submitted_unix_s=self.submitted_unix_s,
            sample_of=self.sample_of,
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
    prefetch: str | None
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
