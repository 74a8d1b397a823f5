"""Backends that a test plugs in for its duration. No test stands here."""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from kvarve.storage import Backend, Storage, StorageUrl, urls
from kvarve.system.regions import HostRegion


def plug_in(
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    opens: Callable[[bytes, str], Storage],
    *,
    takes: frozenset[str] = frozenset({"capacity"}),
    allocates: Callable[[int], HostRegion | None] = lambda _: None,
) -> None:
    """`opens(label, description)` opens the storages of a scheme, whose URLs may have the parameters `takes`."""

    class Plugged(Backend):
        example = f"{scheme}://x"
        parameters = takes

        @classmethod
        def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
            return lambda: opens(label, description)

        @classmethod
        def allocate(cls, url: StorageUrl, size_bytes: int) -> HostRegion | None:
            return allocates(size_bytes)

    module = ModuleType(f"plugged_{scheme}")
    module.Plugged = Plugged  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = urls._entry_points() | {scheme: EntryPoint(scheme, f"{module.__name__}:Plugged", urls.GROUP)}
    monkeypatch.setattr(urls, "_entry_points", lambda: known)
