"""What do several ranks cost?

    .venv/bin/python benchmarks/ranks.py [--quick] [--json FILE] [--dir FOLDER]

`agree_over_star_tp4`: one agreement of four ranks with a copy in flight, over the bare exchange of as many bytes
between the same processes through sockets of their own, the median of each, in turns. `messages_at_rest`: exchanges in
turns without anything in flight (rank 0 only sends its inputs). `storage_tp4_over_one`: bytes a second of prompts of
4,096 tokens that four ranks store and bring back, each its part, over one rank that does all of it; the lower of both
directions. `mla_bytes_tp4_over_tp1`: what a tiny DeepSeek-V3.2, whose latents and index keys all ranks hold alike,
leaves in storage.

All ranks share this machine's cores, so four ranks compute no faster than one. A prompt is stored, or back, when the
last rank has done its part.
"""

import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import arguments, machine, show, watched, write_json
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.ranks.star import Listener
from kvarve.reference.engine.model import LoadedModel, load_model, quiet_libraries
from kvarve.reference.engine.rank_processes import Place, Ranks, started
from kvarve.reference.verify.watched import Question
from kvarve.reference.verify.watched import watched as engine_over
from pretend import PROMPT_BYTES, Restore
from tests.sim.models import save_checkpoint, tiny_grid, tiny_model

RANKS = 4
FRAME = 28  # bytes of nearly every frame, with its length
MODEL = "deepseek_v32"
PROMPT = 600  # tokens of a prompt of the tiny model
START_S = 60.0


@dataclass(frozen=True)
class Size:
    rounds: int = 24  # so that no other load of the machine covers half of them
    exchanges: int = 2000  # in each round
    prompts: int = 3


QUICK = Size(rounds=2, exchanges=200, prompts=1)


@dataclass(frozen=True)
class Task:
    size: Size
    folder: Path


class Bare:
    """An exchange with nothing in it: every rank sends a frame to rank 0, which answers each."""

    def __init__(self, place: Place) -> None:
        self.rank, path = place.rank, str(place.folder / "bare")
        self._links: list[socket.socket] = []
        if not place.rank:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path + "~")
                listener.listen(RANKS)
                Path(path + "~").rename(path)
                self._links = [listener.accept()[0] for _ in range(1, place.ranks)]
            return
        end = time.monotonic() + START_S
        while not Path(path).exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        self._links = [socket.socket(socket.AF_UNIX)]
        self._links[0].connect(path)

    def exchange(self) -> None:
        frame, buffer = bytes(FRAME), bytearray(FRAME)
        if self.rank:
            self._links[0].sendall(frame)
        for link in self._links:
            assert link.recv_into(buffer, 0, socket.MSG_WAITALL) == FRAME
        for link in self._links if not self.rank else ():
            link.sendall(frame)

    def close(self) -> None:
        for link in self._links:
            link.close()


def measure(task: Task, place: Place, listener: Listener | None = None) -> dict[str, list[Any]]:
    """All of it on one rank; the figures are rank 0's."""
    torch.set_num_threads(1)
    quiet_libraries()
    ranks = Ranks(place, place.meet("bench", listener))
    with ranks.ended():
        found = _agreements(task.size, place, ranks)
        found |= _storage(task, ranks) | _bytes(task, ranks)
    return found


def _agreements(size: Size, place: Place, ranks: Ranks) -> dict[str, list[Any]]:
    bare, group = Bare(place), ranks.again()
    found: dict[str, list[Any]] = {"bare": [], "agree": [], "rest": []}

    def timed(name: str, exchange: Any) -> None:
        some = []
        for _ in range(size.exchanges):
            start = time.perf_counter()
            exchange()
            some.append(time.perf_counter() - start)
        found[name].append(median(some) * 1e6)

    rounds = range(size.rounds)
    for _ in rounds if place.rank else watched(rounds, "agreements", size.rounds):
        timed("bare", bare.exchange)
        timed("agree", lambda: group.agree([], 0.0, waiting=True))
    group.agree([], 0.0, waiting=False)  # the first such turn has to hear of what came before it
    before = group.exchanges
    timed("rest", lambda: group.agree([], 0.0, waiting=False))
    found["messages"] = [group.exchanges - before]
    ranks.meet()
    bare.close()
    return found


