"""Delta debugging: shrink a failing life to the shortest list of actions that fails in the same place."""

import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from tests.sim.world.life import Action, Life, act, finish

HANG_S = 20.0  # CPU seconds; no life takes that long


class Hung(AssertionError):
    """A life that does not end."""


@contextmanager
def bounded(seconds: float = HANG_S) -> Iterator[None]:
    """Raise `Hung` after `seconds` of CPU time. In the main thread only, where signals arrive."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hung(f"still busy after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True)
class Trouble:
    """How a life failed: equal `place`, equal kind of failure; `text` is the traceback."""

    place: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Trouble":
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "_check"]
        at = "hung" if isinstance(error, Hung) else f"{frames[-1].filename}:{frames[-1].name}"
        what = re.sub(r"b'.*?'|b\".*?\"|\d+|\[.*\]", "…", str(error))
        return cls(f"{type(error).__name__} {at} {what}", "".join(traceback.format_exception(error)))


def attempt(life: Life) -> tuple[Trouble | None, int]:
    """Replay a life; its failure, if any, and the number of actions until then."""
    done = 0
    try:
        with bounded():
            world = life.world()
            for action in life.actions:
                done += 1
                act(world, action)
            finish(world)
    except Exception as error:  # noqa: BLE001 - any exception is a failure to report
        return Trouble.of(error), done
    return None, done


def shrink(life: Life, trouble: Trouble, seconds: float = 60.0) -> Life:
    """The shortest life with the same failure found within `seconds` of CPU time."""
    end = time.process_time() + seconds

    def breaks(actions: list[Action], **changes: Any) -> Life | None:
        if time.process_time() >= end:
            return None
        shorter = replace(life, actions=actions, **changes)
        found, done = attempt(shorter)
        return replace(shorter, actions=actions[:done]) if found and found.place == trouble.place else None

    life = breaks(life.actions, ranks=1) or breaks(life.actions) or life
    while time.process_time() < end:
        before = life.actions
        life = _drop(life, breaks)
        life = _simplify(life, breaks)
        if life.actions == before:
            break
    return life


def _drop(life: Life, breaks: Callable[[list[Action]], Life | None]) -> Life:
    """Remove halves, quarters, ... single actions, wherever the rest still fails, then all actions of a kind."""
    size = max(1, len(life.actions) // 2)
    while True:
        start = len(life.actions) - size  # from the end, where most relevant actions are
        while start > -size:
            shorter = breaks(life.actions[: max(0, start)] + life.actions[start + size :])
            life = shorter or life
            start = min(start - size, len(life.actions) - size)
        if size == 1:
            break
        size //= 2
    for kind in sorted({action[0] for action in life.actions}):
        life = breaks([action for action in life.actions if action[0] != kind]) or life
    return life


def _simplify(life: Life, breaks: Callable[[list[Action]], Life | None]) -> Life:
    """Remove ends from steps, shorten prompts, and set irrelevant numbers to 0."""
    at = 0
    while at < len(life.actions):
        for simpler in _simpler(life.actions[at]):
            shorter = breaks([*life.actions[:at], simpler, *life.actions[at + 1 :]])
            if shorter:
                life = shorter
                break
        else:
            at += 1
    return life


def _simpler(action: Action) -> Iterator[Action]:
    name, *rest = action
    for i, value in enumerate(rest):
        if isinstance(value, list):
            for k, end in enumerate(value):
                yield [name, *rest[:i], value[:k] + value[k + 1 :], *rest[i + 1 :]]
                if end[1] or end[2]:
                    yield [name, *rest[:i], [*value[:k], [end[0], 0, 0, -1], *value[k + 1 :]], *rest[i + 1 :]]
        elif isinstance(value, str) and len(value) > 1:
            yield [name, *rest[:i], value[: len(value) // 2], *rest[i + 1 :]]
            yield [name, *rest[:i], value[:-1], *rest[i + 1 :]]
        elif isinstance(value, int | float) and value:
            yield [name, *rest[:i], 0, *rest[i + 1 :]]
