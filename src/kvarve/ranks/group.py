"""The agreement of ranks in several processes: rank 0 orders the inputs of all, and sends them once a turn.

A turn in which something is in flight begins with one exchange: every rank reports to rank 0, whose answer is the
turn's inputs. In any other turn rank 0 sends the inputs and waits for no rank; what another rank has to say meanwhile
(its storage went down, a change that it proposes) it sends unasked, and rank 0 makes the next turn an exchange.

Events go to rank 0 the moment that they happen, so that it takes the next turn when one has happened on every rank.

A rank that is late, dead or different ends the group: rank 0 names it, and tells the others before it closes.
"""

import logging
import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from typing import NamedTuple

from kvarve.core.copies.effects import Began, Ended, Event, Refusal, Verified
from kvarve.ranks.agreement import AgreedStep, Agreement, Proposal, Votes, granted
from kvarve.ranks.star import Dead, GroupEnded, Late, Star, named

log = logging.getLogger(__name__)

KINDS: tuple[type[Event], ...] = (Began, Verified, Ended)
_REPORT = struct.Struct("<BQIBQH")  # kind, turn, digest, flags, proposal, events
_INPUTS = struct.Struct("<BQdBHI")  # kind, turn, time, flags, events, bytes of what rank 0 says
_NEWS = struct.Struct("<BQH")  # kind, number of the group, events
_EVENT = struct.Struct("<BQHH")
REPORT, INPUTS, FAILED, STUCK, END, NEWS = range(6)  # kinds of frames
_NEWS_KIND = bytes([NEWS])
REFUSED_BITS = 4  # of an event's kind, below why a storage refused pages
TURN_BITS = 48  # of a turn's number, below the number of its group
UP, PROPOSES, READY = 1, 2, 4  # flags of a report
ALL_UP, GRANTED, REFUSED, ATTEND = 1, 2, 4, 8  # flags of inputs
SLACK = 1.25  # a rank whose model waits for another one says so within the deadline; rank 0 waits a little longer
GRACE = 0.5  # of the deadline, once one rank has failed: for the others to say so too
ALL = 2.0  # of the deadline: when rank 0 has said which rank is at fault, or is so itself
BEGUN_S = 0.005  # how long rank 0 sleeps on when a copy has begun on all ranks
NEWS_EVENTS = 8  # in a frame, at most
UNREADABLE = "it has sent a frame that cannot be read: all ranks need one version of kvarve"
DEAD, LATE = "it is dead: it has closed its socket", "it is late: nothing comes from it"


class Told(NamedTuple):
    """What rank 0 knows of a rank: the last that it said."""

    up: bool = True
    proposal: Proposal | None = None


PLAIN = Told()


