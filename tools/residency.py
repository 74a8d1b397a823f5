"""Where pages are found in random lives of the core, and what happens to them there: the residency table of the docs.

Every change of a page's residency is recorded where it is made, with the operation under way, so the table shows what
the code does, not what it was meant to do.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvarve.core.copies.backups import Backups
from kvarve.core.copies.in_flight import BACKUP, Op, PartOutcome
from kvarve.core.core import Core
from kvarve.core.requests.growth import Growth
from kvarve.core.requests.prefetch import Prefetch
from kvarve.core.requests.resume import Resumption
from kvarve.core.tree.tree import Run, upward
from kvarve.pages.boundaries import members, ones, span

sys.path.append(str(Path(__file__).parents[1]))
from tests.sim.world import born, live

LIVES, STEPS = range(120), 250
EVENTS = ("publish", "load", "backup", "store", "fetch", "leaves device", "leaves host")

Where = tuple[bool, bool, bool]  # on the device, in the host, known to be in storage


class Watch:
    """The events of pages of chains, and of windows and states."""

    def __init__(self) -> None:
        self.seen: dict[tuple[bool, Where], set[str]] = defaultdict(set)
        self._doing = [""]
        self._core: Core | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record what every core does in this context."""
        changes = {
            (Run, "put"): lambda run, place, local, slots: (run, place, local, True),
            (Run, "take"): lambda run, place, position: (run, place, 1 << position - run.first, False),
            (Run, "take_tail"): lambda run, place, local: (run, place, span(local, run.pages), False),
        }
        causes = {
            (Growth, "publish"): lambda growth, *rest: "publish",
            (Resumption, "_loaded"): lambda resumption, *rest: "load",
            (Prefetch, "arrived"): lambda prefetch, *rest: "fetch",
            (Prefetch, "land"): lambda prefetch, *rest: "fetch",
            (Backups, "ended"): lambda backups, op, *rest: "backup" if op.edge == BACKUP else "store",
        }
        with patch.multiple(Run, **{name: self._change(Run, name, of) for (_, name), of in changes.items()}):
            stack = [patch.object(kind, name, self._cause(kind, name, of)) for (kind, name), of in causes.items()]
            for each in stack:
                each.start()
            try:
                yield
            finally:
                for each in stack:
                    each.stop()

    def _change(self, kind: type, name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(kind, name)

        def changed(run: Run, *args: Any) -> Any:
            _, place, positions, comes = of(run, *args)
            pools = len(run.stored)
            tier, pool = divmod(place, pools)
            event = self._doing[-1] if comes else ("leaves device", "leaves host")[tier]
            for local in members(positions):
                if comes or run.here[place] >> local & 1:
                    self.note(run, pool, local, event)
            return original(run, *args)

        return changed

    def _cause(self, kind: type, name: str, of: Callable[..., str]) -> Callable[..., Any]:
        original = getattr(kind, name)

        def caused(*args: Any) -> Any:
            self._doing.append(of(*args))
            try:
                if self._doing[-1] == "store":
                    self._stores(*args)
                return original(*args)
            finally:
                self._doing.pop()

        return caused

    def _stores(self, backups: Backups, op: Op, tail: Run, outcomes: list[PartOutcome]) -> None:
        for part, good, _ in outcomes if not op.void else ():
            for run, stored in upward(tail, good):
                for local in members(stored & ones(run.pages)):
                    self.note(run, part.pool, local, "store")

    def note(self, run: Run, pool: int, local: int, event: str) -> None:
        pools = len(run.stored)
        where = (
            bool(run.here[pool] >> local & 1),
            bool(run.here[pools + pool] >> local & 1),
            bool(run.stored[pool] >> local & 1),
        )
        self.seen[self.chains[pool], where].add(event)

    def live(self, seed: int) -> None:
        life, dice = born(seed)
        self.chains = [pool["lookback"] is None for pool in life.config["pools"]]
        live(life, dice, STEPS)


def table() -> str:
    watch = Watch()
    with watch.on():
        for seed in LIVES:
            watch.live(seed)
    lines = ["| device | host | storage | a page of a chain | a page of a window or state |", "|---|---|---|---|---|"]
    for where in sorted(product((True, False), repeat=3), reverse=True):
        cells = ["■" if there else "·" for there in where]
        for chain in (True, False):
            events = watch.seen.get((chain, where), set())
            cells.append(", ".join(event for event in EVENTS if event in events) or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
