"""A connector for vLLM: kvarve's host memory and storages behind vLLM's blocks.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvarveConnector",
        "kv_connector_module_path": "kvarve.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_memory": "16GiB"}}'

vLLM makes two of it: one in the scheduler's process, which plans (`plan.py`), and one in the worker's, which copies.
What the worker finds when it gets the engine's tensors (the model's identity, the slots of the host) goes to the
scheduler once, as the handshake; after that orders go down with each step, and reports come up.

Loads run between steps: loading within a step would be wrong for recurrent states, which vLLM moves to the running
block before it asks for loads. A load that fails is reported for the request as a whole, and its prompt is computed.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm import __version__ as VLLM_VERSION
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvarve.core.effects import Copy, Ended, Event
from kvarve.core.reasons import Reason
from kvarve.core.settings import Slots
from kvarve.engine.identity import numerics
from kvarve.errors import ConfigError
from kvarve.integrations.extra_config import extra_config
from kvarve.integrations.plan import BlockPlanner, Group, Offer, Plan, Removed, Scheduled, Stored, lookback_of
from kvarve.integrations.vllm_around import Around
from kvarve.integrations.vllm_identity import model_digest, weights_of
from kvarve.integrations.vllm_metrics import COUNTERS, KvarveMetrics, KvarveStats
from kvarve.integrations.vllm_weights import adapter_loaded, adapter_now
from kvarve.memory.engine_arena import EngineArena, block_bytes, pool_of
from kvarve.messages import Order, Report
from kvarve.model import LAYOUT_FORMAT, ModelIdentity, Tier
from kvarve.scheduler import CacheScheduler
from kvarve.worker import CLOSE_S, CacheWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.kvarve")  # below vLLM's own, whose settings apply

WHERE = "kv_connector_extra_config"
IDLE_WAIT_S = 0.002  # of a step without tokens, for a copy to end: the engine would spin
SETTLE_S = 10.0  # for copies that use the engine's blocks to end, when these are to be forgotten
CLOSING_S = 30.0
MEDIUM_CPU = "CPU"  # of events
SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.STORAGE: CacheHitSource.DISK}


@dataclass
class Orders(KVConnectorMetadata):
    """What a step's worker does. `idle`: the step computes nothing. `adapters`: by copy to or from vLLM's blocks, the
    number of the adapter that the pages are of and the digest of its weights, which have to be loaded then."""

    plan: Plan = field(default_factory=Plan)
    idle: bool = False
    adapters: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass
class Reported(KVConnectorWorkerMetadata):
    """What the worker tells the scheduler after a step."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise AssertionError("there is one worker")


@dataclass
class Ready(KVConnectorHandshakeMetadata):
    """What the scheduler has to know of the worker before the first request."""

    identity: ModelIdentity
    slots: Slots
    storage: bool
    only_read: bool


class KvarveConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefixes of all cache groups, kept in host memory and storages, found as one set."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = extra_config(transfer.kv_connector_extra_config, WHERE)
        check_engine(vllm_config)
        self._page, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._groups = groups_of(kv_cache_config, self._page)
        if role is KVConnectorRole.WORKER:
            self._worker_side = WorkerSide(vllm_config, kv_cache_config, self._settings, self._groups, self._page)
        else:
            events = vllm_config.kv_events_config
            tells = events is not None and events.enable_kv_cache_events
            self._scheduler_side = SchedulerSide(self._settings, self._groups, self._hash_tokens, tells)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # it is a cache: a page that is lost is computed

    # --- in the worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return self._worker_side.ready()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass  # with the saves in `wait_for_save`, since orders are carried out in their order

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self._worker_side.do(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._worker_side.collect()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker_side.take_report()
        return None if report is None else Reported(report)

    # --- in the scheduler's process

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        (ready,) = metadata.values()
        assert isinstance(ready, Ready)
        self._scheduler_side.start(ready)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler_side.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._scheduler_side.ask(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler_side.planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if not num_external_tokens:
            return {}
        found = self._scheduler_side.planner.sources(request.request_id)
        return {SOURCES[tier]: tokens for tier, tokens in found.items()}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler_side.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Reported):
            self._scheduler_side.ended(told.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_side.planner.finished(request.request_id)
        return False, None  # copies hold references of their own

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side.planner.busy()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler_side.frees_blocks()

    def take_events(self) -> Iterable[Any]:
        return self._scheduler_side.take_events()

    def reset_cache(self) -> None:
        self._scheduler_side.forget()

    # --- in either

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler_side.stats() if self.role is KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KvarveStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvarveMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker_side.close()


@dataclass
class Adapter:
    """An adapter as its requests find it: the digest of its weights, and the cached blocks that vLLM has then. vLLM's
    hashes know its name and path alone."""

    digest: str
    blocks: Any


class SchedulerSide:
    """Plans, and holds references to the blocks that copies use."""

    planner: BlockPlanner
    pool: Any  # vLLM's BlockPool

    def __init__(self, settings: Any, groups: tuple[Group, ...], hash_tokens: int, tells: bool) -> None:
        self._settings, self._groups, self._hash_tokens, self._tells = settings, groups, hash_tokens, tells
        self._held: Counter[int] = Counter()  # references by block
        self._told: dict[str, float] = {}  # counters that have been given to vLLM
        self._explained: Counter[Reason] = Counter()  # the same of tokens by reason
        self._levels: dict[str, float] = {}  # of the host, by group, as last given to vLLM
        self._around = Around(self.forget, self.settle)
        self._digests: dict[int, str] = {}  # of adapters by their number, since the last step
        self._adapters: dict[tuple[str, str], Adapter] = {}  # by name and path
        self._salted: dict[int, Any] = {}  # by copy: the request whose pages it moves, if that has an adapter
        # The cached blocks of vLLM of which some are of weights before: of an adapter, and of the model (None). When it
        # has forgotten them all, it has others.
        self._stale: dict[tuple[str, str] | None, Any] = {}
        self._blocks: Any = None  # the cached blocks at the last step

    def start(self, ready: Ready) -> None:
        shape = ready.identity, self._settings.cache, ready.slots
        self.scheduler = CacheScheduler(*shape, storage=ready.storage, only_read=ready.only_read)
        self.planner = BlockPlanner(self.scheduler, self._groups, self._hash_tokens, tells=self._tells)
        self._around.ask(meet)
        self._around.when_idle(self.go_on)

    def ask(self, request: Any, computed: int) -> int | None:
        read = not request.skip_reading_prefix_cache
        return self.planner.ask(request, computed, time.monotonic(), read, lambda: self._salt(request, computed))

    def _salt(self, request: Any, computed: int) -> str | None:
        """What tells the pages of a request apart beside vLLM's hashes: its adapter's weights. None, so that its pages
        are neither read nor saved: these are not known, or vLLM's own prefix may be of weights before."""
        lora, name, salt = request.lora_request, None, ""
        if lora is not None:
            digest = self._digest(lora)
            if not digest:
                return None
            name, salt = _name(lora), digest
            before = self._adapters.get(name)
            if before is not None and before.digest != digest and before.blocks is self._cached():
                self._stale[name] = before.blocks
            self._adapters[name] = Adapter(digest, self._cached())
        stale = any(self._stale.get(each, self) is self._cached() for each in (None, name))
        # Of a prefix that ends within a page nothing is told.
        return None if stale and (computed or self._hash_tokens < self.planner.page_tokens) else salt

    def _digest(self, lora: Any) -> str:
        """Of the adapter's weights as its next step computes with them."""
        if lora.lora_int_id not in self._digests:
            (self._digests[lora.lora_int_id],) = self._around.ask(adapter_now, lora) or [""]
        return self._digests[lora.lora_int_id]

    def _cached(self) -> Any:
        return getattr(self.pool, "cached_block_hash_to_block", None)

    def forget(self) -> None:
        """Name pages anew from now on, as the weights are others, or will be."""
        if self._cached() is self._blocks:
            self._stale[None] = self._blocks
        self.planner.reset(os.urandom(16).hex())

    def plan(self, output: "SchedulerOutput") -> Orders:
        state = output.kv_connector_block_state
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        again = output.scheduled_cached_reqs
        computed |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        scheduled = {
            name: Scheduled(computed[name], tokens, state.get_block_ids(name))
            for name, tokens in output.num_scheduled_tokens.items()
        }
        offers = {name: [Offer(*offer) for offer in them] for name, them in state.boundary_state_offloads.items()}
        self._blocks = self._cached()
        return self._plan(scheduled, offers)

    def _plan(self, scheduled: Mapping[str, Scheduled], offers: Mapping[str, list[Offer]]) -> Orders:
        plan = self.planner.plan(scheduled, offers, time.monotonic())
        if plan.held:
            self.pool.touch([self.pool.blocks[block] for block in plan.held])
            self._held.update(plan.held)
        self._free(plan.freed)
        self._digests.clear()
        self._salted |= {op: request for op, (request, _) in plan.salts.items()}
        if not self.planner.idle():
            self._around.again()
        adapters = {op: (cast(Any, it).lora_request.lora_int_id, salt) for op, (it, salt) in plan.salts.items()}
        return Orders(Plan(plan.orders, plan.loads, plan.void), idle=not scheduled, adapters=adapters)

    def ended(self, report: Report) -> None:
        for event in report.events if self._salted else ():
            if isinstance(event, Ended) and (request := self._salted.pop(event.op, None)) and not event.good:
                # It is computed with other weights, as may be blocks that vLLM has cached.
                self.planner.distrust(request.request_id)
                self._stale[_name(request.lora_request)] = self._cached()
        self._free(self.planner.ended(report, time.monotonic()))

    # --- beside the engine's steps

    def go_on(self) -> bool:
        """Copies between the host and storage go on while the engine has nothing to do: what has ended is taken in, and
        what is due is sent. False: all is done."""
        if self.planner.busy():  # the engine takes a step
            return True
        self._exchange()
        return not self.planner.idle()

    def settle(self) -> None:
        """Wait until no copy uses the engine's blocks, for a while."""
        end = time.monotonic() + SETTLE_S
        while self._held and time.monotonic() < end and self._exchange():
            pass
        if self._held:
            log.warning("copies of %d of vLLM's blocks take longer than %g s", len(self._held), SETTLE_S)

    def _exchange(self) -> bool:
        """Orders and a report without a step; False without an engine to carry them."""
        for report in self._around.ask(beside, self._plan({}, {})) or ():
            self.ended(report)
            return True
        return False

    def frees_blocks(self) -> bool:
        """Whether a block is in use for nothing but copies in flight."""
        return any(self.pool.blocks[block].ref_cnt == users for block, users in self._held.items())

    def take_events(self) -> list[Any]:
        return [
            self._stored(page) if isinstance(page, Stored) else self._removed(page)
            for page in self.planner.take_changes()
        ]

    def _stored(self, page: Stored) -> Any:
        group, request = self._groups[page.pool], cast(Any, page.request)
        start = page.page * self.planner.page_tokens
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(page.name)],
            parent_block_hash=None if page.parent is None else maybe_convert_block_hash(page.parent),
            token_ids=[*request.all_token_ids[start : start + self.planner.page_tokens]],
            block_size=self.planner.page_tokens,
            lora_id=None,
            medium=MEDIUM_CPU,
            lora_name=None if request.lora_request is None else request.lora_request.lora_name,
            group_idx=group.number,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window_tokens,
        )

    def _removed(self, page: Removed) -> Any:
        name = maybe_convert_block_hash(page.name)
        return BlockRemoved(block_hashes=[name], medium=MEDIUM_CPU, group_idx=self._groups[page.pool].number)

    def stats(self) -> KVConnectorStats | None:
        """Counters since the last call, and levels."""
        found = self.scheduler.stats() | {"failed_loads": self.planner.failed_loads}
        now = {name: found[name] for name in COUNTERS}
        counts = {name: value - self._told.get(name, 0) for name, value in now.items()}
        reasons = self.planner.reasons - self._explained
        levels = {
            group.name: found[f"used.{place}"] * found[f"slot_bytes.{place}"] / found["memory_bytes.host"]
            for group in self._groups
            for place in [f"host.{group.name}"]
        }
        if not any(counts.values()) and not reasons and levels == self._levels:
            return None
        self._told, self._explained, self._levels = now, self.planner.reasons.copy(), levels
        explained = {reason.value: tokens for reason, tokens in reasons.items()}
        return KvarveStats(data={"counts": counts, "reasons": explained, "usage": levels})

    def _free(self, blocks: list[int]) -> None:
        if blocks:
            self.pool.free_blocks([self.pool.blocks[block] for block in blocks])
            self._held.subtract(blocks)
            self._held += Counter()  # only what is above zero


