"""Random lives of two to eight ranks over real sockets: whatever comes when, all hear the same, and each thing once."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import and_, or_
from typing import Any

import pytest

from kvarve.core.effects import Began, Ended, Event, Verified
from kvarve.ranks.agreement import AgreedStep, Proposal
from kvarve.ranks.group import Group
from kvarve.ranks.star import GroupEnded, Link, Star

LONG_S, SHORT_S = 60.0, 0.3
PAGES = 12  # of a copy


class Life:
    """Copies that begin, are checked and end on each rank in turns of its own, and what all ranks were told of it."""

    def __init__(self, seed: int, deadline_s: float = LONG_S) -> None:
        self.dice = random.Random(seed)
        self.ranks = self.dice.randint(2, 8)
        pairs = [socket.socketpair() for _ in range(1, self.ranks)]
        near = {rank: Link(mine, deadline_s) for rank, (mine, _) in enumerate(pairs, 1)}
        self.stars = [Star(0, self.ranks, near, deadline_s)]
        for rank, (_, theirs) in enumerate(pairs, 1):
            self.stars.append(Star(rank, self.ranks, {0: Link(theirs, deadline_s)}, deadline_s))
        self.groups = [Group(star) for star in self.stars]
        self.threads = ThreadPoolExecutor(self.ranks)
        self.copies = 0
        self.left: list[dict[int, list[Event]]] = [{} for _ in range(self.ranks)]  # what is still to happen on a rank
        self.ends: dict[int, list[Ended]] = {}  # of copies that not all ranks were told of, on each rank
        self.down = set[int]()
        self.wishes: list[Proposal | None] = [None] * self.ranks

    def begin(self) -> None:
        """A copy is ordered on all ranks alike; what it finds, and when, is each rank's own."""
        op, self.copies = self.copies, self.copies + 1
        self.ends[op] = []
        for left in self.left:
            good, whole = self.dice.getrandbits(PAGES), (1 << PAGES) - 1
            good = whole if self.dice.random() < 0.7 else good
            bad = whole & ~good & self.dice.getrandbits(PAGES)
            events: list[Event] = [Began(op), Verified(op, good, bad), Ended(op, good, bad)]
            left[op] = events if self.dice.random() < 0.5 else events[2:]
            self.ends[op].append(Ended(op, good, bad))

    def news(self, rank: int) -> list[Event]:
        """What has happened on a rank since its last turn: any of the copies may be next."""
        found = list[Event]()
        for op in self.dice.sample(sorted(self.left[rank]), len(self.left[rank])):
            if self.dice.random() < 0.4:
                found.append(self.left[rank][op].pop(0))
                if not self.left[rank][op]:
                    del self.left[rank][op]
        return found

    def turn(self, but: int | None = None) -> list[AgreedStep | GroupEnded]:
        if self.dice.random() < 0.5:
            self.begin()
        if self.dice.random() < 0.2:
            self.down ^= {self.dice.randrange(self.ranks)}
        if self.dice.random() < 0.2:
            wish = self.dice.choice([None, Proposal("attach"), Proposal("detach"), Proposal("", ready=False)])
            some = range(self.ranks) if self.dice.random() < 0.5 else [self.dice.randrange(self.ranks)]
            for rank in some:
                self.wishes[rank] = wish
        says = self.dice.randbytes(self.dice.choice([0, 5, 600]))
        waiting = bool(self.ends)

        def agree(rank: int, news: list[Event]) -> AgreedStep | GroupEnded:
            try:
                self.groups[rank].note(b"the same")
                more: dict[str, Any] = {"waiting": waiting, "says": b"" if rank else says}
                return self.groups[rank].agree(news, float(rank), rank not in self.down, self.wishes[rank], **more)
            except GroupEnded as e:
                return e

        ranks = [rank for rank in range(self.ranks) if rank != but]
        asked = [self.threads.submit(agree, rank, self.news(rank)) for rank in ranks]
        return [each.result(LONG_S) for each in asked]

    def told(self, step: AgreedStep) -> None:
        """Each end is told once, when it has come on all ranks: as good as on the worst of them."""
        for event in step.events:
            if isinstance(event, Ended):
                ends = self.ends.pop(event.op)
                assert not any(event.op in left for left in self.left), "it has not come on all ranks"
                good = reduce(and_, (each.good for each in ends))
                bad = reduce(or_, (each.bad for each in ends))
                assert (event.good & ~bad, event.bad) == (good & ~bad, bad)

    def close(self) -> None:
        for star in self.stars:
            star.close()
        self.threads.shutdown()


def live(life: Life, turns: int) -> None:
    for _ in range(turns):
        steps = life.turn()
        assert all(step == steps[0] for step in steps), steps
        assert isinstance(steps[0], AgreedStep)
        life.told(steps[0])


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_hear_the_same_and_each_end_once(seed: int) -> None:
    life = Life(seed)
    try:
        live(life, 100)
        assert life.copies > 25
    finally:
        life.close()


@pytest.mark.parametrize("how", ["dies", "stops", "decides otherwise"])
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_that_cannot_go_on_is_named_by_all_others_whenever_that_is(seed: int, how: str) -> None:
    life = Life(100 + seed, SHORT_S if how == "stops" else LONG_S)
    try:
        live(life, life.dice.randint(1, 60))
        guilty = life.dice.randrange(1, life.ranks)
        if how == "decides otherwise":
            life.groups[guilty].note(b"something else")
        if how == "dies":
            life.stars[guilty].close()
        but = guilty if how != "decides otherwise" else None
        for _ in range(200):
            found = life.turn(but)
            if all(isinstance(each, GroupEnded) for each in found):
                break
        said = {str(each) for each in found}
        assert said and all(f"rank {guilty}: it" in each for each in said), said
    finally:
        life.close()
