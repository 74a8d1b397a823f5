"""A warning repeated a thousand times a second is logged once a second."""

import logging
from collections.abc import Iterator

import pytest

from kvarve.reference.server.logs import MOST_KINDS, OncePerSecond


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Bench:
    def __init__(self) -> None:
        self.now, self.handler = 1000.0, Lines()
        self.once = OncePerSecond(lambda: self.now)
        self.handler.addFilter(self.once)
        self.log = logging.Logger("some", logging.DEBUG)
        self.log.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.handler.lines


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield Bench()


def test_a_kind_is_logged_once_a_second_with_the_number_suppressed(bench: Bench) -> None:
    for i in range(1000):
        bench.log.warning("request %d: its answer is not read", i)
        bench.now += 1 / 128
    assert len(bench.lines) == 8
    assert bench.lines[:2] == [
        "request 0: its answer is not read",
        "request 128: its answer is not read (and 127 more like it)",
    ]


def test_kinds_differ_by_place_text_and_error(bench: Bench) -> None:
    for number in range(3):
        for text in ("one %d", "another %d", "one\nof several lines %d"):
            bench.log.warning(text, number)
        for error in (OSError(number), ValueError(number), OSError(number)):
            bench.log.error("failed: %s", error, exc_info=error)
    assert bench.lines == [
        "one 0",
        "another 0",
        "one\nof several lines 0",
        "failed: 0",
        "failed: 0",
    ]


def test_only_so_many_kinds_are_remembered(bench: Bench) -> None:
    for number in range(10 * MOST_KINDS):
        bench.log.warning(f"trouble {number}")
    assert len(bench.once._kinds) == MOST_KINDS
    assert len(bench.lines) == 10 * MOST_KINDS
