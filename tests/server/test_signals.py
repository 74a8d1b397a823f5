"""What signals do to `kvarve serve`: SIGTERM drains, SIGHUP reads keys again."""

import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from servers import a_process, serving

from kvarve.server.keyfile import new_key

SHAPE = ["--page-tokens", 16, "--chunk-tokens", 64, "--threads", 1, "--served-model-name", "singer"]


@pytest.mark.parametrize(("drain_s", "end"), [(600, "length"), (0, "abort")])
def test_sigterm_lets_running_requests_end_as_long_as_the_drain_lasts(
    checkpoint: Path, tmp_path: Path, song: str, drain_s: int, end: str
) -> None:
    words = ["--model", checkpoint, *SHAPE, "--drain-s", drain_s]
    ask = {"prompt": song, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with serving(tmp_path, *words) as (process, client):
        with client.stream("POST", "/v1/completions", json=ask) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-2:]
        assert f'"finish_reason":"{end}"' in last[0] and last[1] == "data: [DONE]"
        assert process.stdout is not None
        said = process.stdout.read()
        assert ("kvarve drains: " in said) == (drain_s > 0) and "kvarve stops: " in said
        assert process.wait() == 0


def test_a_second_signal_ends_a_drain_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--model", checkpoint, *SHAPE, "--drain-s", 600) as (process, client),
        socket.create_connection((client.base_url.host, client.base_url.port or 0)) as slow,
    ):
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert client.get("/health").status_code == 200  # so the server knows of the slow one
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline().startswith("kvarve drains: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130


def test_sighup_has_the_keys_read_again_and_ends_nothing(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    (old, first), (new, second) = new_key("old"), new_key("new")
    file.write_text(first.line)
    with serving(tmp_path, "--model", checkpoint, *SHAPE, "--api-keys", file) as (process, client):

        def admits(key: str) -> bool:
            status = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
            assert status in (200, 401)
            return status == 200

        assert admits(old) and not admits(new)
        file.write_text(second.line)
        process.send_signal(signal.SIGHUP)
        while not admits(new):
            assert process.poll() is None
        assert not admits(old)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        log = (tmp_path / "log").read_text()
        assert "API keys read again: new: new; gone: old" in log and new not in log


def test_a_sighup_during_the_start_is_obeyed_when_the_server_is_ready(checkpoint: Path, tmp_path: Path) -> None:
    file, log = tmp_path / "keys.toml", tmp_path / "log"
    file.write_text(new_key("a")[1].line)
    words = ["serve", "--port", "0", "--model", str(checkpoint), *map(str, SHAPE), "--api-keys", str(file)]
    with log.open("w") as stderr, a_process(sys.executable, "-m", "kvarve", *words, stderr=stderr) as process:
        while "loading weights" not in log.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        assert process.stdout is not None
        assert any(line.startswith("ready") for line in process.stdout), log.read_text()
        while "API keys read again" not in log.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_replicas_drain_as_one_server(checkpoint: Path, tmp_path: Path, song: str) -> None:
    ask = {"prompt": song, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serving(tmp_path, "--model", checkpoint, *SHAPE, "--dp", 2, "--drain-s", 600) as (process, client):
        with client.stream("POST", "/v1/completions", json=ask) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None and process.stdout.readline().startswith("kvarve drains: ")
            assert httpx.get(client.base_url.join("/health")).status_code == 503
            last = [line for line in lines if line][-2:]
        assert '"finish_reason":"length"' in last[0]
        assert process.wait() == 0
