"""Pages between the arenas of device and host, layer by layer.

On the CPU a buffer's pieces that are adjacent at both ends are a numpy slice: that is next to memcpy, and torch's own
ways are two to four times as slow (`benchmarks/lanes.py`). Elsewhere a buffer's pieces are gathered by one kernel and
put in place by another; a GPU's kernels reach pinned host memory themselves, so that neither end has to be in one
piece.

Each direction has a stream of its own. It waits for what the engine had sent to its compute stream before the copy was
sent (`ready`): a page that is saved has been written then, and the old contents of a slot that is loaded to have been
read. The device as a whole is never synchronized.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.engine_arena import EngineArena
from kvarve.memory.fingerprints import fingerprint

NearArena = DeviceArena | EngineArena
Slots = Sequence[tuple[int, int]]  # of pages: source and target
Rows = Mapping[int, Sequence[tuple[Sequence[int], Sequence[int]]]]  # by pool, and column of a page: near and far rows
Buffer = tuple[int, int, tuple[Tensor, Tensor]]  # its pool, the column of its page, its bytes near and far by row
Sampled = tuple[int, int, int]  # a page whose copy is compared: pool, device slot, host slot
Compared = list[tuple[int, int]]  # by sampled page: the fingerprints from before and after its copy
NEAR, FAR = 0, 1  # ends of a copy
SAVED_BYTES = 8 << 20  # on the CPU, pages are sealed after each 8 MiB, while its cache still has most of them
# A gather's rows lie in memory of the device that no setting counts. This is little beside a cache, and enough that
# starting a kernel (some 10 us) costs little beside copying it (600 us over PCIe).
GATHERED_BYTES = 16 << 20
_OF_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Mover(Protocol):
    """A way to copy rows of the buffers that it was made for."""

    part_bytes: int  # pages of a save that are copied and sealed before the next; 0: all at once

    def rows(self, rows: Rows) -> Any:
        """The rows of one copy, as `move` takes them."""

    def move(self, to: int, buffers: slice, rows: Any) -> None:
        """Copy rows of some buffers towards an end, on the current stream."""


Way = Callable[[Sequence[Buffer]], Mover]


class _EachBuffer:
    """Buffers one by one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = [(pool, column, [*self._ends(*ends)]) for pool, column, ends in buffers]

    def rows(self, rows: Rows) -> Any:
        return {pool: [self._both(*each) for each in columns] for pool, columns in rows.items()}

    def move(self, to: int, buffers: slice, rows: Any) -> None:
        for pool, column, ends in self._buffers[buffers]:
            if pool in rows:
                both = rows[pool][column]
                self._copy(ends[to], ends[1 - to], both[to], both[1 - to])

    def _ends(self, near: Tensor, far: Tensor) -> Iterator[Any]:
        raise NotImplementedError

    def _both(self, near: Sequence[int], far: Sequence[int]) -> tuple[Any, Any]:
        raise NotImplementedError

    def _copy(self, target: Any, source: Any, to: Any, at: Any) -> None:
        raise NotImplementedError


class ByPiece(_EachBuffer):
    """Of the CPU: rows that are adjacent at both ends with one call of numpy."""

    part_bytes = SAVED_BYTES

    def _ends(self, near: Tensor, far: Tensor) -> Iterator[Any]:
        return map(Tensor.numpy, (near, far))

    def _both(self, near: Sequence[int], far: Sequence[int]) -> tuple[list[slice], list[slice]]:
        """Rows at both ends as slices: each begins where the rows at either end do not follow the last ones."""
        breaks = [i for i in range(1, len(near)) if near[i] != near[i - 1] + 1 or far[i] != far[i - 1] + 1]
        cuts = [*pairwise([0, *breaks, len(near)])] if near else []
        return [slice(near[a], near[b - 1] + 1) for a, b in cuts], [slice(far[a], far[b - 1] + 1) for a, b in cuts]

    def _copy(self, target: Any, source: Any, to: Sequence[slice], at: Sequence[slice]) -> None:
        for there, here in zip(to, at, strict=True):
            target[there] = source[here]


