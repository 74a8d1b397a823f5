"""What signals do to `kvarve serve`, and what the service manager hears: SIGTERM drains, SIGHUP reads keys again."""

import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from servers import SHAPE, serving

import forks
from kvarve.reference.server.keyfile import new_key
from kvarve.reference.server.starting import NOTIFY


def test_sighup_has_the_keys_read_again_and_sigterm_lets_running_requests_end(
    checkpoint: Path, tmp_path: Path, song: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"
    (old, first), (new, second) = new_key("old"), new_key("new")
    file.write_text(first.line)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0kvarve-test-{tmp_path.name}-{id(manager)}")
        monkeypatch.setenv(NOTIFY, "@" + str(manager.getsockname()[1:], "ascii"))
        words = ["--model", checkpoint, "--drain-s", 600, "--api-keys", file]
        with serving(tmp_path, *words) as (process, client):

            def admits(key: str) -> bool:
                client.headers["Authorization"] = f"Bearer {key}"
                return client.get("/v1/models").status_code == 200

            assert admits(old) and not admits(new)
            file.write_text(second.line)
            process.send_signal(signal.SIGHUP)
            while not admits(new):
                assert process.poll() is None
            assert not admits(old) and admits(new)
            ask = {"prompt": song, "max_tokens": 200, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=ask) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert process.stdout is not None and process.stdout.readline().startswith("kvarve drains: ")
                assert httpx.get(client.base_url.join("/health")).status_code == 503
                last = [line for line in lines if line][-2:]
            assert '"finish_reason":"length"' in last[0] and last[1] == "data: [DONE]"
            assert "kvarve stops: " in process.stdout.read()
            assert process.wait() == 0
        manager.setblocking(False)
        heard = list[str]()
        while not heard or not heard[-1].startswith("STOPPING=1\nSTATUS=stopping"):
            heard.append(manager.recv(4096).decode())
    log = (tmp_path / "log").read_text()
    assert "API keys read again: new: new; gone: old" in log and new not in log
    assert heard[0].startswith("STATUS=loading weights: ")
    ready = [each for each in heard if "READY=1" in each]
    assert ready == [f"READY=1\nSTATUS=serving on {client.base_url}".rstrip("/")], "once, by one process"
    assert heard[-2:] == ["STOPPING=1\nSTATUS=draining", "STOPPING=1\nSTATUS=stopping: finishing backups"]


@pytest.mark.long
def test_sigterm_as_soon_as_the_server_says_that_it_is_ready_drains_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0kvarve-test-{tmp_path.name}-{id(manager)}")
        monkeypatch.setenv(NOTIFY, "@" + str(manager.getsockname()[1:], "ascii"))
        words = ["serve", "--port", "0", "--model", str(checkpoint), *SHAPE, "--ready-file", str(tmp_path / "ready")]
        process = forks.Popen([sys.executable, "-m", "kvarve", *words])
        try:
            while "READY=1" not in manager.recv(4096).decode():
                pass
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.mark.long
def test_a_second_signal_ends_a_drain_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--model", checkpoint, "--drain-s", 600) as (process, client),
        socket.create_connection((client.base_url.host, client.base_url.port or 0)) as slow,
    ):
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert client.get("/health").status_code == 200  # so the server knows of the slow one
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline().startswith("kvarve drains: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_sighup_during_the_start_is_obeyed_when_the_server_is_ready(checkpoint: Path, tmp_path: Path) -> None:
    file, log = tmp_path / "keys.toml", tmp_path / "log"
    file.write_text(new_key("a")[1].line)
    words = ["serve", "--port", "0", "--model", str(checkpoint), *SHAPE, "--api-keys", str(file)]
    with log.open("w") as output:
        process = forks.Popen([sys.executable, "-m", "kvarve", *words], stdout=output, stderr=output)
    try:
        while "loading weights" not in log.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        while not all(word in log.read_text() for word in ("API keys read again", "\nready")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
