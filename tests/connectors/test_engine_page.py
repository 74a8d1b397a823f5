"""The live page and the metrics that kvarve serves beside an engine that has a server of its own."""

import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from simulated_vllm import SimulatedVllm
from starlette.testclient import TestClient
from test_plan import ask, engine, prompt

from kvarve.cache.config import CacheConfig
from kvarve.cache.worker import CacheWorker
from kvarve.connectors import engine_page
from kvarve.connectors.engine_page import EnginePage, app_of, open_page
from kvarve.connectors.levels import Levels, levels_of, port_of
from kvarve.core.observe.reasons import Reason
from kvarve.errors import ConfigError
from kvarve.reference.server import live_cache

STORAGE = "memory://beside-an-engine?capacity=1MiB"


@pytest.fixture(scope="module")
def levels() -> Iterator[Levels]:
    """A rank's, as they come from another process."""
    worker = CacheWorker(engine().planner._scheduler.identity, CacheConfig(1 << 20, 1 << 20, (STORAGE,)))
    yield pickle.loads(pickle.dumps(levels_of(worker)))
    worker.close(5.0, 5.0, up=True)


@pytest.fixture
def sim() -> SimulatedVllm:
    return engine(storage={})


@pytest.fixture
def page(sim: SimulatedVllm, levels: Levels, monkeypatch: pytest.MonkeyPatch) -> Iterator[EnginePage]:
    monkeypatch.setattr(engine_page, "LOOK_S", 0.0)
    monkeypatch.setattr(live_cache, "FRESH_S", 0.0)
    page = EnginePage("a model", sim.planner._scheduler, {0: levels, 1: levels}, lambda: None)
    yield page
    page.end()


def asked(page: EnginePage, path: str, host: str = "127.0.0.1") -> Any:
    return TestClient(app_of(page), base_url=f"http://{host}").get(path)


def told(page: EnginePage) -> dict[str, Any]:
    answer = asked(page, "/live/data")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_hits_by_tier_are_told_beside_an_engine_and_requests_are_left_to_it(
    sim: SimulatedVllm, page: EnginePage
) -> None:
    page._look()  # somebody looks
    for name in ("cold", "device", "host"):
        ask(sim, prompt(70), name)
        if name == "device":
            sim.reset()
    page.look(sim.planner.reasons, [True, True])
    page.sample()
    page.sample()
    found = told(page)
    assert [each["what"] for each in found["history"]["marks"]] == ["start"]
    assert found["late"]["cached_tokens"] == {"device": 64, "host": 64, "storage": 0}
    assert found["total"] == {"prompt_tokens": 210, "cached_tokens": 128}
    assert sum(found["late"]["reasons"].values()) == 210 and found["late"]["advice"]
    (host,) = found["tiers"]
    assert [pool["name"] for pool in host["pools"] if pool["pages"]] == ["full", "window", "state"]
    assert found["hottest"][0]["tokens"] == 64 and {lane["name"] for lane in found["lanes"]} >= {"host-to-storage"}
    assert (found["model"], found["facts"]["ranks"], found["facts"]["storage"]) == ("a model", 2, ["memory"])
    assert not {"requests", "running", "ttft_s", "per_s"} & {*found, *found["history"]}
    text = asked(page, "/metrics", "localhost").text
    assert '<main id="main"' in asked(page, "/").text
    for line in ('kvarve_cached_tokens_total{tier="host"} 64.0', "kvarve_prompt_tokens_total 210.0"):
        assert line in text
    assert "kvarve_storage_up 1.0" in text and "ttft" not in text and "kvarve_requests" not in text


def test_a_rank_whose_storage_is_down_is_named_with_its_error(
    sim: SimulatedVllm, page: EnginePage, levels: Levels
) -> None:
    page.look(sim.planner.reasons, [True, True])
    assert not told(page)["trouble"]
    page.reported({1: replace(levels, storage={**levels.storage, "up": False, "last_error": "no route"})})
    page.look(sim.planner.reasons, [True, False])
    found = told(page)
    assert [(each["rank"], each["up"], each["last_error"]) for each in found["ranks"]] == [
        (0, True, None),
        (1, False, "no route"),
    ]
    (trouble,) = found["trouble"]
    assert "does not answer" in trouble and "no route (rank 1)" in trouble and "attach" not in trouble


def test_a_page_of_another_site_cannot_ask_by_its_own_name(page: EnginePage) -> None:
    for path in ("/", "/live/data", "/metrics"):
        answer = asked(page, path, "evil.example")
        assert answer.status_code == 421 and "use 127.0.0.1" in answer.json()["error"]["message"]


def test_what_is_adjusted_has_its_name_in_the_connector(page: EnginePage) -> None:
    for reason, name in ((Reason.EVICTED_HOST, "host_memory"), (Reason.TOO_LATE, "storage_wait")):
        said = page._advice({Reason.HIT_DEVICE: 88, reason: 12}, page.now())
        assert said.startswith("12% ") and name in said and "--" not in said


def test_each_engine_of_several_takes_the_next_port_and_a_word_is_no_port() -> None:
    assert port_of(0, {}) is None and port_of(0, {"KVARVE_PORT": ""}) is None
    assert [port_of(number, {"KVARVE_PORT": "9100"}) for number in (0, 3)] == [9100, 9103]
    for given, number in (("web", 0), ("65535", 1), ("0", 0), ("-1", 0), ("99999999999", 0)):
        with pytest.raises(ConfigError, match="KVARVE_PORT must be a port"):
            port_of(number, {"KVARVE_PORT": given})


def test_a_port_that_is_taken_leaves_no_page_behind(sim: SimulatedVllm, levels: Levels) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        open_page(other.getsockname()[1], "a model", sim.planner._scheduler, {0: levels}, lambda: None)
