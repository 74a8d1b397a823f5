"""What the live page is told of a server: true numbers, bounded, no prompt's text or salt, and only with the key."""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import PAGE, held
from talk import CHAT, COMPLETIONS, LONG_S, complete, refused, stream

from kvarve.cli.admin_client import describe
from kvarve.core.copies.effects import Refusal
from kvarve.pages.keys import KEY_BYTES, group_name, root_key
from kvarve.reference.server import live, live_cache
from kvarve.reference.server.live import ENDED, OPEN, Live
from kvarve.reference.server.live_cache import page_files
from kvarve.reference.server.live_history import COARSE, FINE, JOINED
from kvarve.reference.server.serve import Server
from kvarve.storage import FileStorage, StorageUsage

ID = "x-request-id"


def data(client: httpx.Client, holds: Callable[[dict[str, Any]], object] = lambda _: True) -> dict[str, Any]:
    """Ask until something holds: answers are shared for a moment, and a request has ended just after its answer."""
    end = time.monotonic() + LONG_S
    while True:
        time.sleep(0.05)
        answer = client.get("/live/data")
        assert answer.status_code == 200, answer.text
        if holds(found := dict(answer.json())):
            return found
        assert time.monotonic() < end, f"it does not come: {found}"


def of(found: dict[str, Any], id: str) -> dict[str, Any] | None:
    return next((each for each in found["requests"] if each["id"] == id), None)


@pytest.fixture
def watched(server: Server) -> Iterator[Live]:
    """The shared server's numbers, whose every answer is new."""
    yield Live(server.engine, "singer", lambda: 0, Counter())


