"""What a metadata server knows, kept in SQLite for its next life. One transaction for all calls answered together.

A transaction that has ended survives `kill -9` of the server at any moment, as the system holds what was written. It is
synced when SQLite moves its log into its file, not before: a machine that loses power may lose the last calls, which
costs their objects and no wrong byte.
"""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from kvarve.storage.hf3fs.metadata.entries import Row
from kvarve.storage.hf3fs.metadata.service import Extent, first_numbers
from kvarve.storage.hf3fs.metadata.slot_table import SlotTable

_FORMAT = 1
_TABLES = """
CREATE TABLE slots (slot_bytes INT, number INT, epoch INT, state INT, label BLOB, name TEXT, size_bytes INT,
    request INT, used REAL, until REAL, PRIMARY KEY (slot_bytes, number)) WITHOUT ROWID;
CREATE TABLE extents (slot_bytes INT, number INT, places INT, leaves INT, PRIMARY KEY (slot_bytes, number))
    WITHOUT ROWID;
CREATE TABLE store (only_one INTEGER PRIMARY KEY CHECK (only_one = 0), id TEXT, capacity_bytes INT, quota_bytes INT,
    epoch INT, next_extent INT, built INT);
"""


class Journal:
    """`table` and `store` (its random name) are None until there is a store. One thread uses it."""

    def __init__(self, path: Path, now: float) -> None:
        """A file that is damaged is put aside, and nothing is known then. OSError, sqlite3.OperationalError."""
        self.table: SlotTable | None = None
        self.store = ""
        self._layout: dict[Extent, tuple[int, bool]] = {}
        self._path = path
        try:
            self._open(now)
        except sqlite3.DatabaseError as error:
            # A table that is missing is damage; a full disk is not, nor a lock.
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_ERROR:
                raise
            self._database.close()
            for end in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    Path(f"{path}{end}").replace(f"{path}.damaged{end}")
            self.table, self._layout = None, {}
            self._open(now)

    def begin(self, store: str, capacity_bytes: int, quota_bytes: int | None, now: float, *, empty: bool) -> SlotTable:
        """A store that this journal knows nothing of."""
        self.store = store
        table = self.table = SlotTable(capacity_bytes, quota_bytes, first_numbers(now), empty=empty, journal=True)
        table.layout_changed = True
        self.save()
        return table

    def save(self) -> None:
        """What has changed since the last call. An exception: nothing of it was written, or it cannot be known."""
        table = self.table
        if table is None:
            return
        rows, freed = table.changes()
        if not (rows or freed or table.layout_changed):
            return
        with self._database:  # a transaction
            self._database.execute("BEGIN")
            if table.layout_changed:
                self._save_layout(table)
            self._database.executemany("DELETE FROM slots WHERE slot_bytes = ? AND number = ?", freed)
            self._database.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self._database.execute("UPDATE store SET epoch = ?", (table.epoch,))

    def close(self) -> None:
        self._database.close()

    def _open(self, now: float) -> None:
        self._database = sqlite3.connect(self._path, isolation_level=None, timeout=5.0)
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "cell_size_check = ON"):
            self._database.execute(f"PRAGMA {pragma}").fetchall()
        ((version,),) = self._database.execute("PRAGMA user_version")
        if version == 0:
            self._database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT")
        elif version != _FORMAT:
            raise sqlite3.DatabaseError(f"written in another format, {version}")
        with closing(self._database.execute("SELECT * FROM store")) as found:
            told = found.fetchone()
        if told is not None:
            self._restore(told[1:], now)

    def _restore(self, told: tuple[str, int, int | None, int, int, int], now: float) -> None:
        self.store, capacity_bytes, quota_bytes, epoch, next_extent, built = told
        first = max(int(1e6 * now), epoch)
        table = SlotTable(capacity_bytes, quota_bytes, (first, next_extent), empty=bool(built), journal=True)
        with closing(self._database.execute("SELECT * FROM extents")) as found:
            self._layout = {Extent(*each[:2]): (each[2], bool(each[3])) for each in found}
        with closing(self._database.execute("SELECT * FROM slots")) as rows:
            try:
                table.restore([(name, *rest) for name, rest in self._layout.items()], map(Row._make, rows), now)
            except (KeyError, IndexError, TypeError, ValueError, AssertionError) as error:
                raise sqlite3.DatabaseError(f"what it says cannot be: {error}") from error
        self.table = table

    def _save_layout(self, table: SlotTable) -> None:
        layout = {name: (places, leaves) for name, places, leaves in table.extents()}
        changed = [(*name, *rest) for name, rest in layout.items() if self._layout.get(name) != rest]
        self._database.executemany("INSERT OR REPLACE INTO extents VALUES (?, ?, ?, ?)", changed)
        gone = [name for name in self._layout if name not in layout]
        self._database.executemany("DELETE FROM extents WHERE slot_bytes = ? AND number = ?", gone)
        about = (self.store, table.capacity_bytes, table.quota_bytes, table.epoch, table.next_extent, table.built)
        self._database.execute("INSERT OR REPLACE INTO store VALUES (0, ?, ?, ?, ?, ?, ?)", about)
        self._layout, table.layout_changed = layout, False
