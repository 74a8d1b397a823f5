"""Lives of an engine's scheduler over the core, in which no request waits in vain and each gets one last output."""

from collections import Counter
from pathlib import Path

import pytest

from kvarve.errors import ConfigError
from kvarve.reference.engine import admission
from tests.sim.world import Life, Trouble, attempt, born, live
from tests.sim.world.engines import Shop

DEAR = (
    "passed-once-it-asks-storage",
    "given-up-and-claimed-again",
    "a-head-whose-copies-come-is-not-held-up",
    "judged-by-one-that-was-not-admitted",
)
LIVES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in DEAR else [])
    for path in sorted((Path(__file__).parent / "engine_lives").glob("*.json"))
]


@pytest.mark.parametrize(
    "seeds", [range(3), *(pytest.param(range(at, at + 10), marks=pytest.mark.long) for at in range(0, 60, 10))], ids=str
)
def test_no_request_waits_in_vain_and_each_has_one_last_output(seeds: range) -> None:
    seen = Counter[str]()
    for seed in seeds:
        print(f"python -m tests.sim.world --engine --seeds {seed}:{seed + 1}")
        seen += live(*born(seed, "engine")).seen
    for kind in ("answered", *(("ran beside others", "left while waiting") if len(seeds) == 10 else ())):
        assert seen[kind], kind


@pytest.mark.parametrize("path", LIVES)
def test_what_broke_once_does_not_break_again(path: Path) -> None:
    trouble, _ = attempt(Life.read(path))
    assert trouble is None, trouble.text


def test_a_life_of_an_engine_is_kept_in_a_file_and_played_again(tmp_path: Path) -> None:
    life, dice = born(5, "engine")
    live(life, dice, 60)
    life.write(tmp_path / "life.json")
    again = Life.read(tmp_path / "life.json")
    assert again == life
    assert isinstance(again.world(), Shop)
    assert attempt(again)[0] is None
    again.actions.append(["close", 1])
    again.write(tmp_path / "life.json")
    with pytest.raises(ConfigError, match="nothing is called 'close'"):
        Life.read(tmp_path / "life.json")


def test_a_request_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    life, dice = born(3, "engine")
    live(life, dice, 120)
    end, times = Shop._end, [0]

    def forgetful(self: Shop, order: object) -> None:
        times[0] += 1
        end(self, order)  # type: ignore[arg-type]
        if times[0] == 2:
            self.last.clear()

    monkeypatch.setattr(Shop, "_end", forgetful)
    found, _ = attempt(life)
    assert isinstance(found, Trouble)
    assert "every accepted request has a last output" in found.text


@pytest.mark.long
def test_a_scheduler_that_lets_requests_be_passed_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "OVERTAKEN", 1 << 30)
    with pytest.raises(AssertionError, match="passed by 9 that hold it up"):
        for seed in (18,):
            live(*born(seed, "engine"))
