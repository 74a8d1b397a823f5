"""The memory of slots: on the device in the model's layout, on the host in one of `layouts`.

An arena knows only slots; the core decides which page is in which slot, and until when. Two threads never touch one
slot at a time because a slot has one owner.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.memory.device_memory import Addresses, DeviceMemory
from kvarve.memory.host_memory import HostMemory, zeros
from kvarve.memory.layouts import PAGE_FIRST_DIRECT, Span, check_layout, entry_bytes, spans
from kvarve.memory.parts import Parts
from kvarve.memory.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.memory.seals import CHECKSUM, Seal
from kvarve.pages.pools import BufferSpec, PoolSpec
from kvarve.system.heap import discard
from kvarve.system.regions import HostRegion


class DeviceArena:
    """One pool's pages on the device: `buffers[name]` is a tensor [slots, *shape].

    A layer's pages lie one behind the other, so that consecutive slots of a chain are one piece. In `shared` memory
    only chains lie so. Of other pools each page is in one piece, since a part of an extent has to be whole pieces of
    that memory, and a layer's part of a few small states is not.
    """

    def __init__(
        self,
        pool: PoolSpec,
        slots: int,
        device: str | torch.device = "cpu",
        *,
        shared: DeviceMemory | None = None,
        stride: int = 0,
    ) -> None:
        """`shared`: memory of which slots have what `commit` gives them; `stride`: the bytes from one page to the next
        in it, where a page is in one piece."""
        self.pool, self.slots, self.device = pool, slots, torch.device(device)
        self._parts: dict[Addresses, int] = {}  # the bytes of a slot in each
        if shared is None:
            wholes = []
            try:
                for buffer in pool.buffers:
                    dtype = getattr(torch, buffer.dtype)
                    wholes.append(torch.empty((slots, *buffer.shape), dtype=dtype, device=self.device))
            except RuntimeError as e:
                raise ConfigError(f"no memory on {device} for {slots} pages of {pool.name}: {e}") from e
            self._pieces = [
                whole.view(-1).view(torch.uint8).view(slots, buffer.shape[0], -1)
                for buffer, whole in zip(pool.buffers, wholes, strict=True)
            ]
        else:
            if pool.lookback is None:
                wheres = [(shared.reserve(slots * buffer.nbytes), 0, buffer.nbytes) for buffer in pool.buffers]
            else:
                pages = shared.reserve(slots * stride)
                wheres = [(pages, offset, stride) for offset in pool.offsets()[:-1]]
            self._parts = {addresses: each for addresses, _, each in wheres}
            self._pieces = [
                _piece(buffer, Span(start, each, entry_bytes(buffer)), addresses.tensor, slots)
                for buffer, (addresses, start, each) in zip(pool.buffers, wheres, strict=True)
            ]
        self.buffers: Mapping[str, Tensor] = {
            buffer.name: piece.view(getattr(torch, buffer.dtype)).view(slots, *buffer.shape)
            for buffer, piece in zip(pool.buffers, self._pieces, strict=True)
        }

    def pieces(self) -> list[Tensor]:
        """The bytes of each buffer, [slots, entries, entry bytes]."""
        return self._pieces

    def commit(self, slots: range) -> None:
        """Slots are about to be used: give them memory, where they share it."""
        for addresses, each in self._parts.items():
            addresses.commit(slots.start * each, slots.stop * each)

    def release(self, slots: range) -> None:
        """Take the memory of slots that hold nothing, and that nothing reads any more. On the CPU the system has it,
        and it comes back as they are written."""
        for addresses, each in self._parts.items():
            addresses.release(slots.start * each, slots.stop * each)
        for piece in self._pieces if self.device.type == "cpu" and not self._parts else ():
            each = piece[0].nbytes
            discard(piece.data_ptr() + slots.start * each, len(slots) * each)

    columns = 1  # a page is one slot

    def rows(self, slots: Sequence[int], others: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """The rows of some slots in `pieces`, and the other ends of their copies."""
        return [(slots, others)]


class HostArena:
    """One pool's pages in host memory, pinned where the device is a GPU; storage gets and gives them as records.

    In the layout `page_first_direct` a page is its record (`in_place`). In any other, the record is a copy, made when
    it is needed, and the header is kept apart.
    """

    def __init__(
        self,
        pool: PoolSpec,
        slots: int,
        namespace: bytes,
        rank: int = 0,
        ranks: int = 1,
        *,
        layout: str = PAGE_FIRST_DIRECT,
        device: str | torch.device = "cpu",
        allocate: Callable[[int], HostRegion | None] = lambda _: None,
        seal: Seal = CHECKSUM,
        shared: HostMemory | None = None,
        stride: int = 0,
    ) -> None:
        """`allocate(bytes)`: memory of a storage's making, if it wants any. `shared`: memory that other arenas are over
        as well, in which slot s begins at s x `stride` bytes."""
        check_layout(layout)
        self.pool, self.slots, self.layout = pool, slots, layout
        self.stride = stride or record_bytes(pool.payload_bytes)
        self._length = record_bytes(pool.payload_bytes)
        mine, of = pool.parts(rank, ranks)
        self.stamp = Stamp(namespace, pool.name, pool.payload_bytes, mine.start, of, seal)
        self.parts = Parts(pool, namespace, rank, ranks, seal)  # as a storage has its pages
        self.in_place = layout == PAGE_FIRST_DIRECT
        self._scratch = threading.local()  # a record of zeros between the buffers, for `_glimpse`
        self._gaps = _gaps(pool)
        nbytes, self._spans = spans(layout, pool, slots)
        if shared is not None:
            assert self.in_place and self.stride * slots <= shared.bytes.nbytes
            self._spans = [span._replace(page=self.stride) for span in self._spans]
        try:
            self._headers = bytearray(0 if self.in_place else slots * HEADER_BYTES)
            self._memory = shared or HostMemory(nbytes, torch.device(device), region=allocate(nbytes))
        except (ConfigError, MemoryError) as e:
            raise ConfigError(f"{slots} pages of {pool.name}: {e}") from e
        self._pieces = _pieces(pool, self._spans, self._memory.tensor, slots)

    @property
    def memory(self) -> memoryview:
        """All pages, writable."""
        return self._memory.bytes

    @property
    def region(self) -> HostRegion:
        """The same, as a storage may have to know it."""
        return self._memory.region

    def pieces(self, device: torch.device) -> list[Tensor]:
        """The bytes of each buffer, [slots, entries, entry bytes], for code that runs on a device."""
        return _pieces(self.pool, self._spans, self._memory.on(device), self.slots)

    def record(self, slot: int, into: memoryview | None = None) -> memoryview:
        """A page's record: its own bytes, writable, where they are one; else a copy, in `into` (see `blank`)."""
        record = self.blank(slot, into)
        if not self.in_place:
            record[:HEADER_BYTES] = self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]
            for copy, piece in zip(self._of_record(record), self._pieces, strict=True):
                copy[0].copy_(piece[slot])
        return record

    def blank(self, slot: int, into: memoryview | None = None) -> memoryview:
        """Memory for a record that will be `put` into the slot: the slot's own where a page is its record; else `into`,
        which is of `apart`, or new memory."""
        if self.in_place:
            return self.memory[slot * self.stride : slot * self.stride + self._length]
        return zeros(self.stride) if into is None else into

    def put(self, slot: int, record: memoryview) -> None:
        """Take over a record that has been read into the slot's `blank`."""
        if not self.in_place:
            self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] = record[:HEADER_BYTES]
            for copy, piece in zip(self._of_record(record), self._pieces, strict=True):
                piece[slot].copy_(copy[0])

    def take(self, slot: int, key: bytes, record: memoryview, parts: Sequence[memoryview]) -> None:
        """Take over a page whose parts have been read and checked, into a `blank` and `blanks` over it."""
        self.parts.join(parts, record)
        self.put(slot, record)
        if self.parts.several:
            self.seal(slot, key)

    def seal(self, slot: int, key: bytes) -> None:
        """Write the header of a page that is complete."""
        record = self._glimpse(slot)
        for gap in self._gaps:  # a storage may have left anything there
            record[gap] = bytes(gap.stop - gap.start)
        self.stamp.seal(record, key)
        if not self.in_place:
            self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] = record[:HEADER_BYTES]

    def intact(self, slot: int, key: bytes) -> bool:
        """Whether a slot holds this page of this pool, model and rank, every bit of it."""
        return self.stamp.intact(self._glimpse(slot), key)

    def close(self) -> None:
        """Unpin the memory; no copy may be under way."""
        self._memory.close()

    def _glimpse(self, slot: int) -> memoryview:
        """A page's record, which is no longer valid if it is a copy and the calling thread takes the next one."""
        if not self.in_place and not hasattr(self._scratch, "record"):
            self._scratch.record = zeros(self.stride)
        return self.record(slot, getattr(self._scratch, "record", None))

    def _of_record(self, record: memoryview) -> list[Tensor]:
        _, direct = spans(PAGE_FIRST_DIRECT, self.pool, 1)
        return _pieces(self.pool, direct, torch.frombuffer(record, dtype=torch.uint8), 1)


