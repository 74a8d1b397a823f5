"""kvarve's storages under SGLang's HiCache: `--hicache-storage-backend dynamic`. See docs/sglang.md.

SGLang loads this module and makes one `HiCacheKvarve` in each scheduler process. It is called by the threads that look
up, prefetch and back up. All it does is turn SGLang's words into those of `hicache`.
"""

import logging
import os
import platform
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_server_args, get_serving

from kvarve.connectors.checkpoint import began_s, began_ticks, local_files, replaced_since
from kvarve.connectors.engine_settings import READ_ALL, HiCacheSettings
from kvarve.connectors.sglang.hicache import KV, Asked, Identity, Pages, Ranks, checkpoint, copy_from, copy_to, page_key
from kvarve.connectors.sglang.objects import Objects
from kvarve.errors import ConfigError
from kvarve.records.seals import seal_of
from kvarve.storage.urls import shown
from kvarve.transfer.storage_connection import open_guarded
from kvarve.transfer.storage_road import Kind

log = logging.getLogger(__name__)

BOOT = "/proc/sys/kernel/random/boot_id"  # a number that the machine has until it is started anew

# Settings of the server that change the numbers in a page, beside the weights.
_NUMERIC = (
    *("dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "linear_attn_backend"),
    *("linear_attn_prefill_backend", "linear_attn_decode_backend", "mamba_ssm_dtype", "enable_deterministic_inference"),
    "load_format",
)

# By what SGLang writes to the weights of a running server, of which it tells a backend nothing.
_WRITES = (
    "begin_weight_update",
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
# The function of SGLang's that attaches a storage to a server that runs.
_ATTACH = "attach_hicache_storage_wrapped"


class _Updates:
    """How often the weights have been written to, from when SGLang loads this module on."""

    def __init__(self) -> None:
        self.count = 0
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_name != _ATTACH:
            frame = frame.f_back
        self._late = frame is not None  # it may have been updated before
        for name in _WRITES:
            setattr(WeightUpdater, name, self._noted(getattr(WeightUpdater, name)))

    def _noted(self, write: Any) -> Any:
        @wraps(write)
        def noted(*args: Any, **more: Any) -> Any:
            self.count += 1
            return write(*args, **more)

        return noted

    @property
    def known(self) -> bool:
        """Whether the weights are those of the files that the server was started with, or have been given a version
        since then."""
        return not self._late and (not self.count or _version() is not None)

    @property
    def run(self) -> str:
        """What tells these weights from those of all other servers and updates, once they have been written to: two
        trainings may count their versions alike. The same in all processes of a server on one machine."""
        return f"of {_RUN}, {self.count} updates" if self.count else ""


class SameWeights:
    """Calls answer whether the weights are still those that the server had when this was made; it warns once."""

    def __init__(self, until: str) -> None:
        """`until`: what helps, for the log."""
        self._until, self._told = until, False
        self._version, self._count = _weight_version(), _updates.count

    def __call__(self) -> bool:
        if _weight_version() == self._version and _updates.count == self._count:
            return True
        if not self._told:
            self._told = True
            log.warning("the weights were updated: nothing is found or stored until %s", self._until)
        return False


class HiCacheKvarve(HiCacheStorage):
    """A storage backend for HiCache, of both interfaces. `kwargs`: SGLang's, of which none are used.

    ConfigError: an invalid `extra_config`, or weights that cannot be identified. StorageError: the storage cannot be
    used. Once it is made, a storage in trouble costs only misses.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        del kwargs
        extra = storage_config.extra_config or {}
        settings = HiCacheSettings.read(extra)
        ranks = Ranks(
            storage_config.tp_rank,
            storage_config.tp_size,
            storage_config.pp_rank,
            storage_config.pp_size,
            storage_config.attn_cp_rank,
            storage_config.attn_cp_size,
            storage_config.is_mla_model,
        )
        identity = _identity(settings, storage_config.model_name, ranks)
        label = identity.fingerprint()
        self._flat_kv = not extra.get("interface_v1")
        self._same_weights = SameWeights("the storage is attached anew")
        self._rank, self._observed = str(ranks.tp_rank), storage_config.enable_storage_metrics
        self._told: Counter[str] = Counter()  # of the counts, to Prometheus
        seal = seal_of(settings.storage_key)
        self._objects = Objects(
            lambda: open_guarded(
                settings.storage, label=label, description=str(identity), deadline_s=settings.deadline_s, seal=seal
            ),
            deadline_s=settings.deadline_s,
            buffer_memory=settings.buffer_memory,
        )
        self._pages = Pages(self._objects, label, ranks, seal=seal)
        log.info("kvarve: %s, label %s, in %s", identity, label.hex()[:12], ", ".join(map(shown, settings.storage)))

    # --- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        known = self._pages.pools.get(name)
        if known is None or known.pages.pool is not pool:
            self._pages.register(name, pool, flat=name == KV and self._flat_kv)

    # --- lookups

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._pages.lookup(keys, [Asked(KV, None)]).pages if self._same_weights() else 0

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        transfers = pool_transfers or []
        groups = [each for each in transfers if each.hit_policy == PoolHitPolicy.BLOCK_GROUPS]
        asked = [Asked(KV, None)]
        for each in transfers:
            if each.hit_policy == PoolHitPolicy.ALL_PAGES:
                asked.append(Asked(str(each.name), None))
            elif each.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                asked.append(Asked(str(each.name), max(1, len(each.keys or ()))))
        if not self._same_weights():
            return PoolTransferResult.empty()
        found = self._pages.lookup(keys, asked)
        names = {str(each.name): each.name for each in transfers}
        hits = {names.get(pool, pool): pages for pool, pages in found.by_pool.items()}
        for each in groups:
            hits[each.name] = self._pages.whole_groups(
                str(each.name), each.keys or [], each.group_pages, each.block_pages
            )
        return PoolTransferResult(found.pages, hits, found.legal)

    def exists(self, key: str) -> bool:
        return self._same_weights() and self._pages.present(KV, [key])[0]

    # --- pages in the host pools

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._moved(self._pages.load, KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._moved(self._pages.store, KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each(transfers, self._pages.load)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each(transfers, self._pages.store)

    def _each(self, transfers: Sequence[PoolTransfer], move: Any) -> dict[str, list[bool]]:
        done: dict[str, list[bool]] = {}
        for each in transfers:
            found = self._moved(move, str(each.name), each.keys or [], each.host_indices)
            done[each.name] = done.get(each.name, []) + found
        return done

    def _moved(self, move: Any, pool: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        if not keys or not self._same_weights():
            return [False] * len(keys)
        return list(move(pool, keys, None if indices is None else indices.tolist()))

    # --- flat pages, of the interface without host indices

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        if len(targets) != len(keys) or not all(isinstance(each, torch.Tensor) for each in targets):
            log.error("%d pages are to be read, and %d tensors given for them", len(keys), len(targets))
            return [None] * len(keys)
        kind = self._flat_kind(targets)
        if kind is None:
            return [None] * len(keys)
        loaded = self._objects.load(kind, [page_key(key) for key in keys], lambda i, it: copy_to(targets[i], it))
        return [target if done else None for target, done in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pages = list(values or [])
        kind = self._flat_kind(pages) if len(pages) == len(keys) else None
        if kind is None:
            return not keys
        return all(self._objects.store(kind, [page_key(key) for key in keys], lambda i, it: copy_from(pages[i], it)))

    def _flat_kind(self, pages: Sequence[torch.Tensor]) -> Kind | None:
        """The kind of flat KV pages, if these are such."""
        pool = self._pages.pools.get(KV)
        if pool is None or not self._same_weights():
            return None
        if any(page.nbytes != pool.kind.payload_bytes for page in pages):
            log.error("a KV page has %d bytes, and not those of %s", pool.kind.payload_bytes, [*map(len, pages)][:4])
            return None
        return pool.kind

    # --- life

    def clear(self) -> bool:
        """Remove this model's pages, and no others."""
        done = self._objects.drop()
        if not done:
            log.warning("kvarve: the storage was not cleared: %s", self._objects.last_error or "no answer in time")
        return done

    def get_stats(self) -> Any:
        """Pages and GB/s of each transfer since the last call, as SGLang counts them for its metrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for what, pages, rates in (
            ("load", metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            ("store", metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            for rate in self._objects.take_rates(what):
                pages.append(rate.objects)
                rates.append(rate.bytes / 1e9 / max(rate.seconds, 1e-9))
        if self._observed:
            self._observe()
        return metrics

    def _observe(self) -> None:
        by_object, by_byte, levels = _metrics()
        now, usage = self.counts, self._objects.usage()
        for what, count in (now - self._told).items():
            counter = by_byte if what.endswith(" bytes") else by_object
            counter.labels(what.removesuffix(" bytes"), self._rank).inc(count)
        self._told = now
        found = {"up": self._objects.up, "room_bytes": usage.room_bytes, "read_only": usage.read_only}
        for name, value in {**found, "lost_objects": usage.lost, "damaged_objects": usage.damaged}.items():
            if value is not None:
                levels[name].labels(self._rank).set(value)

    @property
    def counts(self) -> Counter[str]:
        """What happened to objects so far; see `objects.Objects`."""
        return Counter(self._objects.counts)

    def close(self) -> None:
        self._objects.close()
        if told := ", ".join(f"{count:,} {what}" for what, count in sorted(self.counts.items())):
            log.info("kvarve: %s", told)


def _identity(settings: HiCacheSettings, model_name: str | None, ranks: Ranks) -> Identity:
    path = str(getattr(_server_args(), "model_path", None) or model_name or "")
    sizes = ranks.tp_size, ranks.pp_size, ranks.cp_size, ranks.replicated
    return Identity(
        settings.model or path, server_weights(settings.weights, path), settings.numerics or server_numerics(), sizes
    )


def server_weights(weights: str, path: str) -> str:
    """A name for the weights that the server has loaded from `path`; `weights`: the operator's, or how to make one."""
    args = _server_args()
    if weights in ("", READ_ALL):
        if not _updates.known:
            raise ConfigError(
                "the weights have been updated since the server was started, or may have been, and no weight_version "
                'says to what: "weights" must be a text that changes whenever they do'
            )
        whole = weights == READ_ALL
        weights = _loaded(path, getattr(args, "revision", None), whole=whole)
        draft = getattr(args, "speculative_draft_model_path", None)
        if draft and draft != path:
            weights += _loaded(draft, getattr(args, "speculative_draft_model_revision", None), whole=whole)
        for adapter in getattr(args, "lora_paths", None) or ():  # SGLang's hashes have its name and path, and no more
            weights += _loaded(adapter.lora_path, whole=whole)
        weights += _updates.run
    if (version := _version()) is not None:
        weights += f" version {version}"
    return weights


def server_numerics() -> str:
    """What else of this server changes a page's last bits."""
    args = _server_args()
    return "; ".join(
        [
            f"sglang {sglang.__version__}",
            f"torch {torch.__version__}",
            torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            *(f"{name} {getattr(args, name)}" for name in _NUMERIC if getattr(args, name, None)),
        ]
    )


@cache
def _loaded(path: str, revision: str | None = None, *, whole: bool) -> str:
    """The fingerprint of files as they were when a storage was attached first: the server has them in memory whatever
    becomes of them since."""
    found = checkpoint(path, revision, whole=whole)
    return found + (f" or others {_RUN}" if replaced_since(local_files(path, revision), _BEGAN_S) else "")


def _server_args() -> Any:
    try:
        return get_server_args()
    except (ValueError, RuntimeError, AttributeError):  # a test without a server
        return None


def _weight_version() -> str | None:
    try:
        version = get_serving().weight_version
    except (ValueError, RuntimeError, AttributeError):
        return None
    return None if version is None else str(version)


def _version() -> str | None:
    """The version that a client gave with an update."""
    return None if (version := _weight_version()) == "default" else version


def _run() -> str:
    """What tells this server's run from all others; the same in its ranks on one machine, which it has started."""
    try:
        return f"{os.getppid()} since {began_ticks(os.getppid())} on {Path(BOOT).read_text('ascii').strip()}"
    except OSError:  # its process is not to be seen from here: each rank is a run of its own
        return secrets.token_hex(16)


_RUN = _run()
_BEGAN_S = began_s()
_updates = _Updates()


@cache
def _metrics() -> tuple[Any, Any, Mapping[str, Any]]:
    """For Prometheus: what became of objects, bytes, and the storage. A process can register a name once, however often
    storage is attached."""
    from prometheus_client import Counter as Count
    from prometheus_client import Gauge

    levels = {
        "up": "Whether kvarve's storage answers",
        "lost_objects": "Objects that kvarve's storage has lost since it was attached",
        "damaged_objects": "Objects that kvarve's storage could not read since then",
        "room_bytes": "Bytes that the medium of kvarve's storage has left for it",
        "read_only": "Whether kvarve's storage can only be read",
    }
    labels = ["what", "tp_rank"]
    return (
        Count("kvarve_hicache_objects", "Objects of kvarve's storage, by what happened to them", labels),
        Count("kvarve_hicache_bytes", "Bytes of pages loaded from and stored in kvarve's storage", labels),
        {name: Gauge(f"kvarve_hicache_storage_{name}", meaning, ["tp_rank"]) for name, meaning in levels.items()},
    )
