"""What ranks tell each other over real sockets: one exchange where something is in flight, and who ends the group."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvarve.core.copies.effects import Began, Ended, Event, Refusal, Verified
from kvarve.ranks.agreement import AgreedStep, Proposal
from kvarve.ranks.group import BEGUN_S, Group
from kvarve.ranks.star import MOST, Dead, GroupEnded, Late, Link, Star

TURNS = 10_000  # of which a few are needed, more on a machine that is slow to pass on what a rank sends
LONG_S, SHORT_S = 60.0, 0.2  # a deadline that no test reaches, and one that some wait for


class Ranks:
    """The groups of several ranks, each on a thread of its own while it agrees."""

    def __init__(self, ranks: int, deadline_s: float = LONG_S) -> None:
        self.pairs = [socket.socketpair() for _ in range(ranks - 1)]
        near = {rank: Link(mine, deadline_s) for rank, (mine, _) in enumerate(self.pairs, 1)}
        stars = [Star(0, ranks, near, deadline_s)]
        for rank, (_, theirs) in enumerate(self.pairs, 1):
            stars.append(Star(rank, ranks, {0: Link(theirs, deadline_s)}, deadline_s))
        self.stars, self.groups = stars, [Group(star) for star in stars]

    def each(self, what: Callable[[int, Group], AgreedStep], but: int | None = None) -> list[AgreedStep | GroupEnded]:
        """What every rank's call returned or raised; `but` one rank, which does nothing."""
        said: dict[int, AgreedStep | GroupEnded] = {}

        def run(rank: int) -> None:
            try:
                said[rank] = what(rank, self.groups[rank])
            except GroupEnded as e:
                said[rank] = e

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.groups)) if rank != but]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        return [said[rank] for rank in sorted(said)]

    def turn(
        self, waiting: bool = True, says: bytes = b"", **of: tuple[list[Event], bool, Proposal | None]
    ) -> AgreedStep:
        """A turn that all ranks take alike; `r1` says what rank 1 has to say."""

        def agree(rank: int, group: Group) -> AgreedStep:
            events, up, proposal = of.get(f"r{rank}", ([], True, None))
            return group.agree(events, 100.0 * rank, up, proposal, waiting=waiting, says=b"" if rank else says)

        found = self.each(agree)
        assert all(each == found[0] for each in found), found
        assert isinstance(found[0], AgreedStep)
        return found[0]

    def close(self) -> None:
        for star in self.stars:
            star.close()


@pytest.fixture
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture
def impatient() -> Iterator[Ranks]:
    ranks = Ranks(3, SHORT_S)
    yield ranks
    ranks.close()


def test_an_event_is_one_of_all_ranks_once_it_has_happened_on_each(three: Ranks) -> None:
    pages = (1 << 300) - 1
    assert three.turn(r0=([Began(7)], True, None)).events == []
    assert three.turn(r1=([Verified(7, pages)], True, None)).events == []
    assert three.turn(r2=([Ended(7, pages ^ 4, 4)], True, None)).events == [Began(7)]
    step = three.turn(r0=([Verified(7, pages)], True, None), r1=([Ended(7, pages)], True, None))
    assert step.events == []
    assert three.turn(r0=([Ended(7, pages)], True, None)).events == [Ended(7, pages ^ 4, 4)]


def test_events_of_one_turn_are_told_in_one_order_whatever_order_they_came_in(three: Ranks) -> None:
    for op in (10, 20):
        ends = [Ended(op + 1, 1), Ended(op, 1)]
        said = {f"r{rank}": (ends[:: 1 - 2 * (rank % 2)], True, None) for rank in range(3)}
        assert three.turn(**said).events == ends[::-1]


def test_why_a_storage_of_one_rank_refused_pages_is_known_to_all(three: Ranks) -> None:
    refused = Ended(7, 1, refused=Refusal.FULL)
    step = three.turn(r0=([Ended(7, 3)], True, None), r1=([refused], True, None), r2=([Ended(7, 3)], True, None))
    assert step.events == [refused]


def never() -> bool:
    return False


