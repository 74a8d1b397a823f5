"""Every message between a scheduler and a worker is plain data: it can be pickled, and comes back equal."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
from wire import MESSAGES, PLAIN, SETTINGS, VALUES, PlainReader

from kvarve.cache.config import CacheConfig
from kvarve.cache.messages import ChangeMade, ChangeProposed, ChangeRefused, Report
from kvarve.cache.scheduler import Prompt
from kvarve.core.copies.effects import (
    Began,
    Column,
    Copy,
    Ended,
    Hurry,
    Page,
    Pages,
    Probe,
    Refusal,
    Release,
    Verified,
    canonical,
)
from kvarve.core.core import Hit
from kvarve.core.core_config import Counters
from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.headroom import Demand
from kvarve.core.observe.reasons import Reason
from kvarve.core.slots.extents import Cut
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec, Tier

BUFFER = BufferSpec("k", (4, 3), "float32")
POOL = PoolSpec("attention", (BUFFER,), None)
CONFIG = CacheConfig(1 << 20, 1 << 20, ("file:///tmp/near?capacity=1GiB", "file:///tmp/far?capacity=1GiB"))
PAGE = Page(0, bytes(32), -1, 7)
COLUMN = Column(0, bytes(64), (-1, 3), (7, 1 << 80))
PAGES = Pages((COLUMN, Column(1, bytes(32), (2,), (4,))))
PROPOSED = ChangeProposed(3, CONFIG, back_up=True)
SAMPLES: list[Any] = [
    PAGE,
    Cut(4, (2, 1), (1, 1), 8192),
    COLUMN,
    PAGES,
    Copy(1, Tier.HOST, Tier.DEVICE, PAGES, b"root", 0.5),
    Probe(2, PAGES, b"root", 0.5),
    Hurry((2, 3)),
    Release(3, ((0, 7), (1, 8))),
    Began(2),
    Verified(2, 1 << 200, 3),
    Ended(2, 1 << 200, 3),
    Ended(2, 1 << 200, 3, Refusal.READ_ONLY),
    Refusal.FULL,
    Report([Began(1), Verified(1, 5), Ended(1, 5)], up=False, proposed=PROPOSED),
    PROPOSED,
    ChangeMade(3),
    ChangeRefused(3, "another rank cannot", busy=False),
    CONFIG,
    CONFIG.policies,
    CONFIG.policies.write,
    CONFIG.policies.snapshots,
    ModelIdentity("test", "w", "float32", 64, 128, (POOL,)),
    POOL,
    BUFFER,
    Tier.STORAGE,
    Prompt(b"root", b"tokens", 64),
    Demand([1], [[2], [3]]),
    Hit(1, 2, 3, (2,)),
    Counters(fetched=3),
    Reason.TOO_LATE,
    Phase.READY,
    range(3),
    frozenset({1}),
]


def test_whatever_ranks_decide_differently_is_written_differently() -> None:
    """Ranks compare what they have decided by these bytes."""
    changes: list[dict[str, Any]] = [{"pool": 1}, {"keys": b"\1" * 64}, {"sources": (0, 3)}, {"targets": (7, 2)}]
    others = [COLUMN._replace(**change) for change in changes]
    columns = [(), (COLUMN,), (COLUMN, COLUMN), *((other,) for other in others), *((COLUMN, each) for each in others)]
    columns += [(other, COLUMN) for other in others]
    copy = Copy(1, Tier.HOST, Tier.DEVICE, PAGES, b"root", 0.5)
    orders: list[Any] = [
        copy,
        *(replace(copy, pages=Pages(each)) for each in columns),
        *(replace(copy, **change) for change in ({"op": 2}, {"urgent": True}, {"root": b"another"})),
        Probe(1, PAGES, b"root"),
        Hurry((1,)),
        ChangeMade(1),
    ]
    written = [canonical(order) for order in orders]
    assert len({*written}) == len(orders)
    assert written == [canonical(pickle.loads(pickle.dumps(order))) for order in orders]


def test_pages_are_read_one_by_one_as_their_columns_say() -> None:
    made = [Page(0, bytes(32), -1, 7), Page(0, bytes(32), 3, 1 << 80), Page(1, bytes(32), 2, 4)]
    assert [*PAGES] == made and len(PAGES) == 3 and PAGES[2] == made[2] and [*PAGES[1:]] == made[1:]


def test_there_is_a_sample_of_every_kind() -> None:
    assert {Copy, Probe, Began, Verified, Ended, Report, ChangeProposed, ChangeMade, ChangeRefused} <= MESSAGES
    assert {type(sample) for sample in SAMPLES} == MESSAGES | SETTINGS | VALUES


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_message_comes_back_equal_and_is_made_of_plain_data(sample: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(sample, protocol)) == sample
    made_of: set[type] = set()
    assert PlainReader(pickle.dumps(sample), made_of).load() == sample
    assert made_of <= PLAIN


def test_the_reader_refuses_what_is_not_plain() -> None:
    with pytest.raises(pickle.UnpicklingError, match="not plain data"):
        PlainReader(pickle.dumps(Lease), set()).load()
