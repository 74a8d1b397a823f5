"""Any life of a slot table breaks no law, with restarts and losses; the script in Redis decides as the table does."""

from hf3fs_laws import audit, entries
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvarve.storage.hf3fs.metadata.entries import COMMITTED, RESERVED, Row
from kvarve.storage.hf3fs.metadata.service import Slot
from kvarve.storage.hf3fs.metadata.slot_table import QUARANTINE_S, SlotTable

K = 4096
FIRST = 10**11
LABELS = (b"one", b"two")
NAMES = [f"{group}{number}" for group in ("a-", "b-", "") for number in range(7)]
SIZE_OF = {name: K * (1 + at % 3) for at, name in enumerate(NAMES)}
name_lists = st.lists(st.sampled_from(NAMES), max_size=6)
labels, few = st.sampled_from(LABELS), st.integers(0, 5)
seconds = st.sampled_from([0.5, 5.0, 30.0])


class Life(RuleBasedStateMachine):
    @initialize(slots=st.integers(3, 30), extents=st.sampled_from([1, 2, 4, 64]), quota=st.sampled_from([None, 4, 9]))
    def begin(self, slots: int, extents: int, quota: int | None) -> None:
        self.quota, self.extents, self.now = quota and quota * K, extents, 0.0
        self.table = SlotTable(slots * K, self.quota, (FIRST, FIRST), journal=True, extents=extents)
        self.journal: dict[tuple[int, int], Row] = {}
        self.epochs: set[int] = set()
        self.reserved: dict[tuple[bytes, int], dict[str, Slot]] = {}

    def objects(self) -> dict[tuple[bytes, str], Slot]:
        return {(it.home.label, it.name): it.slot for it in entries(self.table) if it.state == COMMITTED}

    @rule(by=st.sampled_from([0.0, 0.1, 1.0, 10.0, 130.0]))
    def time_passes(self, by: float) -> None:
        self.now += by
        self.table.touch(LABELS[0], [], self.now)

    @rule(label=labels, names=name_lists, reader=few, pin_s=seconds)
    def lookup(self, label: bytes, names: list[str], reader: int, pin_s: float) -> None:
        objects = self.objects()
        assert self.table.exists(label, names) == [(label, name) in objects for name in names]
        found = self.table.lookup(label, names, reader, pin_s, self.now)
        assert [each and each.slot for each in found] == [objects.get((label, name)) for name in names]
        assert all(each.size_bytes == each.slot.slot_bytes - 5 for each in found if each)

    @rule(reader=few)
    def release(self, reader: int) -> None:
        self.table.release(reader, self.now)

    @rule(label=labels, request=few, names=name_lists, for_s=seconds)
    def reserve(self, label: bytes, request: int, names: list[str], for_s: float) -> None:
        before = self.objects()
        pinned = {it.slot for it in entries(self.table) if it.pins}
        taken = {it.slot[:2] for it in entries(self.table) if it.slot not in before.values() or it.pins}
        mine = self.reserved.setdefault((label, request), {})
        asked_again = {
            it.name: it.slot
            for it in entries(self.table)
            if (it.home.label, it.request, it.state) == (label, request, RESERVED)
        }
        answers = self.table.reserve(label, request, names, [SIZE_OF[name] for name in names], for_s, self.now)
        after = self.objects()
        for each in before.keys() - after.keys():
            assert before[each] not in pinned, "what is read is not evicted"
            assert each not in {(label, name) for name in names}, "nor what the call has answered for"
        for name, answer in zip(names, answers, strict=True):
            assert (answer is True) == ((label, name) in after)
            assert answer is True or asked_again.get(name, answer) == answer
            if isinstance(answer, Slot) and answer != mine.get(name):
                assert answer.slot_bytes == SIZE_OF[name]
                assert answer[:2] not in taken, "it is free"
                assert answer.epoch > FIRST and answer.epoch not in self.epochs
                self.epochs.add(answer.epoch)
                mine[name] = answer

    @rule(label=labels, request=few, among=st.sets(st.integers(0, 5)), epochs_ago=st.sampled_from([0, 0, 1]))
    def commit(self, label: bytes, request: int, among: set[int], epochs_ago: int) -> None:
        mine = [each for at, each in enumerate(self.reserved.get((label, request), {}).items()) if at in among]
        slots = [slot._replace(epoch=slot.epoch - epochs_ago) for _, slot in mine]
        names, before = [name for name, _ in mine], self.objects()
        sizes = [slot.slot_bytes - 5 for slot in slots]
        done = self.table.commit(label, request, names, slots, sizes, self.now)
        objects = self.objects()
        assert done == [(label, name) in objects for name in names]
        for name, slot in zip(names, slots, strict=True):
            assert objects.get((label, name)) in (before.get((label, name)), slot), "the first commit stays"

    @rule(label=labels, request=few, among=st.sets(st.integers(0, 5)))
    def abort(self, label: bytes, request: int, among: set[int]) -> None:
        mine = self.reserved.get((label, request), {})
        before = self.objects()
        self.table.abort(label, request, [slot for at, slot in enumerate(mine.values()) if at in among], self.now)
        assert self.objects() == before

    @rule(label=labels, names=name_lists)
    def touch(self, label: bytes, names: list[str]) -> None:
        self.table.touch(label, names, self.now)

    @rule(label=labels, names=name_lists, epochs_ago=st.sampled_from([None, 0, 1]))
    def delete(self, label: bytes, names: list[str], epochs_ago: int | None) -> None:
        before, slots = self.objects(), None
        if epochs_ago is not None:
            seen = [before.get((label, name), Slot(K, 0, 1)) for name in names]
            slots = [slot._replace(epoch=slot.epoch - epochs_ago) for slot in seen]
        gone = self.table.delete(label, names, slots, self.now)
        assert sum(gone) == len(before) - len(self.objects())
        assert not any(gone) or epochs_ago != 1

    @rule(label=labels, group=st.sampled_from([None, "a", "b"]))
    def drop(self, label: bytes, group: str | None) -> None:
        before = self.objects()
        gone = {each for each in before if each[0] == label and each[1].startswith(f"{group}-" if group else "")}
        assert self.table.drop(label, group, self.now) == len(gone)
        assert self.objects().keys() == before.keys() - gone

    @rule()
    def files_are_removed(self) -> None:
        gone = self.table.retired([])
        taken = {it.slot.extent for it in entries(self.table)}
        assert not taken & {*gone}
        self.table.removed([*gone, *taken])
        assert not self.table.retired([])

    def another(self, *, empty: bool) -> SlotTable:
        first, capacity_bytes = (self.table.epoch, self.table.next_extent), self.table.capacity_bytes
        return SlotTable(capacity_bytes, self.quota, first, empty=empty, journal=True, extents=self.extents)

    @rule()
    def the_service_restarts(self) -> None:
        """It knows all but its readers."""
        extents, before = [*self.table.extents()], self.objects()
        self.table = self.another(empty=True)
        self.table.restore(extents, self.journal.values(), self.now)
        leaving = {extent for extent, _, leaves in extents if leaves}
        assert self.objects() == {each: slot for each, slot in before.items() if slot.extent not in leaving}

    @rule(keep=st.sets(st.sampled_from([(label, name) for label in LABELS for name in NAMES])))
    def the_service_forgets_everything_and_is_rebuilt(self, keep: set[tuple[bytes, str]]) -> None:
        listed, found = [extent for extent, _, _ in self.table.extents()], self.objects()
        self.table = self.another(empty=False)
        self.journal.clear()
        assert self.table.rebuilding(1, 60.0, self.now)
        assert not self.table.rebuilding(2, 60.0, self.now)
        assert self.table.retired(listed) == [], "they may have objects"
        kept = {each: slot for each, slot in found.items() if each in keep}
        for (label, name), slot in kept.items():
            assert self.table.adopt(label, [name], [slot], [slot.slot_bytes - 5], self.now) == [True]
        self.table.rebuilt(1)
        assert not self.table.rebuilding(2, 60.0, self.now)
        assert self.objects() == kept
        known = {extent for extent, _, _ in self.table.extents()}
        assert {*self.table.retired(listed)} == {*listed} - known

    @rule(slots=st.integers(3, 30), quota=st.sampled_from([None, 4, 9]))
    def the_capacity_changes(self, slots: int, quota: int | None) -> None:
        pinned = {it.slot for it in entries(self.table) if it.pins and it.state == COMMITTED}
        self.quota = quota and quota * K
        self.table.configure(slots * K, self.quota)
        assert pinned <= {*self.objects().values()}

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "table"):
            audit(self.table)
            rows, freed = self.table.changes()
            self.journal |= {(row.slot_bytes, row.number): row for row in rows}
            for place in freed:
                del self.journal[place]

    def teardown(self) -> None:
        """Whatever has happened, no slot has leaked: all the room can be had for slots of any one size."""
        if not hasattr(self, "table"):
            return
        table, now = self.table, self.now + 1e4
        table.configure(table.capacity_bytes, None)
        wanted, got = table.capacity_bytes // K, set()
        for attempt in range(400):
            names = [f"n{attempt}.{number}" for number in range(wanted)]
            for label in LABELS:
                table.drop(label, None, now)
            answers = table.reserve(LABELS[0], 10**6 + attempt, names, [K] * wanted, 10.0, now)
            got = {answer for answer in answers if isinstance(answer, Slot)}
            if len(got) == wanted:
                break
            table.abort(LABELS[0], 10**6 + attempt, [*got], now)
            table.removed(table.retired([]))
            now += QUARANTINE_S + 1
        assert len(got) == wanted, f"{len(got)} of {wanted} slots"
        audit(table)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
