"""A request goes to the replica that has most of its prompt, unless that has much more work."""

from hypothesis import given
from hypothesis import strategies as st

from kvarve.planner.routing import BLOCK_BYTES, PrefixRouter

IDLE = [0.0, 0.0, 0.0]
LEAST = {each: [float(other != each) for other in range(3)] for each in range(3)}  # has least work


def text(seed: int, blocks: int) -> bytes:
    return b"".join(f"{seed}-{block}".encode().ljust(BLOCK_BYTES, b".") for block in range(blocks))


def test_a_prompt_that_goes_on_goes_where_its_beginning_went() -> None:
    router = PrefixRouter()
    for each in range(3):
        assert router.choose(b"", text(each, 4), LEAST[each]) == each
    for each in range(3):
        assert router.choose(b"", text(each, 4) + text(9, 2), IDLE) == each


def test_of_two_that_have_its_beginning_the_one_that_has_more_gets_it_unless_it_has_much_more_work() -> None:
    router = PrefixRouter()
    assert router.choose(b"", text(1, 2), LEAST[0]) == 0
    assert router.choose(b"", text(1, 8), [1e6, 1e6, 0.0]) == 2
    assert router.choose(b"", text(1, 9), [0.0, 0.0, 9.0]) == 2
    assert router.choose(b"", text(1, 9), [1.0, 0.0, 1e6]) != 2


def test_prompts_of_another_salt_tell_nothing_of_where_this_one_is() -> None:
    router, prompt = PrefixRouter(), text(1, 4)
    assert router.choose(b"mine", prompt, LEAST[2]) == 2
    assert router.choose(b"yours", prompt, LEAST[0]) == 0
    assert router.choose(b"mine", prompt, LEAST[0]) == 2


def test_what_was_not_asked_for_longest_is_forgotten_and_its_end_before_its_beginning() -> None:
    router = PrefixRouter(most_blocks=6)
    assert router.choose(b"", text(1, 4), LEAST[1]) == 1
    assert router.choose(b"", text(2, 4), LEAST[1]) == 1
    assert router.choose(b"", text(1, 2), LEAST[0]) == 1, "its first two blocks are known"
    assert len(router._sent) == 6


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30),
    work=st.lists(st.floats(0, 1e9), min_size=3, max_size=3),
)
def test_whatever_came_before_one_of_them_is_chosen(prompts: list[tuple[int, int]], work: list[float]) -> None:
    router = PrefixRouter(most_blocks=8)
    for seed, blocks in prompts:
        assert router.choose(b"", text(seed, blocks), work) in range(3)
        assert len(router._sent) <= 8
