"""A metadata server that dies at any step of its journal: the next one knows all of a call or nothing of it."""

import resource
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hf3fs_laws import audit, entries
from hf3fs_metadata_suite import LABEL, OTHER, K

from kvarve.storage.hf3fs.metadata.journal import Journal
from kvarve.storage.hf3fs.metadata.service import Slot
from kvarve.storage.hf3fs.metadata.slot_table import SlotTable

NOW = 1_800_000_000.0


class Died(BaseException):
    """The process ends here."""


class Dying(sqlite3.Connection):
    """Dies before, in and after each statement, and before and after a transaction ends."""

    left = 10**9
    ended = False  # whether the transaction that it died in had ended

    def _step(self) -> None:
        Dying.left -= 1
        if Dying.left == 0:
            raise Died

    def execute(self, *args: Any) -> sqlite3.Cursor:
        self._step()
        found = super().execute(*args)
        self._step()
        return found

    def executemany(self, statement: str, rows: Iterable[Any]) -> sqlite3.Cursor:  # type: ignore[override]
        def given() -> Iterable[Any]:
            for row in rows:
                self._step()
                yield row

        self._step()
        return super().executemany(statement, given())

    def __exit__(self, *args: Any) -> bool:  # type: ignore[override]
        if args[0] is None:
            self._step()
            Dying.ended = True
            result = super().__exit__(*args)
            self._step()
            Dying.ended = False
            return bool(result)
        return bool(super().__exit__(*args))


def known(table: SlotTable) -> tuple[Any, ...]:
    """But when an object was used: that is kept now and then. A pin ends with the service, and what it held is in
    quarantine then."""
    rows = [(it.slot, it.state, it.home.label, it.name, it.size_bytes, it.request) for it in entries(table)]
    return sorted(rows), sorted(table.extents()), table.built


_given: dict[str, Slot] = {}


def reserve(table: SlotTable, label: bytes, request: int, names: str, slots: int = 1, now: float = NOW) -> None:
    told = table.reserve(label, request, [*names], [slots * K] * len(names), 300.0, now)
    _given.update({f"{request}{name}": slot for name, slot in zip(names, told, strict=True) if isinstance(slot, Slot)})


def commit(table: SlotTable, label: bytes, request: int, names: str) -> None:
    table.commit(label, request, [*names], [_given[f"{request}{name}"] for name in names], [5] * len(names), NOW)


CALLS: list[Callable[[SlotTable], Any]] = [
    lambda table: reserve(table, LABEL, 1, "abc"),
    lambda table: commit(table, LABEL, 1, "abc"),
    lambda table: reserve(table, OTHER, 2, "de"),  # evicts
    lambda table: table.abort(OTHER, 2, [_given["2e"]], NOW),
    lambda table: commit(table, OTHER, 2, "d"),
    lambda table: table.lookup(LABEL, ["b"], 9, 300.0, NOW + 900),
    lambda table: table.delete(LABEL, ["b"], None, NOW + 900),
    lambda table: table.release(9, NOW + 900),
    lambda table: reserve(table, LABEL, 3, "x", 2, NOW + 901),  # retires extents
    lambda table: table.removed(table.retired([])),
    lambda table: reserve(table, LABEL, 3, "x", 2, NOW + 901),
    lambda table: reserve(table, LABEL, 4, "y", 1, NOW + 902),
    lambda table: table.touch(LABEL, [], NOW + 5000),  # deadlines and quarantines are over
]


@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.long) for first in (2, 3, 4))])
def test_a_server_that_dies_at_any_step_leaves_a_call_done_or_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **more: real(*args, factory=Dying, **more))
    died_at = 0
    for number in range(first, 10_000, 4):
        path = tmp_path / f"{number}.db"
        Dying.left, Dying.ended = 10**9, False
        journal = Journal(path, NOW)
        table = journal.begin("store", 4 * K, None, NOW, empty=True)
        before = after = known(table)
        Dying.left = number
        try:
            for call in CALLS:
                before = known(table)
                call(table)
                after = known(table)
                journal.save()
        except Died:
            died_at += 1
        survived, ended = Dying.left > 0, Dying.ended
        Dying.left = 10**9
        epoch = table.epoch
        journal.close()
        again = Journal(path, NOW)
        assert again.table is not None
        assert again.store == "store"
        assert known(again.table) == (after if survived or ended else before), f"step {number}"
        if survived or ended:
            assert again.table.epoch >= epoch
        audit(again.table)
        again.close()
        if survived:
            break
    assert died_at > 15


def test_a_disk_that_takes_nothing_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "slots.db"
    journal = Journal(path, NOW)
    reserve(journal.begin("store", 4 * K, None, NOW, empty=True), LABEL, 1, "a")
    journal.save()
    journal.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(sqlite3.OperationalError):
            Journal(path, NOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = Journal(path, NOW)
    assert again.store == "store"
    assert again.table is not None
    assert [entry.name for entry in entries(again.table)] == ["a"]
    again.close()


def test_damaged_files_are_put_aside_and_the_store_is_to_be_rebuilt(tmp_path: Path) -> None:
    for damage in ("garbage", "cut", "PRAGMA user_version = 7", "DELETE FROM extents"):
        path = tmp_path / f"{damage}.db"
        journal = Journal(path, NOW)
        table = journal.begin("store", 64 * K, None, NOW, empty=True)
        reserve(table, LABEL, 1, "abcdefgh")
        commit(table, LABEL, 1, "abcdefgh")
        journal.save()
        journal.close()
        match damage:
            case "garbage":
                path.write_bytes(b"garbage" * 5000)
            case "cut":
                path.write_bytes(path.read_bytes()[:5000])
            case statement:
                with closing(sqlite3.connect(path)) as database, database:
                    database.execute(statement)
        again = Journal(path, NOW)
        assert again.table is None, damage
        assert path.with_name(path.name + ".damaged").exists()
        assert again.begin("store", 64 * K, None, NOW, empty=False).rebuilding(1, 60.0, NOW)
        again.close()
