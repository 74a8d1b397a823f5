"""Several processes share a store by a map in Redis. They are killed, stopped, lied to and robbed of it."""

import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from file_disks import WithoutSync
from hf3fs_stores import RESTING, SLOT_BYTES, STORED, Stores, check_slots, keep, stores_in
from processes import PATIENCE_S
from redis_server import RedisServer

import forks
from kvarve.errors import ConfigError, StorageError
from kvarve.storage.hf3fs import _owner as owner_module
from kvarve.storage.hf3fs import _redis_map as redis_map
from kvarve.storage.hf3fs._hf3fs_storage import Hf3fsStorage
from kvarve.storage.hf3fs._redis_map import RedisMap, map_settings, packed
from kvarve.storage.hf3fs._slot_layout import Extent, Title, file_name
from kvarve.storage.hf3fs._slot_table import REST_S
from kvarve.storage.redis.wire import command
from kvarve.testing.suite import LABEL, get, put, there

Opened = Callable[..., Hf3fsStorage]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.ask("FLUSHALL")
    return running


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with stores_in(tmp_path) as stores:
        yield stores


@pytest.fixture
def opened(stores: Stores, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Each is another server; a lease that nobody holds is anybody's at once."""
    monkeypatch.setattr(owner_module, "LEASE_S", 0.0)
    return lambda **more: stores.open(metadata=server.url(), disk=WithoutSync(), **more)


def end_lease(server: RedisServer, storage: Hf3fsStorage) -> None:
    """As when its process has not said for too long that it holds it."""
    for owner in storage._owner.ids:
        (key,) = [key for key in server.ask("KEYS", f"*:lease:{owner:x}").split("\r\n") if "lease" in key]
        server.ask("DEL", key)


def authenticated(server: RedisServer, password: str, *words: str) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(server.socket))
        link.sendall(command(b"AUTH", password.encode()) + command(*(word.encode() for word in words)))
        assert link.recv(1 << 16).startswith(b"+OK")


def files(stores: Stores) -> list[Path]:
    return [*(stores.folder / "here").glob("slots-*")]


def test_what_one_server_stores_another_reads_and_deletes(opened: Opened, stores: Stores) -> None:
    one, other = opened(), opened()
    assert put(one, page=b"1", **{"salt-1": b"2"}) == [True, True]
    assert (get(other, "page"), other.exists(["page", "none"])) == (b"1", [True, False])
    assert put(other, page=b"another") == [True] and get(other, "page") == b"1"
    assert other.drop("salt") == 1 and one.exists(["salt-1"]) == [False]
    assert other.delete(["page"]) == [True] and get(one, "page") is None
    assert put(one, page=b"2") == [True] and get(other, "page") == b"2"
    assert stores.opened[1][1].usage().objects is None, "none counts what others have"


def test_uses_by_others_reach_the_order_of_eviction(opened: Opened, stores: Stores) -> None:
    one, other = opened(), opened()
    for name in "abc":
        put(one, **{name: b"1"})
    keep(other)
    assert get(other, "a") == b"1"
    keep(other), keep(one)
    (size,) = one._owner.table._sizes.values()
    assert [entry.name for entry in size.lru] == ["b", "c", "a"]


@pytest.mark.parametrize("how", ["flushed", "restarted empty"])
def test_a_map_that_is_lost_is_written_anew_and_meanwhile_all_is_missing(
    opened: Opened, server: RedisServer, how: str
) -> None:
    one, other = opened(), opened()
    put(one, a=b"1"), put(other, b=b"2")
    if how == "flushed":
        server.ask("FLUSHALL")
    else:
        server.kill()
        for call in (lambda: get(one, "a"), lambda: put(one, c=b"3"), lambda: one.exists(["a"]), lambda: keep(one)):
            with pytest.raises(StorageError, match=r"redis\.sock"):
                call()
        server.start()
    assert there(one, "a", "b") == "" and put(other, a=b"1") == [True]
    keep(one), keep(other)
    assert there(other, "a", "b", "c") == "a b" and (get(one, "b"), get(other, "a")) == (b"2", b"1")


