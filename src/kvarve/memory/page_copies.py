"""Pages between the arenas of device and host, layer by layer.

On the CPU a buffer's pieces that are adjacent at both ends are a numpy slice: that is next to memcpy, and torch's own
ways are two to four times as slow (`benchmarks/lanes.py`). Elsewhere a buffer's pieces are gathered by one kernel and
put in place by another; a GPU's kernels reach pinned host memory themselves, so that neither end has to be in one
piece.

Each direction has a stream of its own. It waits for what the engine had sent to its compute stream before the copy was
sent (`ready`): a page that is saved has been written then, and the old contents of a slot that is loaded to have been
read. The device as a whole is never synchronized.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.engine_arena import EngineArena
from kvarve.memory.fingerprints import fingerprint

NearArena = DeviceArena | EngineArena
Slots = Sequence[tuple[int, int]]  # of pages: source and target
Move = Callable[[Any, Any, Any, Any], None]
Sampled = tuple[int, int, int]  # a page whose copy is compared: pool, device slot, host slot
Compared = list[tuple[int, int]]  # by sampled page: the fingerprints from before and after its copy
NEAR, FAR = 0, 1  # ends of a copy
SAVED_BYTES = 8 << 20  # on the CPU, pages are sealed after each 8 MiB, while its cache still has most of them
# A gather's rows lie in memory of the device that no setting counts. This is little beside a cache, and enough that
# starting a kernel (some 10 us) costs little beside copying it (600 us over PCIe).
GATHERED_BYTES = 16 << 20
_OF_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def by_piece(target: Any, source: Any, to: Sequence[slice], at: Sequence[slice]) -> None:
    """Copy the rows `at` of a numpy array to the rows `to` of another, each slice with one call."""
    for there, here in zip(to, at, strict=True):
        target[there] = source[here]


def by_gather(target: Tensor, source: Tensor, to: Tensor, at: Tensor, most_bytes: int = GATHERED_BYTES) -> None:
    """Copy the rows `at` of a tensor to the rows `to` of another, which may be on another device: at least one row at
    once, and of several at most `most_bytes`."""
    together = max(1, most_bytes // source[0].nbytes)
    to, at = to.to(target.device), at.to(source.device)
    for start in range(0, len(to), together):
        some = slice(start, start + together)
        target.index_copy_(0, to[some], source.index_select(0, at[some]).to(target.device))


class DeviceCopies:
    """Copies pages of all pools. `load` and `save` may run at once, each in one thread at a time."""

    def __init__(self, device: Sequence[NearArena], host: Sequence[HostArena], move: Move | None = None) -> None:
        """`move`: `by_piece` or `by_gather`, by default as the device needs."""
        self._where = device[0].device
        self._torch: Any = torch.cuda if self._where.type == "cuda" else torch.cpu  # whose streams do nothing
        self._device, self._host = device, host
        self._move = move or (by_piece if self._where.type == "cpu" else by_gather)
        self._up, self._down = (self._torch.Stream(self._where) for _ in range(2))
        # By layer: pool, which of the page's blocks, and the pieces of a buffer on the device and in the host.
        found: dict[int, list[tuple[int, int, Any, Any]]] = {}
        for pool, (near, far) in enumerate(zip(device, host, strict=False)):
            buffers = zip(near.pool.buffers, near.pieces(), far.pieces(self._where), strict=True)
            for number, (buffer, *ends) in enumerate(buffers):
                one, other = map(Tensor.numpy, ends) if self._move is by_piece else _widest(*ends)
                found.setdefault(buffer.layer, []).append((pool, number % near.columns, one, other))
        self._layers = dict(sorted(found.items()))

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that have buffers, in the order in which they are copied."""
        return [*self._layers]

    def ready(self) -> Any:
        """An event: all that the calling thread has sent to its compute stream so far has been done."""
        return self._mark(self._torch.current_stream(self._where))

    def finish(self) -> None:
        """Wait until the device has done all that has been sent so far: by the calling thread, to its compute stream,
        and by copies, also those that failed on their way."""
        for stream in (self._torch.current_stream(self._where), self._up, self._down):
            self._mark(stream).synchronize()

    def order(self, event: Any) -> None:
        """Have the calling thread's compute stream wait for an event; the thread does not."""
        self._torch.current_stream(self._where).wait_event(event)

    def load(
        self,
        pages: Mapping[int, Slots],
        ready: Any,
        copied: Callable[[int, Any], None] | None = None,
        sampled: Sequence[Sampled] = (),
    ) -> Compared:
        """Copy pages by pool (host slot, device slot) to the device; done when it returns. `copied` is called with each
        layer, and the event of its copy."""
        with self._torch.stream(self._up):
            self._up.wait_event(ready)
            before = [self._fingerprint(FAR, page) for page in sampled]
            rows = {pool: self._rows(pool, [(to, at) for at, to in slots]) for pool, slots in pages.items() if slots}
            for layer, buffers in self._layers.items():
                for pool, column, near, far in buffers:
                    if pool in rows:
                        self._move(near, far, *rows[pool][column])
                if copied is not None:
                    copied(layer, self._mark(self._up))
            self._mark(self._up).synchronize()
            return [*zip(before, [self._fingerprint(NEAR, page) for page in sampled], strict=True)]

    def save(
        self, pages: Mapping[int, tuple[Slots, Sequence[bytes]]], ready: Any, sampled: Sequence[Sampled] = ()
    ) -> Compared:
        """Copy pages by pool (device slot, host slot) with their keys to the host, and seal them; done when it
        returns."""
        with self._torch.stream(self._down):
            self._down.wait_event(ready)
            before = [self._fingerprint(NEAR, page) for page in sampled]
            if self._move is not by_piece:  # a part would be waited for, and gains nothing from the CPU's cache
                self._save(pages)
            else:
                for pool, (slots, keys) in pages.items():
                    together = max(1, SAVED_BYTES // self._host[pool].stride)
                    for start in range(0, len(slots), together):
                        self._save({pool: (slots[start : start + together], keys[start : start + together])})
            return [*zip(before, [self._fingerprint(FAR, page) for page in sampled], strict=True)]

    def _fingerprint(self, end: int, page: Sampled) -> int:
        """Of a page as it lies at one end of its copy."""
        pool, *slots = page
        rows = self._rows(pool, [(slots[NEAR], slots[FAR])])
        found = []
        for buffers in self._layers.values():
            for owner, column, *ends in buffers:
                if owner == pool:
                    for row in rows[column][end]:  # one, or none where an engine has no block
                        piece = ends[end][row]
                        found.append((piece if self._move is by_piece else piece.cpu().numpy()).tobytes())
        return fingerprint(*found)

    def _save(self, pages: Mapping[int, tuple[Slots, Sequence[bytes]]]) -> None:
        rows = {pool: self._rows(pool, slots) for pool, (slots, _) in pages.items() if slots}
        for buffers in self._layers.values():
            for pool, column, near, far in buffers:
                if pool in rows:
                    near_rows, far_rows = rows[pool][column]
                    self._move(far, near, far_rows, near_rows)
        self._mark(self._down).synchronize()
        for pool, (slots, keys) in pages.items():
            for (_, slot), key in zip(slots, keys, strict=True):
                self._host[pool].seal(slot, key)

    def _rows(self, pool: int, slots: Slots) -> list[tuple[Any, Any]]:
        """By column, the device rows and the host rows of some pages (device slot, host slot), as `_move` takes
        them."""
        rows = self._device[pool].rows(*map(list, zip(*slots, strict=True)))
        if self._move is by_piece:
            return [_adjacent(near, far) for near, far in rows]
        return [(self._indices(near), self._indices(far)) for near, far in rows]

    def _indices(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._where)

    def _mark(self, stream: Any) -> Any:
        event = self._torch.Event()
        event.record(stream)
        return event


def _adjacent(near: Sequence[int], far: Sequence[int]) -> tuple[list[slice], list[slice]]:
    """Rows at both ends as slices: each begins where the rows at either end do not follow the last ones."""
    breaks = [i for i in range(1, len(near)) if near[i] != near[i - 1] + 1 or far[i] != far[i - 1] + 1]
    cuts = [*pairwise([0, *breaks, len(near)])] if near else []
    return [slice(near[a], near[b - 1] + 1) for a, b in cuts], [slice(far[a], far[b - 1] + 1) for a, b in cuts]


def _widest(*ends: Tensor) -> Iterator[Tensor]:
    """The same bytes in elements as wide as all strides allow: a GPU moves one at a time."""
    sides = {ends[0].shape[1], *(side for end in ends for side in (end.stride(0), end.storage_offset()))}
    size = next(size for size in (8, 4, 2, 1) if all(side % size == 0 for side in sides))
    return (end.view(_OF_SIZE[size]) for end in ends)
