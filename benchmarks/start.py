"""How long until `kvarve serve` is ready?

    .venv/bin/python benchmarks/start.py [--quick] [--json FILE]

From the start of the process until it says that it listens, with the built-in model. In turns with the limit: a process
that imports the same libraries (torch, FastAPI, transformers), loads the same model by transformers alone, and computes
once. Then both beside a busy loop on each core: torch's threads wait for each other, and how long they spin decides.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from common import arguments, machine, show, watched, write_json
from kvarve.cli.main import SPINS
from kvarve.reference.engine.model import BUILTIN

ROUNDS, BUSY_ROUNDS = 7, 3
READY = "listening"
LIMIT = f"""
import gc; gc.disable()
import fastapi, tokenizers, torch, uvicorn
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(BUILTIN / "tiny-hybrid")!r})
with torch.no_grad():
    model(torch.arange(64)[None])
print({READY!r}, flush=True)
__import__("signal").pause()
"""
WAYS = {"kvarve serve": ["-m", "kvarve", "serve", "--port", "0"], "its libraries alone": ["-c", LIMIT]}


def seconds(words: Sequence[str]) -> float:
    """From the start of a process until it is ready; it is ended then."""
    began = time.perf_counter()
    environment = {"GOMP_SPINCOUNT": SPINS} | os.environ  # both ways have torch's threads spin alike
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        said = list[str]()
        try:
            for line in process.stdout:
                said.append(line)
                if READY in line:
                    return time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGKILL)
    raise RuntimeError("".join(said))


@contextmanager
def busy() -> Iterator[None]:
    """A process on each core that does nothing else than use it."""
    with ExitStack() as ends:
        for _ in os.sched_getaffinity(0):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ends.callback(loop.wait)
            ends.callback(loop.kill)
        yield


def measure(title: str, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    turns = ((way, words) for number in range(rounds) for way, words in sorted(WAYS.items(), reverse=bool(number % 2)))
    for way, words in watched(turns, title, rounds * len(WAYS)):
        found[way].append(seconds(words))
    return found


def main() -> int:
    args, about = arguments("How long until `kvarve serve` is ready?").parse_args(), machine()
    for words in WAYS.values():
        seconds(words)  # from now on the files of libraries are in the page cache
    idle = measure("idle", 1 if args.quick else ROUNDS)
    with busy():
        beside = measure("beside busy loops", 1 if args.quick else BUSY_ROUNDS)
    ours, limit = WAYS
    rows = [{"process": way, "idle": median(idle[way]), "beside busy loops": median(beside[way])} for way in WAYS]
    ratios = {
        "start_s": median(idle[ours]),
        "start_over_libraries": median(a / b for a, b in zip(idle[ours], idle[limit], strict=True)),
        "busy_start_s": median(beside[ours]),
    }
    show("seconds until ready, medians", rows)
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