class Group(Agreement):
    """The agreement of one rank with the others of its star."""

    def __init__(self, star: Star) -> None:
        self.rank, self.ranks = star.rank, star.ranks
        self._star = star
        self._digest = 0  # of what this rank's core has decided so far
        self._votes = Votes(star.ranks)
        self._news: list[list[Event]] = [[] for _ in range(star.ranks)]  # by rank, not counted yet
        self._happened: list[Event] = []  # on every rank, and told to none yet
        self._own = deque[Event]()  # of this rank: rank 0 has not counted them, another has not sent them
        self._came = deque[tuple[int, bytes]]()  # from other ranks, for the next turn
        star.groups += 1
        self._number = star.groups  # what was said late in another group is not for this one
        self._turn = self._number << TURN_BITS
        self._told = [PLAIN] * star.ranks  # what rank 0 knows of each; of any other rank, what it has reported last
        self._down = list[int]()  # ranks whose storage is down, as rank 0 has said last
        self._attend = True  # the next turn is an exchange, whatever is in flight
        self._ended = ""
        self._missing: set[int] = set()  # ranks that have not reported in this exchange
        self.exchanges = 0  # so far
        self._be_patient(star.deadline_s)

    def _be_patient(self, deadline_s: float) -> None:
        """From now on a rank is late after this long without a frame of it. The other ranks wait for rank 0 until it
        has given up any of them."""
        self._deadline_s = deadline_s
        self._patience_s = deadline_s * (ALL if self.rank else 1.0)
        self._wait(self._patience_s)

    def _wait(self, deadline_s: float) -> None:
        for link in self._star.links.values():
            link.wait_at_most(deadline_s)

    @property
    def ended(self) -> bool:
        """Whether it has: by a rank's fault, or closed."""
        return bool(self._ended)

    def note(self, decided: bytes) -> None:
        self._digest = zlib.crc32(decided, self._digest)

    def agree(
        self,
        events: Iterable[Event],
        now: float,
        up: bool = True,
        proposal: Proposal | None = None,
        *,
        waiting: bool = True,
        says: bytes = b"",
    ) -> AgreedStep:
        """As every agreement's. GroupEnded if a rank is late, dead or different."""
        if self._ended:
            raise GroupEnded(self._ended)
        self._turn += 1
        exchange, news = waiting or self._attend, [*events]
        mine = Told(up, proposal) if proposal or not up else PLAIN
        self.exchanges += exchange
        if self.rank:
            return self._follow(mine, news, exchange)
        return self._lead(mine, news, now, exchange, says)

    def happened(self, event: Event) -> bool:
        """An event of this rank, from any thread; False if the group has ended. Rank 0 knows it at once, or from the
        next report if it reads too little for now: a lane waits for no rank."""
        if self._ended:
            return False
        if not self.rank:
            self._own.append(event)
            self._star.ring()
            return True
        with self._star.sending, suppress(Dead, Late):  # which the next turn finds too
            self._own.append(event)
            while some := [*islice(self._own, NEWS_EVENTS)]:
                head = _NEWS.pack(NEWS, self._number, len(some))
                if not self._star.links[0].offer(head + b"".join(map(_event_bytes, some))):
                    break
                for _ in some:
                    self._own.popleft()
        return True

    def wake(self) -> None:
        self._star.ring()

    def wait(self, timeout_s: float, woken: Callable[[], bool]) -> bool:
        """Of rank 0, between two turns: sleep until something has happened on every rank, or `woken`, or a rank has
        more to say than its report. False after `timeout_s`. If copies have only begun, it sleeps on for `BEGUN_S` or
        until anything else happens, since a turn costs every rank more than that."""
        end = self._star.clock() + timeout_s
        while True:
            self._count()
            if self._ended or woken() or not all(isinstance(event, Began) for event in self._happened):
                return True
            now = self._star.clock()
            end = min(end, now + BEGUN_S) if self._happened else end
            if self._happened and now >= end:
                return True
            if not (ready := self._star.ready(max(0.0, end - now))):
                return bool(self._happened)
            for rank in ready:
                if not rank:
                    continue  # it was rung for
                try:
                    frame = self._star.links[rank].receive()
                except (Dead, Late):  # which the next turn finds too
                    return True
                if not self._is_news(rank, frame):
                    self._came.append((rank, frame))
                    if frame[:1] != bytes([REPORT]):
                        return True

    def _count(self) -> None:
        """Rank 0 counts the events that have come since it last did."""
        while self._own:
            self._news[0].append(self._own.popleft())
        if any(self._news):
            self._happened += self._votes.merge(self._news)
            self._news = [[] for _ in range(self.ranks)]

    def fail(self, why: str, stuck: bool = False, gone: Collection[int] = ()) -> str:
        """This rank cannot go on: tell the others; the text says which rank is at fault. The group has ended then.

        `stuck`: it has waited for the others in vain, so that one that is dead or silent is at fault. `gone`: one
        of these is, as they have closed their links.
        """
        if self._ended:
            return self._ended
        if self.rank:
            verdict = f"rank {self.rank}: {why}"
            # Rank 0 waits alike and says so within its own grace, or it is stuck itself. A rank that knows which is at
            # fault need not hear it; rank 0 may wait for it where only its end is noticed.
            self._wait(self._star.deadline_s * (1.0 if stuck else GRACE))
            try:
                with suppress(Dead), self._star.sending:
                    self._star.links[0].send(bytes([STUCK if stuck else FAILED]) + why.encode())
                while (frame := self._star.links[0].receive())[:1] != bytes([END]):
                    pass
                verdict = frame[1:].decode(errors="replace")
            except Late:
                verdict = f"rank 0: {LATE}" if stuck else verdict
            except Dead:
                verdict = f"rank 0: {DEAD}" if stuck else verdict
            self._ended = verdict
            return verdict
        if stuck:
            return self._end({}, set(gone or self._star.links), why)
        return self._end({0: why}, set())

    def assemble(self, start_s: float) -> None:
        """Wait until all ranks are here, as after a step that takes each its own time: an exchange with more patience,
        when no copy is in flight. GroupEnded some time after `start_s`, and if one has failed meanwhile."""
        self._be_patient(start_s)
        self.agree((), 0.0, self._told[self.rank].up)
        self._be_patient(self._star.deadline_s)

    def close(self) -> None:
        """No turn follows on any rank."""
        self._ended = self._ended or "the group is closed"
        self._star.close()

    # --- any other rank

    def _follow(self, mine: Told, news: list[Event], exchange: bool) -> AgreedStep:
        link = self._star.links[0]
        try:
            with self._star.sending:
                if self._own:
                    news[:0] = [self._own.popleft() for _ in range(len(self._own))]
                if exchange or news or mine != self._told[self.rank]:
                    with suppress(Dead):  # rank 0 may have said why it ended before it closed
                        link.send(self._report(mine, news))
                    self._told[self.rank] = mine
            frame = link.receive()
        except Late:
            self._ended = f"rank 0: {LATE} for {self._patience_s:g} s"
            raise GroupEnded(self._ended) from None
        except Dead:
            self._ended = f"rank 0: {DEAD}"
            raise GroupEnded(self._ended) from None
        try:
            if frame[0] == END:
                self._ended = frame[1:].decode(errors="replace")
                raise GroupEnded(self._ended)
            kind, turn, now, flags, events, said = _INPUTS.unpack_from(frame)
            happened, at = _read_events(frame, _INPUTS.size, events)
        except (struct.error, IndexError):
            raise GroupEnded(self.fail(f"rank 0: {UNREADABLE}")) from None
        if (kind, turn) != (INPUTS, self._turn):
            raise GroupEnded(self.fail(_differing(self._turn, turn)))
        self._attend = bool(flags & ATTEND)
        decided = True if flags & GRANTED else False if flags & REFUSED else None
        return AgreedStep(happened, now, bool(flags & ALL_UP), decided, frame[at : at + said])

    def _report(self, mine: Told, news: list[Event]) -> bytes:
        if mine is PLAIN and not news:
            return _REPORT.pack(REPORT, self._turn, self._digest, UP, 0, 0)
        proposal = mine.proposal
        flags = UP * mine.up + PROPOSES * (proposal is not None) + READY * (proposal is not None and proposal.ready)
        what = 0 if proposal is None else _digest(proposal.what)
        head = _REPORT.pack(REPORT, self._turn, self._digest, flags, what, len(news))
        return head + b"".join(map(_event_bytes, news))

    # --- rank 0

    def _lead(self, mine: Told, news: list[Event], now: float, exchange: bool, says: bytes) -> AgreedStep:
        if mine.proposal is not None:  # as the others tell theirs
            mine = Told(mine.up, Proposal(str(_digest(mine.proposal.what)), mine.proposal.ready))
        self._told[0] = mine
        self._news[0] += news
        heard = self._hear(exchange)
        self._count()
        happened, self._happened = self._happened, []
        happened.sort(key=lambda event: (KINDS.index(type(event)), event.op))
        decided, self._attend, down = None, heard, list[int]()
        if any(told is not PLAIN for told in self._told):
            down = [rank for rank, told in enumerate(self._told) if not told.up]
            proposals = [told.proposal for told in self._told]
            # Only of what all ranks say in this very turn: any of them may have given up what it said before.
            decided = granted(proposals) if exchange else None
            self._attend = heard or (decided is None and any(each is not None for each in proposals))
        up = not down
        flags = ALL_UP * up + GRANTED * (decided is True) + REFUSED * (decided is False) + ATTEND * self._attend
        head = _INPUTS.pack(INPUTS, self._turn, now, flags, len(happened), len(says))
        frame = head + b"".join(map(_event_bytes, happened)) + says
        for rank, link in self._star.links.items():
            try:
                link.send(frame)
            except (Dead, Late) as e:
                self._part(rank, e)
        if down != self._down:  # said when the ranks go on: a log may wait for its reader
            self._down = down
            log.warning("storage is down on %s", named(down, ()) if down else "no rank")
        return AgreedStep(happened, now, up, decided, says)

    def _hear(self, exchange: bool) -> bool:
        """Read what the other ranks have sent, in an exchange until each has reported; whether any came unasked."""
        self._missing = missing = set(self._star.links) if exchange else set()
        unasked, plain = False, _REPORT.pack(REPORT, self._turn, self._digest, UP, 0, 0)
        for rank, frame in self._frames(self._star.clock() + self._deadline_s * SLACK):
            if frame == plain:  # as nearly every report is
                self._told[rank], turn = PLAIN, self._turn
            else:
                turn = self._take(rank, frame)
            unasked |= turn < self._turn or not exchange
            if turn == self._turn:
                missing.discard(rank)
                if exchange and not missing:
                    break
        if missing:
            self._part_late(missing)
        return unasked

    def _frames(self, end: float) -> Iterator[tuple[int, bytes]]:
        """What other ranks have sent, one after the other; until `end` while one is missing, else what is there."""
        while self._came:
            yield self._came.popleft()
        while ready := self._star.ready(max(0.0, end - self._star.clock()) if self._missing else 0.0):
            for rank in ready:
                if not rank:
                    continue  # it was rung for
                try:
                    frame = self._star.links[rank].receive()
                except (Dead, Late) as e:
                    self._part(rank, e)
                if not self._is_news(rank, frame):
                    yield rank, frame

    def _is_news(self, rank: int, frame: bytes) -> bool:
        """Whether a frame only tells of events, which count from now on."""
        if frame[:1] != _NEWS_KIND:
            return False
        try:
            _, number, count = _NEWS.unpack_from(frame)
            if number == self._number:
                self._news[rank] += _read_events(frame, _NEWS.size, count)[0]
        except (struct.error, IndexError):
            raise GroupEnded(self._end({rank: UNREADABLE}, set())) from None
        return True

    def _take(self, rank: int, frame: bytes) -> int:
        """One report; its turn."""
        if frame[:1] in (bytes([FAILED]), bytes([STUCK])):
            why, stuck = frame[1:].decode(errors="replace"), frame[0] == STUCK
            raise GroupEnded(self._end({rank: why}, self._missing - {rank} if stuck else set()))
        try:
            kind, turn, digest, flags, what, count = _REPORT.unpack_from(frame)
            events, _ = _read_events(frame, _REPORT.size, count)
        except (struct.error, IndexError):
            raise GroupEnded(self._end({rank: UNREADABLE}, set())) from None
        if kind == REPORT and turn >> TURN_BITS < self._number:  # of a group before
            return int(turn)
        if kind != REPORT or turn > self._turn:
            raise GroupEnded(self._end({rank: _differing(turn, self._turn)}, set()))
        if turn == self._turn and digest != self._digest:
            why = f"its decisions before turn {_in_group(turn)} differ from rank 0's"
            raise GroupEnded(self._end({rank: why}, set()))
        self._news[rank] += events
        proposal = Proposal(str(what), bool(flags & READY)) if flags & PROPOSES else None
        self._told[rank] = Told(bool(flags & UP), proposal) if proposal or not flags & UP else PLAIN
        return int(turn)

    def _part(self, rank: int, e: Exception) -> None:
        if isinstance(e, Late):
            self._part_late({rank})
        raise GroupEnded(self._end({rank: DEAD}, set()))

    def _part_late(self, ranks: set[int]) -> None:
        late = f"{LATE} for {self._deadline_s * SLACK:g} s"
        raise GroupEnded(self._end(dict.fromkeys(ranks, late), set()))

    def _end(self, failed: dict[int, str], asked: set[int], why: str = "") -> str:
        """End the group. The ranks `asked` have a moment to say anything: those that are dead or silent then are at
        fault, whatever the others say. `why`: if none is."""
        end, silent = self._star.clock() + GRACE * self._star.deadline_s, set(asked)
        dead: dict[int, str] = {}

        def heard(rank: int, frame: bytes) -> None:
            nonlocal failed, silent
            failed = {rank: frame[1:].decode(errors="replace")} if frame[:1] == bytes([FAILED]) else failed
            silent -= {rank} if self._lives(rank, frame) else set()

        for came in self._came:
            heard(*came)
        while silent and not dead and (ready := self._star.ready(max(0.0, end - self._star.clock()))):
            for rank in filter(None, ready):
                try:
                    frame = self._star.links[rank].receive()
                except (Dead, Late):
                    if rank in silent:  # else it has said why, and ended
                        dead[rank] = DEAD
                    self._star.leave(rank)
                    silent.discard(rank)
                else:
                    heard(rank, frame)
        guilty = dead or dict.fromkeys(silent, LATE) or failed
        self._ended = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(guilty.items())) or why
        for link in self._star.links.values():
            link.wait_at_most(0.1)
            try:
                link.send(bytes([END]) + self._ended.encode())
            except (Dead, Late):
                continue
        log.critical("the ranks end: %s", self._ended)  # once they know it: a log may wait for its reader
        return self._ended

    def _lives(self, rank: int, frame: bytes) -> bool:
        """Whether a rank is not stuck, by what it has sent. Its copies go on where it is, and what it said before this
        turn's model computed may be read only now."""
        if frame[:1] == _NEWS_KIND:
            return False
        if frame[:1] != bytes([REPORT]) or len(frame) < _REPORT.size:
            return True
        turn = _REPORT.unpack_from(frame)[1]
        return bool(turn > self._turn or (turn == self._turn and rank in self._missing))