def _name(lora: Any) -> tuple[str, str]:
    """An adapter, as vLLM's hashes know it."""
    return lora.lora_name, lora.lora_path


class WorkerSide:
    """Copies between the engine's tensors, host memory and storage."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        settings: Any,
        groups: tuple[Group, ...],
        page_tokens: int,
    ) -> None:
        self._vllm, self._cache_config, self._settings = vllm_config, kv_cache_config, settings
        self._groups, self._page = groups, page_tokens
        self._worker: CacheWorker | None = None
        self.engine: Any = None  # vLLM's worker
        self._loads: dict[int, tuple[str, int]] = {}  # by copy: its request, and how many pages it has
        self._received, self._failed = set[str](), set[str]()  # requests whose loads have ended, or lack a page
        self._void = set[str]()  # requests whose loads count as failed
        self._dropped: list[Event] = []  # of copies that were not made
        self._report: Report | None = None
        self._up = True  # as last reported

    @property
    def worker(self) -> CacheWorker:
        assert self._worker is not None, "the engine gives its tensors first"
        return self._worker

    def register(self, tensors: Mapping[str, Any]) -> None:
        blocks = self._cache_config.num_blocks
        pools, layers, kept = [], [], []
        for group in self._groups:
            spec = self._cache_config.kv_cache_groups[group.number]
            mine = {name: tensors[name] for name in spec.layer_names if name in tensors}
            sizes = [block_bytes(name, tensor, blocks).shape[2] for name, tensor in mine.items()]
            pools.append(pool_of(group.name, sizes, group.lookback, group.blocks(self._page)))
            layers.append(mine)
            kept.append(_layout(spec, mine))
        identity = identity_of(self._vllm, pools, self._page, kept, self._settings.weights, _device(layers))
        arenas = [
            EngineArena(pool, mine, blocks, group.blocks(self._page))
            for pool, mine, group in zip(pools, layers, self._groups, strict=True)
        ]
        self._worker = CacheWorker(identity, self._settings.cache, device=str(_device(layers)), blocks=arenas)
        slots = {arena.pool.name: arena.slots for arena in self._worker.host}
        log.info(
            "kvarve keeps pages of %d tokens in host memory, at most by group: %s (%s)", self._page, slots, identity
        )

    def ready(self) -> Ready:
        attached = self.worker.attached
        only_read = attached is not None and attached.only_read
        return Ready(self.worker.identity, self.worker.slots, attached is not None, only_read)

    def do(self, orders: Orders) -> None:
        """Carry out the orders of a step that has been computed."""
        plan = orders.plan
        for order in plan.orders:
            if isinstance(order, Copy) and order.op in plan.loads:
                self._loads[order.op] = plan.loads[order.op], len(order.pages)
        self._void |= plan.void
        self.worker.do([order for order in plan.orders if not self._outdated(order, orders.adapters)])
        if orders.idle:
            self.worker.wait(IDLE_WAIT_S)

    def _outdated(self, order: Order, adapters: Mapping[int, tuple[int, str]]) -> bool:
        """Whether a copy is of pages of other weights of an adapter than are loaded. It ends at once."""
        if not isinstance(order, Copy) or order.op not in adapters:
            return False
        number, digest = adapters[order.op]
        if adapter_loaded(self.engine, number) == digest:
            return False
        self._dropped.append(Ended(order.op, 0))
        return True

    def report(self) -> Report:
        """What has happened since the last report. The requests whose loads have ended are told with the next step."""
        found, dropped = self.worker.report(), self._dropped
        found, self._dropped = found._replace(events=[*found.events, *dropped]), []
        for event in found.events:
            if isinstance(event, Ended) and event.op in self._loads:
                request, pages = self._loads.pop(event.op)
                self._received.add(request)
                if event.good.bit_count() != pages:
                    self._failed.add(request)
        return found

    def collect(self) -> tuple[set[str], set[str]]:
        """The requests whose loads have ended, and those of them that lack a page."""
        self._report = self.report()
        (received, self._received), (failed, self._failed) = (self._received, set()), (self._failed, set())
        void = self._void & received
        self._void -= void
        return received, failed | void

    def take_report(self) -> Report | None:
        """What is new since the last one; nothing if that is nothing."""
        report, self._report = self._report, None
        if report is not None and not report.events and report.up == self._up:
            return None
        self._up = report is None or report.up
        return report

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close(CLOSING_S, CLOSE_S, up=self._worker.up)
            self._worker = None


# --- in the worker, asked by the scheduler's side between steps


def meet(worker: Any) -> None:
    """The side that copies gets to know vLLM's worker."""
    for side in _sides():
        side.engine = worker


