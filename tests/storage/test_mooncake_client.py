"""The client without a master: a library that imitates the real one, and settings from every source."""

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import check_storage
from kvarve.storage.mooncake import _client as mooncake_client
from kvarve.storage.mooncake import _mooncake_backend as mooncake_backend
from kvarve.storage.mooncake._client import LIBRARY_PATIENCE_S, Client, Settings
from kvarve.storage.mooncake._mooncake_backend import read_settings
from kvarve.storage.mooncake._mooncake_storage import MooncakeStorage
from kvarve.storage.urls import parse_url
from kvarve.system.regions import HostRegion, address

TRANSFER_FAILED, OK = -800, 0


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which a process listens, as a master does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class Library:
    """A library that holds one object, and whose transfers hang when told; the hanging ones end when it is closed."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds  # the time of the clock
        self.hang = self.closed = False
        self.begun, self.may_end = threading.Event(), threading.Event()  # of asking what exists
        self.may_end.set()
        self.late: list[int] = []  # addresses that may still be written to
        self.registered: list[tuple[int, int]] = []
        self.hostname = ""
        self.inside = 0

    def setup(self, hostname: str, *rest: object) -> int:
        self.hostname = hostname
        return OK

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return OK

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        assert not self.closed, "the real library would have crashed the process"
        self.inside += 1
        self.begun.set()
        assert self.may_end.wait(30)
        self.inside -= 1
        return [1] * len(keys)

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        assert not self.closed, "the real library would have crashed the process"
        return [OK] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        assert not self.closed, "the real library would have crashed the process"
        if not self.hang:
            return list(sizes)
        self.late += addresses
        self.seconds[0] += LIBRARY_PATIENCE_S + 10
        return [TRANSFER_FAILED] * len(keys)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        """batch_remove(self: mooncake.store.MooncakeDistributedStore, keys: list[str], force: bool = False)"""
        assert force, "else an object under a lease stays"
        return [OK] * len(keys)

    def close(self) -> int:
        assert not self.inside, "the real library would have crashed the process"
        self.closed = True
        self.late.clear()
        return OK


class World:
    def __init__(self, port: int) -> None:
        self.made: list[Library] = []
        self.seconds = [0.0]
        self.settings = Settings(f"127.0.0.1:{port}", metrics="127.0.0.1:1")

    def _make(self) -> Library:
        self.made.append(Library(self.seconds))
        return self.made[-1]

    def client(self, settings: Settings | None = None) -> Client:
        """One that is connected."""
        client = Client(settings or self.settings, make=self._make, clock=lambda: self.seconds[0])
        client.exists(["any"])
        return client

    def storage(self) -> MooncakeStorage:
        return MooncakeStorage(self.settings, b"label", "model A", self.client)


@pytest.fixture
def world(port: int) -> World:
    return World(port)


def test_transfers_that_the_library_gave_up_on_are_over_before_the_get_returns(world: World) -> None:
    storage = world.storage()
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    storage.register(HostRegion(memory))
    (first,) = world.made
    first.hang = True
    with pytest.raises(StorageError, match="owners do not answer"):
        storage.get(["a", "b"], [memory[:4096], memory[4096:8192]])
    assert first.closed
    assert first.late == []
    assert storage.get(["a"], [memory[:4096]]) == [4096]
    assert len(world.made) == 2
    assert world.made[1].registered == [(address(memory), len(memory))], "the next one knows the memory too"


@pytest.mark.parametrize("why", ["a transfer that was given up", "close"])
def test_a_client_in_which_others_are_is_closed_when_they_have_left(world: World, why: str) -> None:
    storage = world.storage()
    (library,) = world.made
    library.begun.clear(), library.may_end.clear()
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(storage.exists, ["a"])
        assert library.begun.wait(30)
        if why == "close":
            closing = pool.submit(storage.close)
        else:
            library.hang = True
            closing = pool.submit(storage.get, ["a"], [memoryview(bytearray(64))])
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        assert not library.closed
        library.may_end.set()
        assert asking.result(30) == [True]
        assert why == "close" or isinstance(closing.exception(30), StorageError)
    storage.close()
    storage.close()
    for call in (lambda: storage.exists(["a"]), storage.usage, lambda: storage.get([], []), storage.drop):
        with pytest.raises(StorageError, match="closed"):
            call()
    assert all(library.closed for library in world.made)


@pytest.mark.parametrize("what", ["put", "get"])
def test_one_transfer_each_way_waits_for_the_one_before_it_unless_that_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    client = world.client()
    entered, leave = threading.Semaphore(0), threading.Event()

    def transfer(keys: list[str], *_: object) -> list[int]:
        entered.release()
        assert leave.wait(30)
        return [OK]

    setattr(world.made[0], "batch_put_from" if what == "put" else "batch_get_into", transfer)
    monkeypatch.setattr(mooncake_client, "_TURN_S", 30.0)
    move, other = (client.put, client.get) if what == "put" else (client.get, client.put)
    with ThreadPoolExecutor(3) as pool:
        pool.submit(move, ["a"], [0], [1]), pool.submit(move, ["a"], [0], [1])
        assert entered.acquire(timeout=30)
        assert other(["a"], [0], [1]) in ([OK], [1]), "the other way is free"
        assert not entered.acquire(blocking=False)
        monkeypatch.setattr(mooncake_client, "_TURN_S", 0.01)
        pool.submit(move, ["a"], [0], [1])
        assert entered.acquire(timeout=30), "it has gone ahead"
        leave.set()


PAGE = b"0123456789"


def answering(world: World, call: str, *codes: int) -> MooncakeStorage:
    """A storage whose library answers these codes, one for each key, and above zero fills the buffer."""
    storage = world.storage()

    def answer(keys: list[str], addresses: Sequence[int] = (), *_: object) -> list[int]:
        told = [codes[int(key[-1])] for key in keys]
        for code, where in zip(told, addresses, strict=False):
            if code > 0:
                ctypes.memmove(where, PAGE, code)
        return told

    setattr(world.made[0], call, answer)
    return storage


@pytest.mark.parametrize("code", [-1, -400, -713, TRANSFER_FAILED, -1300])
def test_an_object_that_cannot_be_read_is_missing_and_of_a_call_without_another_it_is_trouble(
    world: World, code: int
) -> None:
    storage, names = answering(world, "batch_get_into", 10, code, 10), ["a0", "a1", "a2"]
    buffers = [memoryview(bytearray(10)) for _ in names]
    assert storage.get(names, buffers) == [10, None, 10]
    assert [bytes(view) for view in buffers[::2]] == [PAGE] * 2
    assert storage.counts["unreadable"] == 1
    with pytest.raises(StorageError, match=rf"owners do not answer \({code}\)"):
        storage.get(["a1"], buffers[:1])


@pytest.mark.parametrize("code", [-801, -1100, -1102, -1200], ids=["checksum", "file", "read", "bucket"])
def test_an_object_of_which_the_owner_says_that_it_is_damaged_is_too_short_and_no_trouble(
    world: World, code: int
) -> None:
    storage = answering(world, "batch_get_into", code, 10)
    buffers = [memoryview(bytearray(10)) for _ in range(2)]
    assert storage.get(["a0"], buffers[:1]) == [0], "so its reader deletes it"
    assert storage.get(["a0", "a1"], buffers) == [0, 10]
    assert bytes(buffers[1]) == PAGE
    assert storage.counts == {"damaged": 2, "unreadable": 0}


def test_an_object_that_is_not_taken_or_not_removed_costs_no_other(world: World) -> None:
    storage, data = answering(world, "batch_put_from", OK, -600, -200), [memoryview(PAGE)] * 3
    assert storage.put(["a0", "a1", "a2"], data) == [True, False, False]
    assert storage.put(["a1", "a2"], data[:2]) == [False, False]
    assert (storage.counts["not taken"], storage.counts["no space"]) == (2, 2)
    with pytest.raises(StorageError, match=r"no owner takes them \(-600\)"):
        storage.put(["a1"], data[:1])
    world.made[0].batch_remove = lambda keys, _: [-1 if key.endswith("1") else OK for key in keys]  # type: ignore[method-assign]
    assert storage.delete(["a0", "a1"]) == [True, False]
    with pytest.raises(StorageError, match=r"deleted 0 of 1 objects \(-1\)"):
        storage.delete(["a1"])


def test_an_object_of_which_the_master_cannot_tell_is_missing_and_all_are_trouble(world: World) -> None:
    storage = answering(world, "batch_is_exist", 1, -400, 0)
    assert storage.exists(["a0", "a1", "a2"]) == [True, False, False]
    with pytest.raises(StorageError, match="cannot tell which objects exist: -400"):
        storage.exists(["a1"])


def test_a_setup_that_fails_is_told_and_tried_again_by_the_next_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client()
    world.made[0].hang = True
    client.get(["a"], [0], [1])
    monkeypatch.setattr(Library, "setup", lambda *_: -1)
    with pytest.raises(StorageError, match="could not be set up"):
        client.exists(["a"])
    monkeypatch.undo()
    assert client.exists(["a"]) == [1]


def test_a_child_after_a_fork_leaves_the_library_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, child = world.storage(), os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(StorageError, match="fork"):
        storage.exists(["a"])
    storage.close()
    assert not world.made[0].closed


def test_without_a_master_a_call_ends_before_it_enters_the_library(world: World) -> None:
    client = Client(Settings("127.0.0.1:1"), make=lambda: pytest.fail("setup would block for 90 s"))
    with pytest.raises(StorageError, match=r"no Mooncake master answers at 127\.0\.0\.1:1: .*refused") as told:
        client.exists(["some"])
    assert "\n" not in str(told.value)


def test_the_address_by_which_the_master_is_reached_is_this_ones_unless_it_has_a_name(world: World) -> None:
    world.client()
    world.client(Settings(world.settings.master, hostname="node-7"))
    assert [library.hostname for library in world.made] == ["127.0.0.1", "node-7"]


Read = Callable[..., Settings]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The settings that a URL means in an environment."""
    monkeypatch.setattr(mooncake_backend, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: True)))

    def read_url(text: str, **environ: str) -> Settings:
        url = parse_url(text)
        return read_settings(url, environ)

    return read_url


