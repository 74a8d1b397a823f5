"""How near to memcpy do the lanes between device and host come?

    .venv/bin/python benchmarks/lanes.py [--quick] [--json FILE] [--device DEVICE]

A real transfer engine copies pages down and up, and their bytes are compared. The limit of the same run, in turns with
the copies, is one thread's `numpy.copyto` of as many bytes in consecutive pieces of 1 MiB, since each lane has one
thread; of a GPU, it is one copy from or to pinned memory. Ratios in both directions, the lower:

`gather_over_memcpy` pages of one piece of 1 MiB, from scattered slots to consecutive ones; `scattered_over_memcpy`
pages of 40 layers of 64 KiB, slots scattered at both ends; neither with checksums, which `checked_over_memcpy` has: the
same pages as the second, each sealed on its way down and checked on its way up.

Each figure is the best of several rounds, because other work on a machine only ever makes a round slower.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common import arguments, machine, show, watched, write_json
from kvarve.core.copies.effects import Copy, Ended, Page
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier
from kvarve.transfer.transfer_engine import TransferEngine
from pretend import PATIENCE_S

MIB = 1 << 20
WIDE = PoolSpec("wide", (BufferSpec("layers.0.keys", (64, 64, 128), "bfloat16"),), None)
DEEP = PoolSpec("deep", tuple(BufferSpec(f"layers.{n}.keys", (64, 4, 128), "bfloat16") for n in range(40)), None)
NAMESPACE, ROOT = b"b" * 32, b"r" * 32
D, H = Tier.DEVICE, Tier.HOST


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


class Bench:
    """One case."""

    def __init__(self, case: Case, size: Size, device: str) -> None:
        pages = size.payload_bytes // case.pool.payload_bytes
        rng, slots = random.Random(7), 2 * pages
        self.near = DeviceArena(case.pool, slots, device)
        kind = HostArena if case.checked else Bare
        self.far = kind(case.pool, slots, NAMESPACE, device=device)
        self.engine = TransferEngine([self.near], [self.far], verify_host=case.checked)
        self.scattered = [rng.sample(range(slots), pages) for _ in range(4)]
        if case.consecutive:
            self.scattered[1] = self.scattered[3] = [*range(pages)]
        self.keys = [bytes([number]) * 32 for number in range(pages)]
        generator = torch.Generator().manual_seed(3)
        for tensor in self.near.buffers.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32))
        self.wanted = [tensor[self.scattered[0]].clone() for tensor in self.near.buffers.values()]

    def down(self) -> float:
        return self._copy(D, H, self.scattered[0], self.scattered[1])

    def up(self) -> float:
        return self._copy(H, D, self.scattered[2], self.scattered[3])

    def round(self) -> dict[str, float]:
        found = {"down": self.down()}
        self._copy(D, H, self.scattered[0], self.scattered[2])
        for tensor in self.near.buffers.values():
            tensor[self.scattered[3]] = 0
        found["up"] = self.up()
        for tensor, wanted in zip(self.near.buffers.values(), self.wanted, strict=True):
            assert torch.equal(tensor[self.scattered[3]], wanted), "another page's bytes"
            tensor[self.scattered[0]] = wanted
        return found

    def _copy(self, source: Tier, target: Tier, at: Sequence[int], to: Sequence[int]) -> float:
        pages = tuple(Page(0, key, here, there) for key, here, there in zip(self.keys, at, to, strict=True))
        start = time.perf_counter()
        self.engine.send(Copy(1, source, target, pages, ROOT))
        while not (events := self.engine.collect()):
            assert self.engine.ends.wait(PATIENCE_S)
        seconds = time.perf_counter() - start
        assert events == [Ended(1, (1 << len(pages)) - 1)]
        return seconds


class Memcpy:
    """Consecutive bytes to consecutive bytes; of a GPU from and to pinned memory."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._far = torch.ones(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        self._near = torch.ones(nbytes, dtype=torch.uint8, device=device)

    def round(self) -> dict[str, float]:
        return {
            "memcpy_down": timed(lambda: self._copy(self._far, self._near)),
            "memcpy_up": timed(lambda: self._copy(self._near, self._far)),
        }

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._cuda:
            target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return
        into, out = target.numpy(), source.numpy()
        for start in range(0, len(into), MIB):
            np.copyto(into[start : start + MIB], out[start : start + MIB])


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(size: Size, device: str) -> tuple[dict[str, float], list[dict[str, object]]]:
    """The ratios, and a row for each case."""
    ratios, rows = dict[str, float](), list[dict[str, object]]()
    for name, case in watched(CASES.items(), "case", len(CASES)):
        bench, limit, best = Bench(case, size, device), Memcpy(size.payload_bytes, device), dict[str, float]()
        for number in range(size.rounds + 1):  # the first only warms up
            found = limit.round() | bench.round()
            if number:
                best |= {each: min(best.get(each, seconds), seconds) for each, seconds in found.items()}
        over = min(best[f"memcpy_{way}"] / best[way] for way in ("down", "up"))
        ratios[f"{name}_over_memcpy"] = over
        speed = {each: size.payload_bytes / seconds / 1e9 for each, seconds in best.items()}
        rows.append(
            {"case": name}
            | {f"GB_per_s_{way}": speed[way] for way in ("down", "up")}
            | {f"memcpy_{way}": speed[f"memcpy_{way}"] for way in ("down", "up")}
            | {"over_memcpy": over}
        )
        bench.engine.close()
    return ratios, rows


def main() -> int:
    parser = arguments("How near to memcpy do the lanes between device and host come?")
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda:0")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    torch.set_num_threads(1)  # the limit is one thread's, so is the copy that is compared with it
    ratios, rows = measure(size, args.device)
    show(
        f"{size.payload_bytes // MIB} MiB at once, best of {size.rounds}",
        rows,
        ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}" for name, ratio in ratios.items()),
    )
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
