"""A request goes to the replica that has most of its prompt, unless that has much more work."""

from hypothesis import given
from hypothesis import strategies as st

from kvarve.planner.routing import BLOCK_BYTES, PrefixRouter, Prompt

IDLE = [0.0, 0.0, 0.0]
ALL = range(3)


def text(seed: int, blocks: int) -> bytes:
    return b"".join(f"{seed}-{block}".encode().ljust(BLOCK_BYTES, b".") for block in range(blocks))


def test_a_prompt_that_goes_on_goes_where_its_beginning_went() -> None:
    router = PrefixRouter(3)
    first = {
        seed: router.choose(Prompt.of(b"", text(seed, 4)), [float(seed == each) for each in ALL], ALL) for seed in ALL
    }
    assert len({*first.values()}) > 1
    for seed, replica in first.items():
        assert router.choose(Prompt.of(b"", text(seed, 4) + text(9, 2)), IDLE, ALL) == replica


def test_of_two_that_have_its_beginning_the_one_that_has_more_gets_it_unless_it_has_much_more_work() -> None:
    router = PrefixRouter(3)
    assert router.choose(Prompt.of(b"", text(1, 2)), [0.0, 9.0, 9.0], ALL) == 0
    assert router.choose(Prompt.of(b"", text(1, 8)), IDLE, [2]) == 2
    assert router.choose(Prompt.of(b"", text(1, 9)), [0.0, 0.0, 9.0], ALL) == 2
    assert router.choose(Prompt.of(b"", text(1, 9)), [1.0, 0.0, 1e6], ALL) != 2


def test_prompts_of_another_salt_tell_nothing_of_where_this_one_is() -> None:
    router, prompt = PrefixRouter(3), text(1, 4)
    assert router.choose(Prompt.of(b"mine", prompt), IDLE, [2]) == 2
    assert router.choose(Prompt.of(b"yours", prompt), [0.0, 1.0, 2.0], ALL) == 0
    assert router.choose(Prompt.of(b"mine", prompt), [0.0, 1.0, 2.0], ALL) == 2


def test_one_that_was_started_again_has_nothing_and_one_that_is_drained_gets_nothing() -> None:
    router, prompt = PrefixRouter(3), text(1, 4)
    assert router.choose(Prompt.of(b"", prompt), IDLE, [2]) == 2
    assert router.choose(Prompt.of(b"", prompt), [0.0, 0.0, 1.0], [0, 1]) == 0
    router.forget(2)
    router.forget(0)
    assert router.choose(Prompt.of(b"", prompt), [2.0, 1.0, 3.0], ALL) == 1


def test_what_was_not_asked_for_longest_is_forgotten_and_its_end_before_its_beginning() -> None:
    router = PrefixRouter(2, most_blocks=6)
    assert router.choose(Prompt.of(b"", text(1, 4)), IDLE, [1]) == 1
    assert router.choose(Prompt.of(b"", text(2, 4)), IDLE, [1]) == 1
    assert router.choose(Prompt.of(b"", text(1, 2)), [1.0, 2.0], [0, 1]) == 1, "its first two blocks are known"
    assert len(router._sent) == 6


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30),
    work=st.lists(st.floats(0, 1e9), min_size=3, max_size=3),
    able=st.sets(st.integers(0, 2), min_size=1),
)
def test_whatever_came_before_one_of_those_that_are_able_is_chosen(
    prompts: list[tuple[int, int]], work: list[float], able: set[int]
) -> None:
    router = PrefixRouter(3, most_blocks=8)
    for seed, blocks in prompts:
        assert router.choose(Prompt.of(b"", text(seed, blocks)), work, sorted(able)) in able
        assert len(router._sent) <= 8
