"""A store that is corrupt, failing, hanging, late or full costs SGLang hits, and never a request or a wrong byte."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sglang_engines import KINDS, MakeFixtures, long
from sglang_witness import Sick, Witness

from kvarve.connectors.sglang import hicache_storage as connector
from kvarve.connectors.sglang.hicache import page_key
from kvarve.testing import Rule
from kvarve.testing.faulty_storage import Fault

FULL, SWA, MAMBA, ALL = KINDS
DAMAGE: tuple[Fault, ...] = ("lose", "truncate", "flip", "swap")
SOON_S = 0.5  # of calls that never answer, and long enough for a busy machine to reach them


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sick]:
    storages = Sick()
    monkeypatch.setattr(connector, "open_guarded", storages.open)
    yield storages
    storages.heal()


@pytest.mark.parametrize("harm", ["flip", "lost", *long("truncate", "deleted")])
@pytest.mark.parametrize(
    ("cfg", "pool"),
    [(FULL, "kv"), (SWA, "swa"), (MAMBA, "mamba"), *long((SWA, "kv"), (MAMBA, "kv"), (ALL, "swa"), (ALL, "mamba"))],
    ids=lambda it: it if isinstance(it, str) else it.label,
)
def test_a_page_that_is_damaged_or_gone_is_no_hit_and_is_stored_anew(
    make: MakeFixtures, sick: Sick, cfg: Any, pool: str, harm: str
) -> None:
    fixtures = make(cfg)
    prompt = fixtures.prompt(fixtures.pages)
    producer = fixtures.engine()
    producer.produce(prompt)
    (storage,) = sick.storages
    deepest = [key for of, key in Witness.saved if of == pool][-1]
    victim = producer.witness._pages.pools[pool].kind.name(page_key(deepest))
    engine = fixtures.engine()
    if harm == "lost":
        sick.storages[1].lost = frozenset([victim])
    elif harm == "deleted":
        storage.delete([victim])
    else:
        getattr(storage, harm)(victim)
    hit = engine.consume(prompt)
    assert hit < len(prompt)
    counts = engine.witness.counts
    assert counts["damaged"] == (harm in ("flip", "truncate"))
    assert counts["gone"] == (harm == "lost")
    sick.storages[1].restore()
    fixtures.engine().produce(prompt)
    assert fixtures.engine().consume(prompt) == len(prompt)


@pytest.mark.parametrize("cfg", [MAMBA, *long(ALL)], ids=lambda cfg: cfg.label)
@pytest.mark.parametrize("call", ["exists", "get", "put"])
def test_a_store_that_fails_or_hangs_is_a_miss_until_it_is_well(
    make: MakeFixtures, sick: Sick, cfg: Any, call: Any
) -> None:
    fixtures = make(cfg)
    prompt = fixtures.prompt(fixtures.pages)
    fixtures.engine().produce(prompt)
    for trouble in ("fails", "hangs"):
        # A machine that is busy for SOON_S makes a call late before it can fail.
        engine = fixtures.engine(**({} if trouble == "fails" else {"deadline_s": SOON_S}))
        storage = sick.storages[-1]
        if trouble == "fails":
            storage.rules = [Rule("raise", call)]
        else:
            storage.stall(call)
        if call == "put":
            engine.produce(fixtures.prompt(fixtures.pages, start=100_000 if trouble == "fails" else 200_000))
            assert engine.witness.counts["stored"] == 0
        else:
            assert engine.consume(prompt) == 0
        assert engine.witness.counts["failed" if trouble == "fails" else "late"] > 0
        sick.heal()
        engine.settle()
    assert fixtures.engine().consume(prompt) == len(prompt)


def test_a_store_with_random_trouble_of_its_own_restores_no_wrong_byte(make: MakeFixtures, sick: Sick) -> None:
    fixtures = make(MAMBA)
    length = fixtures.pages * MAMBA.page_size
    hits, counts = [], Counter[str]()
    for turn in range(1, 5):
        prompt = fixtures.prompt(fixtures.pages, start=turn * 100_000)
        producer = fixtures.engine()
        sick.storages[-1].rules = [Rule(fault, probability=0.15) for fault in DAMAGE]
        producer.produce(prompt)
        for _ in range(3):
            consumer = fixtures.engine()
            sick.storages[-1].rules = [Rule("short", probability=0.05), Rule("raise", "get", probability=0.1)]
            hits.append(consumer.consume(prompt))
            counts.update(consumer.witness.counts)
        fixtures.end()
        fixtures = make(MAMBA)
    assert max(hits) <= length
    assert counts["damaged"] and counts["loaded"]
