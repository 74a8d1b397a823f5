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
from kvarve.engine.ranks import started
from kvarve.testing.models import save_checkpoint, tiny_model

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
DEVICES = pytest.mark.parametrize("device", [(), pytest.param(("GPU",), marks=ON_GPU)], ids=["no device", "gpu"])


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


@DEVICES
@pytest.mark.parametrize("gone", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_whose_device_waits_for_one_that_is_gone_ends_and_names_it(gone: int, device: tuple[str, ...]) -> None:
    with waiting(2, gone, "waits", *device) as nodes:
        nodes[gone].kill()
        _, said = nodes[1 - gone].communicate(timeout=120)
        assert f"rank {1 - gone} ends: rank {gone}: it is dead" in said and nodes[1 - gone].returncode == 2, said


@pytest.mark.long
@DEVICES
@pytest.mark.parametrize("stopped", [0, 2])
def test_ranks_whose_devices_wait_for_one_that_is_stopped_end_and_name_it(
    stopped: int, device: tuple[str, ...]
) -> None:
    with waiting(3, stopped, "waits", *device) as nodes:
        nodes[stopped].send_signal(signal.SIGSTOP)
        for rank, node in enumerate(nodes):
            if rank != stopped:
                _, said = node.communicate(timeout=120)
                assert f"rank {rank} ends: rank {stopped}: it is late" in said and node.returncode == 2, said


@pytest.mark.long
def test_ranks_that_all_compute_beyond_the_deadline_end_and_say_that_all_answer() -> None:
    with waiting(2, 2, "waits") as nodes:
        for rank, node in enumerate(nodes):
            _, said = node.communicate(timeout=120)
            assert f"rank {rank} ends: no sum came in 5 s, though all ranks answer" in said and node.returncode == 2, (
                said
            )


@ON_GPU
def test_kernels_that_are_compiled_for_longer_than_the_deadline_end_no_rank() -> None:
    with waiting(2, 2, "compile", "GPU") as nodes:
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


@pytest.mark.long
def test_ranks_whose_devices_wait_for_one_that_has_failed_say_why_it_has() -> None:
    with waiting(3, 2, "fails") as nodes:
        for rank, node in enumerate(nodes[:2]):
            _, said = node.communicate(timeout=120)
            assert f"rank {rank} ends: rank 2: RuntimeError: no memory is left on its device" in said
            assert node.returncode == 2


@pytest.mark.long
@pytest.mark.parametrize("end", ["leaves", "closes"])
def test_a_rank_that_has_failed_ends_though_its_device_waits_for_others_for_ever(end: str) -> None:
    with waiting(2, 1, end) as nodes:
        _, said = nodes[1].communicate(timeout=120)
        assert "rank 1 ends: rank 1: RuntimeError: no memory is left on its device" in said
        assert nodes[1].returncode == 2


@pytest.mark.long
def test_no_rank_ends_while_another_one_computes() -> None:
    with waiting(2, 1, "lags") as nodes:
        ended = [(node.communicate(timeout=120)[1], node.returncode) for node in nodes]
    assert [code for _, code in ended] == [0, 0], ended
