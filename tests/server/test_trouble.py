"""Clients disconnect, requests fail, and the server ends: other requests are not affected, and nothing leaks."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from talk import COMPLETIONS, events, metrics, refused, stream, text, until

from kvarve.reference.engine import turns as turns_module
from kvarve.reference.server.serve import Server


def test_a_client_that_hangs_up_ends_the_request_that_it_waits_for(
    server: Server, client: httpx.Client, song: str
) -> None:
    before = metrics(client)
    body = json.dumps({"prompt": song, "max_tokens": 900, "ignore_eos": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.sendall(head + body)
        until(client, lambda now: now["kvarve_requests_running"] == 1)
    name = "kvarve_requests_total.aborted"
    after = until(client, lambda now: now[name] > before[name])
    assert after["kvarve_requests_running"] == after["kvarve_leases"] == 0


@pytest.mark.parametrize("own_server", [{"max_running": 1, "max_waiting": 1}], indirect=True)
def test_one_request_too_many_gets_503(own_client: httpx.Client, song: str) -> None:
    body = {"prompt": song, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as pool, own_client.stream("POST", COMPLETIONS, json=body) as first:
        lines = first.iter_lines()  # dropping the generator closes the connection
        next(lines)
        second = pool.submit(text, own_client, song, max_tokens=1)
        until(own_client, lambda now: now["kvarve_requests_waiting"] == 1)
        response = own_client.post(COMPLETIONS, json={"prompt": song})
        assert "try again later" in refused(response, 503)
        assert int(response.headers["retry-after"]) > 0
        first.close()
        assert second.result() == song[0]


def test_one_requests_trouble_is_an_error_and_not_the_others(
    client: httpx.Client, song: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = turns_module.forward

    def fails(model: Any, workspace: Any, ids: Any) -> Any:
        if workspace.tokens == len((song * 2).encode()) + 4:
            raise MemoryError("no room for that")
        return forward(model, workspace, ids)

    monkeypatch.setattr(turns_module, "forward", fails)
    body = {"prompt": song * 2, "max_tokens": 9, "temperature": 0}
    assert "no room for that" in refused(client.post(COMPLETIONS, json=body), 500)
    chunks = stream(client, COMPLETIONS, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == song[:5]
    assert "no room for that" in chunks[-1]["error"]["message"]
    assert client.get("/health").status_code == 200
    assert text(client, song, max_tokens=9) == song[:8]


def test_a_broken_engine_is_not_healthy_and_says_why(
    own_server: Server, own_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(say: object) -> None:
        raise RuntimeError("the ground has opened")

    with monkeypatch.context() as patch:
        patch.setattr(own_server.engine.cache, "step", breaks)
        response = own_client.post(COMPLETIONS, json={"prompt": "hei"})
        assert response.status_code == 500
    assert "the ground has opened" in refused(own_client.get("/health"), 503)
    for path, body in ((COMPLETIONS, {"prompt": "hei"}), ("/flush_cache", {})):
        assert "the ground has opened" in refused(own_client.post(path, json=body), 500)
    assert metrics(own_client)["kvarve_up"] == 0


def test_stopping_ends_running_requests(own_server: Server, own_client: httpx.Client, song: str) -> None:
    body = {"prompt": song, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    with (
        ThreadPoolExecutor(1) as pool,
        own_client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response,
    ):
        arriving = events(response)
        next(arriving)
        whole = pool.submit(own_client.post, COMPLETIONS, json=body)
        until(own_client, lambda now: now["kvarve_requests_running"] == 2)
        stopping = threading.Thread(target=own_server.stop)
        stopping.start()
        chunks = list(arriving)
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
        assert "shutting down" in refused(whole.result(), 503)
        stopping.join()
    with pytest.raises(httpx.ConnectError):
        own_client.get("/health")
