"""The log of a server, and its rate limit: one warning of each kind a second, with the number of those suppressed."""

import json
import logging
import threading
import time
from collections.abc import Callable

EACH_S = 1.0
MOST_KINDS = 256  # remembered; the least recently seen is dropped first

Kind = tuple[str, int, str, str]


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger and message, and the fields that a record's `told` returns."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "told", dict)())


def begin_log(level: str, form: str = "text") -> None:
    """Log to stderr, as `text` or `json`; libraries only their warnings."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
    for chatty in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


class OncePerSecond(logging.Filter):
    """A handler's filter. A kind of warning is its place in the code, its format string and the exception's type."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[Kind, tuple[float, int]] = {}  # last written, and how many suppressed since
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
