"""A request waits for what storage has of its prompt, where SGLang's scheduler has a request wait for HiCache's."""

from pathlib import Path
from typing import Any

import pytest
from linker_bed import Engine, MakeEngine, prompt

from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage, Rule

ASKED = prompt(5, 16)


def restarted(make_engine: MakeEngine, kind: str, folder: Path, **settings: Any) -> Engine:
    """An engine that has nothing, on a storage that has a prompt."""
    url = f"file://{folder}/pages?capacity=64MiB"
    before = make_engine(kind, 16, storage=url)
    before.serve(ASKED)
    before.drain()
    before.close()
    return make_engine(kind, 16, storage=url, **settings)


@pytest.mark.parametrize("kind", ["FULL", "FULL+SWA+MAMBA"])
def test_the_first_request_after_a_restart_begins_with_its_pages_from_storage(
    make_engine: MakeEngine, kind: str, tmp_path: Path
) -> None:
    engine = restarted(make_engine, kind, tmp_path, storage_wait="all")
    req = engine.arrive(ASKED)
    assert not engine.may_begin(req)
    engine.wait_for_storage(req)
    assert engine.cache.pop_prefetch_loaded_span(req.cache_request_handle) == (5 * 16, 0)
    assert engine.run(req, engine.match(req, ASKED), ASKED) == (0, 5, 0)
    engine.audit()
    assert not engine.linker.scheduler.core.leases


def test_nothing_waits_where_storage_has_no_more_or_is_not_to_be_waited_for(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = restarted(make_engine, "FULL", tmp_path, storage_wait="none")
    assert engine.may_begin(engine.arrive(ASKED))
    req = engine.arrive(prompt(5, 16, 2))
    engine.drain()
    assert engine.may_begin(req)
    assert engine.may_begin(req), "nor is it asked for twice"


def test_a_storage_that_hangs_is_waited_for_as_long_as_is_set(make_engine: MakeEngine) -> None:
    engine = make_engine("FULL", 16, storage_wait="0.05s")
    storage = FaultyStorage(MemoryStorage(1 << 22, bytes(32), ""), [Rule("hang")])
    engine.attach(storage)
    req = engine.arrive(ASKED)
    while not engine.may_begin(req):
        engine.linker.worker.wait(0.01)
    assert engine.match(req, ASKED).host_hit_length == 0
    engine.end(req)
    storage.release()


def test_a_request_that_waits_for_its_turn_is_not_forgotten_and_an_aborted_one_holds_nothing(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = restarted(make_engine, "FULL", tmp_path, storage_wait="all")
    req = engine.arrive(ASKED)
    monkeypatch.setattr("kvarve.connectors.sglang.link_plan.FORGET_S", -1.0)
    engine.drain()
    assert engine.linker.scheduler.core.leases, "what has come for it stays"
    engine.end(req)
    assert not engine.linker.scheduler.core.leases
    engine.audit()


@pytest.mark.parametrize("kind", ["FULL", "FULL+SWA", "FULL+MAMBA"])
def test_a_page_is_kept_with_those_before_it_that_have_left_the_host_and_not_the_device(
    make_engine: MakeEngine, kind: str
) -> None:
    engine = make_engine(kind, 16)
    longer = prompt(6, 16, 2, after=ASKED)
    engine.serve(ASKED)
    engine.settle()
    engine.drop_host()
    assert engine.serve(longer) == (5, 0, 1)
    engine.forget()
    assert engine.serve(longer) == (0, 6, 0)
    engine.audit()
