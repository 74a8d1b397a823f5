"""Upkeep of a storage from outside of its servers, which may have it open: what it holds, is damaged, may go."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Model:
    """One model's part of a storage. `open_s_ago`: since a process that uses it last had it open, by the wall clock."""

    label: bytes
    description: str
    folder: Path
    file_bytes: int
    in_use: bool
    open_s_ago: float


@dataclass(frozen=True)
class Contents:
    """The models of a storage, its size, and the problems of models that cannot be identified, and of the whole."""

    models: list[Model]
    bytes: int
    damaged: list[str]


@dataclass(frozen=True)
class Stored:
    """One object. `slot_bytes`: its size where it lies; ages are by the storage's own clock."""

    name: str
    group: str
    slot_bytes: int
    size_bytes: int
    stored_s_ago: float
    used_s_ago: float
    uses: int


class Inspection(Protocol):
    """One model's objects. `lost`: what cannot be read, and why; `lost_objects`: of about so many."""

    lost: list[str]
    lost_objects: int

    def objects(self) -> list[Stored]:
        """All objects, the most recently used first."""
        ...

    def states(self) -> dict[str, int]:
        """How many slots are in which state, where there are slots."""
        ...

    def verify(
        self, intact: Callable[[str, memoryview], bool], tick: Callable[[int, int], None] = lambda read, of: None
    ) -> tuple[int, list[str]]:
        """Read every object. Returns how many could be read, and the names of those that could not, or that `intact`
        (of name and bytes) rejects. `tick(read, of)` reports progress."""
        ...


class Upkeep(Protocol):
    """What `kvarve storage` does with the storage of a URL."""

    where: str
    capacity_bytes: int | None
    advice: str | None  # for people who collect what is old: how the storage does so itself

    def contents(self) -> Contents: ...

    def inspect(self, model: Model) -> AbstractContextManager[Inspection]: ...

    def collect(self, model: Model) -> dict[str, int]:
        """Free what its URL says is too old or too much (`expired`), and leftovers (`damaged_bytes`)."""
        ...

    def drop(self, model: Model, group: str) -> int: ...

    def drop_model(self, model: Model, why: str) -> bool:
        """False, and nothing is removed, while a process has it open."""
        ...
