"""`vllm serve` as a program of its own, with its processes: what it has answered, and what is left of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from engine_environment import ENVIRONMENT
from engine_process import HERE

START_S, END_S = 900, 120


class Server:
    """`environment`: beside that of all engines of the tests."""

    def __init__(self, model: Path, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.model, self.log, self.url = str(model), log, f"http://127.0.0.1:{port}"
        run = [environment.get("PYTHON", sys.executable), "-W", "ignore", str(HERE / "vllm_command.py"), "serve"]
        run += [self.model, "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "1536"]
        run += ["--host", "127.0.0.1", "--port", str(port), *words]
        with log.open("a") as out:
            self.process = subprocess.Popen(
                run,
                env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", **environment},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < until, log.read_text()[-6000:]
            try:
                urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)  # it tells nobody when it listens

    def ask(self, prompt: list[int], tokens: int = 4) -> tuple[str, int]:
        """The answer's tokens, and how many of the prompt's came from kvarve."""
        before = self.metric("vllm:external_prefix_cache_hits_total")
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        asked = Request(f"{self.url}/v1/completions", json.dumps(body | {"return_token_ids": True}).encode())
        asked.add_header("Content-Type", "application/json")
        with urlopen(asked, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
        return str(choice["token_ids"]), round(self.metric("vllm:external_prefix_cache_hits_total") - before)

    def metric(self, name: str) -> float:
        with urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    def family(self) -> dict[int, str]:
        """Its living processes, by number, and what they call themselves."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    state, _, group, *_ = (path / "stat").read_text().rpartition(")")[2].split()
                    if int(group) == self.process.pid and state != "Z":
                        title = (path / "cmdline").read_text().replace("\0", " ").split()
                        found[int(path.name)] = next((word for word in title if word.startswith("VLLM::")), "server")
                except (OSError, ValueError, IndexError):
                    pass
        return found

    def engines(self) -> list[str]:
        """Its processes that hold memory of kvarve's. Several servers of one command live on by themselves."""
        return [name for name in self.family().values() if "EngineCore" in name or "Worker" in name]

    def ended(self) -> bool:
        """Whether all of these have ended, after a while."""
        until = time.monotonic() + END_S
        while self.engines() and time.monotonic() < until:
            time.sleep(0.1)
        return not self.engines()

    def kill(self) -> None:
        """kill -9 of all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def serving(*given: object) -> Iterator[Server]:
    server = Server(*given)  # type: ignore[arg-type]
    try:
        yield server
    except BaseException:
        print(server.log.read_text()[-6000:])
        raise
    finally:
        if server.family():
            server.kill()
        server.process.wait(60)
