"""How much host memory this process may use, by its control groups."""

import os
from pathlib import Path

import pytest
import torch

from kvarve.cache.config import CacheConfig
from kvarve.cache.worker import check
from kvarve.errors import ConfigError
from kvarve.memory.machine import on_host
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec
from kvarve.system.host import free_bytes, host_bytes

ALL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB, MIB = 1 << 30, 1 << 20
POOL = PoolSpec("attention", (BufferSpec("k", (64, 100), "float32"),), None)
IDENTITY = ModelIdentity("test", "w", "float32", 64, 256, (POOL,))


def a_machine(root: Path, groups: str, **limits: str) -> Path:
    """A machine's files: what /proc/self/cgroup says, and limits by the file's path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        file = root / "sys/fs/cgroup" / path.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit)
    return root


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/\n", {"memory_dot_max": "1000000\n"}),
        ("0::/a/b\n", {"a__b__memory_dot_max": "1000000\n", "a__memory_dot_max": "max\n"}),
        ("0::/a/b\n", {"a__b__memory_dot_max": "2000000\n", "a__memory_dot_max": "1000000\n"}),
        ("0::/a/b\n", {"memory_dot_max": "1000000\n"}),
        ("4:memory:/a\n0::/\n", {"memory__a__memory_dot_limit_in_bytes": "1000000\n"}),
        ("4:cpu,memory:/a\n", {"memory__memory_dot_limit_in_bytes": "1000000\n"}),
    ],
    ids=["version-2", "in-a-group", "its-parent-has-less", "another-namespace", "version-1", "version-1-elsewhere"],
)
def test_a_container_s_limit_is_all_that_there_is(tmp_path: Path, groups: str, limits: dict[str, str]) -> None:
    assert host_bytes(a_machine(tmp_path, groups, **limits)) == 1000000


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "", "many", "-1", "\u0661", "0"])
def test_a_limit_that_is_none_or_no_number_limits_nothing(tmp_path: Path, limit: str) -> None:
    assert host_bytes(a_machine(tmp_path, "0::/a\n", a__memory_dot_max=limit)) == ALL


@pytest.mark.parametrize("groups", ["", "\n", "nonsense", "1:2", "0::\n", ":::::\n", "4:memory:/gone\n"])
def test_groups_that_cannot_be_read_limit_nothing(tmp_path: Path, groups: str) -> None:
    assert host_bytes(a_machine(tmp_path, groups)) == ALL


def test_what_is_free_is_what_the_system_says_and_all_where_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:    48 kB\n")
    assert free_bytes(tmp_path / "meminfo") == 48 << 10
    assert free_bytes(tmp_path / "none") == host_bytes()


def test_only_what_computes_in_host_memory_lies_there() -> None:
    assert on_host("cpu") and on_host(torch.device("mps")) and not on_host("cuda:1") and not on_host("cuda")


def gpu_of(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total // 2, total))


def test_memory_of_a_gpu_is_not_charged_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_of(ALL + 8 * GIB, monkeypatch)
    config = CacheConfig(ALL + GIB, MIB)
    assert len(check(IDENTITY, config, "cuda:0")) == 2
    with pytest.raises(ConfigError, match="device and host memory together must be at most this machine's"):
        check(IDENTITY, config, "cpu")


def test_more_than_a_gpu_has_is_refused_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_of(24 * GIB, monkeypatch)
    with pytest.raises(ConfigError, match="device memory must be at most the 24 GiB of cuda:0, got 25 GiB"):
        check(IDENTITY, CacheConfig(25 * GIB, MIB), "cuda:0")
    check(IDENTITY, CacheConfig(24 * GIB, MIB), "cuda:0")


def test_a_container_s_limit_bounds_what_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarve.cache.worker.host_bytes", lambda: host_bytes(tmp_path))
    a_machine(tmp_path, "0::/\n", memory_dot_max=str(64 * MIB))
    with pytest.raises(ConfigError, match="must be at most this machine's 64 MiB"):
        check(IDENTITY, CacheConfig(40 * MIB, 40 * MIB))
    check(IDENTITY, CacheConfig(20 * MIB, 20 * MIB))
