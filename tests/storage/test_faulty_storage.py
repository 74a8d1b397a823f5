"""The fake that fails: it injects the faults of its rules, counts them, and repeats them from the same seed."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvarve.errors import StorageError
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage, Rule
from kvarve.testing.suite import LABEL, get, put


def faulty(*rules, seed=0, **more):
    return FaultyStorage(MemoryStorage(1 << 20, LABEL, "model A"), rules, seed=seed, **more)


def test_a_put_that_fails_has_done_what_it_says():
    storage = faulty(Rule("raise", "put", nth=3), Rule("raise", nth=5), seed=3)
    for turn in range(4):
        names = [f"{turn}-{i}" for i in range(8)]
        try:
            done = sum(storage.put(names, [memoryview(b"1")] * 8))
        except StorageError as error:
            done = int(str(error).removeprefix("injected: put failed after ").split()[0])
        assert (done < 8) == (turn == 2)
        assert storage.inner.exists(names) == [i < done for i in range(8)]
    with pytest.raises(StorageError, match="injected: usage failed"):  # the fifth call of any kind
        storage.usage()
    assert (storage.counts["put"], storage.counts["raise"]) == (4, 2)
    with pytest.raises(AssertionError, match="a get cannot lose"):
        Rule("lose", "get")


def test_a_put_can_be_lost_or_exchange_its_object_and_a_read_can_be_short():
    storage = faulty(Rule("lose", nth=2), Rule("swap", nth=3), Rule("short", nth=3))
    for name in "abc":
        assert put(storage, **{name: name.encode() * 9}) == [True]
    assert [get(storage, name) for name in "ab"] == [b"c" * 9, None]
    buffer = bytearray(9)
    (size,) = storage.get(["c"], [memoryview(buffer)])
    assert size < 9 and buffer == b"a" * size + bytes(9 - size)
    assert get(storage, "c") == b"a" * 9
    assert [storage.counts[fault] for fault in ("lose", "swap", "short")] == [1, 1, 1]


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


def test_a_stalled_call_waits_until_it_is_released_and_never_without_a_bound():
    storage = faulty()
    storage.stall("put")
    assert storage.exists(["a"]) == [False], "of another kind"
    with ThreadPoolExecutor(1) as caller:
        putting = caller.submit(put, storage, a=b"1")
        storage.wait_for_stalled_call()
        assert storage.inner.exists(["a"]) == [False]
        storage.release()
        assert putting.result() == [True]
    assert storage.counts["stall"] == 1 == storage.counts["stall: put"]
    impatient = faulty(stall_limit_s=0.0)
    with pytest.raises(StorageError, match="no call came"):
        impatient.wait_for_stalled_call()
    impatient.stall()
    with pytest.raises(StorageError, match="exists stalled"):
        impatient.exists(["a"])


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
                seen += [get(storage, f"{turn % 5}-{i}", 64) for i in range(3)]
            except StorageError as error:
                seen.append(str(error))
        return seen, storage.counts

    first = history(1)
    assert history(1) == first
    assert history(2) != first
    assert all(first[1][fault] for fault in ("raise", "lose", "truncate", "flip", "swap", "short"))


@pytest.mark.long
def test_the_fakes_need_neither_pytest_nor_hypothesis():
    script = "import kvarve.testing, sys; assert not {'pytest', 'hypothesis'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
