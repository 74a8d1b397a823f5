"""Any life of a slot table agrees with a naive model of it, and breaks no law."""

from dataclasses import dataclass, field

from hf3fs_laws import audit
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvarve.storage.hf3fs.metadata.base import Extent, Slot
from kvarve.storage.hf3fs.metadata.entries import COMMITTED, Row
from kvarve.storage.hf3fs.metadata.table import QUARANTINE_S, SlotTable

K = 4096
FIRST = 10**11
LABELS = (b"one", b"two")
NAMES = [f"{group}{number}" for group in ("a-", "b-", "") for number in range(7)]
SIZE_OF = {name: K * (1 + at % 3) for at, name in enumerate(NAMES)}
name_lists = st.lists(st.sampled_from(NAMES), max_size=6)
labels, few = st.sampled_from(LABELS), st.integers(0, 5)
seconds = st.sampled_from([0.5, 5.0, 30.0])

Object = tuple[bytes, str]
Place = tuple[int, int]


@dataclass
class Naive:
    """Everything as lists and dicts, looked through from end to end."""

    now: float = 0.0
    objects: dict[Object, tuple[Slot, int]] = field(default_factory=dict)
    order: list[Object] = field(default_factory=list)  # committed and unpinned, the next victim first
    readers: dict[int, tuple[float, list[tuple[Object, Slot]]]] = field(default_factory=dict)
    requests: dict[tuple[bytes, int], tuple[float, dict[str, Slot]]] = field(default_factory=dict)
    quarantine: dict[Slot, float] = field(default_factory=dict)
    epochs: set[int] = field(default_factory=set)

    def pinned(self) -> set[Slot]:
        return {slot for _, entries in self.readers.values() for _, slot in entries}

    def taken(self) -> set[Place]:
        slots = [slot for slot, _ in self.objects.values()]
        slots += [slot for _, mine in self.requests.values() for slot in mine.values()]
        return {(slot.slot_bytes, slot.number) for slot in [*slots, *self.quarantine, *self.pinned()]}

    def use(self, found: list[Object]) -> None:
        for each in reversed(found):
            if each in self.objects and self.objects[each][0] not in self.pinned():
                self.order = [other for other in self.order if other != each] + [each]

    def unpin(self, reader: int) -> None:
        _, entries = self.readers.pop(reader, (0.0, []))
        self.use([each for each, slot in entries if self.objects.get(each, (None,))[0] == slot])

    def advance(self, seconds: float) -> None:
        self.now += seconds
        ends = [(until, reader) for reader, (until, _) in self.readers.items() if until <= self.now]
        for _, reader in sorted(ends, key=lambda end: end[0]):
            self.unpin(reader)
        for key in [key for key, (until, _) in self.requests.items() if until <= self.now]:
            until, mine = self.requests.pop(key)
            self.quarantine |= dict.fromkeys(mine.values(), until + QUARANTINE_S)
        self.quarantine = {slot: until for slot, until in self.quarantine.items() if until > self.now}

    def forget(self, each: Object) -> None:
        del self.objects[each]
        self.order = [other for other in self.order if other != each]

    def group_bytes(self, label: bytes, group: str) -> int:
        mine = [slot for (home, name), (slot, _) in self.objects.items() if (home, name[:2]) == (label, f"{group}-")]
        for (home, _), (_, reserved) in self.requests.items():
            mine += [slot for name, slot in reserved.items() if (home, name[:2]) == (label, f"{group}-")]
        return sum(slot.slot_bytes for slot in mine)


