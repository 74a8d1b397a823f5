"""Ranks meet at rank 0: all of them or none, and each that comes hears why not."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvarve.errors import ConfigError
from kvarve.ranks import star as star_module
from kvarve.ranks.star import CALLERS, SAID, Address, GroupEnded, Listener, Star, alike, connect

LONG_S = 60.0  # that no test reaches


class Meeting:
    """Rank 0 waits at an address on a thread of its own; other ranks come, each on one of theirs."""

    def __init__(self, address: Address, ranks: int) -> None:
        self.address, self.ranks = address, ranks
        self.listener = Listener([address])
        self._pool = ThreadPoolExecutor(ranks + 1)

    def rank_0(self, settings: str = "a", start_s: float = LONG_S, ends: int | None = None) -> "Joining":
        processes = {} if ends is None else {ends: 1}
        accepted = self.listener.accept
        return Joining(self._pool, lambda: accepted(self.ranks, alike(settings), LONG_S, start_s, processes))

    def rank(self, rank: int, settings: str = "a", ends: int | None = None) -> "Joining":
        processes = {} if ends is None else {ends: 3}
        return Joining(
            self._pool, lambda: connect(self.address, rank, self.ranks, alike(settings), LONG_S, LONG_S, processes)
        )

    def close(self) -> None:
        self.listener.close()
        self._pool.shutdown()


class Joining:
    """One rank's call, and how it ends."""

    def __init__(self, pool: ThreadPoolExecutor, call: "object") -> None:
        self._ending = pool.submit(call)  # type: ignore[arg-type,var-annotated]

    def joined(self) -> Star:
        star: Star = self._ending.result(LONG_S)
        return star

    def refused(self) -> str:
        with pytest.raises(GroupEnded) as e:
            self.joined()
        return str(e.value)

    def waits(self) -> bool:
        return not self._ending.done()


def all_join(*joining: Joining) -> None:
    stars = [each.joined() for each in joining]
    assert sorted(star.rank for star in stars) == [*range(len(joining))]
    for star in stars:
        star.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Meeting]:
    meeting = Meeting(tmp_path / "meeting", 3)
    yield meeting
    meeting.close()


def calling(address: Address) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(LONG_S)
    while True:
        try:
            caller.connect(str(address))
            return caller
        except BlockingIOError:  # so many others have called
            threading.Event().wait(0.001)


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """What can be read once a process has ended, and what its end closes."""
    pair = os.pipe()
    yield pair
    for each in pair:
        try:
            os.close(each)
        except OSError:
            continue


def test_none_has_joined_before_all_have_come_however_far_apart(three: Meeting) -> None:
    first, second = three.rank_0(), three.rank(2)
    read_so_far(three)
    assert first.waits() and second.waits()
    all_join(first, three.rank(1), second)


def read_so_far(meeting: Meeting) -> None:
    """Rank 0 has read all that came before: it hangs up on a stranger that comes last."""
    with calling(meeting.address) as caller:
        caller.sendall(bytes(SAID))
        assert caller.recv(1) == b""


def a_rank(meeting: Meeting, rank: int, of: int = 3) -> socket.socket:
    """A rank that has come, and waits."""
    caller = calling(meeting.address)
    caller.sendall(star_module._HELLO.pack(b"kvranks3", alike("a"), rank, of))
    return caller


def test_ranks_with_other_settings_form_no_group_and_all_hear_why(three: Meeting) -> None:
    first = three.rank_0()
    with a_rank(three, 1) as second:
        read_so_far(three)
        words = [each.refused() for each in (first, three.rank(2, settings="b"))]
        assert "rank 2 of 3 was given other settings" in words[0] == words[1]
        assert words[0].encode() in second.recv(SAID)


def test_two_that_come_as_one_rank_hear_so(three: Meeting) -> None:
    words = [each.refused() for each in (three.rank_0(), three.rank(1), three.rank(1))]
    assert "two processes have come as rank 1" in words[0]
    assert words[0] in words[1:]


