"""Engines in processes of their own, with which the tests talk."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_environment import ENVIRONMENT
from tiny_models import VOCABULARY

import forks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Engines are forked from a process that has imported these.
os.environ.update(ENVIRONMENT)
forks.PRELOADED[:] = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]


class VllmProcess:
    """A vLLM engine in another process. `call` asks it (or `send`, and `answer` later); `close` ends it properly."""

    def __init__(self, settings: dict[str, Any], errors: Path) -> None:
        self.errors = errors
        self.seam: str = settings["seam"]
        log = errors.open("w")
        self._process = forks.Popen(
            [sys.executable, str(HERE / settings.get("program", "vllm_process.py")), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.close()
        self._read()

    def call(self, name: str, **more: Any) -> Any:
        self.send(name, **more)
        return self.answer()

    def send(self, name: str, **more: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": name} | more), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        return self._read()["answer"]

    def ask(self, prompt: list[int], tokens: int = 12, **more: Any) -> dict[str, Any]:
        (answer,) = self.call("ask", prompts=[prompt], tokens=tokens, **more)
        return dict(answer)

    def about(self) -> dict[str, Any]:
        return dict(self.call("about"))

    def close(self) -> None:
        if self._process.poll() is None:
            self.call("end")
            self._end()

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine has ended:\n{self.errors.read_text()[-6000:]}"
        return json.loads(line)


def prompt(tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]
