"""Servers of vLLM with several workers or engines on one store: what is left when one of their processes is killed, and
what a server that is started then finds."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_process import ROOT, prompt
from vllm_server import serving

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]

PROMPTS = [prompt(1000, seed) for seed in range(4)]
LAYOUTS = {
    "tp": ["--tensor-parallel-size", "2", "--max-num-batched-tokens", "128"],
    "dp": ["--data-parallel-size", "2"],
}


@pytest.mark.parametrize(
    ("layout", "victim"), [("tp", "Worker"), ("tp", "EngineCore"), ("tp", "server"), ("dp", "server")]
)
def test_a_server_started_after_a_kill_finds_what_was_stored(
    layout: str, victim: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = {
        "KVARVE": "1",
        "KVARVE_HOST_MEMORY": "128MiB",
        "KVARVE_STORAGE": f"file://{tmp_path}/pages?capacity=256MiB",
        "PYTHONPATH": str(ROOT / "src"),
    }
    given = (model_folder("gemma3"), LAYOUTS[layout], environment, tmp_path / "log")
    with serving(*given) as server:
        cold = [server.ask(each)[0] for each in PROMPTS]
        assert [server.ask(each)[0] for each in PROMPTS] == cold
        (killed, *_) = [number for number, name in server.family().items() if victim in name]
        os.kill(server.process.pid if victim == "server" else killed, signal.SIGKILL)
        server.process.wait(120)
        assert server.ended(), server.family()
    with serving(*given) as server:
        found = [server.ask(each) for each in PROMPTS]
        assert [answer for answer, _ in found] == cold
        assert sum(tokens for _, tokens in found) >= 3 * 896, found  # what was not stored by then is computed
