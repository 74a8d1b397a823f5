"""The transfer engine: it turns the effects of the core into copies between arenas and storage, on lanes.

Two lanes are between device and host; the others belong to the connection of the attached storage.

Every page is checked here on its way towards the model: always when it comes from storage, and from host memory as well
unless that is switched off.
"""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

from kvarve.core.copies.effects import Copy, Effect, Event, Hurry, Page, Probe, Refusal, Transfer, Verified
from kvarve.core.copies.in_flight import BACKUP, FETCH, LOAD, PROBE, STORE, Edge
from kvarve.core.core_config import LOAD_DEADLINE_S
from kvarve.memory.arenas import HostArena
from kvarve.memory.fingerprints import Fingerprints, fingerprint
from kvarve.memory.host_memory import zeros
from kvarve.memory.page_copies import Compared, DeviceCopies, NearArena, Sampled, Way
from kvarve.pages.pools import Tier
from kvarve.records.record import HEADER_BYTES
from kvarve.storage import Storage
from kvarve.transfer.arrivals import Arrival
from kvarve.transfer.flows import LANES, Flow
from kvarve.transfer.lanes import Ends, Lane, Outcome
from kvarve.transfer.storage_connection import StorageConnection


class TransferEngine:
    def __init__(
        self,
        device: Sequence[NearArena],
        host: Sequence[HostArena],
        *,
        verify_host: bool = True,
        layerwise: bool = False,
        hash_sample: float = 0.0,
        deadline_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        mover: Way | None = None,
    ) -> None:
        """`hash_sample`: the share of pages that are compared before and after each copy.
        `layerwise`: say `Verified` of a load before it is copied; its pages are in place as `arrivals` say.
        `deadline_s` is the storage's; copies between device and host have `LOAD_DEADLINE_S`, and their `mover`."""
        self.layerwise = layerwise
        self._arrivals: list[Arrival] = []
        self._device, self._host = device, host
        self._verify_host, self._deadline_s = verify_host, deadline_s
        self._clock, self.ends = clock, Ends()
        self._copies, self.fingerprints = DeviceCopies(device, host, mover), Fingerprints(hash_sample)
        self._checking = threading.Lock()
        # One worker each: a chain's page rests on the one before it, so copies must end in the order sent.
        self._lanes = {edge: Lane(LANES[edge], self.ends, clock=clock) for edge in (BACKUP, LOAD)}
        self.flows: dict[Edge, Flow] = {edge: Flow([arena.pool for arena in host]) for edge in LANES}
        self.connection: StorageConnection | None = None
        self._retired: list[StorageConnection] = []  # those that may not have closed yet

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of device and host, and of the attached storage."""
        return [*self._lanes.values(), *(self.connection.lanes.values() if self.connection is not None else ())]

    def connect(self, storage: Storage) -> StorageConnection:
        """A connection for a storage that may be attached; it owns the storage. StorageError if no threads start."""
        for region in {id(arena.region): arena.region for arena in self._host}.values():
            storage.register(region)
        return StorageConnection(storage, self.ends, deadline_s=self._deadline_s, clock=self._clock)

    def attach(self, connection: StorageConnection | None) -> StorageConnection | None:
        """Send to this connection from now on; the one before is retired and returned."""
        before, self.connection = self.connection, connection
        if before is not None:
            self.retire(before)
        return before

    def retire(self, connection: StorageConnection) -> None:
        """Have a connection end the copies sent to it, and close, on a thread of its own. StorageError: the system
        starts no more threads."""
        connection.retire(self._deadline_s)
        self._retired = [each for each in self._retired if not each.closed.is_set()] + [connection]

    def send(self, *effects: Effect) -> None:
        """Start effects, in this order; the `Ended` of each comes out of `ends`. Copies from and to the device come
        after all that the calling thread has sent to its compute stream before this call."""
        ready: Any = None
        for effect in effects:
            if isinstance(effect, Copy) and Tier.STORAGE not in (effect.source, effect.target):
                ready = self._copies.ready() if ready is None else ready
                self._send_to_device(effect, ready)
            elif not isinstance(effect, Hurry):
                self._send_to_storage(effect)
            elif self.connection is not None:
                self.connection.lanes[FETCH].hurry(effect.ops)

    def _send_to_device(self, copy: Copy, ready: Any) -> None:
        """Or from it."""
        work = self._back_up if copy.target is Tier.HOST else self._load
        self._lanes[copy.source, copy.target].send(copy.op, lambda: work(copy, ready), LOAD_DEADLINE_S)

    def _send_to_storage(self, effect: Transfer) -> None:
        """Or from it, or a question."""
        connection = self.connection
        assert connection is not None, "the core knows that there is no storage"
        # Each piece carries its connection: another may be attached before it runs.
        begins_s = max(self._deadline_s, effect.wait_s)
        if isinstance(effect, Probe):
            # Waiting probes become one call, so the last of a burst waits for two calls at most.
            connection.lanes[PROBE].send_part(effect.op, self._probe, (connection, effect), len(effect.pages), begins_s)
        elif effect.target is Tier.STORAGE:
            # A put is durable when it returns, so a few large ones are cheaper.
            connection.lanes[STORE].send_part(effect.op, self._store, (connection, effect), len(effect.pages), begins_s)
        else:
            connection.lanes[FETCH].send(effect.op, lambda: self._fetch(connection, effect), begins_s, effect.urgent)

    def collect(self) -> list[Event]:
        return self.ends.collect()

    def arrivals(self) -> list[Arrival]:
        """The loads that have been verified and are still being copied: whatever page is read from now on, it is in
        place once its layer of all of these has come."""
        return self._arrivals

    def finish(self) -> None:
        """Wait until the device has done what has been sent to it (see `DeviceCopies.finish`)."""
        self._copies.finish()

    def close(self, timeout_s: float = 10.0, storage_s: float = 5.0, up: bool = True) -> None:
        """Let the lanes finish their work, then close the storage, all within `timeout_s`, of which closing the storage
        may take `storage_s`. The lanes of a storage that is not `up` are not waited for; all detached storages
        together get `storage_s` to close."""
        end = time.monotonic() + timeout_s - storage_s
        idle = True
        for lane in self._lanes.values():
            idle &= lane.close(max(0.0, end - time.monotonic()))
        for arena in self._host if idle else ():  # else the GPU may still read or write the memory
            arena.close()
        if self.connection is not None:
            self.connection.close(max(0.0, end - time.monotonic()) if up else 0.0, storage_s)
        end = min(end + storage_s, time.monotonic() + storage_s)
        for connection in self._retired:
            connection.closed.wait(max(0.0, end - time.monotonic()))

    # --- work, on the lanes' threads; each returns (good, bad) as bit sets over the effect's pages

    def _back_up(self, copy: Copy, ready: Any) -> tuple[int, int]:
        pages = {
            pool: ([(page.source, page.target) for _, page in pages], [page.key for _, page in pages])
            for pool, pages in _by_pool(copy.pages).items()
        }
        sampled = self._sampled(copy, _all(copy.pages))
        began = time.perf_counter()
        found = self._copies.save(pages, ready, [*sampled.values()])
        self.flows[BACKUP].moved(time.perf_counter() - began, copy.pages)
        altered = self._altered(copy, sampled, found)
        return _all(copy.pages) & ~altered, 0

    def _load(self, copy: Copy, ready: Any) -> tuple[int, int]:
        began = time.perf_counter()
        bad = 0
        for i, page in enumerate(copy.pages if self._verify_host else ()):
            bad |= (not self._host[page.pool].intact(page.source, page.key)) << i
        pages = {
            pool: [(page.source, page.target) for i, page in pages if not bad >> i & 1]
            for pool, pages in _by_pool(copy.pages).items()
        }
        good = _all(copy.pages) & ~bad
        sampled = self._sampled(copy, good)
        if not self.layerwise or not good or sampled:  # an altered page may not be used before it is compared
            found = self._copies.load(pages, ready, sampled=[*sampled.values()])
            self.flows[LOAD].moved(time.perf_counter() - began, _chosen(copy.pages, good))
            altered = self._altered(copy, sampled, found)
            return good & ~altered, bad
        arrival = Arrival(self._copies.layers, self._copies.order, LOAD_DEADLINE_S)
        self._arrivals = [*self._arrivals, arrival]  # before a request can resume from it
        self.ends.put(Verified(copy.op, good, bad))
        try:
            self._copies.load(pages, ready, arrival.came)
        except BaseException as e:  # whatever it is, the requests that wait for a layer are told
            arrival.fail(e)  # it stays, so that no request takes the pages for whole
            raise
        self._arrivals = [each for each in self._arrivals if each is not arrival]
        self.flows[LOAD].moved(time.perf_counter() - began, _chosen(copy.pages, good))
        return good, bad

    def _store(self, sent: Sequence[tuple[StorageConnection, Copy]]) -> list[Outcome]:
        """Several copies to one storage in one put. A put keeps an object that exists, so no probe comes first."""
        connection, began = sent[0][0], time.perf_counter()
        outcomes: list[list[int]] = [[0, 0] for _ in sent]
        pages = [(at, i, copy.root, page) for at, (_, copy) in enumerate(sent) for i, page in enumerate(copy.pages)]
        names, records, told = list[str](), list[memoryview](), list[tuple[int, int, int]]()
        with self._checking:  # one worker at a time, so that the first one's put starts early
            for at, i, root, page in pages:
                record = self._host[page.pool].record(page.source)
                if self._verify_host and not self._host[page.pool].stamp.intact(record, page.key):
                    outcomes[at][1] |= 1 << i
                    continue
                parts = self._host[page.pool].parts
                if parts.writes(page.key):
                    named = parts.names(root, page.key)
                    names += named
                    records += parts.cut(record, page.key)
                    told.append((at, i, len(named)))
                else:
                    outcomes[at][0] |= 1 << i
        moved = [sent[at][1].pages[i] for at, i, count in told for _ in range(count)]  # the page of each record
        compared = self._new(connection, names, records, moved)
        stored = connection.put(names, [(record,) for record in records]) if names else []
        compared = {number: before for number, before in compared.items() if stored[number]}
        altered = self._altered_there(connection, names, records, moved, compared)
        kept_there = iter([done and number not in altered for number, done in enumerate(stored)])
        for at, i, count in told:
            outcomes[at][0] |= all([*islice(kept_there, count)]) << i
        kept = [page for (good, _), (_, copy) in zip(outcomes, sent, strict=True) for page in _chosen(copy.pages, good)]
        written = [page for page in kept if self._host[page.pool].parts.writes(page.key)]
        self.flows[STORE].moved(time.perf_counter() - began, kept, written)
        refused = Refusal.NONE if all(stored) else connection.refusal()
        return [(good, bad, refused) for good, bad in outcomes]

    def _new(
        self, connection: StorageConnection, names: Sequence[str], records: Sequence[memoryview], moved: Sequence[Page]
    ) -> dict[int, int]:
        """By number, the fingerprints of sampled records that a storage does not have yet: one that it has is kept, and
        may differ by rounding."""
        sampled = [number for number, page in enumerate(moved) if self.fingerprints.samples(page.key)]
        there = connection.exists([names[number] for number in sampled]) if sampled else []
        return {
            number: fingerprint(records[number][HEADER_BYTES:])
            for number, known in zip(sampled, there, strict=True)
            if not known
        }

    def _altered_there(
        self,
        connection: StorageConnection,
        names: Sequence[str],
        records: Sequence[memoryview],
        moved: Sequence[Page],
        before: dict[int, int],
    ) -> set[int]:
        """The numbers of those that a storage gives back as other bytes; they are deleted there."""
        if not before:
            return set()
        copies = [zeros(len(records[number])) for number in before]
        sizes = connection.storage.get([names[number] for number in before], copies)
        altered = set()
        for (number, taken), copy, size in zip(before.items(), copies, sizes, strict=True):
            pool, key = self._host[moved[number].pool].pool.name, moved[number].key
            if size is not None and not self.fingerprints.equal(
                _edge(Tier.HOST, Tier.STORAGE), pool, key, taken, fingerprint(copy[HEADER_BYTES:])
            ):  # one that has been evicted since is not compared
                altered.add(number)
        connection.delete_damaged([names[number] for number in altered])
        return altered

    def _fetch(self, connection: StorageConnection, copy: Copy) -> tuple[int, int]:
        began, arenas = time.perf_counter(), [self._host[page.pool] for page in copy.pages]
        names = [arena.parts.names(copy.root, page.key) for arena, page in zip(arenas, copy.pages, strict=True)]
        blanks = [arena.parts.blanks(arena.record(page.target)) for arena, page in zip(arenas, copy.pages, strict=True)]
        sizes = iter(connection.storage.get([*chain(*names)], [*chain(*blanks)]))
        good = bad = 0
        spoilt: list[str] = []
        for i, (page, arena) in enumerate(zip(copy.pages, arenas, strict=True)):
            found = [*zip(names[i], blanks[i], islice(sizes, len(names[i])), strict=True)]
            whole = [
                size == len(part) and arena.parts.intact(number, part, page.key)
                for number, (_, part, size) in enumerate(found)
            ]
            damaged = [name for (name, _, size), fine in zip(found, whole, strict=True) if not (size is None or fine)]
            if all(whole):
                good |= self._take(page, blanks[i]) << i
            elif damaged:
                spoilt += damaged
                bad |= 1 << i
        self.flows[FETCH].moved(time.perf_counter() - began, _chosen(copy.pages, good))
        connection.delete_damaged(spoilt)
        return good, bad

    def _take(self, page: Page, parts: Sequence[memoryview]) -> bool:
        """Take over a page from storage, whose parts have passed their check: their seals are its fingerprints from
        before they were stored. False: its slot has other bytes then."""
        arena = self._host[page.pool]
        sampled = self.fingerprints.samples(page.key)
        before = fingerprint(*(part[HEADER_BYTES:] for part in parts)) if sampled else 0
        arena.take(page.target, page.key, parts)
        if not sampled:
            return True
        there = arena.parts.cut(arena.record(page.target), page.key)
        after = fingerprint(*(part[HEADER_BYTES:] for part in there))
        return self.fingerprints.equal(_edge(Tier.STORAGE, Tier.HOST), arena.pool.name, page.key, before, after)

    def _sampled(self, copy: Copy, good: int) -> dict[int, Sampled]:
        """The pages of a copy between device and host that are compared, by their number in it."""
        up = copy.target is Tier.DEVICE
        return {
            i: (page.pool, page.target, page.source) if up else (page.pool, page.source, page.target)
            for i, page in enumerate(copy.pages)
            if good >> i & 1 and self.fingerprints.samples(page.key)
        }

    def _altered(self, copy: Copy, sampled: dict[int, Sampled], found: Compared) -> int:
        """The pages of a copy that came out as other bytes."""
        altered, edge = 0, _edge(copy.source, copy.target)
        for i, (before, after) in zip(sampled, found, strict=True):
            page = copy.pages[i]
            pool = self._host[page.pool].pool.name
            altered |= (not self.fingerprints.equal(edge, pool, page.key, before, after)) << i
        return altered

    def _probe(self, sent: Sequence[tuple[StorageConnection, Probe]]) -> list[Outcome]:
        """Which pages of several prompts one storage has, in one call."""
        asked = [[self._host[page.pool].parts.names(probe.root, page.key) for page in probe.pages] for _, probe in sent]
        names = [*dict.fromkeys(name for pages in asked for parts in pages for name in parts)]
        began = time.perf_counter()
        there = dict(zip(names, sent[0][0].exists(names), strict=True))
        seconds = time.perf_counter() - began
        found = [sum(all(map(there.get, parts)) << i for i, parts in enumerate(pages)) for pages in asked]
        seen = [page for good, (_, probe) in zip(found, sent, strict=True) for page in _chosen(probe.pages, good)]
        self.flows[PROBE].probed(seconds, [page for _, probe in sent for page in probe.pages], seen)
        return [(good, 0) for good in found]


def _edge(source: Tier, target: Tier) -> tuple[str, str]:
    return source.name.lower(), target.name.lower()


def _all(pages: Sequence[Page]) -> int:
    return (1 << len(pages)) - 1


def _chosen(pages: Sequence[Page], bits: int) -> list[Page]:
    return [page for i, page in enumerate(pages) if bits >> i & 1]


def _by_pool(pages: Sequence[Page]) -> dict[int, list[tuple[int, Page]]]:
    by_pool: dict[int, list[tuple[int, Page]]] = {}
    for i, page in enumerate(pages):
        by_pool.setdefault(page.pool, []).append((i, page))
    return by_pool