@pytest.mark.parametrize("last", [0, 1, 2])
def test_rank_0_sleeps_until_an_event_has_happened_on_every_rank(three: Ranks, last: int) -> None:
    for rank in {0, 1, 2} - {last}:
        assert three.groups[rank].happened(Ended(7, 1))
    assert not three.groups[0].wait(0.01, never)
    exchanges = [group.exchanges for group in three.groups]
    thread = threading.Thread(target=three.groups[last].happened, args=(Ended(7, 1),))
    thread.start()
    assert three.groups[0].wait(LONG_S, never)
    thread.join()
    assert [group.exchanges for group in three.groups] == exchanges, "no rank was asked"
    assert three.turn().events == [Ended(7, 1)]
    assert three.turn().events == []


def test_what_has_only_begun_waits_a_moment_for_other_events(three: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    star, patience_s, late = three.stars[0], list[float](), [Ended(7, 1)]
    ready = star.ready

    def tell(event: Event) -> None:
        for group in three.groups:
            assert group.happened(event)

    def sleeps(timeout_s: float) -> list[int]:
        patience_s.append(timeout_s)
        return ready(timeout_s)

    def sleeps_until_told(timeout_s: float) -> list[int]:
        tell(late.pop()) if late else None
        return ready(timeout_s)

    monkeypatch.setattr(star, "ready", sleeps)
    tell(Began(7))
    assert three.groups[0].wait(LONG_S, never), "a turn is due, if a late one"
    assert 0.0 <= patience_s[-1] <= BEGUN_S + 1e-6, "but for rounding, which differs with the machine's uptime"
    monkeypatch.setattr(star, "ready", sleeps_until_told)
    assert three.groups[0].wait(LONG_S, never)
    assert not late
    assert three.turn().events == [Began(7), Ended(7, 1)], "both in one turn"


def test_whoever_wakes_rank_0_ends_its_wait(three: Ranks) -> None:
    woken = threading.Event()

    def wake() -> None:
        woken.set()
        three.groups[0].wake()

    thread = threading.Thread(target=wake)
    thread.start()
    assert three.groups[0].wait(LONG_S, woken.is_set)
    thread.join()
    for _ in range(20_000):  # nobody hears it
        three.groups[0].wake()
    assert three.turn(says=b"x").said == b"x"


def test_a_report_that_comes_while_rank_0_sleeps_is_of_the_next_turn(three: Ranks) -> None:
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(group.agree, [Ended(7, 1)], 0.0) for group in three.groups[1:]]
        assert not three.groups[0].wait(0.05, never)
        assert three.groups[0].agree([Ended(7, 1)], 5.0) == AgreedStep([Ended(7, 1)], 5.0)
        assert [each.result(LONG_S).events for each in others] == [[Ended(7, 1)]] * 2


def test_what_happened_to_the_cache_before_is_no_event_of_this_one(three: Ranks) -> None:
    before, three.groups = three.groups, [Group(star) for star in three.stars]
    assert before[1].happened(Ended(7, 1)) and before[2].happened(Ended(7, 1))
    assert three.turn(r0=([Ended(7, 2)], True, None)).events == []
    assert three.groups[1].happened(Ended(7, 2)) and three.groups[2].happened(Ended(7, 2))
    assert three.groups[0].wait(LONG_S, never)
    assert three.turn().events == [Ended(7, 2)]


def test_what_a_rank_said_unasked_in_the_last_turn_of_a_group_is_not_for_the_next(three: Ranks) -> None:
    three.turn()
    three.turn()
    for rank in (0, 2, 1):  # rank 0 has looked before it came
        three.groups[rank].agree([Ended(7, 1)] if rank == 1 else [], 0.0, up=rank != 1, waiting=False)
    three.groups = [Group(star) for star in three.stars]
    ended = [Ended(7, 2)], True, None
    assert three.turn(r0=ended, r1=ended, r2=ended).events == [Ended(7, 2)] and three.turn().up


def test_a_lane_waits_for_no_rank_that_is_gone_or_reads_nothing(three: Ranks) -> None:
    pages = (1 << 900) - 1
    for op in range(400):  # more than a socket holds
        for group in three.groups:
            assert group.happened(Began(op)) and group.happened(Ended(op, pages))
    told = three.turn().events
    assert [event for event in told if isinstance(event, Ended)] == [Ended(op, pages) for op in range(400)]
    assert three.turn().events == []
    three.stars[0].close()
    for op in range(400):
        assert three.groups[1].happened(Ended(op, 1))
    three.groups[0].wake()
    assert three.groups[0].wait(0.0, never)
    found = ends(three.each(lambda _, group: group.agree([], 0.0), but=0))
    assert all("rank 0: it is dead" in each for each in found), found


