"""Device memory by the system's own calls: addresses without memory that end the process where they are touched, and
memory that is put behind them, as CUDA's virtual memory does."""

import ctypes
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from kvarve.errors import ConfigError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NONE, _FIXED, _NORESERVE = 0, 0x10, 0x4000


class PretendDriver:
    """A device with `limit` bytes; memory is found as it was left, and every call is checked as CUDA checks it."""

    def __init__(self, limit: int = 1 << 40, granule: int = 1 << 16) -> None:
        self.granule, self._limit = granule, limit
        self._file = os.memfd_create("device")
        self._end = 0
        self.pieces: dict[int, int] = {}  # offset and bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address: offset, bytes
        self.reserved: dict[int, int] = {}
        self.moves, self.waits = 0, 0

    def create(self, nbytes: int) -> Any:
        self._check(nbytes)
        if sum(self.pieces.values()) + nbytes > self._limit:
            raise ConfigError("out of memory")
        at, self._end = self._end, self._end + nbytes
        os.ftruncate(self._file, self._end)
        self.pieces[at] = nbytes
        return at

    def destroy(self, piece: Any) -> None:
        assert all(piece != offset for offset, _ in self.mapped.values()), "mapped"
        del self.pieces[piece]

    def reserve(self, nbytes: int) -> int:
        self._check(nbytes)
        address = self._mmap(None, nbytes, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes
        assert not any(address <= at < address + nbytes for at in self.mapped), "mapped"
        assert _libc.munmap(address, nbytes) == 0

    def map(self, address: int, nbytes: int, piece: Any) -> None:
        self._check(nbytes)
        assert any(at <= address and address + nbytes <= at + size for at, size in self.reserved.items())
        assert not any(at < address + nbytes and address < at + size for at, (_, size) in self.mapped.items())
        assert self.pieces[piece] == nbytes, "all of a piece"
        assert all(piece != offset for offset, _ in self.mapped.values()), "in two places"
        self._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, self._file, piece)
        self.mapped[address] = piece, nbytes
        self.moves += 1

    def unmap(self, address: int, nbytes: int) -> None:
        assert self.mapped.pop(address)[1] == nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        self._mmap(address, nbytes, _NONE, flags, -1, 0)

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        assert address in self.mapped, "torch asks what is there"
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory._owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.waits += 1

    def _check(self, nbytes: int) -> None:
        assert nbytes and not nbytes % self.granule

    def _mmap(self, address: int | None, nbytes: int, protection: int, flags: int, file: int, at: int) -> int:
        found: int = _libc.mmap(address, nbytes, protection, flags, file, at)
        assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        return found
