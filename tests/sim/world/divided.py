"""A world whose cores hear of copies by the ranks' own protocol (`ranks/group.py`), over the World's network.

Each rank tells its own outcome of each copy, some the moment that it happens and some in its report, in an order and
after a time of its own; frames of different links come in any order.
"""

import random
from collections.abc import Sequence

from kvarve.core.copies.effects import Began, Event, Outcome
from kvarve.core.core_config import CoreConfig
from kvarve.ranks.agreement import AgreedStep
from kvarve.ranks.group import Group
from tests.sim.world.network import Network
from tests.sim.world.world import World

DEADLINE_S = 60.0  # that no turn comes near
APART_S = 0.002  # between events of a rank, at most


class DividedWorld(World):
    def __init__(self, config: CoreConfig, ranks: int, seed: int) -> None:
        self._network = Network(ranks, seed, DEADLINE_S)
        self._groups = [Group(star) for star in self._network.stars]
        self._dice = [random.Random(f"{seed} {rank}") for rank in range(ranks)]
        self._own: dict[tuple[type, int], Sequence[Event]] = {}  # by an outcome of all: what each rank says of it
        super().__init__(config=config, ranks=ranks)

    def _told(self, told: Sequence[Outcome]) -> Outcome:
        together = super()._told(told)
        self._own[type(together), together.op] = told
        return together

    def _heard(self, events: Sequence[Event]) -> Sequence[Event]:
        unique = {(type(event), event.op): event for event in events}
        told = [self._own.pop(what, [event] * len(self._groups)) for what, event in unique.items()]
        # Now and then rank 0 waits for no report.
        waiting = bool(told) or self._dice[0].random() < 0.5

        def turn(rank: int) -> object:
            dice, group = self._dice[rank], self._groups[rank]
            news = [each[rank] for each in told]
            dice.shuffle(news)
            late = list[Event]()
            for event in news:
                self._network.wait(rank, lambda: False, dice.random() * APART_S)
                if late or dice.random() < 0.5 or not group.happened(event):
                    late.append(event)
            step = group.agree(late, self.now + rank, waiting=waiting, says=b"" if rank else b"%d" % self.steps)
            group.note(b"%d" % len(self.log))
            return step

        step, *others = self._network.run(turn)
        for each in (step, *others):
            if isinstance(each, BaseException):
                raise each
        assert isinstance(step, AgreedStep) and all(other == step for other in others), "all ranks hear the same"
        assert (step.now, step.said) == (self.now, b"%d" % self.steps), "all go by rank 0's time and inputs"
        heard = step.events
        outcomes = {(type(event), event.op): event for event in heard if not isinstance(event, Began)}
        wanted = {what: event for what, event in unique.items() if not isinstance(event, Began)}
        assert outcomes == wanted, "a copy has ended when it has on every rank, with what is good on all"
        self.seen["turns without an exchange"] += not waiting
        return heard
