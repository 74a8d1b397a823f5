"""Objects whose bytes lie in several pieces of memory are written from where they are."""

import mmap
from collections.abc import Sequence

from file_disks import Open, WithoutSync

from kvarve.storage.file.disk import BLOCK_BYTES
from kvarve.system.regions import address
from kvarve.testing.suite import get


class Watched(WithoutSync):
    """`written`: the addresses of memory that was written from, of each call that wrote a whole block or more."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def write(self, file: int, data: Sequence[memoryview | bytes], at: int) -> int:
        if sum(memoryview(piece).nbytes for piece in data) >= BLOCK_BYTES:
            self.written.append([address(memoryview(piece)) for piece in data])
        return super().write(file, data, at)


def blocks(count: int, fill: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, count * BLOCK_BYTES))
    view[:] = bytes([fill]) * view.nbytes
    return view


def test_pieces_of_whole_blocks_are_written_in_place_and_adjacent_objects_in_one_call(opened: Open) -> None:
    disk = Watched()
    storage = opened(8 << 20, disk=disk)
    headers, rows = [blocks(1, 1), blocks(1, 2)], [blocks(7, 3), blocks(7, 4)]
    assert storage.put_pieces(["a", "b"], list(zip(headers, rows, strict=True))) == [True, True]
    data = [address(each) for pair in zip(headers, rows, strict=True) for each in pair]
    assert {at for call in disk.written for at in call} >= {*data}
    direct = [call for call in disk.written if set(call) & {*data}]
    assert direct in ([data], [[at] for at in data])  # in one call, or one by one where there is no direct I/O
    assert get(storage, "b") == bytes(headers[1]) + bytes(rows[1])
