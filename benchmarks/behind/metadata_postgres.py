"""The same calls as tables and functions of PostgreSQL, as far as they are measured: what decision 19 compares with.

Pins are one row a lookup; uses are not written, and nothing waits for the disk: PostgreSQL at its best.
"""

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvarve.errors import StorageError
from kvarve.storage.hf3fs.metadata import Found, Slot

_SCHEMA = """
CREATE UNLOGGED TABLE pins (reader bigint PRIMARY KEY, until timestamptz, slots bigint[]);
CREATE TABLE slots (number bigint PRIMARY KEY, epoch bigint, state smallint NOT NULL, name text, size bigint,
    request bigint, used bigint) WITH (fillfactor = 70);
CREATE UNIQUE INDEX committed ON slots (name) WHERE state = 2;
CREATE INDEX by_use ON slots (used) WHERE state = 2;
CREATE INDEX free ON slots (number) WHERE state = 0;
CREATE SEQUENCE epochs;
CREATE FUNCTION lookup(r bigint, asked text[]) RETURNS TABLE (name text, number bigint, epoch bigint, size bigint) AS $$
    WITH found AS MATERIALIZED (SELECT s.name, s.number, s.epoch, s.size FROM slots s
        WHERE s.name = ANY(asked) AND state = 2),
    pinned AS (INSERT INTO pins SELECT r, now() + interval '60 s', array_agg(f.number) FROM found f)
    SELECT * FROM found $$ LANGUAGE sql;
CREATE FUNCTION reserve(r bigint, asked text[]) RETURNS TABLE (name text, number bigint, epoch bigint) AS $$
DECLARE missing int;
BEGIN
    SELECT cardinality(asked) - count(*) INTO missing FROM (SELECT 1 FROM slots WHERE state = 0
        LIMIT cardinality(asked)) f;
    IF missing > 0 THEN
        UPDATE slots SET state = 0, name = NULL WHERE slots.number IN (SELECT s.number FROM slots s WHERE state = 2
            AND NOT EXISTS (SELECT 1 FROM pins WHERE s.number = ANY(pins.slots)) ORDER BY used LIMIT missing
            FOR UPDATE SKIP LOCKED);
    END IF;
    RETURN QUERY UPDATE slots SET state = 1, epoch = nextval('epochs'), request = r, name = n.name
        FROM (SELECT f.number, row_number() OVER () AS at FROM (SELECT s.number FROM slots s WHERE state = 0
            LIMIT cardinality(asked) FOR UPDATE SKIP LOCKED) f) free
        JOIN unnest(asked) WITH ORDINALITY AS n(name, at) USING (at)
        WHERE slots.number = free.number RETURNING slots.name, slots.number, slots.epoch;
END $$ LANGUAGE plpgsql;
CREATE FUNCTION commit(r bigint, asked text[], numbers bigint[], given bigint[], sizes bigint[]) RETURNS bigint AS $$
    WITH done AS (UPDATE slots SET state = 2, size = n.size, used = nextval('epochs')
        FROM unnest(asked, numbers, given, sizes) AS n(name, number, epoch, size)
        WHERE slots.number = n.number AND slots.epoch = n.epoch AND request = r AND state = 1 RETURNING 1)
    SELECT count(*) FROM done $$ LANGUAGE sql;
"""
_BIN = Path(shutil.which("postgres") or "postgres").resolve().parent


