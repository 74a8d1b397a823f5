"""A simulator: the real core with simulated ranks, lanes, storage and clock, driven by a test or by a seed.

`World` is the simulator; `config`, `prompt` and `fork` set up small scenes by hand; `born` and `live` draw whole lives
from a seed, `play` replays one, `shrink` minimizes a failing one. `python -m tests.sim.world` searches failures.
"""

from tests.sim.world.life import Life, born, live, play
from tests.sim.world.scenes import (
    ATTENTION,
    EVERY_PAGE,
    INDEX,
    PAGE_TOKENS,
    PATIENCES,
    STATE,
    WINDOW,
    config,
    fork,
    prompt,
)
from tests.sim.world.shrink import Trouble, attempt, shrink
from tests.sim.world.views import dump, runs
from tests.sim.world.world import World

__all__ = [
    "ATTENTION",
    "EVERY_PAGE",
    "INDEX",
    "PAGE_TOKENS",
    "PATIENCES",
    "STATE",
    "WINDOW",
    "Life",
    "Trouble",
    "World",
    "attempt",
    "born",
    "config",
    "dump",
    "fork",
    "live",
    "play",
    "prompt",
    "runs",
    "shrink",
]
