"""A world to hunt in: the real core against simulated ranks, lanes, storage and clock, driven by a test or by a seed.

`World` is the world; `config`, `prompt` and `fork` set small scenes by hand; `born` and `live` draw whole lives from a
seed, `play` repeats one, `shrink` makes one that breaks short. `python -m kvarve.testing.world` hunts.
"""

from kvarve.testing.world.life import Life, born, live, play
from kvarve.testing.world.looks import dump, runs
from kvarve.testing.world.scenes import (
    ATTENTION,
    INDEX,
    PAGE_TOKENS,
    PATIENCES,
    STATE,
    WINDOW,
    config,
    fork,
    prompt,
)
from kvarve.testing.world.shrink import Trouble, attempt, shrink
from kvarve.testing.world.world import World

__all__ = [
    "ATTENTION",
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
