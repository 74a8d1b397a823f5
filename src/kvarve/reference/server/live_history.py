"""What the live page knows of the past: samples of the counters, marks of changes, and why prompts were computed.

Five minutes are kept at the pace of the samples, an hour at ten seconds. No thread and no clock is known here.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kvarve.core.observe.reasons import HITS, Reason
from kvarve.pages.pools import Tier
from kvarve.reference.server.forms import by_tier

EVERY_S, FINE = 2.0, 150  # five minutes
JOINED, COARSE = 5, 360  # samples of an hour, each of so many finer ones
MARKS = 48
MOST_MARK = 160  # characters
REQUESTS, OUTPUT = "requests", "output_tokens"


@dataclass(frozen=True)
class Sample:
    """The state at one moment, and what has happened in the `seconds` before it."""

    unix_s: float
    seconds: float
    held: Mapping[str, float | None]  # bytes by tier; of storage None, if it is not known
    running: int
    waiting: int
    ttft_s: tuple[float | None, float | None]  # the median and the 95th percentile of a minute
    # Tokens of prompts of ended requests by reason, REQUESTS that ended, OUTPUT tokens, and bytes by lane.
    happened: Mapping[Reason | str, float]


def joined(samples: Sequence[Sample]) -> Sample:
    """All that happened, the state at the end, and the most requests at a time."""
    happened = Counter[Reason | str]()
    for sample in samples:
        happened.update(sample.happened)
    return replace(
        samples[-1],
        seconds=sum(sample.seconds for sample in samples),
        running=max(sample.running for sample in samples),
        waiting=max(sample.waiting for sample in samples),
        happened=happened,
    )


def reasons(sample: Sample) -> dict[Reason, int]:
    """Tokens of prompts; those that have no token are left out."""
    return {reason: int(tokens) for reason in Reason if (tokens := sample.happened.get(reason, 0))}


class History:
    """One thread adds; any thread reads."""

    def __init__(self, requests: bool = True) -> None:
        """`requests`: whether the series have these."""
        self._requests = requests
        self._fine: deque[Sample] = deque(maxlen=FINE)
        self._coarse: deque[Sample] = deque(maxlen=COARSE)
        self._open: list[Sample] = []  # not joined yet
        self._marks: deque[dict[str, Any]] = deque(maxlen=MARKS)

    def add(self, sample: Sample) -> None:
        self._fine.append(sample)
        self._open = [*self._open, sample]
        if len(self._open) == JOINED:
            self._coarse.append(joined(self._open))
            self._open = []

    def mark(self, unix_s: float, what: str, text: str) -> None:
        """Note a change that the charts show."""
        self._marks.append({"unix_s": round(unix_s, 1), "what": what, "text": text[:MOST_MARK]})

    def last(self, seconds: float) -> Sample | None:
        """All that the samples of that long tell, five minutes at most; None: there is no sample yet."""
        found = [*self._fine]
        return joined(found[-max(1, round(seconds / EVERY_S)) :]) if found else None

    def lanes(self) -> dict[str, list[int]]:
        """Bytes a second of each lane over the five minutes, every ten seconds."""
        coarse, still_open = [*self._coarse][-FINE // JOINED :], self._open
        samples = coarse + ([joined(still_open)] if still_open else [])
        names = {name for sample in samples for name in sample.happened if isinstance(name, str)}
        return {
            name: [round(one.happened.get(name, 0) / one.seconds) for one in samples]
            for name in names - {REQUESTS, OUTPUT}
        }

    def told(self, hour: bool) -> dict[str, Any]:
        """The series of the charts: of five minutes, or of an hour."""
        coarse, still_open = [*self._coarse], self._open
        samples = coarse + ([joined(still_open)] if still_open else []) if hour else [*self._fine]

        def each(number: Callable[[Sample], Any]) -> list[Any]:
            return [number(sample) for sample in samples]

        def short(value: float | None) -> float | None:
            return None if value is None else float(f"{value:.3g}")

        found = each(reasons)
        cached = [*map(by_tier, found)]
        tiers = dict.fromkeys(name for sample in samples for name in sample.held)
        series = {
            "every_s": EVERY_S * (JOINED if hour else 1),
            "unix_s": each(lambda sample: round(sample.unix_s, 1)),
            "seconds": each(lambda sample: round(sample.seconds, 1)),
            "bytes": {tier: each(lambda sample, tier=tier: sample.held.get(tier)) for tier in tiers},  # type: ignore[misc]
            "prompt_tokens": [sum(one.values()) for one in found],
            "cached_tokens": {tier.name.lower(): [one[tier.name.lower()] for one in cached] for tier in Tier},
            "marks": [*self._marks],
        }
        if not self._requests:
            return series
        return series | {
            "ttft_p50_s": each(lambda sample: short(sample.ttft_s[0])),
            "ttft_p95_s": each(lambda sample: short(sample.ttft_s[1])),
            "running": each(lambda sample: sample.running),
            "waiting": each(lambda sample: sample.waiting),
            "requests": each(lambda sample: int(sample.happened.get(REQUESTS, 0))),
            "output_tokens": each(lambda sample: int(sample.happened.get(OUTPUT, 0))),
        }


# --- what would have been cached, and how

LEAST_SHARE = 0.02  # of all tokens of prompts: a smaller part is not worth a change
_NEW = "new text is computed once, and no setting changes that"
# What can be said of tokens, and what would change it, or None.
_CHANGES: Mapping[Reason, tuple[str, str | None]] = {
    Reason.NOT_READ: (
        "was within reach and was not read",
        "lower --load-at-least and --fetch-at-least, or more memory, may have it read",
    ),
    Reason.TOO_LATE: (
        "was on its way and came too late",
        "a faster storage, or a longer --storage-wait, has it come in time",
    ),
    Reason.FAILED_CHECK: ("failed its check", "look at the memory or the medium that damages pages"),
    Reason.STATE_MISSING: (
        "has its attention pages here, and no state or window to resume from",
        "{more_states} brings it back",
    ),
    Reason.BELOW_GRID: (
        "lies behind the last line of the prefill grid, {grid} tokens apart",
        "{grid_option} brings hits closer to a prompt's end",
    ),
    Reason.EVICTED_DEVICE: ("was here and left the device", "{more_device} brings it back"),
    Reason.EVICTED_HOST: ("was here and left the host", "{more_host} brings it back"),
    Reason.EVICTED_STORAGE: ("was stored and has left storage", "a larger capacity= of --storage brings it back"),
    Reason.ANSWER: (
        "is of answers that were not computed again before the next turn came",
        "--hits rounded keeps their pages as they were decoded",
    ),
    Reason.NEVER_SEEN: ("was never here", None),
    Reason.UNKNOWN: ("is new, or left so long ago that it is forgotten", None),
}


def advice(
    tokens: Mapping[Reason, int],
    *,
    grid: int,
    rounded: bool = False,
    host: bool = True,
    storage: bool = True,
    words: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """One sentence about those `tokens` of prompts that were computed: the largest part of them that a setting changes,
    and which; else the largest part. "" if none were computed. `grid`: where prompts resume, in tokens; `words`: for
    settings of another engine."""
    computed = {reason: some for reason, some in tokens.items() if reason in _CHANGES and some}
    if not computed:
        return ""
    all_tokens = sum(tokens[reason] for reason in (*HITS, *_CHANGES) if reason in tokens)
    changed = {
        reason: some
        for reason, some in computed.items()
        if _CHANGES[reason][1] is not None and some >= LEAST_SHARE * all_tokens
    }
    among = changed or computed
    reason = max(among, key=lambda reason: among[reason])
    what, change = _CHANGES[reason]
    named = {
        "grid": grid,
        "grid_option": "a smaller --page-tokens" if rounded else "a smaller --chunk-tokens, or --hits rounded,",
        "more_device": "more --device-memory" if host else "--host-memory",
        "more_host": "more --host-memory" if storage else "more --host-memory, or a --storage,",
        "more_states": "more --keep-states, such as every:N,",
    }
    return f"{among[reason] / all_tokens:.0%} {what}: {change or _NEW}".format(**{**named, **words}) + "."
