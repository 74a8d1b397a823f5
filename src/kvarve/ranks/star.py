"""Sockets between rank 0 and each other rank, and frames of `multiprocessing.connection` on them: bytes, no pickles.

Unix sockets within a node, TCP between nodes. Every wait has a deadline.
"""

import errno
import hashlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from kvarve.errors import Broken, ConfigError

log = logging.getLogger(__name__)

MOST = 1 << 28  # bytes of the longest frame
_HELLO = struct.Struct("<8s32sHH")
_MAGIC = b"kvranks3"
WELCOME = _MAGIC  # to a rank, when all have come; another answer begins so and says why it cannot join
START_S = 600.0  # for all ranks to come
CALL_S = 10.0  # for a connection to be made, before the next is tried
HELLO_S = 5.0  # for one that has called to say which rank it is
CALLERS = 64  # of which nothing is known, at once
SAID = 512  # bytes that are read of each at most
TELL_S = 30.0  # between two messages of which rank is waited for

T = TypeVar("T")
R = TypeVar("R")
Address = Path | tuple[str, int]


class GroupEnded(Broken):
    """A rank is late, dead or different, so that no rank can go on; the text names it."""


class Dead(Exception):
    """The other end has closed its socket."""


class Late(Exception):
    """The other end has said nothing, or read nothing, until the deadline."""