def beside(_: Any, orders: Orders) -> Report:
    """Carry out orders, and report."""
    (side,) = _sides()
    side.do(orders)
    return side.report()


def _sides() -> list[WorkerSide]:
    group = get_kv_transfer_group()
    return [
        each._worker_side for each in [group, *getattr(group, "_connectors", [])] if isinstance(each, KvarveConnector)
    ]


# --- what the engine is


def check_engine(config: "VllmConfig") -> None:
    """ConfigError for settings of the engine with which kvarve cannot work."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "vLLM's prefix caching is off, whose hashes name kvarve's pages: remove --no-enable-prefix-caching, or "
            "remove the connector"
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"kv_role is {transfer.kv_role!r}: kvarve both saves and loads, so give 'kv_both'")
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy is 'fail', by which a bad page would fail its request: give 'recompute'"
        )
    if parallel.world_size > 1 or parallel.decode_context_parallel_size > 1:
        raise ConfigError(
            f"{parallel.world_size} workers compute one model: kvarve's connector works with one so far; use vLLM's "
            f"OffloadingConnector with kvarve as its secondary tier"
        )


def groups_of(config: "KVCacheConfig", page_tokens: int) -> tuple[Group, ...]:
    """The groups that may be cached; kvarve's pools. ConfigError for a kind that is not known."""
    found = []
    for number in config.prefix_cacheable_group_ids:
        spec = config.kv_cache_groups[number].kv_cache_spec
        kind = get_kv_cache_spec_kind(spec).value
        window = get_kv_cache_spec_sliding_window(spec) or getattr(spec, "attention_chunk_size", None)
        if window is not None:
            window += getattr(spec, "extra_retained_tokens", 0)
        name = f"{number}-{kind.replace('_', '-')}"[:32]
        lookback = lookback_of(kind, page_tokens, window)
        found.append(Group(number, name, spec.block_size, lookback, kind == "mamba", kind, window))
    if not found:
        raise ConfigError("no cache group of this model may be cached: remove the connector")
    return tuple(found)


