"""The metadata server of one store for one machine: a slot table behind a Unix socket, kept in SQLite.

The first client starts it (`local`). Its folder belongs to one user and has nothing else. One thread answers all
connections, one call after the other; calls that arrive together are written together, before any of them is answered.
"""

import errno
import fcntl
import gc
import os
import selectors
import signal
import socket
import sqlite3
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import LABEL_MAX_BYTES
from kvarve.storage.hf3fs.metadata.calls import CALLS, BadCall, answer
from kvarve.storage.hf3fs.metadata.frames import BAD, HEADER_BYTES, OK, Header, pack, read_header, read_rest
from kvarve.storage.hf3fs.metadata.journal import Journal

SOCKET, LOCK, SLOTS = "socket", "lock", "slots.db"
IDLE_S = 600.0
MOST_CONNECTIONS = 512
_STALLED_S = 30.0  # for half a call, or an answer that is not read
_READ_BYTES = 1 << 18
_LOCK_S = 10.0  # for an earlier server to end


@contextmanager
def near(path: Path) -> Iterator[str]:
    """The path of a socket, short enough for an address, however long that of its folder is. OSError."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class _Connection:
    def __init__(self, link: socket.socket, now: float) -> None:
        self.link, self.since = link, now  # since it stands at the same byte
        self.label: bytes | None = None
        self.read = bytearray()
        self.header: Header | None = None
        self.unsent: memoryview | None = None

    @property
    def is_idle(self) -> bool:
        return not self.read and self.unsent is None


class Service:
    """The calls of clients, on the table of a journal. `clock` is that of the wall."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self.journal, self._clock = journal, clock

    def hello(self, names: list[str], numbers: list[int]) -> bytes:
        """The label of a connection, whose store this is. Numbers: how much it may hold, in all and by group, whether
        nothing was ever stored, and whether the client opens it (else it has connected again). BadCall."""
        if len(names) != 2 or len(numbers) != 4 or not names[0] or numbers[0] <= 0 or min(numbers) < 0:
            raise BadCall("a hello says which store and label, and how much the store may hold")
        store, quota_bytes = names[0], numbers[1] or None
        try:
            label = bytes.fromhex(names[1])
        except ValueError:
            raise BadCall("a label is hexadecimal") from None
        if not 1 <= len(label) <= LABEL_MAX_BYTES:
            raise BadCall(f"a label has 1 to {LABEL_MAX_BYTES} bytes")
        table = self.journal.table
        if table is None:
            table = self.journal.begin(store, numbers[0], quota_bytes, self._clock(), empty=bool(numbers[2]))
        elif self.journal.store != store:
            raise BadCall(f"this server has the metadata of another store, {self.journal.store}, not of {store}")
        if numbers[3] and (table.capacity_bytes, table.quota_bytes) != (numbers[0], quota_bytes):
            table.configure(numbers[0], quota_bytes)
            table.layout_changed = True
        return label

    def tidy(self) -> None:
        if self.journal.table is not None:
            self.journal.table.tidy()

    def answer(self, label: bytes, call: str, names: list[str], numbers: list[int]) -> list[int] | bytes:
        assert self.journal.table is not None
        return answer(self.journal.table, label, call, names, numbers, self._clock())


