"""Processes that tests look at, stop and wait for."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S, PAUSE_S = 60.0, 0.005


def until(holds: Callable[[], bool], what: str = "it") -> None:
    """Poll, and leave the processor to the processes that are polled."""
    end, never = time.monotonic() + PATIENCE_S, threading.Event()
    while not holds():
        assert time.monotonic() < end, f"{what} did not come about"
        never.wait(PAUSE_S)


def state_of(pid: int) -> str:
    """R, S, D, T (stopped), Z, …; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def stop(pid: int) -> None:
    """Return when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T", "a process that stands still")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
