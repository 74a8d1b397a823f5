"""A tier below vLLM's host memory, over kvarve's storages. Loaded by vLLM, and only there (docs/vllm.md).

    "secondary_tiers": [{"type": "KvarveTier", "module_path": "kvarve.connectors.vllm.tier",
                         "storage": "file:///var/kvarve?capacity=100GiB"}]

vLLM's chunks lie in rows of one shared memory, with the bytes of all ranks; this tier lives in the scheduler's process
and moves whole rows. What it decides is in `chunks`; here are only vLLM's types.
"""

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload import base as vllm_base
from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvarve.connectors.checkpoint import began_s
from kvarve.connectors.engine_settings import TierSettings
from kvarve.connectors.vllm.chunks import ChunkStore, Found, namespace_of
from kvarve.connectors.vllm.engine_calls import Around, callers
from kvarve.connectors.vllm.vllm_identity import Fields, groups_fields, model_digest, plain, weights_of
from kvarve.errors import ConfigError
from kvarve.records.seals import seal_of
from kvarve.storage.urls import shown
from kvarve.system.background import BackgroundCall
from kvarve.transfer.storage_connection import CLOSE_S, open_guarded

log = logging.getLogger(__name__)

RESULTS = {Found.THERE: LookupResult.HIT, Found.ABSENT: LookupResult.MISS, Found.LATER: LookupResult.RETRY}
CHUNKS = "vllm:kvarve_tier_chunks"  # labels: operation, result
UP = "vllm:kvarve_tier_up"
# Of a storage's usage: the gauge, the field, its meaning.
LEVELS = (
    ("objects", "objects", "Objects in the (nearest) storage, as it last answered."),
    ("used_bytes", "bytes", "Bytes of these objects."),
    ("capacity_bytes", "capacity_bytes", "Capacity of the (nearest) storage in bytes, where it tells."),
    ("room_bytes", "room_bytes", "Bytes that its medium has left for it."),
    ("read_only", "read_only", "Whether storages can only be read, or are only to be read (1), so nothing is stored."),
    ("lost_objects", "lost", "Objects that storages have lost since they were opened: what says where is damaged."),
    ("damaged_objects", "damaged", "Objects of storages whose bytes could not be read since they were opened."),
)


