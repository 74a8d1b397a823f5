"""Traces of prompts made of full blocks, and memory for a number of pages."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarve.cli.main import app
from kvarve.planner import SimulationConfig
from kvarve.settings.options import call

BLOCK = 512
PAGE_BYTES = BLOCK * 1024  # at 1 KiB of KV per token
RECORD_BYTES = PAGE_BYTES + 4096


def settings(pages: int, host: int = 0, storage: int = 0, **rest: Any) -> SimulationConfig:
    """Memory for this many pages in each tier."""
    return SimulationConfig(
        pages * PAGE_BYTES, host * RECORD_BYTES, storage * RECORD_BYTES, **({"kv_bytes_per_token": 1024} | rest)
    )


def line(ids: Sequence[int], extra: int = 1, at: int = 0, **rest: Any) -> dict[str, Any]:
    """A prompt of full blocks `ids` and `extra` tokens that have no id."""
    length = len(ids) * BLOCK + extra
    return {"timestamp": at, "input_length": length, "output_length": 7, "hash_ids": [*ids]} | rest


def trace(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines))
    return path


def branching(requests: int, seed: int = 7) -> list[dict[str, Any]]:
    """Conversations that go on and branch, side by side."""
    chance, fresh = random.Random(seed), iter(range(10**9))
    known: list[list[int]] = [[]]
    lines = []
    for at in range(requests):
        base = chance.choice(known)
        ids = base[: chance.randint(0, len(base))] + [next(fresh) for _ in range(chance.randint(1, 6))]
        known.append(ids)
        lines.append(line(ids, chance.randint(1, BLOCK - 1), at))
    return lines


def command(*words: str | Path) -> int:
    code: int = call(app, ["simulate", *map(str, words)])
    return code
