"""What moves bytes between memory and slots: the engines' common words."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvarve.storage.hf3fs._hf3fs_folder import File, Folder
from kvarve.storage.hf3fs._slot_layout import BLOCK_BYTES, HEADER_BYTES, Title, digest, header
from kvarve.system.background import WorkerPool
from kvarve.system.regions import HostRegion

T = TypeVar("T")


@dataclass(eq=False)
class Move:
    """One slot to write or to read: its header, in a block of its own, and the object's bytes behind that.

    `title`: the object, but for the digest of its bytes; None: whatever a read finds, of which only the header is kept;
    a write leaves no object there.
    `intact`: what was read is that object. `trouble`: why it was not moved whole. `late`: it may still be moved, so its
    slot is not to be used by another.
    """

    file: File
    offset: int
    pieces: Sequence[memoryview]
    title: Title | None
    header: bytes = b""
    intact: bool = False
    trouble: OSError | None = None
    late: bool = False
    failed_syncs: int = 0  # of the file, before the write

    @property
    def size_bytes(self) -> int:
        return BLOCK_BYTES + sum(piece.nbytes for piece in self.pieces)

    @property
    def rest_bytes(self) -> int:
        """Those of the object for which there is no piece."""
        return 0 if self.title is None else self.object_bytes + BLOCK_BYTES - self.size_bytes

    @property
    def object_bytes(self) -> int:
        assert self.title is not None, "it is not known what a read finds"
        return self.title.slot.size_bytes

    def seal(self, block: memoryview) -> None:
        """Write the header of what is to be written."""
        block[:] = (self._sealed() if self.title else b"").ljust(BLOCK_BYTES, b"\0")

    def check(self, block: memoryview) -> None:
        """The header and all bytes have come."""
        self.header = bytes(block[:HEADER_BYTES])
        self.intact = self.title is not None and self.header == self._sealed()

    def _sealed(self) -> bytes:
        assert self.title is not None, "what is written has a name"
        return header(self.title._replace(digest=digest(self.pieces)))


class Short(OSError):
    """Fewer bytes came than a slot has: it lies beyond the end of its file, or in a hole."""


class Engine(Protocol):
    """Calls come from several threads. What becomes of each move stands in it; no call raises for one of them.

    A read that has ended writes nothing more to its buffers, however it ended: where the file system hangs, it does not
    end. A write may end late. What an engine has no use for it need not hear of.
    """

    direct: bool  # wants files past the page cache

    def opened(self, fd: int) -> None:
        """A file's descriptor, before the first move."""
        return

    def closing(self, fd: int) -> None:
        return

    def register(self, region: HostRegion) -> None:
        return

    def enter(self, folder: Folder) -> None:
        """All that follows is in this folder, whose file system may have been mounted anew."""
        return

    def read(self, moves: Sequence[Move]) -> None: ...

    def write(self, moves: Sequence[Move]) -> None:
        """Those without trouble are on the medium."""
        ...

    def close(self) -> None:
        """After the last call, but for those that hang."""
        ...


def each(pool: WorkerPool, threads: int, work: Iterable[T], do: Callable[[T], None]) -> dict[T, OSError | None]:
    """Do all work, so many at once; each with its error."""
    troubles: dict[T, OSError | None] = {}
    left = deque(work)

    def share() -> None:  # a future for each thread, not for each piece: those cost as much as a checksum
        while left:
            try:
                one = left.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                do(one)
                troubles[one] = None
            except OSError as error:
                troubles[one] = error

    for future in [pool.run(share) for _ in range(min(threads, len(left)))]:
        future.result()
    return troubles


def sync(pool: WorkerPool, threads: int, moves: Sequence[Move], call: Callable[[int], object]) -> None:
    """Wait until what was written is on the medium; else that is the trouble of all moves in that file."""
    written = {move.file: move.failed_syncs for move in reversed(moves) if move.trouble is None}
    troubles = each(pool, threads, written, lambda file: file.sync(call, written[file]))
    for move in moves:
        move.trouble = move.trouble or troubles[move.file]


def cut(views: Sequence[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """The bytes of all views in order, in groups of `most_bytes`; the last group has the rest."""
    group: list[memoryview] = []
    space = most_bytes
    for view in views:
        at = 0
        while at < view.nbytes:
            piece = view[at : at + space]
            group.append(piece)
            at += piece.nbytes
            space -= piece.nbytes
            if not space:
                yield group
                group, space = [], most_bytes
    if group:
        yield group
