"""`kvarve bench` as a user runs it: with a server that it starts, and against one that runs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forks
from kvarve.bench.accuracy import own
from kvarve.bench.bench_command import Accuracy
from kvarve.cli.main import app
from kvarve.errors import KvarveError
from kvarve.reference.server.server_process import served
from kvarve.settings.options import call

SMALL = ["--clients", "2", "--output-tokens", "4", "--warmup", "1"]


def bench(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVARVE_")}
    command = [sys.executable, "-W", "error", "-m", "kvarve", "bench", *words]
    return forks.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    storage = f"file://{folder / 'pages'}?capacity=256MiB"
    words = ["--storage", storage, "--storage-wait", "all", "--admin-key", "boss", "--threads", "1"]
    with served(words, folder, folder / "log") as url:
        yield url


def rounds(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: list[dict[str, Any]] = json.loads(done.stdout)["rounds"]
    return found


def test_the_second_round_after_a_flush_comes_from_storage_with_the_same_answers(tmp_path: Path) -> None:
    words = ["--turns", "2", "--input-tokens", "300", "--serve=--deterministic --threads 1"]
    out = tmp_path / "out"
    done = bench("multiturn", *SMALL, *words, "--out", str(out), "--json", "-", "--png", str(tmp_path / "it.png"))
    first, second = rounds(done)
    assert first["requests"] == second["requests"] == 4 and first["failed"] == second["failed"] == 0
    assert first["prompt_tokens"] == second["prompt_tokens"] == 2 * (300 + 604)
    assert first["output_tokens"] == 16
    assert first["cached_tokens"]["storage"] == 0
    # Every first turn has one whole chunk and every second one two, of which the first turn has brought one.
    assert second["cached_tokens"]["storage"] == 2 * 2 * 256
    assert sum(second["cached_tokens"].values()) == 2 * (256 + 512)
    assert second["same_answers"] == 4 and second["answers_sha256"] == first["answers_sha256"]
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.iterdir()] == ["bench-server.log"], "no litter"


@pytest.mark.long
def test_a_server_that_runs_is_measured_too(url: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ["--requests", "3", "--input-tokens", "80", "--rate", "50", "--rounds", "1", "--json", str(figures)]
    done = bench("serving", "--server", url, "--admin-key", "boss", *SMALL, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "serving: 3 conversations, 3 requests, 50 conversations/s" in done.stdout
    assert "mean TTFT (ms)" in done.stdout and "p99 sent late (ms)" in done.stdout
    report = json.loads(figures.read_text())
    assert report["options"]["rate"] == 50.0 and report["rounds"][0]["requests"] == 3
    assert "boss" not in figures.read_text(), "a report repeats no key"


@pytest.mark.long
def test_other_loads_run(url: str) -> None:
    shared = ["--groups", "2", "--prompts", "2", "--prefix-tokens", "300", "--input-tokens", "20"]
    row, again = rounds(bench("shared-prefix", "--server", url, "--flush", "none", *SMALL, *shared, "--json", "-"))
    assert row["prompt_tokens"] == 4 * 320
    assert again["cached_tokens"]["device"] == 4 * 256
    long = ["--documents", "2", "--document-tokens", "600", "--questions", "2", "--rounds", "1", "--clients", "1"]
    (row,) = rounds(bench("long-document", "--server", url, *long, "--json", "-"))
    assert row["prompt_tokens"] == 4 * 664 and row["cached_tokens"]["device"] == 2 * 512


@pytest.mark.long
def test_what_a_server_refuses_is_one_line(url: str, tmp_path: Path) -> None:
    for words, complaint in (
        (["--server", url, "--requests", "1"], "the cache is not flushed (HTTP 401"),
        (["--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")], "the server did not start: "),
    ):
        done = bench("serving", *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("kvarve: ") and done.stderr.count("\n") == 1 and complaint in done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("serving --server http://127.0.0.1:9", "http://127.0.0.1:9: ConnectError"),
        ("serving --server http://127.0.0.1:9 --serve=x", "--serve cannot go with --server"),
        ("serving --input nothing.json", "must be random or a file"),
        ("serving --rate 0", "--rate"),
        ("multiturn --png /no/such/folder/a.png", "--png: /no/such/folder/a.png"),
        ("multiturn --json /no/such/folder/a.json", "--json: /no/such/folder/a.json"),
        ('multiturn --serve=--threads"', "--serve: No closing quotation"),
        ("frob", "unknown command 'frob'"),
    ],
)
def test_what_cannot_be_measured_is_one_error(words: str, complaint: str) -> None:
    with pytest.raises(KvarveError, match=re.escape(complaint)):
        call(app, ["bench", *words.split()])


@pytest.mark.long
def test_every_copy_between_tiers_is_compared_and_alters_nothing(tmp_path: Path) -> None:
    words = ["--clients", "2", "--turns", "1", "--serve=--threads 1", "--out", str(tmp_path / "out"), "--json", "-"]
    done = bench("hash", *words)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    edges = json.loads(done.stdout)["edges"]
    down_and_up = [("device", "host"), ("host", "storage"), ("storage", "host"), ("host", "device")]
    assert [(row["source"], row["target"]) for row in edges] == down_and_up
    assert all(row["compared"] > 0 and row["altered"] == 0 for row in edges), edges


@pytest.mark.long
def test_the_model_of_kvarve_s_own_answers_alike_from_storage(tmp_path: Path) -> None:
    words = ["--requests", "6", "--serve=--threads 1", "--out", str(tmp_path / "out"), "--json", "-"]
    done = bench("accuracy", *words)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(done.stdout)
    (found,) = report["sets"]
    assert found["questions"] == 6 == len(own(Accuracy(requests=6))) and found["answers_differ"] == 0
    assert found["right"][0] == found["right"][1] >= 4, "it has learned to find facts"
    cold, warm = (row["cached_tokens"]["storage"] for row in report["rounds"])
    assert cold == 0 and warm > 0
