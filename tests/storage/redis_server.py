"""Real Redis servers, processes of their own on loopback or a Unix socket, ended whatever happens."""

import importlib
import os
import shutil
import socket
import subprocess
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import PATIENCE_S, stopped, until

CLIENT = find_spec("redis") and importlib.import_module("redis")
KEPT = ("--appendonly", "yes", "--appendfsync", "no")  # as metadata has to be


def require_redis() -> None:
    """Skip where Redis cannot run; where it has to (KVARVE_TEST_REDIS=1, as in CI), that is a failure."""
    problem = "" if shutil.which("redis-server") else "there is no redis-server"
    problem = problem if CLIENT else "the client library is not installed"
    if problem and os.environ.get("KVARVE_TEST_REDIS") == "1":
        pytest.fail(f"Redis cannot be tested here: {problem}")
    if problem:
        pytest.skip(f"Redis cannot be tested here: {problem}")


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


class RedisServer:
    """One server, on a Unix socket unless a port is given; `words` are options of redis-server."""

    def __init__(self, folder: Path, *words: str, port: int = 0) -> None:
        require_redis()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self.socket = folder, port, folder / "redis.sock"
        at = ("--bind", "127.0.0.1", "--unixsocket", str(self.socket))
        self._words = (*at, "--save", "", "--appendonly", "no", "--dir", str(folder), *words)
        if "--tls-port" not in words:
            self._words = ("--port", str(port), *self._words)
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(["redis-server", *self._words], stdout=log, stderr=log)
        until(lambda: self._answers() or self.process.poll() is not None, "a server that answers")
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]

    def _answers(self) -> bool:
        try:
            return not self.ask("PING").startswith("-LOADING")
        except OSError:
            return False

    def ask(self, *words: str) -> str:
        """The answer of a command, as it comes."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(PATIENCE_S)
            link.connect(str(self.socket))
            command = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            link.sendall(f"*{len(words)}\r\n{command}".encode())
            return link.recv(1 << 16).decode()

    def key(self, name: str) -> str:
        """Of the one object of this name."""
        (key,) = self.ask("KEYS", f"*:{name}").split("\r\n")[2::2]
        return key

    def url(self, rest: str = "") -> str:
        return f"redis://{self.socket}{rest}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def stopped(self) -> AbstractContextManager[None]:
        """Freeze it, with its connections open."""
        return stopped(self.process.pid)

    def close(self) -> None:
        self.kill()
