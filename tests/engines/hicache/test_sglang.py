"""SGLang's own fixtures restore from kvarve what they stored, in every configuration that runs without a GPU.

It is run by SGLang's interpreter: `make test-engines`.
"""

from collections import Counter
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix
from sglang_engines import CONFIGS, KINDS, LATENTS, LAYOUTS, Engine, MakeFixtures, long
from sglang_witness import Witness

FULL, SWA, MAMBA, ALL = KINDS


def pools(cfg: Any) -> set[str]:
    return {"kv"} | ({"swa"} if cfg.has_swa else set()) | ({"mamba"} if cfg.has_mamba else set())


@pytest.mark.parametrize("interface", [1, 0])
@pytest.mark.parametrize(
    ("cfg", "layout"),
    # SGLang has no host pool for states that is not page first.
    [
        pytest.param(cfg, layout, marks=[] if cfg in KINDS else pytest.mark.long)
        for cfg in CONFIGS
        for layout in LAYOUTS
        if layout == LAYOUTS[0] or not cfg.has_mamba
    ],
    ids=lambda it: it if isinstance(it, str) else it.label,
)
def test_every_configuration_restores_what_it_saved(make: MakeFixtures, cfg: Any, layout: str, interface: int) -> None:
    fixtures = make(cfg, layout, interface_v1=interface)
    prompt = fixtures.prompt(fixtures.pages)
    producer = fixtures.engine()
    producer.produce(prompt)
    assert fixtures.engine().consume(prompt) == len(prompt)
    assert {pool for pool, _ in Witness.restored} == pools(cfg)
    assert len({key for pool, key in Witness.restored if pool == "kv"}) == fixtures.pages
    in_pieces = {name: pool.pages.in_pieces for name, pool in producer.witness._pages.pools.items()}
    whole = layout == "page_first_direct"
    assert in_pieces == {name: whole and (name != "kv" or bool(interface)) for name in pools(cfg)}
    fixtures.end()
    engine = make(cfg, layout, interface_v1=interface).engine()
    assert engine.consume(fixtures.prompt(fixtures.pages + 2)) == len(prompt), "pages outlive the engine and its store"
    assert engine.consume(fixtures.prompt(fixtures.pages, start=100_000)) == 0, "another prompt shares nothing"


@pytest.mark.parametrize("interface", [1, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cfg", LATENTS, ids=lambda cfg: cfg.label)
def test_latents_and_their_index_keys_are_restored(make: MakeFixtures, cfg: Any, layout: str, interface: int) -> None:
    fixtures = make(cfg, layout, interface_v1=interface)
    prompt = fixtures.prompt(4)
    fixtures.engine().produce(prompt)
    assert fixtures.engine().consume(fixtures.prompt(6)) == len(prompt)
    pools = {"kv", "indexer"} if cfg.index_keys else {"kv"}
    assert Counter(pool for pool, _ in Witness.restored) == dict.fromkeys(pools, 4)
    assert len(set().union(*Witness.saved.values())) == 4 * len(pools), "no two pages have the same bytes"
    if cfg.index_keys:
        engine = fixtures.engine()
        engine.lose("indexer", prompt, 2)
        assert engine.consume(prompt) == 2 * cfg.page_size, "latents are not restored without their index keys"


def lookup(engine: Engine, cfg: Any, keys: list[str], window: int) -> Any:
    """What the backend tells SGLang of these pages."""
    policy = PoolHitPolicy.TRAILING_PAGES
    transfers = [PoolTransfer(PoolName.MAMBA, keys=keys[-1:], hit_policy=policy)] if cfg.has_mamba else []
    if cfg.has_swa:
        transfers.append(PoolTransfer(PoolName.SWA, keys=keys[-window:], hit_policy=policy))
    return engine.backend.batch_exists_v2(keys, transfers)


@pytest.mark.parametrize("cfg", [MAMBA, SWA, *long(ALL)], ids=lambda cfg: cfg.label)
def test_every_legal_length_is_told(make: MakeFixtures, cfg: Any) -> None:
    fixtures = make(cfg)
    producer = fixtures.engine()
    ends = [fixtures.window_pages + extra for extra in (2, 4, 5)]
    for end in ends:  # a conversation, turn by turn
        producer.produce(fixtures.prompt(end))
    tree = producer.cache
    keys = fixtures._all_page_hashes(tree, match_prefix(tree, fixtures.prompt(ends[-1])).last_device_node)
    found = lookup(fixtures.engine(), cfg, keys, max(1, fixtures.window_pages))
    if cfg.has_mamba:
        assert found.restorable_prefix_pages == ends
    else:
        assert {*ends} <= {*found.restorable_prefix_pages}
    assert found.kv_hit_pages == ends[-1] == found.extra_pool_hit_pages[PoolName.KV]
    for end in ends[:-1]:
        assert fixtures.engine().consume(fixtures.prompt(end)) == end * cfg.page_size


def test_engines_that_differ_in_model_weights_or_layout_share_no_page(make: MakeFixtures) -> None:
    fixtures = make(FULL)
    prompt = fixtures.prompt(4)
    fixtures.engine().produce(prompt)
    assert fixtures.engine(weights="others").consume(prompt) == 0
    assert fixtures.engine(model="another").consume(prompt) == 0
    assert fixtures.engine(numerics="another").consume(prompt) == 0
    assert fixtures.engine().consume(prompt) == len(prompt)
    fixtures.end()
    assert make(FULL, LAYOUTS[1]).engine().consume(prompt) == 0
    assert make(FULL, interface_v1=0).engine().consume(prompt) == 0


# --- while the engine runs


def test_storage_is_attached_cleared_and_detached_at_run_time(make: MakeFixtures) -> None:
    fixtures = make(MAMBA)
    prompt = fixtures.prompt(4)
    fixtures.engine().produce(prompt)
    fixtures.engine(weights="others").produce(prompt)
    engine = fixtures.engine()
    cache = engine.cache
    assert cache.detach_storage_backend()[0] and not cache.enable_storage
    attach = cache.attach_storage_backend
    done, told = attach("dynamic", fixtures.extra_json(storge="file:///x"), served_model_name="served")
    assert not done and "unknown setting 'storge': did you mean storage?" in told
    done, told = attach("dynamic", fixtures.extra_json(), served_model_name="served")
    assert done, told
    assert engine.consume(prompt) == len(prompt)
    assert cache.clear_storage_backend()
    assert fixtures.engine().consume(prompt) == 0
    assert fixtures.engine(weights="others").consume(prompt) == len(prompt), "clear is of one model"
    fixtures.engine().produce(prompt)
    assert fixtures.engine().consume(prompt) == len(prompt)
