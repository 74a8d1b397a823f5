"""A copy that does not end: the requests that need its slots wait for a while, then fail, and the engine goes on.

The real scheduler and the real core in the simulated world, whose clock the test moves.
"""

import pytest

from kvarve.pages.pools import Tier
from tests.sim.world.engines import Order, Shop

ATTENTION = {"name": "attention", "lookback": None, "in_place": False, "replicated": False}
DEVICE = 8  # pages, of two tokens
MINUTE_S = 60.0


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The requests that fail, and why."""
    told, fail = list[tuple[int, str]](), Shop._fail

    def note(self: Shop, order: Order, why: str) -> None:
        told.append((order.number, why))
        fail(self, order, why)

    monkeypatch.setattr(Shop, "_fail", note)
    return told


def answered(shop: Shop, text: str) -> bool:
    """A request that is served while no copy hangs."""
    before = shop.world.seen["answered"]
    assert shop.come(text, "", 0, 1, 1, 1)
    turns(shop, 40)
    return shop.world.seen["answered"] == before + 1


def turns(shop: Shop, many: int, later_s: float = 0.0) -> None:
    for _ in range(many):
        shop.turn(later_s, [[0, 0, 0]] * len(shop.world.flying))


@pytest.fixture
def hung(failed: list[tuple[int, str]]) -> Shop:
    """An engine that has lost a load, which owns 6 of its 8 pages; whoever asked for it has left."""
    shop = Shop({"pools": [ATTENTION], "device": [DEVICE], "host": [32], "keep_states": "ends,branches"}, 4, 64, False)
    assert answered(shop, "0" * 13)
    shop.world.flush(Tier.DEVICE)
    assert shop.come("0" * 13, "", 0, 1, 1, 1)
    shop.turn(0.0, [])
    (load,) = shop.world.loads()
    shop.world.lose(load)
    shop.leave(0)
    return shop


def test_a_request_that_needs_the_slots_of_a_copy_that_does_not_end_fails_after_a_minute(
    hung: Shop, failed: list[tuple[int, str]]
) -> None:
    assert hung.come("1" * 10, "", 0, 1, 1, 1)
    turns(hung, 12, MINUTE_S / 12)
    assert not failed and len(hung.orders) == 1, "it waits for so long"
    turns(hung, 1, MINUTE_S / 12)
    assert failed == [(3, "a copy that does not end holds the device memory that this request needs")]
    assert not hung.orders
    hung.world.step([hung.world.give_up(op) for op in [*hung.world.lost]])
    assert answered(hung, "1" * 10)
    hung.finish()


def test_a_copy_that_ends_in_time_fails_no_request(hung: Shop, failed: list[tuple[int, str]]) -> None:
    assert hung.come("1" * 10, "", 0, 1, 1, 1)
    turns(hung, 12, MINUTE_S / 12)
    hung.world.step([hung.world.give_up(op) for op in [*hung.world.lost]], MINUTE_S)
    turns(hung, 20)
    assert not hung.orders and not failed
    hung.finish()


def test_the_minute_begins_anew_after_others_have_run(hung: Shop, failed: list[tuple[int, str]]) -> None:
    assert hung.come("1" * 10, "", 0, 1, 1, 1)
    turns(hung, 12, MINUTE_S / 12)
    assert answered(hung, "2" * 3), "it fits beside the copy"
    turns(hung, 11, MINUTE_S / 12)
    assert not failed and len(hung.orders) == 1
    turns(hung, 1, MINUTE_S / 12)
    assert [number for number, _ in failed] == [3]
    hung.finish()