def test_an_entry_that_is_wrong_costs_its_object_and_no_other(
    opened: Opened, server: RedisServer, stores: Stores
) -> None:
    one, other = opened(), opened()
    put(one, a=b"1", b=b"2")
    slot, key = stores.where("a"), server.key("a")
    elsewhere = slot._replace(extent=slot.extent._replace(number=1))
    lies = [packed(it) for it in (elsewhere, slot._replace(place=slot.extent.places - 1), slot._replace(generation=1))]
    lies += [
        packed(slot._replace(size_bytes=4000)),
        packed(stores.where("b")),
        b"",
        b"garbage",
        bytes(60),
        b"\xff" * 60,
    ]
    lies += [packed(slot._replace(extent=slot.extent._replace(slot_bytes=1 << 60)))]
    servers = one._owner.map._servers  # type: ignore[union-attr]
    for lie in lies:
        with servers.wire(*servers.all()) as wire:
            wire.send([command(b"DEL", key.encode()), command(b"HSET", key.encode(), lie, b"")])
            assert (wire.number(), wire.number()) in ((0, 1), (1, 1))
        assert get(other, "a") is None, lie
        assert one.exists(["a"]) == [False], "it is forgotten"
        assert put(one, a=b"1") == [True] and get(other, "a") == b"1", "and its owner stores it again"
        slot = stores.where("a")
        assert there(one, "a", "b") == "a b" and get(one, "b") == b"2", lie
    server.ask("SET", key, "of another type")
    assert get(one, "a") is None and get(one, "b") == b"2"
    assert put(one, a=b"anew") == [True] and get(other, "a") == b"anew"


def test_files_of_a_server_that_does_not_come_back_are_taken_over_with_their_objects(
    opened: Opened, server: RedisServer, stores: Stores
) -> None:
    other, dead = opened(), opened()
    put(dead, a=b"1", b=b"2")
    before = {path.name for path in files(stores)}
    end_lease(server, dead)
    stores.die(dead)
    assert get(other, "a") == b"1", "which nobody has to own"
    keep(other), keep(other)
    assert {*dead._owner.ids} < other._owner.ids and {path.name for path in files(stores)} == before
    server.ask("FLUSHALL")
    keep(other)
    assert (get(other, "a"), get(other, "b")) == (b"1", b"2")
    assert sum(file.taken for file in other._owner.table.files.values()) == 2


def test_a_server_that_stood_still_while_its_files_were_taken_over_gives_none_of_their_slots(
    opened: Opened, server: RedisServer, stores: Stores
) -> None:
    stopped, other = opened(), opened()
    put(stopped, a=b"1")
    ids = {*stopped._owner.ids}
    end_lease(server, stopped)  # as it says nothing
    keep(other), keep(other)
    assert ids < other._owner.ids
    stopped._owner._renewed -= 1000.0
    assert put(stopped, b=b"2") == [True]
    assert not ids & stopped._owner.ids and not ids & {it.extent.owner for it in stopped._owner.table.files.values()}
    assert (get(other, "a"), get(other, "b"), get(stopped, "a")) == (b"1", b"2", b"1")
    assert {*other._owner.table.files}.isdisjoint(stopped._owner.table.files), "each slot is given by one"


