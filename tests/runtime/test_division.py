"""Pools share memory where a tier can be cut; elsewhere it is divided by how often windows and states are kept."""

from filling import CHUNK, PAGE, POOLS, an_identity

from kvarve.cache.config import CacheConfig, divide, spacing
from kvarve.cache.worker import check
from kvarve.core.policies import Policies
from kvarve.core.slots.extents import Cut
from kvarve.pages.pools import Tier

MIB = 1 << 20


def test_pools_share_the_memory_of_each_tier() -> None:
    slots = check(an_identity(), CacheConfig(MIB, 16 * MIB))
    assert isinstance(slots[Tier.DEVICE], Cut) and isinstance(slots[Tier.HOST], Cut)


def test_states_that_are_kept_more_often_have_more_room_where_memory_is_divided() -> None:
    every = 2 * CHUNK

    def slots(**policies: int) -> tuple[int, ...]:
        chosen = Policies(**policies)  # type: ignore[arg-type]
        found = divide(16 * MIB, POOLS, PAGE, CHUNK, chosen, records=True, what="host", granule=0)
        assert isinstance(found, tuple)
        return found

    (_, _, few), (pages, _, many) = slots(), slots(keep_states=f"every:{every}")
    assert many > few and many * every >= 0.9 * pages * PAGE
    assert slots(states=5)[1:] == (15, 5)
    assert spacing(POOLS, PAGE, CHUNK, every=every) <= every < spacing(POOLS, PAGE, CHUNK)
