"""The suite of every storage, against a real master and an owner in another process."""

import hashlib
import http.client
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hypothesis
import pytest
from light import light
from mooncake_cluster import MASTER, METRICS, Cluster, own_network, require_mooncake

from kvarve.storage import Storage, StorageUsage
from kvarve.storage.mooncake._client import Settings
from kvarve.storage.mooncake._mooncake_storage import MooncakeStorage
from kvarve.testing import suite
from kvarve.testing.suite import LABEL, OTHER_LABEL, Damage, MakeStorage, StorageSuite, UrlOf, get, put
from kvarve.testing.suite_use import OTHER_BYTES

_tests = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_mooncake()
    with own_network():
        cluster = Cluster(tmp_path_factory.mktemp("mooncake"))
        try:
            cluster.owner()
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def closing(cluster: Cluster) -> Iterator[ThreadPoolExecutor]:
    """The library needs a second to close, in which nothing is computed."""
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Counted(MooncakeStorage):
    """The master counts the objects of all labels. This asks it for all names and counts those of one label."""

    def usage(self) -> StorageUsage:
        usage = super().usage()
        connection = http.client.HTTPConnection(METRICS, timeout=10)
        connection.request("GET", "/get_all_keys")
        keys = connection.getresponse().read().decode().split()
        connection.close()
        names = [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]
        sizes = [size for size in self.get(names, [memoryview(bytearray())] * len(names)) if size is not None]
        return replace(usage, objects=len(sizes), bytes=sum(sizes))


@light
class TestMooncakeStorage(StorageSuite):
    """All of it, but for one promise that a store of many users does not give: those of other labels are not refused,
    they are not seen. `Counted` makes up for another: that `usage` is of one label."""

    @pytest.fixture
    def make_storage(self, cluster: Cluster, closing: ThreadPoolExecutor) -> Iterator[MakeStorage]:
        opened: list[Storage] = []
        test = self.test = next(_tests)

        def make(
            *,
            label: bytes = LABEL,
            description: str = "model A",
            capacity_bytes: int = 64 << 20,
            place: str = "here",
        ) -> Storage:
            if 1 <= len(label) <= 64:  # one master is one place: several of them are labels here
                label = hashlib.sha256(label + f"{place} {test}".encode()).digest()
            opened.append(Counted(Settings(MASTER, metrics=METRICS), label, description))
            return opened[-1]

        yield make
        for storage in opened:
            closing.submit(storage.close)

    @pytest.fixture
    def url_of(self) -> UrlOf:
        place = hashlib.sha256(LABEL + f"here {self.test}".encode()).digest()
        return lambda _: (f"mooncake://{MASTER}?metrics={METRICS}", place)

    @pytest.fixture
    def damages(self) -> dict[str, Damage]:
        def replaced(data: bytes) -> Damage:
            def damage(storage: Storage, name: str) -> None:
                assert storage.delete([name]) == put(storage, **{name: data}) == [True]

            return damage

        return {what: replaced(OTHER_BYTES[what]) for what in ("another program's bytes", "fewer bytes")}

    def test_pages_of_another_model_are_refused_and_kept(self, make_storage: MakeStorage) -> None:
        storage, other = make_storage(), make_storage(label=OTHER_LABEL, description="model B")
        put(storage, a=b"kept")
        assert other.exists(["a"]) == [False]
        assert other.delete(["a"]) == [False]
        assert put(other, a=b"the other's") == [True]
        assert (get(storage, "a"), get(other, "a")) == (b"kept", b"the other's")

    @pytest.mark.long
    def test_any_history_of_calls_agrees_with_a_dict(
        self, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A few short ones: each opens the storage anew several times, and the library needs a second to close.
        few = {"max_examples": 2, "stateful_step_count": 12}
        monkeypatch.setattr(suite, "settings", lambda **usual: hypothesis.settings(**(usual | few)))
        super().test_any_history_of_calls_agrees_with_a_dict(make_storage)
