"""Pages in a Mooncake Store: one object per name, moved between its owners and our host memory without another copy.

The master knows the objects, and other machines' memory holds them; both may go away at any time. An object that cannot
be read is a miss, and a damaged one too short; a master that does not answer, or a call of which all failed, is a
StorageError. Readers check each page, so damage by Mooncake (memory reused for another object during a read) costs only
misses.
"""

import hashlib
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvarve.errors import StorageError
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names, check_settings, firsts
from kvarve.storage.mooncake._client import (
    ALREADY_THERE,
    DAMAGED,
    INVALID,
    MISSING,
    NO_ROOM,
    NOT_FOUND,
    Client,
    Settings,
)
from kvarve.system.regions import HostRegion, address

# Objects per call into the library: enough to spread the cost of a call, and few enough that all its transfers end
# before the library gives up on them (see mooncake_client).
_BATCH = 32
_BOUNCE_BYTES = 4 << 20  # at least; grown on demand
# Mooncake stores no empty object. These bytes stand for one; no page has just these.
_EMPTY = b"kvarve: an object without a byte"


@dataclass(frozen=True)
class _Buffer:
    """Memory registered with the library: the caller's own, or a part of the bounce buffer in its place."""

    number: int  # of the name in its call
    address: int
    size_bytes: int
    bounced: memoryview | None = None


