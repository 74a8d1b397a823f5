"""The main job as a user runs it, in its short form: a real server in a process of its own, twice."""

from pathlib import Path

import pytest

from demos import FAMILIES, run_demo
from tests.sim.models import save_checkpoint, tiny_model


def test_the_demo_is_warm_from_every_tier_with_the_cold_answers(tmp_path: Path) -> None:
    report = run_demo(tmp_path)
    accuracies = {row["accuracy"] for row in report["rounds"]}
    assert len(accuracies) == 1 and accuracies.pop() > 0.5
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json", "demo.png", "demo-server.log"}, "no litter"


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
