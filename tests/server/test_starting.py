"""What a start tells: its phases in the log, and the service manager. `test_signals.py` has it listen to a server."""

import logging
from pathlib import Path

import pytest

from kvarve.reference.server.starting import NOTIFY, Starting, tell_systemd


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