class Link:
    """One socket to another rank, which one thread uses at a time in each direction.

    After a part of a frame, or a send that was Late, nothing is sent or read any more: the other end counts as dead.
    """

    def __init__(self, link: socket.socket, deadline_s: float) -> None:
        """It owns the socket. OSError: there are no descriptors for now."""
        self._socket, self._frames = link, Connection(os.dup(link.fileno()))
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(link.fileno(), select.POLLIN)
        self._writable.register(link.fileno(), select.POLLOUT)
        self.wait_at_most(deadline_s)
        self._torn = False  # a part of a frame may have been sent or read, and the rest has not

    def hung_up(self) -> bool:
        """Whether the other end has said nothing and closes; asked once it can be read."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def wait_at_most(self, deadline_s: float) -> None:
        """From now on a send or receive that makes no progress for this long is Late."""
        self._deadline_ms = deadline_s * 1e3
        self._socket.setblocking(True)
        micro = max(1, round(deadline_s * 1e6))
        value = struct.pack("ll", micro // 1_000_000, micro % 1_000_000)
        # A connection has no deadline of its own, but the kernel has.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, content: bytes) -> None:
        """Send a frame. Dead, Late."""
        assert len(content) <= MOST, "a frame is bounded"
        self._once(self._frames.send_bytes, content)

    def offer(self, content: bytes) -> bool:
        """Send a frame if the socket has room for it; whether it had. Dead, Late."""
        if room := bool(self._writable.poll(0)):
            self.send(content)
        return room

    def receive(self) -> bytes:
        """The next frame. Dead (also if it is no frame), Late."""
        # The kernel's deadline alone would not say whether a part of a frame has been read.
        if not (self._torn or self._readable.poll(self._deadline_ms)):
            raise Late
        return self._once(self._frames.recv_bytes, MOST)

    def _once(self, do: Callable[[T], R], what: T) -> R:
        if self._torn:
            raise Dead
        try:
            return do(what)
        except BlockingIOError:
            self._torn = True
            raise Late from None
        except (OSError, EOFError):
            raise Dead from None

    def close(self) -> None:
        self._frames.close()
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
                self._sockets += _bound(address)
        except BaseException:
            self.close()
            raise

    def accept(
        self,
        ranks: int,
        settings: bytes,
        deadline_s: float,
        start_s: float = START_S,
        processes: Mapping[int, int] = MappingProxyType({}),
    ) -> Star:
        """Wait for all other ranks, at most `start_s`. GroupEnded if one does not come, or was given other settings.

        `processes`: those whose end is the end of a rank, from a descriptor that can be read then."""
        meeting = _Meeting(self._sockets, ranks, settings, processes)
        try:
            links = meeting.all(start_s)
            for link in links.values():
                link.send(WELCOME)
        except (Dead, Late):
            meeting.refuse(why := "a rank has ended when all had come")
            raise GroupEnded(why) from None
        except BaseException as e:
            meeting.refuse(str(e) if isinstance(e, GroupEnded) else _ended_early(0))
            raise
        finally:
            meeting.end()
            self.close()  # whoever calls from now on finds no one, and calls again
        for link in links.values():
            link.wait_at_most(deadline_s)
        return Star(0, ranks, links, deadline_s)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


class _Meeting:
    """The ranks that have come, and callers of which nothing is known yet: none keeps the others waiting."""

    def __init__(
        self, listening: list[socket.socket], ranks: int, settings: bytes, processes: Mapping[int, int]
    ) -> None:
        self._ranks, self._settings, self._processes = ranks, settings, processes
        self._listening = {each.fileno(): each for each in listening}
        self._callers: dict[int, tuple[socket.socket, bytearray, float]] = {}  # what each said, and how long it may
        self._joined: dict[int, Link] = {}
        self._poll = select.poll()
        for number in (*self._listening, *processes):
            self._poll.register(number, select.POLLIN)

    def all(self, start_s: float) -> dict[int, Link]:
        """The links to all other ranks. GroupEnded if they do not come."""
        now = time.monotonic()
        end, told = now + start_s, now + TELL_S
        while len(self._joined) < self._ranks - 1:
            missing, now = named(range(1, self._ranks), self._joined), time.monotonic()
            if now >= end:
                raise GroupEnded(f"{missing} did not start within {start_s:g} s")
            if now >= told:
                log.warning("waiting for %s, %.0f s more at most", missing, end - now)
                told = now + TELL_S
            for number, (_, _, until) in [*self._callers.items()]:
                if now >= until:
                    self._drop(number)
            wakes = min(end, told, *(until for _, _, until in self._callers.values()))
            for number, _ in self._poll.poll(max(0.0, wakes - now) * 1e3):
                self._look(number)
        return self._joined

    def _look(self, number: int) -> None:
        """At what has something to be read, or has ended."""
        if number in self._processes:
            raise GroupEnded(_ended_early(self._processes[number]))
        if number in self._listening:
            try:
                came, _ = self._listening[number].accept()
            except OSError:  # the caller has gone, or there are no descriptors for now
                return
            if len(self._callers) >= CALLERS:
                self._drop(next(iter(self._callers)))
            self._callers[came.fileno()] = came, bytearray(), time.monotonic() + HELLO_S
            self._poll.register(came.fileno(), select.POLLIN)
        elif number in self._callers:
            self._hear(number)
        else:  # no rank says anything before it is welcome
            for rank, link in self._joined.items():
                if link.fileno() == number:
                    raise GroupEnded(_ended_early(rank))

    def _hear(self, number: int) -> None:
        """Read what a caller says."""
        came, said, _ = self._callers[number]
        try:
            some = came.recv(SAID - len(said), socket.MSG_DONTWAIT)
        except BlockingIOError:  # told of one that had the same number
            return
        except OSError:
            some = b""
        said += some
        if not some:
            self._drop(number)
        elif len(said) >= _HELLO.size:
            self._greet(number, bytes(said))

    def _greet(self, number: int, said: bytes) -> None:
        if len(said) != _HELLO.size or not said.startswith(_MAGIC[:-1]):  # a stranger
            self._drop(number)
            return
        magic, theirs, rank, of = _HELLO.unpack(said)
        try:
            link = Link(self._callers[number][0], HELLO_S)
        except OSError:  # it calls again
            self._drop(number)
            return
        del self._callers[number]
        if magic != _MAGIC or of != self._ranks or theirs != self._settings or not 0 < rank < of:
            why = (
                f"rank {rank} of {of} was given other settings, another model or another number than rank 0 of "
                f"{self._ranks}, or is of another version of kvarve: start all ranks alike"
            )
        elif rank in self._joined:
            why = f"two processes have come as rank {rank}: give every node a --node-rank of its own"
        else:
            self._joined[rank] = link
            return
        _refuse(link, why)
        raise GroupEnded(why)

    def _drop(self, number: int) -> None:
        self._poll.unregister(number)
        self._callers.pop(number)[0].close()

    def refuse(self, why: str) -> None:
        """Tell those that have come that the group does not start."""
        for link in self._joined.values():
            _refuse(link, why)

    def end(self) -> None:
        for number in [*self._callers]:
            self._drop(number)


def _refuse(link: Link, why: str) -> None:
    with suppress(Dead, Late):
        link.send(_MAGIC + why.encode())
    link.close()


def _ended_early(rank: int) -> str:
    return f"rank {rank} has ended before all had come: see what it has printed"


def connect(
    address: Address,
    rank: int,
    ranks: int,
    settings: bytes,
    deadline_s: float,
    start_s: float = START_S,
    processes: Mapping[int, int] = MappingProxyType({}),
) -> Star:
    """Join rank 0's group, and wait until all have. GroupEnded if that takes longer than `start_s`, or rank 0 says
    why not. `processes`: as for `accept`."""
    now = time.monotonic()
    end, told = now + start_s, now + TELL_S
    while True:
        try:
            with ExitStack() as undo:
                called = undo.enter_context(_called(address, min(CALL_S, max(0.05, end - now))))
                called.sendall(_HELLO.pack(_MAGIC, settings, rank, ranks))
                link = Link(called, deadline_s)
                undo.callback(link.close)
                _welcomed(link, address, end, processes)
                undo.pop_all()
                return Star(rank, ranks, {0: link}, deadline_s)
        except (OSError, UnicodeError) as e:  # it is not there yet, or has just ended and will be started again
            now, why = time.monotonic(), getattr(e, "strerror", None) or str(e)
        if now > end:
            raise GroupEnded(f"rank 0 does not answer at {shown(address)}: {why}")
        if now >= told:
            log.warning("waiting for rank 0 at %s, %.0f s more at most: %s", shown(address), end - now, why)
            told = now + TELL_S
        for number, _ in _polled(processes, 0.05):
            raise GroupEnded(_ended_early(processes[number]))


def _welcomed(link: Link, address: Address, end: float, processes: Mapping[int, int]) -> None:
    """Wait until all have come. OSError if rank 0 hangs up without a word."""
    ready = {number for number, _ in _polled((link.fileno(), *processes), end - time.monotonic())}
    if not ready:
        raise GroupEnded(f"rank 0 at {shown(address)} still waits for other ranks: it is too late")
    if link.fileno() not in ready:
        raise GroupEnded(_ended_early(processes[ready.pop()]))
    if link.hung_up():
        raise ConnectionError("it has hung up")
    with suppress(Dead, Late):
        answer = link.receive()
        if answer == WELCOME:
            return
        if answer.startswith(_MAGIC):
            raise GroupEnded(answer[len(_MAGIC) :].decode(errors="replace"))
    raise GroupEnded(f"what answers at {shown(address)} is no rank 0 of kvarve: give --dist-init-addr of node 0")


def _called(address: Address, timeout_s: float) -> socket.socket:
    """A connection to rank 0, at the first of its host's addresses that answers. OSError, UnicodeError: none does."""
    if not isinstance(address, Path):
        return socket.create_connection(address, timeout_s)
    called = socket.socket(socket.AF_UNIX)
    try:
        called.settimeout(timeout_s)
        called.connect(str(address))
    except OSError:
        called.close()
        raise
    return called


