"""Redis servers that are killed, stopped, restarted, full, or want another password; TLS; a cluster."""

import logging
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import until
from redis_server import RedisServer, free_port, require_redis

from kvarve.errors import StorageError
from kvarve.storage import Storage, deadline, open_storage
from kvarve.storage.redis.wire import Wire
from kvarve.testing.suite import LABEL, get, put

SECRET = "hunter2"


Opened = Callable[..., Storage]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens storages by their URLs, and closes them."""
    everything = []

    def make(url: str, *, answers: bool = True) -> Storage:
        everything.append(open_storage(url, label=LABEL, description="model A", answers=answers))
        return everything[-1]

    yield make
    for storage in everything:
        storage.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.close()


def test_a_server_that_is_killed_is_trouble_and_one_that_is_back_is_used_at_once(server, opened):
    storage = opened(server.url())
    put(storage, page=b"1")
    server.kill()
    calls = [
        lambda: storage.exists(["page"]),
        lambda: get(storage, "page"),
        lambda: put(storage, page=b"1"),
        lambda: storage.delete(["page"]),
        storage.drop,
        storage.usage,
    ]
    for call in calls:
        with pytest.raises(StorageError, match=str(server.socket)):
            call()
    with pytest.raises(StorageError):
        opened(server.url())
    later = opened(server.url(), answers=False)
    server.start()
    assert get(storage, "page") is None, "the server has forgotten everything"
    assert put(later, page=b"2") == [True]
    assert get(storage, "page") == b"2"


def test_connections_that_were_lost_are_replaced_however_many_they_were(server, opened):
    storage = opened(server.url())
    put(storage, page=b"1")
    for _ in range(120):
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        until(lambda: server.ask("CLIENT", "LIST").count("id=") == 1, "a connection that is lost")
        assert get(storage, "page") == b"1"


def test_a_server_that_stands_still_costs_its_callers_their_deadline_and_later_answers_nothing_wrong(server, opened):
    storage = opened(server.url())
    names = [f"page-{i}" for i in range(8)]
    data = [memoryview(bytes([i]) * 300_000) for i in range(8)]
    assert storage.put(names, data) == [True] * 8
    buffers = [memoryview(bytearray(300_000)) for _ in names]
    with server.stopped():
        for call in (lambda: storage.get(names, buffers), lambda: storage.put(["x"], data[:1]), storage.usage):
            with deadline(0.05), pytest.raises(StorageError, match=str(server.socket)):
                call()
    back = names[::-1]
    assert storage.get(back, buffers) == [300_000] * 8
    assert buffers == data[::-1], "a connection on which answers may still come is not used again"


def test_a_server_that_evicts_costs_misses_and_one_that_may_not_has_no_space(tmp_path, opened):
    server = RedisServer(tmp_path / "redis", "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    try:
        storage = opened(server.url())
        names, view = [f"page-{i}" for i in range(200)], memoryview(bytes(100_000))
        for name in names:
            assert storage.put([name], [view]) == [True]
        usage = storage.usage()
        assert usage.capacity_bytes == 8 << 20
        assert usage.evicted and usage.evicted >= 100
        assert (usage.objects, usage.bytes) == (None, None)
        found = sum(storage.exists(names))
        assert 0 < found < 100
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        stored = storage.put([f"more-{i}" for i in range(100)], [view] * 100)
        assert stored[-1] is False
        sizes = storage.get([f"more-{i}" for i in range(100)], [view_of(100_000)] * 100)
        assert [size is not None for size in sizes] == stored
        assert storage.exists(names).count(True) == found
    finally:
        server.close()


def view_of(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


def test_a_key_that_the_server_refuses_is_missing_and_stays_as_it_is(server, opened):
    storage = opened(server.url())
    shut, *others = names = ["shut-1", "open-1", "open-2"]
    data = {name: name.encode() for name in names}
    put(storage, **data)
    server.ask("ACL", "SETUSER", "default", "resetkeys", "~kvarve:*:open-*")
    assert storage.exists(names) == [False, True, True]
    buffers = [memoryview(bytearray(6)) for _ in names]
    assert storage.get(names, buffers) == [None, 6, 6]
    assert [bytes(view) for view in buffers[1:]] == [b"open-1", b"open-2"]
    assert put(storage, **data) == [False, True, True]
    assert storage.delete(names) == [False, True, True]
    assert put(storage, **data) == [False, True, True]
    assert storage.counts["refused"] == 5
    for call in (lambda: get(storage, shut), lambda: storage.exists([shut]), lambda: put(storage, **{shut: b""})):
        with pytest.raises(StorageError, match="NOPERM"):  # of all that was asked nothing was answered
            call()
    with pytest.raises(StorageError, match=r"NOPERM.* removed 2 objects, and 1 are still there"):
        storage.drop()
    server.ask("ACL", "SETUSER", "default", "allkeys")
    assert get(storage, shut) == b"shut-1"
    assert storage.exists(others) == [False, False]


def test_a_password_is_needed_checked_and_told_to_nobody(tmp_path, opened, caplog):
    caplog.set_level(logging.DEBUG)
    port = free_port()
    server = RedisServer(tmp_path / "redis", "--requirepass", SECRET, port=port)
    try:
        storage = opened(f"redis://:{SECRET}@127.0.0.1:{port}")
        assert put(storage, page=b"1") == [True]
        named = opened(f"redis://default:{SECRET}@127.0.0.1:{port}")
        assert get(named, "page") == b"1"
        told = [repr(vars(storage)), repr(storage)]
        for url in (
            f"redis://:{SECRET}x@127.0.0.1:{port}",
            f"redis://127.0.0.1:{port}",
            f"redis://me:{SECRET}@127.0.0.1:{port}",
        ):
            with pytest.raises(StorageError, match=rf"(?i)127.0.0.1:{port}: .*(password|authentication)") as refusal:
                opened(url)
            told.append(str(refusal.value))
        assert SECRET not in "".join(told) + caplog.text
        assert f"127.0.0.1:{port}" in told[-1]
    finally:
        server.close()


def test_over_tls_the_server_has_to_be_the_one_whose_certificate_is_known(tmp_path, opened):
    certificate, key, port = tmp_path / "cert.pem", tmp_path / "key.pem", free_port()
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=test -days 1"
    words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(words.split(), check=True, capture_output=True)
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    server = RedisServer(tmp_path / "redis", "--port", "0", "--tls-port", str(port), *files)
    try:
        storage = opened(f"rediss://127.0.0.1:{port}?tls_ca={certificate}")
        names, data = [f"page-{i}" for i in range(12)], [os.urandom(200_000 + i) for i in range(12)]
        assert storage.put(names, [memoryview(each) for each in data]) == [True] * 12
        buffers = [memoryview(bytearray(len(each))) for each in data]
        assert storage.get(names, buffers) == [len(each) for each in data]
        assert buffers == data
        assert storage.exists([*names, "x"]) == [True] * 12 + [False]
        for url in (f"rediss://127.0.0.1:{port}", f"redis://127.0.0.1:{port}"):
            with deadline(20.0), pytest.raises(StorageError, match=f"127.0.0.1:{port}"):
                opened(url)
    finally:
        server.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Two servers that have half of the slots each."""
    require_redis()
    servers: list[RedisServer] = []
    try:
        for number in range(2):
            while (port := free_port()) > 55_000:  # its bus has the port 10,000 above
                pass
            folder = tmp_path / f"redis{number}"
            servers.append(
                RedisServer(folder, "--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", port=port)
            )
        half = 8192
        assert servers[0].ask("CLUSTER", "ADDSLOTSRANGE", "0", str(half - 1)).startswith("+OK")
        assert servers[1].ask("CLUSTER", "ADDSLOTSRANGE", str(half), "16383").startswith("+OK")
        servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(servers[1].port))
        for server in servers:
            for wanted in ("cluster_state:ok", "cluster_slots_ok:16384"):
                until(lambda server=server, wanted=wanted: wanted in server.ask("CLUSTER", "INFO"), "a cluster")
        yield servers
    finally:
        for server in servers:
            server.close()


