"""Storage URLs: those that are accepted, and the messages about all others, before any file is touched."""

from pathlib import Path
from uuid import uuid4

import inspect_files
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarve.errors import ConfigError, StorageError
from kvarve.pages.sizes import format_size, parse_size
from kvarve.storage import Breaker, FileStorage, MemoryStorage, Tiers, check_storage, open_storage
from kvarve.storage._memory_storage import forget_memory
from kvarve.storage.urls import parse_url
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put
from plugged import plug_in


def opened(url, label=LABEL):
    check_storage(url, label=label, description="model A")
    return open_storage(url, label=label, description="model A")


def test_a_file_url_opens_a_folder(tmp_path):
    storage = opened(f"file://{tmp_path}/a%20b%23c?capacity=1.5GiB")
    assert isinstance(storage, FileStorage)
    assert storage.usage().capacity_bytes == 3 << 29
    assert (tmp_path / "a b#c" / "kvarve.json").exists()
    storage.close()
    plain = opened(f"{tmp_path}/a b#c%20")
    assert plain.usage().capacity_bytes == 10 << 30
    assert (tmp_path / "a b#c%20" / "kvarve.json").exists()
    plain.close()


def test_a_file_url_says_for_how_long_how_much_and_in_what_order(tmp_path):
    url = f"file://{tmp_path}/store?capacity=1MiB&ttl=1.5d&quota=8KiB&eviction=s3fifo&threads=2&durable=no"
    storage = opened(url)
    limits = inspect_files.limits(storage)
    assert (limits.ttl_ns, limits.quota_bytes, limits.eviction) == (129_600 * 10**9, 8192, "s3fifo")
    assert limits.durable is False
    assert put(storage, **{f"salt-{i}": b"1" for i in range(3)}) == [True, True, False]
    storage.close()


def homeless():
    raise RuntimeError("Could not determine home directory.")


def test_a_file_url_without_a_path_is_in_the_users_state_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    opened("file://?capacity=1MiB").close()
    assert (tmp_path / "home" / ".local" / "state" / "kvarve" / "kvarve.json").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    opened("file://?capacity=1MiB").close()
    assert (tmp_path / "state" / "kvarve" / "kvarve.json").exists()
    monkeypatch.setenv("XDG_STATE_HOME", "relative/paths/are/none")
    assert parse_url("file://").path == str(tmp_path / "home" / ".local" / "state" / "kvarve")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="needs a folder"):
        check_storage("file://?capacity=1GiB", label=LABEL, description="model A")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="must say how much it may hold"):
        check_storage("file://", label=LABEL, description="model A")
    with pytest.raises(ConfigError, match="two tiers must be two places"):
        check_storage(("file://?capacity=1GiB", parse_url("file://").path), label=LABEL, description="model A")


def test_a_memory_url_is_found_again_by_its_name():
    name = uuid4().hex
    storage = opened(f"memory://{name}?capacity=1MiB")
    assert isinstance(storage, MemoryStorage)
    put(storage, a=b"1")
    storage.close()
    assert get(opened(f"memory://{name}?capacity=1MiB"), "a") == b"1"
    with pytest.raises(StorageError, match="another model"):
        check_storage(f"memory://{name}?capacity=1MiB", label=OTHER_LABEL, description="model B")
    forget_memory(name)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "known are az://, file://"),
        ("store", "must be an absolute path or a storage URL"),
        ("/store?capacity=1GiB", "write file:///store[?]capacity=1GiB"),
        (
            "gopher://store?capacity=1GiB",
            "unknown storage 'gopher'; known are az://, file://, gs://, hf3fs://, memory://",
        ),
        ("file://store?capacity=1GiB", "three slashes and an absolute path"),
        ("file:///store", "must say how much it may hold"),
        ("file:///store?capacity", "cannot be read as a URL"),
        ("file:///store?capacity=1GiB&fsync=1", "unknown parameter 'fsync'; file knows: capacity"),
        ("file:///store?capacity=1GiB&capacity=2GiB", "given twice"),
        ("file:///store?capacity=1GiB&compress=gzip", "compress must be no, zstd, lz4 or auto, not 'gzip'"),
        ("file:///store?capacity=1GiB&ttl=soon", "ttl=soon cannot be read as a time: write 90s, 30m, 12h, 7d or 2w"),
        ("file:///store?capacity=1GiB&quota=0", "quota must be above zero"),
        ("file:///store?capacity=1GiB&eviction=random", "unknown eviction order 'random'; known: lru, lfu, s3fifo"),
        ("file:///store?capacity=1GiB&durable=maybe", "durable=maybe must be yes or no"),
        ("file:///a#b?capacity=1GiB", "written %23"),
        ("file://[/store?capacity=1GiB", "cannot be read as a URL"),
        ("memory://name/below?capacity=1GiB", "no path"),
        ("memory://na me?capacity=1GiB", "cannot name an object"),
        ("redis://", "say where the server is"),
        ("redis://host/name", "the number of a database"),
        (
            "redis://host?capacity=1GiB",
            "redis knows: cluster, compress, password_file, tls_ca, tls_cert, tls_key, ttl",
        ),
        ("redis://host?tls_ca=/ca.pem", "needs rediss://"),
        ("redis://host/1?cluster=yes", "no database but 0"),
        ("rediss:///socket", "say where the server is"),
        ("hf3fs://mnt/3fs?capacity=1GiB", "absolute path, with three slashes"),
        ("hf3fs:///mnt/3fs", "how much it may hold"),
        ("hf3fs:///mnt/3fs?capacity=1GiB&engine=fast", "auto, usrbio or posix"),
        ("hf3fs:///mnt/3fs?capacity=1GiB&threads=0", "from 1 to 256"),
        ("hf3fs:///mnt/3fs?capacity=1GiB&metadata=here", "metadata=here"),
        ("hf3fs:///mnt/3fs?capacity=1GiB&engine=usrbio", "hf3fs_py_usrbio.*write engine=posix"),
        ("hf3fs:///mnt/3fs?capacity=1GiB&ttl=1d", "hf3fs knows: capacity, compress, engine, metadata, quota, threads"),
    ],
)
def test_a_setting_that_cannot_work_is_told_in_one_line(url, said):
    for call in (check_storage, open_storage):
        with pytest.raises(ConfigError, match=said) as refusal:
            call(url, label=LABEL, description="model A")
        assert "\n" not in str(refusal.value)


