"""A connector for vLLM: kvarve's host memory and storages behind vLLM's blocks.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvarveConnector",
        "kv_connector_module_path": "kvarve.connectors.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_memory": "16GiB"}}'

vLLM makes several of it: one in the scheduler's process, which plans (`block_plan.py`), and one in each worker's, which
copies that worker's shard. What a worker finds in the engine's tensors (the model's identity, the slots of the host)
goes to the scheduler once, as the handshake; after that the same orders go to all workers with each step, and reports
come up. A copy has ended when it has on all workers, with the pages that are good on all (`Votes`).

Loads run between steps: loading within a step would be wrong for recurrent states, which vLLM moves to the running
block before it asks for loads. A load that fails is reported for the request as a whole, and its prompt is computed.

With pipeline stages several steps are in flight, and orders of the next one are made before the reports of the last.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvarve.cache.messages import Order, Report
from kvarve.cache.scheduler import CacheScheduler
from kvarve.cache.worker import CacheWorker
from kvarve.connectors.engine_settings import ConnectorSettings
from kvarve.connectors.levels import VARIABLE, Levels, Teller, page_of, port_of
from kvarve.connectors.vllm.adapters import Adapters, Use
from kvarve.connectors.vllm.block_layout import divided
from kvarve.connectors.vllm.block_plan import BlockPlanner, Group, Offer, Removed, Scheduled, Stored
from kvarve.connectors.vllm.engine_calls import Around
from kvarve.connectors.vllm.groups import (
    check_engine,
    device_of,
    groups_of,
    identity_of,
    identity_of_all,
    largest_of_stages,
    layout_of,
    on_all_stages,
    replicated,
)
from kvarve.connectors.vllm.kv_heads import heads_of
from kvarve.connectors.vllm.vllm_metrics import COUNTERS, KvarveMetrics, KvarveStats
from kvarve.connectors.vllm.weights import adapter_now, load_anew, others_of
from kvarve.core.copies.effects import Copy, Ended, Event
from kvarve.core.core_config import Slots
from kvarve.core.observe.reasons import Reason
from kvarve.errors import ConfigError
from kvarve.memory.engine_arena import EngineArena, Strips, block_bytes, pool_of
from kvarve.pages.pools import ModelIdentity, Tier
from kvarve.ranks.agreement import Votes
from kvarve.transfer.storage_connection import CLOSE_S

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvarve.connectors.engine_page import EnginePage

log = logging.getLogger("vllm.kvarve")  # below vLLM's own, whose settings apply

WHERE = "kv_connector_extra_config"
IDLE_WAIT_S = 0.002  # of a step without tokens, for a copy to end: the engine would spin
SETTLE_S = 10.0  # for copies that use the engine's blocks to end, when these are to be forgotten
CLOSING_S = 30.0
MEDIUM_CPU = "CPU"  # of events
SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.STORAGE: CacheHitSource.DISK}


@dataclass
class Orders(KVConnectorMetadata):
    """What a step's workers do. `idle`: the step computes nothing. Adapters that have to be loaded: by copy to or from
    vLLM's blocks that of its pages, and those that the step computes with. `seen`: by rank, the number of its last
    report that has come."""

    orders: list[Order] = field(default_factory=list)
    idle: bool = False
    seen: dict[int, int] = field(default_factory=dict)
    copied: dict[int, Use] = field(default_factory=dict)
    computed: list[Use] = field(default_factory=list)


@dataclass
class Reported(KVConnectorWorkerMetadata):
    """What workers tell the scheduler after a step: by rank its reports, numbered, from the first that the scheduler
    may not have seen. `mixed`: other weights of these adapters were loaded. `levels`: for the live page."""

    reports: dict[int, list[tuple[int, Report]]]
    mixed: list[Use]
    levels: dict[int, Levels]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Reported)
        return Reported(self.reports | other.reports, self.mixed + other.mixed, self.levels | other.levels)


@dataclass
class Ready(KVConnectorHandshakeMetadata):
    """What the scheduler has to know of a worker before the first request."""

    rank: int
    identity: ModelIdentity
    slots: Slots
    storage: bool
    only_read: bool
    levels: Levels | None  # for the live page, if there is one


class KvarveConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefixes of all cache groups, kept in host memory and storages, found as one set. vLLM makes the side of its
    process, and calls of the other one's only what does nothing here."""

    def __new__(cls, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> Any:
        return super().__new__(WorkerSide if role is KVConnectorRole.WORKER else SchedulerSide)

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._parallel = vllm_config.parallel_config
        self._settings = ConnectorSettings.read(vllm_config.kv_transfer_config.kv_connector_extra_config, WHERE)
        check_engine(vllm_config)
        self._block, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._port = port_of(self._parallel.data_parallel_index, os.environ)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # it is a cache: a page that is lost is computed

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KvarveStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> KVConnectorPromMetrics:
        return KvarveMetrics(*given)

    def _nothing(self, *_: Any, **__: Any) -> Any:
        """On the worker's side loads are with the saves in `wait_for_save`: orders are carried out in their order."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing
    # Of the scheduler's side, which has them.
    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = _nothing
    request_finished_all_groups = _nothing


class SchedulerSide(KvarveConnector):
    """Plans, and holds references to the blocks that copies use."""

    planner: BlockPlanner
    pool: Any  # vLLM's BlockPool

    def __init__(self, vllm_config: "VllmConfig", *more: Any) -> None:
        super().__init__(vllm_config, *more)
        events, lora = vllm_config.kv_events_config, vllm_config.lora_config
        self._tells = events is not None and events.enable_kv_cache_events
        self._held: Counter[int] = Counter()  # references by block
        self._told: dict[str, float] = {}  # counters that have been given to vLLM
        self._explained: Counter[Reason] = Counter()  # the same of tokens by reason
        self._levels: dict[str, float] = {}  # of the host, by group, as last given to vLLM
        self._void: set[str] = set()  # requests whose loaded pages vLLM must not use: their loads count as failed
        self._live: EnginePage | None = None
        self._around = Around(self.reset_cache, self.settle)
        if self._around.config is not None:  # what MultiConnector is given decides what happens to failed loads
            check_engine(self._around.config)
        places = 0 if lora is None else lora.max_cpu_loras
        self._adapters = Adapters(places, self._look, lambda: self.pool.cached_block_hash_to_block)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        found = [each for each in metadata.values() if isinstance(each, Ready)]
        ready = sorted(found, key=lambda each: each.rank)
        if [each.rank for each in ready] != [*range(self._parallel.world_size)]:
            raise ConfigError("vLLM passes on what the first of several connectors says: kvarve's must be the first")
        slots, page = ready[0].slots, ready[0].identity.page_tokens
        assert self._kv_cache_config is not None
        self._groups = groups_of(self._kv_cache_config, page)
        assert all(each.slots == slots for each in ready), "all workers divide their memory alike"
        storage, only_read = all(each.storage for each in ready), any(each.only_read for each in ready)
        identity = identity_of_all([each.identity for each in ready], [group.name for group in self._groups])
        self.scheduler = CacheScheduler(identity, self._settings.cache, slots, storage=storage, only_read=only_read)
        self._votes = Votes(len(ready))
        self._seen, self._up = dict.fromkeys(range(len(ready)), 0), [True] * len(ready)
        self.planner = BlockPlanner(self.scheduler, self._groups, self._hash_tokens, tells=self._tells)
        log.info("kvarve: a prompt can hit from %d tokens on, and then in steps of %d", page + 1, page)
        self._live = self._open_page(ready)
        self._around.ask(meet)
        self._around.when_idle(self.go_on)
        self._around.end_with_parent()
        self._around.watch("add_request", before=self._arrived)
        for name in ("add_lora", "remove_lora"):
            self._around.watch(name, after=self._adapters_changed)

    def _open_page(self, ready: Sequence[Ready]) -> "EnginePage | None":
        if self._port is None:
            return None
        levels = {each.rank: each.levels for each in ready if each.levels is not None}
        if len(levels) < len(ready):
            log.warning("kvarve shows no live page: its workers have no $%s", VARIABLE)
            return None
        name = self._vllm_config.model_config.served_model_name
        return page_of(self._port, log, name, self.scheduler, levels, self._around.again)

    def shutdown(self) -> None:
        if self._live is not None:
            self._live.end()
            self._live = None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    # --- a request's life

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._around.look_again()
        if not self._adapters.enter(request):
            return None, False  # once a request with another adapter has ended
        read = not request.skip_reading_prefix_cache
        # vLLM does not say whether it has cached a part of a page.
        prefix = bool(num_computed_tokens) or self._hash_tokens < self.planner.page_tokens
        salt = partial(self._adapters.salt, request.lora_request, prefix)
        found = self.planner.ask(request, num_computed_tokens, time.monotonic(), read, salt)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        found = self.planner.sources(request.request_id) if num_external_tokens else {}
        return {SOURCES[tier]: tokens for tier, tokens in found.items()}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.planner.finished(request.request_id)
        self._adapters.leave(request.request_id)
        self._void.discard(request.request_id)
        return False, None  # copies hold references of their own

    def _look(self, lora: Any, others: set[int]) -> str:
        """By rank, or of all ranks: each may have a part of an adapter."""
        found = self._around.ask(adapter_now, lora, others) or [""]
        return "" if "" in found else " ".join(found[:1] if len({*found}) == 1 else found)

    # --- when weights change

    def reset_cache(self) -> None:
        """Name pages anew from now on, as the weights are others, or will be."""
        if self._live is not None:
            self._live.mark("weights", "they may have changed: pages from before are not found any more")
        self._adapters.model_changed()
        self._discard(self.planner.loaded())
        self.planner.reset(os.urandom(16).hex())

    def _arrived(self, request: Any, *_: Any, **__: Any) -> None:
        """A request that wants its adapter loaded anew: this is done now, and not in each of its steps."""
        lora = request.lora_request
        if lora is not None and lora.load_inplace and all(self._around.ask(load_anew, lora) or [False]):
            request.lora_request = copy(lora)  # the client's own may be the same object
            request.lora_request.load_inplace = False
            self._adapters_changed()

    def _adapters_changed(self, *_: Any, **__: Any) -> None:
        """Adapters have been loaded, or pushed out, between steps."""
        loaded = {name: salt for name, (_, salt) in self.planner.loaded().items() if salt}
        uses = [self._adapters.use(name, salt) for name, salt in loaded.items()]
        for others in self._around.ask(others_of, uses) or () if uses else ():
            self._discard({use.request for use in others})

    def _discard(self, requests: Iterable[str]) -> None:
        """Have the prompts of requests computed whose pages have been loaded, or are being loaded."""
        self._void.update(requests)
        self._void -= self._around.compute(self._void)

    # --- each step

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Orders:
        output, state = scheduler_output, scheduler_output.kv_connector_block_state
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        again = output.scheduled_cached_reqs
        computed |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        scheduled = {
            name: Scheduled(computed[name], tokens, state.get_block_ids(name))
            for name, tokens in output.num_scheduled_tokens.items()
        }
        offers = {name: [Offer(*offer) for offer in them] for name, them in state.boundary_state_offloads.items()}
        self._adapters.step()
        return self._plan(scheduled, offers)

    def _plan(self, scheduled: Mapping[str, Scheduled], offers: Mapping[str, list[Offer]]) -> Orders:
        plan = self.planner.plan(scheduled, offers, time.monotonic())
        if plan.held:
            self.pool.touch([self.pool.blocks[block] for block in plan.held])
            self._held.update(plan.held)
        self._free(plan.freed)
        if not self.planner.idle():
            self._around.again()
        if self._live is not None:
            self._live.look(self.planner.reasons, self._up)
        copied = {op: self._adapters.use(request.request_id, salt) for op, (request, salt) in plan.salts.items()}
        computed = [self._adapters.use(name, salt) for name, salt in self.planner.salts(scheduled).items()]
        return Orders(plan.orders, idle=not scheduled, seen=self._seen.copy(), copied=copied, computed=computed)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Reported):
            received, failed = self._ended(told)  # vLLM is about to take these in
            connector_output.finished_recving = (connector_output.finished_recving or set()) | received
            self._around.fail(failed)

    def _ended(self, told: Reported) -> tuple[set[str], set[str]]:
        """The requests whose loads have ended on all workers, and those that have to be computed."""
        for use in told.mixed:
            self.planner.distrust(use.request)
            self._adapters.mixed(use.adapter)
        if self._live is not None:
            self._live.reported(told.levels)
        news: list[list[Event]] = [[] for _ in self._up]
        for rank, reports in told.reports.items():
            for number, report in reports:
                if number > self._seen[rank]:
                    self._seen[rank], self._up[rank] = number, report.up
                    news[rank] += report.events
        landed = self.planner.ended(Report(self._votes.merge(news), all(self._up)), time.monotonic())
        self._free(landed.freed)
        void = self._void & landed.received
        self._void -= void
        return landed.received, landed.failed | void

    # --- beside the engine's steps

    def go_on(self) -> bool:
        """Copies between the host and storage go on while the engine has nothing to do: what has ended is taken in, and
        what is due is sent. False: all is done."""
        if self.planner.busy():  # the engine takes a step
            return True
        self._exchange()
        return not self.planner.idle()

    def settle(self, running: bool) -> None:
        """Wait until no copy uses the engine's blocks, for a while. `running`: nor may a request that has not ended."""
        end = time.monotonic() + SETTLE_S
        while self._held and time.monotonic() < end and self._exchange():
            pass
        if self._held:
            log.warning("copies of %d of vLLM's blocks take longer than %g s", len(self._held), SETTLE_S)
        if running:
            self._discard(self.planner.loaded())

    def _exchange(self) -> bool:
        """Orders and a report without a step; False without an engine to carry them."""
        told = self._around.ask(beside, self._plan({}, {}))
        if told is None:
            return False
        self._around.received(*self._ended(reduce(Reported.aggregate, told)))
        return True

    def has_pending_push_work(self) -> bool:
        return self.planner.busy()

    def has_pending_block_frees(self) -> bool:
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

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
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


class WorkerSide(KvarveConnector):
    """Copies between the engine's tensors, host memory and storage."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._worker: CacheWorker | None = None
        self.engine: Any = None  # vLLM's worker
        self._mixed = set[str]()  # requests that were computed with other weights, as long as they are ordered
        self._told: list[Use] = []  # uses of other weights that the scheduler is to be told of
        self._dropped: list[Event] = []  # of copies that were not made
        self._reports = 0  # made so far
        self._unseen: list[tuple[int, Report]] = []  # those that the scheduler may not have seen, numbered
        self._new = False  # whether any of them has not been sent
        self._up = True  # as last reported
        self._teller: Teller | None = None  # if there is a page

    @property
    def worker(self) -> CacheWorker:
        assert self._worker is not None, "the engine gives its tensors first"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._kv_cache_config is not None
        blocks, pools, kept = self._kv_cache_config.num_blocks, [], []
        page, groups, parts = self._pages(kv_caches)
        layers = [self._layers(group, kv_caches) for group in groups]
        heads = None
        if self._settings.hits == "rounded":
            heads = heads_of(self._vllm_config, self._kv_cache_config, groups, layers, page)
        for number, (group, strips, mine) in enumerate(zip(groups, parts, layers, strict=True)):
            spec = self._kv_cache_config.kv_cache_groups[group.number]
            sizes = [block_bytes(name, tensor, blocks).shape[1] for name, tensor in mine.items()]
            shape = self._name(group), sizes, group.lookback, group.blocks(page), strips
            if heads is None:
                pool = pool_of(*shape)
                pools.append(replace(pool, replicated=replicated(spec.kv_cache_spec, self._vllm_config)))
                kept.append(layout_of(spec, mine))
            else:
                pool = pool_of(*shape, heads[number].here)
                pools.append(replace(pool, groups=heads[number].groups(len(pool.buffers))))
                kept.append(heads[number].layout)
        device = device_of([*kv_caches.values()])
        identity = identity_of(self._vllm_config, pools, page, kept, self._settings.weights, device)
        arenas = [
            EngineArena(pool, mine, blocks, group.blocks(page), strips)
            for pool, mine, group, strips in zip(pools, layers, groups, parts, strict=True)
        ]
        self._worker = CacheWorker(
            identity,
            self._settings.cache_of(self._parallel.world_size),
            device=str(device),
            rank=self._parallel.rank % self._parallel.tensor_parallel_size,
            blocks=arenas,
            largest=largest_of_stages(pools),
        )
        self._teller = None if self._port is None else Teller(self._worker)
        slots = {arena.pool.name: arena.slots for arena in self._worker.host}
        log.info("kvarve keeps pages of %d tokens in host memory, at most by group: %s (%s)", page, slots, identity)

    def _pages(self, kv_caches: dict[str, Any]) -> tuple[int, tuple[Group, ...], list[Strips | None]]:
        """The tokens of a page, the groups, and how the blocks of each are divided: as finely as vLLM's own prefixes
        end, if all blocks that are longer can be divided so, and by whole blocks otherwise."""
        config = self._kv_cache_config
        assert config is not None
        for page in (config.cache_hit_alignment_tokens or self._block, self._block):
            groups, found = groups_of(config, page), list[Strips | None]()
            for group in groups:
                mine, cells = self._layers(group, kv_caches), group.cells(page)
                layers = self._vllm_config, mine, config.num_blocks
                found.append(divided(*layers, group.block_tokens, cells) if cells > 1 else None)
            whole = all(strips or group.cells(page) == 1 for group, strips in zip(groups, found, strict=True))
            if on_all_stages(whole):
                return page, groups, found
        raise AssertionError("a page of whole blocks is no part of one")

    def _layers(self, group: Group, kv_caches: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A group's layers that are here. If another pipeline stage has all of them: a byte of each token."""
        config = self._kv_cache_config
        assert config is not None
        names = config.kv_cache_groups[group.number].layer_names
        where = device_of([*kv_caches.values()])
        nothing = partial(torch.zeros, config.num_blocks, group.block_tokens, dtype=torch.uint8, device=where)
        return {name: kv_caches[name] for name in names if name in kv_caches} or {"none": nothing()}

    def _name(self, group: Group) -> str:
        """A stage's pages are others than those of the next one, with the same keys."""
        stage = self._parallel.rank // self._parallel.tensor_parallel_size
        return f"{group.name[:28]}-s{stage}" if self._parallel.pipeline_parallel_size > 1 else group.name

    def get_handshake_metadata(self) -> Ready:
        attached, worker = self.worker.attached, self.worker
        only_read = attached is not None and attached.only_read
        levels = self._teller and self._teller.take()
        return Ready(self._parallel.rank, worker.identity, worker.slots, attached is not None, only_read, levels)

    def wait_for_save(self) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self.do(orders)

    def do(self, orders: Orders) -> None:
        """Carry out the orders of a step that has been computed."""
        rank = self._parallel.rank
        self._unseen = [each for each in self._unseen if each[0] > orders.seen.get(rank, 0)]
        others = others_of(self.engine, orders.computed)
        self._mixed = {use.request for use in others} | self._mixed & {use.request for use in orders.computed}
        self._told += others
        self.worker.do([order for order in orders.orders if not self._outdated(order, orders.copied)])
        if orders.idle:
            self.worker.wait(IDLE_WAIT_S)

    def _outdated(self, order: Order, copied: Mapping[int, Use]) -> bool:
        """Whether a copy is of pages of other weights of an adapter than are loaded. It ends at once."""
        use = copied.get(order.op) if isinstance(order, Copy) else None
        if not isinstance(order, Copy) or use is None:
            return False
        if use.request not in self._mixed and not others_of(self.engine, [use]):
            return False
        self._dropped.append(Ended(order.op, 0))
        if order.target is not Tier.DEVICE:
            self._told.append(use)
        return True

    def collect(self) -> Sequence[Event]:
        """What has happened since the last report. The next one has it."""
        found, dropped = self.worker.report(), self._dropped
        found, self._dropped = found._replace(events=[*found.events, *dropped]), []
        if found.events or found.up != self._up:
            self._up, self._new = found.up, True
            self._reports += 1
            self._unseen.append((self._reports, found))
        return found.events

    def reported(self) -> Reported:
        """All that the scheduler may not have seen."""
        mixed, self._told, self._new = self._told, [], False
        rank, teller = self._parallel.rank, self._teller
        levels = {rank: teller.take()} if teller is not None and teller.new else {}
        return Reported({rank: [*self._unseen]}, mixed, levels)

    def build_connector_worker_meta(self) -> Reported | None:
        """What is new since the last one; nothing if that is nothing."""
        self.collect()
        tells = self._teller is not None and self._teller.new
        return self.reported() if self._new or self._told or tells else None

    def shutdown(self) -> None:
        if self._teller is not None:
            self._teller.end()
        if self._worker is not None:
            self._worker.close(CLOSING_S, CLOSE_S, up=self._worker.up)
            self._worker = None


# MultiConnector keys statistics by the name of the class that it finds, and metrics by that of the one configured.
SchedulerSide.__name__ = WorkerSide.__name__ = KvarveConnector.__name__


# --- in the worker, asked by the scheduler's side between steps


def meet(worker: Any) -> None:
    """The side that copies gets to know vLLM's worker."""
    for side in _sides():
        side.engine = worker


def beside(_: Any, orders: Orders) -> Reported:
    """Carry out orders, and report."""
    (side,) = _sides()
    side.do(orders)
    side.collect()
    return side.reported()


def _sides() -> list[WorkerSide]:
    group = get_kv_transfer_group()
    return [each for each in [group, *getattr(group, "_connectors", [])] if isinstance(each, WorkerSide)]