def test_two_with_one_owners_name_serve_no_wrong_byte_until_one_of_them_notices(
    opened: Opened, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened(capacity_bytes=6 * SLOT_BYTES)
    put(one, a=b"a" * 99)
    with monkeypatch.context() as lied_to:
        lied_to.setattr(RedisMap, "hold", lambda _, owners: ({*owners}, False))
        lied_to.setattr(RedisMap, "holders", lambda _, owners: [None] * len(owners))
        other = opened(capacity_bytes=6 * SLOT_BYTES)
    assert one._owner.ids & other._owner.ids, "both believe that it is theirs"
    dice, ahead = random.Random(7), 0.0
    for storage in (one, other):
        storage._owner.clock = lambda: 2e9 + ahead
    for turn in range(60):
        storage, name = dice.choice([one, other]), dice.choice("abcdefghijkl")
        ahead += REST_S
        storage._owner._renewed = 2e9 + ahead
        with suppress(StorageError):
            put(storage, **{name: name.encode() * 99})
        for each in (name, dice.choice("abcdefghijkl")):
            assert get(dice.choice([one, other]), each) in (None, each.encode() * 99), turn
    keep(one), keep(other)
    assert not one._owner.ids & other._owner.ids


def fails(*_: object, **__: object) -> Any:
    raise StorageError("the map fails")


def test_two_servers_that_find_one_torn_slot_leave_its_owner_storing_it_again(opened: Opened, stores: Stores) -> None:
    one, *others = opened(), opened(), opened()
    put(one, a=b"1")
    stores.write("a", 0, bytes(100))
    found = [it._owner.find(it._label, ["a"]) for it in others]  # both, before either has told of it
    for storage, slots in zip(others, found, strict=True):
        assert storage._get(["a"], slots, [memoryview(bytearray(9))]) == [None]
    assert put(one, a=b"2") == [True] and get(others[0], "a") == b"2"


def test_a_delete_that_the_map_does_not_hear_has_failed_and_costs_no_slot(
    opened: Opened, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened()
    put(storage, a=b"1", b=b"2")
    with monkeypatch.context() as failing:
        failing.setattr(RedisMap, "withdraw", fails)
        with pytest.raises(StorageError):
            storage.delete(["a", "b"])
    assert stores.slots() == {STORED: 2} and (get(storage, "a"), get(storage, "b")) == (b"1", b"2")
    assert storage.delete(["a", "b"]) == [True, True] and stores.slots() == {RESTING: 2}


def test_uses_are_heard_to_their_end_and_a_list_that_nobody_hears_ends(
    opened: Opened, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_map, "_TOGETHER", 8)
    monkeypatch.setattr(redis_map, "_MOST_USES", 40)
    one, other = opened(), opened()
    put(one, a=b"1"), put(one, b=b"2"), put(one, c=b"3")
    for _ in range(3):
        keep(other)
        for name in "ab" * 15:
            get(other, name)
    keep(other)
    (used,) = server.ask("KEYS", "*:used:*").split("\r\n")[2::2]
    assert server.ask("LLEN", used) == ":40\r\n"
    keep(one)
    (size,) = one._owner.table._sizes.values()
    assert [entry.name for entry in size.lru] == ["c", "a", "b"] and server.ask("EXISTS", used) == ":0\r\n"


def test_what_left_is_withdrawn_before_its_file_is_removed_and_both_are_tried_until_they_are_done(
    opened: Opened, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(*_: object) -> None:
        raise OSError(5, "it cannot be removed now")

    one, other = opened(), opened()
    put(one, a=b"1")
    with one._owner.lock:
        one._owner.table.limit_bytes = 0
        one._owner.table.shrink(one._owner.clock())
    with monkeypatch.context() as failing:
        failing.setattr(RedisMap, "withdraw", fails)
        with pytest.raises(StorageError):
            keep(one)
    assert len(files(stores)) == 1 and there(other, "a") == "a"
    with monkeypatch.context() as failing:
        failing.setattr(WithoutSync, "unlink", full)
        with pytest.raises(StorageError):
            keep(one)
    assert len(files(stores)) == 1 and there(other, "a") == ""
    keep(one)
    assert not files(stores)


def test_a_renewal_that_failed_is_tried_again_before_a_slot_is_given(
    opened: Opened, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, other = opened(), opened()
    put(stopped, a=b"1")
    ids = {*stopped._owner.ids}
    end_lease(server, stopped)
    keep(other), keep(other)
    monkeypatch.setattr(owner_module, "LEASE_S", 60.0)
    stopped._owner._renewed -= 1000.0
    with monkeypatch.context() as failing:
        failing.setattr(RedisMap, "hold", fails)
        with pytest.raises(StorageError):
            put(stopped, b=b"2")
    assert put(stopped, b=b"2") == [True] and not ids & stopped._owner.ids


def test_a_server_that_ends_releases_no_lease_of_another(opened: Opened, server: RedisServer) -> None:
    stopped, other = opened(), opened()
    put(stopped, a=b"1")
    ids = [*stopped._owner.ids]
    end_lease(server, stopped)
    keep(other), keep(other)
    stopped.close()
    map_ = other._owner.map
    assert map_ is not None and map_.holders(ids) == [map_.token]


def test_a_lease_of_which_the_map_says_nothing_is_trouble_and_costs_no_file(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened()
    put(storage, a=b"1")
    ids = {*storage._owner.ids}
    with monkeypatch.context() as failing:
        failing.setattr(RedisMap, "holders", lambda _, owners: [None] * len(owners))  # as a cluster that moves
        with pytest.raises(StorageError, match="neither gives a lease"):
            keep(storage)
    assert storage._owner.ids == ids and storage._owner.table.objects[storage._label]


def test_new_files_are_of_this_machine_after_those_of_another_were_taken_over(
    opened: Opened, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "ORPHAN_S", 0.0)
    storage = opened()
    (stores.folder / "here" / file_name(Extent(SLOT_BYTES, 4, 77, 5))).write_bytes(b"")
    keep(storage), keep(storage)
    assert 5 in storage._owner.ids and put(storage, a=b"1") == [True]
    assert stores.where("a").extent.owner >> 32 == storage._owner._machine != 0


def test_what_a_server_has_deleted_or_the_map_has_lost_is_not_found_after_a_kill_of_its_owner(
    opened: Opened, server: RedisServer, stores: Stores
) -> None:
    one, other = opened(), opened()
    put(one, a=b"1", b=b"1", c=b"1")
    assert other.delete(["a"]) == [True]
    assert put(one, a=b"1") == [True] and one.delete(["a"]) == [True]
    server.ask("DEL", server.key("b"))
    assert put(one, b=b"1") == [True] and other.delete(["b"]) == [True], "which was stored twice"
    server.ask("FLUSHALL")
    stores.die(one)
    keep(other), keep(other)
    assert there(other, "a", "b", "c") == "c"


def test_a_delete_leaves_what_was_stored_in_the_slot_meanwhile(opened: Opened, stores: Stores) -> None:
    one, other = opened(), opened()
    put(one, a=b"1", b=b"2")
    elsewhere = stores.where("b")._replace(generation=1)
    titles = [Title(other._label, name, slot) for name, slot in (("a", stores.where("b")), ("b", elsewhere))]
    other._wipe(other._folder, titles)
    assert (get(other, "a"), get(other, "b")) == (b"1", b"2")


def test_a_full_store_gives_every_server_its_part(opened: Opened, stores: Stores) -> None:
    one, capacity = opened(capacity_bytes=64 * SLOT_BYTES), 64 * SLOT_BYTES
    assert all(one.put([f"one-{i}" for i in range(60)], [memoryview(b"1")] * 60))
    other, stored = opened(capacity_bytes=capacity), 0
    for turn in range(45):
        keep(other)
        stored += other.put([f"other-{turn}"], [memoryview(b"2")]) == [True]
        keep(one)
        assert one._owner.table.own_bytes + other._owner.table.own_bytes <= capacity + 32 * SLOT_BYTES
    assert stored >= 32 and sum(other.exists([f"other-{i}" for i in range(60)])) >= 30
    assert one._owner.table.own_bytes + other._owner.table.own_bytes <= capacity
    assert sum(one.exists([f"one-{i}" for i in range(60)])) >= 20, "and has not given more than that"


def test_a_full_redis_stores_nothing_and_loses_nothing(opened: Opened, server: RedisServer) -> None:
    storage = opened()
    put(storage, a=b"1")
    server.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(StorageError):
            put(storage, b=b"2")
        assert get(storage, "a") == b"1"
    finally:
        server.ask("CONFIG", "SET", "maxmemory", "0")
    keep(storage)
    assert get(storage, "b") == b"2", "it is told as soon as it can be"


def test_a_process_without_the_map_is_refused_where_others_share_it(opened: Opened, stores: Stores) -> None:
    put(opened(), a=b"1")
    with pytest.raises(StorageError, match=r"used by all that share redis:.*, and not by one process of") as told:
        stores.open()
    assert "\n" not in str(told.value)


def test_a_password_comes_from_its_file_and_is_never_shown(
    opened: Opened, server: RedisServer, stores: Stores, tmp_path: Path
) -> None:
    file, wrong = tmp_path / "password", tmp_path / "wrong"
    file.write_text("hunter2\n"), wrong.write_text("hunter3\n")
    server.ask("CONFIG", "SET", "requirepass", "hunter2")
    try:
        for rest in ("", f"?password_file={wrong}", f"?password_file={tmp_path}/none"):
            with pytest.raises(StorageError) as told:
                stores.open(metadata=server.url(rest))
            assert "hunter" not in str(told.value)
        assert put(stores.open(metadata=server.url(f"?password_file={file}")), a=b"1") == [True]
    finally:
        stores.close()
        authenticated(server, "hunter2", "CONFIG", "SET", "requirepass", "")
    assert all("hunter" not in path.read_text("latin-1") for path in (tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        *((setting, "metadata=") for setting in ("unix:/run/kvarve/socket", "memory:a", "ftp://x", "here")),
        ("redis://me:secret@host", "a password cannot stand in a URL"),
        ("redis://host?ttl=7d", "cannot have a ttl"),
        ("redis://host?user=me", "password_file"),
        ("redis://host?password_file=relative", "absolute path"),
        ("redis://host?capacity=1", "unknown parameter"),
    ],
)
def test_a_setting_that_cannot_work_is_told_and_shows_no_secret(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        map_settings(setting)
    assert "secret" not in str(told.value) and "\n" not in str(told.value)


SERVER = """
import random, sys
from kvarve.storage import open_storage
url, label, seed = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
dice, storage = random.Random(seed), open_storage(url, label=label, description="")
for turn in range(10 ** 9):
    numbers = [dice.randrange(300) for _ in range(6)]
    names, buffers = [f"page-{number}" for number in numbers], [memoryview(bytearray(20_000)) for _ in numbers]
    for number, size, buffer in zip(numbers, storage.get(names, buffers), buffers):
        wanted = bytes([number % 251]) * (2000 + 37 * number)
        assert size is None or bytes(buffer[:size]) == wanted, number
    storage.put(names, [memoryview(bytes([number % 251]) * (2000 + 37 * number)) for number in numbers])
    if dice.random() < 0.05:
        storage.delete(names[:1])
    print(turn, flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_servers_that_are_killed_and_stopped_under_traffic_read_no_wrong_byte(
    opened: Opened, server: RedisServer, stores: Stores, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    url = f"hf3fs://{tmp_path}/here?capacity=4MiB&engine=posix&threads=2&metadata={server.url()}"

    def begun() -> Any:
        words = [sys.executable, "-c", SERVER, url, LABEL.hex(), str(dice.randrange(1 << 30))]
        process = forks.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline()
        return process

    servers = [begun() for _ in range(3)]
    for turn in range(50):
        which = dice.randrange(3)
        for _ in range(dice.randrange(1, 20)):
            assert servers[which].stdout.readline(), servers[which].stderr.read()
        match dice.randrange(4):
            case 0:
                servers[which].send_signal(signal.SIGSTOP)
                for _ in range(10):
                    assert servers[which - 1].stdout.readline()
                servers[which].send_signal(signal.SIGCONT)
            case 1:
                server.ask("FLUSHALL") if turn % 10 == 0 else None
            case _:
                servers[which].kill()
                servers[which].communicate(timeout=PATIENCE_S)
                servers[which] = begun()
    for process in servers:
        assert process.poll() is None, process.stderr.read()
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    server.ask("FLUSHALL")  # and so nobody has a lease
    storage = opened(capacity_bytes=4 << 20)
    for _ in range(3):
        keep(storage)
    assert {path.name for path in files(stores)} == {file_name(it.extent) for it in stores.owner().table.files.values()}
    assert sum(path.stat().st_size for path in files(stores)) <= stores.owner().table.own_bytes <= 4 << 20
    check_slots(stores.owner().table)
    stores.stop_the_clock()
    names, stored = [f"new-{i}" for i in range(8)], [False]
    for _ in names:  # what is evicted for them rests first
        stores.clock.now += REST_S
        stored = storage.put(names, [memoryview(bytes(2000 + 1800 * i)) for i in range(8)])
    assert all(stored)
    check_slots(stores.owner().table)
