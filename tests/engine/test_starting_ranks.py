"""Processes of ranks that are started: none outlives the one that started it, or keeps it waiting."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvarve.errors import ConfigError, ModelError
from kvarve.ranks.star import GroupEnded, Listener
from kvarve.reference.engine import rank_processes as ranks_module
from kvarve.reference.engine.rank_processes import Place, check_ranks, host_and_port, started
from kvarve.reference.server.serve import run
from kvarve.reference.server.serve_settings import Settings


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


def test_ranks_of_a_machine_that_want_a_gpu_each_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module.torch, "cuda", SimpleNamespace(device_count=lambda: 2))
    check_ranks(4, 2, 0, "host:29500", "cuda")
    check_ranks(4, device="cuda:0")
    with pytest.raises(ConfigError, match="4 ranks on this machine need a GPU each, and it has 2"):
        check_ranks(4, device="cuda")


def test_ranks_differ_in_what_is_their_own_alone(tmp_path: Path) -> None:
    first = Settings(tp=2, storage=(f"file://{tmp_path}/one",), host="10.0.0.1", node_rank=0)
    assert first.alike == replace(first, storage=(f"file://{tmp_path}/other",), host="10.0.0.2", node_rank=1).alike
    for other in ({"storage": ()}, {"storage": ("redis://host",)}, {"page_tokens": 16}, {"model": "other"}):
        assert first.alike != replace(first, **other).alike  # type: ignore[arg-type]


def test_a_host_may_be_an_address_in_brackets() -> None:
    assert host_and_port("[::1]:29500") == ("::1", 29500)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_model_that_is_not_there_starts_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    monkeypatch.setattr("kvarve.reference.server.serve.started", None)
    with pytest.raises(ModelError):
        run(Settings(model=str(tmp_path / "none"), tp=2))
