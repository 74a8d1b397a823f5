"""Settings of the tests' servers, and servers in processes of their own.

They are deterministic unless told otherwise: a server that computes in batches first tries whether it may, which takes
most of its start.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

import forks
from gates import LONG_S, Gate
from kvarve.core.policies import Policies
from kvarve.reference.engine.engine import Engine
from kvarve.reference.server.serve import Settings

PAGE, CHUNK = 16, 64
SHAPE = ("--page-tokens", "16", "--chunk-tokens", "64", "--threads", "1", "--deterministic")
SHAPE += ("--served-model-name", "singer", "--device-memory", "8MiB", "--host-memory", "16MiB")


def settings(checkpoint: Path, storage: Path | tuple[str, ...] = (), **more: object) -> Settings:
    shape = {
        "page_tokens": PAGE,
        "chunk_tokens": CHUNK,
        "served_model_name": "singer",
        "port": 0,
        "deterministic": True,
        "device_memory": 8 << 20,
        "host_memory": 16 << 20,
        "storage": (f"file://{storage}?capacity=64MiB",) if isinstance(storage, Path) else storage,
        "policies": Policies(storage_wait="all"),
    }
    return Settings(model=str(checkpoint), **(shape | more))  # type: ignore[arg-type]


@contextmanager
def serving(
    tmp_path: Path, *argv: object, shape: tuple[str, ...] = SHAPE
) -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    """`kvarve serve` in a real process of its own, and a client to it."""
    words = [sys.executable, "-m", "kvarve", "serve", "--port", "0", *shape, *map(str, argv)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVARVE_")}
    with (
        (tmp_path / "log").open("w") as log,
        forks.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            told = {}
            for line in process.stdout:
                word, _, rest = line.strip().partition("  ")
                told[word] = rest.strip()
                if line.startswith("ready"):
                    break
            assert "url" in told, (told, (tmp_path / "log").read_text())
            with httpx.Client(base_url=told["url"], timeout=60) as client:
                yield process, client
        finally:
            process.kill()


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """The engine takes no turn meanwhile."""
    gate = Gate()
    with ThreadPoolExecutor(1) as apart:
        asked = apart.submit(engine.ask, gate, LONG_S)
        try:
            assert gate.begun.wait(LONG_S)
            yield
        finally:
            gate.may_end.set()
        asked.result(LONG_S)
