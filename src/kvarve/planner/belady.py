"""How many tokens could no cache of a size have hit more of? Belady's rule, for pages that form prefix chains.

Between two uses of a page it either stays, and the second use hits, or it does not; at no time do more pages stay than
fit. Whenever too many would, the page whose next use is furthest away is dropped; among equals the deepest of a prompt,
so that the pages that stay are prefixes. docs/planning.md proves that nothing hits more.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from kvarve.memory.record import record_bytes
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.traces import TraceRequest

NEVER = 1 << 62


class Belady:
    """The uses of every page of a trace."""

    def __init__(self, requests: Sequence[TraceRequest], block_tokens: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        numbers: dict[tuple[int, int], int] = {}
        self._paths: list[list[int]] = []
        for request in requests:
            # The id of the block in which a page ends names all tokens before that end, and those of the page.
            ends = range(page_tokens, request.input_length + 1, page_tokens)
            ids = request.ids
            names = [(ids[(end - 1) // block_tokens], end) for end in ends if (end - 1) // block_tokens < len(ids)]
            self._paths.append([numbers.setdefault(name, len(numbers)) for name in names])
        # Of each page of each request, the next one that may hit it: at least one token of a prompt is computed.
        self._next: list[list[int]] = [[] for _ in requests]
        ahead = [NEVER] * len(numbers)
        for at in range(len(requests) - 1, -1, -1):
            path, most = self._paths[at], (requests[at].input_length - 1) // page_tokens
            self._next[at] = [ahead[page] for page in path]
            for page in path[:most]:
                ahead[page] = at
            for page in path[most:]:
                ahead[page] = NEVER
        self.pages = len(numbers)

    def hit_tokens(self, pages: float) -> int:
        """The most tokens that a cache of so many pages can hit."""
        stays: dict[int, int] = {}  # pages, and their next use
        furthest: list[tuple[int, int, int]] = []
        hits = 0
        for at, (path, following) in enumerate(zip(self._paths, self._next, strict=True)):
            for depth, (page, then) in enumerate(zip(path, following, strict=True)):
                hits += stays.pop(page, -1) == at
                if then < NEVER:
                    stays[page] = then
                    if pages < inf:
                        heappush(furthest, (-then, -depth, page))
            while len(stays) > pages:
                then, _, page = heappop(furthest)
                if stays.get(page) == -then:
                    del stays[page]
        return hits * self.page_tokens


def most_pages(config: SimulationConfig) -> float:
    """The most pages of a chain that all tiers of all replicas can have together."""
    pools, core = config.pools, config.core()
    chains = [number for number, pool in enumerate(pools) if pool.lookback is None]
    if not chains:
        return inf
    pages = 0
    for slots in core.slots.values():
        # Where pools share a tier, or divide it, all of its bytes could be the chain's: but for a window or a state.
        pages += min(slots[chain] if isinstance(slots, tuple) else slots.slots(chain) for chain in chains)
    record = sum(record_bytes(pools[chain].payload_bytes) for chain in chains)
    return config.replicas * pages + config.storage_memory // record
