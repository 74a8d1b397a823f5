"""The main job as a user runs it, in its short form: a real server in a process of its own, twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demos import FAMILIES, run_demo
from kvarve.bench import demo
from kvarve.bench.workloads import Message
from kvarve.cli.main import main
from kvarve.errors import KvarveError
from kvarve.settings.commands import Demo
from tests.sim.models import save_checkpoint, tiny_model


def test_the_demo_is_warm_from_every_tier_with_the_cold_answers(tmp_path: Path) -> None:
    report = run_demo(tmp_path)
    accuracies = {row["accuracy"] for row in report["rounds"]}
    assert len(accuracies) == 1 and accuracies.pop() > 0.5
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json", "demo.png", "demo-server.log"}, "no litter"


def test_where_a_server_ends_meanwhile_its_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def gone(*_: Any) -> Iterator[str]:
        yield "http://127.0.0.1:1"

    monkeypatch.setattr(demo, "served", gone)
    hello: list[Message] = [{"role": "user", "content": "hello"}]
    with pytest.raises(KvarveError, match="log is the-log"), demo.server(Demo(), tmp_path, Path("the-log")) as client:
        client.chat(hello, 2, read_cache=False)
    with pytest.raises(KvarveError, match="log is the-log"), demo.server(Demo(), tmp_path, Path("the-log")) as client:
        client.metrics()


def test_texts_that_are_longer_than_the_manual_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--context-tokens", "100000", "--out", str(tmp_path)]) == 2
    assert "--context-tokens must be at most " in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_demo_of_several_ranks_is_warm_from_every_tier_with_their_cold_answers(
    tmp_path: Path, family: str, ranks: int
) -> None:
    save_checkpoint(tiny_model(family, **FAMILIES[family]), tmp_path / "model")
    model = ("--model", str(tmp_path / "model"), "--tp", str(ranks), "--context-tokens", "600")
    run_demo(tmp_path / "out", *model, timeout_s=1700)
