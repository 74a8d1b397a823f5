"""Two ranks whose sums nccl makes: each is a node of its own, since nccl has one rank on a GPU of a node."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvarve.testing.models import save_checkpoint, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
FAMILIES = ("qwen3_5", "gpt_oss", "deepseek_v32")


def test_answers_of_two_ranks_on_a_gpu_are_those_without_a_cache_from_every_tier(tmp_path: Path) -> None:
    for family in FAMILIES:
        save_checkpoint(tiny_model(family), tmp_path / family)
    options = {"folder": str(tmp_path), "families": FAMILIES, "device": "cuda"}
    address = f"127.0.0.1:{_two_free_ports()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("one_node.py")), str(node), address, json.dumps(options)],
            # What names a node for nccl, which then goes by sockets.
            env={**os.environ, "NCCL_HOSTID": f"node {node}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"},
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


def _two_free_ports() -> int:
    """The first of two ports, one after the other, that nobody listens at."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port
