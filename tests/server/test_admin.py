"""/admin/storage: storages are attached to a running server and detached from it, with the admin key."""

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from left import Left
from servers import settings
from talk import LONG_S, Body, cached, complete, metrics, refused, text, until

from kvarve.cli.admin_client import describe
from kvarve.cli.main import main
from kvarve.core.audit import audit
from kvarve.pages.pools import MEMORY_TIERS
from kvarve.reference.server.serve import Server
from kvarve.storage import FileStorage, MemoryStorage, Storage
from kvarve.testing.faulty_storage import FaultyStorage, Rule
from plugged import plug_in

STORAGE = "/admin/storage"
KEY = "gärdsgård"
BEARER = {b"Authorization": b"Bearer " + KEY.encode()}


@pytest.fixture(scope="module")
def operated(checkpoint: Path) -> Iterator[Server]:
    with Server(settings(checkpoint, admin_key=KEY)) as server:
        yield server


@pytest.fixture
def client(operated: Server) -> Iterator[httpx.Client]:
    """An operator's client to a server without a storage, before the test and after it."""
    with httpx.Client(base_url=operated.url, timeout=60, headers=BEARER) as client:
        yield client
        done(client.delete(STORAGE))


def done(response: httpx.Response) -> Body:
    assert response.status_code == 200, response.text
    return dict(response.json())


def attach(client: httpx.Client, folder: Path, **more: Any) -> Body:
    return done(client.put(STORAGE, json={"url": f"file://{folder}?capacity=64MiB"} | more))


def stored(metrics: dict[str, float]) -> float:
    return metrics["kvarve_copied_pages_total.host.storage"]


def settled(client: httpx.Client, operated: Server) -> None:
    assert operated.engine.settle(20)


def test_a_storage_comes_and_goes_while_the_server_serves(
    client: httpx.Client, operated: Server, tmp_path: Path, song: str, salt: str
) -> None:
    assert done(client.get(STORAGE)) == {
        "attached": False,
        "changing": False,
        "storage_wait": "all",
        "write_policy": "through",
    }
    told = attach(client, tmp_path / "pages", storage_wait="3s")
    assert (told["attached"], told["up"], told["storage_wait"]) == (True, True, "3s")
    assert told["url"] == f"file://{tmp_path}/pages?capacity=64MiB"
    assert (told["capacity_bytes"], told["objects"], told["changing"]) == (64 << 20, 0, False)
    cold = complete(client, song * 2, cache_salt=salt, max_tokens=2)
    settled(client, operated)
    assert until(client, lambda now: now.get("kvarve_storage_objects", 0) > 0)["kvarve_storage_up"] == 1
    told = done(client.get(STORAGE))
    assert told["objects"] > 0 and told["bytes"] > 0 and told["pages"]["stored"] > 0
    assert set(told["lanes"]) == {"host-to-storage", "storage-to-host", "storage-probe"}
    assert not any(told["pages"][trouble] for trouble in ("failed", "bad", "late"))
    done(client.post("/flush_cache"))
    warm = complete(client, song * 2, cache_salt=salt, max_tokens=2)
    assert cached(warm) == {"storage": 64}
    gone = done(client.delete(STORAGE))
    assert (gone["attached"], gone["previous_closed"]) == (False, True)
    assert not [name for name in metrics(client) if name.startswith("kvarve_storage_")]
    FileStorage(tmp_path / "pages", 64 << 20, operated.engine.model.identity.fingerprint(), "").close()  # not open
    done(client.post("/flush_cache"))
    again = complete(client, song * 2, cache_salt=salt, max_tokens=2)
    assert cached(again) == {}
    assert cold["choices"] == warm["choices"] == again["choices"]


