"""Why was a prompt's token cached, or not? One reason for each token, from what its lease found when it became ready.

Nearly every reason is a difference of two boundaries: what one more set of pages would have bought, of those that were
within reach and not read, that came too late, that failed their check, and of windows and states that were nowhere.
Each set is added to the others, so that no boundary is below the one before it, and the reasons sum to the prompt.
"""

from collections import Counter
from enum import Enum
from math import inf

from kvarve.core.lease import Lease
from kvarve.core.requests.paths import Paths
from kvarve.pages.boundaries import deepest, leading, span
from kvarve.pages.pools import Tier


class Reason(Enum):
    """Of a token: the name in answers, logs and metrics, and the meaning."""

    HIT_DEVICE = "hit_device", "cached: its page was on the device"
    HIT_HOST = "hit_host", "cached: its page, of at least one pool, came from the host"
    HIT_STORAGE = "hit_storage", "cached: its page, of at least one pool, came from storage"
    NOT_READ = "not_read", "its page was within reach, but was not worth a copy, found no slot, or was not to be read"
    TOO_LATE = "too_late", "its page was on its way from storage or the host, and did not come in time"
    FAILED_CHECK = "failed_check", "its page, or one that it rests on, failed its check"
    STATE_MISSING = (
        "state_or_window_missing",
        "attention has its page, but no window or state is there to resume behind it",
    )
    BELOW_GRID = "below_grid", "behind the last line of the prefill grid that its pages, or the prompt's tokens, reach"
    EVICTED_DEVICE = "evicted_device", "its page has left memory, last the device"
    EVICTED_HOST = "evicted_host", "its page has left memory, last the host"
    EVICTED_STORAGE = "evicted_storage", "its page has left memory and was stored; storage does not have it any more"
    NEVER_SEEN = "never_seen", "its page has never been here"
    UNKNOWN = (
        "unknown",
        "its page is new, or left so long ago that it is forgotten, or storage has not said whether it has it",
    )
    ANSWER = (
        "answer_waits",
        "of an answer whose pages were not computed again by prefill when its prompt came: exact hits need that",
    )
    ANOTHER_SAMPLE = (
        "another_sample",
        "in metrics alone: its prompt is counted already, for another of the n answers to the same request",
    )

    def __new__(cls, name: str, meaning: str) -> "Reason":
        reason = object.__new__(cls)
        reason._value_ = name
        return reason

    def __init__(self, name: str, meaning: str) -> None:
        self.meaning = meaning

    __hash__ = object.__hash__  # members are singletons


HITS = (Reason.HIT_DEVICE, Reason.HIT_HOST, Reason.HIT_STORAGE)
_EVICTED = {Tier.DEVICE: Reason.EVICTED_DEVICE, Tier.HOST: Reason.EVICTED_HOST}


def explain(lease: Lease, paths: Paths) -> dict[Reason, int]:
    """The tokens of a lease's prompt, as it was opened, by their reason; those that have no token are left out. A lease
    that did not become ready has read nothing."""
    page_tokens = paths.page_tokens
    if lease.left is None:
        return {Reason.NOT_READ: lease.length} if lease.length else {}
    pages = Counter(dict(zip(HITS, lease.from_tiers(), strict=True)))
    mark, last = lease.boundary, lease.limit // paths.grid * paths.grid
    late = [asked | awaited for asked, awaited in zip(lease.asked, lease.awaited, strict=True)]
    near = [have | far for have, far in zip(lease.memory, lease.probed, strict=True)]
    each = [*zip(lease.found, near, late, lease.bad, strict=True)]
    sets = (
        (Reason.NOT_READ, [seen | (near & ~late & ~bad) for seen, near, late, bad in each]),
        (Reason.TOO_LATE, [seen | ((near | late) & ~bad) for seen, near, late, bad in each]),
        (Reason.FAILED_CHECK, [seen | near | late | bad for seen, near, late, bad in each]),
    )
    marks = [(reason, deepest(paths.legal(present, lease))) for reason, present in sets]
    chains = [leading(have) for have, back in zip(sets[-1][1], paths.lookbacks, strict=True) if back is None]
    reach = max(marks[-1][1], min([*(chains or [lease.known]), last]))
    marks += [(Reason.STATE_MISSING, reach // paths.grid * paths.grid), (Reason.BELOW_GRID, reach)]
    for reason, boundary in marks:
        pages[reason] += boundary - mark
        mark = boundary
    # Behind that, what has left memory, as far as it is remembered.
    end = min(lease.known, last)
    for tier, some in lease.left.tiers:
        start, end = max(end, reach), min(end + some, last)
        count = max(0, end - start)
        if tier is Tier.STORAGE:
            told = (lease.told & span(start, end)).bit_count()
            pages[Reason.EVICTED_STORAGE] += told
            pages[Reason.TOO_LATE if lease.ask_all < inf else Reason.NOT_READ] += count - told
        else:
            pages[_EVICTED[tier]] += count
    start = max(end, reach)
    told = (lease.told & span(start, last)).bit_count() if lease.storage else last - start
    pages[Reason.NEVER_SEEN] = told if lease.left.whole else 0
    pages[Reason.UNKNOWN] = last - start - pages[Reason.NEVER_SEEN]
    tokens = Counter({reason: some * page_tokens for reason, some in pages.items()})
    tokens[Reason.BELOW_GRID] += lease.length - last * page_tokens
    return {reason: some for reason, some in tokens.items() if some}
