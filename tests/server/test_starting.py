"""What a start tells: its phases in the log, and the service manager. `test_signals.py` has it listen to a server."""

import logging
import sys
from pathlib import Path

import pytest

import forks
from kvarve.server.starting import NOTIFY, Starting, tell_systemd


def test_each_phase_has_a_line_and_the_last_line_says_how_long_each_took(caplog: pytest.LogCaptureFixture) -> None:
    now, told = [0.0], list[str]()
    with caplog.at_level(logging.INFO, "kvarve"):
        starting = Starting(told.append, lambda: now[0])
        starting.begins("loading weights", "some")
        now[0] += 2
        starting.begins("opening storage", "/a\n/b")
        now[0] += 0.5
        starting.ready("http://x")
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: some",
        "opening storage: /a\n/b",
        "listening on http://x after 2.5 s (loading weights 2.0 s, opening storage 0.5 s)",
    ]
    assert told == [
        "STATUS=loading weights: some",
        "STATUS=opening storage: /a /b",
        "READY=1\nSTATUS=serving on http://x",
    ]


def test_without_a_service_manager_or_with_one_that_is_gone_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for address in ("", "nonsense", str(tmp_path / "gone"), "@gone"):
        monkeypatch.setenv(NOTIFY, address)
        tell_systemd()("READY=1")


@pytest.mark.long
def test_a_server_that_is_ready_collects_no_more_what_it_was_started_with(checkpoint: Path) -> None:
    program = f"""
import gc, os, signal
from pathlib import Path
from kvarve.engine.engine import Engine
from kvarve.server.serve import run
from kvarve.server.settings import Settings

spared = []
Engine.start = lambda self, start=Engine.start: (spared.append(gc.get_freeze_count()), start(self))

def say(text):
    if text.startswith("kvarve serves"):
        print(spared[0], gc.get_freeze_count(), len(gc.get_objects()))
        os.kill(os.getpid(), signal.SIGINT)

run(Settings(model={str(checkpoint)!r}, port=0, page_tokens=16, chunk_tokens=64, threads=1), say)
"""
    done = forks.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last, others = map(int, done.stdout.split())
    assert first >= last > 100_000 > others, "it has collected before the first request, and not again"
