"""Two ranks whose sums nccl makes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu_nodes
from tests.sim.models import save_checkpoint, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
FAMILIES = ("qwen3_5", "gpt_oss", "deepseek_v32")


def test_answers_of_two_ranks_on_a_gpu_are_those_without_a_cache_from_every_tier(tmp_path: Path) -> None:
    for family in FAMILIES:
        save_checkpoint(tiny_model(family), tmp_path / family)
    options = {"folder": str(tmp_path), "families": FAMILIES, "device": "cuda"}
    words = [gpu_nodes.address(), json.dumps(options)]
    nodes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("one_node.py")), str(node), *words],
            env=gpu_nodes.environment(node),
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        told = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0]
    for family, found in (each for said in told for each in json.loads(said.splitlines()[-1]).items()):
        hits = {name: counts[:-1] for name, counts in found["rounds"].items()}
        assert not any(counts[-1] for counts in found["rounds"].values()), f"{family}: {found['rounds']}"
        assert not any(hits["cold"]) and hits["device"][0] and hits["host"][1] and hits["storage"][2], hits