@contextmanager
def _emptied(folder: Path, ranks: Ranks, alone: bool) -> Iterator[str]:
    yield f"file://{folder}?capacity=4GiB"
    if not alone:
        ranks.meet()
    if not ranks.rank:
        shutil.rmtree(folder, ignore_errors=True)


def _storage(task: Task, ranks: Ranks) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"one put": [], "one get": [], "four put": [], "four get": []}

    def run(name: str, count: int, *of_all: Any, **among: Any) -> None:
        with _emptied(task.folder / name, ranks, count == 1) as url:
            restore = Restore(url, count, *of_all, **among)
            for number in range(1 + task.size.prompts):
                seconds = restore.round()
                if number:  # the first one makes the files
                    found[f"{name} put"].append(PROMPT_BYTES / restore.stored_s / 1e6)
                    found[f"{name} get"].append(PROMPT_BYTES / seconds / 1e6)
            restore.cache.shutdown()

    rounds = range(task.size.rounds)
    for _ in rounds if ranks.rank else watched(rounds, "prompts", task.size.rounds):
        if not ranks.rank:
            run("one", 1)
        ranks.meet()
        run("four", RANKS, ranks.of_all, rank=ranks.rank, agreement=ranks.again())
        ranks.meet()
    return found


def _bytes(task: Task, ranks: Ranks) -> dict[str, list[Any]]:
    page, chunk = tiny_grid(MODEL)
    shape = {"page_tokens": page, "chunk_tokens": chunk}
    checkpoint = str(task.folder / MODEL)

    def stored(name: str, model: LoadedModel, **among: Any) -> int:
        config = CacheConfig(8 << 20, 16 << 20, f"file://{task.folder}/{name}?capacity=1GiB")
        cache = PrefixCache(model.identity, config, **among)
        prompt = torch.randint(0, 256, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
        with engine_over(model, cache, ranks if among else None, deterministic=True) as engine:
            engine.answers([Question(prompt, 2)])
            engine.written()
            engine.meet()  # rank 0 counts what all have stored
            usage = cache.worker.usage()
            engine.meet()
        assert usage is not None and usage.bytes is not None
        return usage.bytes

    one = stored("tp1", load_model(checkpoint, **shape)) if not ranks.rank else 0
    ranks.meet()
    divided = load_model(checkpoint, ranks=ranks, **shape)
    return {"bytes": [one, stored("tp4", divided, rank=ranks.rank, agreement=ranks.again())]}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=options.dir) as folder:
        task = Task(QUICK if options.quick else Size(), Path(folder))
        save_checkpoint(tiny_model(MODEL), task.folder / MODEL)
        with started(measure, task, RANKS, deadline_s=600.0) as (place, listener):
            found = measure(task, place, listener)
    middle = {name: median(some) for name, some in found.items() if name != "bytes"}
    rows = [
        {"what": "bare exchange of 4 ranks", "figure": middle["bare"], "unit": "us"},
        {"what": "agreement with a copy in flight", "figure": middle["agree"], "unit": "us"},
        {"what": "turn without anything in flight", "figure": middle["rest"], "unit": "us"},
        *({"what": f"storage, {name}", "figure": middle[name], "unit": "MB/s"} for name in middle if " " in name),
        *(
            {"what": f"stored by {MODEL}, {name}", "figure": size / 1e3, "unit": "kB"}
            for name, size in zip(("tp 1", "tp 4"), found["bytes"], strict=True)
        ),
    ]
    both = [
        median(four / one for four, one in zip(found[f"four {way}"], found[f"one {way}"], strict=True))
        for way in ("put", "get")
    ]
    ratios = {
        "agree_over_star_tp4": median(a / b for a, b in zip(found["agree"], found["bare"], strict=True)),
        "messages_at_rest": middle["messages"],
        "storage_tp4_over_one": min(both),
        "mla_bytes_tp4_over_tp1": found["bytes"][1] / found["bytes"][0],
    }
    show("Four ranks", rows)
    show("Ratios", [{"ratio": name, "value": float(value)} for name, value in ratios.items()])
    write_json(options.json, {"machine": machine(), "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
