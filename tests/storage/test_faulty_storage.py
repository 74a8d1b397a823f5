"""The fake that fails: it injects the faults of its rules, counts them, and repeats them from the same seed."""

import subprocess
import sys
import threading

import pytest

from kvarve.errors import StorageError
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage, MakeStorage, Rule, StorageSuite
from kvarve.testing.suite import LABEL, Damage, get, put


def faulty(*rules, seed=0, **more):
    return FaultyStorage(MemoryStorage(1 << 20, LABEL, "model A"), rules, seed=seed, **more)


class TestFaultyStorageWithoutRulesIsItsInner(StorageSuite):
    @pytest.fixture
    def make_storage(self, tmp_path) -> MakeStorage:
        from kvarve.storage import FileStorage

        opened = []

        def make(*, label=LABEL, description="model A", capacity_bytes=64 << 20, place="here"):
            opened.append(FaultyStorage(FileStorage(tmp_path / place, capacity_bytes, label, description)))
            return opened[-1]

        yield make
        for storage in opened:
            storage.close()

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        return {"a flip": FaultyStorage.flip, "a cut": FaultyStorage.truncate}


def test_the_third_put_fails_and_only_that():
    storage = faulty(Rule("raise", "put", nth=3))
    answers = []
    for name in "abcd":
        try:
            answers += put(storage, **{name: b"1"})
        except StorageError as error:
            answers.append(str(error))
    assert answers == [True, True, "injected: put failed after 0 of 1", True]
    assert storage.exists(list("abcd")) == [True, True, False, True]
    assert (storage.counts["put"], storage.counts["raise"]) == (4, 1)


def test_a_rule_for_any_call_counts_them_all():
    storage = faulty(Rule("raise", nth=2))
    put(storage, a=b"1")
    with pytest.raises(StorageError, match="injected: usage failed"):
        storage.usage()
    assert storage.usage().objects == 1


def test_a_put_that_fails_has_done_what_it_says():
    storage = faulty(Rule("raise", "put", probability=0.5), seed=3)
    for turn in range(20):
        names = [f"{turn}-{i}" for i in range(8)]
        try:
            done = sum(storage.put(names, [memoryview(b"1")] * 8))
        except StorageError as error:
            done = int(str(error).split(" after ")[1].split()[0])
        assert storage.exists(names) == [i < done for i in range(8)]
    assert 0 < storage.counts["raise"] < 20


def test_a_lost_put_answers_true_and_stores_nothing():
    storage = faulty(Rule("lose", nth=2))
    assert put(storage, a=b"old") == [True]
    assert put(storage, a=b"new", b=b"new") == [True, True]
    assert (get(storage, "a"), get(storage, "b")) == (b"old", None)
    assert storage.counts["lose"] == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_put_can_store_less_or_one_bit_else(seed):
    storage = faulty(Rule("truncate", nth=1), Rule("flip", nth=2), seed=seed)
    data = bytes(range(100))
    put(storage, a=data)
    put(storage, b=data)
    cut, flipped = get(storage, "a"), get(storage, "b")
    assert len(cut) < 100
    assert data.startswith(cut)
    assert sum((x ^ y).bit_count() for x, y in zip(flipped, data, strict=True)) == 1
    assert (storage.counts["truncate"], storage.counts["flip"]) == (1, 1)


def test_objects_too_small_for_a_fault_stay_whole_and_are_not_counted():
    storage = faulty(Rule("truncate"), Rule("flip"), Rule("short"), Rule("swap"))
    put(storage, a=b"")
    assert get(storage, "a") == b""
    assert not {"truncate", "flip", "short", "swap"} & {what for what, times in storage.counts.items() if times}


def test_a_put_can_exchange_its_object_with_another():
    storage = faulty(Rule("swap", nth=2))
    put(storage, a=b"of a")
    put(storage, b=b"of b")
    assert (get(storage, "a"), get(storage, "b")) == (b"of b", b"of a")
    assert storage.counts["swap"] == 1


