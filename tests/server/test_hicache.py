"""SGLang's endpoints for its operators: the storage, and flushes by GET."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from servers import settings
from talk import LONG_S, cached, complete, refused

from kvarve.errors import ConfigError
from kvarve.pages.pools import Tier
from kvarve.reference.server.serve import Server
from kvarve.settings.engine_flags import storage_url
from kvarve.testing.faulty_storage import FaultyStorage

STORAGE, CLEAR, FLUSH = "/hicache/storage-backend", "/hicache/storage-backend/clear", "/flush_cache"
KEY = "gate"


@pytest.fixture(scope="module")
def operated(checkpoint: Path) -> Iterator[Server]:
    with Server(settings(checkpoint, admin_key=KEY, api_key="door")) as server:
        yield server


@pytest.fixture
def operator(operated: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=operated.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as operator:
        yield operator
        assert operator.delete(STORAGE).status_code == 200


@pytest.fixture
def customer(operated: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=operated.url, timeout=60, headers={"Authorization": "Bearer door"}) as customer:
        yield customer


def test_a_storage_comes_and_goes_under_the_names_of_sglang(
    operator: httpx.Client, customer: httpx.Client, operated: Server, tmp_path: Path, song: str, salt: str
) -> None:
    told = operator.get(STORAGE).json()
    assert (told["hicache_storage_backend"], told["hicache_storage_prefetch_policy"]) == (None, "wait_complete")
    extra = json.dumps({"path": str(tmp_path / "pages"), "capacity": "64MiB"})
    body = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": extra}
    put = operator.put(STORAGE, json=body | {"hicache_storage_prefetch_policy": "timeout"})
    assert put.status_code == 200, put.text
    told = operator.get(STORAGE).json()
    assert told["hicache_storage_backend"] == f"file://{tmp_path}/pages?capacity=64MiB"
    assert (told["hicache_storage_prefetch_policy"], told["hicache_write_policy"]) == ("timeout", "write_through")
    complete(customer, song * 2, cache_salt=salt, max_tokens=1)
    assert operated.engine.settle(20)
    assert operator.get(FLUSH).json()["flushed_pages"] > 0
    assert cached(complete(customer, song * 2, cache_salt=salt, max_tokens=1)) == {"storage": 64}
    assert operator.delete(STORAGE).json()["attached"] is False


@pytest.mark.long
def test_clearing_drops_the_pages_of_this_model_alone(
    operator: httpx.Client, customer: httpx.Client, operated: Server, checkpoint: Path, tmp_path: Path, song: str
) -> None:
    url = f"file://{tmp_path}/pages?capacity=64MiB"
    with Server(settings(checkpoint, (url,), page_tokens=32)) as other, httpx.Client(base_url=other.url) as theirs:
        complete(theirs, song * 3, max_tokens=1)
        assert other.engine.settle(20)
    assert operator.put(STORAGE, json={"hicache_storage_backend": url}).status_code == 200
    complete(customer, song * 3, max_tokens=1)
    assert operated.engine.settle(20) and operator.post(FLUSH).status_code == 200
    stored = operator.get(STORAGE).json()["objects"]
    assert operator.post(CLEAR).json() == {"dropped_objects": stored} and stored
    assert cached(complete(customer, song * 3, max_tokens=1)) == {}
    # What is in memory then is stored anew.
    assert operated.engine.settle(20) and operator.post(CLEAR).json() == {"dropped_objects": stored}
    assert operated.engine.settle(20) and operator.get(STORAGE).json()["objects"] == stored
    assert operator.post(FLUSH).status_code == 200
    assert cached(complete(customer, song * 3, max_tokens=1)) == {"storage": 128}
    with Server(settings(checkpoint, (url,), page_tokens=32)) as other, httpx.Client(base_url=other.url) as theirs:
        assert cached(complete(theirs, song * 3, max_tokens=1)) == {"storage": 128}


def test_only_the_operator_may_do_so_and_no_browser_at_all(
    operator: httpx.Client, customer: httpx.Client, client: httpx.Client
) -> None:
    for method, path in (("GET", STORAGE), ("PUT", STORAGE), ("DELETE", STORAGE), ("POST", CLEAR), ("GET", FLUSH)):
        assert "wrong admin key" in refused(customer.request(method, path), 401)
        for header in ({"Origin": "http://x"}, {"Sec-Fetch-Site": "cross-site"}):
            assert refused(operator.request(method, path, headers=header), 403)
        if path != FLUSH:
            assert "the server has no admin key" in refused(client.request(method, path), 403)
    assert "use POST" in refused(operator.get(FLUSH, headers={"Sec-Fetch-Site": "none"}), 403)
    assert "no storage is attached" in refused(operator.post(CLEAR), 400)


def test_a_flush_waits_for_a_number_of_seconds(operator: httpx.Client) -> None:
    for timeout in ("-1", "soon", "nan", "1e9", ""):
        assert "timeout: Input should be" in refused(operator.post(FLUSH, params={"timeout": timeout}), 400)
    assert operator.post(FLUSH, params={"timeout": "2.5"}).status_code == 200


def test_a_flush_keeps_to_its_own_time_while_another_waits_for_a_storage_that_hangs(
    operator: httpx.Client, operated: Server, customer: httpx.Client, tmp_path: Path, song: str, salt: str
) -> None:
    """0 is no wait, and nothing is a minute."""
    url = f"file://{tmp_path}/pages?capacity=64MiB"
    assert operator.put(STORAGE, json={"hicache_storage_backend": url}).status_code == 200
    attached = operated.engine.cache.worker.attached
    assert attached is not None
    hanging = FaultyStorage(attached.storage.inner, stall_limit_s=9000)  # type: ignore[union-attr]
    attached.storage.inner = hanging  # type: ignore[union-attr]
    hanging.stall("put")
    begun, begin = threading.Event(), operated.engine.begin_flush

    def seen(tiers: Sequence[Tier], timeout_s: float) -> "Future[int]":
        flush, _ = begin(tiers, timeout_s), begun.set()
        return flush

    with ThreadPoolExecutor(1) as another, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operated.engine, "begin_flush", seen)
        try:
            complete(customer, song * 2, cache_salt=salt, max_tokens=1)
            hanging.wait_for_stalled_call()
            patient = another.submit(operator.post, FLUSH)
            assert begun.wait(LONG_S)
            hasty = operator.post(FLUSH, params={"timeout": 0})
            assert hasty.json()["flushed_pages"] > 0 and not patient.done()
        finally:
            hanging.release()
        assert patient.result(LONG_S).status_code == 200


def test_their_names_of_storages_are_urls_of_ours() -> None:
    for backend, extra, url in (
        ("file", None, "file://?capacity=10GiB"),
        ("file", {"path": "/a b", "capacity": "1GiB"}, "file:///a%20b?capacity=1GiB"),
        ("hf3fs", {"file_path_prefix": "/3fs/kv", "capacity": "2TiB"}, "hf3fs:///3fs/kv?capacity=2TiB"),
        (
            "hf3fs",
            {"path": "/3fs/kv", "capacity": "2TiB", "metadata": "redis://h:6379/0"},
            "hf3fs:///3fs/kv?capacity=2TiB&metadata=redis://h:6379/0",
        ),
        ("mooncake", {"master_server_address": "m:1", "device_name": "a,b"}, "mooncake://m:1?device=a,b"),
        ("mooncake", {}, "mooncake://"),
    ):
        assert storage_url(backend, None if extra is None else json.dumps(extra)) == url


def test_an_extra_config_is_obeyed_or_refused() -> None:
    for backend, extra, told in (
        ("nixl", None, "unknown storage 'nixl': file, mooncake and hf3fs have these names"),
        ("file", "{", "the extra config must be JSON"),
        ("file", '{"path": ["a"]}', "the extra config must be an object of texts and numbers"),
        ("file", '{"path": "a"}', "must begin with a slash"),
        ("file", '{"storage": "a"}', "'storage' is unknown; known: path"),
        ("file", '{"prefetch_threshold": 256}', "prefetch_threshold is the flag --fetch-at-least"),
        ("hf3fs", '{"file_path_prefix": "/a"}', "a folder and how much it may hold"),
        ("file://?capacity=1GiB", '{"capacity": "2GiB"}', "cannot have an extra config"),
    ):
        with pytest.raises(ConfigError) as caught:
            storage_url(backend, extra)
        assert told in str(caught.value)
