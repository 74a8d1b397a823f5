"""Processes of ranks that are started: none outlives the one that started it, or keeps it waiting."""

import os
import signal
import time
from pathlib import Path

import pytest

from kvarve.engine import ranks as ranks_module
from kvarve.engine.ranks import Place, started
from kvarve.ranks.star import GroupEnded, Listener


def signalled(marks: str, place: Place) -> None:
    """It gets what all processes of a terminal or a service get, and says so if it lives on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    Path(marks, "lives").touch()


def the_last_child() -> int:
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])


def stays(options: object, place: Place) -> None:
    """It hears of no end, as one that is stopped."""
    time.sleep(600)


@pytest.mark.long
def test_a_rank_that_ends_before_it_has_joined_ends_the_others_by_its_name() -> None:
    with started(print, None, 2) as (place, listener):
        assert isinstance(listener, Listener)
        with pytest.raises(GroupEnded, match="rank 1 has ended before all had come"):
            place.meet("settings", listener)


def test_signals_of_a_terminal_or_a_service_are_the_first_ranks_to_handle(tmp_path: Path) -> None:
    with started(signalled, str(tmp_path), 2) as (place, listener), pytest.raises(GroupEnded):
        os.kill(the_last_child(), signal.SIGTERM)  # which has not begun to import
        place.meet("settings", listener)
    assert (tmp_path / "lives").exists()
    assert not {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.long
@pytest.mark.parametrize("end", [KeyboardInterrupt, GroupEnded])
def test_no_end_waits_for_a_rank_that_does_not_hear_of_it(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "END_S", 600.0)
    with pytest.raises(end), started(stays, None, 2) as (place, _):
        child = the_last_child()
        assert len(place.processes) == 1
        raise end("now")
    assert not Path(f"/proc/{child}").exists()
