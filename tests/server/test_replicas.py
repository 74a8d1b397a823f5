"""Several real servers behind one port: requests find their pages, and an end of one of them loses none."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from servers import serving
from talk import refused

from kvarve.reference.server.openapi import OPERATIONS

pytestmark = pytest.mark.long
PATIENCE_S = 300.0
ADMIN = {"Authorization": "Bearer the-admin"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("replicas")
    words = ["--dp", 2, "--admin-key", "the-admin", "--api-key", "the-client"]
    with serving(folder, *words) as (process, client):
        client.headers["Authorization"], client.timeout = "Bearer the-client", httpx.Timeout(PATIENCE_S)
        yield client
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, (folder / "log").read_text()


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def ask(client: httpx.Client, prompt: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0} | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return sum(answer["usage"]["kvarve"]["cached_tokens"].values())


def states(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/admin/replicas", headers=ADMIN).json()["replicas"]
    return found


def served(client: httpx.Client) -> dict[str, float]:
    """Requests that each replica has done."""
    return {
        line.split('replica="')[1][0]: float(line.rsplit(" ", 1)[1])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("kvarve_requests_total{") and 'outcome="done"' in line
    }


def talk(number: int) -> str:
    return f"{number}: " + "a long story about it, " * 30


def test_all_replicas_serve_and_a_conversation_stays_with_one(client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as clients:
        cold = [*clients.map(lambda number: ask(client, talk(number)), range(8))]
    assert not any(map(cached, cold))
    assert len(served(client)) == 2 and all(served(client).values()), "both have computed some"
    warm = [ask(client, talk(number) + "and so on") for number in range(8)]
    assert all(cached(answer) >= 256 for answer in warm), [*map(cached, warm)]


def test_a_call_about_the_state_goes_to_all(client: httpx.Client) -> None:
    for number in range(6):
        ask(client, talk(number))
    flushed = client.post("/flush_cache", headers=ADMIN).json()
    assert len(flushed["replicas"]) == 2
    assert flushed["flushed_pages"] == sum(each["flushed_pages"] for each in flushed["replicas"]) > 0
    assert not any(cached(ask(client, talk(number))) for number in range(6))


def test_the_front_has_paths_of_its_own_that_want_the_admin_key(client: httpx.Client) -> None:
    assert {*client.get("/openapi.json").json()["paths"]} == {*OPERATIONS}
    assert "number" in refused(client.post("/admin/replicas/first/restart", headers=ADMIN), 400)
    for path in ("/admin/replicas/0/restart", "/admin/replicas/7/restart", "/v1/completions", "/flush_cache"):
        assert client.post(path, headers={"Authorization": "Bearer wrong"}, json={}).status_code == 401
    assert "there is no replica 7" in client.post("/admin/replicas/7/restart", headers=ADMIN).text


def under_traffic(client: httpx.Client, change: Callable[[], None]) -> list[int]:
    """The statuses of requests that were sent all the time while something changed; 0 for a stream that broke off."""
    over, statuses = threading.Event(), list[int]()

    def ask_on(number: int) -> None:
        at = 0
        while not over.is_set():
            body = {"prompt": f"{number}.{at} " + talk(number), "max_tokens": 4, "stream": bool(at % 2)}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                try:
                    answer.read()
                    statuses.append(answer.status_code)
                except httpx.RemoteProtocolError:
                    assert body["stream"], "nothing of an answer is sent before all of it is there"
                    statuses.append(0)
            at += 1

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask_on, number) for number in range(4)]
        try:
            until(lambda: len(statuses) >= 8)
            change()
            seen = len(statuses)
            until(lambda: len(statuses) >= seen + 8)
        finally:
            over.set()
        for each in asked:
            each.result()
    return statuses


def test_a_restart_of_each_replica_in_turn_loses_no_request(client: httpx.Client) -> None:
    before = [each["starts"] for each in states(client)]

    def is_new(number: int) -> bool:
        now = states(client)[number]
        return bool(now["starts"] == before[number] + 1 and now["up"] and not now["draining"])

    def restart() -> None:
        for number in range(2):
            assert client.post(f"/admin/replicas/{number}/restart", headers=ADMIN).status_code == 202
            until(lambda number=number: is_new(number))  # type: ignore[misc]

    assert {*under_traffic(client, restart)} == {200}


def test_a_replica_that_is_killed_is_started_again_and_its_requests_go_to_the_other(client: httpx.Client) -> None:
    before = [each["starts"] for each in states(client)]

    def kill() -> None:
        os.kill(states(client)[0]["pid"], signal.SIGKILL)
        until(lambda: states(client)[0]["starts"] == before[0] + 1 and states(client)[0]["up"])

    found = under_traffic(client, kill)
    # A stream that had begun cannot go on elsewhere, and does not look whole.
    assert {*found} <= {200, 0} and found.count(0) <= 4
