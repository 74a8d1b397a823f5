"""Chunks of an engine's host memory go to a storage and come back, or are misses; the engine never waits."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_bed import DEADLINE_S, LONG_S, ROW_BYTES, Bed, StallingDisk, key

from kvarve.connectors.vllm.chunks import ChunkStore, Found, namespace_of
from kvarve.errors import ConfigError
from kvarve.storage import Breaker, MemoryStorage
from kvarve.testing import Rule

MakeBed = Callable[..., Bed]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeBed]:
    beds = list[Bed]()

    def made(**more: Any) -> Bed:
        beds.append(Bed(tmp_path / "store", **more))
        return beds[-1]

    yield made
    for bed in beds:
        bed.close()


@pytest.fixture
def bed(make: MakeBed) -> Bed:
    return make()


def test_what_is_stored_comes_back_byte_for_byte_into_other_rows(bed: Bed) -> None:
    assert bed.store(1, 2, 3).good == (key(1), key(2), key(3))
    ended = bed.load(3, 1)
    assert (ended.good, ended.bad, ended.storing) == ((key(3), key(1)), (), False)
    assert bed.holds(0, 3) and bed.holds(1, 1)
    assert not bed.rows[2:].any()
    short = b"sixteen bytes..." + bytes(4)  # a hash of any length names a chunk
    bed.chunks.store(9, [short], [0])
    assert bed.wait_for(9).good == (short,)
    bed.chunks.load(10, [short], [5])
    assert bed.wait_for(10).good == (short,) and bed.holds(5, 3)


def test_a_chunk_that_this_engine_stored_is_known_without_a_question_and_not_stored_again(bed: Bed) -> None:
    bed.store(1)
    calls = [bed.sick.counts[call] for call in ("exists", "put")]
    assert bed.chunks.lookup(key(1), "r") is Found.THERE
    bed.chunks.flush()
    assert bed.store(1).good == (key(1),) and bed.chunks.counts["store: there already"] == 1
    assert [bed.sick.counts[call] for call in ("exists", "put")] == calls


def test_all_lookups_of_a_step_are_one_question(bed: Bed) -> None:
    asked = bed.sick.counts["exists"]
    for number in range(20):
        assert bed.chunks.lookup(key(number), "r") is Found.LATER
        assert bed.chunks.lookup(key(number), "other") is Found.LATER
    assert bed.lookup(0) is Found.ABSENT
    assert [bed.chunks.lookup(key(number), "r") for number in range(20)] == [Found.ABSENT] * 20
    assert bed.sick.counts["exists"] == asked + 1


def test_absence_is_known_while_one_asker_is_there_and_asked_again_afterwards(make: MakeBed) -> None:
    bed, other = make(), make()
    assert bed.lookup(1, "r") is bed.lookup(1, "s") is Found.ABSENT
    other.store(1)
    bed.chunks.forget("r")
    assert bed.lookup(1, "s") is Found.ABSENT
    bed.chunks.forget("s")
    assert bed.chunks.lookup(key(1), "t") is Found.LATER
    assert bed.lookup(1, "t") is Found.THERE


@pytest.mark.parametrize("what", ["model", "group"])
def test_the_same_tokens_in_another_model_or_group_are_another_chunk(make: MakeBed, what: str) -> None:
    bed = make()
    bed.store(1)
    other, group = (make(model="b"), 0) if what == "model" else (bed, 1)
    assert other.lookup(1, group=group) is Found.ABSENT
    assert other.load(1, group=group).bad == (key(1, group),)
    assert not other.rows.any()


@pytest.mark.parametrize("fault", ["flip", "truncate", "swap", "lose", "raise"])
def test_a_damaged_foreign_or_missing_object_is_a_miss_its_row_stays_and_the_others_are_loaded(
    bed: Bed, fault: str
) -> None:
    bed.store(1, 2, 3)
    if fault == "swap":
        bed.store(4)
        bed.sick.swap(bed.name(2), bed.name(4))
    elif fault == "lose":
        bed.sick.delete([bed.name(2)])
    elif fault == "raise":
        bed.sick.rules = [Rule("raise", "get", nth=1)]
        assert bed.load(2).bad == (key(2),) and bed.chunks.counts["load: error"] == 1
        assert bed.load(1, 3).good == (key(1), key(3)), "and no other job"
        return
    else:
        getattr(bed.sick, fault)(bed.name(2))
    ended = bed.load(1, 2, 3)
    assert (ended.good, ended.bad) == ((key(1), key(3)), (key(2),))
    assert bed.holds(0, 1) and bed.holds(2, 3)
    assert not bed.rows[1].any(), "bytes that failed their check were written into the engine's memory"
    assert bed.chunks.counts["load: missing" if fault == "lose" else "load: corrupt"] == 1
    assert bed.files.exists([bed.name(2)]) == [False], "the damaged object is still there"


def test_a_chunk_that_failed_is_a_miss_from_then_on_until_it_is_stored_anew(bed: Bed) -> None:
    bed.store(1)
    bed.sick.lost = frozenset([bed.name(1)])  # it exists, and cannot be read
    assert bed.lookup(1) is Found.THERE
    assert bed.load(1).bad == (key(1),)
    for asker in ("r", "new"):
        assert bed.lookup(1, asker) is Found.ABSENT
    bed.sick.restore()
    assert bed.lookup(1, "newer") is Found.ABSENT
    assert bed.store(1).good == (key(1),)
    assert bed.lookup(1) is Found.THERE
    assert bed.load(1).good == (key(1),)


def test_a_read_that_hangs_is_given_up_and_can_never_write_into_the_row(bed: Bed) -> None:
    bed.store(1)
    bed.sick.stall()
    job = bed.send_load(1)
    bed.sick.wait_for_stalled_call()
    bed.clock.now += DEADLINE_S + 1
    assert bed.wait_for(job).bad == (key(1),)
    assert bed.chunks.counts["load: late"] == 1
    bed.fill(0, 9)  # the engine has given the row to another chunk
    bed.sick.release()
    bed.chunks.close(LONG_S)
    assert bed.holds(0, 9), "a read that was given up wrote into a row of another chunk"


def test_a_row_that_changes_under_a_write_that_was_given_up_is_stored_under_no_name(make: MakeBed) -> None:
    disk = StallingDisk()
    bed = make(disk=disk)
    bed.fill(0, 1)
    disk.running.clear()
    job = bed.send_store(1)
    assert disk.arrived.acquire(timeout=LONG_S)
    bed.clock.now += DEADLINE_S + 1
    assert bed.wait_for(job).bad == (key(1),)
    bed.fill(0, 9)
    disk.running.set()
    bed.chunks.close(LONG_S)
    again = make()
    assert again.files.exists([again.name(1)]) == [False]


def test_a_row_that_changed_under_its_write_fails_its_check(make: MakeBed) -> None:
    disk = StallingDisk()
    bed = make(disk=disk)
    bed.fill(0, 1)
    disk.running.clear()
    job = bed.send_store(1)
    assert disk.arrived.acquire(timeout=LONG_S)
    bed.fill(0, 9)
    disk.running.set()
    assert bed.wait_for(job).good == (key(1),)
    assert bed.load(1).bad == (key(1),)
    assert bed.chunks.counts["load: corrupt"] == 1


def test_a_job_that_waits_behind_others_that_make_progress_is_not_late(bed: Bed) -> None:
    bed.store(*range(8))
    bed.sick.stall()
    jobs = [bed.send_load(number) for number in range(8)]
    for _ in range(3):  # as many as there are workers
        bed.sick.wait_for_stalled_call()
    bed.clock.now += DEADLINE_S - 1
    bed.sick.release()
    ended = list[int]()
    while len(ended) < len(jobs):
        assert bed.chunks.wait(LONG_S)
        done = bed.chunks.ended()
        assert all(each.good for each in done)
        ended += [each.job for each in done]
        if {*jobs[:3]} <= {*ended} and bed.clock.now < 100 + DEADLINE_S:  # these began in time; the others waited
            bed.clock.now += 2
    assert sorted(ended) == jobs


def test_jobs_behind_calls_that_hang_end_at_the_deadline_though_no_worker_is_free(bed: Bed) -> None:
    bed.store(*range(8))
    bed.sick.stall()
    jobs = {bed.send_load(number) for number in range(8)}
    bed.sick.wait_for_stalled_call()
    bed.clock.now += DEADLINE_S + 1
    ended = bed.chunks.ended()
    assert {each.job for each in ended} == jobs and not any(each.good for each in ended)


def test_a_question_that_hangs_is_answered_absent_at_the_deadline(bed: Bed) -> None:
    bed.sick.stall()
    assert bed.chunks.lookup(key(1), "r") is Found.LATER
    bed.chunks.flush()
    bed.sick.wait_for_stalled_call()
    assert bed.chunks.lookup(key(1), "r") is Found.LATER
    bed.clock.now += DEADLINE_S + 1
    assert bed.chunks.ended() == []
    assert bed.chunks.lookup(key(1), "r") is Found.ABSENT
    assert not bed.storage.up
    assert bed.chunks.lookup(key(2), "r") is Found.ABSENT, "a storage that is down is asked"


def test_a_storage_that_is_down_costs_nothing_and_is_used_again_when_it_is_up(bed: Bed) -> None:
    bed.store(1)
    bed.sick.dead = True
    while bed.storage.up:
        bed.load(1)
    asked = sum(bed.sick.counts.values())
    assert bed.chunks.lookup(key(2), "r") is Found.ABSENT
    assert bed.load(3).bad == (key(3),)
    assert bed.store(4).bad == (key(4),)
    bed.chunks.flush()
    assert (bed.chunks.counts["load: down"], bed.chunks.counts["store: down"]) == (1, 1)
    assert sum(bed.sick.counts.values()) - asked <= bed.sick.counts["exists"], "only probes reach it"
    up = threading.Event()
    bed.storage.changed = lambda: up.set() if bed.storage.up else None
    bed.sick.dead = False
    assert up.wait(LONG_S)
    assert bed.store(4).good == (key(4),)


def test_a_full_storage_is_no_error(bed: Bed) -> None:
    tiny = Breaker(MemoryStorage(2 * ROW_BYTES, b"l", "tiny"), deadline_s=LONG_S)
    chunks = ChunkStore(tiny, bed.rows, bed.namespace, deadline_s=LONG_S)
    chunks.store(1, [key(1), key(2)], [0, 1])
    chunks.drain()
    (ended,) = chunks.ended()
    assert (ended.good, ended.bad) == ((key(1),), (key(2),))
    assert chunks.counts["store: no space"] == 1
    chunks.close()


def test_stores_that_fall_behind_pin_a_share_of_the_rows_and_drop_the_rest(bed: Bed) -> None:
    bed.sick.stall()
    jobs = [bed.send_store(*range(at * 4, at * 4 + 4)) for at in range(6)]  # 24 rows, a quarter of which is 6
    assert bed.chunks.counts["store: behind"] == 4 * 4 + 2
    assert {ended.job for ended in bed.chunks.ended()} == {*jobs[2:]}
    bed.sick.release()
    bed.chunks.drain(LONG_S)
    assert {ended.job: len(ended.good) for ended in bed.chunks.ended()} == {jobs[0]: 4, jobs[1]: 2}  # in any order
    assert min(bed.chunks.counts.values()) == 0, "no count goes down"


def test_a_drain_ends_when_all_jobs_have_and_at_the_deadline_if_one_hangs(bed: Bed) -> None:
    stored = bed.send_store(1, 2)
    bed.chunks.drain()
    assert [ended.job for ended in bed.chunks.ended()] == [stored]
    bed.sick.stall()
    hanging = bed.send_load(1)
    bed.sick.wait_for_stalled_call()
    threading.Thread(target=lambda: setattr(bed.clock, "now", bed.clock.now + DEADLINE_S + 1)).start()
    bed.chunks.drain()
    assert [(ended.job, ended.good) for ended in bed.chunks.ended()] == [(hanging, ())]


def test_no_chunk_is_found_that_was_stored_before_all_were_forgotten_until_a_restart(make: MakeBed) -> None:
    bed = make()
    bed.store(1, 2)
    assert bed.lookup(3) is Found.ABSENT
    bed.chunks.forget_all(b"epoch")
    assert [bed.lookup(number) for number in (1, 2, 3)] == [Found.ABSENT] * 3
    assert bed.load(1).bad, "nor loaded by one who has asked before"
    bed.chunks.forget_all(b"another")
    assert bed.store(1).good and bed.lookup(1) is Found.THERE and bed.load(1).good
    bed.close()
    again = make()
    assert again.lookup(2) is Found.THERE, "these are of the weights that it began with"
    assert again.load(1, 2).good == (key(1), key(2)) and again.holds(0, 1)


def test_what_is_under_way_when_all_is_forgotten_stays_of_before(bed: Bed) -> None:
    """A load would bring a chunk of before, a question would find it, and a store is of bytes of before."""
    bed.store(1)
    bed.chunks.forget_all(b"one")
    bed.store(1)
    bed.sick.stall()
    store = bed.send_store(2)
    assert bed.chunks.lookup(key(4), "r") is Found.LATER
    bed.chunks.flush()
    load = bed.send_load(1)
    bed.chunks.forget_all(b"two")
    (ended,) = bed.chunks.ended()
    assert ended.job == load and ended.bad and not bed.rows.any()
    bed.sick.release()
    assert bed.wait_for(store).good
    assert [bed.lookup(number) for number in (1, 2, 4)] == [Found.ABSENT] * 3
    assert not bed.rows.any()


def test_chunks_in_use_by_the_engine_are_evicted_last(make: MakeBed) -> None:
    bed = make(capacity_bytes=1 << 20)
    for number in range(8):
        bed.store(number)
    bed.chunks.touch([key(0), key(99)])
    bed.chunks.flush()
    while bed.chunks.usage is None:
        assert bed.chunks.wait(LONG_S)
        bed.chunks.ended()
    number = 8
    while bed.files.exists([bed.name(1)]) == [True]:
        bed.store(number)
        number += 1
    assert bed.files.exists([bed.name(0)]) == [True]


def test_a_namespace_has_every_field_and_plain_values_only_and_rows_are_whole_blocks() -> None:
    fields = {"model": "a", "groups": [[1, "x"]], "layout": None}
    others = [fields | other for other in ({"model": "b"}, {"groups": [[2, "x"]]}, {"layout": "NHD"}, {"more": 1})]
    assert len({namespace_of(each) for each in [fields, *others]}) == 5
    assert namespace_of(dict(reversed(fields.items()))) == namespace_of(fields)
    with pytest.raises(ConfigError, match="plain values"):
        namespace_of({"model": object()})
    storage = Breaker(MemoryStorage(1 << 20, b"l", "x"), deadline_s=1)
    with pytest.raises(ConfigError, match="whole blocks"):
        ChunkStore(storage, np.zeros((2, 4097), np.uint8), bytes(32), deadline_s=1)
