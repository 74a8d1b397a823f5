"""README's command for vLLM, as it stands there but for the model, in an environment with nothing but the wheel."""

import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_process import ROOT, prompt
from kvarve_server import interpreter
from vllm_server import Server, serving

from doc_blocks import command

pytestmark = pytest.mark.timeout(1800)
LONG = prompt(1000, 1)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a venv that has vLLM's packages, and kvarve as its wheel installs it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    theirs = next(path for path in sys.path if path.endswith("site-packages"))
    python = interpreter()  # vLLM's own has no pip
    build = [python, ROOT / "tools" / "uv.py", "build", "--quiet", "--wheel", "--out-dir", folder, ROOT]
    subprocess.run(build, check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--target", site]
    subprocess.run([*pip, wheel], check=True)
    (site / "vllm.pth").write_text(f"{theirs}\n")
    state = tmp_path_factory.mktemp("state")
    return {"PYTHON": str(folder / "venv" / "bin" / "python"), "PYTHONPATH": "", "XDG_STATE_HOME": str(state)}


def stored(environment: dict[str, str]) -> int:
    """How many objects the store of this user has."""
    stat = [sys.executable, "-m", "kvarve", "storage", "stat", f"{environment['XDG_STATE_HOME']}/kvarve", "--json", "-"]
    told = subprocess.run(stat, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, check=False)
    return sum(model["objects"] for model in json.loads(told.stdout or '{"models": []}')["models"])


def wait_until_stored(server: Server, environment: dict[str, str], objects: int) -> None:
    while stored(environment) < objects:
        assert server.process.poll() is None


def test_with_one_word_before_it_a_command_of_vllm_keeps_its_prompts_over_a_kill_of_all_its_processes(
    installed: dict[str, str], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    word, program, serve, _, *words = command("README.md", "KVARVE=1 vllm")
    assert (word, program, serve, words) == ("KVARVE=1", "vllm", "serve", [])
    given = (model_folder("gemma3"), [], installed | {"KVARVE": "1", "KVARVE_HOST_MEMORY": "256MiB"}, tmp_path / "log")
    with serving(*given) as server:
        cold = server.ask(LONG)
        wait_until_stored(server, installed, 7 * 6)
        server.kill()
    assert "KVARVE=1: an engine has 256MiB of host memory, and file://?capacity=" in (tmp_path / "log").read_text()
    with serving(*given) as server:
        assert server.ask(LONG) == (cold[0], 896) and cold[1] == 0
        # vLLM leaves its engine behind if its server is killed, and the engine its memory and store.
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
        assert server.ended(), server.family()
    assert "is gone: the engine ends" in (tmp_path / "log").read_text()
