"""Between a request's workspace and the cache: pages in before prefill, out at each line of the grid.

In the engine chains are read and written in the device arena by block tables, and never copied. Cached pages are read
in place by all requests that share them; computed tokens go into slots of the request's own, which the tree takes over
when they are published. Windows and recurrent states do not grow with a sequence, so each request has working copies,
in tensors that never move, so that rows of a batch can be views of one tensor.

A request may resume while its pages, or pages that it shares, are still being copied to the device. Each layer then
waits for its own part, and copies its windows and states, when the model first uses it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Lease
from kvarve.errors import Broken
from kvarve.pages import boundaries
from kvarve.pages.pools import BufferSpec, PoolSpec
from kvarve.reference.engine.layers import Tape, movable, narrowed
from kvarve.reference.engine.workspace import StateLayout, Workspace
from kvarve.transfer.arrivals import Arrival

GROW_WAIT_S = 0.5  # for evictions in flight; then a request goes on without keeping its pages


def resumed(
    cache: PrefixCache, lease: Lease, layout: StateLayout, max_tokens: int, device: torch.device | str
) -> Workspace:
    """A workspace for `max_tokens` that resumes where a ready lease's pages end."""
    workspace = Workspace(layout, max_tokens, device)
    for arrival in cache.worker.transfers.arrivals():
        arrival.wait_all()
    for pool, (positions, slots) in cache.pages(lease).items():
        if positions:
            workspace.load(pool, positions, cache.worker.arena(pool), slots)
    workspace.resume(lease.boundary)
    cache.scheduler.core.growth.resumed(lease)
    return workspace