def test_nothing_is_sent_or_read_after_a_part_of_a_frame() -> None:
    ours, theirs = socket.socketpair()
    with closing(Link(ours, SHORT_S)) as link, theirs:
        theirs.send(struct.pack("!i", 40) + b"half a frame")
        with pytest.raises(Late):
            link.receive()
        theirs.send(bytes(1024))
        with pytest.raises(Dead):
            link.receive()
        with pytest.raises(Dead):
            link.send(b"x")


@pytest.mark.parametrize("head", [struct.pack("!i", MOST + 1), struct.pack("!iQ", -1, 1 << 40), b"GET / HTTP/1.1"])
def test_a_frame_that_is_too_long_is_none(head: bytes) -> None:
    ours, theirs = socket.socketpair()
    with closing(Link(ours, LONG_S)) as link, theirs:
        theirs.send(head)
        with pytest.raises(Dead):
            link.receive()


def test_a_turn_with_nothing_in_flight_waits_for_no_rank(three: Ranks) -> None:
    three.turn()
    before = [group.exchanges for group in three.groups]
    for _ in range(5):
        three.turn(waiting=False)
    assert [group.exchanges for group in three.groups] == before
    assert three.stars[0].ready(0) == [], "no rank has sent anything"


def test_what_only_one_rank_knows_reaches_all_with_the_next_inputs(three: Ranks) -> None:
    three.turn()
    down: tuple[list[Event], bool, None] = ([], False, None)
    assert any(not three.turn(waiting=False, r2=down).up for _ in range(TURNS)), "as soon as rank 0 has read it"
    assert any(three.turn(waiting=False).up for _ in range(TURNS))


def test_a_change_is_made_in_an_exchange_in_which_all_ranks_propose_it(three: Ranks) -> None:
    three.turn()
    asked: tuple[list[Event], bool, Proposal] = ([], True, Proposal("attach"))
    assert {three.turn(waiting=False, r1=asked, r2=asked).granted for _ in range(3)} == {None}
    decided = (three.turn(waiting=False, r0=asked, r1=asked, r2=asked).granted for _ in range(TURNS))
    assert next(each for each in decided if each is not None) is True
    no: tuple[list[Event], bool, Proposal] = ([], True, Proposal("", ready=False))
    decided = (three.turn(waiting=False, r0=asked, r1=no, r2=asked).granted for _ in range(TURNS))
    assert next(each for each in decided if each is not None) is False


def ends(found: list[AgreedStep | GroupEnded]) -> set[str]:
    assert all(isinstance(each, GroupEnded) for each in found), found
    return {str(each) for each in found}


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_ranks_that_wait_for_one_that_fails_meanwhile_hear_why(three: Ranks, fails: int) -> None:
    def assemble(rank: int, group: Group) -> AgreedStep:
        if rank == fails:
            return _failed(group, "its weights are damaged")
        if rank == 1:  # it loads until the others have heard
            group._star.ready(LONG_S)
        group.assemble(LONG_S)
        return group.agree([], 0.0)

    found = three.each(assemble)
    assert len(found) == 3 and ends(found) == {f"rank {fails}: its weights are damaged"}


def test_what_a_rank_has_said_before_a_sum_is_no_sign_of_life_in_it(impatient: Ranks) -> None:
    """Rank 1 tells in turn 3, in which nothing is in flight, that its storage is down, and stops."""
    impatient.turn()
    impatient.turn()
    for rank in (0, 2, 1):  # rank 0 has looked before it came
        impatient.groups[rank].agree([], 0.0, up=rank != 1, waiting=False)
    found = {str(each) for each in impatient.each(lambda _, group: _failed(group, "the sum", stuck=True), but=1)}
    assert all("rank 1: it is late" in each and "the sum" not in each for each in found), found


def _failed(group: Group, why: str, stuck: bool = False) -> AgreedStep:
    raise GroupEnded(group.fail(why, stuck))


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x09" * 40, b"\xff" * 512])
def test_what_is_no_report_ends_the_group_with_a_message(three: Ranks, frame: bytes) -> None:
    three.stars[2].links[0].send(frame)
    found = ends(three.each(lambda _, group: group.agree([], 0.0), but=2))
    assert all("rank 2" in each for each in found), found
