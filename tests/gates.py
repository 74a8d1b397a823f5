"""Work that tests hold up, and the threads that do it. No test stands here."""

import threading
from typing import Any

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