class PostgresMetadata:
    def __init__(self, place: str, psycopg: Any) -> None:
        self._place, self._psycopg, self._link = place, psycopg, None
        self._stored = self._analyzed = 0

    def _all(self, query: str, *args: object) -> list[tuple[Any, ...]]:
        try:
            if self._link is None:
                self._link = self._psycopg.connect(self._place, autocommit=True, prepare_threshold=0)
            return self._link.execute(query, args, binary=True).fetchall()
        except self._psycopg.OperationalError as error:
            self._link = None
            raise StorageError(str(error)) from error

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = {name for (name,) in self._all("SELECT name FROM slots WHERE name = ANY(%s) AND state = 2", [*names])}
        return [name in found for name in names]

    def lookup(self, names: Sequence[str], reader: int, pin_s: float) -> list[Found | None]:
        told = self._all("SELECT * FROM lookup(%s, %s)", reader, [*names])
        found = {name: Found(Slot(1, number, epoch), size) for name, number, epoch, size in told}
        return [found.get(name) for name in names]

    def release(self, reader: int) -> None:
        self._all("DELETE FROM pins WHERE reader = %s RETURNING 1", reader)

    def reserve(self, request: int, names: Sequence[str], slot_bytes: Sequence[int], for_s: float) -> list[Slot]:
        told = self._all("SELECT * FROM reserve(%s, %s)", request, [*names])
        slots = {name: Slot(1, number, epoch) for name, number, epoch in told}
        return [slots[name] for name in names]

    def commit(self, request: int, names: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int]) -> list[bool]:
        numbers, epochs = [slot.number for slot in slots], [slot.epoch for slot in slots]
        ((count,),) = self._all("SELECT commit(%s, %s, %s, %s, %s)", request, [*names], numbers, epochs, [*sizes])
        self._stored += count
        if self._stored > 2 * self._analyzed:  # as its own vacuum would do after a while
            self._link.execute("ANALYZE slots")
            self._analyzed = self._stored
        return [count == len(names)] * len(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        query = "UPDATE slots SET state = 0, name = NULL WHERE name = ANY(%s) AND state = 2 RETURNING 1"
        return [True] * len(self._all(query, [*names]))

    def usage(self) -> Any:
        ((count,),) = self._all("SELECT count(*) FROM slots WHERE state = 2")
        return SimpleNamespace(objects=count)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class Postgres:
    """A server in a folder, run as the user `postgres` where we are root, whom it refuses."""

    def __init__(self, folder: Path) -> None:
        import psycopg

        self._psycopg, self._data = psycopg, folder / "data"
        folder.mkdir(parents=True)
        self._place = f"host={folder} user={getpass.getuser()} dbname=postgres"
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
            self._as = {"user": "postgres", "group": "postgres", "extra_groups": []}
            self._place = f"host={folder} user=postgres dbname=postgres"
        words = [str(_BIN / "initdb"), "-D", str(self._data), "-A", "trust", "-U", "postgres"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd="/", **self._as)
        self._folder = folder
        self.start()

    def start(self) -> None:
        options = {"listen_addresses": "", "unix_socket_directories": str(self._folder), "synchronous_commit": "off"}
        options |= {"shared_buffers": "1GB", "max_wal_size": "4GB", "jit": "off"}
        words = [str(_BIN / "postgres"), "-D", str(self._data)]
        words += [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        self._process = subprocess.Popen(words, stderr=subprocess.DEVNULL, cwd="/", **self._as)

    def open(self, capacity_bytes: int) -> PostgresMetadata:
        metadata, slots = PostgresMetadata(self._place, self._psycopg), capacity_bytes >> 20
        end = time.monotonic() + 60.0
        while True:
            try:
                metadata._all("SELECT 1")
                break
            except StorageError:
                assert time.monotonic() < end
                time.sleep(0.01)
        with self._psycopg.connect(self._place, autocommit=True) as link:
            link.execute(_SCHEMA)
            link.execute("INSERT INTO slots SELECT n, 0, 0, NULL, 0, 0, 0 FROM generate_series(1, %s) n", [slots])
            link.execute("VACUUM ANALYZE slots")
        return metadata

    def memory_bytes(self) -> int:
        """What lies in its files."""
        return sum(path.stat().st_size for path in (self._data / "base").rglob("*") if path.is_file())

    def restart(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        time.sleep(1.0)  # until its children have noticed
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            for path in self._folder.glob(".s.PGSQL*"):
                path.unlink()
        self.start()

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