def _polled(numbers: Iterable[int], timeout_s: float) -> list[tuple[int, int]]:
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    return poll.poll(max(0.0, timeout_s) * 1e3)


def _bound(address: Address) -> list[socket.socket]:
    """Sockets that listen at the addresses of a host that this machine has. ConfigError: none, or one is taken."""
    found, failed = list[socket.socket](), OSError("the host has no address")
    try:
        if isinstance(address, Path):
            found.append(socket.socket(socket.AF_UNIX))
            found[0].bind(str(address))
            found[0].listen(64)
            return found
        for family, _, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            try:
                found.append(socket.create_server(where, family=family, backlog=64))
            except OSError as e:  # a name may have an address of IPv6 where there is none, or one of another machine
                failed = OSError(e.errno, os.strerror(e.errno or 0))  # without the address, which is said below
                if e.errno == errno.EADDRINUSE:
                    raise failed from None
        if not found:
            raise failed
        return found
    except (OSError, UnicodeError) as e:
        for each in found:
            each.close()
        why = getattr(e, "strerror", None) or e
        raise ConfigError(f"ranks cannot meet at {shown(address)}: {why}; give another address") from None


def shown(address: Address) -> str:
    if isinstance(address, Path):
        return str(address)
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def named(ranks: Iterable[int], but: Iterable[int]) -> str:
    found = [str(rank) for rank in ranks if rank not in {*but}]
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)}"
