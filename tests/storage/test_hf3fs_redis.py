"""Metadata in Redis servers that are killed, stopped, restarted empty, replaced, or not fit for it."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hf3fs_metadata_suite import LABEL, LONG_S, K, look, number, store, there
from processes import until
from redis_server import KEPT, RedisServer, free_port

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.hf3fs.metadata import STORE_FILE, Metadata, check_setting, open_metadata

Opened = Callable[..., Metadata]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", *KEPT)
    yield server
    server.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    everything = []
    (tmp_path / "store").mkdir()

    def make(setting: str, slots: int = 64) -> Metadata:
        everything.append(open_metadata(setting, tmp_path / "store", LABEL, slots * K, None))
        return everything[-1]

    yield make
    for metadata in everything:
        metadata.close()


def test_a_server_that_is_killed_is_trouble_and_one_that_is_back_knows_what_was_committed(
    server: RedisServer, opened: Opened
) -> None:
    metadata, request = opened(server.url()), number()
    store(metadata, "a", "b")
    (slot,) = metadata.reserve(request, ["c"], [K], LONG_S)
    server.kill()
    for call in (metadata.usage, lambda: metadata.exists(["a"]), lambda: store(metadata, "x")):
        with pytest.raises(StorageError, match=r"redis\.sock"):
            call()
    with pytest.raises(StorageError):
        opened(server.url())
    server.start()
    assert there(metadata, *"abc") == "a b"
    assert metadata.commit(request, ["c"], [slot], [1]) == [True]
    server.kill()
    server.start()
    assert metadata.commit(request, ["c"], [slot], [1]) == [True]
    assert there(metadata, *"abc") == "a b c"


def test_an_entry_that_is_not_as_it_was_written_costs_its_object_and_no_other(
    server: RedisServer, opened: Opened
) -> None:
    metadata = opened(server.url())
    store(metadata, "a", "b")
    (objects,) = (key for key in server.ask("KEYS", "*:o:*").split("\r\n") if ":o:" in key)
    (good,) = server.ask("HGET", objects, "a").split("\r\n")[1:-1]
    slot_bytes, number_, epoch, size = good.split()
    values = ["", "garbage", slot_bytes, f"-{good}", f"{good} 1", "0 0 0 0", f"{2**41} 0 1 1", f"{10**20} 1 1 1"]
    values += [f"{slot_bytes} {number_} {epoch} {2 * int(slot_bytes)}", f"{slot_bytes} {2**62} {epoch} 1", "5 5 5 5"]
    values += [f"{slot_bytes} {int(number_) + 4}  {epoch} 1", f"{slot_bytes} {number_} {int(epoch) - 1} {size}"]
    for value in values:
        server.ask("HSET", objects, "a", value)
        metadata.touch(["a", "b"])
        reader, (found, other) = look(metadata, "a", "b")
        metadata.release(reader)
        assert other is not None, value
        if found is not None:  # what is in that slot is not the object, as a reader sees who says so
            metadata.delete(["a"], [found])
        assert there(metadata, "a", "b") == "b", value
        assert store(metadata, "a") == [True], value
        assert None not in look(metadata, "a", "b")[1], value
    assert metadata.delete(["a", "b"]) == [True, True]


def test_a_replica_that_takes_over_gives_no_epoch_again(tmp_path: Path, opened: Opened) -> None:
    """It may know less than the server that has gone: commits are lost then, and their slots given under new epochs."""
    port = free_port()
    first = RedisServer(tmp_path / "first", *KEPT, "--repl-diskless-sync-delay", "0", port=port)
    second = RedisServer(tmp_path / "second", *KEPT, port=free_port())
    try:
        url = f"redis://127.0.0.1:{port}"
        metadata = opened(url, 8)
        second.ask("REPLICAOF", "127.0.0.1", str(port))
        until(lambda: "master_link_status:up" in second.ask("INFO", "replication"), "a replica")
        store(metadata, "a")
        slots = f"kvarve:hf3fs:{{{(tmp_path / 'store' / STORE_FILE).read_text().splitlines()[1]}}}:s"
        until(lambda: second.ask("HLEN", slots) == ":1\r\n", "its copy")
        with second.stopped():  # it falls behind
            given = {slot.epoch for slot in metadata.reserve(number(), ["b", "c"], [K] * 2, LONG_S) if slot}
            store(metadata, "d")
            first.kill()
        second.ask("REPLICAOF", "NO", "ONE")
        second.ask("CONFIG", "SET", "port", str(port))
        assert there(metadata, "a") == "a"
        later = metadata.reserve(number(), ["e", "f", "g"], [K] * 3, LONG_S)
        assert not {slot.epoch for slot in later if slot} & given
    finally:
        first.close()
        second.close()


def test_a_server_that_keeps_nothing_or_evicts_is_refused(tmp_path: Path, opened: Opened) -> None:
    forgets = RedisServer(tmp_path / "forgets")
    evicts = RedisServer(tmp_path / "evicts", *KEPT, "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StorageError, match="appendonly yes"):
            opened(forgets.url())
        with pytest.raises(StorageError, match="maxmemory-policy noeviction"):
            opened(evicts.url())
        evicts.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert not opened(evicts.url()).exists(["a"])[0]
    finally:
        forgets.close()
        evicts.close()


def test_a_full_server_loses_nothing_and_does_calls_wholly_or_not(server: RedisServer, opened: Opened) -> None:
    metadata = opened(server.url(), 100)
    store(metadata, "a")
    server.ask("CONFIG", "SET", "maxmemory", "1")
    for at in range(20):
        with suppress(StorageError):
            store(metadata, f"n{at}")
        with suppress(StorageError):
            metadata.delete([f"n{at}"])
    server.ask("CONFIG", "SET", "maxmemory", "0")
    metadata.delete([f"n{at}" for at in range(20)])
    assert all(store(metadata, *(f"m{at}" for at in range(79))))
    assert there(metadata, "a") == "a"


def test_a_password_comes_from_its_file_and_is_never_shown(server: RedisServer, opened: Opened, tmp_path: Path) -> None:
    file, wrong = tmp_path / "password", tmp_path / "wrong"
    file.write_text("hunter2\n"), wrong.write_text("hunter3\n")
    server.ask("CONFIG", "SET", "requirepass", "hunter2")
    for rest in ("", f"?password_file={wrong}", f"?password_file={tmp_path}/none"):
        with pytest.raises(StorageError) as told:
            opened(server.url(rest))
        assert "hunter" not in str(told.value)
    assert store(opened(server.url(f"?password_file={file}")), "a") == [True]
    for path in (tmp_path / "store").iterdir():
        assert "hunter" not in path.read_text()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        *((setting, "metadata=") for setting in ("", "unix:", "unix:relative", "memory:a/b", "ftp://x", "x\0")),
        ("redis://me:secret@host", "no password stands in a URL"),
        ("redis://host?ttl=7d", "no ttl"),
        ("redis://host?user=me", "password_file"),
        ("redis://host?password_file=relative", "absolute path"),
        ("redis://host?capacity=1", "unknown parameter"),
    ],
)
def test_a_setting_that_cannot_work_is_told_and_shows_no_secret(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        check_setting(setting)
    assert "secret" not in str(told.value)
    assert "\n" not in str(told.value)
