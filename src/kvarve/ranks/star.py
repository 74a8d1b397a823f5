"""Sockets between rank 0 and each other rank, and frames on them: a frame is 512 bytes, or as long as it has to be.

Unix sockets within a node, TCP between nodes. Every wait has a deadline.
"""

import hashlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvarve.errors import Broken, ConfigError

FRAME = 512  # bytes of nearly every frame
MOST = 1 << 28  # bytes of the longest
_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<8s32sHH")
_MAGIC = b"kvranks1"
# As numbers: to combine flags, or to make a number of one, takes 2 us.
_SEND, _OFFER = int(socket.MSG_NOSIGNAL), int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_WAITALL)

Address = Path | tuple[str, int]


class GroupEnded(Broken):
    """A rank is late, dead or different, so that no rank can go on; the text names it."""


class Dead(Exception):
    """The other end has closed its socket."""


class Late(Exception):
    """The other end has said nothing, or read nothing, until the deadline."""


def framed(content: bytes) -> bytes:
    """The frame of this content, as it is sent."""
    assert len(content) <= MOST, "a frame is bounded"
    return (_LENGTH.pack(len(content)) + content).ljust(FRAME, b"\0")


def content_of(frame: bytes) -> bytes:
    """What has been framed."""
    (length,) = _LENGTH.unpack_from(frame)
    return frame[_LENGTH.size : _LENGTH.size + length]


