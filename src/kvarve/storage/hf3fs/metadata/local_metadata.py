"""The metadata server of this machine, as its clients see it: started by the first of them, asked over its socket."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import left_s
from kvarve.storage.hf3fs.metadata.calls import CALLS, BadCall, RemoteMetadata
from kvarve.storage.hf3fs.metadata.frames import BAD, HEADER_BYTES, OK, Header, pack, read_header, read_rest
from kvarve.storage.hf3fs.metadata.metadata_server import IDLE_S, near
from kvarve.system.background import Abandoned, BackgroundCall

CALL_S = 30.0  # for a call whose caller has not said how long it waits
_TRIES = 3  # connections that are lost in a call
_STARTING, _LOG = "starting", "log"
_LOG_BYTES = 1 << 20
_PAUSE_S = 0.01
_START_S = 30.0  # for a server to start, however soon the call that needs it has to end
_READ_BYTES = 1 << 17


class LocalMetadata(RemoteMetadata):
    """`hello`: the names and numbers of the first call of each connection. `empty`: nothing was stored before.
    `starts`: a server is started where none runs. Used by several threads; after a fork by the parent alone."""

    def __init__(self, path: Path, hello: tuple[Sequence[str], Sequence[int]], *, empty: bool, starts: bool) -> None:
        self._path, self._hello, self._empty, self._starts = path, hello, empty, starts
        self._opens = True  # until a service has been told what the store may hold
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._tag = 0
        self._closed = False

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            links, self._idle = [*self._idle, *self._busy], []
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # ends the call of another thread
        for link in links:
            link.close()

    def _ask(self, call: str, names: Sequence[str], numbers: Sequence[int]) -> list[int]:
        end = time.monotonic() + min(left_s(), CALL_S)
        for tries in range(_TRIES):
            self._require_open()
            try:
                with self._link(end) as link:
                    return self._exchange(link, call, names, numbers, end)
            except TimeoutError:
                raise StorageError(f"{self._path}: the metadata server does not answer in time") from None
            except OSError as error:  # it has ended, perhaps, and another one goes on where it was
                self._require_open()
                self._forget_idle()
                if tries == _TRIES - 1:
                    raise StorageError(f"{self._path}: {error.strerror or error}") from error
        raise AssertionError

    def _forget_idle(self) -> None:
        """They are of the server that has ended, too."""
        with self._lock:
            links, self._idle = self._idle, []
        for link in links:
            link.close()

    def _require_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise StorageError("this metadata is closed, or was opened before a fork")

    @contextmanager
    def _link(self, end: float) -> Iterator[socket.socket]:
        """A connection for a call; one whose call fails is closed, since an answer may still come."""
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is None:
            link = self._connected(end)
        with self._lock:
            self._busy.add(link)
        kept = False
        try:
            yield link
            kept = True
        finally:
            with self._lock:
                self._busy.discard(link)
                kept = kept and not self._closed
                if kept:
                    self._idle.append(link)
            if not kept:
                link.close()

    def _connected(self, end: float) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        try:
            while True:
                link.settimeout(_left(end))
                try:
                    with near(self._path) as address:
                        link.connect(address)
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    if not self._starts:
                        raise
                    self._start(end)
                except BlockingIOError:  # more are connecting than wait in its line
                    time.sleep(_PAUSE_S)
            names, numbers = self._hello
            self._exchange(link, "hello", names, [*numbers, int(self._empty), int(self._opens)], end)
            self._empty = self._opens = False  # a service that knows nothing later has lost something
        except BaseException:
            link.close()
            raise
        return link

    def _exchange(
        self, link: socket.socket, call: str, names: Sequence[str], numbers: Sequence[int], end: float
    ) -> list[int]:
        with self._lock:
            tag = self._tag = (self._tag + 1) & 0xFFFFFFFF
        link.settimeout(_left(end))
        link.sendall(pack(CALLS.index(call), tag, names, numbers))
        try:
            header, told, answers = _receive(link, end)
        except BadCall as error:
            raise StorageError(f"{self._path}: no metadata server answers there: {error}") from None
        if header.kind == BAD:
            raise StorageError(f"{self._path}: {' '.join(told)}")
        if header.kind != OK or header.tag != tag:
            raise StorageError(f"{self._path}: no metadata server answers there")
        return answers

    def _start(self, end: float) -> None:
        """Start a server, unless another process is starting it: then wait a little. OSError, StorageError."""
        folder = self._path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / _STARTING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            time.sleep(min(_PAUSE_S, _left(end)))
            return
        try:
            BackgroundCall("kvarve starts its metadata server", partial(self._run_server, lock)).result(_left(end))
        except Abandoned:  # the next call finds it
            raise TimeoutError from None

    def _run_server(self, lock: int) -> None:
        """Return when a server listens; others wait for the lock meanwhile."""
        folder = self._path.parent
        try:
            with socket.socket(socket.AF_UNIX) as link, suppress(FileNotFoundError, ConnectionRefusedError):
                with near(self._path) as address:
                    link.connect(address)
                return  # it was started meanwhile
            if not sys.executable:
                raise StorageError(
                    "there is no Python to start a metadata server with: run it yourself (docs/hf3fs.md)"
                )
            command = [sys.executable, "-P", "-m", "kvarve.storage.hf3fs.metadata", str(folder)]
            log = os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(log).st_size > _LOG_BYTES:
                    os.ftruncate(log, 0)
                started = subprocess.run(
                    [*command, "--detach", "--idle-s", str(IDLE_S)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    timeout=_START_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise StorageError(f"{folder}: its metadata server has not started within {_START_S:g} s") from None
            finally:
                os.close(log)
            if started.returncode:
                raise StorageError(f"no metadata server can be started: {folder / _LOG} says why")
        finally:
            os.close(lock)


def _left(end: float) -> float:
    """The seconds until then. TimeoutError: none."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _receive(link: socket.socket, end: float) -> tuple[Header, list[str], list[int]]:
    """One answer, which is all that a server says. BadCall: it is none."""
    data, header, wanted = bytearray(), None, HEADER_BYTES
    while len(data) < wanted:
        link.settimeout(_left(end))
        more = link.recv(_READ_BYTES)
        if not more:
            raise ConnectionResetError("the metadata server has hung up")
        data += more
        if header is None and len(data) >= HEADER_BYTES:
            header = read_header(data)
            wanted += header.rest_bytes
    if header is None or len(data) > wanted:
        raise BadCall("more than an answer")
    return header, *read_rest(header, data[HEADER_BYTES:])
