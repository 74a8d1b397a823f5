"""Admission and preemption: plain numbers in, decisions out. No tensor, thread, clock or cache.

The law: no request waits if a running slot is free, its pages and a page of growth for each running request fit into
free or evictable device slots, it waits for no copy and for no page that is about to be published, and it would not
delay the head of the queue. A request that does not fit is overtaken by any number of others that end, by their
max_tokens, before it could fit, and by `OVERTAKEN` others at most; a preempted request counts as overtaken that often.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

OVERTAKEN = 8  # no request is overtaken more often by requests that would delay it


@dataclass(frozen=True)
class Waiting:
    """A request in the queue, in order of arrival."""

    needs: Sequence[int]  # per chain, slots that it would take of those that are free or evictable
    turns: int  # after which it has ended at the latest
    passed: int = 0  # how often it has been overtaken
    grows: bool = False  # whether it may need more pages than its prompt has
    waits: bool = False  # for a copy, or for a page that is about to be published
    fetches: bool = False  # its pages come from storage: it may be admitted, but if it does not fit it delays no other


class Running(NamedTuple):
    """A request that runs, or is admitted and waits for its copies to the device."""

    pages: int  # per chain, slots that it gives back at most when it ends
    turns: int
    grows: bool


class Begin(NamedTuple):
    """An admitted request, by its index in the queue, and the requests before it that it does not delay."""

    at: int
    not_delayed: frozenset[int]


def begins(
    free_places: int,
    available: Sequence[int],
    line: Sequence[Waiting],
    order: Iterable[int],
    running: Sequence[Running],
) -> list[Begin]:
    """Which requests of `line` are admitted now, if they are tried in this order (indices of `line`).

    `free_places`: running slots; `available`: per chain, the slots that are free or evictable, less those that admitted
    prompts have still to take. Sharing among the admitted is not counted, so call again until none is admitted.
    """
    available, running = [*available], [*running]
    growth = sum(each.grows for each in running)
    passed = [each.passed for each in line]
    unfit: list[int] = []  # tried, and too large
    found: list[Begin] = []
    begun, tried = set[int](), set[int]()
    fit_after: dict[int, int] = {}  # by index: after how many turns a request that is too large could fit

    def turns_to_fit(at: int) -> int:
        if at not in fit_after:
            fit_after[at] = turns_until(line[at].needs, available, growth, running)
        return fit_after[at]

    for at in order:
        if free_places <= len(found):
            break
        each = line[at]
        tried.add(at)
        if each.waits:
            continue
        if any(need + growth > slots for need, slots in zip(each.needs, available, strict=True)):
            if not each.fetches:
                unfit.append(at)
            continue
        before = [other for other in unfit if other < at]
        if any(passed[other] >= OVERTAKEN and each.turns > turns_to_fit(other) for other in before):
            continue
        not_delayed = frozenset(other for other in before if each.turns <= turns_to_fit(other))
        found.append(Begin(at, not_delayed))
        begun.add(at)
        for other in range(at):
            passed[other] += other not in begun and other not in not_delayed
        available = [slots - need for need, slots in zip(each.needs, available, strict=True)]
        growth += each.grows
        running.append(Running(max(each.needs, default=0), each.turns, each.grows))
        fit_after.clear()
        if any(passed[other] >= OVERTAKEN and other not in tried for other in range(at)):
            break  # that one is tried first from now on
    return found


def turns_until(needs: Sequence[int], available: Sequence[int], growth: int, running: Sequence[Running]) -> int:
    """After how many turns a request could fit, if every running one ends when its max_tokens says so."""
    free, last = [*available], 0
    for each in sorted(running, key=lambda each: each.turns):
        if all(need + growth <= slots for need, slots in zip(needs, free, strict=True)):
            break
        free, growth, last = [slots + each.pages for slots in free], growth - each.grows, each.turns
    return last


def youngest(seniority: Sequence[int]) -> int:
    """Which of the requests that hold pages is preempted when one more page is needed: the one admitted last.

    Seniority is the order of first admission, which preemption does not change: so the oldest is never preempted, and
    of two requests only one can preempt the other.
    """
    return max(range(len(seniority)), key=seniority.__getitem__)
