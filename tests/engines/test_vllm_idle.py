"""A vLLM with processes of its own pauses whatever its storage does, and its stores go on while it is paused."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_process import HERE, ROOT, prompt

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

PROMPTS, PAGES, POOLS = 16, 7, 6  # pages of 128 tokens of a prompt of 1,000
LONG_S = 120.0
# Imported by every process before all else: puts wait until a file is there.
SITE = """
import os, time

gate = os.environ["KVARVE_TEST_GATE"]


def gated(real):
    def put(*given, **more):
        while not os.path.exists(gate):
            time.sleep(0.01)
        return real(*given, **more)

    return put


from kvarve.storage.file.file_storage import FileStorage

for name in ("put", "put_pieces"):
    setattr(FileStorage, name, gated(getattr(FileStorage, name)))
"""


def stored(url: str) -> int:
    """Objects in a storage, as another process finds them."""
    command = [sys.executable, "-m", "kvarve", "storage", "stat", url, "--json", "-"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return sum(group["objects"] for model in told["models"] for group in model["groups"])


def test_a_pause_waits_for_no_storage_and_all_is_stored_while_it_lasts(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """More than may be in flight at once: the rest is sent by an engine that takes no step."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    url, gate = f"file://{tmp_path}/pages?capacity=256MiB", tmp_path / "gate"
    given = {
        "model": str(model_folder("gemma3")),
        "storage": url,
        "prompts": [prompt(1000, seed) for seed in range(PROMPTS)],
    }
    path = f"{tmp_path / 'site'}:{ROOT / 'src'}"
    environment = os.environ | {"KVARVE_TEST_GATE": str(gate), "PYTHONPATH": path}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "vllm_idle.py"), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        assert line, (tmp_path / "log").read_text()[-4000:]
        assert json.loads(line)["paused_s"] < 10, "a storage that takes nothing holds up nobody"
        assert stored(url) == 0
        gate.touch()
        end = time.monotonic() + LONG_S
        while (found := stored(url)) < PROMPTS * PAGES * POOLS and time.monotonic() < end:
            pass
        assert found == PROMPTS * PAGES * POOLS
        process.stdin.close()
        process.wait(60)
