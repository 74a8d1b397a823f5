"""How near to memcpy do the lanes between device and host come, and what does a model that computes notice of them?

    .venv/bin/python benchmarks/lanes.py [--quick] [--json FILE] [--device DEVICE]

A real transfer engine copies pages down and up, and their bytes are compared. The limit of the same run, in turns with
the copies, is one thread's `numpy.copyto` of as many bytes in consecutive pieces of 1 MiB, since each lane has one
thread; of a GPU, it is one copy from or to pinned memory. There all ways to copy are timed in turns: a ratio of one
that is not the default ends in its name. Ratios in both directions, the lower:

`gather_over_memcpy` pages of one piece of 1 MiB, from scattered slots to consecutive ones; `scattered_over_memcpy`
pages of 40 layers of 64 KiB, slots scattered at both ends; neither with checksums, which `checked_over_memcpy` has: the
same pages as the second, each sealed on its way down and checked on its way up.

Of the scattered pages also: `both_over_memcpy`, down and up at once over two such copies at once; `beside_over_alone`,
products of matrices beside copies over the same alone (the slower direction); `first_layer_over_share`, the time until
a load's first layer has come over its share of the whole load's; `layerwise_over_longer`, a prefill whose layers wait
for their pages and compute about as long as those are copied, over the longer of copy and computing.

Each figure is the best of several rounds, because other work on a machine only ever makes a round slower.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from common import arguments, machine, show, watched, write_json
from kvarve.core.copies.effects import Copy, Ended, Page, Verified
from kvarve.memory._kernel_copies import by_kernel, triton
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.page_copies import ByGather, ByPiece, DeviceCopies, Way
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier
from kvarve.transfer.transfer_engine import TransferEngine
from pretend import PATIENCE_S

MIB = 1 << 20
WIDE = PoolSpec("wide", (BufferSpec("layers.0.keys", (64, 64, 128), "bfloat16"),), None)
DEEP = PoolSpec("deep", tuple(BufferSpec(f"layers.{n}.keys", (64, 4, 128), "bfloat16") for n in range(40)), None)
NAMESPACE, ROOT = b"b" * 32, b"r" * 32
D, H = Tier.DEVICE, Tier.HOST
DIRECTIONS = {"down": (D, H), "up": (H, D)}


@dataclass(frozen=True)
class Size:
    payload_bytes: int = 160 * MIB  # of each copy
    rounds: int = 12


QUICK = Size(payload_bytes=20 * MIB, rounds=2)


class Bare(HostArena):
    """Pages without checksums."""

    def seal(self, slot: int, key: bytes) -> None:
        pass


@dataclass(frozen=True)
class Case:
    pool: PoolSpec
    checked: bool
    consecutive: bool  # at the end to which pages are copied


CASES = {
    "gather": Case(WIDE, False, True),
    "scattered": Case(DEEP, False, False),
    "checked": Case(DEEP, True, False),
}


def ways(device: str) -> dict[str, Way]:
    """The ways to copy that are compared, the default first."""
    if torch.device(device).type == "cpu":
        return {"by piece": ByPiece}
    return {"by gather": ByGather} | ({} if triton is None else {"by kernel": by_kernel})


class Bench:
    """One case by one way. Copies down and up have slots of their own at both ends."""

    def __init__(self, case: Case, size: Size, device: str, way: Way) -> None:
        pages = size.payload_bytes // case.pool.payload_bytes
        rng, slots = random.Random(7), 2 * pages
        self.near = DeviceArena(case.pool, slots, device)
        kind = HostArena if case.checked else Bare
        self.far = kind(case.pool, slots, NAMESPACE, device=device)
        self.engine = TransferEngine([self.near], [self.far], verify_host=case.checked, mover=way)
        self.copies = DeviceCopies([self.near], [self.far], way)
        if case.consecutive:
            down, up = ((rng.sample(range(pages, slots), pages), [*range(pages)]) for _ in DIRECTIONS)
        else:
            near, far = (rng.sample(range(slots), slots) for _ in DIRECTIONS)
            down, up = (near[:pages], far[:pages]), (far[pages:], near[pages:])
        self.slots = {"down": down, "up": up}  # from where, and to where
        self._ops = count(1)
        self.keys = [bytes([number]) * 32 for number in range(pages)]
        generator = torch.Generator().manual_seed(3)
        for tensor in self.near.buffers.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32))
        self.wanted = [tensor[self.slots["down"][0]].clone() for tensor in self.near.buffers.values()]
        self._send(D, H, self.slots["down"][0], self.slots["up"][0])
        self._ended(1)

    def round(self) -> dict[str, float]:
        found = {way: timed(lambda way=way: self.run(way)) for way in DIRECTIONS}  # type: ignore[misc]
        self.compare()
        found["both"] = timed(lambda: self.run(*DIRECTIONS))
        self.compare()
        return found

    def run(self, *directions: str) -> None:
        """Copies all at once, to their end."""
        self.begin(*directions)
        self._ended(len(directions))

    def begin(self, *directions: str) -> None:
        for way in directions:
            self._send(*DIRECTIONS[way], *self.slots[way])

    def compare(self) -> None:
        """The pages that were copied up have their bytes; from now on they have others."""
        at = self.slots["up"][1]
        for tensor, wanted in zip(self.near.buffers.values(), self.wanted, strict=True):
            assert torch.equal(tensor[at], wanted), "another page's bytes"
            tensor[at] = 0
        self.engine.finish()

    def _send(self, source: Tier, target: Tier, at: Sequence[int], to: Sequence[int]) -> None:
        pages = tuple(Page(0, key, here, there) for key, here, there in zip(self.keys, at, to, strict=True))
        self.engine.send(Copy(next(self._ops), source, target, pages, ROOT))

    def _ended(self, copies: int) -> None:
        while copies:
            assert self.engine.ends.wait(PATIENCE_S)
            for event in self.engine.collect():
                if isinstance(event, Ended):
                    assert event.good == (1 << len(self.keys)) - 1
                    copies -= 1

    # --- beside a model that computes

    def beside(self, compute: "Compute", seconds: float) -> float:
        """Seconds that products of `seconds` take beside copies, in the direction in which they take longer."""
        products, took = compute.count(seconds), 0.0
        for way in DIRECTIONS:
            copies = int(3 * seconds / timed(lambda way=way: self.run(way))) + 2  # type: ignore[misc]
            self.begin(*[way] * copies)
            took = max(took, timed(lambda: compute.run(products)))
            self._ended(copies)
        return took

    def load(self) -> dict[str, float]:
        """Seconds until the first layer of a load has come, and all."""
        marks: list[Any] = [mark(self.near.device)]
        at, to = self.slots["up"]
        self.copies.load(
            {0: [*zip(at, to, strict=True)]},
            self.copies.ready(),
            lambda *_: marks.append(mark(self.near.device)),
        )
        self.compare()
        return {"first": between(marks[0], marks[1]), "all": between(marks[0], marks[-1])}

    def prefill(self, compute: "Compute", seconds: float) -> float:
        """Seconds of a load and a forward of `seconds`, each of whose layers waits for its pages."""
        products = compute.count(seconds / len(self.copies.layers))
        self.engine.layerwise = True

        def run() -> None:
            self.begin("up")
            assert self.engine.ends.wait(PATIENCE_S)
            events = self.engine.collect()
            assert isinstance(events[0], Verified)
            arrivals = self.engine.arrivals()
            for layer in self.copies.layers:
                for arrival in arrivals:
                    arrival.wait(layer)
                compute.send(products)
            compute.wait()
            self._ended(1 - any(isinstance(event, Ended) for event in events))

        found = timed(run)
        self.engine.layerwise = False
        self.compare()
        return found


class Compute:
    """Products of matrices on the compute stream."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        side, dtype = (2048, torch.bfloat16) if self._device.type == "cuda" else (192, torch.float32)
        self._matrix = torch.ones((side, side), device=device, dtype=dtype)
        self.run(20)
        self._product_s = min(timed(lambda: self.run(50)) for _ in range(5)) / 50

    def count(self, seconds: float) -> int:
        """How many products take about so long."""
        return max(1, round(seconds / self._product_s))

    def run(self, count: int) -> None:
        self.send(count)
        self.wait()

    def send(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class Memcpy:
    """Consecutive bytes to consecutive bytes; of a GPU from and to pinned memory."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        far = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in DIRECTIONS]
        near = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in DIRECTIONS]
        self._ends = [(far[0], near[0]), (near[1], far[1])]  # targets and sources, down and up
        self._streams = [torch.cuda.Stream(device) for _ in DIRECTIONS] if self._cuda else []
        self._threads = ThreadPoolExecutor(len(DIRECTIONS))

    def round(self) -> dict[str, float]:
        return {
            f"memcpy_{name}": timed(lambda which=which: self._copy(which))  # type: ignore[misc]
            for name, which in (("down", [0]), ("up", [1]), ("both", [0, 1]))
        }

    def _copy(self, which: Iterable[int]) -> None:
        if self._cuda:
            for number in which:
                with torch.cuda.stream(self._streams[number]):
                    self._ends[number][0].copy_(self._ends[number][1], non_blocking=True)
            for number in which:
                self._streams[number].synchronize()
        else:
            [*self._threads.map(self._pieces, which)]

    def _pieces(self, number: int) -> None:
        into, out = (end.numpy() for end in self._ends[number])
        for start in range(0, len(into), MIB):
            np.copyto(into[start : start + MIB], out[start : start + MIB])


def mark(device: torch.device) -> Any:
    """Now, or when the current stream has come so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(one: Any, other: Any) -> float:
    """The seconds from one mark to another."""
    return other - one if isinstance(one, float) else one.elapsed_time(other) / 1e3


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def lower(best: dict[str, float], found: dict[str, float]) -> None:
    best |= {each: min(best.get(each, value), value) for each, value in found.items()}


def measure(size: Size, device: str) -> tuple[dict[str, float], list[dict[str, object]], list[dict[str, object]]]:
    """The ratios, a row for each case and way, and one for each way beside a model that computes."""
    ratios, rows, beside, compute = dict[str, float](), list[dict[str, object]](), list[dict[str, object]](), None
    for name, case in watched(CASES.items(), "case", len(CASES)):
        limit, best = Memcpy(size.payload_bytes, device), dict[str, float]()
        benches = {told: (Bench(case, size, device, way), dict[str, float]()) for told, way in ways(device).items()}
        for number in range(size.rounds + 1):  # the first only warms up
            found = limit.round()
            if number:
                lower(best, found)
            for bench, bests in benches.values():
                found = bench.round()
                if number:
                    lower(bests, found)
        for number, (told, (bench, bests)) in enumerate(benches.items()):
            end = f"_{told.replace(' ', '_')}" if number else ""
            over = min(best[f"memcpy_{way}"] / bests[way] for way in DIRECTIONS)
            ratios[f"{name}_over_memcpy{end}"] = over
            speed = {each: size.payload_bytes / seconds / 1e9 for each, seconds in (bests | best).items()}
            rows.append(
                {"case": name, "by": told}
                | {f"GB_per_s_{way}": speed[way] for way in DIRECTIONS}
                | {f"memcpy_{way}": speed[f"memcpy_{way}"] for way in DIRECTIONS}
                | {"over_memcpy": over}
            )
            if name == "scattered":
                compute = compute or Compute(device)
                found = {"both_over_memcpy": best["memcpy_both"] / bests["both"]} | computing(
                    bench, compute, bests, size
                )
                ratios |= {f"{each}{end}": value for each, value in found.items()}
                beside.append({"by": told} | found)
            bench.engine.close()
    return ratios, rows, beside


def computing(bench: Bench, compute: Compute, best: dict[str, float], size: Size) -> dict[str, float]:
    """What a model notices of copies, and copies of a model, over what either takes alone."""
    alone, together = dict[str, float](), dict[str, float]()
    layers, long = len(bench.copies.layers), 3 * best["up"]
    for number in range(size.rounds + 1):
        one = {
            "beside": timed(lambda: compute.run(compute.count(long))),
            "layerwise": timed(lambda: compute.run(layers * compute.count(best["up"] / layers))),
        }
        other = {
            "beside": bench.beside(compute, long),
            "layerwise": bench.prefill(compute, best["up"]),
        } | bench.load()
        if number:
            lower(alone, one)
            lower(together, other)
    return {
        "beside_over_alone": together["beside"] / alone["beside"],
        "first_layer_over_share": layers * together["first"] / together["all"],
        "layerwise_over_longer": together["layerwise"] / max(alone["layerwise"], best["up"]),
    }


def main() -> int:
    parser = arguments("How near to memcpy do the lanes between device and host come?")
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda:0")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    torch.set_num_threads(1)  # the limit is one thread's, so is the copy that is compared with it
    ratios, rows, beside = measure(size, args.device)
    show(f"{size.payload_bytes // MIB} MiB at once, best of {size.rounds}", rows)
    show(
        "Scattered pages beside a model that computes",
        beside,
        ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}" for name, ratio in ratios.items()),
    )
    write_json(args.json, {"machine": about, "rows": rows, "beside": beside, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
