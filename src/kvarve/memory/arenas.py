"""The memory of slots: on the device in the model's layout, on the host as records.

An arena knows only slots; the core decides which page is in which slot, and until when. Two threads never touch one
slot at a time because a slot has one owner.
"""

import mmap
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.memory.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.model import DTYPE_BYTES, PoolSpec


class DeviceArena:
    """One pool's pages on the device, layer by layer: `buffers[name]` is a tensor [slots, *shape]."""

    def __init__(self, pool: PoolSpec, slots: int, device: str | torch.device = "cpu") -> None:
        self.pool, self.slots, self.device = pool, slots, torch.device(device)
        try:
            self.buffers: Mapping[str, Tensor] = {
                buffer.name: torch.empty((slots, *buffer.shape), dtype=getattr(torch, buffer.dtype), device=self.device)
                for buffer in pool.buffers
            }
        except RuntimeError as e:
            raise ConfigError(f"no memory on {device} for {slots} pages of {pool.name}: {e}") from e


class HostArena:
    """One pool's pages in host memory: `slots` consecutive records, in page-aligned anonymous memory.

    The system commits the memory page by page as it is first written.
    """

    def __init__(self, pool: PoolSpec, slots: int, namespace: bytes, rank: int = 0, ranks: int = 1) -> None:
        self.pool, self.slots = pool, slots
        self.stride = record_bytes(pool.payload_bytes)
        self.stamp = Stamp(namespace, pool.name, pool.payload_bytes, 0 if pool.replicated else rank, ranks)
        try:
            self._memory = mmap.mmap(-1, slots * self.stride)
        except (OSError, ValueError, OverflowError) as e:
            raise ConfigError(f"not enough host memory for {slots} pages of {pool.name}: {e}") from e
        self._bytes = memoryview(self._memory)
        everything = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.buffers: Mapping[str, Tensor] = {
            buffer.name: self._view(everything, HEADER_BYTES + offset, buffer.shape, buffer.dtype)
            for buffer, offset in zip(pool.buffers, pool.offsets(), strict=False)
        }

    def _view(self, everything: Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        """One buffer of all records as a tensor [slots, *shape] over the records' own memory."""
        size = DTYPE_BYTES[dtype]
        strides, stride = [], 1
        for side in reversed(shape):
            strides.append(stride)
            stride *= side
        typed = everything.view(getattr(torch, dtype))
        return typed.as_strided((self.slots, *shape), (self.stride // size, *reversed(strides)), offset // size)

    @property
    def memory(self) -> memoryview:
        """All records, writable."""
        return self._bytes

    def record(self, slot: int) -> memoryview:
        """The bytes of one record, writable."""
        return self._bytes[slot * self.stride : (slot + 1) * self.stride]


def to_host(device: DeviceArena, host: HostArena, slots: Sequence[tuple[int, int]], keys: Sequence[bytes]) -> None:
    """Copy pages (device slot, host slot) out of the device's layers into records, and seal them."""
    # Page by page, so that the checksum finds the bytes in the processor's cache.
    for (near, far), key in zip(slots, keys, strict=True):
        for name, layer in device.buffers.items():
            host.buffers[name][far].copy_(layer[near])
        host.stamp.seal(host.record(far), key)


def to_device(host: HostArena, device: DeviceArena, slots: Iterable[tuple[int, int]]) -> None:
    """Copy pages (host slot, device slot) out of records into the device's layers; done when it returns."""
    for far, near in slots:
        for name, layer in device.buffers.items():
            layer[near].copy_(host.buffers[name][far])
    if device.device.type == "cuda":
        torch.cuda.synchronize(device.device)
