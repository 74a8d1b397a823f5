"""Pages come back from kvarve's host memory and storage into SGLang's slots, as they were offloaded."""

from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from linker_bed import KINDS, LATENT, Engine, Failed, MakeEngine, prompt
from sglang.srt.runtime_context import get_parallel
from sglang_engines import long

MIXES = [kind for kind in KINDS if kind not in LATENT]
BEDS = [(kind, page) for kind in MIXES for page in (16, 64)] + [("DSA", 64), ("V4", 256)]


@pytest.mark.parametrize("core", ["rust", *long("python")])
@pytest.mark.parametrize(("kind", "page"), [*BEDS, *long(*[(kind, 1) for kind in MIXES])])
def test_what_left_the_device_is_restored(make_engine: MakeEngine, kind: str, page: int, core: str) -> None:
    engine = make_engine(kind, page, core=core)
    asked = prompt(5, page)
    assert engine.serve(asked) == (0, 0, 5)
    engine.settle()
    assert engine.serve(asked) == (5, 0, 0)
    engine.forget()
    assert engine.serve(asked) == (0, 5, 0)
    engine.flush()
    longer = prompt(8, page, 2, after=asked)
    assert engine.serve(longer) == (0, 5, 3)
    engine.audit()


@pytest.mark.parametrize("kind", MIXES)
def test_each_buffer_is_of_the_layer_that_waits_for_it(make_engine: MakeEngine, kind: str) -> None:
    engine = make_engine(kind, 16)
    found = {name.value: {it.layer for it in arena.pool.buffers} for name, arena in engine.linker.pools.items()}
    full, others = {*engine.cfg.full_attention_layer_ids}, {*engine.cfg.non_full_layer_ids}
    layers = {"kv": full | others if kind == "FULL" else full, "swa": others, "mamba": others}
    assert found == {name: layers[name] for name in engine.pools}


