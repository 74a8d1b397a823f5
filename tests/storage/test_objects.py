"""The suite of every storage against two real servers of S3, and what is an object store's own."""

import gc
import importlib
import itertools
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import pytest
from light import light
from object_servers import KEY, SECRET, Proxy, Rclone, Server, moto
from processes import until

from kvarve.storage import Storage, open_storage
from kvarve.storage.objects._bucket import key_of
from kvarve.storage.objects._known import Known, hashed
from kvarve.storage.objects._object_storage import ObjectStorage
from kvarve.testing.suite import LABEL, OTHER_LABEL, Damage, MakeStorage, StorageSuite, UrlOf, get, put, there
from kvarve.testing.suite_use import OTHER_BYTES

obstore = find_spec("obstore") and importlib.import_module("obstore")
EPOCH = "Thu, 01 Jan 1970 00:00:00 GMT"
_places = itertools.count()
Opened = Callable[..., Storage]


@pytest.fixture(scope="module")
def of_moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = moto(tmp_path_factory.mktemp("objects"))
    yield server
    server.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    for name, value in {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    everything = []

    def make(url: str, label: bytes = LABEL, description: str = "model A") -> Storage:
        everything.append(open_storage(url, label=label, description=description))
        return everything[-1]

    yield make
    for storage in everything:
        storage.close()


class ObjectSuite(StorageSuite):
    """Each test has a prefix of its own."""

    @pytest.fixture
    def url_of(self, server: Server) -> UrlOf:
        test = next(_places)
        return lambda place: (server.url(f"test-{test}/{place}"), LABEL)

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        def at(storage: ObjectStorage, name: str) -> tuple[Any, str]:
            return storage._store, key_of(name, storage._root)

        def written(data: bytes) -> Damage:
            return lambda storage, name: obstore.put(*at(storage, name), data)

        gone = {"an object that is gone": lambda storage, name: obstore.delete(*at(storage, name))}
        return {what: written(data) for what, data in OTHER_BYTES.items()} | gone

    @pytest.fixture
    def make_storage(self, opened: Opened, url_of: UrlOf) -> MakeStorage:
        def make(
            *,
            label: bytes = LABEL,
            description: str = "model A",
            capacity_bytes: int = 64 << 20,
            place: str = "here",
        ) -> Storage:
            return opened(url_of(place)[0], label, description)

        return make


@light
class TestObjectsOfRclone(ObjectSuite):
    @pytest.fixture
    def server(self, rclone: Rclone) -> Server:
        return rclone


@pytest.mark.long
class TestObjectsOfMoto(ObjectSuite):
    @pytest.fixture
    def server(self, of_moto: Server) -> Server:
        return of_moto


@pytest.fixture
def ours(opened: Opened, rclone: Rclone) -> Iterator[tuple[Rclone, Proxy]]:
    """A server with an empty prefix, and a proxy in front of it that counts requests."""
    rclone.place = f"test-{next(_places)}"
    proxy = Proxy(rclone)
    yield rclone, proxy
    proxy.close()


def test_objects_that_this_process_has_seen_cost_no_question(ours, opened):
    _, proxy = ours
    names = [f"group-{i:040x}.kv.0of1" for i in range(128)]
    one = opened(proxy.url())
    assert all(one.put(names, [memoryview(b"page")] * 128))
    before = proxy.counts["HEAD"]
    assert one.exists(names) == [True] * 128
    assert proxy.counts["HEAD"] == before
    one.close()
    del one
    gc.collect()  # what storages of a place share goes with the last of them
    other = opened(proxy.url())
    until(lambda: all(other._known.has(names)), "a listing in the background")
    assert other.exists([*names, "none"]) == [True] * 128 + [False]
    assert proxy.counts["HEAD"] <= before + 1, "only of the name that nobody has stored"
    obstore.delete(other._store, [key_of(name, other._root) for name in names[7:9]])
    assert other.get(names[7:10], [memoryview(bytearray(4))] * 3) == [None, None, 4]
    assert other.exists(names[7:10]) == [False, False, True], "what was found missing is asked for again"


def test_keys_are_spread_and_a_label_is_a_folder_of_its_own(ours, opened):
    server, _ = ours
    storage = opened(server.url("a/b=c"))
    assert all(storage.put([f"same-{i}" for i in range(200)], [memoryview(b"1")] * 200))
    until((server.bucket / f"a/b=c/kvarve-{LABEL.hex()}/about.json").exists, "what the model is")
    folders = {path.parent.name for path in (server.bucket / "a/b=c").rglob("same-*")}
    assert len(folders) > 100
    assert all(re.fullmatch("[0-9a-f]{2}", folder) for folder in folders)


def test_nothing_is_removed_that_has_not_one_of_our_keys(ours, opened):
    server, _ = ours
    storage, other = opened(server.url()), opened(server.url(), OTHER_LABEL)
    put(storage, **{"g-1": b"1", "g-2": b"2"})
    put(other, **{"g-1": b"3"})
    root = f"{server.place}/kvarve-{LABEL.hex()}"
    theirs = [f"{root}/00/not-in-its-place", f"{root}/notes", f"{server.place}/x"]
    for key in theirs:
        obstore.put(storage._store, key, b"theirs")
    assert (storage.drop("g"), storage.drop()) == (2, 0)
    assert all(bytes(obstore.get(storage._store, key).bytes()) == b"theirs" for key in theirs)
    assert (there(storage, "g-1", "g-2"), get(other, "g-1")) == ("", b"3")


def test_of_an_object_that_is_far_too_long_no_more_comes_than_its_buffer_takes(ours, opened):
    _, proxy = ours
    storage = opened(proxy.url())
    put(storage, long=b"a", b=b"b")
    sent, closed = [], threading.Event()

    def fault(handler, method):
        if method != "GET" or not handler.path.endswith("/long"):
            return False
        handler.send_response(200)
        for header in (("Content-Length", str(1 << 40)), ("ETag", '"x"'), ("Last-Modified", EPOCH)):
            handler.send_header(*header)
        handler.end_headers()
        with suppress(OSError):
            while True:
                sent.append(handler.wfile.write(bytes(1 << 20)))
        closed.set()
        handler.close_connection = True
        return True

    proxy.fault = fault
    buffers = [memoryview(bytearray(8)) for _ in range(2)]
    assert storage.get(["long", "b"], buffers) == [1 << 40, 1]
    assert bytes(buffers[1][:1]) == b"b"
    assert closed.wait(60.0)
    assert sum(sent) < 64 << 20


def test_where_only_reading_is_wanted_nothing_is_stored_or_removed(ours, opened):
    server, proxy = ours
    put(opened(server.url()), a=b"1")
    reader = opened(proxy.url(more="&read_only=yes"))
    assert (put(reader, b=b"2"), get(reader, "a"), reader.delete(["a"]), reader.drop()) == ([False], b"1", [False], 0)
    assert reader.usage().read_only
    assert not {"PUT", "DELETE", "POST"} & {*proxy.counts}


def test_a_put_asks_the_server_to_replace_nothing(ours, opened):
    _, proxy = ours
    asked = []
    proxy.fault = lambda handler, method: method == "PUT" and asked.append(handler.headers.get("If-None-Match"))
    put(opened(proxy.url()), a=b"1", b=b"2")
    assert asked.count("*") >= 2


def test_what_is_told_while_a_listing_runs_counts_more_than_what_it_finds():
    known = Known()
    known.tell("old", True)
    known.listing()
    known.tell("new", True)
    known.tell("deleted", False)
    assert known.has(["old", "new", "deleted", "never"]) == [True, True, False, False]
    known.listed(array("Q", [hashed("deleted"), hashed("listed")]))
    assert known.has(["old", "new", "deleted", "listed"]) == [False, True, False, True]
    known.listing()
    known.tell("listed", False)
    assert known.has(["new", "listed"]) == [True, False], "a listing that fails forgets nothing"