def test_what_a_storage_has_lost_and_why_it_takes_nothing_is_on_the_page_in_the_metrics_and_the_status(
    server: Server, client: httpx.Client, watched: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = StorageUsage(1, 2, 3, 4, lost=284, damaged=5, room_bytes=0, read_only=True)
    monkeypatch.setattr(FileStorage, "usage", lambda storage: told)
    for why, words in ((Refusal.FULL, "has no room"), (Refusal.READ_ONLY, "can only be read")):
        monkeypatch.setattr(server.engine.cache.scheduler.core.storage, "refused", why)
        watched.sample()
        watched._countdown = 0
        found = watched.told()
        assert any(words in each for each in found["trouble"]), found["trouble"]
        assert f'kvarve_stores_refused{{reason="{why.name.lower()}"}} 1.0' in client.get("/metrics").text
    assert sum("284" in each or "could not read: 5" in each for each in found["trouble"]) == 2
    assert (found["storage"]["read_only"], found["storage"]["room_bytes"]) == (True, 0)
    text = client.get("/metrics").text
    for line in ("lost_objects_total", "damaged_objects_total", "room_bytes", "read_only"):
        assert f'kvarve_storage_{line}{{storage="0"}} ' in text
    status = describe(server.engine.admin.status())
    assert "nothing: it is only read" in status and "284 objects lost, 5 that could not be read" in status


def test_a_request_is_listed_with_its_tokens_by_tier_and_the_reason_of_each(
    client: httpx.Client, song: str, salt: str
) -> None:
    for id in ("live-cold", "live-warm"):
        answer = client.post(
            COMPLETIONS, json={"prompt": song * 3, "cache_salt": salt, "max_tokens": 3}, headers={ID: id}
        )
        usage = answer.json()["usage"]
        found = of(data(client, lambda found, id=id: of(found, id)), id)
        assert found is not None and found["status"] == 200 and found["finish"] == "length"
        assert (found["prompt"], found["completion"]) == (usage["prompt_tokens"], 3)
        assert found["cached"] == usage["kvarve"]["cached_tokens"] and found["reasons"] == usage["kvarve"]["reasons"]
        assert 0 < found["queued_s"] < found["ttft_s"] <= found["seconds"] and found["code"] is None
    assert found["cached"]["device"] > 0
    everything = data(client)
    assert sum(found["reasons"].values()) == found["prompt"] and set(found["reasons"]) <= set(everything["reasons"])
    assert everything["ttft_s"]["requests"] >= 2 and 0 < everything["ttft_s"]["p50"] <= everything["ttft_s"]["p95"]


def test_a_prefix_that_was_resumed_from_is_told_by_its_key_and_group(
    server: Server, client: httpx.Client, ids: list[int], salt: str
) -> None:
    prompt = ids * 4
    for _ in range(3):
        cached = complete(client, prompt, cache_salt=salt, max_tokens=1)["usage"]["kvarve"]["cached_tokens"]
    cache, own = server.engine.cache, json.dumps([salt, None])  # as the server combines `cache_salt` and `extra_key`
    root, tokens = root_key(cache.identity.fingerprint(), own), sum(cached.values())
    found = data(client, lambda found: [each for each in found["hottest"] if each["group"] == group_name(root)])
    (prefix,) = [each for each in found["hottest"] if each["group"] == group_name(root)]
    keys = cache.scheduler.prompt(prompt, own).keys
    assert prefix["key"] == keys[(tokens // PAGE - 1) * KEY_BYTES :][:8].hex()
    assert (prefix["tokens"], prefix["pages"], prefix["hits"]) == (tokens, tokens // PAGE, 2)
    assert (prefix["device"], prefix["resumes"]) == (tokens // PAGE, "device")


def test_neither_prompts_nor_answers_nor_salts_are_told(client: httpx.Client, song: str) -> None:
    secrets = ("a word of mine", "my own salt", "hvarv", "åkern")
    body = {
        "prompt": f"{secrets[0]} {song * 3}",
        "cache_salt": secrets[1],
        "max_tokens": 4,
        "stop": ["a word of mine"],
    }
    for _ in range(2):
        client.post(COMPLETIONS, json=body, headers={ID: "discreet"})
    stream(client, CHAT, {"messages": [{"role": "user", "content": secrets[0] * 20}], "max_tokens": 4})
    refused(client.post(COMPLETIONS, json=body | {"temperature": secrets[0]}, headers={ID: "discreet-400"}), 400)
    found = data(client, lambda found: of(found, "discreet-400") and of(found, "discreet"))
    text = json.dumps(found, ensure_ascii=False) + json.dumps(found)
    assert not [secret for secret in secrets if secret in text]
    refusal = of(found, "discreet-400")
    assert refusal is not None and (refusal["status"], refusal["code"]) == (400, "invalid_value")


def test_requests_that_wait_are_listed_until_they_end(server: Server, client: httpx.Client, song: str) -> None:
    def waits(found: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for each in found["open"]["requests"] if each["id"] == "held" and each["state"] == "waits"]

    with ThreadPoolExecutor(1) as threads, held(server.engine):
        body = {"prompt": song, "max_tokens": 1}
        asked = threads.submit(client.post, COMPLETIONS, json=body, headers={ID: "held"})
        (one,) = waits(data(client, waits))
        assert (one["prompt"], one["completion"], one["path"]) == (50, 0, COMPLETIONS)
    assert asked.result(LONG_S).status_code == 200
    found = data(client, lambda found: of(found, "held"))
    assert not [each for each in found["open"]["requests"] if each["id"] == "held"]


@pytest.mark.parametrize("own_server", [{"storage": ("memory://live-numbers?capacity=16MiB",)}], indirect=True)
def test_samples_add_up_to_what_the_engine_has_counted(own_server: Server, own_client: httpx.Client, song: str) -> None:
    engine = own_server.engine
    watched = Live(engine, "singer", lambda: 0, Counter())
    for sampled in range(1, 4):
        complete(own_client, song * 3, max_tokens=1)
        assert engine.settle()
        watched.sample()
        told = watched.told()
        history = told["history"]
        assert sum(history["prompt_tokens"]) == 150 * sampled == engine.counts.prompt_tokens
        assert sum(map(sum, history["cached_tokens"].values())) == 128 * (sampled - 1)
        late, hour = told["late"], watched.told(hour=True)["history"]
        assert (late["prompt_tokens"], sum(late["reasons"].values())) == (150 * sampled, 150 * sampled)
        assert sum(late["cached_tokens"].values()) == 128 * (sampled - 1)
        assert sum(history["requests"]) == sum(history["output_tokens"]) == sampled == told["total"]["requests"]
        assert hour["unix_s"] == history["unix_s"][-1:] and hour["prompt_tokens"] == [150 * sampled]
    speed = engine.counts.computed_tokens / engine.counts.prefill_compute_s
    assert engine.counts.computed_tokens == 150 + 2 * 22 and late["saved_s"] == pytest.approx(256 / speed, rel=0.01)
    assert late["advice"].startswith("15% lies behind the last line of the prefill grid, 64 tokens apart")
    for tier in told["tiers"]:
        now = sum(pool["bytes"] for pool in tier["pools"])
        assert 0 < now <= tier["capacity_bytes"] and history["bytes"][tier["name"]][-1] == now
    assert told["storage"]["attached"] and told["storage"]["up"]
    assert {lane["name"] for lane in told["lanes"]} >= {"device-to-host", "host-to-device", "storage-to-host"}


def test_the_answer_is_bounded_whatever_the_traffic(watched: Live) -> None:
    entries = [watched.recent.begin(f"{number:x}".rjust(128, "m"), COMPLETIONS) for number in range(ENDED + 5)]
    told = watched.told()["open"]
    assert told["count"] == ENDED + 5 and [each["id"] for each in told["requests"]] == [
        f"{number:x}".rjust(128, "m") for number in range(OPEN)
    ], "the oldest"
    for entry in entries:
        watched.recent.end(entry, 499)
    for number in range(FINE + 10):
        watched.sample()
        watched.mark("flush", f"{number} pages " * 20)
    sample = watched._history.last(2.0)
    assert sample is not None
    for _ in range(COARSE * JOINED):
        watched._history.add(sample)
    found = watched.told()
    assert found["open"] == {"count": 0, "requests": []}
    assert [each["status"] for each in found["requests"]] == [499] * ENDED
    assert len(found["history"]["unix_s"]) == FINE
    hour = watched.told(hour=True)
    assert COARSE <= len(hour["history"]["unix_s"]) <= COARSE + 1
    assert max(len(json.dumps(each)) for each in (found, hour)) < 128 << 10


def test_viewers_share_an_answer(own_client: httpx.Client, own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    told = Live.told
    monkeypatch.setattr(live_cache, "FRESH_S", 1000.0)
    monkeypatch.setattr(Live, "told", lambda *given: made.append(threading.current_thread().name) or told(*given))
    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda _: own_client.get("/live/data").content, range(12))]
    assert made == ["kvarve apart"], "once, and beside the event loop"
    assert len(set(answers)) == 1


@pytest.mark.parametrize("own_server", [{"storage": ("memory://live-marks?capacity=1MiB",)}], indirect=True)
def test_what_changes_the_server_is_marked_at_its_time(own_server: Server, own_client: httpx.Client) -> None:
    began_s, numbers = time.time(), own_client.get("/live/data").json()
    context = own_server.engine.model.max_tokens
    told = {"dtype": "float32", "context": context, "page_tokens": 16, "grid_tokens": 64, "shortest_hit": 65}
    assert numbers["facts"] == told | {"storage": ["memory"], "ranks": 1}
    engine, draining = own_server.engine, threading.Event()
    watched = Live(engine, "singer", lambda: 0, Counter(), draining.is_set)
    own_client.post("/flush_cache", params={"tiers": "host"})
    engine.admin.detach()
    watched.sample()
    engine.admin.attach("memory://live-marks?capacity=2MiB")
    watched.sample()
    draining.set()
    watched.sample()
    found = watched.told()
    marks = [(each["what"], each["text"]) for each in found["history"]["marks"]]
    assert [what for what, _ in marks] == ["start", "detach", "attach", "drain"] and found["draining"]
    assert marks[1:3] == [("detach", "storage: none"), ("attach", "storage: memory")]
    assert all(began_s - 1 <= each["unix_s"] <= time.time() + 1 for each in found["history"]["marks"])
    flushes = data(own_client, lambda found: len(found["history"]["marks"]) > 1)["history"]["marks"]
    assert ("flush", "0 pages of the host flushed") in [(each["what"], each["text"]) for each in flushes]


def test_a_storage_that_is_gone_is_told_with_its_error_and_what_to_do_and_holds_nothing_that_is_known(
    own_server: Server, own_client: httpx.Client, song: str, tmp_path: Path
) -> None:
    own_server.engine.admin.attach(f"file://{tmp_path}/pages?capacity=1MiB")
    watched = Live(own_server.engine, "singer", lambda: 0, Counter())
    watched.sample()
    assert watched.told()["storage"]["bytes"] is not None
    shutil.rmtree(tmp_path / "pages")
    complete(own_client, song * 3, max_tokens=1)
    data(own_client, lambda found: any("does not answer" in each for each in found["trouble"]))
    watched.sample()  # the storage has been asked by the sample before: its turn is not waited for
    found = watched.told()
    (trouble,) = found["trouble"]
    assert "was removed" in trouble and "`kvarve storage attach URL`" in trouble
    told = found["storage"]
    assert (told["up"], told["bytes"], told["objects"], told["capacity_bytes"]) == (False, None, None, 1 << 20)
    assert found["history"]["bytes"]["storage"][-1] is None
    assert found["history"]["marks"][-1]["what"] == "storage down"


def test_an_engine_that_is_busy_is_not_waited_for(own_server: Server, own_client: httpx.Client, song: str) -> None:
    for _ in range(2):
        complete(own_client, song * 3, max_tokens=1)
    before = data(own_client, lambda found: found["hottest"])["hottest"]
    with pytest.MonkeyPatch.context() as patch, held(own_server.engine):
        patch.setattr(live, "SLOW_S", 0.0)
        found = data(own_client, lambda found: found["trouble"])
        assert found["hottest"] == before and "the engine has not answered for" in found["trouble"][0]
    assert data(own_client, lambda found: not found["trouble"])["hottest"] == before

    def breaks() -> None:
        raise AssertionError("a law")

    with pytest.raises(AssertionError):
        own_server.engine.ask(breaks, LONG_S)
    found = data(own_client, lambda found: not found["up"])
    assert "a law" in found["trouble"][0]


@pytest.mark.parametrize("own_server", [{"api_key": "a", "admin_key": "the-client"}], indirect=True)
def test_the_numbers_want_the_operators_key_and_the_page_wants_none(own_client: httpx.Client) -> None:
    assert "needs the" in refused(own_client.get("/live/data"), 401)
    for wrong in ("a", "wrong"):
        assert "wrong" in refused(own_client.get("/live/data", headers={"Authorization": f"Bearer {wrong}"}), 401)
    assert own_client.get("/live/data", headers={"Authorization": "Bearer the-client"}).json()["model"] == "singer"
    for name, (_, media_type) in page_files().items():
        answer = own_client.get("/" if name == "page.html" else f"/live/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(media_type)
        assert "singer" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