def test_pages_in_memory_are_backed_up_to_a_new_storage_if_asked(
    client: httpx.Client, tmp_path: Path, operated: Server, song: str, salt: str
) -> None:
    complete(client, song * 2, cache_salt=salt, max_tokens=2)
    settled(client, operated)
    assert attach(client, tmp_path / "first")["objects"] == 0
    settled(client, operated)
    assert done(client.get(STORAGE))["objects"] == 0
    urls = [f"file://{tmp_path}/{name}?capacity=64MiB" for name in ("near", "far")]
    told = done(client.put(STORAGE, json={"url": urls, "back_up": True}))
    assert told["previous_closed"] is True and told["url"] == urls, "two tiers"
    settled(client, operated)
    done(client.post("/flush_cache"))
    assert cached(complete(client, song * 2, cache_salt=salt, max_tokens=2)) == {"storage": 64}


def test_the_status_says_what_compression_saves(
    client: httpx.Client, operated: Server, tmp_path: Path, song: str, salt: str
) -> None:
    pytest.importorskip("zstandard")
    done(client.put(STORAGE, json={"url": f"file://{tmp_path}/pages?capacity=64MiB&compress=zstd"}))
    complete(client, song * 2, cache_salt=salt, max_tokens=2)
    settled(client, operated)
    told = done(client.get(STORAGE))
    assert told["compressed"].keys() == {pool.name for pool in operated.engine.model.identity.pools}
    assert all(0 < total["stored_bytes"] <= total["plain_bytes"] for total in told["compressed"].values())
    shown = describe(told | {"compressed": {"kv": {"plain_bytes": 3 << 20, "stored_bytes": 2 << 20, "on": 0}}})
    assert "compressed kv" in shown and "3 MiB stored as 2 MiB, 67%; off, as it does not pay" in shown


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({}, "url: Field required"),
        ({"url": 1}, "url.str: Input should be a valid string"),
        ({"url": ["{new}", "{new}"]}, "is the same place as"),
        ({"url": "{new}", "backup": True}, "backup: Extra inputs are not permitted"),
        ({"url": "{new}", "storage_wait": "hope"}, "storage_wait must be none, all, or seconds"),
        (
            {"url": "{new}", "write_policy": "later"},
            "write_policy must be through, through:N",
        ),
        ({"url": "nfs://x"}, "unknown storage 'nfs'"),
        ({"url": "file://{folder}/new?capacity=1KiB"}, "1 KiB of storage memory is too little for this model"),
    ],
)
def test_what_cannot_be_attached_is_refused_and_nothing_has_changed(
    client: httpx.Client, tmp_path: Path, asked: Body, complaint: str
) -> None:
    before = attach(client, tmp_path / "old")
    new = f"file://{tmp_path}/new?capacity=64MiB"
    body = json.dumps(asked).replace("{new}", new).replace("{folder}", str(tmp_path))
    assert complaint in refused(client.put(STORAGE, content=body), 400)
    after = done(client.get(STORAGE))
    for settled in ("attached", "url", "up", "storage_wait", "write_policy", "objects"):
        assert after[settled] == before[settled]
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_bug_in_a_backend_is_one_line_and_changes_nothing(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(label: bytes, description: str) -> Storage:
        raise RuntimeError("half way")

    plug_in(monkeypatch, "odd", fails)
    attach(client, tmp_path / "old")
    message = refused(client.put(STORAGE, json={"url": "odd://x?capacity=64MiB"}), 500)
    assert message == "odd://x?capacity=64MiB: it cannot be opened: RuntimeError: half way"
    assert done(client.get(STORAGE))["up"] is True


def test_while_a_storage_is_slow_to_open_requests_are_served_and_no_second_change_begins(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, song: str
) -> None:
    opening, may_open = threading.Event(), threading.Event()

    def slowly(label: bytes, description: str) -> Storage:
        opening.set()
        assert may_open.wait(30)
        return MemoryStorage(64 << 20, label, description)

    plug_in(monkeypatch, "odd", slowly)
    with ThreadPoolExecutor(1) as apart:
        first = apart.submit(client.put, STORAGE, json={"url": "odd://x?capacity=64MiB"})
        assert opening.wait(30)
        assert done(client.get(STORAGE))["changing"] is True
        assert text(client, song * 2, max_tokens=4) == song[:4]
        assert client.get("/health").status_code == 200
        for second in (client.put(STORAGE, json={"url": "memory://x?capacity=64MiB"}), client.delete(STORAGE)):
            assert "another change" in refused(second, 409)
        may_open.set()
        assert done(first.result())["url"] == "odd://x?capacity=64MiB"


def test_a_storage_that_does_not_open_is_given_up_and_blocks_no_other(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_open, closed = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    class Late(MemoryStorage):
        def close(self) -> None:
            super().close()
            closed.set()

    def never(label: bytes, description: str) -> Storage:
        threads.append(threading.current_thread())
        assert may_open.wait(60)
        return Late(64 << 20, label, description)

    plug_in(monkeypatch, "odd", never)
    attach(client, tmp_path / "old")
    monkeypatch.setattr("kvarve.cache.attach.OPEN_S", 0.01)
    message = refused(client.put(STORAGE, json={"url": "odd://x?capacity=64MiB"}), 500)
    assert message == "odd://x?capacity=64MiB: it is not open after 0.01 s: given up"
    assert threads[0].daemon, "or the server never ends"
    monkeypatch.undo()
    assert done(client.get(STORAGE))["url"].startswith("file:")
    assert attach(client, tmp_path / "new")["up"] is True
    may_open.set()
    assert closed.wait(60)
    assert done(client.get(STORAGE))["url"] == f"file://{tmp_path / 'new'}?capacity=64MiB"


@pytest.mark.long
def test_storages_come_and_go_two_hundred_times_and_no_request_notices(
    client: httpx.Client, operated: Server, tmp_path: Path, song: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, stores, over = random.Random(5), list[FaultyStorage](), threading.Event()

    def opened(label: bytes, description: str) -> Storage:
        inner = MemoryStorage(64 << 20, label, description)
        stores.append(FaultyStorage(inner, [Rule("flip", probability=0.1)], seed=5))
        return stores[-1]

    def ask_on(asker: httpx.Client, number: int) -> set[str]:
        said = {text(asker, f"{number} {song * 3}", max_tokens=4, skip_reading_prefix_cache=True)}
        while not over.is_set():
            said.add(text(asker, f"{number} {song * 3}", max_tokens=4))
        return said

    plug_in(monkeypatch, "odd", opened)
    monkeypatch.setattr("kvarve.cache.attach.CLOSED_S", 0.01)  # one that stalls goes on later
    urls = [f"file://{tmp_path}/{name}?capacity=64MiB" for name in "ab"] + ["odd://x?capacity=64MiB"]
    done(client.put(STORAGE, json={"url": urls[0]})), done(client.delete(STORAGE))  # what is made once is made
    left = Left(operated, client)
    with httpx.Client(base_url=operated.url, timeout=60) as asker, ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(ask_on, asker, number) for number in range(2)]
        try:
            for _ in range(200):
                operated.engine.ask(lambda: operated.engine.cache.scheduler.core.flush(MEMORY_TIERS), LONG_S)
                policy = dice.choice(["through", "through:2", "back"])
                done(client.put(STORAGE, json={"url": dice.choice(urls), "back_up": True, "write_policy": policy}))
                for store in stores[-1:]:
                    store.dead = dice.random() < 0.3
                    if dice.random() < 0.3:
                        store.stall()
                done(client.delete(STORAGE))
                for store in stores:
                    store.release()
        finally:
            over.set()
        assert all(len(each.result(LONG_S)) == 1 for each in asked), "another answer"
    left.check(Counter())
    audit(operated.engine.cache.scheduler.core)


# --- access


def test_without_an_admin_key_there_is_no_admin(server: Server) -> None:
    with httpx.Client(base_url=server.url, headers=BEARER) as anybody:
        for method in ("GET", "PUT", "DELETE"):
            message = refused(anybody.request(method, STORAGE, json={}), 403)
            assert "--admin-key" in message and "$KVARVE_ADMIN_KEY" in message


# --- from the command line

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(operated: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """`kvarve storage ...` with the key in the environment."""
    monkeypatch.setenv("KVARVE_ADMIN_KEY", KEY)

    def say(*words: object, server: str = operated.url) -> tuple[int, str, str]:
        code = main(["storage", *map(str, words), "--server", server])
        return code, *capsys.readouterr()  # type: ignore[return-value]

    return say


def told(result: tuple[int, str, str]) -> dict[str, str]:
    code, out, error = result
    assert (code, error) == (0, ""), error
    return dict(line.split(None, 1) for line in out.splitlines())  # type: ignore[misc]


def test_an_operator_attaches_and_detaches_from_the_command_line(
    client: httpx.Client, say: Say, tmp_path: Path
) -> None:
    assert told(say("status"))["storage"] == "none"
    url = f"file://{tmp_path}/pages?capacity=64MiB"
    said = told(say("attach", url, "--back-up", "--storage-wait", "3s", "--write-policy", "back"))
    assert (said["storage"], said["policies"]) == (url, "write back, storage wait 3s")
    assert said["state"].startswith("up for")
    assert said["holds"].endswith("of 64 MiB")
    assert told(say("status"))["storage"] == url
    assert told(say("detach")) == {"storage": "none", "policies": "write back, storage wait 3s"}
    attach(client, tmp_path / "pages", storage_wait="all", write_policy="through")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("attach", "nfs://x"), "unknown storage 'nfs'"),
        (("attach",), "URL is required (see kvarve storage attach --help)"),
        (("atach", "x"), "unknown command 'atach': did you mean attach?; known: attach, detach, status"),
        (("attach", "x", "--backup"), "unknown option '--backup': did you mean --back-up?"),
        ((), "which command? known: attach, detach, status"),
        (("status", "--admin-key", "x"), "wrong admin key"),
        (("status", "--admin-key", ""), "this needs the server's admin key: give --admin-key or $KVARVE_ADMIN_KEY"),
        (("status", "--server", "http://127.0.0.1:9"), "http://127.0.0.1:9 cannot be asked: no answer: "),
        (
            ("status", "--server", "127.0.0.1:8000"),
            "--server must be the URL of a server, such as http://127.0.0.1:8000",
        ),
        (("status", "--server", "http://[::1"), "no answer"),
        (("attach", "x\udcff"), ""),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    operated: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    complaint: str,
) -> None:
    monkeypatch.setenv("KVARVE_ADMIN_KEY", KEY)
    given = ["--server", operated.url] if words and "--server" not in words else []
    assert main(["storage", *words, *given]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("kvarve: ") and error.count("\n") == 1 and complaint in error


@pytest.mark.parametrize("key", ["SECRET\n", "SEC\x00RET", " SECRET"])
def test_a_key_that_no_header_carries_is_refused_and_never_repeated(
    say: Say, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"KVARVE_ADMIN_KEY": key})
    code, out, error = say("status")
    assert (code, out) == (2, "") and "SEC" not in error
    assert error.startswith("kvarve: an admin key must have no spaces or line ends") and error.count("\n") == 1


class Impostor(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(type(self).text)

    def log_message(self, format: str, *args: object) -> None:
        pass

    text = b""


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"attached": true}', b"[" * 200_000], ids=["none", "list", "part", "deep"]
)
def test_a_server_that_answers_something_else_is_no_kvarve_server(say: Say, text: bytes) -> None:
    Impostor.text = text
    with ThreadingHTTPServer(("127.0.0.1", 0), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        code, out, error = say("status", server=f"http://127.0.0.1:{impostor.server_port}")
        impostor.shutdown()
    assert (code, out) == (2, "") and error.count("\n") == 1 and "must be a kvarve server, and answers" in error
