"""The suite of every storage against a real Redis server, over a Unix socket, and what is Redis's own."""

import hashlib
import itertools
from collections.abc import Callable, Iterator

import pytest
from light import light
from redis_server import RedisServer, free_port

from kvarve.errors import ConfigError
from kvarve.storage import Storage, open_storage
from kvarve.storage.redis.redis_backend import read_settings
from kvarve.storage.urls import parse_url
from kvarve.testing.suite import (
    LABEL,
    OTHER_LABEL,
    Damage,
    MakeAging,
    MakeStorage,
    StorageSuite,
    TtlSuite,
    UrlOf,
    get,
    put,
    there,
)
from kvarve.testing.suite_use import OTHER_BYTES

_tests = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), port=free_port())
    yield server
    server.close()


@pytest.fixture
def opened(server: RedisServer) -> Iterator[Callable[..., Storage]]:
    everything = []

    def make(url: str | None = None, label: bytes = LABEL) -> Storage:
        everything.append(open_storage(url or server.url(), label=label, description="model A"))
        return everything[-1]

    yield make
    for storage in everything:
        storage.close()
    server.ask("FLUSHALL")


def mixed(label: bytes, place: str, test: int) -> bytes:
    """One server is one place: several of them are labels here."""
    return hashlib.sha256(label + f"{place} {test}".encode()).digest() if 1 <= len(label) <= 64 else label


@light
class TestRedisStorage(StorageSuite, TtlSuite):
    @pytest.fixture
    def test(self) -> int:
        return next(_tests)

    @pytest.fixture
    def make_storage(self, server: RedisServer, opened: Callable[..., Storage], test: int) -> MakeStorage:
        def make(
            *,
            label: bytes = LABEL,
            description: str = "model A",
            capacity_bytes: int = 64 << 20,
            place: str = "here",
        ) -> Storage:
            return opened(label=mixed(label, place, test))

        return make

    @pytest.fixture
    def url_of(self, server: RedisServer, test: int) -> UrlOf:
        return lambda place: (server.url(), mixed(LABEL, place, test))

    @pytest.fixture
    def damages(self, server: RedisServer) -> dict[str, Damage]:
        commands = {
            "a list": ("RPUSH", "a", "b"),
            "a hash": ("HSET", "field", "value"),
            "a stream": ("XADD", "*", "field", "value"),
            "a counter": ("INCR",),
        } | {what: ("SET", data.decode()) for what, data in OTHER_BYTES.items()}

        def written(word: str, *rest: str) -> Damage:
            def damage(storage: Storage, name: str) -> None:
                key = server.key(name)
                assert server.ask("DEL", key) == ":1\r\n"
                assert not server.ask(word, key, *rest).startswith("-")

            return damage

        return {what: written(*words) for what, words in commands.items()}

    @pytest.fixture
    def make_aging(self, server: RedisServer, opened: Callable[..., Storage]) -> MakeAging:
        def wait(seconds: float) -> None:
            for key in server.ask("KEYS", "*").split("\r\n")[2::2]:  # the server's clock cannot be moved
                left_ms = int(server.ask("PTTL", key)[1:])
                server.ask("PEXPIRE", key, str(left_ms - int(1000 * seconds)))

        return lambda ttl_s: (opened(server.url(f"?ttl={ttl_s:g}s")), wait)


def test_other_keys_of_the_server_are_neither_seen_nor_touched(server, opened):
    server.ask("SET", "theirs", "1")
    storage, other = opened(), opened(label=OTHER_LABEL)
    put(storage, page=b"1", theirs=b"ours")
    put(other, page=b"2")
    assert storage.drop() == 2
    assert server.ask("GET", "theirs") == "$1\r\n1\r\n"
    assert get(other, "page") == b"2"


def test_a_drop_goes_through_as_many_keys_as_there_are(server, opened):
    storage = opened()
    names = [f"a-{i}" for i in range(1200)] + [f"b.c-{i}" for i in range(30)]
    assert all(storage.put(names, [memoryview(b"1")] * len(names)))
    assert (storage.drop("b.c"), storage.drop("a"), storage.drop()) == (30, 1200, 0)