def test_a_cluster_has_each_object_at_one_server_and_misses_those_of_one_that_is_gone(cluster, opened):
    names, data = [f"page-{i}" for i in range(60)], [memoryview(bytes([i]) * 5000) for i in range(60)]
    with pytest.raises(StorageError, match=r"MOVED .*give its URL cluster=yes"):
        opened(f"redis://127.0.0.1:{cluster[0].port}", answers=False).exists(names)
    storage = opened(f"redis://127.0.0.1:{cluster[0].port}?cluster=yes")
    assert storage.put(names, data) == [True] * 60
    counts = [int(server.ask("DBSIZE")[1:]) for server in cluster]
    assert sum(counts) == 60
    assert min(counts) > 10
    buffers = [memoryview(bytearray(5000)) for _ in names]
    assert storage.get([*names, "x"], [*buffers, view_of(9)]) == [5000] * 60 + [None]
    assert buffers == data
    assert storage.exists(names) == [True] * 60
    # A slot moves: the first call after it finds nothing there, and the next one knows.
    key = cluster[0].ask("RANDOMKEY").split("\r\n")[1]
    slot, name = cluster[0].ask("CLUSTER", "KEYSLOT", key)[1:].strip(), key.rpartition(":")[2]
    moved, donor, taker = [name], *cluster
    assert storage.delete(moved) == [True]
    taker_id = taker.ask("CLUSTER", "MYID").split("\r\n")[1]
    for server in (taker, donor):
        assert server.ask("CLUSTER", "SETSLOT", slot, "NODE", taker_id) == "+OK\r\n"
    assert put(storage, **{name: b"moved"}) == [False]
    assert storage.counts["at another server"] == 1
    assert put(storage, **{name: b"moved"}) == [True]
    assert get(storage, name) == b"moved"
    assert put(storage, **{f"group-{i}": b"1" for i in range(30)}) == [True] * 30
    assert storage.drop("group") == 30, "every server is asked"
    before = storage.exists(names)
    cluster[1].kill()
    left = storage.exists(names)
    assert 0 < sum(left) < sum(before)
    sizes = storage.get(names, buffers)
    assert [size is not None for size in sizes] == left
    cluster[0].kill()
    with pytest.raises(StorageError):
        storage.exists(names)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        *((Wire.text, said) for said in (b"$9999999999999\r\n", b"$-1\r\n", b"$x\r\n", b"$1_0\r\n", b":1\r\n")),
        *((Wire.number, said) for said in (b":x\r\n", b":\r\n", b":1_0\r\n", b"$1\r\n")),
    ],
)
def test_an_answer_that_cannot_be_is_trouble_before_there_is_memory_for_it(
    ask: Callable[[Wire], object], said: bytes
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        with pytest.raises(StorageError, match="no Redis answers there"):
            ask(Wire(ours, "here"))


def test_a_connection_that_ends_in_the_middle_of_a_value_is_trouble() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"$100\r\nhalf of it")
        theirs.close()
        with pytest.raises(StorageError, match="here"):
            Wire(ours, "here").payload(view_of(100))


def test_what_a_server_says_after_the_deadline_is_too_late_though_it_is_there() -> None:
    """Else one that goes on sending holds its caller for as long as it likes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b":1\r\n")
        wire = Wire(ours, "here")
        wire.wait_for(0.0)
        with pytest.raises(StorageError, match="in time"):
            wire.number()
        with pytest.raises(StorageError, match="in time"):
            wire.send([b"PING"])