class Link:
    """One socket to another rank, which one thread uses at a time in each direction.

    After a part of a frame nothing can be sent or read any more: the other end counts as dead.
    """

    def __init__(self, link: socket.socket, deadline_s: float) -> None:
        self._socket = link
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wait_at_most(deadline_s)
        self._torn = False  # a part of a frame has been sent or read, and the rest has not

    def wait_at_most(self, deadline_s: float) -> None:
        """From now on a send or receive that makes no progress for this long is Late."""
        self._socket.setblocking(True)
        micro = max(1, round(deadline_s * 1e6))
        value = struct.pack("ll", micro // 1_000_000, micro % 1_000_000)
        # The kernel's own deadlines need no system call beside those of the frame.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, content: bytes) -> None:
        """Send a frame. Dead, Late."""
        self._send(framed(content), _SEND)

    def pass_on(self, frame: bytes) -> None:
        """Send a frame that is `framed`, as to several ranks. Dead, Late."""
        self._send(frame, _SEND)

    def offer(self, content: bytes) -> bool:
        """Send a frame if the socket has room for it; whether it had. Dead, Late."""
        return self._send(framed(content), _OFFER)

    def _send(self, frame: bytes, flags: int) -> bool:
        if self._torn:
            raise Dead
        sent, whole = 0, len(frame)
        try:
            while sent < whole:
                sent += self._socket.send(frame[sent:] if sent else frame, flags)
                flags = _SEND  # one that has begun is sent whole
        except BlockingIOError:
            if flags == _OFFER:
                return False
            self._torn = sent > 0
            raise Late from None
        except OSError:
            raise Dead from None
        return True

    def receive(self) -> bytes:
        """The next frame. Dead (also if it is no frame), Late."""
        frame = self._read(FRAME)
        (length,) = _LENGTH.unpack_from(frame)
        if length > MOST:
            raise Dead
        if length > FRAME - _LENGTH.size:
            frame += self._read(length + _LENGTH.size - FRAME, begun=True)
        return content_of(frame)

    def _read(self, nbytes: int, begun: bool = False) -> bytes:
        if self._torn:
            raise Dead
        found = b""
        try:
            while len(found) < nbytes:
                if not (some := self._socket.recv(nbytes - len(found), _RECEIVE)):
                    raise Dead
                found = found + some if found else some
        except BlockingIOError:
            self._torn = begun or bool(found)
            raise Late from None
        except OSError:
            raise Dead from None
        return found

    def close(self) -> None:
        self._socket.close()


class Star:
    """The links of one rank: of rank 0 one to each other rank, of any other rank one to rank 0."""

    def __init__(self, rank: int, ranks: int, links: dict[int, Link], deadline_s: float) -> None:
        self.rank, self.ranks, self.links, self.deadline_s = rank, ranks, links, deadline_s
        self.groups = 0  # so far, one after the other
        self.sending = threading.Lock()  # of what several threads of one rank send: it goes in their order
        self._poll = select.poll()
        self._rank_of = {link.fileno(): other for other, link in links.items()}
        self._bell = () if rank else socket.socketpair()  # to ring, and to hear
        for each in self._bell:
            each.setblocking(False)
        if self._bell:
            self._rank_of[self._bell[1].fileno()] = rank
            self._poll.register(self._bell[1].fileno(), select.POLLIN)
        for link in links.values():
            self._poll.register(link.fileno(), select.POLLIN)

    def clock(self) -> float:
        """The time in seconds, by which waits are measured."""
        return time.monotonic()

    def ready(self, timeout_s: float) -> list[int]:
        """The ranks from which a frame, or the end of the link, can be read now; waits for the first. Rank 0 itself is
        among them if it has been rung for since the last call."""
        ready = [self._rank_of[number] for number, _ in self._poll.poll(timeout_s * 1e3)]
        if self._bell and self.rank in ready:
            with suppress(OSError):  # it is closed
                self._bell[1].recv(1 << 16)
        return ready

    def gone(self, timeout_s: float) -> set[int]:
        """The ranks that have closed their end of a link, though what they have sent may still be read; waits for the
        first. From any thread."""
        poll = select.poll()
        for link in [*self.links.values()]:
            if (number := link.fileno()) >= 0:  # else it was closed here
                poll.register(number, select.POLLRDHUP)
        return {self._rank_of[number] for number, _ in poll.poll(timeout_s * 1e3)}

    def ring(self) -> None:
        """End rank 0's wait in `ready`, from any thread."""
        if self._bell:
            with suppress(OSError):  # it has been rung often enough, or is closed
                self._bell[0].send(b"!")

    def leave(self, rank: int) -> None:
        """Listen to a rank no more."""
        link = self.links.pop(rank)
        self._poll.unregister(link.fileno())
        link.close()

    def close(self) -> None:
        for link in (*self.links.values(), *self._bell):
            link.close()


def alike(text: str) -> bytes:
    """What `listen` and `connect` compare: ranks whose texts differ form no group."""
    return hashlib.sha256(text.encode()).digest()


class Listener:
    """Where rank 0 waits for the others: bound before they are started."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        """ConfigError if an address cannot be bound."""
        self._sockets: list[socket.socket] = []
        try:
            for address in addresses:
                self._sockets.append(_bound(address))
        except BaseException:
            self.close()
            raise

    def accept(self, ranks: int, settings: bytes, deadline_s: float, start_s: float = 600.0) -> Star:
        """Wait for all other ranks, at most `start_s`. GroupEnded if one does not come, or was given other settings."""
        links: dict[int, Link] = {}
        end = time.monotonic() + start_s
        poll = select.poll()
        for each in self._sockets:
            poll.register(each, select.POLLIN)
        try:
            while len(links) < ranks - 1:
                if not (ready := poll.poll(max(0.0, end - time.monotonic()) * 1e3)):
                    raise GroupEnded(f"{_named(range(1, ranks), links)} did not start within {start_s:g} s")
                for number, _ in ready:
                    self._greet(number, ranks, settings, links, deadline_s)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        return Star(0, ranks, links, deadline_s)

    def _greet(self, number: int, ranks: int, settings: bytes, links: dict[int, Link], deadline_s: float) -> None:
        came, _ = next(each for each in self._sockets if each.fileno() == number).accept()
        link = Link(came, min(deadline_s, 5.0))
        try:
            magic, theirs, rank, of = _HELLO.unpack(link.receive())
        except (Dead, Late, struct.error):  # a stranger, or a rank that has died: the deadline tells
            link.close()
            return
        if magic != _MAGIC or of != ranks or not 0 < rank < ranks or rank in links or theirs != settings:
            link.close()
            if magic == _MAGIC:
                raise GroupEnded(
                    f"rank {rank} of {of} was given other settings, another model or another number than rank 0 of "
                    f"{ranks}: start all ranks alike"
                )
            return
        link.wait_at_most(deadline_s)
        links[rank] = link

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def connect(
    address: Address, rank: int, ranks: int, settings: bytes, deadline_s: float, start_s: float = 600.0
) -> Star:
    """Join rank 0's group. GroupEnded if it does not answer within `start_s`."""
    end = time.monotonic() + start_s
    while True:
        link = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.connect(str(address) if isinstance(address, Path) else address)
            break
        except OSError as e:
            link.close()
            if time.monotonic() > end:
                raise GroupEnded(f"rank 0 does not answer at {_shown(address)}: {e.strerror or e}") from None
            time.sleep(0.05)
    found = Link(link, deadline_s)
    found.send(_HELLO.pack(_MAGIC, settings, rank, ranks))
    return Star(rank, ranks, {0: found}, deadline_s)


def _bound(address: Address) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if not isinstance(address, Path):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(str(address) if isinstance(address, Path) else address)
        bound.listen(64)
    except OSError as e:
        bound.close()
        raise ConfigError(f"ranks cannot meet at {_shown(address)}: {e.strerror or e}; give another address") from None
    return bound


def _shown(address: Address) -> str:
    return str(address) if isinstance(address, Path) else f"{address[0]}:{address[1]}"


def _named(ranks: Iterable[int], but: Iterable[int]) -> str:
    found = [str(rank) for rank in ranks if rank not in {*but}]
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)}"