def test_a_short_read_leaves_the_object_and_the_rest_of_the_buffer():
    storage = faulty(Rule("short", nth=1))
    put(storage, a=bytes([7]) * 100)
    buffer = bytearray(100)
    (size,) = storage.get(["a"], [memoryview(buffer)])
    assert size < 100
    assert buffer == bytes([7]) * size + bytes(100 - size)
    assert get(storage, "a") == bytes([7]) * 100
    assert storage.counts["short"] == 1


def test_what_is_stored_can_be_damaged_by_hand():
    storage = faulty()
    put(storage, a=b"of a", b=b"of b, longer", c=b"0123", d=b"0123")
    storage.swap("a", "b")
    storage.truncate("c", 2)
    storage.flip("d", 1)
    assert (get(storage, "a"), get(storage, "b"), get(storage, "c")) == (b"of b, longer", b"of a", b"01")
    damaged = get(storage, "d")
    assert damaged[0:1] + damaged[2:] == b"023"
    assert damaged[1] != ord("1")
    assert [storage.counts[fault] for fault in ("swap", "truncate", "flip")] == [1, 1, 1]


def test_a_dead_backend_fails_every_call_until_it_lives_again():
    storage = faulty()
    put(storage, a=b"1")
    storage.dead = True
    one = memoryview(bytearray(1))
    for call in (
        lambda: storage.exists(["a"]),
        lambda: storage.get(["a"], [one]),
        lambda: storage.put(["a"], [one]),
        lambda: storage.delete(["a"]),
        storage.usage,
    ):
        with pytest.raises(StorageError, match="dead"):
            call()
    storage.dead = False
    assert get(storage, "a") == b"1"
    assert storage.counts["dead"] == 5
    storage.dead = True
    storage.close()


def test_a_stalled_call_waits_until_it_is_released():
    storage = faulty()
    answers = []
    storage.stall()
    caller = threading.Thread(target=lambda: answers.append(put(storage, a=b"1")))
    caller.start()
    storage.wait_for_stalled_call()
    assert not answers
    assert storage.inner.exists(["a"]) == [False]
    storage.release()
    caller.join()
    assert answers == [[True]]
    assert storage.counts["stall"] == 1 == storage.counts["stall: put"]


def test_only_calls_of_the_stalled_kind_wait():
    storage = faulty(stall_limit_s=0.0)
    storage.stall("get")
    assert put(storage, a=b"1") == [True]
    with pytest.raises(StorageError, match="get stalled"):
        storage.get(["a"], [memoryview(bytearray(1))])
    storage.release()
    assert storage.get(["a"], [memoryview(bytearray(1))]) == [1]


def test_no_wait_is_without_a_bound():
    storage = faulty(stall_limit_s=0.0)
    with pytest.raises(StorageError, match="no call came"):
        storage.wait_for_stalled_call()
    storage.stall()
    with pytest.raises(StorageError, match="exists stalled"):
        storage.exists(["a"])


def test_the_same_seed_does_the_same_damage_and_another_does_not():
    def history(seed):
        storage = faulty(
            *(Rule(fault, probability=0.2) for fault in ("raise", "lose", "truncate", "flip", "swap", "short")),
            seed=seed,
        )
        seen = []
        for turn in range(40):
            try:
                put(storage, **{f"{turn % 7}-{i}": bytes([turn]) * 20 for i in range(3)})
                seen += [get(storage, f"{turn % 5}-{i}") for i in range(3)]
            except StorageError as error:
                seen.append(str(error))
        return seen, storage.counts

    assert history(1) == history(1)
    assert history(1) != history(2)
    assert all(history(1)[1][fault] for fault in ("raise", "lose", "truncate", "flip", "swap", "short"))


def test_a_rule_that_could_never_strike_is_a_mistake():
    with pytest.raises(AssertionError, match="a get cannot lose"):
        Rule("lose", "get")


def test_the_fakes_need_neither_pytest_nor_hypothesis():
    script = "import kvarve.testing, sys; assert not {'pytest', 'hypothesis'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
