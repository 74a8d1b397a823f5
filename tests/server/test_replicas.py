"""Several real servers behind one port: requests find their pages, and an end of one of them loses none."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from talk import refused

import forks
from kvarve.server.openapi import OPERATIONS

PATIENCE_S = 300.0
ADMIN = {"Authorization": "Bearer the-admin"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the server's log."""
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    ready = folder / "ready"
    words = ["serve", "--dp", "2", "--port", "0", "--page-tokens", "16", "--chunk-tokens", "64", "--threads", "1"]
    words += ["--ready-file", str(ready), "--admin-key", "the-admin", "--api-key", "the-client"]
    breakable = Path(__file__).with_name("breakable.py")
    with (folder / "log").open("w") as log:
        process = forks.Popen([sys.executable, str(breakable), *words], stdout=log, stderr=log)
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        headers = {"Authorization": "Bearer the-client"}
        with httpx.Client(base_url=ready.read_text().strip(), timeout=PATIENCE_S, headers=headers) as client:
            yield client
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


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


def test_the_live_page_shows_one_replica_at_a_time(client: httpx.Client) -> None:
    assert "text/html" in client.get("/").headers["content-type"]
    for number in (0, 1):
        answer = client.get("/live/data", params={"replica": number}, headers=ADMIN)
        assert answer.status_code == 200 and answer.headers["x-kvarve-replicas"] == "2"
    ids = {"x-request-id": "to-one"}
    assert client.post("/v1/completions", json={"prompt": "seen", "max_tokens": 1}, headers=ids).status_code == 200

    def seen(number: int) -> bool:
        told = client.get("/live/data", params={"replica": number}, headers=ADMIN).json()
        return any(each["id"] == "to-one" for each in told["requests"])

    until(lambda: seen(0) != seen(1))
    assert client.get("/live/data").status_code == 401, "the API key does not open it"
    assert client.get("/live/data", params={"replica": 2}, headers=ADMIN).status_code == 404


def test_a_call_about_the_state_goes_to_all(client: httpx.Client) -> None:
    for number in range(6):
        ask(client, talk(number))
    flushed = client.post("/flush_cache", headers=ADMIN).json()
    assert len(flushed["replicas"]) == 2
    assert flushed["flushed_pages"] == sum(each["flushed_pages"] for each in flushed["replicas"]) > 0
    assert not any(cached(ask(client, talk(number))) for number in range(6))


def test_the_front_counts_what_it_rejects_itself_and_no_answer_of_a_replica(client: httpx.Client) -> None:
    assert client.post("/admin/replicas/9/restart", headers=ADMIN).status_code == 404
    assert client.post("/v1/completions", json={"prompt": 5.5}).status_code == 400
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("kvarve_rejected_requests")]
    own = [line for line in lines if 'replica="front"' in line]
    assert any('status="404"' in line for line in own) and not any('status="400"' in line for line in own)
    assert any('status="400"' in line for line in lines)


def test_the_document_has_the_paths_of_the_front_too(client: httpx.Client) -> None:
    assert {*client.get("/openapi.json").json()["paths"]} == {*OPERATIONS}
    assert "number" in refused(client.post("/admin/replicas/first/restart", headers=ADMIN), 400)


def test_keys_are_asked_for_as_by_one_server(client: httpx.Client) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    body = {"prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json=body, headers=wrong).status_code == 401
    assert client.post("/flush_cache", headers=wrong).status_code == 401
    for path in ("/admin/replicas/0/restart", "/admin/replicas/7/restart"):
        assert client.post(path, headers=wrong).status_code == 401
    assert "there is no replica 7" in client.post("/admin/replicas/7/restart", headers=ADMIN).text


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": 7}', b"[1]", b'{"prompt": "\\ud800"}', b'{"messages": {}}'])
def test_what_is_no_request_gets_one_clear_error(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400) and ("choices" in answer.json() or answer.json()["error"]["message"])


def test_a_body_that_is_too_large_is_refused_before_it_is_sent_on(client: httpx.Client) -> None:
    assert client.post("/v1/completions", content=b"x" * (10 << 20)).status_code == 413


def test_a_stranger_who_sends_on_is_answered_and_closed(client: httpx.Client) -> None:
    url = client.base_url
    with socket.create_connection((url.host, url.port or 0), timeout=PATIENCE_S) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = b"".join(iter(lambda: link.recv(4096), b""))  # until the front has said its last
        assert answer.startswith(b"HTTP/1.1 401 ") and b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"}") and b"this needs the API key" in answer
        with pytest.raises(OSError):
            while True:
                link.sendall(b"1\r\nx\r\n" * 500)


def test_a_request_that_cannot_be_sent_on_counts_for_no_replica(client: httpx.Client) -> None:
    url = client.base_url
    with socket.create_connection((url.host, url.port or 0)) as link:
        head = b"POST %2Fv1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-client\r\n"
        link.sendall(head + b'Content-Length: 14\r\n\r\n{"prompt":"x"}')
        assert b" 400 " in link.recv(1 << 16).split(b"\r\n")[0]
    until(lambda: not any(each["busy"] for each in states(client)))


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


def is_started_again(client: httpx.Client, number: int, starts: int) -> bool:
    now = states(client)[number]
    return bool(now["starts"] == starts + 1 and now["up"])


@pytest.mark.long
def test_a_replica_whose_engine_has_stopped_is_started_again_and_its_requests_go_to_the_other(
    client: httpx.Client, folder: Path
) -> None:
    before = states(client)

    def stop() -> None:
        os.kill(before[0]["pid"], signal.SIGUSR1)
        until(lambda: states(client)[0]["pid"] != before[0]["pid"])

    found = under_traffic(client, stop)
    until(lambda: is_started_again(client, 0, before[0]["starts"]))  # sooner without that traffic
    assert {*found} <= {200, 0} and found.count(0) <= 4
    assert states(client)[1]["starts"] == before[1]["starts"]
    assert (folder / "log").read_text().count("replica 0: its engine has stopped") == 1


def test_a_replica_that_hangs_is_killed_and_comes_back_with_the_storage_of_the_other(
    client: httpx.Client, folder: Path
) -> None:
    before = states(client)

    def hang() -> None:
        os.kill(before[1]["pid"], signal.SIGSTOP)
        until(lambda: states(client)[1]["pid"] != before[1]["pid"])
        body = {"url": f"file://{folder / 'pages'}?capacity=64MiB"}
        answer = client.put("/admin/storage", json=body, headers=ADMIN)
        assert answer.status_code == 200 and answer.json()["attached"], answer.text

    found = under_traffic(client, hang)
    until(lambda: is_started_again(client, 1, before[1]["starts"]))
    assert {*found} <= {200, 0} and found.count(0) <= 4
    assert states(client)[0]["starts"] == before[0]["starts"], "the one that computes for both is no less well"
    assert (folder / "log").read_text().count("replica 1 has not answered") == 1
    storages = client.get("/admin/storage", headers=ADMIN).json()["replicas"]
    assert [each["attached"] for each in storages] == [True, True]
    assert client.delete("/admin/storage", headers=ADMIN).status_code == 200
