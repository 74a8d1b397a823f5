"""Runs pytest for mutants.py, each time in a fork of this process, which has imported what takes long to import.

Each line of standard input is a run, `[arguments, time limit in seconds]`. It is answered with the exit code, negative
for a signal, or with null if the run did not end in time. What pytest says is in the file `said`, in this folder.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress

import pytest

POLL_S = 0.01


def child(words: list[str]) -> None:
    os.setsid()
    said, none = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for file, number in ((none, 0), (said, 1), (said, 2)):
        os.dup2(file, number)
    code = 1
    try:
        code = int(pytest.main(words))
    finally:  # whatever happens, nothing goes on in a fork
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def main(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        words, limit_s = json.loads(line)
        number = os.fork()
        if not number:
            child(words)
        end, ended = time.monotonic() + limit_s, 0
        while not ended and time.monotonic() < end:
            ended, status = os.waitpid(number, os.WNOHANG)
            if not ended:
                time.sleep(POLL_S)
        with suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)  # with all processes that its tests have started
        if not ended:
            os.waitpid(number, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
