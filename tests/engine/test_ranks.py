"""A model that two processes compute together answers through the cache, bit for bit, as it does without."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from one_of_ranks import compare

import forks
import gpu_nodes
from kvarve.reference.engine.rank_processes import started
from tests.sim.models import save_checkpoint, tiny_model

REPLICATED = {"qwen3_5": False, "gpt_oss": False, "deepseek_v32": True}  # attention KV, by family


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
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


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@contextmanager
def waiting(
    nodes: int, odd: int, end: str, *device: str, stderr: int = subprocess.PIPE
) -> Iterator[list["subprocess.Popen[str]"]]:
    """So many ranks, each a node, that compute (`one_waiting.py`)."""
    words, address = [sys.executable, str(Path(__file__).with_name("one_waiting.py"))], gpu_nodes.address()
    started = [
        forks.Popen(
            [*words, str(node), str(nodes), address, str(odd), end, *device],
            env=gpu_nodes.environment(node),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        for node in range(nodes)
    ]
    try:
        for node in started:
            assert node.stdout is not None and node.stdout.readline() == "ready\n"
        yield started
    finally:
        for node in started:
            node.kill()
            node.communicate()


FAILED = "RuntimeError: no memory is left on its device"
ENDS: list[tuple[int, int, str, signal.Signals | None, str]] = [  # nodes, the odd one, its end, its signal, why all end
    (2, 0, "waits", signal.SIGKILL, "rank 0: it is dead"),
    (2, 1, "waits", signal.SIGKILL, "rank 1: it is dead"),
    (3, 0, "waits", signal.SIGSTOP, "rank 0: it is late"),
    (3, 2, "waits", signal.SIGSTOP, "rank 2: it is late"),
    (2, 2, "waits", None, "no sum came in 5 s, though all ranks answer"),
    (3, 2, "fails", None, f"rank 2: {FAILED}"),
    (2, 1, "leaves", None, f"rank 1: {FAILED}"),
    (2, 1, "closes", None, f"rank 1: {FAILED}"),
]


@pytest.mark.parametrize("device", [(), pytest.param(("GPU",), marks=ON_GPU)], ids=["no device", "gpu"])
@pytest.mark.parametrize(
    ("count", "odd", "end", "gets", "why"),
    [ENDS[0], *(pytest.param(*each, marks=pytest.mark.long) for each in ENDS[1:])],
    ids=["a killed rank", *(f"{each[2]}-{at}" for at, each in enumerate(ENDS[1:]))],
)
def test_ranks_whose_devices_wait_for_another_end_and_say_why(
    count: int, odd: int, end: str, gets: signal.Signals | None, why: str, device: tuple[str, ...]
) -> None:
    if device and gets is None:
        pytest.skip("only a rank that is gone or stopped is waited for within a sum of nccl")
    with waiting(count, odd, end, *device) as nodes:
        if gets is not None:
            nodes[odd].send_signal(gets)
        # A rank that waits for others when it has failed says so itself; else the others do.
        for rank in [odd] if end in ("leaves", "closes") else [rank for rank in range(count) if rank != odd]:
            _, said = nodes[rank].communicate(timeout=120)
            assert f"rank {rank} ends: {why}" in said and nodes[rank].returncode == 2, said


@pytest.mark.long
@pytest.mark.parametrize(("end", "device"), [("lags", ()), pytest.param("compile", ("GPU",), marks=ON_GPU)])
def test_no_rank_ends_while_another_one_computes_or_compiles(end: str, device: tuple[str, ...]) -> None:
    with waiting(2, 1 if end == "lags" else 2, end, *device) as nodes:
        ended = [(node.communicate(timeout=120)[1], node.returncode) for node in nodes]
    assert [code for _, code in ended] == [0, 0], ended


@pytest.mark.long
def test_a_rank_whose_messages_are_read_by_no_process_ends_all_the_same() -> None:
    full, end = os.pipe()
    os.set_blocking(end, False)
    with suppress(BlockingIOError):
        while os.write(end, bytes(4096)):
            pass
    os.set_blocking(end, True)
    with waiting(2, 1, "waits", stderr=end) as nodes:
        nodes[1].kill()
        assert nodes[0].wait(120) == 2
    os.close(full)
    os.close(end)