class KvarveTier(SecondaryTierManager):
    """kvarve's storages as a secondary tier. All methods are called by vLLM's scheduler and none waits, except
    `drain_jobs` and `shutdown`, for at most the deadline."""

    medium: ClassVar[vllm_base.Medium] = vllm_base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        """ConfigError or StorageError, before anything has been touched: what is wrong with the settings, with the
        identity of the model, or with the storage."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.settings = TierSettings.read(config, _written(offloading_spec, tier_type))
        self.locality = vllm_base.Locality[self.settings.locality] if self.settings.locality else None
        # A view of our own: vLLM releases its view at shutdown, which fails while an array is made of it.
        whose = primary_kv_view.obj if isinstance(primary_kv_view.obj, np.ndarray) else primary_kv_view
        rows = np.asarray(whose).view(np.uint8).reshape(len(primary_kv_view), -1)
        identity = _identity(offloading_spec, self.settings, rows.shape[1])
        namespace = namespace_of(identity)
        seal = seal_of(self.settings.storage_key)
        self._storage = open_guarded(
            self.settings.storage,
            label=namespace,
            description=f"vLLM {offloading_spec.config.model.name}",
            deadline_s=self.settings.deadline_s,
            seal=seal,
        )
        self.chunks = ChunkStore(self._storage, rows, namespace, deadline_s=self.settings.deadline_s, seal=seal)
        self._events: list[OffloadingEvent] | None = None
        if self.settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._told: Mapping[str, int] = {}  # of the counts
        self._around = Around(self._forget)
        BackgroundCall("kvarve asks a storage whether it is up", self._storage.look)
        log.info(
            "kvarve keeps chunks of %d bytes as %s in %s",
            rows.shape[1],
            namespace.hex()[:16],
            ", ".join(map(shown, self.settings.storage)),
        )

    # --- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._around.look_again()
        return RESULTS[self.chunks.lookup(key, req_context.req_id)]

    def on_new_request(self, req_context: ReqContext) -> vllm_base.RequestOffloadingContext:
        return vllm_base.RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.chunks.forget(req_context.req_id)

    def on_schedule_end(self, context: vllm_base.ScheduleEndContext) -> None:
        self.chunks.flush()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.chunks.touch(keys)

    # --- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        chunks = [*zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True)]
        context = job_metadata.req_context  # the first of a prompt are stored first: the others are of no use without
        chunks.sort(key=lambda chunk: context.get_offload_key_position(chunk[0]) or 0)
        self.chunks.store(job_metadata.job_id, [key for key, _ in chunks], [row for _, row in chunks])

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.chunks.load(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for ended in self.chunks.ended():
            good, bad = ([OffloadKey(key) for key in keys] for keys in (ended.good, ended.bad))
            if self._events is not None and (told := good if ended.storing else bad):
                event = OffloadingEvent(told, self.medium, removed=not ended.storing, locality=self.locality)
                self._events.append(event)
            kept, size = None if ended.storing or not bad else good, len(good) * self.block_size_bytes
            results.append(
                JobResult(ended.job, not bad, successful_keys=kept, transfer_time=ended.seconds, transfer_bytes=size)
            )
        return results

    def drain_jobs(self) -> None:
        """All that vLLM calls when it empties its caches, since the weights are others, or will be."""
        self.chunks.drain()
        self._forget()

    def _forget(self) -> None:
        self.chunks.forget_all(os.urandom(16))

    def shutdown(self) -> None:
        self.chunks.close(min(CLOSE_S, self.settings.deadline_s))

    # --- what is told

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events or [], None if self._events is None else []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, vllm_base.OffloadingMetricMetadata]:
        told = "Chunks by what became of them in kvarve's storages: operation (store, load), result."
        gauge = vllm_base.OffloadingGaugeMetadata
        return {
            CHUNKS: vllm_base.OffloadingCounterMetadata(told, ("operation", "result")),
            UP: gauge("Whether calls reach kvarve's storage (1), or are misses at once (0)."),
            **{f"vllm:kvarve_tier_{name}": gauge(meaning) for name, _, meaning in LEVELS},
        }

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        counts = dict(self.chunks.counts)
        for name, count in counts.items():
            new = count - self._told.get(name, 0)
            if new:
                operation, _, result = name.partition(": ")
                stats.increase_counter(CHUNKS, new, (operation, result.replace(" ", "_")))
        self._told = counts
        stats.set_gauge(UP, int(self._storage.up))
        usage = self.chunks.usage
        if usage is not None:
            for name, field, _ in LEVELS:
                if (value := getattr(usage, field)) is not None:  # 0 would be a full disk, or an unknown size
                    stats.set_gauge(f"vllm:kvarve_tier_{name}", int(value))
        return stats


def _written(spec: Any, tier_type: str) -> set[str] | None:
    """The keys that the operator has written for tiers of this type: all other arguments are vLLM's own."""
    tiers = spec.extra_config.get("secondary_tiers")
    if not isinstance(tiers, list):
        return None
    return {key for tier in tiers if isinstance(tier, dict) and tier.get("type") == tier_type for key in tier}


def _identity(spec: Any, settings: TierSettings, row_bytes: int) -> Fields:
    """Everything that decides what the bytes of a row mean."""
    config, parallel = spec.config, spec.config.parallel
    fields: Fields = {
        "engine": ["vllm", vllm.__version__, torch.__version__],
        "device": [current_platform.device_type, _device()],
        "dtype": config.model.dtype,
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "row_bytes": row_bytes,
        "rank_bytes": config.worker_kv_bytes_per_block,
        "blocks": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "more": settings.identity,
    }
    found = _configs()
    if found is not None and found[0].lora_config is not None and not settings.identity:
        raise ConfigError(
            "adapters (LoRA) are on, and vLLM's tiering knows them by name and path alone, so pages of their weights "
            'before would be found: "identity" of the tier must be a text that changes whenever those of an adapter '
            "do; or use kvarve's connector"
        )
    if found is None:
        if not settings.identity or not settings.weights:
            raise ConfigError(
                'this vLLM does not let a tier see its configuration: "identity" of the tier must be a text that tells '
                'the model and its settings apart, and "weights" one for its weights'
            )
        return {**fields, "model": config.model.name, "weights": settings.weights}
    vllm_config, kv_cache_config = found
    if kv_cache_config is not None:
        fields["specs"] = groups_fields(kv_cache_config)
    fields["model"] = model_digest(vllm_config)
    fields["weights"] = weights_of(vllm_config, settings.weights, began_s())
    return {name: plain(value) for name, value in fields.items()}


def _configs() -> tuple[Any, Any] | None:
    """vLLM's configuration, and that of its KV cache.

    vLLM gives a tier neither revision, nor quantisation, nor overrides of the model's config, all of which change the
    bytes. The connector that makes us has them as arguments.
    """
    for known in callers():
        config = known.get("vllm_config")
        if isinstance(config, vllm.config.VllmConfig) and config.kv_transfer_config is not None:
            return config, known.get("kv_cache_config")
    return None


def _device() -> str:
    """The name of the processor or accelerator, whose kernels round in their own way."""
    try:
        return str(current_platform.get_device_name())
    except Exception:  # noqa: BLE001  of any platform and its driver: some do not know
        return ""
