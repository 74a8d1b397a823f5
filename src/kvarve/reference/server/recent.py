"""The requests that are being served, and those that ended last: ids and numbers for the live page, and no text."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from kvarve.reference.server.answers import Answer

ENDED, OPEN = 64, 32  # requests that are told of, at most
TTFTS, WINDOW_S = 2048, 60.0  # times to first token from which percentiles are taken: so many, and so old, at most
MOST_PATH = 100  # characters


@dataclass(eq=False)
class Entry:
    """One request. `told` has what is to be said of it once it has ended, when its answer is let go."""

    number: int
    id: str
    path: str
    key: str
    began_s: float  # by time.monotonic, like all times here
    answer: Answer | None = None
    timed: bool = False  # its time to first token has been noted
    told: Mapping[str, Any] = field(default_factory=dict)


class Recent:
    """The event loop begins and ends entries; any thread reads."""

    def __init__(self, group_of: Callable[[str], str]) -> None:
        """`group_of`: the name of a salt's group, which does not tell the salt."""
        self._group_of = group_of
        self._numbers = 0
        self._open: dict[int, Entry] = {}
        self._ended: deque[Entry] = deque(maxlen=ENDED)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=TTFTS)  # when, seconds

    def begin(self, id: str, path: str, key: str = "") -> Entry:
        """`key`: the name of the one that admitted it."""
        self._numbers += 1
        entry = self._open[self._numbers] = Entry(self._numbers, id, path[:MOST_PATH], key, time.monotonic())
        return entry

    def end(self, entry: Entry, status: int) -> None:
        now = time.monotonic()
        entry.told = self._tell(entry, now) | {"status": status, "ended_s": now}
        self._time(entry, now)
        entry.answer = None
        self._ended.append(entry)
        del self._open[entry.number]

    def ended(self, now: float) -> list[dict[str, Any]]:
        """The latest first, each with the seconds since its end (`ago_s`)."""
        told = [dict(entry.told) for entry in reversed([*self._ended])]
        return [each | {"ago_s": round(now - each.pop("ended_s"), 1)} for each in told]

    def open(self, now: float) -> tuple[int, list[dict[str, Any]]]:
        """How many are open, and the oldest of them."""
        found = [*self._open.values()]
        return len(found), [self._tell(entry, now) for entry in found[:OPEN]]

    def ttfts(self, now: float) -> tuple[float | None, float | None, int]:
        """The median and the 95th percentile of the times to first token of late, in seconds, and of how many."""
        for entry in [*self._open.values()]:
            self._time(entry, now)
        found = sorted(ttft_s for at, ttft_s in [*self._ttfts] if at > now - WINDOW_S)
        if not found:
            return None, None, 0
        p50, p95 = (found[ceil(share * len(found)) - 1] for share in (0.5, 0.95))
        return p50, p95, len(found)

    def _time(self, entry: Entry, now: float) -> None:
        answer = entry.answer
        if answer is not None and answer.first_seconds is not None and not entry.timed:
            entry.timed = True
            self._ttfts.append((now, answer.first_seconds))

    def _tell(self, entry: Entry, now: float) -> dict[str, Any]:
        answer = entry.answer
        told = {"number": entry.number, "id": entry.id, "path": entry.path, "key": entry.key, "state": "is prepared"}
        told |= {"seconds": round(now - entry.began_s, 3)}
        if answer is None or answer.salt is None:
            return told
        usage, ends = answer.usage(), {choice.finish for choice in [*answer.choices] if choice.finish is not None}
        return told | {
            "state": "waits" if answer.first_seconds is None else "answers",
            "group": self._group_of(answer.salt),
            "prompt": usage.prompt or answer.prompt_tokens,
            "completion": usage.completion,
            "cached": usage.details(),
            "reasons": {reason.value: tokens for reason, tokens in usage.reasons.items()},
            "ttft_s": answer.first_seconds,
            "finish": ", ".join(sorted(finish.value for finish in ends)),
        }
