"""A server of our own for a while: `kvarve serve` in a process of its own, started and ended as a user would do it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvarve.errors import ConfigError, KvarveError

READY_S, END_S = 300.0, 60.0


@contextmanager
def served(options: Sequence[str], folder: Path, log: Path) -> Iterator[str]:
    """The URL of `kvarve serve` with these options, on any free port unless they name one; ended by Ctrl-C.

    `folder`: for the file that says when it is ready. Its output is appended to `log`. KvarveError: it did not start,
    or ended with an error.
    """
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvarve", "serve", "--port", "0", *options, "--ready-file", str(ready)]
    # The server is set by these words alone: a key, say, would keep its client out.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVARVE_")}
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + READY_S
        while not ready.exists() or not ready.read_text().strip():
            if process.poll() is not None:
                raise KvarveError(f"the server did not start: {last_line(log)} (all of it is in {log})")
            if time.monotonic() > end:
                raise KvarveError(f"the server was not ready after {READY_S:.0f} s; see {log}")
            time.sleep(0.05)
        yield ready.read_text().strip()
        process.send_signal(signal.SIGINT)
        if process.wait(END_S) != 0:
            raise KvarveError(f"the server ended with exit code {process.returncode}: {last_line(log)}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"


def empty_log(out: Path, name: str) -> Path:
    """A log below the folder of --out, which is made. ConfigError: it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).unlink(missing_ok=True)
    except OSError as e:
        raise ConfigError(f"--out: {out}: {e.strerror}") from None
    return out / name
