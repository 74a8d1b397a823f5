"""The memory of slots: on the device in the model's layout, on the host as records, which storage reads and writes.

An arena knows only slots; the core decides which page is in which slot, and until when. Two threads never touch one
slot at a time because a slot has one owner.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.memory._parts import Parts
from kvarve.memory.device_memory import Addresses, DeviceMemory
from kvarve.memory.host_memory import HostMemory
from kvarve.pages.pools import PoolSpec
from kvarve.records.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.records.seals import CHECKSUM, Seal
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
            try:
                shapes = [(slots, buffer.nbytes) for buffer in pool.buffers]
                self._pieces = [torch.empty(shape, dtype=torch.uint8, device=self.device) for shape in shapes]
            except RuntimeError as e:
                raise ConfigError(f"no memory on {device} for {slots} pages of {pool.name}: {e}") from e
        else:
            if pool.lookback is None:
                wheres = [(shared.reserve(slots * buffer.nbytes), 0, buffer.nbytes) for buffer in pool.buffers]
            else:
                pages = shared.reserve(slots * stride)
                wheres = [(pages, offset, stride) for offset in pool.offsets()[:-1]]
            self._parts = {addresses: each for addresses, _, each in wheres}
            self._pieces = [
                addresses.tensor.as_strided((slots, buffer.nbytes), (each, 1), start)
                for buffer, (addresses, start, each) in zip(pool.buffers, wheres, strict=True)
            ]
        self.buffers: Mapping[str, Tensor] = {
            buffer.name: piece.view(getattr(torch, buffer.dtype)).view(slots, *buffer.shape)
            for buffer, piece in zip(pool.buffers, self._pieces, strict=True)
        }

    def pieces(self) -> list[Tensor]:
        """The bytes of each buffer, [slots, bytes]."""
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
    """One pool's pages in host memory, pinned where the device is a GPU. A page is its record, in which all its layers
    lie one behind the other: storage reads and writes it in place."""

    def __init__(
        self,
        pool: PoolSpec,
        slots: int,
        namespace: bytes,
        rank: int = 0,
        ranks: int = 1,
        *,
        device: str | torch.device = "cpu",
        allocate: Callable[[int], HostRegion | None] = lambda _: None,
        seal: Seal = CHECKSUM,
        shared: HostMemory | None = None,
        stride: int = 0,
    ) -> None:
        """`allocate(bytes)`: memory of a storage's making, if it wants any. `shared`: memory that other arenas are over
        as well, in which slot s begins at s x `stride` bytes."""
        self.pool, self.slots = pool, slots
        self.stride = stride or record_bytes(pool.payload_bytes)
        self._length = record_bytes(pool.payload_bytes)
        mine, of = pool.parts(rank, ranks)
        self.stamp = Stamp(namespace, pool.name, pool.payload_bytes, mine.start, of, seal)
        self.parts = Parts(pool, namespace, rank, ranks, seal)  # as a storage has its pages
        self._gaps = _gaps(pool)
        nbytes = self.stride * slots
        assert shared is None or nbytes <= shared.bytes.nbytes
        try:
            self._memory = shared or HostMemory(nbytes, torch.device(device), region=allocate(nbytes))
        except ConfigError as e:
            raise ConfigError(f"{slots} pages of {pool.name}: {e}") from e

    @property
    def memory(self) -> memoryview:
        """All pages, writable."""
        return self._memory.bytes

    @property
    def region(self) -> HostRegion:
        """The same, as a storage may have to know it."""
        return self._memory.region

    def pieces(self, device: torch.device) -> list[Tensor]:
        """The bytes of each buffer, [slots, bytes], for code that runs on a device."""
        everything, starts = self._memory.on(device), self.pool.offsets()
        return [
            everything.as_strided((self.slots, buffer.nbytes), (self.stride, 1), HEADER_BYTES + start)
            for buffer, start in zip(self.pool.buffers, starts, strict=False)
        ]

    def record(self, slot: int) -> memoryview:
        """A page's record, writable."""
        return self.memory[slot * self.stride : slot * self.stride + self._length]

    def take(self, slot: int, key: bytes, parts: Sequence[memoryview]) -> None:
        """Take over a page whose parts have been read, into `blanks` over its record, and checked."""
        self.parts.join(parts, self.record(slot))
        if self.parts.several:
            self.seal(slot, key)

    def seal(self, slot: int, key: bytes) -> None:
        """Write the header of a page that is complete."""
        record = self.record(slot)
        for gap in self._gaps:  # a storage may have left anything there
            record[gap] = bytes(gap.stop - gap.start)
        self.stamp.seal(record, key)

    def intact(self, slot: int, key: bytes) -> bool:
        """Whether a slot holds this page of this pool, model and rank, every bit of it."""
        return self.stamp.intact(self.record(slot), key)

    def close(self) -> None:
        """Unpin the memory; no copy may be under way."""
        self._memory.close()


def _gaps(pool: PoolSpec) -> list[slice]:
    """The bytes of a record that belong to no buffer, behind the header."""
    starts = [HEADER_BYTES + offset for offset in pool.offsets()]
    ends = [start + buffer.nbytes for start, buffer in zip(starts, pool.buffers, strict=False)]
    gaps = zip(ends, [*starts[1:-1], record_bytes(pool.payload_bytes)], strict=True)
    return [slice(end, start) for end, start in gaps if end < start]
