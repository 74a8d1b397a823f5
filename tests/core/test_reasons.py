"""Every token of a prompt has one reason why it was cached or not."""

from collections.abc import Sequence

import pytest

from kvarve.core.lease import Lease
from kvarve.core.observe.reasons import explain
from kvarve.pages.keys import pack
from kvarve.pages.pools import Tier
from tests.sim.world import ATTENTION, PAGE_TOKENS, PATIENCES, STATE, World, config, fork, prompt

DEVICE, HOST, STORAGE = Tier
HOLDS = config(ATTENTION, device=16, host=32, storage=True)  # all that a test asks


def why(world: World, lease: Lease) -> dict[str, int]:
    """Tokens by the name of their reason."""
    found = {reason.value: tokens for reason, tokens in explain(lease, world.core.paths).items()}
    assert sum(found.values()) == lease.length
    return found


def ask(world: World, tokens: Sequence[int], salt: str = "", read: bool = True) -> dict[str, int]:
    """A request from open to close; the reasons of its tokens."""
    lease = world.open(tokens, salt, read=read)
    world.compute(lease)
    return why(world, lease)


def test_a_new_prompt_was_never_seen_and_its_last_tokens_are_below_the_grid() -> None:
    world = World(config=config(ATTENTION, device=16, grid=4))
    assert ask(world, prompt(10)) == {"never_seen": 16, "below_grid": 5}
    assert ask(world, prompt(10)) == {"hit_device": 16, "below_grid": 5}
    assert ask(world, prompt(1)) == {"below_grid": 3}


def test_a_hit_has_the_tier_that_it_came_from() -> None:
    world = World(config=HOLDS)
    world.request(prompt(4))
    world.request(prompt(6), rest=True)
    world.flush(DEVICE)
    assert ask(world, prompt(6)) == {"hit_host": 12, "below_grid": 1}
    assert ask(world, prompt(6)) == {"hit_device": 12, "below_grid": 1}
    world.flush(DEVICE, HOST)
    assert ask(world, prompt(6)) == {"hit_storage": 12, "below_grid": 1}


@pytest.mark.parametrize("host", [0, 16])
def test_an_evicted_page_left_the_tier_that_had_it_last(host: int) -> None:
    world = World(config=config(ATTENTION, device=16, host=host))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    assert ask(world, prompt(9)) == {f"evicted_{'host' if host else 'device'}": 12, "never_seen": 6, "below_grid": 1}


def test_storage_has_evicted_what_it_had_and_says_that_it_has_not() -> None:
    world = World(config=HOLDS)
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    world.storage.objects.clear()
    assert ask(world, prompt(8)) == {"evicted_storage": 12, "never_seen": 4, "below_grid": 1}


def test_a_page_without_a_state_is_no_hit() -> None:
    world = World(config=config(ATTENTION, STATE, device=[16, 16]))
    world.request(prompt(6))
    assert ask(world, fork(4, 1)) == {"state_or_window_missing": 8, "never_seen": 4, "below_grid": 2}
    world.request(prompt(8))
    assert ask(world, prompt(10)) == {"hit_device": 16, "never_seen": 4, "below_grid": 1}


def test_a_page_that_fails_its_check_is_the_reason_of_all_that_rest_on_it() -> None:
    world = World(config=HOLDS)
    world.request(prompt(6))
    world.flush(DEVICE)
    world.storage.objects.clear()
    world.rot(HOST, 2, prompt(6))
    assert ask(world, prompt(6)) == {"hit_host": 4, "failed_check": 8, "below_grid": 1}


def test_a_page_of_which_the_check_failed_for_another_request_is_remembered() -> None:
    world = World(config=config(ATTENTION, device=8, host=16))
    world.request(prompt(6))
    world.flush(DEVICE)
    world.rot(HOST, 2, prompt(6))
    first, second = world.open(prompt(6)), world.open(prompt(6))
    world.ready(first)
    world.ready(second)
    assert why(world, second) == {"hit_device": 4, "failed_check": 8, "below_grid": 1}


def test_a_page_is_too_late_if_one_that_it_rests_on_is() -> None:
    world = World(config=config(ATTENTION, device=16, host=32, storage=True, batch_pages=2))
    world.request(prompt(6))
    world.flush(DEVICE, HOST)
    lease = world.open_packed(pack(prompt(6)), "", PATIENCES[2])
    (probe,) = world.flying
    world.step([world.end(probe)])
    first, second, third = sorted(world.flying)
    world.step([world.end(first)])
    world.lose(second)
    world.step([world.end(third)])
    world.claim(lease)
    world.step(later_s=100.0)
    world.settle()
    assert lease.ready and why(world, lease) == {"hit_storage": 4, "too_late": 8, "below_grid": 1}


def test_what_a_request_or_a_policy_does_not_want_is_not_read() -> None:
    world = World(config=HOLDS)
    world.request(prompt(6))
    assert ask(world, prompt(8), read=False) == {"not_read": 12, "unknown": 4, "below_grid": 1}
    unpaying = config(ATTENTION, device=16, host=32, storage=True, load_at_least=100, fetch_at_least=100)
    world = World(config=unpaying)
    world.request(prompt(6))
    world.flush(DEVICE)
    assert ask(world, prompt(6)) == {"not_read": 12, "below_grid": 1}
    world.flush(DEVICE, HOST)
    assert ask(world, prompt(7)) == {"not_read": 12, "unknown": 2, "below_grid": 1}


def test_reasons_are_those_of_the_prompt_as_it_was_asked() -> None:
    world = World(config=config(ATTENTION, device=16))
    world.request(prompt(4))
    lease = world.start(prompt(4))
    before = why(world, lease)
    world.extend(lease, [5] * 3 * PAGE_TOKENS)
    world.flush(DEVICE)
    world.close(lease)
    world.flush(DEVICE)
    assert why(world, lease) == before == {"hit_device": 8, "below_grid": 1}
