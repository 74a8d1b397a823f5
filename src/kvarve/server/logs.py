"""A log that trouble cannot flood: of each kind of warning one a second is written, and how many were left out."""

import logging
import threading
import time
from collections.abc import Callable

EACH_S = 1.0
MOST_KINDS = 256  # that are remembered

Kind = tuple[str, int, str, str]


class OncePerSecond(logging.Filter):
    """For a handler. A kind of trouble is where it is logged, its text without the arguments, and the error's type."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[Kind, tuple[float, int]] = {}  # when it was written last, and how many were left out since
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now, kind = self._clock(), _kind(record)
        with self._lock:
            written_s, left_out = self._kinds.pop(kind, (now - EACH_S, 0))
            if now - written_s < EACH_S:
                self._kinds[kind] = written_s, left_out + 1
                return False
            self._kinds[kind] = now, 0
            if len(self._kinds) > MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more like it)"
        return True


def _kind(record: logging.LogRecord) -> Kind:
    error = record.exc_info[0] if record.exc_info else None
    return record.name, record.lineno, str(record.msg).partition("\n")[0][:80], "" if error is None else error.__name__
