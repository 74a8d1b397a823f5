"""Moves objects out of slabs that are about to be removed: those that are hotter than the coldest ones that stay.

A slab goes as a whole, by the mean of its objects' last uses, so some of them may be the hottest of all.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import numpy as np

from kvarve.errors import StorageError
from kvarve.storage.file._eviction_queue import ORDERS
from kvarve.storage.file._index import Index
from kvarve.storage.file._slabs import RowAddress, RowSpan, Slab, blocks
from kvarve.storage.file._table import FREE, STORED

log = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20  # of objects whose entries are written together, unless a single one is larger
_MOST = 32  # of them: how long readers wait


class Move(NamedTuple):
    """An object, and the row that it gets: a free one, or that of an object that is colder."""

    source: RowAddress
    target: RowAddress


def hotter(leaving: Sequence[Slab], staying: Sequence[Slab], order: str, keep: Set[int] = frozenset()) -> list[Move]:
    """The objects of the slabs that leave which are among the hottest of all, as many as there are rows in those that
    stay; the hottest first. All slabs are of one class. `keep`: entries (slab's number << 32 | row) of objects that
    stay, however cold."""
    slabs, targets = [*staying, *leaving], list[RowAddress]()
    rows = [np.flatnonzero(slab.state == STORED) for slab in slabs]
    for at, slab in enumerate(staying):
        rows[at] = rows[at][[slab.number << 32 | row not in keep for row in rows[at].tolist()]] if keep else rows[at]
        targets += [(slab, row) for row in np.flatnonzero(slab.state == FREE).tolist()]
    room = len(targets) + sum(map(len, rows[: len(staying)]))
    if not room or not any(len(found) for found in rows[len(staying) :]):
        return []
    of, row = np.repeat(np.arange(len(slabs)), [*map(len, rows)]), np.concatenate(rows)
    stored, used, uses = (
        np.concatenate([getattr(slab, column)[found] for slab, found in zip(slabs, rows, strict=True)])
        for column in ("stored", "used", "uses")
    )
    coldest = np.lexsort(ORDERS[order](stored, used, uses))
    hot, cold = coldest[::-1][:room], coldest[::-1][room:][::-1]
    sources = hot[of[hot] >= len(staying)]
    cold = cold[of[cold] < len(staying)]

    def places(which: np.ndarray) -> Iterator[RowAddress]:
        return ((slabs[at], each) for at, each in zip(of[which].tolist(), row[which].tolist(), strict=True))

    return [*map(Move, places(sources), chain(targets, places(cold)))]


def rescue(
    index: Index,
    lock: threading.Lock,
    leaving: Iterable[Slab],
    keep: Set[int] = frozenset(),
    *,
    goes_on: Callable[[], bool],
) -> None:
    """Move the hottest objects of slabs that this process has locked as a whole, of each class, as long as `goes_on`.
    Whatever fails costs only the objects that were to be moved. `lock`: the store's, taken for moments."""
    classes = defaultdict[int, list[Slab]](list)
    for slab in leaving:
        classes[slab.shape.slot_bytes].append(slab)
    with lock:
        mine = [*index.slabs.values()]
    moves = list[Move]()
    for slot_bytes, some in classes.items():
        staying = [slab for slab in mine if slab.shape.slot_bytes == slot_bytes and slab not in some]
        moves += hotter(some, staying, index.limits.eviction, keep)
    if len(classes) > 1:
        moves.sort(key=lambda move: -int(move.source[0].used[move.source[1]]))
    touched = set[Slab]()
    try:
        for batch in _batches(moves):
            if not goes_on():
                log.warning("%s: not all that is used could be moved in time", index.folder.directory)
                break
            touched |= _moved(index, lock, batch)
        for slab in touched if index.limits.durable else ():
            slab.sync(slab.table)
    except (OSError, StorageError) as error:
        log.warning("%s: not all that is used could be moved: %s", index.folder.directory, error)


def _batches(moves: Iterable[Move]) -> Iterator[list[Move]]:
    batch, size_bytes = list[Move](), 0
    for move in moves:
        slot_bytes = move.target[0].shape.slot_bytes
        if batch and (len(batch) == _MOST or size_bytes + slot_bytes > _BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(move)
        size_bytes += slot_bytes
    if batch:
        yield batch


def _moved(index: Index, lock: threading.Lock, batch: Sequence[Move]) -> set[Slab]:
    """Move some objects, those that can be; the slabs that have them now."""
    claimed = list[Move]()
    try:
        with lock:
            for move in batch:
                if index.claim(*move.target):
                    claimed.append(move)
        index.publish(lock)  # what was evicted is gone before it is overwritten
        copied = [move for move in claimed if _copied(*move)]
        for slab in {move.target[0] for move in copied} if index.limits.durable else ():
            slab.sync(slab.file)  # before its entries: an original is given up for what they say
        with lock:
            for move in copied:
                index.move(*move)
        index.publish(lock)
    except BaseException:  # also on an interrupt
        with lock:
            index.revert()
        raise
    finally:
        with lock:
            index.release(move.target for move in claimed)
    return {move.target[0] for move in copied}


def _copied(source: RowAddress, target: RowAddress) -> bool:
    """Whether an object's bytes are in another row now."""
    (slab, row), (other, at) = source, target
    view = blocks(int(slab.length[row]))
    with suppress(OSError):
        if slab.read([RowSpan(0, slab, row, view)]) == view.nbytes:
            other.write([RowSpan(0, other, at, view)])
            return True
    return False
