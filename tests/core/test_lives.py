"""Lives that broke a law once, as short as the hunt could make them: none of them may break one again."""

from pathlib import Path

import pytest

from tests.sim.world import Life, play

DEAR = "a-fetch-that-ends-beside-a-failed-store"
LIVES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem == DEAR else [])
    for path in sorted((Path(__file__).parent / "lives").glob("*.json"))
]


@pytest.mark.parametrize("path", LIVES)
def test_what_broke_once_does_not_break_again(path: Path) -> None:
    play(Life.read(path))
