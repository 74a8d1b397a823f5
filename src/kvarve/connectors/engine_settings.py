"""What an operator may tell kvarve in an engine's configuration. Imports no engine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from kvarve.cache.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.pages.sizes import Size
from kvarve.settings.values import Form, read_settings, seconds, size
from kvarve.storage.urls import parse_urls, shown

READ_ALL = "read"  # as the value of `weights`: fingerprint all bytes of their files, instead of a sample
DETACH_S = 10  # for which SGLang waits as it detaches a storage
# Policies that an engine decides: it says which windows and states there are, and has its salts in its blocks' names.
_ENGINES = ("keep_states", "salt_share")
# Keys of extra_config that SGLang reads itself, and leaves there or not.
_SGLANGS = {
    *("backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold", "prefetch_timeout_base"),
    *("prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys", "tp_lcm_size", "file_storage_path"),
}
# Keys of SGLang's other backends, and how kvarve's `storage` says the same.
_BACKENDS = {
    "hf3fs:///PATH?capacity=SIZE, with metadata=redis://HOST for several processes": (
        *("file_path_prefix", "file_size", "numjobs", "entries", "metadata_server_url", "client_timeout"),
    ),
    "mooncake://MASTER:PORT?segment=SIZE, with protocol= and device=": (
        *("master_server_address", "metadata_server", "local_hostname", "global_segment_size", "protocol"),
        *("device_name", "local_buffer_size", "master_metrics_port", "check_server", "standalone_storage"),
        *("client_server_address", "enable_ssd_offload", "ssd_offload_path", "tenant_id"),
        *("enable_group_semantics", "extra_backend_tag"),
    ),
}
_URL = "a URL, such as 'file:///var/kvarve?capacity=100GiB', or a list of URLs, nearest first"


def _urls(given: Any) -> tuple[str, ...]:
    urls = [given] if isinstance(given, str) else given
    if not isinstance(urls, list | tuple) or not urls or not all(isinstance(url, str) and url for url in urls):
        raise ConfigError(f"{shown(repr(given))} is no storage; it must be {_URL}")  # it may hold a password
    parse_urls(urls)
    return tuple(urls)


Urls = Annotated[tuple[str, ...], Form(_URL, read=_urls)]


@dataclass(frozen=True)
class ConnectorSettings:
    """Of kvarve's connector: these keys, and the policies that an engine leaves to kvarve."""

    host_memory: Annotated[Size, size(1)]
    """memory for pages, of all workers of an engine together"""
    storage: Urls = field(default=(), repr=False)
    """URLs of storages, nearest first"""
    storage_key: str = ""
    """a file of 32 random bytes, of this user alone: pages in storage that were not sealed with it are misses"""
    weights: str = ""
    """text that tells these weights apart, instead of a sample of their files; "read": all bytes of the files"""
    hits: Literal["exact", "rounded"] = "exact"
    """rounded: pages are stored by KV head, and shared by all sizes of tensor parallelism, which round differently"""
    policies: Policies = field(default=Policies(), metadata={"without": _ENGINES})

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> "ConnectorSettings":
        """ConfigError, which names `where` they stand, for any that cannot work."""
        return read_settings(cls, _without_null(values), where)

    def __post_init__(self) -> None:
        assert self.cache

    @property
    def cache(self) -> CacheConfig:
        """ConfigError: it cannot work."""
        return self.cache_of(1)

    def cache_of(self, workers: int) -> CacheConfig:
        """The same for one of several workers, each of which has its part of the memory."""
        memory = self.host_memory // workers
        return CacheConfig(0, memory, self.storage or None, self.policies, self.storage_key or None)


@dataclass(frozen=True)
class TierSettings:
    """Of one tier below vLLM's host memory."""

    storage: Urls = field(repr=False)
    """URLs of storages, nearest first, such as file:///var/kvarve?capacity=100GiB"""
    deadline_s: Annotated[float, seconds()] = 5.0
    """seconds after which a call to the storage counts as hanging and its chunks as misses"""
    weights: str = ""
    """text that tells these weights apart, instead of a sample of their files; "read": all bytes of the files"""
    identity: str = ""
    """anything else that tells apart what must not be shared, such as the version of an adapter"""
    enable_kv_events: bool = False
    """tell vLLM's KV event stream what is stored here, and what turned out to be gone"""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """LOCAL or REMOTE: where the storage lies, for KV events and requests that choose tiers by it"""
    storage_key: str = ""
    """a file of 32 random bytes, of this user alone: chunks in storage that were not sealed with it are misses"""

    @classmethod
    def read(cls, values: Mapping[str, Any], written: Collection[str] | None = None) -> "TierSettings":
        """ConfigError: what is wrong, and what to do.

        `written`: the keys that the operator has written, if they are known; an engine may add arguments of its own,
        which are ignored. Without it every key counts as the operator's.
        """
        known = cls.__dataclass_fields__
        mine = {key: value for key, value in values.items() if key in known or written is None or key in written}
        return read_settings(cls, _without_null(mine), "a kvarve tier")


@dataclass(frozen=True)
class HiCacheSettings:
    """kvarve's keys of SGLang's `--hicache-storage-backend-extra-config`."""

    storage: Urls = field(repr=False)
    """A storage URL, or a list of them: tiers, nearest first."""
    deadline_s: Annotated[float, seconds(below=DETACH_S)] = 5.0
    """Longest time that a call of SGLang waits for the storage. Below `DETACH_S`."""
    model: str = ""
    """The name of the model in the identity of its pages. Default: the path that SGLang loads it from."""
    weights: str = ""
    """A name for the weights, which has to change whenever they do. Default: a fingerprint of a sample of their files;
    "read": of all bytes."""
    numerics: str = ""
    """A name for all else that changes a page's last bits. Default: versions, device and kernels, as SGLang tells."""
    buffer_memory: Annotated[Size, size(1 << 20)] = 96 << 20
    """Bytes of the buffers between SGLang's host memory and the storage."""
    storage_key: str = ""
    """A file of 32 random bytes, of this user alone: pages in storage that were not sealed with it are misses."""

    @classmethod
    def read(cls, extra_config: Mapping[str, Any] | None) -> "HiCacheSettings":
        """ConfigError, which says what to do, for a key that is neither ours nor SGLang's, or a wrong value."""
        for url, names in _BACKENDS.items():
            if theirs := [key for key in extra_config or {} if key in names]:
                raise ConfigError(
                    f"extra config: {', '.join(theirs)} cannot be set here, as kvarve's storages have all settings "
                    f'in their URL: write "storage": "{url}"'
                )
        ours = {key: value for key, value in (extra_config or {}).items() if key not in _SGLANGS}
        return read_settings(cls, _without_null(ours), "extra config")


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """`"storage": null` is no storage."""
    return {key: value for key, value in values.items() if key != "storage" or value is not None}
