"""A world whose nearest tier is an engine's: blocks of one pool for all page pools, evicted whenever the engine likes.

A page is several blocks, in each pool another number, as in an engine with cache groups of unequal sizes. The engine
caches pages that it has computed or was brought, gives blocks to other pages as soon as it may, and compares each page
that it reads with the page that it should be.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf

from kvarve.core.copies.effects import Copy, Event
from kvarve.core.core_config import CoreConfig
from kvarve.core.lease import Lease, Phase
from kvarve.pages.boundaries import members, of, ones
from kvarve.pages.keys import TOKEN_BYTES
from kvarve.pages.pools import Tier
from tests.sim.world.shadow import TURNS
from tests.sim.world.transfers import BROKEN, FREE, Arena, SimulatedTransfers, empty
from tests.sim.world.world import World

Page = tuple[int, bytes]  # pool and key


class Blocks:
    """The engine's memory on all ranks, which allocate alike: which blocks make up a page, and what is in them."""

    def __init__(self, blocks: int, pieces: Sequence[int], ranks: int) -> None:
        """`pieces`: by pool, the blocks of a page."""
        self.pieces = pieces
        self.memory = [[FREE] * blocks for _ in range(ranks)]
        self.free = [*range(blocks)]
        self.pages: dict[int, tuple[int, ...]] = {}  # by handle: its blocks
        self.cached: dict[Page, int] = {}  # by pool and key: the handle, oldest first
        self.users: Counter[int] = Counter()  # by handle: leases and copies that need its blocks
        self._handles = 0

    def take(self, pool: int) -> int | None:
        """A handle of free blocks for one page, evicting cached pages for them; None if there are too few."""
        need = self.pieces[pool]
        for page in [*self.cached]:
            if len(self.free) >= need:
                break
            self.evict(page)
        if len(self.free) < need:
            return None
        self._handles += 1
        self.pages[self._handles] = tuple(self.free.pop() for _ in range(need))
        self.users[self._handles] += 1
        return self._handles

    def evict(self, page: Page) -> bool:
        """Forget a cached page, unless its blocks are in use."""
        if self.users[self.cached[page]]:
            return False
        self._free(self.cached.pop(page))
        return True

    def hold(self, handle: int) -> None:
        self.users[handle] += 1

    def let_go(self, handle: int) -> None:
        self.users[handle] -= 1
        assert self.users[handle] >= 0, "blocks are released once"
        if not self.users[handle] and handle not in self.cached.values():
            self._free(handle)

    def cache(self, page: Page, handle: int) -> None:
        """The blocks hold this page now; a second copy of it is not kept."""
        self.cached.setdefault(page, handle)

    def read(self, rank: int, handle: int) -> bytes:
        found = {self.memory[rank][block][:-1] for block in self.pages[handle]}
        order = [self.memory[rank][block][-1:] for block in self.pages[handle]]
        whole = len(found) == 1 and order == [bytes([at]) for at in range(len(order))]
        return found.pop() if whole else BROKEN

    def write(self, rank: int, handle: int, content: bytes) -> None:
        for at, block in enumerate(self.pages[handle]):
            self.memory[rank][block] = content + bytes([at])

    def _free(self, handle: int) -> None:
        for block in self.pages[handle]:
            for memory in self.memory:
                memory[block] = FREE
        self.free.extend(self.pages.pop(handle))
        del self.users[handle]


class _Arena:
    """The engine's pages on one rank, by handle, as transfers see them."""

    def __init__(self, blocks: Blocks, rank: int) -> None:
        self._blocks, self._rank = blocks, rank

    def __getitem__(self, handle: int) -> bytes:
        return self._blocks.read(self._rank, handle)

    def __setitem__(self, handle: int, content: bytes) -> None:
        self._blocks.write(self._rank, handle, content)


class _Transfers(SimulatedTransfers):
    blocks: Blocks

    def arena(self, tier: Tier, pool: int) -> Arena:
        return _Arena(self.blocks, self.rank) if tier is Tier.DEVICE else super().arena(tier, pool)


