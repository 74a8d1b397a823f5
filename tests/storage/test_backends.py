"""Backends as entry points: found by scheme, imported when they are needed, and what they say of themselves is used."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from packages import installed

import forks
from kvarve.cache.config import CacheConfig
from kvarve.cache.worker import CacheWorker
from kvarve.errors import ConfigError, StorageError
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec
from kvarve.storage import Breaker, MemoryStorage, check_storage, deadline, left_s, open_storage, urls
from kvarve.storage.urls import parse_url
from kvarve.system.regions import HostRegion, shared_region
from kvarve.testing.suite import LABEL
from plugged import plug_in


@pytest.fixture
def package(tmp_path: Path):
    """Installs a package: its name, its entry points, and the source of its module."""
    with ExitStack() as stack:
        yield lambda name, points, source: stack.enter_context(installed(tmp_path / name, name, points, source))


ODD = """
from kvarve.storage import Backend, MemoryStorage

class Odd(Backend):
    example = "odd://x"
    parameters = frozenset({"depth"})

    @classmethod
    def prepare(cls, url, label, description):
        return lambda: MemoryStorage(int(url.parameters["depth"]), label, description)
"""


def test_a_package_adds_a_scheme_and_is_imported_when_its_first_url_is_parsed(package):
    package("kvarve_odd", "odd = kvarve_odd:Odd", ODD)
    with pytest.raises(ConfigError, match="known are az://, file://, gs://, hf3fs://, memory://, mooncake://, odd://"):
        parse_url("other://x")
    assert "kvarve_odd" not in sys.modules
    storage = open_storage("odd://x?depth=70", label=LABEL, description="model A")
    assert storage.usage().capacity_bytes == 70
    with pytest.raises(ConfigError, match="odd knows: compress, depth"):
        parse_url("odd://x?capacity=1GiB")


@pytest.mark.parametrize(
    ("points", "source", "said"),
    [
        ("odd = kvarve_odd:Odd", "import no_such_library", "kvarve_odd:Odd, .* cannot be loaded: No module named"),
        ("odd = kvarve_odd:Other", ODD, "cannot be loaded: module 'kvarve_odd' has no attribute 'Other'"),
        ("odd = kvarve_odd:MemoryStorage", ODD, "must be a kvarve.storage.Backend"),
    ],
)
def test_a_backend_that_cannot_be_loaded_is_one_line(package, points, source, said):
    package("kvarve_odd", points, source)
    with pytest.raises(ConfigError, match=said) as told:
        check_storage("odd://x?depth=1", label=LABEL, description="model A")
    assert "\n" not in str(told.value)


def test_a_kvarve_that_was_not_installed_says_so_and_so_do_two_packages_that_want_one_scheme(package, monkeypatch):
    for name in ("kvarve_odd_one", "kvarve_odd_two"):
        package(name, f"odd = {name}:Odd", ODD)
    with pytest.raises(ConfigError, match="odd:// must be of one package"):
        parse_url("odd://x?depth=1")
    monkeypatch.setattr(urls, "_entry_points", dict)
    with pytest.raises(ConfigError, match="install kvarve anew"):
        parse_url("file:///x?capacity=1GiB")


def test_a_call_knows_how_long_its_caller_waits_and_the_nearest_deadline_counts():
    assert left_s() == float("inf")
    with deadline(60.0):
        assert 0 < left_s() <= 60.0
        with deadline(0.0):
            assert left_s() == 0.0
        with deadline(3600.0):
            assert left_s() <= 60.0
    assert left_s() == float("inf")


class Patient(MemoryStorage):
    """Waits for as long as its caller does, on a clock of its own."""

    def __init__(self) -> None:
        super().__init__(1 << 20, LABEL, "model A")
        self.now, self.told = 0.0, list[float]()

    def exists(self, names):
        self.told.append(left_s())
        self.now += 30.5
        raise StorageError("no answer")


def test_a_call_that_ends_itself_at_its_deadline_opens_the_circuit_as_one_that_hangs():
    inner = Patient()
    breaker = Breaker(inner, deadline_s=30.0, clock=lambda: inner.now, pause=lambda event, _: event.wait())
    with pytest.raises(StorageError, match="no answer"):
        breaker.exists(["a"])
    assert 0 < inner.told[0] <= 30.0
    assert not breaker.up
    assert breaker.counts["hung"] == 1
    breaker.close()


POOLS = (PoolSpec("kv", (BufferSpec("k", (64, 8), "float32"),), None),)
IDENTITY = ModelIdentity("test", "weights", "float32", 64, 64, POOLS)


def test_the_arenas_of_a_cache_lie_where_its_storage_wants_them(monkeypatch):
    lent = list[HostRegion]()

    class Ring(MemoryStorage):
        def register(self, region):
            lent.append(region)

    plug_in(monkeypatch, "ring", lambda label, it: Ring(1 << 24, label, it), allocates=shared_region)
    worker = CacheWorker(IDENTITY, CacheConfig(1 << 20, 1 << 20, "ring://x"))
    (region,) = lent
    assert region.name is not None
    path = Path("/dev/shm") / region.name
    assert path.stat().st_size == region.size_bytes == worker.host[0].memory.nbytes
    worker.host[0].memory[5000:5004] = b"page"
    assert path.read_bytes()[5000:5004] == b"page"
    worker.close(5.0, 5.0, up=True)


def test_shared_memory_is_gone_with_its_last_view_and_with_a_process_that_is_killed():
    region = shared_region(1 << 16)
    assert region.name is not None
    path, address = Path("/dev/shm") / region.name, region.address
    assert address % 4096 == 0
    code = (
        "import os, signal; from kvarve.system.regions import shared_region; region = shared_region(1 << 16); "
        "print(region.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = forks.run([sys.executable, "-c", code], capture_output=True, text=True)
    left = Path("/dev/shm") / killed.stdout.strip()
    assert left.exists()
    shared_region(4096)
    assert not left.exists()
    assert path.exists(), "it is in use"
    del region
    assert not path.exists()


def test_shared_memory_that_there_is_not_is_one_line():
    with pytest.raises(ConfigError, match="/dev/shm cannot hold 4611686018427387904 bytes") as told:
        shared_region(1 << 62)
    assert "\n" not in str(told.value)
