"""A GPU's memory that goes from pool to pool, by CUDA's virtual memory.

A pool's addresses are reserved once, for as much as it could ever have, so that its tensors stay where they are and in
one piece. The physical memory is allocated once as well, in pieces of equal size, and a pool has some of them behind
the parts of its addresses that it uses. To touch any other part ends the process's work on the GPU.
"""

import logging
import weakref
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvarve.errors import ConfigError
from kvarve.pages.sizes import format_size

log = logging.getLogger(__name__)


class Driver:
    """Physical memory and addresses of a GPU; sizes and addresses are multiples of `granule`.

    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html, by the bindings that torch itself needs.
    """

    def __init__(self, device: torch.device) -> None:
        """RuntimeError, ImportError: there is no such GPU, or it has no virtual memory."""
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.synchronize(self._device)  # its context is there from now on
        cuda = self._cuda = import_module("cuda.bindings.driver")
        attributes = cuda.CUdevice_attribute
        supported = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._ask("cuDeviceGetAttribute", supported, self._device.index):
            raise RuntimeError(f"{self._device} has no virtual memory")
        self._of = cuda.CUmemAllocationProp()
        self._of.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._of.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._of.location.id = self._device.index
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._of.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(self._ask("cuMemGetAllocationGranularity", self._of, least))

    def create(self, nbytes: int) -> Any:
        """Physical memory; ConfigError if there is not so much."""
        try:
            return self._ask("cuMemCreate", nbytes, self._of, 0)
        except RuntimeError:
            torch.cuda.empty_cache()  # what torch has for tensors to come
        try:
            return self._ask("cuMemCreate", nbytes, self._of, 0)
        except RuntimeError as e:
            raise ConfigError(f"{self._device} cannot give so much memory ({e}): give less device memory") from e

    def destroy(self, piece: Any) -> None:
        self._ask("cuMemRelease", piece)

    def reserve(self, nbytes: int) -> int:
        """Addresses, from the one that is returned on."""
        return int(self._ask("cuMemAddressReserve", nbytes, 0, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self._ask("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, piece: Any) -> None:
        """Put physical memory of these bytes behind addresses. RuntimeError: none is there then."""
        self._ask("cuMemMap", address, nbytes, 0, piece, 0)
        try:
            self._ask("cuMemSetAccess", address, nbytes, [self._access], 1)
        except RuntimeError:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        self._ask("cuMemUnmap", address, nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        """The addresses as bytes, of which the first have memory; `owner` lives as long as any view."""
        return torch.as_tensor(OnGpu(address, nbytes, owner), device=self._device)

    def synchronize(self) -> None:
        """Wait for all that the device does."""
        torch.cuda.synchronize(self._device)

    def _ask(self, call: str, *arguments: Any) -> Any:
        error, *found = getattr(self._cuda, call)(*arguments)
        if int(error):
            raise RuntimeError(f"{call}: {error.name}")
        return found[0] if found else None


def driver_of(device: str | torch.device) -> Driver | None:
    """The driver of a device whose memory can go from pool to pool by addresses; None for any other."""
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return Driver(torch.device(device))
    except (RuntimeError, AssertionError, ImportError) as e:
        log.warning("pools of %s cannot share its memory, which is divided once: %s", device, e)
        return None


class DeviceMemory:
    """`nbytes` of physical memory in pieces of `piece` bytes. It is freed with the last view of its addresses."""

    def __init__(self, nbytes: int, piece: int, driver: Driver) -> None:
        """ConfigError: there is not so much."""
        self.piece, self.driver = piece, driver
        self._loose: list[Any] = []  # pieces behind no address
        self._mapped: dict[int, Any] = {}  # pieces by address
        self._addresses: list[tuple[int, int]] = []  # first, and bytes
        self._close = weakref.finalize(self, _give_back, driver, piece, self._loose, self._mapped, self._addresses)
        self._close.atexit = False  # the system does it then
        try:
            for _ in range(nbytes // piece):
                self._loose.append(driver.create(piece))
        except ConfigError as e:
            self._close()
            raise ConfigError(f"{format_size(nbytes)} in pieces of {format_size(piece)}: {e}") from e

    def reserve(self, nbytes: int) -> "Addresses":
        """Addresses for whole pieces, until this object ends."""
        nbytes = -(-nbytes // self.piece) * self.piece
        address = self.driver.reserve(nbytes)
        self._addresses.append((address, nbytes))
        return Addresses(self, address, nbytes)

    def commit(self, address: int) -> None:
        """Put a piece of physical memory behind an address, unless it has one. RuntimeError: it has none then."""
        if address not in self._mapped:
            self.driver.map(address, self.piece, self._loose[-1])
            self._mapped[address] = self._loose.pop()

    def release(self, address: int) -> None:
        """Take the piece from behind an address, if it has one. RuntimeError: it has it still."""
        if address in self._mapped:
            self.driver.unmap(address, self.piece)
            self._loose.append(self._mapped.pop(address))


class Addresses:
    """`nbytes` of addresses; `tensor` is over all of them, as bytes."""

    def __init__(self, memory: DeviceMemory, start: int, nbytes: int) -> None:
        self._memory, self._start = memory, start
        memory.commit(self._start)  # torch asks what is at the first one
        self.tensor = memory.driver.tensor(self._start, nbytes, memory)
        memory.release(self._start)

    def commit(self, start: int, stop: int) -> None:
        """Have memory behind these bytes, whole pieces. RuntimeError: perhaps behind some of them; ask again."""
        for at in self._pieces(start, stop):
            self._memory.commit(at)

    def release(self, start: int, stop: int) -> None:
        """Loose the memory behind these bytes, whole pieces, which nothing reads or writes any more. RuntimeError:
        perhaps not of all; ask again."""
        for at in self._pieces(start, stop):
            self._memory.release(at)

    def _pieces(self, start: int, stop: int) -> range:
        piece = self._memory.piece
        assert not start % piece and not stop % piece, "of whole pieces"
        return range(self._start + start, self._start + stop, piece)


def _give_back(
    driver: Driver, piece_bytes: int, loose: list[Any], mapped: dict[int, Any], addresses: list[tuple[int, int]]
) -> None:
    """All that a driver has given, as far as it takes it: on a GPU that has failed it may not."""
    with suppress(RuntimeError):
        driver.synchronize()
    for address in mapped:
        with suppress(RuntimeError):
            driver.unmap(address, piece_bytes)
    for piece in (*loose, *mapped.values()):
        with suppress(RuntimeError):
            driver.destroy(piece)
    for address, nbytes in addresses:
        with suppress(RuntimeError):
            driver.free(address, nbytes)


class OnGpu:
    """Addresses of a GPU, as torch takes memory that another library owns. A tensor keeps it, and so `owner`."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