def identity_of(
    config: "VllmConfig", pools: list[Any], page_tokens: int, kept: list[str], weights: str, device: torch.device
) -> ModelIdentity:
    """All that decides the bytes of a page, as far as a connector can tell.

    The grid is a page: vLLM computes a prompt in chunks that follow from its load, and its own prefix cache does not
    tell them apart either.
    """
    model, cache = config.model_config, config.cache_config
    return ModelIdentity(
        architecture=" ".join(model.architectures),
        weights=weights_of(config, weights),
        dtype=str(model.dtype).removeprefix("torch."),
        page_tokens=page_tokens,
        chunk_tokens=page_tokens,
        pools=tuple(pools),
        layout=f"{LAYOUT_FORMAT} of vllm: {'; '.join(kept)}",
        config=model_digest(config),
        quantisation=f"{model.quantization or ''} {cache.cache_dtype}".strip(),
        numerics=numerics([device], [f"vllm {VLLM_VERSION}", f"hashes {cache.prefix_caching_hash_algo}"]),
    )


def _layout(spec: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """How the bytes of a group's blocks lie, for the identity."""
    found = []
    for tensor in tensors.values():
        strides = tensor.stride()
        order = sorted(range(1, tensor.dim()), key=lambda axis: -strides[axis])
        found.append(f"{tuple(tensor.shape[1:])} {tensor.dtype} {order}")
    return f"{spec.kv_cache_spec!r} {found}"


def _device(layers: list[dict[str, torch.Tensor]]) -> torch.device:
    return next(iter(layers[0].values())).device