def _in_group(turn: int) -> int:
    """A turn's number within its group, as messages show it."""
    return turn % (1 << TURN_BITS)


def _differing(its: int, of_first: int) -> str:
    return f"it is in turn {_in_group(its)}, and rank 0 in turn {_in_group(of_first)}"


def _digest(what: str) -> int:
    return zlib.crc32(what.encode()) | zlib.adler32(what.encode()) << 32


def _event_bytes(event: Event) -> bytes:
    if isinstance(event, Began):
        return _EVENT.pack(0, event.op, 0, 0)
    good, bad = (bits.to_bytes((bits.bit_length() + 7) // 8, "little") for bits in (event.good, event.bad))
    kind = KINDS.index(type(event)) | (event.refused << REFUSED_BITS if isinstance(event, Ended) else 0)
    return _EVENT.pack(kind, event.op, len(good), len(bad)) + good + bad


def _read_events(frame: bytes, at: int, count: int) -> tuple[list[Event], int]:
    """Events from a frame, and where they end."""
    events: list[Event] = []
    for _ in range(count):
        kind, op, good, bad = _EVENT.unpack_from(frame, at)
        at += _EVENT.size
        ends = at + good, at + good + bad
        fine, broken = (int.from_bytes(frame[start:end], "little") for start, end in pairwise((at, *ends)))
        at = ends[-1]
        what, refused = KINDS[kind & (1 << REFUSED_BITS) - 1], kind >> REFUSED_BITS
        if refused and (what is not Ended or refused not in tuple(Refusal)):
            raise IndexError(f"a {what.__name__} is not refused by {refused}")
        if what is Began:
            events.append(Began(op))
        else:
            events.append(Ended(op, fine, broken, Refusal(refused)) if what is Ended else Verified(op, fine, broken))
    return events, at