@pytest.mark.parametrize("kind", MIXES)
def test_a_waiting_request_finds_more_as_its_pages_come_from_storage_after_a_restart(
    make_engine: MakeEngine, kind: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/pages?capacity=64MiB"
    before = make_engine(kind, 16, storage=url)
    asked = prompt(5, 16)
    before.serve(asked)
    before.drain()
    before.close()
    engine = make_engine(kind, 16, storage=url)
    req, match = engine.begin(asked)
    assert match.host_hit_length == 0, "the first lookup does not wait"
    engine.end(req)
    assert engine.run(*engine.wait(asked, 5), asked) == (0, 5, 0)
    engine.audit()


@pytest.mark.parametrize("kind", ["FULL+MAMBA", "DSA"])
def test_replicas_of_data_parallel_attention_share_what_they_store(
    make_engine: MakeEngine, kind: str, tmp_path: Path
) -> None:
    url, page = f"file://{tmp_path}/pages?capacity=64MiB", 64 if kind == "DSA" else 16
    asked = prompt(5, page)
    for rank in range(2):
        sizes = {f"{of}_size": 2 for of in ("tp", "moe_tp", "attn_dp")}
        with get_parallel().override(**sizes, tp_rank=rank, moe_tp_rank=rank, attn_dp_rank=rank):
            engine = make_engine(kind, page, storage=url)
            if rank:
                assert engine.run(*engine.wait(asked, 5), asked) == (0, 5, 0)
            else:
                engine.serve(asked)
            engine.drain()
            engine.audit()


@pytest.mark.parametrize("change", ["weights", "page"])
def test_other_weights_and_other_pages_share_nothing(make_engine: MakeEngine, change: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pages?capacity=64MiB"
    before = make_engine("FULL", 16, storage=url)
    asked = prompt(4, 16)
    before.serve(asked)
    before.drain()
    changed: dict[str, Any] = {"weights": "others"} if change == "weights" else {}
    engine = make_engine("FULL", 16 if changed else 32, storage=url, **changed)
    req, _ = engine.begin(asked)
    engine.drain()
    assert engine.match(req, asked).host_hit_length == 0
    engine.end(req)


def test_a_shorter_prompt_resumes_where_all_pools_have_what_it_reads(make_engine: MakeEngine) -> None:
    found = {}
    for kind in MIXES:
        engine = make_engine(kind, 16)
        engine.serve(prompt(6, 16))
        engine.forget()
        found[kind] = engine.serve(prompt(6, 16)[: 4 * 16]).restored
        engine.audit()
    assert found == {"FULL": 4, "FULL+SWA": 4, "FULL+MAMBA": 0, "FULL+SWA+MAMBA": 0}


@pytest.mark.parametrize("kind", MIXES)
def test_a_branch_resumes_from_the_device_and_goes_on_from_the_host(make_engine: MakeEngine, kind: str) -> None:
    engine = make_engine(kind, 16)
    trunk = prompt(4, 16)
    branches = [prompt(7, 16, seed, after=trunk) for seed in (2, 3)]
    for asked in (trunk, *branches):
        engine.serve(asked)
    engine.forget()
    assert engine.serve(trunk) == (0, 4, 0)
    assert [engine.serve(asked) for asked in branches] == [(4, 3, 0), (4, 3, 0)]
    engine.audit()


def test_what_is_loaded_is_not_copied_to_the_host_again(make_engine: MakeEngine) -> None:
    engine = make_engine("FULL+SWA+MAMBA", 16)
    asked = prompt(5, 16)
    engine.serve(asked)
    engine.forget()
    copied = engine.linker.scheduler.core.counters.backed_up
    engine.serve(asked)
    engine.settle()
    assert engine.linker.scheduler.core.counters.backed_up == copied
    assert engine.linker.planner.counts["offloads not stored"] == 0


@pytest.mark.parametrize("kind", MIXES)
def test_requests_of_a_batch_are_loaded_together(make_engine: MakeEngine, kind: str) -> None:
    engine = make_engine(kind, 16)
    prompts = [prompt(4, 16, seed) for seed in (1, 2)]
    for asked in prompts:
        engine.serve(asked)
    engine.forget()
    batch = [(asked, *engine.begin(asked)) for asked in prompts]
    assert [engine.load(req, match) for _, req, match in batch] == [4, 4]
    slots = [engine.cache.prefix_device_indices(req) for _, req, _ in batch]
    engine.linker.layer_done_counter.set_consumer(engine.cache.ready_to_load_host_cache())
    assert engine.cache.finish_external_linker_loads([req for _, req, _ in batch]) == []
    for (asked, req, _), mine in zip(batch, slots, strict=True):
        engine.check(engine.names(asked), mine, int(req.kv.mamba_pool_idx) if engine.cfg.has_mamba else None)
        engine.end_unused(req, mine)
    engine.audit()
    assert engine.cache.ready_to_load_host_cache() == -1


def leases(engine: Engine) -> int:
    return len(engine.linker.scheduler.core.leases)


def test_only_the_last_lookups_hold_pages(make_engine: MakeEngine) -> None:
    engine = make_engine("FULL", 16)
    prompts = [prompt(2, 16, seed) for seed in range(1, 9)]
    for asked in prompts:
        engine.serve(asked)
    engine.forget()
    begun = [engine.begin(asked) for asked in prompts]
    assert leases(engine) == 4
    assert engine.load(*begun[0]) == 0, "it was looked up too long ago, on all ranks"
    assert engine.load(*begun[-1]) == 2
    for req, _ in begun:
        engine.end_unused(req, engine.cache.prefix_device_indices(req))
    engine.linker.reset()
    assert leases(engine) == 0
    engine.audit()


def test_a_forward_reads_its_first_layers_while_the_last_ones_are_copied(make_engine: MakeEngine) -> None:
    engine = make_engine("FULL", 16)
    asked = prompt(4, 16)
    engine.serve(asked)
    engine.forget()
    copies, go_on, calls = engine.linker.worker.transfers._copies, Event(), count()
    move = copies._mover.move

    def slow(*given: Any) -> None:
        if next(calls) == 2:  # two layers have been copied
            assert go_on.wait(30)
        move(*given)

    copies._mover.move = slow
    counter, pages = engine.linker.layer_done_counter, engine.pools["kv"].rows

    def first_layers() -> None:
        counter.wait_until(0)
        counter.wait_until(1)
        slots = engine.cache.prefix_device_indices(req)[::16] // 16
        assert all((pages[layer][slots] != 0).any() for layer in (0, 1))
        assert all((pages[layer][slots] == 0).all() for layer in (2, 3))
        go_on.set()

    for tensor in pages:
        tensor.zero_()
    req, match = engine.begin(asked)
    assert engine.run(req, match, asked, first_layers) == (0, 4, 0)
    engine.audit()


@pytest.mark.parametrize("call", [0, 2])
def test_a_copy_that_fails_aborts_its_requests_and_the_next_load_is_whole(make_engine: MakeEngine, call: int) -> None:
    engine = make_engine("FULL", 16)
    asked = prompt(4, 16)
    engine.serve(asked)
    engine.forget()
    copies, calls = engine.linker.worker.transfers._copies, count()
    move = copies._mover.move

    def fails(*given: Any) -> None:
        if next(calls) == call:
            raise OSError("no such copy")
        move(*given)

    copies._mover.move = fails
    with pytest.raises(Failed):
        engine.serve(asked)
    assert engine.serve(asked) == (0, 4, 0)
    engine.audit()