def test_checking_creates_nothing(tmp_path):
    name = uuid4().hex
    check_storage(f"file://{tmp_path}/store?capacity=1GiB", label=LABEL, description="model A")
    check_storage(f"memory://{name}?capacity=1GiB", label=LABEL, description="model A")
    assert not list(tmp_path.iterdir())
    check_storage(f"memory://{name}?capacity=1GiB", label=OTHER_LABEL, description="model B")


def test_several_urls_are_tiers_nearest_first(tmp_path):
    name = uuid4().hex
    row = opened((f"{tmp_path}/near", f"memory://{name}?capacity=1MiB"))
    assert isinstance(row, Tiers)
    put(row, a=b"1")
    assert row.settle(20.0)
    assert row.usage().capacity_bytes == 10 << 30
    row.close()
    for url in (f"{tmp_path}/near", f"memory://{name}?capacity=1MiB"):
        alone = opened((url,))
        assert not isinstance(alone, Tiers)
        assert get(alone, "a") == b"1"
        alone.close()
    forget_memory(name)


def test_each_tier_has_a_guard_of_its_own_and_the_judge_is_passed_on():
    names, guards = [uuid4().hex for _ in range(2)], []

    def guard(storage):
        guards.append(Breaker(storage, deadline_s=1.0))
        return guards[-1]

    urls = [f"memory://{name}?capacity=1MiB" for name in names]
    row = open_storage(urls, label=LABEL, description="model A", guard=guard, whole=lambda record: record == b"good")
    for name, far in (("a", b"good"), ("b", b"evil")):
        put(guards[1], **{name: far})
        assert get(row, name, 4) == far
    assert row.settle(20.0)
    assert guards[0].exists(["a", "b"]) == [True, False]
    row.close()
    for name in names:
        forget_memory(name)


@pytest.mark.parametrize(
    "urls",
    [
        ("{}/store", "{}/store"),
        ("{}/store", "file://{}/store?capacity=1GiB"),
        ("{}/other", "{}/store", "{}/link"),
        ("{}/store", "{}/below/../store/"),
        ("memory://x?capacity=1MiB", "memory://x?capacity=2MiB"),
    ],
    ids=str,
)
def test_two_tiers_are_two_places_and_none_is_no_storage(tmp_path, urls):
    with pytest.raises(ConfigError, match="a storage must be named"):
        open_storage([], label=LABEL, description="model A")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for call in (check_storage, open_storage):
        with pytest.raises(ConfigError, match="is the same place as") as refusal:
            call([url.format(tmp_path) for url in urls], label=LABEL, description="model A")
        assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_if_one_of_several_cannot_be_used_nothing_is_touched_and_nothing_stays_open(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(StorageError, match="not a kvarve storage folder"):
        open_storage((f"{tmp_path}/near", f"{tmp_path}/full"), label=LABEL, description="model A")
    assert not (tmp_path / "near").exists()


def test_if_the_second_of_several_cannot_be_opened_the_first_is_closed(monkeypatch):
    first = MemoryStorage(100, LABEL, "model A")

    def refuse(label, description):
        raise StorageError("the door is locked")

    plug_in(monkeypatch, "one", lambda label, description: first)
    plug_in(monkeypatch, "two", refuse)
    with pytest.raises(StorageError, match="the door is locked"):
        open_storage(("one://", "two://"), label=LABEL, description="model A")
    with pytest.raises(StorageError, match="closed"):
        first.usage()


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1024B", 1024),
        ("512MB", 512_000_000),
        ("10GiB", 10 << 30),
        ("1.5GiB", 3 << 29),
        ("0.1KB", 100),
        ("1.9999", 1),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "+1", "GiB", "1e9", "1.", "1,5GiB", "10G", "٣", "9" * 30])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError, match="cannot be read as a size"):
        parse_size(text)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 60))
def test_a_size_that_was_written_reads_back_to_a_tenth_of_its_unit(size_bytes):
    assert (format_size(0), format_size(3 << 29), format_size((1 << 20) - 1)) == ("0 B", "1.5 GiB", "1 MiB")
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= max(size_bytes, 1) * 0.06
