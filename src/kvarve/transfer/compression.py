"""A storage whose records are compressed on their way, and expanded when they are read: `?compress=` of any URL.

    put:  record ──(encode)──> buffer ──> storage          get:  storage ──> record's own place ──(expand)──> there

It lies between a storage and its breaker, so all above it see plain records, whose check covers what comes out. It runs
on the threads that call it, the lanes' workers: one encodes while another moves. An encoded record says so, so a get
needs no setting. Objects that are no records pass as they are.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvarve.errors import ConfigError
from kvarve.records.encodings import Broken, Codec, codec, decode, encode, plain_bytes, pool_of
from kvarve.records.record import BLOCK_BYTES, HEADER_BYTES
from kvarve.storage import Breaker, Storage, Tiers
from kvarve.storage.base import Around, check_batch, check_pieces
from kvarve.storage.urls import StorageUrl
from kvarve.transfer._buffers import Buffers

log = logging.getLogger(__name__)

AUTO, OFF = "auto", "no"
BUFFERS = 6  # of one storage: five workers put at a time, and a replicator
BUFFER_BYTES = 2 << 20  # of each; more if a single record is larger. While one piece is put, others are encoded
_TELLS_BYTES = 1 << 20  # a smaller call says more about a storage's latency than about its rate
_TRIAL = 256  # of so many records of a pool that are not encoded, one is in vain, to see whether it would pay by now
_LOOK = 16  # of so many records of a pool that are encoded, one is asked which of its planes shrink
_KEPT = 0.9  # of what earlier calls have told, at each new one

Pieces = Sequence[memoryview]


@dataclass
class _Cost:
    """Seconds for a byte, as an average in which earlier calls fade."""

    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.bytes = _KEPT * self.bytes + nbytes
        self.seconds = _KEPT * self.seconds + seconds

    def __bool__(self) -> bool:
        return self.bytes > 0

    @property
    def per_byte(self) -> float:
        return self.seconds / self.bytes


@dataclass
class Pool:
    """What is known of one pool's records. `plain_bytes` and `stored_bytes`: of those stored so far, before and after
    they were encoded."""

    plain_bytes: int = 0
    stored_bytes: int = 0
    on: bool = False
    passed: int = 0  # since one was encoded
    encoding: _Cost = field(default_factory=_Cost)
    expanding: _Cost = field(default_factory=_Cost)
    encodings: int = 0
    worth: Sequence[bool] = ()  # which planes shrink; looked at anew now and then
    encoded: float = 0.0  # of `encoding.bytes`, what came out


class Compressed(Around):
    """`inner`, in which records are stored as `compress` says: "zstd" or "lz4", where that saves space; "auto", with
    zstd and where that saves time; "no". `pools` by name; `counts` what could not be expanded. `usage` counts the bytes
    that records take in `inner`."""

    def __init__(self, inner: Storage, compress: str = OFF, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """ConfigError: the library that `compress` takes is missing."""
        super().__init__(inner)
        self.compress = compress
        self._codec: Codec | None = None if compress == OFF else codec("zstd" if compress == AUTO else compress)
        self._clock = clock
        self._buffers = Buffers(BUFFERS, BUFFER_BYTES, inner.register)
        self._lock = threading.Lock()  # guards all below, for moments
        self.counts: Counter[str] = Counter()
        self.pools: dict[str, Pool] = {}
        self._putting, self._getting = _Cost(), _Cost()

    # --- the calls that see bytes

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        check_batch(names, data)
        return self.put_pieces(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Pieces]) -> list[bool]:
        if self._codec is None:
            return self.inner.put_pieces(names, data)
        check_pieces(names, data)
        return self._put(names, data, self._codec)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        began = self._clock()
        sizes = self.inner.get(names, into)
        self._note(self._getting, began, (min(size or 0, len(view)) for size, view in zip(sizes, into, strict=True)))
        for i, (view, size) in enumerate(zip(into, sizes, strict=True)):
            if size is not None and size != view.nbytes:
                sizes[i] = self._expanded(names[i], view, size)
        return sizes

    # --- put

    def _put(self, names: Sequence[str], objects: Sequence[Pieces], using: Codec) -> list[bool]:
        pools = [pool_of(pieces) for pieces in objects]
        sizes = [sum(map(len, pieces)) for pieces in objects]
        wanted = [
            pool is not None and self._wants(pool, pieces, using) for pool, pieces in zip(pools, objects, strict=True)
        ]
        largest = max((size for size, want in zip(sizes, wanted, strict=True) if want), default=0)
        stored, lengths = [False] * len(names), [*sizes]
        # Of one name twice in a call the first stays: then nothing may be put out of order.
        with self._buffers.taken(largest + BLOCK_BYTES if largest and len({*names}) == len(names) else 0) as buffer:
            if buffer is None:
                wanted = [False] * len(names)
            # What does not fit into the buffer at once is put in several calls, the last first, so that space which
            # runs out is the first names'.
            end, calls = len(names), 0
            while end or not calls:
                start, room, ready = end, buffer or memoryview(b""), list[Pieces]()
                while start and (not wanted[start - 1] or room.nbytes >= sizes[start - 1] + BLOCK_BYTES):
                    start -= 1
                    pieces, pool = objects[start], pools[start]
                    if wanted[start] and pool is not None and (size := self._encode(pool, pieces, using, room)):
                        pieces, room, lengths[start] = (room[:size],), room[size:], size
                    ready.append(pieces)
                stored[start:end] = self._send(names[start:end], ready[::-1])
                end, calls = start, calls + 1
            if calls > 1:  # a later call may have evicted what an earlier one has stored
                stored = [done and here for done, here in zip(stored, self.inner.exists(names), strict=True)]
        self._stored(pools, sizes, lengths, stored)
        return stored

    def _send(self, names: Sequence[str], objects: Sequence[Pieces]) -> list[bool]:
        began = self._clock()
        stored = self.inner.put_pieces(names, objects)
        self._note(self._putting, began, (sum(map(len, pieces)) for pieces in objects))
        return stored

    def _encode(self, pool: str, pieces: Pieces, using: Codec, into: memoryview) -> int | None:
        known, plain = self.pools[pool], sum(map(len, pieces))
        began = self._clock()
        size, worth = encode(pieces, using, into, known.worth)
        took = self._clock() - began
        with self._lock:
            known.encodings += 1
            known.worth = worth if size is not None and known.encodings % _LOOK else ()
            known.encoding.add(plain, took)
            known.encoded = _KEPT * known.encoded + (size or plain)
        return size

    def _stored(
        self, pools: Sequence[str | None], sizes: Sequence[int], lengths: Sequence[int], stored: Sequence[bool]
    ) -> None:
        with self._lock:
            for pool, size, length, done in zip(pools, sizes, lengths, stored, strict=True):
                if pool is not None and done:
                    self.pools[pool].plain_bytes += size
                    self.pools[pool].stored_bytes += length

    # --- whether it pays

    def _wants(self, pool: str, pieces: Pieces, using: Codec) -> bool:
        """Whether the next record of a pool is to be encoded. Now and then one that is not is encoded in vain."""
        with self._lock:
            known = self.pools.setdefault(pool, Pool())
            known.on = self.compress != AUTO or self._pays(known)
            known.passed = 0 if known.on else known.passed + 1
            if known.on or known.passed % _TRIAL != 1:
                return known.on
        with self._buffers.taken(sum(map(len, pieces)) + BLOCK_BYTES) as buffer:
            if buffer is not None:
                self._encode(pool, pieces, using, buffer)
        return False

    def _pays(self, pool: Pool) -> bool:
        """Whether the bytes saved would take the storage longer, written once and read once, than encoding and
        expanding takes. What has not been measured yet is taken to be as its counterpart."""
        if not (self._putting and pool.encoding):
            return False
        saved = 1 - pool.encoded / pool.encoding.bytes
        moving = self._putting.per_byte + (self._getting or self._putting).per_byte
        return saved * moving > pool.encoding.per_byte + (pool.expanding or pool.encoding).per_byte

    def _note(self, cost: _Cost, began: float, sizes: Iterator[int]) -> None:
        if self.compress == AUTO and (nbytes := sum(sizes)) >= _TELLS_BYTES:
            took = self._clock() - began
            with self._lock:
                cost.add(nbytes, took)

    # --- get

    def _expanded(self, name: str, view: memoryview, size: int) -> int | None:
        """The size of a plain object; one that was encoded and fits into its buffer is expanded there. What cannot be
        expanded is left, for the caller to find too short; None if only the library is missing here."""
        begins = view
        if view.nbytes < HEADER_BYTES <= size:
            begins = memoryview(bytearray(HEADER_BYTES))
            self.inner.get([name], [begins])
        plain = plain_bytes(begins[:size], size)
        if plain is None or plain > view.nbytes:
            return plain or size
        into, began = view[:plain], self._clock()
        try:
            decode(bytes(view[:size]), into)
        except Broken:
            return size
        except ConfigError as error:
            with self._lock:
                self.counts["unread: no library"] += 1
                first = self.counts["unread: no library"] == 1
            if first:
                log.warning("pages that another server has compressed cannot be read: %s", error)
            return None
        took = self._clock() - began
        with self._lock:
            self.pools.setdefault(pool_of([into]) or "", Pool()).expanding.add(plain, took)
        return plain


def buffers_bytes(urls: Sequence[StorageUrl], record: int) -> int:
    """The memory that storages of these URLs take at most, if the largest record has so many bytes."""
    return BUFFERS * max(BUFFER_BYTES, record + BLOCK_BYTES) * sum(url.compress != OFF for url in urls)


def compressing(url: StorageUrl) -> Callable[[Storage], Storage]:
    """How a storage of this URL is wrapped. ConfigError, before anything is opened: a library is missing."""
    if url.compress != OFF:
        codec("zstd" if url.compress == AUTO else url.compress)
    return lambda storage: Compressed(storage, url.compress)


def totals(storage: Breaker | Tiers) -> dict[str, dict[str, int]]:
    """By pool: the bytes of the records that were stored so far, as they were (`plain_bytes`) and as they were stored
    (`stored_bytes`), and whether they are being compressed now (`on`). Of all tiers that may compress."""
    found: dict[str, dict[str, int]] = {}
    for breaker in storage.tiers if isinstance(storage, Tiers) else [storage]:
        tier = breaker.inner
        if isinstance(tier, Compressed) and tier.compress != OFF:
            for pool, known in tier.pools.copy().items():
                total = found.setdefault(pool, {"plain_bytes": 0, "stored_bytes": 0, "on": 0})
                total["plain_bytes"] += known.plain_bytes
                total["stored_bytes"] += known.stored_bytes
                total["on"] |= known.on
    return found
