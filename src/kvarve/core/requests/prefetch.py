"""Prefetch: probe storage for a waiting prompt's pages and fetch them to the host, within a share of the host.

A waiting request holds no device slots, and in the host only the pages that were fetched for it. All waiting requests
and stores in flight together hold at most a set share of the host; a request that finds the share full waits until
another request's pages have been loaded.
"""

from math import inf

from kvarve.core.context import Context
from kvarve.core.copies.in_flight import FETCH, PROBE, Op, Part, PartOutcome, batches, note_asked, note_bad, note_come
from kvarve.core.lease import Cause, Lease, Phase
from kvarve.core.requests.paths import Paths
from kvarve.core.tree.tree import NOWHERE, same_pages, upward, walk
from kvarve.pages.boundaries import chosen, deepest, members, needed, of, ones, span
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import Tier

ASK_AGAIN_S = 0.05  # until storage is asked again for the last of the pages that are being written to it
ASK_ALL_S = 1.0  # until it is asked again for all of them
LOOK_AGAIN_S = 1.0  # until a request that still waits is looked up in storage again
LOOK_AHEAD = 16  # the requests that wait longest, which are
EVICTION_RETRIES = 8  # how often a lease waits for evictions under write-back before it takes a shallower boundary


class Prefetch:
    def __init__(self, context: Context, paths: Paths, leases: dict[int, Lease]) -> None:
        """`leases`: all that are open, by number, the oldest first."""
        self._context, self._counters, self._paths, self._leases = context, context.counters, paths, leases
        self._backups, self._residency = paths.backups, paths.residency
        self._copies, self._storage, self._share = paths.backups.copies, paths.backups.storage, paths.backups.host_share
        self._pools, self._deadline_s = paths.pools, context.config.policies.storage_deadline_s
        self.held = [0] * len(self._pools)  # host slots by pool that waiting requests hold
        # Fetches in flight, by the beginning of their prompts, the lease that began them, and number.
        self.flying: dict[bytes, dict[int, dict[int, Op]]] = {}
        self.landing: dict[int, Lease] = {}  # by number, leases with landed pages that are not in the tree yet
        self.deferred: dict[int, Lease] = {}  # by number, leases that wait for host slots, in order

    # --- waiting

    def _in_memory(self, lease: Lease) -> tuple[int, list[int]]:
        """The boundary that memory could serve a lease, and by pool the pages in memory."""
        _, path, known = self._paths.find(lease.root, lease.tokens)
        _, memory = self._paths.present(path, known, lease.outside)
        return deepest(self._paths.legal(memory, lease)), memory

    def queue(self, lease: Lease) -> None:
        """A lease waits for its turn: what memory could serve now is promised to it."""
        lease.promised, _ = self._in_memory(lease)

    def begin(self, lease: Lease) -> None:
        """A lease is opened: ask storage for what memory lacks."""
        lease.promised, memory = self._in_memory(lease)
        self.ask(lease, lease.promised, memory)

    def look_again(self, lease: Lease) -> bool:
        """Whether storage is asked again about a lease that waited: of what it was promised pages may have been evicted
        meanwhile, and others may have come to storage."""
        now = self._context.now
        late = now >= lease.looked_s + LOOK_AGAIN_S
        if not self._storage.attached or not lease.reads or not (late or lease.claimed):
            return False
        boundary, memory = self._in_memory(lease)
        if not late and boundary >= lease.promised and not (now > lease.looked_s and self._was_stored(lease)):
            return False
        lease.looked_s, lease.promised = now, boundary
        lease.asked_again = self.ask(lease, boundary, memory)
        return lease.asked_again

    def _was_stored(self, lease: Lease) -> bool:
        """Whether a prompt's pages behind those that the tree knows were stored before they left memory."""
        _, _, known = self._paths.find(lease.root, lease.tokens)
        left = self._paths.tree.ghosts.of(lease.root, lease.tokens, known)
        return any(tier is Tier.STORAGE for tier, _ in left.tiers)

    def begin_load(self, lease: Lease) -> None:
        """A lease waits for a load from now on."""
        lease.deadline = self._context.now + self._context.config.load_deadline_s

    def postpone(self, lease: Lease, seconds: float) -> None:
        """The clock by which a lease was opened was behind by `seconds`."""
        lease.expected_until += seconds
        lease.deadline += seconds
        lease.looked_s += seconds
        lease.latest += seconds
        lease.asked_s = None if lease.asked_s is None else lease.asked_s + seconds

    def _wait(self, lease: Lease) -> None:
        """Its patience with storage runs from now on."""
        lease.deadline = min(self._context.now + lease.wait_s, lease.latest)

    # --- probing

    def ask(self, lease: Lease, boundary: int, memory: list[int]) -> bool:
        """Probe storage for pages beyond a boundary; False if there is no page to ask for. `memory`: by pool, which
        pages memory has, an engine's blocks included."""
        asks = self._storage.attached and lease.patience.asks
        parts = self._worth_asking(lease, boundary, self._kept(lease, memory)) if asks else []
        if parts:
            missing = (lease.limit - boundary) * self._paths.page_tokens
            lease.move(Cause.PROBE)
            lease.looked_s = self._context.now
            lease.asked_s = self._context.now if lease.asked_s is None else lease.asked_s
            lease.begun, lease.wait_s = False, lease.patience.seconds(missing)
            # A request without patience does not wait for a worker either.
            queue_s = inf if lease.patience.each else self._deadline_s if lease.wait_s else 0.0
            lease.latest = self._context.now + lease.wait_s + queue_s
            self._wait(lease)
            lease.probed, lease.awaited, lease.joined = ([0] * len(self._pools) for _ in range(3))
            lease.told, lease.ask_all = 0, self._context.now + ASK_ALL_S
            self._paths.name(lease)
            self._copies.send(Op(PROBE, parts, lease, wait_s=lease.latest - self._context.now))
        return bool(parts)

    def _worth_asking(self, lease: Lease, boundary: int, memory: list[int]) -> list[Part]:
        """The pages that memory lacks and that could make a boundary deeper than this one legal."""
        grid = self._paths.grid
        deepest_line = lease.limit // grid * grid
        if (deepest_line - boundary) * self._paths.page_tokens < max(1, self._context.config.policies.fetch_at_least):
            return []
        parts = list[Part]()
        for pool, lookback in enumerate(self._paths.lookbacks):
            first = boundary // grid * grid + grid
            if lookback is None:
                want = ones(deepest_line)
            elif lookback >= grid:
                want = span(max(0, first - lookback), deepest_line)
            else:
                want = 0
                for deeper in range(first, deepest_line + 1, grid):
                    want |= needed(deeper, lookback)
            if asked := want & ~memory[pool]:
                parts.append(_asked(pool, asked))
        return parts

    def _kept(self, lease: Lease, memory: list[int]) -> list[int]:
        """By pool, the pages that need not be fetched. A chain's fetched pages rest on the host's own, so pages of
        chains that only an engine has are fetched too."""
        if not any(lease.outside):
            return memory
        _, path, known = self._paths.find(lease.root, lease.tokens)
        _, ours = self._paths.present(path, known)
        return [
            here if lookback is None else all_
            for lookback, here, all_ in zip(self._paths.lookbacks, ours, memory, strict=True)
        ]

    def began(self, lease: Lease) -> None:
        """A worker has begun a copy or probe that a lease waits for."""
        if not lease.begun or lease.patience.each:
            lease.begun = True
            self._wait(lease)

    def moved(self) -> None:
        """Copies from storage make progress: restart the patience of leases that still wait behind others."""
        for lease in self._leases.values():
            if lease.phase in (Phase.PROBING, Phase.FETCHING) and not lease.begun:
                self._wait(lease)

    def _waits_again(self, lease: Lease) -> None:
        """A lease's next copy has not begun: stop its patience, and keep what is left of it."""
        if lease.begun and not lease.patience.each:
            lease.wait_s = max(0.0, lease.deadline - self._context.now)
        lease.begun = False

    def answered(self, lease: Lease, outcomes: list[PartOutcome]) -> bool:
        """Storage has answered a probe. False if pages are still being written, so that it is asked again."""
        lease.looked_s = now = self._context.now
        for outcome in outcomes:
            (pool, asked, *_), good, _ = outcome
            expected = needed(lease.expected, self._paths.lookbacks[pool]) if now < lease.expected_until else 0
            waits = outcome.lost & expected
            lease.awaited[pool] = lease.awaited[pool] & ~asked | waits
            lease.probed[pool] |= good
            lease.told |= asked & ~waits
            self._lost(lease, pool, outcome.lost & ~waits)
        if any(lease.awaited):
            came = not any(outcome.lost for outcome in outcomes)  # then most of the others have come too
            lease.ask_again = now if came else now + ASK_AGAIN_S
            lease.ask_all = now if came else lease.ask_all
            return False
        return True

    def _lost(self, lease: Lease, pool: int, positions: int) -> None:
        """Storage lacks these pages of a lease: those that the tree takes for stored are dirty again."""
        top = self._paths.tree.roots.get(lease.root)
        path, known = walk(top, lease.tokens) if top and positions else ([], 0)
        for run, local in reversed(upward(path[-1], positions & ones(known)) if path else []):
            self._paths.dirty.lose(run, pool, local)
        for tell in self._context.tell.lacks:  # also of pages that only storage had
            for position in members(positions):
                tell(pool, lease.key(position))

    def ask_again(self, lease: Lease) -> None:
        """Probe storage for pages that were being written to it, if it is time: for the last one of each pool, and for
        all of them now and then, or once those have come or no more are expected."""
        now = self._context.now
        if lease.phase is not Phase.PROBING or lease.ops or now < lease.ask_again:
            return
        all_of_them = now >= min(lease.ask_all, lease.expected_until)
        if all_of_them:
            lease.ask_all = now + ASK_ALL_S
        lease.ask_again = inf
        lease.move(Cause.PROBE)
        awaited = lease.awaited if all_of_them else [span(max(0, n - 1), n) for n in map(int.bit_length, lease.awaited)]
        parts = [_asked(pool, positions) for pool, positions in enumerate(awaited) if positions]
        self._copies.send(Op(PROBE, parts, lease, wait_s=max(0.0, lease.latest - now)))

    # --- fetching

    def fetch(self, lease: Lease) -> bool:
        """Fetch to the host the pages that the deepest boundary needs; False if there are none to wait for."""
        waits = self._fetch(lease)
        if not waits or lease.ops:
            self.deferred.pop(lease.number, None)
        else:
            self._waits_again(lease)
            self.deferred.setdefault(lease.number, lease)  # a lease that tries again keeps its position
        return waits

    def _fetch(self, lease: Lease) -> bool:
        """The same; True without a copy in flight if there are no free slots yet."""
        beginning = self._beginning(lease.root, lease.tokens)
        for other in [*self.landing.values()]:
            if self._beginning(other.root, other.tokens) == beginning:
                self.land(other)  # what has come for it may be what this one lacks
        allowed, available = -1, [len(lease.tokens)] * len(self._pools)
        while self._storage.attached:
            # Anew each time: evicting for it may have cost a page of it.
            run, path, known = self._paths.find(lease.root, lease.tokens)
            device, memory = self._paths.present(path, known, lease.outside)
            kept = self._kept(lease, memory)
            both = [here | far for here, far in zip(kept, lease.probed, strict=True)]
            boundary = deepest(self._paths.legal(both, lease) & allowed)
            gain = boundary - deepest(self._paths.legal(memory, lease))
            if gain * self._paths.page_tokens < max(1, self._context.config.policies.fetch_at_least):
                break
            need = [needed(boundary, back) & ~here for back, here in zip(self._paths.lookbacks, kept, strict=True)]
            positions, prefix_pins = self._paths.pins_for(boundary, device)
            guard = positions & ones(known), (prefix_pins | self._paths.ahead(memory)) & ones(known)
            if self._join(lease, need):
                if lease.claimed:
                    self._paths.hold(lease, run, guard[0] | lease.held, guard[1] | lease.prefix_pins)
                lease.promised = boundary
                return True
            pages = [bits.bit_count() for bits in need]
            fits = self._share.fits(pages, lease.lent)
            if fits and lease.claimed:
                self._take_share(pages)
            if fits and not self._room_in_share(pages):
                if not (lease.claimed and any(lease.lent)):
                    self._note_deferred(lease, gain)
                    return True
                fits = False  # two claimed leases would wait for each other's slots
            if fits:
                # Its pages in memory must not be evicted for the others.
                self._residency.pin(run, *guard)
                taken = self._paths.reserve(lease, Tier.HOST, need, available)
                if taken is not None:
                    if lease.claimed:
                        self._paths.hold(lease, run, guard[0] | lease.held, guard[1] | lease.prefix_pins)
                    self._send(lease, need, taken, boundary)
                self._residency.unpin(run, *guard)
                if taken is not None:
                    self._counters.fetching_tokens += gain * self._paths.page_tokens
                    return True
                if self.put_off(lease):
                    self._note_deferred(lease, gain)
                    return True
            allowed = ones(boundary)
        return False

    def _join(self, lease: Lease, need: list[int]) -> bool:
        """Wait for the pages, of those that a lease needs, that other leases' fetches bring; False if there are none. A
        fetch is not worth it that has run for longer than the lease waits for its own.

        If such a fetch fails the lease tries once itself, or with others that do.
        """
        coming, joined = [0] * len(self._pools), dict[int, Op]()
        for ops in self.flying.get(self._beginning(lease.root, lease.tokens), {}).values():
            tokens = next(iter(ops.values())).tokens
            most = min(len(tokens), len(lease.tokens)) // self._paths.width
            same = ones(same_pages(tokens, lease.tokens, 0, most, self._paths.width))
            wanted = [bits & same for bits in need]
            for number, op in ops.items() if any(wanted) else ():
                soon = self._context.now < op.begun_s + (lease.patience.base_s or self._deadline_s)
                if soon and any(part.positions & wanted[part.pool] for part in op.parts):
                    joined[number] = op
                    for part in op.parts:
                        coming[part.pool] |= part.positions & wanted[part.pool]
        if not joined:
            return False
        self._waits_again(lease)
        lease.move(Cause.FETCH)
        for number in joined:
            self._copies.join(lease, number)
        if lease.claimed:
            self._copies.hurry(lease)
        if any(op.begun_s < inf for op in joined.values()):
            self.began(lease)
        lease.probed = [has & ~(bits & old) for has, bits, old in zip(lease.probed, coming, lease.joined, strict=True)]
        lease.joined = [old | bits for old, bits in zip(lease.joined, coming, strict=True)]
        note_asked(lease, coming)
        return True

    def _note_deferred(self, lease: Lease, gain: int) -> None:
        """A lease waits for host slots before it fetches what moves its boundary by `gain` pages."""
        if lease.number not in self.deferred:
            self._counters.deferred_tokens += gain * self._paths.page_tokens

    def _room_in_share(self, pages: list[int]) -> bool:
        return self._share.fits(pages, self.held, self._backups.storing)

    def _take_share(self, pages: list[int]) -> None:
        """Take share for a claimed lease from leases that still wait: their landed pages stay, but unpinned."""
        for other in reversed(self._leases.values()):
            if self._room_in_share(pages):
                return
            if not other.claimed and not other.ops and any(other.lent):
                self._give_share_back(other)
                self._paths.hold(other, other.run, 0, 0)

    def put_off(self, lease: Lease) -> bool:
        """Whether a lease that found no slots should try again in the next step, since evictions are under way."""
        lease.retries += 1
        return self._backups.leaving() and lease.retries <= EVICTION_RETRIES

    def _send(self, lease: Lease, need: list[int], taken: list[list[int]], boundary: int) -> None:
        self._waits_again(lease)
        lease.move(Cause.FETCH)
        lease.promised = boundary
        parts = [Part(pool, bits, [NOWHERE] * len(taken[pool]), taken[pool]) for pool, bits in enumerate(need) if bits]
        for pool, slots in enumerate(taken):
            self.held[pool] += len(slots)
            lease.probed[pool] &= ~need[pool]  # a page whose fetch fails is not fetched again
        note_asked(lease, need)
        # Shallow pages first: if patience runs out, the pages that have arrived are a prefix.
        ops = self.flying.setdefault(self._beginning(lease.root, lease.tokens), {}).setdefault(lease.number, {})
        for batch in batches(parts, self._context.config.batch_pages):
            op = Op(FETCH, batch, lease, tokens=lease.tokens, wait_s=lease.latest - self._context.now)
            self._copies.send(op)
            ops[self._copies.sent] = op

    def _forget_flying(self, op: Op, number: int) -> None:
        assert op.lease is not None
        beginning = self._beginning(op.lease.root, op.tokens)
        if (leases := self.flying.get(beginning)) and (ops := leases.get(op.lease.number)):
            ops.pop(number, None)
            if not ops:
                del leases[op.lease.number]
            if not leases:
                del self.flying[beginning]

    def _beginning(self, root: bytes, tokens: bytes) -> bytes:
        """What prompts that share pages have in common: the root key and the first page."""
        return root + tokens[: self._paths.width]

    def next_in_line(self) -> list[Lease]:
        """The lease that may try again for slots now: the first claimed one, else the first of all."""
        waiting = [*self.deferred.values()]
        return [lease for lease in waiting if lease.claimed][:1] or waiting[:1]

    # --- fetches that have ended

    def void(self, number: int, op: Op, gone: bool) -> None:
        """A fetch's storage is down; if it is `gone`, its share of the host is free for the next storage."""
        self._forget_flying(op, number)
        for part in op.parts if gone and op.counts else ():
            self.held[part.pool] -= part.positions.bit_count()

    def arrived(self, number: int, op: Op, outcomes: list[PartOutcome], waiting: list[Lease]) -> None:
        """A fetch has ended: the first of the leases that waited for it takes its pages. Those that none waited for are
        kept if they fit into the tree."""
        assert op.lease is not None
        self._forget_flying(op, number)
        late: list[dict[int, int]] = [{} for _ in self._pools]
        for outcome in outcomes:
            (pool, positions, _, targets), good, bad = outcome
            self._counters.fetched += good.bit_count()
            self._counters.bad_storage += bad.bit_count()
            self._counters.failed += outcome.failed.bit_count()
            taken = 0
            for lease in reversed(waiting):
                mine = positions if lease is op.lease else positions & lease.joined[pool]
                if bad & mine:
                    note_bad(lease, pool, bad & mine)
                lease.fetched[pool] |= good & mine
                taken = good & mine  # in the end by the first
            if taken:
                waiting[0].landed[pool].update(zip(members(taken), chosen(targets, positions, taken), strict=True))
                waiting[0].lent[pool] += taken.bit_count()
                self.landing[waiting[0].number] = waiting[0]
            if not (left := positions & ~taken):
                continue
            self.held[pool] -= left.bit_count() * op.counts
            if kept := of(at for at in members(good & left) if _still_named(op.lease, op.named, at)):
                late[pool] = dict(zip(members(kept), chosen(targets, positions, kept), strict=True))
            left &= ~kept
            if left:
                place = self._paths.slot_pools.place(Tier.HOST, pool)
                self._residency.give_back(place, chosen(targets, positions, left), op.lease.root)
        if waiting and (len(waiting) > 1 or not waiting[0].ops or any(late)):
            self.land(waiting[0])
        if any(late):
            self._counters.late += sum(map(len, late))
            self._paths.insert(op.lease, Tier.HOST, late, stored=not op.void)
            self._paths.tree.forget(op.lease.root)

    def land(self, lease: Lease) -> None:
        """Give the landed pages to the tree, as deep as they reach; the lease pins them until they are loaded. Those
        behind a gap stay its own while it waits for more."""
        if self.landing.pop(lease.number, None) is None:
            return
        landed, lease.landed = lease.landed, [{} for _ in self._pools]
        if lease.ops:
            end = self._paths.chain_end(lease, landed)
            lease.landed = [{at: slot for at, slot in slots.items() if at >= end} for slots in landed]
            landed = [{at: slot for at, slot in slots.items() if at < end} for slots in landed]
            if any(lease.landed):
                self.landing[lease.number] = lease
            if not any(landed):
                return
        tail, end = self._paths.insert(lease, Tier.HOST, landed, stored=True)
        held, prefix_pins = lease.held, lease.prefix_pins
        for lookback, slots in zip(self._paths.lookbacks, landed, strict=True):
            kept = [position for position in slots if position < end]
            if lookback is None:
                prefix_pins |= of([max(kept)] if kept else [])
            else:
                held |= of(kept)
        self._paths.hold(lease, tail, held, prefix_pins)

    def fetched_by(self, lease: Lease, other: Lease) -> None:
        """What a lease finds in the host of its request's prompt came from storage by another lease."""
        lease.fetched = [*other.fetched]

    def end(self, lease: Lease) -> None:
        """A lease waits for storage no longer: of what was fetched for it, that is late which is not in the tree."""
        if lease.asked_s is not None:
            for tell in self._context.tell.waited:
                tell(self._context.now - lease.asked_s)
            lease.asked_s = None
        if lease.phase is not Phase.QUEUED:
            lease.move(Cause.DONE)
        if any(lease.fetched):
            known = ones(self._paths.find(lease.root, lease.tokens)[2])
            note_come(lease, [came & known for came in lease.fetched])
        lease.ask_again = inf
        self.deferred.pop(lease.number, None)

    def release(self, lease: Lease) -> None:
        """A lease gives back its share of the host, as it needs storage no longer."""
        self.deferred.pop(lease.number, None)
        self._give_share_back(lease)

    def _give_share_back(self, lease: Lease) -> None:
        if any(lease.lent):
            self.held = [held - lent for held, lent in zip(self.held, lease.lent, strict=True)]
            lease.lent = [0] * len(self._pools)


def _asked(pool: int, positions: int) -> Part:
    """Pages that storage is asked for."""
    nowhere = [NOWHERE] * positions.bit_count()
    return Part(pool, positions, nowhere, nowhere)


def _still_named(lease: Lease, named: bytes, position: int) -> bool:
    """Whether a lease's page has the name that it had when it was asked for: its last tokens may have been replaced."""
    at = position * KEY_BYTES
    return position < lease.pages and lease.keys[at : at + KEY_BYTES] == named[at : at + KEY_BYTES]
