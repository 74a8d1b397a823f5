"""The order of the queue: no model, no cache."""

from hypothesis import given
from hypothesis import strategies as st

from kvarve.reference.engine.request_scheduler import LOOK_AHEAD, OVERTAKEN, WaitingQueue, within


def a_line(*names: str) -> WaitingQueue[str]:
    line: WaitingQueue[str] = WaitingQueue()
    for name in names:
        line.append(name)
    return line


def test_cold_requests_go_in_the_order_of_arrival() -> None:
    assert a_line("a", "b", "c").order(lambda name: 0) == ["a", "b", "c"]


def test_requests_with_more_cached_pages_go_first() -> None:
    found = {"a": 0, "b": 2, "c": 7, "d": 2}
    assert a_line("a", "b", "c", "d").order(found.__getitem__) == ["c", "b", "d", "a"]


def test_no_request_is_overtaken_for_ever() -> None:
    line = a_line("cold")
    for number in range(OVERTAKEN):
        line.append(f"warm {number}")
        assert line.order(lambda name: int(name != "cold"))[0] == f"warm {number}"
        line.go(f"warm {number}")
    line.append("warm again")
    assert line.order(lambda name: int(name != "cold")) == ["cold", "warm again"]


def test_preempted_requests_go_first_in_the_order_of_preemption() -> None:
    line = a_line("a", "b")
    line.rejoin("x")
    line.rejoin("y")
    assert line.order(lambda name: int(name == "b")) == ["x", "y", "b", "a"]
    line.go("x")
    line.leave("y")
    assert [*line] == ["a", "b"]
    assert len(line) == 2


def test_only_the_requests_that_wait_longest_are_sorted_by_their_pages() -> None:
    line, asked = a_line(*map(str, range(3 * LOOK_AHEAD))), list[str]()

    def found(name: str) -> int:
        asked.append(name)
        return int(name)

    order = line.order(found)
    assert asked == [str(number) for number in range(LOOK_AHEAD)]
    assert order[:LOOK_AHEAD] == asked[::-1]
    assert order[LOOK_AHEAD:] == [str(number) for number in range(LOOK_AHEAD, 3 * LOOK_AHEAD)]


@given(st.integers(-5, 50), st.lists(st.integers(1, 20), max_size=9))
def test_a_turn_computes_what_fits_and_at_least_one(budget: int, sizes: list[int]) -> None:
    chosen = [*within(budget, enumerate(sizes))]
    assert chosen == [*range(len(chosen))]
    if sizes:
        assert chosen
    assert len(chosen) <= 1 or sum(sizes[: len(chosen)]) <= budget
    if len(chosen) < len(sizes):
        assert sum(sizes[: len(chosen) + 1]) > budget
