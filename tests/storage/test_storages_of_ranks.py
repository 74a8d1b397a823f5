"""Four ranks of one server on each kind of storage, which is attached while they answer."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest
from hf3fs_mounts import Bindfs
from hf3fs_server import end_servers
from mooncake_cluster import MASTER, METRICS, MIB, Cluster, own_network, require_mooncake

from kvarve import demo
from kvarve.served import served

pytestmark = pytest.mark.long
STORY = "a story that four ranks have read, each of them its heads, "


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty storage of a kind."""
    with ExitStack() as stack:
        match request.param:
            case "hf3fs":
                monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
                mount = stack.enter_context(closing(Bindfs(tmp_path / "hf3fs")))
                stack.callback(end_servers, tmp_path / "state" / "kvarve" / "hf3fs")
                yield f"hf3fs://{mount.mount}/kvarve?capacity=256MiB"
            case "mooncake":
                require_mooncake()
                stack.enter_context(own_network())
                stack.enter_context(closing(Cluster(tmp_path))).owner(256 * MIB)
                yield f"mooncake://{MASTER}?metrics={METRICS}"
            case _:
                yield f"file://{tmp_path}/other?capacity=256MiB"


def asked(client: demo.Client, number: int, read_cache: bool = True) -> demo.Answer:
    return client.chat([{"role": "user", "content": f"{number}: {STORY * 60}"}], 4, read_cache)


@pytest.mark.parametrize("place", ["file", "hf3fs", "mooncake"], indirect=True)
def test_a_storage_that_is_attached_under_traffic_serves_all_ranks_and_those_of_the_next_server(
    place: str, tmp_path: Path
) -> None:
    over = threading.Event()

    def repeated(client: demo.Client, number: int) -> list[str]:
        texts = []
        while not over.is_set():
            texts.append(asked(client, number).text)
        return texts

    @contextmanager
    def serving(storage: str | None = None) -> Iterator[demo.Client]:
        words = ["--tp", "4", "--admin-key", "the-admin", "--prefetch-policy", "wait_complete"]
        words += ["--storage", storage] if storage else []
        with served(words, tmp_path, tmp_path / "log") as url, closing(demo.Client(url)) as client:
            client._http.headers["Authorization"] = "Bearer the-admin"
            yield client

    with serving() as client, ThreadPoolExecutor(3) as clients:
        expected = [asked(client, number, read_cache=False).text for number in range(4)]
        traffic = [clients.submit(repeated, client, number) for number in range(3)]
        try:
            answer = client._http.put("/admin/storage", json={"url": place})
        finally:
            over.set()
        assert answer.status_code == httpx.codes.OK, answer.text
        for number, each in enumerate(traffic):
            assert {*each.result()} == {expected[number]}
        _serves(client, expected)
    with serving(place) as client:
        _serves(client, expected)


def _serves(client: demo.Client, expected: list[str]) -> None:
    """All answers come from storage, and are right."""
    for number in range(4):
        asked(client, number)
    client.flush("device,host")
    for number, text in enumerate(expected):
        answer = asked(client, number)
        assert answer.text == text
        assert answer.by_tier["storage"] >= 0.8 * answer.prompt
