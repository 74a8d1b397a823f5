"""A kvarve server in a process of its own, for clients of other engines. Its Python is not theirs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "src" / "kvarve" / "reference" / "engine" / "builtin" / "tiny-hybrid"
NEEDS = "import cyclopts, fastapi, jinja2, prometheus_client, safetensors, transformers, uvicorn"


def interpreter() -> str:
    """A Python in which the server runs: $KVARVE_PYTHON, or that of `make setup`, or this one."""
    for python in (os.environ.get("KVARVE_PYTHON", ""), str(ROOT / ".venv" / "bin" / "python"), sys.executable):
        if (
            Path(python).is_file()
            and not subprocess.run([python, "-c", NEEDS], capture_output=True, check=False).returncode
        ):
            return python
    pytest.skip("no Python here has what kvarve's server needs: make setup")


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """The URL of a server with these flags."""
    command = [
        interpreter(),
        "-m",
        "kvarve",
        "serve",
        "--port",
        "0",
        "--threads",
        "1",
        "--log-level",
        "warning",
        *words,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVARVE_")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        try:
            told = dict[str, str]()
            for line in process.stdout:
                if line.startswith("ready:"):
                    break
                name, _, rest = line.strip().partition(" ")
                told[name] = rest.strip()
            assert "url" in told, "the server did not start"
            yield told["url"]
        finally:
            process.terminate()
            process.wait(60)
