"""Who begins, who waits and who gives way: plain numbers in, decisions out. No tensor, thread, clock or cache.

The law: no request waits if there is a place for it, its pages and a page of growth for each running request fit into
free or evictable device slots, it waits for no copy and for no page that is about to be published, and it would not
hold up the head of the line. A request that does not fit is passed by any number of others that end, by their
max_tokens, before its room could be there, and by `OVERTAKEN` others at most; one that was preempted has had these.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

OVERTAKEN = 8  # no request is overtaken more often by those that would hold it up


@dataclass(frozen=True)
class Waiting:
    """A request in the line, in the order of coming."""

    needs: Sequence[int]  # of each chain, slots that it would take of those that are free or evictable
    turns: int  # after which it has ended at the latest
    passed: int = 0  # how often it has been overtaken
    grows: bool = False  # whether it may need another page than those of its prompt
    waits: bool = False  # for a copy, or for a page that is about to be published
    fetches: bool = (
        False  # storage is still asked for it: it may begin without, but if it does not fit it holds up none
    )


class Running(NamedTuple):
    """A request that runs, or is about to: its pages are on their way to the device."""

    pages: int  # of each chain; so many slots come back when it ends, at most
    turns: int
    grows: bool


class Begin(NamedTuple):
    """A request that begins, by its place in the line, and those before it that are not held up by it."""

    at: int
    freely: frozenset[int]


def begins(
    places: int, loose: Sequence[int], line: Sequence[Waiting], order: Iterable[int], running: Sequence[Running]
) -> list[Begin]:
    """Which of the line begin now, if each is asked in this order: numbers of the line.

    `loose`: of each chain, the slots that are free or could be evicted. What running requests still have to take for
    their prompts has been subtracted. Sharing among those that begin is not counted, so ask again until none begins.
    """
    loose, running = [*loose], [*running]
    growth = sum(each.grows for each in running)
    passed = [each.passed for each in line]
    unfit: list[int] = []  # asked, and too large
    found: list[Begin] = []
    begun, asked = set[int](), set[int]()
    rooms: dict[int, int] = {}  # when the room of one that is too large could be there

    def room(at: int) -> int:
        if at not in rooms:
            rooms[at] = turns_until(line[at].needs, loose, growth, running)
        return rooms[at]

    for at in order:
        if places <= len(found):
            break
        each = line[at]
        asked.add(at)
        if each.waits:
            continue
        if any(need + growth > slots for need, slots in zip(each.needs, loose, strict=True)):
            if not each.fetches:
                unfit.append(at)
            continue
        before = [other for other in unfit if other < at]
        if any(passed[other] >= OVERTAKEN and each.turns > room(other) for other in before):
            continue
        freely = frozenset(other for other in before if each.turns <= room(other))
        found.append(Begin(at, freely))
        begun.add(at)
        for other in range(at):
            passed[other] += other not in begun and other not in freely
        loose = [slots - need for need, slots in zip(each.needs, loose, strict=True)]
        growth += each.grows
        running.append(Running(max(each.needs, default=0), each.turns, each.grows))
        rooms.clear()
        if any(passed[other] >= OVERTAKEN and other not in asked for other in range(at)):
            break  # it comes first from now on
    return found


def turns_until(needs: Sequence[int], loose: Sequence[int], growth: int, running: Sequence[Running]) -> int:
    """After how many turns there could be room for a request, if every other ends when its max_tokens says so."""
    free, last = [*loose], 0
    for each in sorted(running, key=lambda each: each.turns):
        if all(need + growth <= slots for need, slots in zip(needs, free, strict=True)):
            break
        free, growth, last = [slots + each.pages for slots in free], growth - each.grows, each.turns
    return last


def gives_way(seniority: Sequence[int]) -> int:
    """Which of those that hold pages gives them back when one more is needed: the one that began last.

    By the order in which they began first, which preemption does not change: so the oldest never gives way, and of two
    requests only one can preempt the other.
    """
    return max(range(len(seniority)), key=seniority.__getitem__)