def test_strangers_that_say_nothing_or_do_not_end_keep_no_rank_waiting(
    three: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(star_module, "HELLO_S", 10 * LONG_S)
    with ExitStack() as strangers:
        first = three.rank_0()
        for number in range(CALLERS + 8):
            stranger = strangers.enter_context(calling(three.address))
            stranger.sendall(b"\xff" * number)
        all_join(first, three.rank(1), three.rank(2))


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n".ljust(SAID), b"\xff" * SAID, b"kvranks3".ljust(SAID), bytes(SAID)],
    ids=["http", "long", "short", "zeros"],
)
def test_a_stranger_is_hung_up_on(three: Meeting, said: bytes) -> None:
    first = three.rank_0(start_s=LONG_S)
    with calling(three.address) as stranger:
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    assert first.waits()
    all_join(first, three.rank(1), three.rank(2))


def test_a_rank_that_never_starts_is_named_to_all_and_in_the_log(
    three: Meeting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(star_module, "TELL_S", 0.01)
    first = three.rank_0(start_s=0.3)
    with a_rank(three, 1) as second:
        said = first.refused()
        # A slow machine may not have read what rank 1 has said.
        assert said in ("rank 2 did not start within 0.3 s", "ranks 1, 2 did not start within 0.3 s")
        assert said.encode() in second.recv(SAID) or said.startswith("ranks 1")
    assert "waiting for rank" in caplog.text


def test_a_rank_0_that_ends_without_a_word_is_called_again(tmp_path: Path) -> None:
    """Its service starts it again, while the other ranks call already."""
    with socket.socket(socket.AF_UNIX) as before, ThreadPoolExecutor(1) as pool:
        before.bind(str(tmp_path / "meeting"))
        before.listen()
        joining = Joining(pool, lambda: connect(tmp_path / "meeting", 1, 2, alike("a"), LONG_S, LONG_S))
        before.accept()[0].close()
        (tmp_path / "meeting").unlink()
        meeting = Meeting(tmp_path / "meeting", 2)
        all_join(meeting.rank_0(), joining)
        meeting.close()


def test_a_process_that_ends_before_it_has_joined_ends_the_wait(three: Meeting, ends: tuple[int, int]) -> None:
    first = three.rank_0(start_s=10 * LONG_S, ends=ends[0])
    os.close(ends[1])
    assert "rank 1 has ended before all had come" in first.refused()


def test_a_rank_that_ends_when_it_has_joined_ends_the_wait(three: Meeting) -> None:
    first = three.rank_0(start_s=10 * LONG_S)
    a_rank(three, 2).close()
    assert "rank 2 has ended before all had come" in first.refused()


@pytest.mark.parametrize("called", [True, False], ids=["joins", "calls"])
def test_a_rank_that_waits_for_rank_0_ends_with_a_process_that_it_has_started(
    three: Meeting, ends: tuple[int, int], called: bool
) -> None:
    if not called:
        three.listener.close()
    second = three.rank(2, ends=ends[0])
    os.close(ends[1])
    assert "rank 3 has ended before all had come" in second.refused()


def test_what_answers_in_place_of_rank_0_is_no_rank_0(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, ThreadPoolExecutor(1) as pool:
        server.bind(str(tmp_path / "meeting"))
        server.listen()
        joining = Joining(pool, lambda: connect(tmp_path / "meeting", 1, 2, alike("a"), LONG_S, LONG_S))
        answering, _ = server.accept()
        answering.recv(star_module._HELLO.size, socket.MSG_WAITALL)
        answering.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        answering.close()
        assert "is no rank 0 of kvarve" in joining.refused()


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_meet_at_addresses_of_either_kind(host: str) -> None:
    meeting = Meeting((host, free_port(host)), 2)
    all_join(meeting.rank_0(), meeting.rank(1))
    meeting.close()


def test_a_name_may_have_addresses_that_no_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of IPv6 on a machine without it."""
    known, stream = socket.getaddrinfo, socket.SOCK_STREAM

    def resolved(host: str, port: int, *_: int, **__: int) -> list[object]:
        assert host == "node-0"
        return [*known("2001:db8::1", port, type=stream), *known("127.0.0.1", port, type=stream)]

    port = free_port("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    meeting = Meeting(("node-0", port), 2)
    all_join(meeting.rank_0(), meeting.rank(1))
    meeting.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known("2001:db8::1", port, type=stream))
    with pytest.raises(ConfigError, match="ranks cannot meet at node-0"):
        Listener([("node-0", port)])


def test_an_address_that_is_taken_is_one_clear_error(three: Meeting) -> None:
    with pytest.raises(ConfigError, match="ranks cannot meet at"):
        Listener([three.address])