class MooncakeStorage(Storage):
    """Objects of one label at a master that may have others, which are neither seen nor touched.

    `settings`: where it is. StorageError: the master does not answer. The master decides what is evicted, and when.
    """

    def __init__(
        self, settings: Settings, label: bytes, description: str, client: Callable[[Settings], Client] = Client
    ) -> None:
        check_settings(1, label)
        self.counts: Counter[str] = Counter()
        self._where = f"mooncake://{settings.master}"
        self._prefix = (
            f"kvarve:{hashlib.sha256(label).hexdigest()[:16]}:"  # without special characters of regular expressions
        )
        self._client = client(settings)
        self._lock = threading.Lock()  # guards everything below
        self._lent: list[tuple[int, int]] = []  # start and end address of registered memory
        self._usage = StorageUsage()  # as of the master's last answer
        self._bounce_lock = threading.Lock()
        self._bounce = memoryview(b"")

    def register(self, region: HostRegion) -> None:
        """Buffers inside `region` are read and written in place. All others are copied."""
        self._client.lend(region.memory)
        with self._lock:
            self._lent.append((region.address, region.address + region.size_bytes))

    def exists(self, names: Sequence[str]) -> list[bool]:
        if not names:
            self._client.require_open()
            return []
        codes = self._client.exists(self._keys(names))
        if 0 in codes:
            check_names(names)  # a stored object has a legal name
        return [*map(bool, codes)]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        self._client.require_open()
        sizes: list[int | None] = [None] * len(names)
        # For a name twice in a call the library fills one buffer, and answers that it has filled both.
        first = firsts(names)
        answered, failed = 0, list[int]()
        large: list[int] = []
        for places in self._placed([*first.values()], into):
            codes = self._client.get(
                self._keys(names[place.number] for place in places),
                [place.address for place in places],
                [place.size_bytes for place in places],
            )
            for place, code in zip(places, codes, strict=True):
                if code >= 0:
                    sizes[place.number] = _arrived(place, into[place.number], code)
                elif code == INVALID:  # larger than its buffer, which the library refuses
                    large.append(place.number)
                elif code in DAMAGED:  # its reader finds it too short, and deletes it
                    sizes[place.number] = 0
                    self.counts["damaged"] += 1
                elif code not in MISSING:
                    failed.append(code)
            answered += sum(code >= 0 or code in DAMAGED for code in codes)
            if failed and not answered:
                break  # an owner is gone or hangs: the rest would take as long
        for number in large:
            sizes[number] = self._get_large(names[number], into[number])
        self.counts["unreadable"] += len(failed)
        if failed and not answered:
            raise StorageError(
                f"{self._where}: read 0 of {len(names)} objects: their owners do not answer ({failed[0]})"
            )
        for number, name in enumerate(names):
            other = first[name]
            size = sizes[other]
            if other != number and size is not None:
                sizes[number] = self._copied(name, size, into[other], into[number])
        return sizes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        self._client.require_open()
        failed, full = list[int](), 0
        sent: list[int] = []
        for places in self._placed([*firsts(names).values()], data, filled=True):
            codes = self._client.put(
                self._keys(names[place.number] for place in places),
                [place.address for place in places],
                [place.size_bytes for place in places],
            )
            for place, code in zip(places, codes, strict=True):
                if code in (0, ALREADY_THERE):
                    sent.append(place.number)
                elif code == NO_ROOM:
                    full += 1
                else:
                    failed.append(code)
            if failed and not sent and not full:
                raise StorageError(
                    f"{self._where}: stored 0 of {len(names)} objects: no owner takes them ({failed[0]})"
                )
        self.counts["no space"] += full
        self.counts["not taken"] += len(failed)
        # A put of an object that another writer has begun and never ended answers 0 and stores nothing.
        there = self.exists([names[number] for number in sent])
        self.counts["not there after a put"] += len(there) - sum(there)
        stored = {names[number] for number, found in zip(sent, there, strict=True) if found}
        return [name in stored for name in names]

    def delete(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        self._client.require_open()
        unique = [*firsts(names)]
        codes = dict(zip(unique, self._client.remove(self._keys(unique)), strict=True))
        failed = [code for code in codes.values() if code < 0 and code not in MISSING]
        self.counts["not removed"] += len(failed)
        if failed and len(failed) == len(codes):
            raise StorageError(f"{self._where}: deleted 0 of {len(codes)} objects ({failed[0]})")
        return [codes.pop(name, NOT_FOUND) == 0 for name in names]

    def drop(self, group: str | None = None) -> int:
        """Remove all objects of one group, or of the label; returns how many there were."""
        check_names([] if group is None else [group])
        self._client.require_open()
        pattern = self._prefix if group is None else f"{self._prefix}{group.replace('.', '[.]')}-"
        return self._client.remove_all_of(f"^{pattern}.*")

    def usage(self) -> StorageUsage:
        """The master's figures, of all its users' objects; its last ones if they cannot be read."""
        self._client.require_open()
        figures = self._client.figures()
        if figures is not None:
            names = ("key_count", "allocated_bytes", "total_capacity_bytes", "evicted_key_count")
            self._usage = StorageUsage(*(int(figures.get(f"master_{name}", 0)) for name in names))
        return replace(self._usage, damaged=self.counts["unreadable"])

    def close(self) -> None:
        self._client.close()

    # --- inside

    def _keys(self, names: Iterable[str]) -> list[str]:
        prefix = self._prefix
        return [prefix + name for name in names]

    def _placed(
        self, numbers: Sequence[int], views: Sequence[memoryview], filled: bool = False
    ) -> Iterator[list[_Buffer]]:
        """Batches of registered memory for these buffers; with `filled`, bounce buffers hold the buffers' contents.

        A batch is valid until the next one is requested.
        """
        direct, bounced = list[_Buffer](), list[int]()
        with self._lock:
            lent = [*self._lent]
        for number in numbers:
            view = views[number]
            # A buffer shorter than `_EMPTY` could not receive it.
            start = 0 if view.readonly or len(view) < len(_EMPTY) else address(view)
            if start and any(first <= start and start + len(view) <= end for first, end in lent):
                direct.append(_Buffer(number, start, len(view)))
            else:
                bounced.append(number)
        for at in range(0, len(direct), _BATCH):
            yield direct[at : at + _BATCH]
        while bounced:
            with self._bounce_lock:
                places, end = list[_Buffer](), 0
                self._have_bounce(max(len(views[bounced[0]]), len(_EMPTY)))
                for number in bounced[:_BATCH]:
                    data: memoryview | bytes = views[number] if views[number].nbytes or not filled else _EMPTY
                    size = max(len(data), len(_EMPTY))  # an empty object reads as `_EMPTY`
                    if end + size > len(self._bounce):
                        break
                    part = self._bounce[end : end + (len(data) if filled else size)]
                    if filled:
                        part[:] = data
                    places.append(_Buffer(number, address(part), len(part), part))
                    end += -(-size // 64) * 64
                yield places
                del bounced[: len(places)]

    def _have_bounce(self, size_bytes: int) -> None:
        """Called with the bounce lock held. A smaller buffer stays registered, as late transfers may write to it."""
        if len(self._bounce) < size_bytes:
            self._bounce = memoryview(mmap.mmap(-1, max(1 << (size_bytes - 1).bit_length(), _BOUNCE_BYTES)))
            self._client.lend(self._bounce)

    def _get_large(self, name: str, view: memoryview) -> int | None:
        """Read as much of an object as its buffer takes; returns its whole size, None if it is gone meanwhile."""
        (key,) = self._keys([name])
        size = self._client.size(key)
        if size < 0:
            self.counts["unreadable"] += size not in MISSING
            return None
        with self._bounce_lock:
            self._have_bounce(size)
            (code,) = self._client.get([key], [address(self._bounce)], [size])
            if code < 0:
                self.counts["unreadable"] += code not in MISSING | {INVALID}
                return None
            count = min(code, len(view))
            view[:count] = self._bounce[:count]
            return code

    def _copied(self, name: str, size: int, source: memoryview, target: memoryview) -> int | None:
        """Copy an object that was read to another buffer of the same call."""
        if len(source) < min(size, len(target)):
            (again,) = self.get([name], [target])
            return again
        target[: min(size, len(target))] = source[: min(size, len(target))]
        return size


def _arrived(place: _Buffer, view: memoryview, size: int) -> int:
    """Copy from the bounce buffer, if any, to the caller's; returns the size of the object."""
    if size == len(_EMPTY) and (place.bounced or view)[:size] == _EMPTY:
        return 0
    if place.bounced is not None:
        count = min(size, len(view))
        view[:count] = place.bounced[:count]
    return size
