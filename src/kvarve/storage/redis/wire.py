"""One connection to a Redis server: commands out of the caller's buffers, answers into them. Knows no storage.

The client library connects, authenticates and chooses the database; from then on the socket is read and written here
alone, since the library makes a new string of every payload (docs/decisions/0016-redis.md). A connection that has
failed is closed: answers that were still to come would be taken for those of later commands.
"""

import io
import re
import socket
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf

from kvarve.errors import StorageError

_LINES_BYTES = 16 << 10  # read ahead: short answers, and the beginning of a payload
_LONGEST_LINE = 64 << 10
_LONGEST_TEXT = 1 << 20
_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_MOST_SKIPPED = 4 << 20  # of a value that is longer than its buffer
_LARGE = 64 << 10  # of a piece that is sent alone, without a copy


class Refused(StorageError):
    """The server's own `words` for a command that it did not carry out. The answers of later commands come all the
    same."""

    def __init__(self, where: str, words: str) -> None:
        super().__init__(f"{where}: {words}")
        self.words = words


def command(*words: bytes) -> bytes:
    """A command without a payload."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class _Late(StorageError):
    """Nothing has come in time."""


class _Source(io.RawIOBase):
    """What comes from a socket, until a moment. StorageError: nothing more does."""

    def __init__(self, link: socket.socket, where: str) -> None:
        self._link, self._where = link, where
        self.until: float | None = inf  # None: only what has come by now

    def arm(self) -> None:
        """Have the next call of the socket end by then. TimeoutError: that is past."""
        left_s = 0.0 if self.until is None else self.until - time.monotonic()
        if self.until is not None and left_s <= 0:
            raise TimeoutError(0, "no answer in time")
        self._link.settimeout(min(left_s, 1e6))

    def readable(self) -> bool:
        return True

    def readinto(self, view: memoryview) -> int:  # type: ignore[override]
        try:
            self.arm()
            if count := self._link.recv_into(view):
                return count
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            raise _Late(f"{self._where}: no answer in time") from None
        except OSError as error:
            raise StorageError(f"{self._where}: {error.strerror or error}") from None
        raise StorageError(f"{self._where}: the server has hung up")


class Wire:
    """Used by one thread at a time. StorageError: the server is gone, late or no Redis, and the wire of no more use."""

    def __init__(self, link: socket.socket, where: str) -> None:
        self._link, self._where, self._source = link, where, _Source(link, where)
        self._reader = io.BufferedReader(self._source, _LINES_BYTES)  # past which payloads go
        self.closed = False

    def wait_for(self, seconds: float) -> None:
        """From now on all that is sent and read has to be over in `seconds`."""
        self._source.until = time.monotonic() + seconds

    def is_fresh(self) -> bool:
        """Whether the server has neither hung up nor said what was not asked for."""
        self._source.until = None
        try:
            self._reader.peek()
        except _Late:  # nothing to read
            return not self.closed
        except StorageError:
            pass
        return False

    def close(self) -> None:
        """May be called under a call of another thread, which ends."""
        self.closed = True
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    # --- out

    def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send commands, whose payloads are pieces of their own. Small pieces go together, large ones as they lie."""
        small = bytearray()
        try:
            for piece in pieces:
                if len(piece) < _LARGE:
                    small += piece
                    if len(small) < _LARGE:
                        continue
                self._send_all(small)
                small.clear()
                if len(piece) >= _LARGE:
                    self._send_all(piece)
            self._send_all(small)
        except OSError as error:
            raise StorageError(f"{self._where}: {error.strerror or error}") from None

    def _send_all(self, piece: bytearray | bytes | memoryview) -> None:
        if piece:
            self._source.arm()
            self._link.sendall(piece)

    # --- in

    def number(self) -> int:
        """The answer of a command that counts. Refused."""
        return self._told(b":")

    def done(self) -> bool:
        """The answer of a SET: whether it stored anything, or found what its NX forbids to replace. Refused."""
        line = self._line()
        if line not in (b"+OK", b"$-1", b"_"):
            raise self._strange(line)
        return line == b"+OK"

    def text(self) -> bytes:
        """An answer in one string. Refused."""
        size = self._told(b"$")
        if not 0 <= size <= _LONGEST_TEXT:
            raise StorageError(f"{self._where}: no Redis answers there: a text of {size} bytes")
        data = memoryview(bytearray(size))
        self._reader.readinto(data)
        self._reader.read(2)
        return bytes(data)

    def page(self) -> tuple[bytes, list[bytes]]:
        """The answer of a SCAN: where it goes on, and some keys. Refused."""
        self._told(b"*")
        return self.text(), self.texts()

    def texts(self) -> list[bytes]:
        """An answer in several strings. Refused."""
        return [self.text() for _ in range(self._told(b"*"))]

    def payload(self, into: memoryview) -> int | None:
        """The whole size of a value, which is read as far as the buffer goes; None if there is none. Refused. Behind a
        value with far more bytes the wire is closed, which is faster than to wait for them."""
        size = self._told(b"$")
        if size < 0:
            return None
        self._reader.readinto(into[:size])
        rest = max(0, size - into.nbytes)
        if rest > _MOST_SKIPPED:
            self.close()
        else:
            self._reader.read(rest + 2)
        return size

    def _told(self, kind: bytes) -> int:
        line = self._line()
        if line[:1] != kind or not _NUMBER.fullmatch(line, 1):
            raise self._strange(line)
        return int(line[1:])

    def _strange(self, line: bytes) -> StorageError:
        if line[:1] == b"-":
            return Refused(self._where, line[1:].decode("utf-8", "replace"))
        return StorageError(f"{self._where}: no Redis answers there: {line[:40]!r}")

    def _line(self) -> bytes:
        line = self._reader.readline(_LONGEST_LINE)
        if not line.endswith(b"\r\n"):
            raise StorageError(f"{self._where}: no Redis answers there: a line does not end")
        return line[:-2]