def test_a_url_says_everything(read: Read) -> None:
    settings = read(
        "mooncake://10.0.0.1:5?protocol=rdma&device=mlx5_0&segment=4GiB&metadata=http://10.0.0.1:8080/metadata"
        "&hostname=node-7&replicas=2&soft_pin=true&hard_pin=no&metrics=10.0.0.1:19003"
    )
    metadata = "http://10.0.0.1:8080/metadata"
    assert settings == Settings(
        "10.0.0.1:5", "rdma", "mlx5_0", 4 << 30, metadata, "node-7", 2, True, False, "10.0.0.1:19003"
    )


def test_what_a_url_leaves_out_comes_from_the_variables_then_the_file(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps({"master_server_address": "f:1", "protocol": "rdma", "device_name": "mlx5_1", "local_hostname": "f"})
    )
    variables = {
        "MOONCAKE_CONFIG_PATH": str(file),
        "MOONCAKE_MASTER": "v:2",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gb",
        "MOONCAKE_LOCAL_HOSTNAME": "v",
        "MOONCAKE_TE_META_DATA_SERVER": "etcd://v",
    }
    settings = read("mooncake:///?hostname=u", **variables)
    assert settings == Settings("v:2", "rdma", "mlx5_1", 4 << 30, "etcd://v", "u", metrics="v:9003")
    assert read("mooncake://u:3", **variables).master == "u:3"
    assert read("mooncake://master") == Settings("master:50051", metrics="master:9003")
    assert read("mooncake://[::1]").address == ("::1", 50051)
    for content in ("[]", "{", "\x00"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH"):
            read("mooncake://master", MOONCAKE_CONFIG_PATH=str(file))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mooncake://", "say where the master is"),
        ("mooncake://master/path", "no path"),
        ("mooncake://master:99999", "must be host:port"),
        ("mooncake://master?replicas=0", "replicas"),
        ("mooncake://master?soft_pin=maybe", "must be yes or no"),
        ("mooncake://master?segment=big", "cannot be read as a size"),
        ("mooncake://master?metrics=a/b", "must be host:port"),
        ("mooncake://master?capacity=1GiB", "unknown parameter 'capacity'"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(read: Read, url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refusal:
        read(url)
    assert "\n" not in str(refusal.value)


def test_a_library_that_is_not_there_is_noticed_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[server,mooncake\]'"):
        check_storage("mooncake://127.0.0.1:1", label=b"label", description="model A")


def test_a_library_that_cannot_remove_by_force_is_refused_by_its_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Library, "batch_remove", lambda self, keys: [OK] * len(keys))
    with pytest.raises(ConfigError, match=r"0\.3\.13 or newer"):
        world.client()
