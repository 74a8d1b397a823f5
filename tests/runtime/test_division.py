"""Pools share memory where a tier can be cut; elsewhere it is divided by how often windows and states are kept."""

from filling import CHUNK, PAGE, POOLS, an_identity

from kvarve.cache.config import CacheConfig, spacing
from kvarve.cache.worker import check
from kvarve.core.policies import Policies
from kvarve.core.slots.extents import Cut
from kvarve.memory.layouts import PAGE_FIRST_DIRECT
from kvarve.pages.pools import Tier

MIB = 1 << 20


def test_memory_is_shared_where_slots_have_a_fixed_place() -> None:
    for layout, shared in ((PAGE_FIRST_DIRECT, True), ("layer_first", False)):
        slots = check(an_identity(), CacheConfig(MIB, 16 * MIB, host_layout=layout))
        assert isinstance(slots[Tier.DEVICE], Cut) and isinstance(slots[Tier.HOST], Cut) is shared


def test_states_that_are_kept_more_often_have_more_room_where_memory_is_divided() -> None:
    every = 2 * CHUNK

    def slots(**policies: int) -> tuple[int, ...]:
        config = CacheConfig(MIB, 16 * MIB, policies=Policies(**policies), host_layout="layer_first")  # type: ignore[arg-type]
        found = check(an_identity(), config)[Tier.HOST]
        assert isinstance(found, tuple)
        return found

    (_, _, few), (pages, _, many) = slots(), slots(snapshot_every=every)
    assert many > few and many * every >= 0.9 * pages * PAGE
    assert slots(states=5)[1:] == (15, 5)
    assert spacing(POOLS, PAGE, CHUNK, every=every) <= every < spacing(POOLS, PAGE, CHUNK)
