"""A storage, a page or an engine in trouble costs SGLang hits, and never a wrong byte, a lock or a slot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from linker_bed import KINDS, LATENT, Engine, Failed, MakeEngine, prompt
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from kvarve.connectors.sglang import link_plan
from kvarve.errors import ConfigError
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage, Rule

MIXES = [kind for kind in KINDS if kind not in LATENT]


@pytest.mark.parametrize("kind", MIXES)
def test_an_eviction_while_pages_are_loaded_takes_none_of_them(make_engine: MakeEngine, kind: str) -> None:
    engine = make_engine(kind, 16)
    asked, other = prompt(5, 16), prompt(5, 16, 2)
    engine.serve(asked)
    engine.forget()
    engine.serve(other)

    def evict() -> None:
        engine.evict()
        engine.drop_host_unheld()

    assert engine.serve(asked, between=evict) == (0, 5, 0)
    engine.audit()


@pytest.mark.parametrize("kind", MIXES)
def test_a_load_that_is_cancelled_leaves_nothing_behind(make_engine: MakeEngine, kind: str) -> None:
    engine = make_engine(kind, 16)
    asked = prompt(4, 16)
    engine.serve(asked)
    engine.forget()
    req, match = engine.begin(asked)
    assert engine.load(req, match) == 4
    slots = engine.cache.prefix_device_indices(req)
    engine.end_unused(req, slots)
    assert engine.cache.ready_to_load_host_cache() == -1
    assert not engine.linker.scheduler.core.leases
    assert engine.serve(asked) == (0, 4, 0)
    engine.audit()


@pytest.mark.parametrize("pool", ["kv", "swa", "mamba"])
def test_a_page_that_is_damaged_in_host_memory_aborts_its_request_and_is_not_offered_again(
    make_engine: MakeEngine, pool: str
) -> None:
    engine = make_engine("FULL+SWA+MAMBA", 16)
    asked = prompt(4, 16)
    engine.serve(asked)
    engine.forget()
    key = engine.page_keys(asked)[-1]
    for record in engine.linker.worker.records(pool, key):
        record[-1] ^= 1
    with pytest.raises(Failed, match="load failed"):
        engine.serve(asked)
    engine.audit()
    assert engine.linker.planner.counts["loads failed"] == 1
    assert engine.serve(asked).restored == 0
    engine.settle()
    engine.forget()
    assert engine.serve(asked) == (0, 4, 0), "it was offloaded anew"
    engine.audit()


def stored(engine: Engine, asked: list[int], **settings: Any) -> FaultyStorage:
    """A storage that has a prompt's pages, of which memory has none."""
    storage = FaultyStorage(MemoryStorage(1 << 26, bytes(32), ""), **settings)
    engine.attach(storage)
    engine.serve(asked)
    engine.drain()
    engine.forget()
    engine.drop_host()
    return storage


@pytest.mark.parametrize("call", ["exists", "get"])
@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_a_storage_that_fails_or_hangs_is_a_miss(make_engine: MakeEngine, trouble: str, call: Any) -> None:
    engine = make_engine("FULL+SWA", 16)
    asked = prompt(4, 16)
    storage = stored(engine, asked)
    if trouble == "fails":
        storage.rules = [Rule("raise", call)]
    else:
        storage.stall(call)
    req, match = engine.begin(asked)
    if trouble == "fails":
        engine.drain()
    else:
        while not storage.counts["stall"]:
            engine.linker.worker.wait(1.0)
            engine.cache.check_hicache_events()
    assert match.host_hit_length == engine.match(req, asked).host_hit_length == 0
    engine.end(req)
    assert engine.serve(asked) == (0, 0, 4)
    engine.audit()
    storage.rules = []
    storage.release()


@pytest.mark.parametrize("harm", ["flip", "truncate", "swap", "lose"])
def test_a_storage_that_lies_restores_no_wrong_byte(make_engine: MakeEngine, harm: Any) -> None:
    engine = make_engine("FULL+MAMBA", 16)
    asked = prompt(4, 16)
    storage = stored(engine, asked, rules=[Rule(harm, probability=0.5)], seed=3)
    req, _ = engine.begin(asked)
    engine.drain()
    match = engine.match(req, asked)
    served = engine.run(req, match, asked)
    assert served.restored < 4 and storage.counts[harm]
    engine.audit()


def test_an_offload_beyond_the_bound_is_refused_and_offered_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("FULL", 16)
    monkeypatch.setattr(link_plan, "MOST_OFFLOADS", 0)
    engine.serve(prompt(4, 16))
    assert not engine.cache.linker.pending_offloads
    assert engine.linker.planner.counts["offloads refused"] == 1
    monkeypatch.undo()
    assert engine.serve(prompt(4, 16)) == (4, 0, 0)
    engine.forget()
    assert engine.serve(prompt(4, 16)) == (0, 4, 0)


def test_a_window_page_without_a_slot_is_not_saved(make_engine: MakeEngine) -> None:
    engine = make_engine("FULL+SWA", 16)
    names, slots = engine.names(prompt(2, 16)), torch.arange(16, 48)
    given = [PoolTransfer(PoolName.KV, keys=names, device_indices=slots)]
    given += [PoolTransfer(PoolName.SWA, keys=names, device_indices=torch.zeros_like(slots))]
    assert engine.linker.offload(given)
    while not engine.linker.num_completed_offloads():
        engine.linker.worker.wait(1.0)
    engine.linker.pop_completed_offload()
    assert engine.linker.lookup("r", given) == []
    given[1].device_indices = slots
    engine.linker.offload(given)
    while not engine.linker.num_completed_offloads():
        engine.linker.worker.wait(1.0)
    assert engine.linker.pop_completed_offload()
    assert engine.linker.lookup("r", given) == [1, 2]


def test_a_host_that_is_too_small_keeps_what_it_can(make_engine: MakeEngine) -> None:
    engine = make_engine("FULL+SWA+MAMBA", 16, host_memory="512KiB")
    for seed in range(1, 13):
        engine.serve(prompt(6, 16, seed))
    engine.forget()
    served = [engine.serve(prompt(6, 16, seed)).restored for seed in range(12, 0, -1)]
    assert served[0] == 6 and served[-1] == 0
    engine.audit()


def test_nothing_is_found_or_stored_once_the_weights_have_changed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvarve.connectors.sglang import hicache_storage

    engine = make_engine("FULL", 16)
    engine.serve(prompt(4, 16))
    engine.forget()
    monkeypatch.setattr(hicache_storage._updates, "count", 1)
    assert engine.serve(prompt(4, 16)) == (0, 0, 4)
    assert not engine.cache.linker.pending_offloads


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"host_memory": "much"}, "cannot be read as a size"),
        ({"storages": "file:///x"}, "storages"),
        ({"storage": "nowhere:///x"}, "nowhere"),
    ],
)
def test_a_setting_that_cannot_work_is_one_message(make_engine: MakeEngine, extra: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_engine("FULL", 16, **extra)


def test_slots_that_are_not_allocated_by_pages_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allocated by pages of 16, got 1"):
        make_engine("FULL", 16, paged=False)


def test_pools_of_deepseek_v4_that_sglang_does_not_group_for_a_linker_are_one_message(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = property(lambda _: 64, lambda *_: None)
    monkeypatch.setattr(DeepSeekV4TokenToKVPool, "swa_page_size", other, raising=False)
    with pytest.raises(ConfigError, match="cannot keep these pools of DeepSeek-V4"):
        make_engine("V4", 256)
