"""Four ranks of one server on each kind of storage, which takes the place of another one while they answer."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hf3fs_mounts import Bindfs
from mooncake_cluster import MASTER, METRICS, MIB, Cluster, own_network, require_mooncake
from object_servers import KEY, SECRET, Rclone
from redis_server import RedisServer

from kvarve.bench import demo
from kvarve.reference.server.server_process import served

pytestmark = pytest.mark.long
ANSWER_S = 300.0  # for one answer, on a slow machine
STORY = "a story that four ranks have read, each of them its heads, "


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty storage of a kind."""
    with ExitStack() as stack:
        match request.param:
            case "hf3fs":
                mount = stack.enter_context(closing(Bindfs(tmp_path / "hf3fs")))
                redis = stack.enter_context(closing(RedisServer(tmp_path / "redis")))
                yield f"hf3fs://{mount.mount}/kvarve?capacity=256MiB&metadata={redis.url()}"
            case "mooncake":
                require_mooncake()
                stack.enter_context(own_network())
                stack.enter_context(closing(Cluster(tmp_path))).owner(256 * MIB)
                yield f"mooncake://{MASTER}?metrics={METRICS}"
            case "s3":
                monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
                monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
                yield stack.enter_context(closing(Rclone(tmp_path / "s3"))).url()
            case _:
                yield f"file://{tmp_path}/other?capacity=256MiB"


class Client(demo.Client):
    """With the key of an admin."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "the-admin")
        self.url = url

    def asked(self, number: int, read_cache: bool = True) -> demo.Record:
        return self.chat([{"role": "user", "content": f"{number}: {STORY * 60}"}], 4, read_cache)

    def storage(self) -> Any:
        return self._admin("GET").json()

    def change(self, storage: str | None) -> None:
        """Attach it in place of the present one, or (None) detach that, on all ranks."""
        before, body = self.storage(), None if storage is None else {"url": storage}
        answer = self._admin("DELETE" if body is None else "PUT", body)
        assert answer.status_code == httpx.codes.OK, answer.text
        now = answer.json()
        assert now["attached"] == (storage is not None) and now.get("url") == storage
        assert now.get("previous_closed", False) == before["attached"], "it has not let the one before go"

    def _admin(self, method: str, body: Any = None) -> httpx.Response:
        headers = {"Authorization": "Bearer the-admin"}
        return httpx.request(method, f"{self.url}/admin/storage", json=body, headers=headers, timeout=600)

    def is_warm(self, expected: list[str]) -> bool:
        """All answers come from storage, and are right."""
        answers = [self.asked(number) for number in range(len(expected))]
        assert [answer.text for answer in answers] == expected
        return all(answer.cached["storage"] >= 0.8 * answer.prompt for answer in answers)

    def is_warm_once_stored(self, expected: list[str]) -> bool:
        for number in range(len(expected)):
            self.asked(number)
        self.flush("device,host")
        return self.is_warm(expected)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["file", "hf3fs", "mooncake", "s3"], indirect=True)
def test_a_storage_that_replaces_files_under_traffic_serves_all_ranks_and_those_of_the_next_server(
    place: str, tmp_path: Path
) -> None:
    over, answered = threading.Event(), [threading.Semaphore(0) for _ in range(3)]

    def repeated(url: str, number: int) -> list[str]:
        texts = []
        with closing(Client(url)) as client:
            while not over.is_set():
                texts.append(client.asked(number).text)
                answered[number].release()
        return texts

    def all_go_on() -> None:
        """Each client has had an answer to a request that it made from now on: the first may have begun before."""
        for each in answered:
            while each.acquire(blocking=False):
                pass
            assert each.acquire(timeout=ANSWER_S) and each.acquire(timeout=ANSWER_S), "no answer comes"

    @contextmanager
    def serving(storage: str) -> Iterator[Client]:
        words = ["--tp", "4", "--admin-key", "the-admin", "--storage-wait", "all", "--storage", storage]
        with served(words, tmp_path, tmp_path / "log") as url, closing(Client(url)) as client:
            yield client

    files = f"file://{tmp_path}/first?capacity=256MiB"
    with serving(files) as client:
        expected = [client.asked(number, read_cache=False).text for number in range(4)]
        assert client.is_warm_once_stored(expected)
        with ThreadPoolExecutor(3) as clients:
            traffic = [clients.submit(repeated, client.url, number) for number in range(3)]
            try:
                all_go_on()
                for storage in (place, None, files, place):
                    client.change(storage)
                    all_go_on()
            finally:
                over.set()
            for number, each in enumerate(traffic):
                assert {*each.result()} == {expected[number]}
        assert client.is_warm_once_stored(expected)
        now = client.storage()
        assert now["up"] and now["pages"]["failed"] == now["pages"]["bad"] == 0
    with serving(place) as client:
        assert client.is_warm(expected)
