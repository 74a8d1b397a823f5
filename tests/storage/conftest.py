"""Lets the tests of this folder import what stands beside them, and opens file stores and tiers for them."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from file_disks import MIB, Open, WithoutSync
from file_pages import Quick
from object_servers import rclone  # noqa: F401  a fixture
from tier_rows import LONG_S, MakeRow, Row

import kvarve.cli.storage_commands  # noqa: F401  whichever test first runs a command would pay for it
from kvarve.storage import FileStorage
from kvarve.testing import suite
from kvarve.testing.suite import LABEL


@pytest.fixture(autouse=True, scope="session")
def files_for_their_owner_alone() -> Iterator[None]:
    """Files that tests write have their owner's mode: the store refuses files that others may write to."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture(autouse=True, scope="session")
def fewer_draws(request: pytest.FixtureRequest) -> Iterator[None]:
    """The short form draws few of the histories of `StorageSuite`."""
    few = {"max_examples": 4, "stateful_step_count": 12} if request.config.option.markexpr == "not long" else {}
    with mock.patch.object(suite, "settings", lambda **how: settings(**how | few)):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    """Opens the folder; stores that are still open are closed in the end."""
    everything = []

    def make(
        capacity_bytes: int = MIB,
        label: bytes = LABEL,
        description: str = "model A",
        *,
        place: str = "store",
        **more: Any,
    ) -> FileStorage:
        more.setdefault("disk", WithoutSync())
        everything.append(FileStorage(folder.with_name(place), capacity_bytes, label, description, **more))
        return everything[-1]

    yield make
    for storage in everything:
        storage.close()


@pytest.fixture
def quick(opened: Open) -> Open:
    """Opens it with one thread, on a disk that is not waited for."""
    return lambda disk=None, capacity=MIB, **more: opened(capacity, **{"threads": 1, "disk": disk or Quick()} | more)


@pytest.fixture
def storage(opened: Open) -> FileStorage:
    return opened()


@pytest.fixture
def make_row() -> Iterator[MakeRow]:
    rows = []

    def make(*args: object, **more: object) -> Row:
        rows.append(Row(*args, **more))
        return rows[-1]

    yield make
    for row in rows:
        row.close()
    for thread in threading.enumerate():
        if thread.name.startswith("kvarve asks a tier"):
            thread.join(LONG_S)
    assert all(row.before.issuperset(threading.enumerate()) for row in rows[:1])


@pytest.fixture
def row(make_row: MakeRow) -> Row:
    return make_row()
