"""Two ranks of an engine load what both have, and each its own bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 240.0
PAGE_BYTES = {
    "DSA": 4 * 64 * (192 * 2 + 132),  # four layers of latents and index keys
    "V4": 4 * 149_760 + 2 * (37_440 + 8_448 + 65_536 + 16_384) + 1_728,  # windows; C4 with index keys and states; C128
}


@pytest.mark.long
def test_two_ranks_restore_what_both_have_and_stay_in_step(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "linker_rank.py")
    ranks = [subprocess.Popen([sys.executable, script, str(rank), str(tmp_path)]) for rank in (0, 1)]
    try:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    for kind, page_bytes in PAGE_BYTES.items():
        written = [seen.pop(f"bytes of {kind} written") for seen in (first, second)]
        assert sum(written) == page_bytes * 3, "once"
    assert first == second
    assert first == {
        "restored": [0, 4, 0],
        "one has lost all": 0,
        "it came from storage": [0, 4, 0],
        "damaged on one": "External KV cache load failed",
        "went on": [0, 4, 0],
        "after a restart": [0, 4, 0],
        "one has less": [0, 2, 2],
        "pages of DSA": [0, 3, 0],
        "pages of V4": [0, 3, 0],
        "HiCache after a restart": 4,
        "HiCache of which one has less": 2,
        "wrong": 0,
        "latents that each HiCache stored": [2 * 3, 0],  # with their index keys
        "latents of a HiCache": 3,
        "wrong latents": 0,
    }
