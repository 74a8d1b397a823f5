"""In one worker of vLLM: fingerprints of what kvarve's connector copies, and other weights."""

import hashlib
from typing import Any

from prints import Prints

from kvarve.core.copies.effects import Copy
from kvarve.pages.pools import Tier

HEAD = 100  # more than there are pools


def shifted(worker: Any, by: float) -> None:
    """Change weights that the keys and values of all layers here follow from. (Others may be packed.)"""
    weights = worker.model_runner.get_model().named_parameters()
    next(weight for name, weight in weights if name.endswith(".input_layernorm.weight")).data.add_(by)


class Recorder:
    """Takes the fingerprints of what kvarve's connector copies, in the engine's tensors."""

    def __init__(self, side: Any, prints: Prints) -> None:
        self._side, self._prints = side, prints
        self._loads: dict[int, Any] = {}
        self._do, self._collect = side.do, side.collect
        side.do, side.collect = self.do, self.collect

    def do(self, orders: Any) -> None:
        for order in orders.orders:
            if isinstance(order, Copy) and order.source is Tier.DEVICE:
                self._prints.note(each for page in order.pages for each in self._found(page, page.source))
            elif isinstance(order, Copy) and order.target is Tier.DEVICE:
                self._loads[order.op] = order.pages
        self._do(orders)

    def collect(self) -> Any:
        found = self._collect()
        for event in found:
            pages = self._loads.pop(getattr(event, "op", -1), ()) if hasattr(event, "good") else ()
            self._prints.check(
                each for at, page in enumerate(pages) if event.good >> at & 1 for each in self._found(page, page.target)
            )
        return found

    def _found(self, page: Any, handle: int) -> list[tuple[int, bytes, str]]:
        """A page's pool, key and fingerprint; of one that is stored by head one for each head."""
        arena, ranks = self._side.worker.transfers._copies._device[page.pool], self._side.worker.identity.ranks
        rank = self._side._parallel.rank % ranks
        parts = arena.pool.parts(rank, ranks)[0] if arena.pool.groups else range(1)
        digests = [hashlib.sha256() for _ in parts]
        for number, piece in enumerate(arena.pieces()):
            (rows, _) = arena.rows([handle], [0])[number % arena.columns]
            for row in rows:
                for digest, part in zip(digests, piece[row].chunk(len(parts)), strict=True):
                    digest.update(part.numpy().tobytes())
        return [(page.pool + HEAD * at, page.key, each.hexdigest()) for at, each in zip(parts, digests, strict=True)]