class Server:
    def __init__(self, listener: socket.socket, service: Service, idle_s: float) -> None:
        self._listener, self._service, self._idle_s = listener, service, idle_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, _Connection] = {}
        self._answers: list[tuple[_Connection, bytes]] = []  # that wait for the journal
        self.ends = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Until `ends`, or until there was no connection for `idle_s`."""
        last = looked = time.monotonic()
        while not self.ends:
            ready = self._selector.select(1.0)
            now = time.monotonic()
            more = deque(self._ready(ready, now))
            while more:  # also calls that came behind others on the same connection
                self._service.journal.save()
                answers, self._answers = self._answers, []
                more = deque(connection for connection, data in answers if self._send(connection, data, now))
                for connection in more:
                    self._take(connection, now)
            self._service.tidy()
            if self._connections:
                last = now
            elif now - last > self._idle_s:
                return
            if now - looked > 1.0:
                looked = now
                self._close_stalled(now)

    def close(self) -> None:
        for connection in [*self._connections.values()]:
            self._close(connection)
        self._selector.close()

    def _ready(self, ready: list[tuple[selectors.SelectorKey, int]], now: float) -> list[_Connection]:
        """The connections that have been looked at."""
        seen = []
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(now)
                continue
            connection: _Connection = key.data
            if connection.link not in self._connections:  # closed for a new one
                continue
            if events & selectors.EVENT_WRITE and not self._send(connection, b"", now):
                continue
            if events & selectors.EVENT_READ and not self._read(connection, now):
                continue
            self._take(connection, now)
            seen.append(connection)
        return seen

    def _accept(self, now: float) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                self._close_oldest()
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            self._close_oldest()
        link.setblocking(False)
        connection = self._connections[link] = _Connection(link, now)
        self._selector.register(link, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection, now: float) -> bool:
        """Whether the connection is still there."""
        try:
            data = connection.link.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return False
        connection.read += data
        connection.since = now
        return True

    def _take(self, connection: _Connection, now: float) -> None:
        """Carry out the next call, if all of it is here and the last one's answer has been sent."""
        if connection.unsent is not None or connection.link not in self._connections:
            return
        if connection.header is None:
            if len(connection.read) < HEADER_BYTES:
                return
            try:
                connection.header = read_header(connection.read)
            except BadCall:  # what follows may begin anywhere
                self._close(connection)
                return
        header, end = connection.header, HEADER_BYTES + connection.header.rest_bytes
        if len(connection.read) < end:
            return
        try:
            names, numbers = read_rest(header, connection.read[HEADER_BYTES:end])
            data = pack(OK, header.tag, (), self._carry_out(connection, header, names, numbers))
        except BadCall as error:
            data = pack(BAD, header.tag, [str(error)], ())
        del connection.read[:end]
        connection.header, connection.since = None, now
        self._answers.append((connection, data))

    def _carry_out(
        self, connection: _Connection, header: Header, names: list[str], numbers: list[int]
    ) -> list[int] | bytes:
        if header.kind >= len(CALLS):
            raise BadCall("that is an answer")
        call = CALLS[header.kind]
        if call == "hello":
            connection.label = self._service.hello(names, numbers)
            return []
        if connection.label is None:
            raise BadCall("the first call is a hello")
        return self._service.answer(connection.label, call, names, numbers)

    def _send(self, connection: _Connection, data: bytes, now: float) -> bool:
        """Whether all has been sent: this, or what was not sent before."""
        if connection.link not in self._connections:
            return False
        view = memoryview(data) if connection.unsent is None else connection.unsent
        try:
            sent = connection.link.send(view) if view else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return False
        waited = connection.unsent is not None
        connection.unsent = view[sent:] if sent < len(view) else None
        if sent:
            connection.since = now
        if waited != (connection.unsent is not None):
            wanted = selectors.EVENT_READ if connection.unsent is None else selectors.EVENT_WRITE
            self._selector.modify(connection.link, wanted, connection)
        return connection.unsent is None

    def _close_stalled(self, now: float) -> None:
        for connection in [*self._connections.values()]:
            if not connection.is_idle and now - connection.since > _STALLED_S:
                self._close(connection)

    def _close_oldest(self) -> None:
        self._close(min(self._connections.values(), key=lambda each: (not each.is_idle, each.since)))

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.link]
        self._selector.unregister(connection.link)
        connection.link.close()


def serve(folder: Path, idle_s: float, *, detach: bool = False) -> None:
    """Run a server in its folder, made if need be; `detach`: return once it listens, and let it run on by itself.
    StorageError: another one runs there, or it cannot."""
    try:
        _serve(folder, idle_s, detach=detach)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{folder}: no metadata server can run there: {error}") from error


def _serve(folder: Path, idle_s: float, *, detach: bool) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise StorageError(f"{folder}: must belong to this user and nobody else (mode 0700)")
    os.umask(0o077)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise StorageError(f"{folder}: a metadata server runs there already") from None
            time.sleep(0.02)
    with suppress(FileNotFoundError):
        (folder / SOCKET).unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        with near(folder / SOCKET) as address:
            listener.bind(address)
        (folder / SOCKET).chmod(0o600)
        listener.listen(MOST_CONNECTIONS)
        if detach:
            if os.fork():
                os._exit(0)  # the lock and the socket are the child's
            os.setsid()
        os.pwrite(lock, b"%-20d\n" % os.getpid(), 0)
        _answer_all(folder, listener, idle_s)


def _answer_all(folder: Path, listener: socket.socket, idle_s: float) -> None:
    began = time.time() - time.monotonic()

    def clock() -> float:  # never goes back, and goes on in the next life
        return began + time.monotonic()

    gc.disable()  # a million objects would be looked through again and again; there are no cycles to find
    journal = Journal(folder / SLOTS, clock())
    server = Server(listener, Service(journal, clock), idle_s)

    def end(number: int, frame: object) -> None:
        server.ends = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        server.run()
        with suppress(FileNotFoundError):  # clients start another one
            (folder / SOCKET).unlink()
    finally:
        server.close()
        journal.close()
