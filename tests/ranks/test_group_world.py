"""The ranks' own protocol in random lives of two to eight ranks, on a clock and a network of the World's: frames that
are late or lost, ranks that stop, die or decide otherwise. It ends in time, with the name of the rank at fault."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvarve.core.copies.effects import Began, Ended, Event
from kvarve.ranks.agreement import AgreedStep, Proposal
from kvarve.ranks.group import ALL, Group
from kvarve.ranks.star import GroupEnded
from tests.sim.world.network import Network

DEADLINE_S, TURNS = 1.0, 40
WORK_S = 0.01  # of a turn, at most
FAULTS = ("stops", "dies", "loses reports", "loses inputs", "is late", "decides otherwise", "fails")
# What a rank needs to notice, once the others turn to it: their deadline, and a few turns and frames.
NOTICED_S = ALL * DEADLINE_S + 0.5


@dataclass
class Life:
    """One life: what each rank heard, and when it ended."""

    seed: int
    fault: str | None = None
    heard: list[list[AgreedStep]] = field(default_factory=list)
    ended_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        self.ranks = dice.randint(2, 8)
        self.network = Network(self.ranks, self.seed, DEADLINE_S)
        self.guilty, self.at = dice.randrange(self.ranks), dice.randrange(2, TURNS - 4)
        if self.fault in ("loses reports", "loses inputs", "is late"):  # rank 0 has no link to itself
            self.guilty = max(1, self.guilty)
        self.waiting = [dice.random() < 0.6 for _ in range(TURNS)]
        self.waiting[-3:] = [True] * 3  # at last all that happened is told, and any fault is met
        self.heard = [[] for _ in range(self.ranks)]
        self.fault_s = 0.0

    def play(self) -> list[object]:
        print(f"seed {self.seed}: {self.ranks} ranks, rank {self.guilty} {self.fault} in turn {self.at}")
        return self.network.run(self._rank)

    def _rank(self, rank: int) -> str:
        group, dice = Group(self.network.stars[rank]), random.Random(self.seed * 100 + rank)
        events = {op: dice.randrange(TURNS - 4) for op in range(30)}
        try:
            for turn in range(TURNS):
                self.network.wait(rank, lambda: False, dice.random() * WORK_S)
                if turn == self.at and rank == self.guilty and self.fault:
                    self._fail(rank, group)
                news: list[Event] = [Ended(op, dice.getrandbits(8), 0) for op, at in events.items() if at == turn]
                news += [Began(op) for op, at in events.items() if at == turn + 2 and op % 2]
                news = [event for event in news if dice.random() < 0.5 or not group.happened(event)]
                if not rank and self.waiting[turn]:
                    group.wait(dice.random() * WORK_S, lambda: False)
                up, wish = dice.random() < 0.8, Proposal("attach") if turn % 7 < 3 else None
                waiting = self.waiting[turn]
                says = b"" if rank else b"turn %d" % turn
                step = group.agree(news, self.network.now, up, wish, waiting=waiting, says=says)
                self.heard[rank].append(step)
                group.note(b"%d" % turn)
            return "done"
        finally:
            self.ended_s[rank] = self.network.now
            group.close()

    def _fail(self, rank: int, group: Group) -> None:
        network, self.fault_s = self.network, self.network.now
        if self.fault == "stops":
            network.stopped.add(rank)
            network.wait(rank, lambda: False, 0.0)
        elif self.fault == "dies":
            raise KeyboardInterrupt
        elif self.fault == "loses reports":
            network.lost.add((rank, 0))
        elif self.fault == "loses inputs":
            network.lost.add((0, rank))
        elif self.fault == "is late":
            network.slow[rank, 0] = 10 * DEADLINE_S
        elif self.fault == "decides otherwise":
            group.note(b"something else")
        else:
            raise GroupEnded(group.fail("out of memory"))


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_hear_the_same_each_event_once_whatever_order_frames_come_in(seed: int) -> None:
    life = Life(seed)
    assert life.play() == ["done"] * life.ranks
    assert all(heard == life.heard[0] for heard in life.heard)
    ends = Counter(event.op for step in life.heard[0] for event in step.events if isinstance(event, Ended))
    assert ends == Counter(range(30))
    assert all(step.said == b"turn %d" % turn for turn, step in enumerate(life.heard[0]))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_at_fault_ends_all_in_time_by_its_name(seed: int, fault: str) -> None:
    life = Life(seed, fault)
    found = life.play()
    for rank, end in enumerate(found):
        if rank == life.guilty:
            continue
        assert isinstance(end, GroupEnded), (rank, end)
        culprit = life.guilty
        if fault == "decides otherwise" and not culprit:
            assert "differ from rank 0's" in str(end), "rank 0 is what others are compared with"
        else:
            assert str(end).startswith(f"rank {culprit}: "), (rank, str(end))
        assert life.ended_s[rank] - life.fault_s < NOTICED_S + TURNS * WORK_S, (rank, life.ended_s[rank], life.fault_s)
    shortest = min(map(len, life.heard))
    assert all(heard[:shortest] == life.heard[0][:shortest] for heard in life.heard), (
        "what was agreed was agreed by all"
    )
