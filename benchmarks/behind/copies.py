"""Copies between an engine's blocks and host memory, beside memcpy.

Two cache groups of 40 layers, whose blocks are 64 KiB in each layer, so that a page is 40 pieces scattered over the
engine's tensors; the transfer engine of the connector's worker copies them, without seals and checks. The limit of the
same run, in turns with the copies, is one thread's `numpy.copyto` of as many bytes in consecutive pieces of 1 MiB.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common import watched
from kvarve.core.copies.effects import Copy, Ended, Page
from kvarve.memory.engine_arena import EngineArena, pool_of
from kvarve.pages.blocks import handle_of
from kvarve.pages.pools import Tier
from kvarve.transfer.transfer_engine import TransferEngine
from lanes import MIB, NAMESPACE, ROOT, Bare, Memcpy
from pretend import PATIENCE_S

LAYERS, PIECE_BYTES = 40, 64 << 10
GROUPS = {"full": None, "window": 8}  # their lookbacks, in pages


@dataclass(frozen=True)
class Size:
    payload_bytes: int = 160 * MIB  # of each copy
    rounds: int = 12

    @property
    def pages(self) -> int:
        """Of each group."""
        return self.payload_bytes // (LAYERS * PIECE_BYTES * len(GROUPS))


QUICK = Size(payload_bytes=20 * MIB, rounds=2)


class Blocks:
    """An engine's tensors and the host memory behind them. Blocks are scattered, as an engine hands them out."""

    def __init__(self, size: Size) -> None:
        dice, blocks = random.Random(7), 2 * size.pages + 1  # block 0 stands for nothing
        pools = [pool_of(name, LAYERS * [PIECE_BYTES], lookback) for name, lookback in GROUPS.items()]
        layers = [
            {
                f"{pool.name}.{layer}": torch.randint(256, (blocks, PIECE_BYTES), dtype=torch.uint8)
                for layer in range(LAYERS)
            }
            for pool in pools
        ]
        near = [EngineArena(pool, tensors, blocks) for pool, tensors in zip(pools, layers, strict=True)]
        self.far = [Bare(pool, 2 * size.pages, NAMESPACE) for pool in pools]
        self.engine = TransferEngine(near, self.far, verify_host=False)
        self.saved, self.loaded = ([dice.sample(range(1, blocks), size.pages) for _ in pools] for _ in range(2))
        self.slots = [dice.sample(range(2 * size.pages), size.pages) for _ in pools]
        self.tensors = [tensor for group in layers for tensor in group.values()]
        self.wanted = [tensor[self.saved[number // LAYERS]].clone() for number, tensor in enumerate(self.tensors)]

    def round(self) -> dict[str, float]:
        """Pages go to the host and come back into other blocks, with the same bytes."""
        found = {"store": self._copy(Tier.DEVICE, Tier.HOST, self.saved, self.slots)}
        for tensor in self.tensors:
            tensor.zero_()
        found["load"] = self._copy(Tier.HOST, Tier.DEVICE, self.slots, self.loaded)
        for number, (tensor, wanted) in enumerate(zip(self.tensors, self.wanted, strict=True)):
            assert torch.equal(tensor[self.loaded[number // LAYERS]], wanted), "another page's bytes"
            tensor[self.saved[number // LAYERS]] = wanted
        return found

    def _copy(self, source: Tier, target: Tier, at: Sequence[Sequence[int]], to: Sequence[Sequence[int]]) -> float:
        def ends(tier: Tier, rows: Sequence[int]) -> list[int]:
            return [handle_of([row]) if tier is Tier.DEVICE else row for row in rows]

        pages = tuple(
            Page(pool, bytes([pool, number]) * 16, here, there)
            for pool in range(len(GROUPS))
            for number, (here, there) in enumerate(zip(ends(source, at[pool]), ends(target, to[pool]), strict=True))
        )
        start = time.perf_counter()
        self.engine.send(Copy(1, source, target, pages, ROOT))
        while not (events := self.engine.collect()):
            assert self.engine.ends.wait(PATIENCE_S)
        seconds = time.perf_counter() - start
        assert events == [Ended(1, (1 << len(pages)) - 1)]
        return seconds


def measure(size: Size) -> tuple[list[dict[str, object]], dict[str, float]]:
    """A table and the ratios: the best of the rounds, because other work only ever makes a round slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the limit is one thread's, and so is each copy
    blocks, limit, best = Blocks(size), Memcpy(size.payload_bytes, "cpu"), dict[str, float]()
    for number in watched(range(size.rounds + 1), "copies", size.rounds + 1):
        found = blocks.round() | limit.round()
        if number:  # the first only warms up
            best |= {each: min(best.get(each, seconds), seconds) for each, seconds in found.items()}
    blocks.engine.close()
    torch.set_num_threads(threads)
    rows: list[dict[str, object]] = [
        {"what": what.replace("_", " "), "GB/s": size.payload_bytes / seconds / 1e9} for what, seconds in best.items()
    ]
    return rows, {
        "store_over_memcpy": best["memcpy_down"] / best["store"],
        "load_over_memcpy": best["memcpy_up"] / best["load"],
    }