class EngineWorld(World):
    """Cores over an engine's blocks."""

    def __init__(self, config: CoreConfig, ranks: int = 1, blocks: int = 64, pieces: Sequence[int] = ()) -> None:
        self.blocks = Blocks(blocks, pieces or [1] * len(config.pools), ranks)
        self._mine: dict[int, list[dict[int, int]]] = {}  # by lease and pool: handles of its pages by position
        self._loading: dict[int, list[dict[int, int]]] = {}  # by lease and pool: what it was offered
        self._waiting: dict[int, list[int]] = {}  # by copy: the handles that it uses
        super().__init__(config=config, ranks=ranks)

    def _transfers(self, rank: int, ranks: int) -> SimulatedTransfers:
        transfers = _Transfers(self.core.slot_pools, rank, ranks)
        transfers.blocks = self.blocks
        return transfers

    def _outside(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        cached = self.blocks.cached
        return tuple(of(at for at, key in enumerate(keys) if (pool, key) in cached) for pool in range(self._pools))

    @property
    def _pools(self) -> int:
        return len(self.core.pools)

    # --- calls

    def _opened(self, twins: list[Lease], keys: list[bytes]) -> None:
        super()._opened(twins, keys)
        self._mine[twins[0].number] = [{} for _ in range(self._pools)]
        self._loading[twins[0].number] = [{} for _ in range(self._pools)]

    def claim(self, lease: Lease) -> bool:
        """The engine holds what it has of the prompt from now on, until the lease is closed."""
        if lease.claimed:
            return lease.ready
        keys = self._prompts[lease.number]
        outside = self._outside(keys)
        if lease.reads:
            for pool, pages in enumerate(outside):
                for position in members(pages):
                    handle = self.blocks.cached[pool, keys[position]]
                    self.blocks.hold(handle)
                    self._mine[lease.number][pool][position] = handle
        ready = self._all(lease, lambda core, twin: core.claim(twin, self.now, outside))
        self._check()
        return ready

    def load(self, lease: Lease, decline: bool = False) -> bool:
        """Bring the offered pages, if there are blocks for them."""
        offered = [*lease.offered]
        targets: list[dict[int, int]] = [{} for _ in offered]
        for pool, pages in enumerate(offered):
            for position in members(pages):
                handle = None if decline else self.blocks.take(pool)
                if handle is None:
                    decline = True
                    continue
                self._put(handle, empty(lease.number))
                targets[pool][position] = handle
        if decline:
            for handles in targets:
                for handle in handles.values():
                    self.blocks.let_go(handle)
            targets = [{} for _ in offered]
        self.seen["declined" if decline else "brought"] += 1
        self._loading[lease.number] = targets
        self._all(lease, lambda core, twin: core.engine_blocks.load(twin, targets))
        self._check()
        return not decline

    def compute(self, lease: Lease, chunks: int = 1, rest: bool = True) -> None:
        if rest:
            self.settle()
        self.claim(lease)
        for _ in range(TURNS):
            if lease.phase is Phase.OFFERED:
                self.load(lease)
            if not lease.ready:
                mine = [op for op in sorted(lease.ops) if op in self.flying]
                waits = self.lost or lease.ask_again < inf
                self.step([self.end(op) for op in mine or [*self.flying]], later_s=1.0 if waits else 0.0)
                self.claim(lease)
        assert lease.ready, "probe, fetch, load: no request waits for more"
        start, pages = lease.done, lease.pages
        for chunk in range(1, chunks + 1):
            self.forward(lease, start + (pages - start) * chunk // chunks)
            self.save(lease, ones(lease.pages))
        self.close(lease)
        if rest:
            self.settle()

    def forward(self, lease: Lease, upto: int) -> None:
        """Compute the pages up to a position, as far as there are blocks."""
        mine, keys = self._mine[lease.number], self._prompts[lease.number]
        for position in range(lease.boundary, min(upto, lease.pages)):
            for pool in range(self._pools):
                if position in mine[pool]:
                    continue
                handle = self.blocks.take(pool)
                if handle is None:
                    self.seen["out of blocks"] += 1
                    return
                self._put(handle, keys[position])
                mine[pool][position] = handle
                self.blocks.cache((pool, keys[position]), handle)

    def save(self, lease: Lease, positions: int, states: bool = True) -> list[int]:
        """Offer those of the lease's pages that the engine has; without `states` those of chains only."""
        chains = self.core.slot_pools.chains
        mine = [has if states or pool in chains else {} for pool, has in enumerate(self._mine[lease.number])]
        pages = [{at: handle for at, handle in handles.items() if positions >> at & 1} for handles in mine]
        taken = self._all(lease, lambda core, twin: core.engine_blocks.save(twin, pages))
        for offered, taken_ in zip(pages, taken, strict=True):
            assert not taken_ & ~of(offered), "only what was offered is saved"
        self.seen["saved"] += any(taken)
        self._check()
        return taken

    def evict(self, pick: int = 0, many: int = 1 << 20) -> bool:
        """The engine evicts cached pages that are not in use, the oldest after the first `pick` first."""
        gone = 0
        for page in [*self.blocks.cached][pick:]:
            gone += gone < many and self.blocks.evict(page)
        self.seen["evicted by the engine"] += gone
        return gone > 0

    def close(self, lease: Lease) -> None:
        mine, loading = self._mine.pop(lease.number), self._loading.pop(lease.number)
        super().close(lease)
        for handles in (*mine, *loading):  # copies in flight still hold theirs
            for handle in handles.values():
                self.blocks.let_go(handle)

    # --- what comes of it

    def _put(self, handle: int, content: bytes) -> None:
        for rank in range(len(self.cores)):
            self.blocks.write(rank, handle, content)

    def _take(self) -> None:
        before = len(self.log)
        super()._take()
        for effect in self.log[before:]:
            if isinstance(effect, Copy) and Tier.DEVICE in (effect.source, effect.target):
                handles = [page.target if effect.target is Tier.DEVICE else page.source for page in effect.pages]
                self._waiting[effect.op] = handles
                for handle in handles:
                    self.blocks.hold(handle)

    def step(self, events: Sequence[Event] = (), later_s: float = 0.0) -> None:
        super().step(events, later_s)
        for release in self._each(lambda core: core.engine_blocks.released()):
            handles = self._waiting.pop(release.op)
            assert [handle for _, handle in release.pages] == handles, "a release names the blocks of its copy"
            ended = release.op not in self.flying and release.op not in self.lost
            assert ended, "blocks are released when their copy has ended"
            for handle in handles:
                self.blocks.let_go(handle)

    def _hand(self, lease: Lease) -> None:
        """A lease has become ready: it has every page that its boundary reads, and each is the page that it names."""
        keys, mine = self._prompts[lease.number], self._mine[lease.number]
        assert lease.boundary % self.core.grid == 0
        assert lease.boundary * self.core.config.page_tokens < max(1, len(lease.tokens) // TOKEN_BYTES)
        for pool, handles in enumerate(self._loading[lease.number]):
            for position, handle in handles.items():
                if lease.arrived[pool] >> position & 1:
                    mine[pool][position] = handle
                    self.blocks.cache((pool, keys[position]), handle)
                else:
                    self.blocks.let_go(handle)
        self._loading[lease.number] = [{} for _ in range(self._pools)]
        handed = []
        for pool in range(self._pools):
            positions = self._reads(pool, lease.boundary)
            assert all(position in mine[pool] for position in positions), "it has what its boundary reads"
            handed.append(([mine[pool][at] for at in positions], [keys[at] for at in positions]))
        self._handed[lease.number] = handed

    def _check_handed(self, lease: Lease, transfers: SimulatedTransfers) -> None:
        for slots, contents in self._handed[lease.number]:
            found = [self.blocks.read(transfers.rank, slot) for slot in slots]
            assert found == contents, f"lease {lease.number} reads {found}, not its own pages"

    def _check(self, stepped: bool = False) -> None:
        super()._check(stepped)
        for (_, key), handle in self.blocks.cached.items():
            for rank in range(len(self.cores)):
                assert self.blocks.read(rank, handle) == key, "no copy writes over a page of the engine"

    def everybody(self) -> None:
        for _ in range(2):
            for _ in range(TURNS):
                for lease in self.leases:
                    self.claim(lease)
                    if lease.phase is Phase.OFFERED:
                        self.load(lease)
                self.step([self.end(op) for op in [*self.flying]], later_s=10.0)
            waiting = [lease for lease in self.leases if not lease.ready and lease.patience.base_s < inf]
            assert not waiting, f"lease {waiting[0].number} is still {waiting[0].phase.value}"
            self.step([self.give_up(op) for op in [*self.lost]])
        self.settle()
        assert all(lease.ready for lease in self.leases), "when all copies have ended, every lease is ready"

    def drain(self) -> None:
        super().drain()
        assert not self._waiting, "every block that a copy used is released"
        assert not +self.blocks.users, "and no block is in use any more"