def test_a_databases_number_keeps_it_apart(server, opened):
    one, other = (opened(f"redis://127.0.0.1:{server.port}/{number}") for number in (0, 3))
    put(one, a=b"1")
    assert there(other, "a") == ""
    assert there(opened(f"redis://127.0.0.1:{server.port}"), "a") == "a"


def test_a_payload_that_comes_in_many_pieces_is_put_together_wherever_they_end(opened):
    storage = opened()
    sizes = [*range(40), 16_383, 16_384, 16_385, 65_535, 65_537, 3_000_001]
    data = [bytes((i + at) % 251 for at in range(min(size, 500))) * (size // 500 + 1) for i, size in enumerate(sizes)]
    views = [memoryview(each)[:size] for each, size in zip(data, sizes, strict=True)]
    names = [f"page-{i}" for i in range(len(sizes))]
    assert all(storage.put(names, views))
    buffers = [memoryview(bytearray(size)) for size in sizes]
    assert storage.get(names, buffers) == sizes
    assert buffers == views
    half = [memoryview(bytearray(size // 2)) for size in sizes]
    assert storage.get(names, half) == sizes
    assert half == [view[: size // 2] for view, size in zip(views, sizes, strict=True)]


def test_more_than_may_be_under_way_at_once_is_read(opened):
    storage = opened()
    names, data = [f"page-{i}" for i in range(40)], [memoryview(bytes([i]) * (1 << 20)) for i in range(40)]
    assert all(storage.put(names, data))
    buffers = [memoryview(bytearray(1 << 20)) for _ in names]
    assert storage.get([*names, "none"], [*buffers, memoryview(bytearray(1 << 24))]) == [1 << 20] * 40 + [None]
    assert buffers == data


def test_of_a_value_that_is_far_too_long_no_more_is_read_than_its_buffer_takes(server, opened):
    storage = opened()
    names = ["a", "long", "b", "longer", "c"]
    assert all(put(storage, **{name: name.encode() for name in names}))
    for name in ("long", "longer"):
        server.ask("SETRANGE", server.key(name), str(64 << 20), "x")
    before = sent(server)
    buffers = [memoryview(bytearray(8)) for _ in names]
    assert storage.get(names, buffers) == [1, (64 << 20) + 1, 1, (64 << 20) + 1, 1]
    assert [bytes(view).rstrip(b"\0") for view in buffers] == [name.encode() for name in names]
    assert sent(server) - before < 16 << 20
    assert storage.delete(names) == [True] * 5


def sent(server: RedisServer) -> int:
    return int(server.ask("INFO", "stats").partition("total_net_output_bytes:")[2].split()[0])


def test_a_url_says_where_and_how():
    settings = read_settings(parse_url("redis://me:p%40w@10.0.0.1:7000/2?ttl=2m"))
    assert (settings.host, settings.port, settings.database, settings.ttl_s) == ("10.0.0.1", 7000, 2, 120.0)
    assert (settings.user, settings.password, settings.tls) == ("me", "p@w", False)
    assert "p@w" not in repr(settings)
    settings = read_settings(parse_url("rediss://[::1]?tls_ca=/ca.pem&cluster=yes"))
    assert (settings.host, settings.port, settings.tls, settings.tls_ca) == ("::1", 6379, True, "/ca.pem")
    assert settings.cluster
    assert read_settings(parse_url("redis:///run/redis.sock")).socket == "/run/redis.sock"
    settings = read_settings(parse_url("redis://host?user=me&password_file=/etc/secret"))
    assert (settings.user, settings.password, settings.password_file) == ("me", None, "/etc/secret")
    for wrong in ("redis://host?user=me", "redis://host?password_file=here", "redis://a:b@host?password_file=/here"):
        with pytest.raises(ConfigError, match="password"):
            read_settings(parse_url(wrong))
