"""`kvarve demo --engine vllm` without vLLM: its errors, and what it says of an engine that answers as told.

With the real engine: tests/engines/test_vllm_demo.py.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvarve.bench import demo_report, demo_vllm, vllm_process
from kvarve.cli.main import main
from kvarve.errors import KvarveError

PAGE = 384


class Told:
    """What engines keep: prefixes of whole pages by where they are, as vLLM and kvarve would."""

    def __init__(self) -> None:
        self.device: set[int] = set()
        self.host: set[int] = set()
        self.storage: set[int] = set()
        self.wrong_from = ""  # an answer from there has another logprob
        self.settings: list[dict[str, Any]] = []  # of the engines with kvarve


class Engine:
    """Stands for `EngineProcess`: tokens follow from the prompt, whose longest kept prefix is found."""

    def __init__(self, told: Told, settings: dict[str, Any]) -> None:
        self.told, self.kvarve = told, settings["kvarve"] is not None
        told.device, told.host = set(), set()  # it has just started
        told.settings += [settings["kvarve"]] if self.kvarve else []

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ready(self) -> None:
        pass

    def call(self, name: str, **more: Any) -> Any:
        return getattr(self, name)(**more)

    def about(self) -> dict[str, Any]:
        counts = dict.fromkeys(("backed_up", "stored", "fetched", "loaded", "bad_host", "bad_storage"), 3)
        return {"vllm": "0", "page": PAGE, "groups": 4, "counts": counts}

    def ask(self, prompt: list[int], tokens: int, read: bool) -> dict[str, Any]:
        told, ends = self.told, range(len(prompt) // PAGE * PAGE, 0, -PAGE)
        places = {"device": told.device, "host": told.host, "disk": told.storage}
        found = ((name, end) for end in ends for name, kept in places.items() if hash(tuple(prompt[:end])) in kept)
        source, cached = next(found, ("", 0)) if read else ("", 0)
        for name, kept in places.items():
            if self.kvarve or name == "device":
                kept.update(hash(tuple(prompt[:end])) for end in ends)
        return {
            "tokens": [(sum(prompt) + number) % 1900 for number in range(tokens)],
            "logprobs": [-0.5 - 1e-9 * (bool(source) and source == told.wrong_from)] * tokens,
            "first_s": 0.1 if source else 1.0,
            "last_s": 1.5,
            "sources": {source: cached} if source else {},
        }

    def drain(self) -> None:
        pass

    def empty(self, host: bool) -> None:
        self.told.device = set()
        self.told.host = set() if host else self.told.host


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Without matplotlib."""
    told = Told()
    found = importlib.util.find_spec
    monkeypatch.setattr(
        demo_report.importlib.util, "find_spec", lambda name: found(name) if name != "matplotlib" else None
    )
    monkeypatch.setattr(demo_vllm, "python_with_vllm", lambda given: Path(sys.executable))
    monkeypatch.setattr(demo_vllm, "EngineProcess", lambda python, settings, log: Engine(told, settings))
    return told


def test_five_rounds_say_where_tokens_came_from_and_that_answers_are_equal(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--engine", "vllm", "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "demo-vllm.json").read_text())
    assert [row["round"] for row in report["rounds"]] == ["vLLM alone", "cold", "device", "host", "storage"]
    alone, cold, *warm = report["rounds"]
    assert not any((*alone["cached_tokens"].values(), *cold["cached_tokens"].values()))
    assert all(row["cached_tokens"][row["round"]] == sum(row["cached_tokens"].values()) > 0 for row in warm)
    assert report["outputs_equal"] is True
    said = " ".join(capsys.readouterr().out.split())
    assert "those of vLLM alone, bit for bit" in said and "There is no accuracy" in said
    assert "matplotlib is not installed" in said and [path.name for path in tmp_path.iterdir()] == ["demo-vllm.json"]


@pytest.mark.parametrize("source", ["device", "disk"])
def test_one_logprob_that_differs_in_one_round_is_exit_code_1(
    told: Told, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told.wrong_from = source
    assert main(["demo", "--engine", "vllm", "--quick", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.count("DIFFER") == 1 and "this is a bug" in said
    assert json.loads((tmp_path / "demo-vllm.json").read_text())["outputs_equal"] is False


# --- the Python that has vLLM


def python(path: Path, prints: str) -> Path:
    """A program in the place of a Python, which is asked what it lacks."""
    path.write_text(f"#!/bin/sh\necho {prints}\n")
    path.chmod(0o755)
    return path


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> str:
    out = tmp_path / "out"
    assert main(["demo", "--engine", "vllm", "--out", str(out), *words]) == 2
    assert not out.exists(), "nothing is made before the error"
    return capsys.readouterr().err


def test_without_vllm_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVARVE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(vllm_process, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(vllm_process.importlib.util, "find_spec", lambda name: None)
    said = refused(capsys, tmp_path)
    assert "make run-vllm" in said and "--engine-python" in said and "pip install ." in said


def test_a_python_that_cannot_run_the_engine_and_options_of_another_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for prints, says in (
        ("lacks vllm kvarve", "needs vllm: install vLLM there"),
        ("lacks kvarve", "needs kvarve: "),
        ("", "this is no Python 3.11 or newer"),
    ):
        monkeypatch.setenv("KVARVE_VLLM_PYTHON", str(python(tmp_path / "python", prints)))
        assert says in refused(capsys, tmp_path)
    assert "No such file" in refused(capsys, tmp_path, "--engine-python", str(tmp_path / "absent"))
    for words in (["--model", "/some/where"], ["--port", "8000"], ["--context-tokens", "100"]):
        assert "cannot have --model, --port or" in refused(capsys, tmp_path, *words)


def test_an_engine_that_dies_is_one_error_with_the_last_error_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies.py").write_text("raise ValueError('no memory for blocks')")
    log = tmp_path / "log"
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [before, str(tmp_path)])))
    process = vllm_process.EngineProcess(Path(sys.executable), {}, log, module="dies")
    with pytest.raises(KvarveError, match=r"no memory for blocks.*all of it is in"), process:
        process.ready()
