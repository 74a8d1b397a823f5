"""Two models on one mount whose metadata is lost: its server is killed and its file removed, or its Redis flushed."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hf3fs_mounts import Bindfs
from hf3fs_server import Local
from hf3fs_stores import Stores, stores_in
from processes import until
from redis_server import RedisServer

from kvarve.storage.hf3fs import storage as storage_module
from kvarve.storage.hf3fs.storage import Hf3fsStorage
from kvarve.testing.suite import LABEL, OTHER_LABEL

Service = tuple[str | None, Callable[[], object]]
THIRD_LABEL = b"a third model"
PAGES, LARGEST = 40, 12_000


@pytest.fixture(params=["a server of this machine", "redis"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """Its setting, and what makes it forget everything."""
    if request.param == "redis":
        server = RedisServer(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "no")
        yield server.url(), partial(server.ask, "FLUSHALL")
        server.close()
        return
    local: Local = request.getfixturevalue("local")

    def lose() -> None:
        local.kill()
        for path in local.folder.glob("slots.db*"):
            path.unlink()

    yield None, lose


@pytest.fixture
def stores(tmp_path: Path, service: Service) -> Iterator[Stores]:
    """Closed before the service, which they would start again."""
    mount = Bindfs(tmp_path / "3fs")
    try:
        with stores_in(mount.mount) as stores:
            yield stores
    finally:
        mount.close()


class Model:
    """Pages of one label: those of all models have the same names and sizes, and bytes of their own."""

    def __init__(self, label: bytes) -> None:
        self.label = label
        dice, sizes = random.Random(label), random.Random(5)
        self.pages = {f"salt-page.{i}": dice.randbytes(sizes.randrange(1, LARGEST)) for i in range(PAGES)}

    def store(self, storage: Hf3fsStorage) -> None:
        assert storage.put([*self.pages], [memoryview(page) for page in self.pages.values()]) == [True] * PAGES

    def has_all(self, storage: Hf3fsStorage) -> bool:
        """Whether all pages are there; those that are have the right bytes."""
        buffers = [memoryview(bytearray(LARGEST)) for _ in self.pages]
        sizes = storage.get([*self.pages], buffers)
        for size, buffer, page in zip(sizes, buffers, self.pages.values(), strict=True):
            assert size is None or buffer[:size] == page
        return None not in sizes


@pytest.mark.parametrize("open_", ["both open", "one opened", "a third opened"])
def test_the_pages_of_all_models_are_found_again_and_none_is_served_to_another(
    stores: Stores, service: Service, open_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "_SWEEP_S", 0.05)
    metadata, lose = service
    models = [Model(LABEL), Model(OTHER_LABEL)]
    storages = [stores.open(label=model.label, metadata=metadata) for model in models]
    for model, storage in zip(models, storages, strict=True):
        model.store(storage)
    assert storages[0].put(["of-one-alone"], [memoryview(b"1")]) == [True]
    if open_ != "both open":
        for storage in storages:
            storage.close()
    lose()
    if open_ != "both open":
        finder = stores.open(label=LABEL if open_ == "one opened" else THIRD_LABEL, metadata=metadata)
        until(lambda: finder.counts["found again"] == 2 * PAGES + 1, "a rebuilt store")
        if open_ == "a third opened":
            assert finder.get([*models[0].pages], [memoryview(bytearray(1)) for _ in range(PAGES)]) == [None] * PAGES
        storages = [stores.open(label=model.label, metadata=metadata) for model in models]
    until(lambda: all(model.has_all(storage) for model, storage in zip(models, storages, strict=True)), "all pages")
    assert storages[0].exists(["of-one-alone"]) == [True]
    assert storages[1].exists(["of-one-alone"]) == [False]
    assert all(storage.counts["torn"] == 0 for storage in storages)
    assert [storage.usage().objects for storage in storages] == [PAGES + 1, PAGES]
