"""A model that two processes compute together answers through the cache, bit for bit, as it does without."""

import subprocess
import sys
from pathlib import Path

import pytest
from one_of_ranks import compare

import gpu_nodes
from kvarve.engine.ranks import started
from kvarve.testing.models import save_checkpoint, tiny_model

REPLICATED = {"qwen3_5": False, "gpt_oss": False, "deepseek_v32": True}  # attention KV, by family


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_answers_of_several_ranks_are_those_without_a_cache_from_every_tier(tmp_path: Path, ranks: int) -> None:
    for family in REPLICATED:
        save_checkpoint(tiny_model(family), tmp_path / family)
    options = {"folder": str(tmp_path), "families": [*REPLICATED]}
    with started(compare, options, ranks) as (place, listener):
        found = compare(options, place, listener)
    for family, told in found.items():
        hits = {name: counts[:-1] for name, counts in told["rounds"].items()}
        assert not any(counts[-1] for counts in told["rounds"].values()), f"{family}: {told['rounds']}"
        assert not any(hits["cold"]) and hits["device"][0] and hits["host"][1] and hits["storage"][2], hits
        assert any(told["replicated"].values()) == REPLICATED[family], told["replicated"]


@pytest.mark.parametrize(
    ("gone", "end", "expected"),
    [
        (1, "waits", "rank 0 ends: rank 1: it is dead"),
        (0, "waits", "rank 1 ends: rank 0: it is dead"),
        (1, "fails", "rank 0 ends: rank 1: RuntimeError: no memory is left on its device"),
    ],
)
def test_a_rank_whose_device_waits_for_one_that_is_gone_ends_and_names_it(gone: int, end: str, expected: str) -> None:
    words = [str(Path(__file__).with_name("one_waiting.py")), gpu_nodes.address(), end]
    nodes = [
        subprocess.Popen(
            [sys.executable, words[0], str(node), *words[1:]],
            env=gpu_nodes.environment(node),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        for node in nodes:
            assert node.stdout is not None and node.stdout.readline() == "ready\n"
        if end == "waits":
            nodes[gone].kill()
        _, said = nodes[1 - gone].communicate(timeout=120)
        assert expected in said and nodes[1 - gone].returncode == 2
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