def room_comes(cache: PrefixCache, lease: Lease, layout: StateLayout, tokens: int) -> bool:
    """Whether evictions in flight will free slots for the pages up to a line of the grid at `tokens`."""
    upto = min(tokens // layout.page_tokens, lease.pages)
    return tokens % layout.grid_tokens == 0 and upto > lease.grown and cache.short(lease, upto)


def wait_for_room(cache: PrefixCache, lease: Lease, workspace: Workspace) -> None:
    """Wait a moment for slots to `keep` pages in, on a thread that has nothing else to do."""
    end = cache.clock() + GROW_WAIT_S
    while room_comes(cache, lease, workspace.layout, workspace.tokens) and cache.clock() < end:
        cache.wait(0.01)
        cache.step()


def keep(cache: PrefixCache, lease: Lease, workspace: Workspace) -> None:
    """Publish the computed pages, if they end at a line of the grid."""
    layout = workspace.layout
    upto = min(workspace.tokens // layout.page_tokens, lease.pages)
    if workspace.tokens % layout.grid_tokens or upto <= lease.grown:
        return
    for pool, fresh in cache.grow(lease, upto).items():
        workspace.save(pool, [*fresh], cache.worker.arena(pool), [*fresh.values()])
    cache.publish(lease, lease.grown)


class Table:
    """The slots of one sequence in one chain, page by page from its first token on."""

    def __init__(self, page_tokens: int, device: torch.device) -> None:
        self.page_tokens = page_tokens
        self.slots: list[int] = []
        self.index = torch.empty(0, dtype=torch.long, device=device)  # the same, for torch
        self.straight = 0  # the number of first pages that lie in consecutive slots
        self._foreign = 0  # pages of other requests that this one computes too, as a set of bits
        self._rows: dict[int, tuple[int, int, Tensor, Tensor | None]] = {}  # the last answers of `rows`, by `per_page`

    def put(self, start: int, slots: Sequence[int], foreign: int) -> None:
        """Set the slots from page `start` on; the pages of the set `foreign` are only read."""
        self.slots[start:] = slots
        self._foreign, self._rows = foreign, {}
        self.index = torch.tensor(self.slots, dtype=torch.long, device=self.index.device)
        at = min(self.straight, start)
        while at < len(self.slots) and self.slots[at] == self.slots[0] + at:
            at += 1
        self.straight = at

    def rows(self, start: int, stop: int, per_page: int) -> tuple[Tensor, Tensor | None]:
        """The rows of the arena for the entries [start, stop), and which of these are written (None: all)."""
        last = self._rows.get(per_page)  # each layer asks the same
        if last is not None and last[:2] == (start, stop):
            return last[2], last[3]
        entries = torch.arange(start, stop, device=self.index.device)
        pages, written = entries // per_page, None
        shared = [page for page in boundaries.members(self._foreign) if page * per_page < stop]
        if shared and (shared[-1] + 1) * per_page > start:
            written = (~torch.isin(pages, torch.tensor(shared, device=pages.device))).nonzero()[:, 0]
            entries, pages = entries[written], pages[written]
        rows = self.index[pages] * per_page + entries % per_page
        self._rows[per_page] = start, stop, rows, written
        return rows, written


class PagedTape(Tape):
    """The entries of one buffer in the pages of an arena [slots, per_page, *shape]."""

    def __init__(self, arena: Tensor, table: Table, scale: float) -> None:
        super().__init__(arena.view(-1, *arena.shape[2:]), arena.shape[1], 0, None, scale)  # no copy
        self.table, self._arena = table, arena

    def append(self, entries: Tensor) -> None:
        if not len(entries):  # several tokens are one entry, and it is not full yet
            return
        stop = self.end + len(entries)
        rows, written = self.table.rows(self.end, stop, self.per_page)
        entries = narrowed(entries if written is None else entries[written], self._data.dtype, self.scale)
        movable(self._data).index_copy_(0, rows, movable(entries))
        self.end = stop

    def read(self, start: int, stop: int) -> Tensor:
        """The entries [stop - start, *shape], as a view where their slots are consecutive."""
        size = self.per_page
        first, last = start // size, math.ceil(stop / size)
        if last <= self.table.straight:
            front = self.table.slots[0] * size if last else 0
            return self._data[front + start : front + stop]
        pages = movable(self._arena).index_select(0, self.table.index[first:last]).view(self._arena.dtype).flatten(0, 1)
        return pages[start - first * size : stop - first * size]

    def rewind(self, end: int) -> None:
        self.end = end

    def own(self) -> None:
        """Nothing to do: the entries stay in the arena."""


class PagedWorkspace(Workspace):
    """The state of one request whose chains are in the pages that a lease has on the device."""

    def __init__(
        self,
        layout: StateLayout,
        max_tokens: int,
        device: torch.device | str,
        arenas: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """`arenas`: by chain, the tensors of the device arena by buffer name."""
        self._arenas = arenas
        self.tables = {name: Table(layout.page_tokens, torch.device(device)) for name in arenas}
        self._later: dict[int, list[Callable[[], object]]] = {}  # by layer: windows and states to copy in
        self._arrivals: list[Arrival] = []
        self._on_arrival: Callable[[], None] | None = None
        super().__init__(layout, max_tokens, device)

    @classmethod
    def resumed(cls, cache: PrefixCache, lease: Lease, layout: StateLayout, max_tokens: int) -> "PagedWorkspace":
        """A workspace that resumes where a ready lease's pages end, in the slots that the lease has."""
        arenas = {pool.name: cache.worker.arena(pool.name) for pool in layout.pools if pool.lookback is None}
        device = next(iter(cache.worker.arena(layout.pools[0].name).values())).device
        workspace = cls(layout, max_tokens, device, arenas)
        workspace.take_seats(cache, lease, 0)
        for pool, (positions, slots) in cache.pages(lease).items():
            if positions and pool not in arenas:
                workspace.load(pool, positions, cache.worker.arena(pool), slots)
            elif positions:
                workspace._loaded[pool] = boundaries.ones(lease.boundary)
        workspace.resume(lease.boundary)
        workspace._on_arrival = lambda: cache.scheduler.core.growth.resumed(lease)
        if not workspace._arrivals:
            workspace.arrived()
        return workspace

    @property
    def coming(self) -> bool:
        """Whether there may be pages, windows or states that no layer has used yet."""
        return bool(self._arrivals or self._later or self._on_arrival)

    @property
    def arriving(self) -> bool:
        """Whether a layer would wait for its pages now."""
        return any(not arrival.done for arrival in self._arrivals)

    def arrived(self) -> None:
        """Wait until all pages are here, and copy in the windows and states that no layer has used yet."""
        if not self.coming:  # as for nearly every token
            return
        for layer in self.cache.layers:
            layer.arrive()
        for number in [*self._later]:
            self._arrive(number)
        self._arrivals = []
        if self._on_arrival is not None:
            then, self._on_arrival = self._on_arrival, None
            then()

    def _expect(self, arrivals: list[Arrival]) -> None:
        """Have each layer wait for these loads before it reads any page."""
        if arrivals:
            self._arrivals = [*self._arrivals, *arrivals]
            for number, layer in enumerate(self.cache.layers):
                layer.pending = partial(self._arrive, number)

    def _arrive(self, number: int) -> None:
        for arrival in self._arrivals:
            arrival.wait(number)
        for copy in self._later.pop(number, ()):
            copy()

    def _copy_in(self, buffer: BufferSpec, arena: Tensor, index: Tensor, into: Tensor) -> None:
        self._later.setdefault(buffer.layer, []).append(partial(torch.index_select, arena, 0, index, out=into))

    def take_seats(self, cache: PrefixCache, lease: Lease, start: int) -> None:
        """Read the slots of the lease's pages from `start` on into the tables."""
        for number, pool in enumerate(self.layout.pools):
            if table := self.tables.get(pool.name):
                foreign = lease.seen[number] & ~boundaries.ones(lease.boundary)
                table.put(start, cache.scheduler.core.growth.block_table(lease, number, start), foreign)
        self._expect(cache.worker.transfers.arrivals())  # other requests' pages may be among these

    def keep(self, cache: PrefixCache, lease: Lease) -> None:
        """Publish the computed pages, if they end at a line of the grid. The tree owns them then."""
        done = lease.done
        keep(cache, lease, self)
        if lease.done > done:  # where another request published first, the tree has other slots
            self.take_seats(cache, lease, done)

    def reserved(self, stop: int) -> bool:
        """Whether there is a slot for every token before `stop`."""
        return all(stop <= len(table.slots) * table.page_tokens for table in self.tables.values())

    def make_room(self, pool_name: str, tokens: int) -> None:
        """Let a window take some more tokens."""
        for buffer in self.layout.pool(pool_name).buffers:
            tape = self._tapes[buffer.name]
            data = tape._data
            tape._reserve(tape.end + tokens)
            assert tape._data is data, "more tokens at once than a chunk has"

    def own(self) -> None:
        self.arrived()
        super().own()

    def advance(self, tokens: int) -> None:
        """Count the tokens that a batch has written to every tape."""
        fresh = not self.tokens
        self.computed(tokens)
        for tape in self._tapes.values():
            if tape.per_page == self.layout.page_tokens:  # of tokens: those of entries have counted themselves
                tape.end += tokens
        for layer in self.cache.layers:
            if fresh:
                layer.resume_at(tokens)
            elif hasattr(layer, "cumulative_length"):
                layer.cumulative_length += tokens
        self.arrived()

    def save(self, pool_name: str, positions: Sequence[int], arena: Mapping[str, Tensor], slots: Sequence[int]) -> None:
        """Copy windows and states out; chains are in the arena already."""
        self.arrived()
        if pool_name in self.tables:
            here = self.tables[pool_name].slots
            if any(here[at] != slot for at, slot in zip(positions, slots, strict=True)):
                raise Broken("a page moved")
            return
        super().save(pool_name, positions, arena, slots)

    def _tape(self, pool: PoolSpec, buffer: BufferSpec) -> Tape:
        if pool.lookback is not None:
            return super()._tape(pool, buffer)
        arena, table = self._arenas[pool.name][buffer.name], self.tables[pool.name]
        return PagedTape(arena, table, self.layout.scale(buffer.name))