class Life(RuleBasedStateMachine):
    @initialize(slots=st.integers(3, 30), extents=st.sampled_from([1, 2, 4, 64]), quota=st.sampled_from([None, 4, 9]))
    def begin(self, slots: int, extents: int, quota: int | None) -> None:
        self.quota = None if quota is None else quota * K
        self.table = SlotTable(slots * K, self.quota, (FIRST, FIRST), journal=True, extents=extents)
        self.naive, self.extents = Naive(), extents
        self.journal: dict[Place, Row] = {}

    @rule(by=st.sampled_from([0.0, 0.1, 1.0, 10.0, 130.0]))
    def time_passes(self, by: float) -> None:
        self.naive.advance(by)
        self.table.touch(LABELS[0], [], self.naive.now)

    @rule(label=labels, names=name_lists)
    def exists(self, label: bytes, names: list[str]) -> None:
        assert self.table.exists(label, names) == [(label, name) in self.naive.objects for name in names]

    @rule(label=labels, names=name_lists, reader=few, pin_s=seconds)
    def lookup(self, label: bytes, names: list[str], reader: int, pin_s: float) -> None:
        naive = self.naive
        found = self.table.lookup(label, names, reader, pin_s, naive.now)
        naive.unpin(reader)
        assert [each and (each.slot, each.size_bytes) for each in found] == [
            naive.objects.get((label, name)) for name in names
        ]
        there = [(label, name) for name in names if (label, name) in naive.objects]
        if there:
            naive.readers[reader] = naive.now + pin_s, [(each, naive.objects[each][0]) for each in there]
        naive.order = [each for each in naive.order if each not in there]

    @rule(reader=few)
    def release(self, reader: int) -> None:
        self.table.release(reader, self.naive.now)
        self.naive.unpin(reader)

    @rule(label=labels, request=few, names=name_lists, for_s=seconds)
    def reserve(self, label: bytes, request: int, names: list[str], for_s: float) -> None:
        naive = self.naive
        _, mine = naive.requests.get((label, request), (0.0, {}))
        mine, free = {**mine}, naive.taken()
        answers = self.table.reserve(label, request, names, [SIZE_OF[name] for name in names], for_s, naive.now)
        leaving = {extent for extent, _, leaves in self.table.extents() if leaves}
        kept = {(label, name) for name in names}
        gone = [each for each in naive.objects if not self.table.exists(each[0], [each[1]])[0]]
        for each in gone:
            self.check_eviction(each, gone, kept, leaving)
        freed = {naive.objects[each][0][:2] for each in gone}
        for each in gone:
            naive.forget(each)
        for name, answer in zip(names, answers, strict=True):
            assert (answer is True) == ((label, name) in naive.objects)
            if isinstance(answer, Slot):
                assert answer.slot_bytes == SIZE_OF[name]
                if name in mine:
                    assert answer == mine[name]
                else:
                    assert answer[:2] not in free - freed
                    assert answer.epoch > FIRST
                    assert answer.epoch not in naive.epochs
                    assert answer[:2] not in {slot[:2] for slot in mine.values()}
                    naive.epochs.add(answer.epoch)
                    mine[name] = answer
            elif answer is False:
                self.check_refusal(label, name, kept)
        if mine:
            naive.requests[label, request] = naive.now + for_s, mine
        naive.use([each for each in ((label, name) for name in names) if each in naive.objects])
        if self.quota is not None:
            assert all(naive.group_bytes(home, group) <= self.quota for home in LABELS for group in "ab")

    def check_eviction(self, each: Object, gone: list[Object], kept: set[Object], leaving: set[Extent]) -> None:
        """Evicted: unpinned, not of this call, and the least recently used of its size, group or extent."""
        naive = self.naive
        assert each in naive.order
        assert each not in kept
        slot = naive.objects[each][0]
        before = naive.order[: naive.order.index(each)]
        stay = [other for other in before if other not in gone and other not in kept]
        of_size = not any(naive.objects[other][0].slot_bytes == slot.slot_bytes for other in stay)
        of_group = self.quota is not None and not any((o[0], o[1][:2]) == (each[0], each[1][:2]) for o in stay)
        assert of_size or (of_group and "-" in each[1]) or slot.extent in leaving

    def check_refusal(self, label: bytes, name: str, kept: set[Object]) -> None:
        """No room: nothing else of this size can be evicted, or the quota is full of what cannot."""
        free = [each for each in self.naive.order if each not in kept]
        of_size = [each for each in free if self.naive.objects[each][0].slot_bytes == SIZE_OF[name]]
        of_group = [each for each in free if (each[0], each[1][:2]) == (label, name[:2])]
        if self.table.retired([]):  # whose room comes first
            return
        assert not of_size or (self.quota is not None and "-" in name and not of_group)

    @rule(label=labels, request=few, among=st.sets(st.integers(0, 5)), late=st.booleans())
    def commit(self, label: bytes, request: int, among: set[int], late: bool) -> None:
        naive = self.naive
        _, mine = naive.requests.get((label, request), (0.0, {}))
        chosen = [(name, slot) for at, (name, slot) in enumerate(mine.items()) if at in among]
        if late:  # of another request, or an epoch that is over
            chosen += [(name, slot._replace(epoch=slot.epoch - 1)) for name, slot in mine.items()]
            chosen += [
                (name, slot)
                for key, (_, other) in naive.requests.items()
                if key != (label, request)
                for name, slot in other.items()
            ]
        names, slots = [name for name, _ in chosen], [slot for _, slot in chosen]
        done = self.table.commit(label, request, names, slots, [slot.slot_bytes - 5 for slot in slots], naive.now)
        fresh = []
        for name, slot in chosen[::-1]:
            if mine.get(name) == slot:
                del mine[name]
                if (label, name) not in naive.objects:
                    naive.objects[label, name] = slot, slot.slot_bytes - 5
                    naive.order.append((label, name))
                    fresh.append(name)
        if not mine:
            naive.requests.pop((label, request), None)
        assert all(answer for (name, _), answer in zip(chosen, done, strict=True) if name in fresh)
        for (name, _), answer in zip(chosen, done, strict=True):
            assert answer <= ((label, name) in naive.objects)
        again = self.table.commit(label, request, names, slots, [0] * len(names), naive.now)
        assert again == [(label, name) in naive.objects for name in names]

    @rule(label=labels, request=few, among=st.sets(st.integers(0, 5)))
    def abort(self, label: bytes, request: int, among: set[int]) -> None:
        naive = self.naive
        _, mine = naive.requests.get((label, request), (0.0, {}))
        given_up = {name: slot for at, (name, slot) in enumerate(mine.items()) if at in among}
        wrong = [slot._replace(epoch=slot.epoch - 1) for slot in mine.values()]
        self.table.abort(label, request, [*given_up.values(), *wrong], naive.now)
        for name, slot in given_up.items():
            del mine[name]
            naive.quarantine[slot] = naive.now + QUARANTINE_S
        if not mine:
            naive.requests.pop((label, request), None)

    @rule(label=labels, names=name_lists)
    def touch(self, label: bytes, names: list[str]) -> None:
        self.table.touch(label, names, self.naive.now)
        self.naive.use([(label, name) for name in names])

    @rule(label=labels, names=name_lists, epochs_ago=st.sampled_from([None, 0, 1]))
    def delete(self, label: bytes, names: list[str], epochs_ago: int | None) -> None:
        slots, nowhere = None, (Slot(K, 0, 1), 0)
        if epochs_ago is not None:
            seen = [self.naive.objects.get((label, name), nowhere)[0] for name in names]
            slots = [slot._replace(epoch=slot.epoch - epochs_ago) for slot in seen]
        gone = self.table.delete(label, names, slots, self.naive.now)
        for name, was in zip(names, gone, strict=True):
            assert was == ((label, name) in self.naive.objects and epochs_ago != 1)
            if was:
                self.naive.forget((label, name))

    @rule(label=labels, group=st.sampled_from([None, "a", "b"]))
    def drop(self, label: bytes, group: str | None) -> None:
        mine = [
            each for each in self.naive.objects if each[0] == label and each[1].startswith(f"{group}-" if group else "")
        ]
        assert self.table.drop(label, group, self.naive.now) == len(mine)
        for each in mine:
            self.naive.forget(each)

    @rule()
    def files_are_removed(self) -> None:
        gone = self.table.retired([])
        taken = {Slot(*place, 0).extent for place in self.naive.taken()}
        assert not taken & {*gone}
        self.table.removed([*gone, *taken])
        assert not self.table.retired([])

    def another(self, *, empty: bool) -> SlotTable:
        first = self.table.epoch, self.table.next_extent
        capacity_bytes = self.table.capacity_bytes
        return SlotTable(capacity_bytes, self.quota, first, empty=empty, journal=True, extents=self.extents)

    @rule()
    def the_service_restarts(self) -> None:
        """It knows all but its readers, and the order of use as of when each object was stored."""
        naive, extents = self.naive, [*self.table.extents()]
        quarantine = {slot: max(naive.now + QUARANTINE_S, until) for slot, until in naive.quarantine.items()}
        objects = {slot for slot, _ in naive.objects.values()}
        naive.quarantine = dict.fromkeys(naive.pinned() - objects, naive.now + QUARANTINE_S) | quarantine
        naive.readers.clear()
        self.table = self.another(empty=True)
        self.table.restore(extents, self.journal.values(), naive.now)
        rows = sorted(self.journal.values(), key=lambda row: row.used)
        naive.order = [(row.label, row.name) for row in rows if row.state == COMMITTED]
        for each in [each for each in naive.objects if not self.table.exists(each[0], [each[1]])[0]]:
            assert naive.objects[each][0].extent in {extent for extent, _, leaves in extents if leaves}
            naive.forget(each)

    @rule(keep=st.sets(st.sampled_from([(label, name) for label in LABELS for name in NAMES])))
    def the_service_forgets_everything_and_is_rebuilt(self, keep: set[Object]) -> None:
        naive, listed = self.naive, [extent for extent, _, _ in self.table.extents()]
        self.table, found = self.another(empty=False), naive.objects
        self.journal.clear()
        self.naive = naive = Naive(naive.now, epochs=naive.epochs)
        assert self.table.rebuilding(1, 60.0, naive.now)
        assert not self.table.rebuilding(2, 60.0, naive.now)
        assert self.table.retired(listed) == [], "they may have objects"
        for each, (slot, size_bytes) in found.items():
            if each in keep:
                assert self.table.adopt(each[0], [each[1]], [slot], [size_bytes], naive.now) == [True]
                naive.objects[each] = slot, size_bytes
                naive.order.append(each)
        self.table.rebuilt(2)
        assert self.table.rebuilding(1, 60.0, naive.now)
        self.table.rebuilt(1)
        assert not self.table.rebuilding(2, 60.0, naive.now)
        known = {extent for extent, _, _ in self.table.extents()}
        assert {*self.table.retired(listed)} == {*listed} - known

    @rule(slots=st.integers(3, 30), quota=st.sampled_from([None, 4, 9]))
    def the_capacity_changes(self, slots: int, quota: int | None) -> None:
        if self.quota != (quota and quota * K):  # a group may be over a smaller quota until something is stored
            self.naive.order.sort(key=lambda each: 0)
            for label in LABELS:
                self.drop(label, None)
            self.naive.advance(1000.0)
            self.table.touch(LABELS[0], [], self.naive.now)
        self.quota = quota and quota * K
        self.table.configure(slots * K, self.quota)
        for each in [each for each in self.naive.order if not self.table.exists(each[0], [each[1]])[0]]:
            self.naive.forget(each)

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "table"):
            audit(self.table)
            rows, freed = self.table.changes()
            self.journal |= {(row.slot_bytes, row.number): row for row in rows}
            for place in freed:
                del self.journal[place]
            assert self.table.usage(LABELS[0]).objects == sum(label == LABELS[0] for label, _ in self.naive.objects)

    def teardown(self) -> None:
        """Whatever has happened, no slot has leaked: all the room can be had for slots of any one size."""
        if not hasattr(self, "table"):
            return
        naive, table = self.naive, self.table
        naive.advance(1e4)
        table.configure(table.capacity_bytes, None)
        wanted, got = table.capacity_bytes // K, set()
        for attempt in range(400):
            names = [f"n{attempt}.{number}" for number in range(wanted)]
            for label in LABELS:
                table.drop(label, None, naive.now)
            answers = table.reserve(LABELS[0], 10**6 + attempt, names, [K] * wanted, 10.0, naive.now)
            got = {answer for answer in answers if isinstance(answer, Slot)}
            if len(got) == wanted:
                break
            table.abort(LABELS[0], 10**6 + attempt, [*got], naive.now)
            table.removed(table.retired([]))
            naive.now += QUARANTINE_S + 1
        assert len(got) == wanted, f"{len(got)} of {wanted} slots"
        audit(table)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