class ByGather(_EachBuffer):
    """By torch's kernels, which take all rows of a buffer: at least one at once, of several at most `most_bytes`."""

    part_bytes = 0  # a part would be waited for, and gains nothing from the CPU's cache

    def __init__(self, buffers: Sequence[Buffer], most_bytes: int = GATHERED_BYTES) -> None:
        super().__init__(buffers)
        self._device, self._most_bytes = buffers[0][2][NEAR].device, most_bytes

    def _ends(self, near: Tensor, far: Tensor) -> Iterator[Tensor]:
        """The same bytes in elements as wide as all strides allow: a GPU moves one at a time."""
        sides = {near.shape[1], *(side for end in (near, far) for side in (end.stride(0), end.storage_offset()))}
        size = next(size for size in (8, 4, 2, 1) if all(side % size == 0 for side in sides))
        return (end.view(_OF_SIZE[size]) for end in (near, far))

    def _both(self, near: Sequence[int], far: Sequence[int]) -> tuple[Tensor, Tensor]:
        one, other = (torch.tensor(rows, dtype=torch.int64, device=self._device) for rows in (near, far))
        return one, other

    def _copy(self, target: Tensor, source: Tensor, to: Tensor, at: Tensor) -> None:
        together = max(1, self._most_bytes // source[0].nbytes)
        for start in range(0, len(to), together):
            some = slice(start, start + together)
            target.index_copy_(0, to[some], source.index_select(0, at[some]))


class DeviceCopies:
    """Copies pages of all pools. `load` and `save` may run at once, each in one thread at a time."""

    def __init__(self, device: Sequence[NearArena], host: Sequence[HostArena], mover: Way | None = None) -> None:
        """`mover`: `ByPiece`, `ByGather` or `by_kernel`, by default as the device needs."""
        self._where = device[0].device
        self._torch: Any = torch.cuda if self._where.type == "cuda" else torch.cpu  # whose streams do nothing
        self._device, self._host = device, host
        self._up, self._down = (self._torch.Stream(self._where) for _ in range(2))
        found: list[tuple[int, Buffer]] = []
        for pool, (near, far) in enumerate(zip(device, host, strict=False)):
            buffers = zip(near.pool.buffers, near.pieces(), far.pieces(self._where), strict=True)
            found += [
                (buffer.layer, (pool, number % near.columns, (one, other)))
                for number, (buffer, one, other) in enumerate(buffers)
            ]
        found.sort(key=lambda each: each[0])
        self._buffers, self._layers, start = [buffer for _, buffer in found], dict[int, slice](), 0
        for layer, count in Counter(layer for layer, _ in found).items():
            self._layers[layer] = slice(start, start := start + count)
        # The kernel that takes all buffers at once (_kernel_copies.py) is not the default until a GPU has timed both.
        way = mover or (ByPiece if self._where.type == "cpu" else ByGather)
        self._mover = (way if self._buffers else ByPiece)(self._buffers)  # without host memory nothing is copied

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that have buffers, in the order in which they are copied."""
        return [*self._layers]

    def ready(self) -> Any:
        """An event: all that the calling thread has sent to its compute stream so far has been done."""
        return self._mark(self._torch.current_stream(self._where))

    def finish(self) -> None:
        """Wait until the device has done all that has been sent so far: by the calling thread, to its compute stream,
        and by copies."""
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
        with self._on(self._up, ready):
            before = [self._fingerprint(FAR, page) for page in sampled]
            rows = self._rows({pool: [(to, at) for at, to in slots] for pool, slots in pages.items()})
            for layer, buffers in self._layers.items():
                self._mover.move(NEAR, buffers, rows)
                if copied is not None:
                    copied(layer, self._mark(self._up))
            self._mark(self._up).synchronize()
            return [*zip(before, [self._fingerprint(NEAR, page) for page in sampled], strict=True)]

    def save(
        self, pages: Mapping[int, tuple[Slots, Sequence[bytes]]], ready: Any, sampled: Sequence[Sampled] = ()
    ) -> Compared:
        """Copy pages by pool (device slot, host slot) with their keys to the host, and seal them; done when it
        returns."""
        with self._on(self._down, ready):
            before = [self._fingerprint(NEAR, page) for page in sampled]
            if not self._mover.part_bytes:
                self._save(pages)
            else:
                for pool, (slots, keys) in pages.items():
                    together = max(1, self._mover.part_bytes // self._host[pool].stride)
                    for start in range(0, len(slots), together):
                        self._save({pool: (slots[start : start + together], keys[start : start + together])})
            return [*zip(before, [self._fingerprint(FAR, page) for page in sampled], strict=True)]

    @contextmanager
    def _on(self, stream: Any, ready: Any) -> Iterator[None]:
        """Copy on a stream, after `ready`. A copy that fails waits for what it has sent: its slots are others' then."""
        with torch.inference_mode(), self._torch.stream(stream):  # else tensors that were made so could not be written
            stream.wait_event(ready)
            try:
                yield
            except BaseException:
                self._mark(stream).synchronize()
                raise

    def _fingerprint(self, end: int, page: Sampled) -> int:
        """Of a page as it lies at one end of its copy."""
        pool, *slots = page
        rows = self._device[pool].rows([slots[NEAR]], [slots[FAR]])
        pieces = [
            ends[end][row].cpu().numpy()
            for owner, column, ends in self._buffers
            if owner == pool
            for row in rows[column][end]  # one, or none where an engine has no block
        ]
        return fingerprint(*(piece.data for piece in pieces))

    def _save(self, pages: Mapping[int, tuple[Slots, Sequence[bytes]]]) -> None:
        self._mover.move(FAR, slice(None), self._rows({pool: slots for pool, (slots, _) in pages.items()}))
        self._mark(self._down).synchronize()
        for pool, (slots, keys) in pages.items():
            for (_, slot), key in zip(slots, keys, strict=True):
                self._host[pool].seal(slot, key)

    def _rows(self, pages: Mapping[int, Slots]) -> Any:
        """Those of some pages (device slot, host slot) by pool, as the mover takes them."""
        return self._mover.rows(
            {
                pool: self._device[pool].rows(*map(list, zip(*slots, strict=True)))
                for pool, slots in pages.items()
                if slots
            }
        )

    def _mark(self, stream: Any) -> Any:
        event = self._torch.Event()
        event.record(stream)
        return event