def apart(arenas: Sequence[HostArena]) -> list[memoryview]:
    """Memory for one record of each, for `blank` and `record`: all in one piece, as a piece for each costs more. None
    is taken where a page is its record."""
    sizes = [0 if arena.in_place else arena.stride for arena in arenas]
    memory = zeros(sum(sizes))
    return [memory[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _gaps(pool: PoolSpec) -> list[slice]:
    """The bytes of a record that belong to no buffer, behind the header."""
    starts = [HEADER_BYTES + offset for offset in pool.offsets()]
    ends = [start + buffer.nbytes for start, buffer in zip(starts, pool.buffers, strict=False)]
    gaps = zip(ends, [*starts[1:-1], record_bytes(pool.payload_bytes)], strict=True)
    return [slice(end, start) for end, start in gaps if end < start]


def _pieces(pool: PoolSpec, where: Sequence[Span], everything: Tensor, slots: int) -> list[Tensor]:
    """Each buffer as bytes [slots, entries, entry bytes] over all bytes of a memory."""
    return [_piece(buffer, span, everything, slots) for buffer, span in zip(pool.buffers, where, strict=True)]


def _piece(buffer: BufferSpec, where: Span, everything: Tensor, slots: int) -> Tensor:
    return everything.as_strided(
        (slots, buffer.shape[0], entry_bytes(buffer)), (where.page, where.entry, 1), where.start
    )
