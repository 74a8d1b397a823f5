"""What does kvarve's linker find behind SGLang's device pools, beside HiCache, and what does it cost the scheduler?

    .venv/bin/python benchmarks/linker.py --trace FILE [--requests N] [--sglang-python PYTHON] [--quick] [--json FILE]

Both caches stand behind SGLang's own tree, pools and allocators on a CPU (`behind/sglang_caches.py`), run by the Python
of `--sglang-python`, or of .venv-sglang, which `make test-engines` sets up. Requests of the trace come one after the
other, each when all copies of the one before have ended. Nothing is computed. A block of 512 tokens of the trace is one
page of 16, so tokens are divided by 32; the device has 2,048 pages, host memory is twice as large, storage unbounded.

`hit_tokens_over_hicache`: prompt tokens that need not be computed, over those with HiCache and its file backend, which
waits for storage as long as it takes; the lower one of attention alone and attention with recurrent states. kvarve has
the bytes of HiCache's host pools for its host memory, records and slots included.

`lookup_100k_ms`, `hand_over_64_pages_ms`: what a lookup of 100,000 tokens that the host has, and the offload of a node
of 64 pages behind 96,000 tokens, take of the thread of SGLang's scheduler; the median.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import arguments, machine, show, watched, write_json

ROOT = Path(__file__).parents[1]
SGLANG = ROOT / ".venv-sglang" / "bin" / "python"
MIXES = ("FULL", "FULL+MAMBA")


def asked(python: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What `behind/sglang_caches.py` answers."""
    paths = [ROOT / "src", ROOT / "tests" / "engines" / "hicache"]
    done = subprocess.run(
        [python, "-W", "ignore", ROOT / "benchmarks" / "behind" / "sglang_caches.py", json.dumps(settings)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def hits(python: Path, trace: Path, requests: int) -> tuple[list[dict[str, object]], float]:
    rows: list[dict[str, object]] = []
    ratios = []
    for mix in watched(MIXES, "tree", len(MIXES)):
        found, host_bytes = dict[str, int](), 0
        for side in ("HiCache", "kvarve"):
            with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as folder:
                play = {"side": side, "mix": mix, "trace": str(trace), "requests": requests, "folder": folder}
                told = asked(python, {"do": "play", **play, "host_bytes": host_bytes})
            host_bytes, found[side] = told["host bytes"], told["device"] + told["host"] + told["storage"]
            rows.append({"tree": mix, "cache": side, **told, "hits": found[side]})
        ratios.append(found["kvarve"] / found["HiCache"])
    return rows, min(ratios)


def main(words: Sequence[str] | None = None) -> int:
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in blocks of 512 tokens (docs/planning.md)")
    parser.add_argument("--requests", type=int, default=4000, metavar="N", help="the first ones of the trace")
    parser.add_argument("--sglang-python", type=Path, metavar="PYTHON", help="of the environment that has SGLang")
    args = parser.parse_args(words)
    about, python = machine(), args.sglang_python or SGLANG
    if not python.exists():
        print(f"Left out: there is no {python}; make test-engines sets it up.")
        return 0
    times = asked(python, {"do": "times", "rounds": 3 if args.quick else 50})
    rows: list[dict[str, object]] = [{"call": name, "ms": took} for name, took in times.items()]
    show("Time of the scheduler's thread", rows)
    ratios = {"lookup_100k_ms": times["lookup"], "hand_over_64_pages_ms": times["offload"]}
    if args.trace is None:
        print("Left out: hits, without --trace.")
    else:
        table, ratios["hit_tokens_over_hicache"] = hits(python, args.trace, 60 if args.quick else args.requests)
        shown = [{name: it // 1000 if isinstance(it, int) else it for name, it in row.items()} for row in table]
        show("Thousands of prompt tokens by where they came from, and of bytes", shown)
        rows += table
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.5f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
