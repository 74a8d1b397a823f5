"""Settings that cannot work are refused with a message that says which would, and before anything is made."""

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.cache.config import CacheConfig, room_for, spacing, split
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.worker import check
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec, Tier
from kvarve.pages.sizes import parse_size
from kvarve.records.record import record_bytes
from kvarve.storage import MemoryStorage

ATTENTION = PoolSpec("attention", (BufferSpec("k", (64, 100), "float32"),), None)
WINDOW = PoolSpec("window", (BufferSpec("w", (64, 10), "float32"),), 3)
STATE = PoolSpec("state", (BufferSpec("s", (1001,), "float32"),), 1, in_place=True)
POOLS = (ATTENTION, WINDOW, STATE)
IDENTITY = ModelIdentity("test", "w", "float32", 64, 256, POOLS)
MIB = 1 << 20


# Bytes / 4 of a page, and the lookback, of each pool.
SOME_POOLS = st.lists(st.tuples(st.integers(1, 5000), st.sampled_from([None, 1, 2, 7])), min_size=1, max_size=4).map(
    lambda rows: tuple(
        PoolSpec(f"pool-{i}", (BufferSpec("b", (size,), "float32"),), lookback)
        for i, (size, lookback) in enumerate(rows)
    )
)


def least(pools: tuple[PoolSpec, ...], page_tokens: int, chunk_tokens: int, records: bool) -> int:
    """Two chunks of a prompt, in bytes, from the definition."""
    total = 0
    for pool in pools:
        size = record_bytes(pool.payload_bytes) if records else pool.payload_bytes
        total += size * 2 * (pool.lookback or chunk_tokens // page_tokens)
    return total


@pytest.mark.parametrize(
    ("name", "values", "condition"),
    [
        ("write_policy", ["behind", "back:2", "through:", "through:0"], "through, through:N (after N uses) or back"),
        (
            "storage_wait",
            ["eager", "-1s", "2", "infs", "nans", "2s+infs/Ki", "2s/Ki", ""],
            "none, all, or seconds with seconds per 1,024 tokens, such as 2s+0.25s/Ki",
        ),
        ("eviction", ["mru"], "one of lru, lfu, s3fifo, priority"),
        (
            "keep_states",
            ["", "every", "every:0", "every:-1", "ends,", "none,ends", "always"],
            "none, or a list such as ends,branches,chunks,every:4096 (in tokens)",
        ),
        ("states", [-1], "at least 0"),
        ("load_at_least", [-1], "at least 0"),
        ("fetch_at_least", [-1], "at least 0"),
        ("host_share", [0.0, 1.5, math.nan], "above 0 and at most 1"),
        ("salt_share", [0.0, math.nan], "above 0 and at most 1"),
        ("offload_pays_at", [-0.1, math.nan], "at least 0 and finite"),
        ("hash_sample", [-0.1, 1.5, math.nan], "from 0 to 1"),
        ("storage_deadline_s", [0.0, -1.0, math.nan, math.inf], "above 0 and finite"),
        ("write_policy", [None, b"back"], "of type str"),
        ("states", [True, "3", 1.0], "of type int"),
        ("host_share", [True, "0.5"], "of type float"),
        ("verify_host", [1, "yes"], "of type bool"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_one_line(name: str, values: list[object], condition: str) -> None:
    for value in values:
        with pytest.raises(ConfigError) as refusal:
            Policies(**{name: value})  # type: ignore[arg-type]
        assert str(refusal.value) == f"{name} must be {condition}, got {value!r}"


def test_sizes_are_taken_as_text_and_are_numbers_then() -> None:
    config = CacheConfig("256MiB", host_memory="1.5 GB")
    assert (config.device_memory, config.host_memory) == (256 * MIB, 1_500_000_000)
    assert config == CacheConfig(256 * MIB, 1_500_000_000) == replace(config)
    assert replace(config, device_memory="1KiB").device_memory == 1024


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        *(
            ({name: value}, f"{name} must be a size such as '10GiB', or a whole number of bytes, got {value!r}")
            for name in ("device_memory", "host_memory")
            for value in (None, "a lot", "10GiBB", "-1GiB", -1, True, 1.5)
        ),
        ({"policies": {}}, "policies must be of type Policies, got {}"),
        ({"storage_key": 7}, "storage_key must be of type str | None, got 7"),
        # A URL may hold a password.
        ({"storage": b"/a"}, "storage must be of type str | tuple[str, ...] | None, got <class 'bytes'>"),
        ({"storage": ["/a"]}, "storage must be of type str | tuple[str, ...] | None, got <class 'list'>"),
        ({"storage": ("/a", 1)}, "storage must be of type str | tuple[str, ...] | None, got <class 'tuple'>"),
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_by_the_name_of_its_field(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        CacheConfig(**{"device_memory": MIB} | settings)  # type: ignore[arg-type]
    assert str(refusal.value) == told


def test_all_that_is_wrong_with_policies_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^write_policy must be .*, got 'later'; host_share must be .*, got 2\.0$"):
        Policies(write_policy="later", host_share=2.0)


def test_no_wait_is_for_ever() -> None:
    assert CacheConfig(MIB).policies.patience().seconds(2048) == 2.5
    for policy in ("none", "999999999s+2s/Ki", "all"):
        policies = Policies(storage_wait=policy, storage_deadline_s=5.0)
        assert policies.patience().base_s <= 5.0


@pytest.mark.parametrize("records", [False, True], ids=["device", "host"])
def test_too_little_memory_is_refused_with_the_least_that_would_do(records: bool) -> None:
    need = least(POOLS, 64, 256, records)
    assert split(need, POOLS, 64, 256, records=records, what="some") == (8, 6, 2)
    with pytest.raises(ConfigError, match=r"of some memory is too little for this model: two chunks of a prompt need"):
        split(need - 1, POOLS, 64, 256, records=records, what="some")


@given(
    pools=SOME_POOLS,
    grid=st.sampled_from([1, 2, 4]),
    records=st.booleans(),
)
def test_what_a_refusal_names_will_do(pools: tuple[PoolSpec, ...], grid: int, records: bool) -> None:
    with pytest.raises(ConfigError) as refusal:
        split(1, pools, 64, 64 * grid, records=records, what="some")
    named = parse_size(str(refusal.value).rsplit("need ", maxsplit=1)[1])
    split(named, pools, 64, 64 * grid, records=records, what="some")


@given(
    pools=SOME_POOLS,
    extra=st.integers(0, 1 << 30),
    records=st.booleans(),
)
def test_slots_never_take_more_memory_than_was_given_and_use_nearly_all_of_it(
    pools: tuple[PoolSpec, ...], extra: int, records: bool
) -> None:
    memory = least(pools, 64, 128, records) + extra
    slots = split(memory, pools, 64, 128, records=records, what="some")
    each = [record_bytes(pool.payload_bytes) if records else pool.payload_bytes for pool in pools]
    taken = sum(size * count for size, count in zip(each, slots, strict=True))
    assert 0 <= memory - taken <= sum(each) + 1


def test_a_size_that_holds_nothing_is_refused() -> None:
    assert check(IDENTITY, CacheConfig(MIB, 0)).keys() == {Tier.DEVICE}, "but a host is not needed"
    for device, host, which in (
        (0, 0, "device"),
        (1, 0, "device"),
        (MIB, 1, "host"),
    ):
        with pytest.raises(ConfigError, match=f"of {which} memory is too little"):
            check(IDENTITY, CacheConfig(device, host))


def test_more_memory_than_the_machine_has_is_refused_with_what_it_has() -> None:
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for device, host in ((have + 1, 0), (MIB, have), (have, MIB), (1 << 62, 1 << 62)):
        with pytest.raises(ConfigError, match=re.escape("must be at most this machine's")):
            check(IDENTITY, CacheConfig(device, host))


@pytest.mark.parametrize(
    "settings",
    [
        {"device_memory": 1},
        {"host_memory": 1 << 60},
        {"storage": "file://{}/store"},
        {"storage": "file://{}/store?capacity=10"},  # a forgotten unit must not empty a folder
        {"storage": "ftp://{}/store"},
    ],
    ids=str,
)
def test_nothing_is_made_on_disk_by_what_is_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    given = {"device_memory": MIB, "host_memory": MIB, "storage": "file://{}/store?capacity=1GiB"} | settings
    given["storage"] = str(given["storage"]).format(tmp_path)
    with pytest.raises(ConfigError):
        PrefixCache(IDENTITY, CacheConfig(**given))  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_storage_that_could_never_be_used_is_refused_however_it_is_given() -> None:
    for urls in ("memory://x?capacity=1MiB", ("memory://x?capacity=1MiB", "/y")):
        with pytest.raises(ConfigError, match="storage needs host memory"):
            CacheConfig(MIB, storage=urls)
    storage = MemoryStorage(MIB, IDENTITY.fingerprint(), "test")
    with pytest.raises(ConfigError, match="storage needs host memory"):
        PrefixCache(IDENTITY, CacheConfig(MIB), storage=storage)


def test_one_storage_several_or_none_may_be_given() -> None:
    for storage, urls in ((None, ()), ((), ()), ("/a", ("/a",)), (("/a",), ("/a",)), (("/a", "/b"), ("/a", "/b"))):
        assert CacheConfig(MIB, MIB, storage).storages == urls


def test_of_several_storages_each_is_checked_and_none_made(tmp_path: Path) -> None:
    good = f"file://{tmp_path}/good?capacity=1GiB"
    for bad, told in ((f"file://{tmp_path}/small?capacity=10", "small.*too little"), (good, "is the same place as")):
        with pytest.raises(ConfigError, match=told):
            PrefixCache(IDENTITY, CacheConfig(MIB, MIB, (good, bad)))
    assert not [*tmp_path.iterdir()]


@given(
    pools=SOME_POOLS,
    chunks=st.integers(1, 100),
    records=st.booleans(),
)
def test_the_room_for_so_many_tokens_holds_their_pages_and_a_snapshot_as_often_as_asked(
    pools: tuple[PoolSpec, ...], chunks: int, records: bool
) -> None:
    memory = room_for(chunks * 128, pools, 64, 128, records=records, per_snapshot=128)
    slots = split(memory, pools, 64, 128, records=records, what="some", per_snapshot=128)
    for pool, count in zip(pools, slots, strict=True):
        assert count >= chunks * min(2, pool.lookback or 2)


def two_pools(token_bytes: int, snapshot_bytes: int) -> tuple[PoolSpec, ...]:
    """A model with these bytes a token and a snapshot, at 64 tokens a page."""
    chain = PoolSpec("attention", (BufferSpec("k", (64 * token_bytes,), "uint8"),), None)
    return (chain, PoolSpec("state", (BufferSpec("s", (snapshot_bytes,), "uint8"),), 1, in_place=True))


@pytest.mark.parametrize(
    ("token", "snapshot", "apart"),
    [
        (1024, 60 * 1024, 701),  # builtin:tiny-hybrid: the square root of 60 * 8,192
        (32 * 1024, 1584 * 32 * 1024, 3602),  # Qwen3.5
        (1024, 64, 256),  # states that cost next to nothing: one for each chunk, and none is kept in between
        (64, 8192 * 64, 8192),
    ],
)
def test_the_default_spacing_lies_between_an_even_division_and_8192_tokens(
    token: int, snapshot: int, apart: int
) -> None:
    pools = two_pools(token, snapshot)
    assert spacing(pools, 64, 256) == apart
    assert split(1024 * MIB, pools, 64, 256, records=False, what="some") == split(
        1024 * MIB, pools, 64, 256, records=False, what="some", per_snapshot=apart
    )
