"""When a replica is taken for hung, or for broken: by what it answers, and by the looks that it lets pass.

The process is one that stops itself, the server that answers for it a socket of this test.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvarve.reference.server import replicas as replicas_module
from kvarve.reference.server.replicas import HUNG_S, LOOK_S, Replica
from kvarve.reference.server.serve_settings import Settings
from kvarve.reference.server.stopped import BEFORE, ENGINE

PATIENCE_S = 120.0
LOOKS = round(HUNG_S / LOOK_S)
SETTINGS = cast(Settings, SimpleNamespace(dp=1, kv_events_config=None))
FULL = b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n"
WELL = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
BROKEN = f"HTTP/1.1 503 X\r\n{ENGINE}: {BEFORE}\r\ncontent-length: 0\r\n\r\n".encode()


def stops(number: int, settings: Settings, parent: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def replica(listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    """It serves, as far as its keeper knows."""
    monkeypatch.setattr(replicas_module, "_serve", stops)
    monkeypatch.setattr(replicas_module, "replace", lambda settings, **_: settings)
    replica = Replica(0, SETTINGS, tmp_path)
    replica.start()
    (tmp_path / "ready-0").write_text(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert not replica.look() and replica.up
    yield replica
    if not replica.over:
        replica._kill()


def asked(replica: Replica, listener: socket.socket, said: bytes) -> None:
    """A question for its health that gets this answer."""
    asking = threading.Thread(target=replica.ask)
    asking.start()
    link, _ = listener.accept()
    with link:
        link.recv(1 << 16)
        link.sendall(said)
    asking.join()


def test_whatever_it_answers_a_replica_that_does_is_not_hung(replica: Replica, listener: socket.socket) -> None:
    for said in (WELL, FULL, b""):
        for _ in range(LOOKS):
            assert not replica.look() and replica.up
        assert replica.slow
        asked(replica, listener, said)
        assert not replica.slow
    listener.close()
    for _ in range(LOOKS):
        replica.look()
    replica.ask()
    assert replica.slow, "nothing answers any more"


def test_a_replica_that_answers_nothing_for_many_looks_is_killed_and_named_once(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(LOOKS):
        assert not replica.look() and replica.up
    with monkeypatch.context() as patch:  # a driver holds it, so it does not end at once
        assert replica._process is not None
        patch.setattr(replica._process, "kill", lambda: None)
        patch.setattr(replica._process, "join", lambda timeout: None)
        for _ in range(2):
            assert not replica.look() and not replica.up, "its file is still there"
    replica._process.kill()
    until(replica.look)
    assert replica.over and not replica.up and not replica.able
    assert [each.message for each in caplog.records] == ["replica 0 has not answered for 60 s: killed"]
    until(replica.due)
    replica.start()
    assert not replica.slow and not replica.look(), "the new process counts anew"


def test_a_replica_whose_engine_has_stopped_is_told_to_end_and_counts_as_failed(
    replica: Replica, listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    asked(replica, listener, BROKEN)
    assert not replica.look() and not replica.up and not replica.over
    replica._stop_by_s = 0.0  # it has stopped itself, so it does not hear it
    until(replica.look)
    told = [each.message for each in caplog.records]
    assert len(told) == 2 and "its engine has stopped" in told[0] and "has not ended" in told[1]
    assert replica._failures == 1, "one that breaks again and again is started after longer pauses"


def test_an_answer_of_the_process_before_tells_nothing_of_the_one_now(
    replica: Replica, listener: socket.socket
) -> None:
    asking = threading.Thread(target=replica.ask)
    asking.start()
    link, _ = listener.accept()
    replica._kill()
    until(replica.look)
    until(replica.due)
    replica.start()
    with link:
        link.recv(1 << 16)
        link.sendall(BROKEN)
    asking.join()
    assert not replica.look() and not replica._health.stopped
