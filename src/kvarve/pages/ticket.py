"""A ticket: what a prefill server hands to a decode server beside the prompt, so that it resumes from a shared storage.

Plain data that fits into JSON. The prompt is not in it: keys are chained, so the key of the last page before the
boundary names all pages before it, and tells a prompt that is not the ticket's.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from kvarve.errors import ConfigError
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import ModelIdentity

FORMAT = "kvarve-ticket/1"
MOST_TEXT = 512  # characters of a field
MOST = 1 << 53  # a number that every reader of JSON knows exactly is smaller


class HandOverError(ConfigError):
    """A ticket that is not of this prompt, model or server, or a hand-over that cannot be."""


@dataclass(frozen=True)
class Ticket:
    """The pages of a prompt before a boundary, which the storage has or is about to have.

    `HandOverError` for values that cannot be, also from `of_json`.
    """

    root: str
    """hex: the key of the model and the salt"""
    key: str
    """hex: the key of the last page before the boundary; empty if that is 0"""
    boundary: int
    """pages before which the prompt need not be computed"""
    until_s: float
    """Unix time up to which pages may still be on their way to storage"""
    model: str
    """hex: the fingerprint of the model's identity, its ranks included"""
    layout: str
    """how buffers lie in a page"""
    ranks: int = 1
    """how many ranks the model is divided among"""
    first_head: int = 0
    """the first of the attention heads whose pages these are; with `heads` 0: not divided by heads"""
    heads: int = 0
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise HandOverError(f"a ticket must be of format {FORMAT!r}, got {self.format!r}")
        if min(self.boundary, self.first_head, self.heads, self.ranks - 1) < 0 or not isfinite(self.until_s):
            raise HandOverError("a ticket's numbers must be finite and not negative, and its ranks at least 1")
        keys = (self.root, self.model, *((self.key,) if self.boundary else ()))
        if not all(_is_key(each) for each in keys) or bool(self.key) != bool(self.boundary):
            raise HandOverError(f"a ticket's root, key and model must be {2 * KEY_BYTES} hexadecimal digits each")

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, value: Any) -> "Ticket":
        """A ticket that came from another server. HandOverError unless every field is there, and of its type."""
        kinds: dict[str, Any] = {each.name: each.type for each in fields(cls)}
        if not isinstance(value, Mapping) or value.keys() != kinds.keys():
            raise HandOverError(f"a ticket must be an object with exactly these fields: {', '.join(kinds)}")
        for name, kind in kinds.items():
            found = value[name]
            if type(found) is not kind and not (kind is float and type(found) is int):
                raise HandOverError(f"a ticket's {name} must be of type {kind.__name__}, not {type(found).__name__}")
            if len(found) > MOST_TEXT if kind is str else not abs(found) < MOST:
                raise HandOverError(f"a ticket's {name} must be {'shorter' if kind is str else 'a smaller number'}")
        return cls(**value)

    def check(self, identity: ModelIdentity, root: bytes) -> None:
        """HandOverError unless these are pages of this model, layout, sharding and salt."""
        if (self.ranks, self.first_head, self.heads) != (identity.ranks, 0, 0):
            theirs = f"{self.ranks} ranks" + f", {self.heads} heads from {self.first_head} on" * bool(self.heads)
            raise HandOverError(
                f"the ticket is of another sharding ({theirs}; this server: {identity.ranks} ranks): both servers must "
                f"divide the model alike"
            )
        if self.layout != identity.layout:
            raise HandOverError(
                f"the ticket's pages have the layout {self.layout!r}, this server's {identity.layout!r}: both "
                f"servers must be of one version"
            )
        if self.model != identity.fingerprint().hex():
            raise HandOverError(
                f"the ticket is of another model (or page size, adapter, precision or machine) than {identity}: both "
                f"servers must have one identity"
            )
        if self.root != root.hex():
            raise HandOverError("the ticket is of another salt: the request must have the salt that the prefill had")


def _is_key(text: str) -> bool:
    return len(text) == 2 * KEY_BYTES and not {*text} - {*"0123456789abcdef"}
