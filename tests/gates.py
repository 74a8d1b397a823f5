"""Work that tests hold up, and the threads that do it. No test stands here."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import pytest

from kvarve.testing import FaultyStorage

LONG_S = 60.0


class Gate:
    """Work that begins, and ends when it may, with this answer or this exception."""

    def __init__(self, answer: Any = None) -> None:
        self.begun, self.may_end, self.answer = threading.Event(), threading.Event(), answer

    def __call__(self) -> Any:
        self.begun.set()
        assert self.may_end.wait(LONG_S)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def lose_patience_with_stalled_calls(monkeypatch: pytest.MonkeyPatch, *sick: FaultyStorage) -> None:
    """A tier is late once its `exists` stalls, and not by a clock: those that work may take as long as they need. One
    caller asks at a time, so that it is its call that has stalled."""
    late = 0

    def until_done_or_stalled(answers: Sequence[Future[list[bool]]], _: float) -> object:
        nonlocal late
        while not (ended := wait(answers, 0.001)).done:
            if sum(each.counts["stall: exists"] for each in sick) > late:
                late += 1
                break
        return ended

    monkeypatch.setattr("kvarve.storage._tiers.wait", until_done_or_stalled)
