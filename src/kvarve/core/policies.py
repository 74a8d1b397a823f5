"""An operator's choices as data: when to back up, how long to wait for storage, the cost of computing a page."""

from dataclasses import dataclass
from enum import Enum
from math import inf

from kvarve.errors import ConfigError


class WritePolicy(Enum):
    """When a page is copied to the next tier: after its first use, after k uses, or when it is evicted."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True)
class Patience:
    """How long a request waits for its pages in storage: base + per 1,024 tokens that are not in memory, in seconds.

    The time runs from when the request's own copies begin; it stands still while they wait behind others that make
    progress. 0 takes the pages that have arrived when the request is claimed (best effort). With `each` the time starts
    anew whenever one of its copies begins or ends, so a request waits for all of them, however many there are.
    """

    base_s: float
    per_ki_token_s: float = 0.0
    each: bool = False

    def __post_init__(self) -> None:
        if not (self.base_s >= 0 and self.per_ki_token_s >= 0):
            raise ConfigError("the patience of a prefetch cannot be negative")

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.per_ki_token_s * tokens / 1024


@dataclass(frozen=True)
class PageCost:
    """The cost of recomputing a page, in any unit: a part that is the same for each page (linear layers), and a part
    for each page before it (attention)."""

    page: float = 1.0
    per_page_before: float = 0.0

    def of(self, start: int, stop: int) -> float:
        """The cost of pages [start, stop) of a prompt."""
        return (stop - start) * (self.page + self.per_page_before * (start + stop - 1) / 2)


FLAT_COST = PageCost()
BEST_EFFORT = Patience(0.0)
WAIT_COMPLETE = Patience(inf, each=True)


def patience(name: str, base_s: float = 2.0, per_ki_token_s: float = 0.25) -> Patience:
    """The patience that a prefetch policy's name stands for; ConfigError if there is no such policy."""
    policies = {
        "best_effort": BEST_EFFORT,
        "wait_complete": WAIT_COMPLETE,
        "timeout": Patience(base_s, per_ki_token_s),
    }
    if name not in policies:
        raise ConfigError(f"unknown prefetch policy {name!r}; known: {', '.join(policies)}")
    return policies[name]
