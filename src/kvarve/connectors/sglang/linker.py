"""kvarve right behind SGLang's device pools: host memory and storages, without HiCache. See docs/sglang.md.

    python -m sglang.launch_server --model-path MODEL --enable-unified-cache-external-linker
        --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config '{
            "linker": "KvarveLinker", "linker_module_path": "kvarve.connectors.sglang.linker",
            "linker_extra_config": {"host_memory": "64GiB"}}'

SGLang makes a linker in each scheduler's process, and calls it in that one thread. `link_plan` decides; here are
SGLang's words, pools and streams. The orders of each call are carried out within it, and only `finish`, the forward's
wait for a layer, `reset` and `close` wait for copies.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
    UnifiedCacheLinkerWrapper,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import get_device_module

from kvarve.cache.scheduler import CacheScheduler
from kvarve.cache.worker import CacheWorker
from kvarve.connectors import engine_defaults
from kvarve.connectors.engine_settings import ConnectorSettings
from kvarve.connectors.levels import VARIABLE, Teller, page_of, port_of
from kvarve.connectors.sglang.hicache_storage import SameWeights, server_numerics, server_weights
from kvarve.connectors.sglang.link_plan import NAME_WORDS, Before, Chain, LinkPlanner
from kvarve.errors import Broken, ConfigError
from kvarve.memory.engine_arena import EngineArena
from kvarve.pages.blocks import NULL_BLOCK
from kvarve.pages.keys import KEY_BYTES
from kvarve.pages.pools import LAYOUT_FORMAT, BufferSpec, ModelIdentity, PoolSpec
from kvarve.transfer.storage_connection import CLOSE_S

log = logging.getLogger(__name__)

WHERE = "linker_extra_config"
CLOSING_S = 30.0
SETTLE_S = 60.0  # for copies that use SGLang's slots, when it forgets what is in them
TURN_S = 0.05  # between two looks at whether a copy has ended, at most

# The pools whose tensors are all that a page has. One with scales beside them, say, would be restored in part.
_COMPRESSED = "DeepSeekV4TokenToKVPool"  # its pages of attention are several pools, and those of windows have states
_KNOWN = (
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "DSATokenToKVPool",
    "SWAKVPool",
    "HybridLinearKVPool",
    "MambaPool",
    _COMPRESSED,
)
Layers = dict[int, list[torch.Tensor]]  # by layer of the model: tensors whose first axis is a pool's pages


# --- SGLang's pools


def _known(pool: Any) -> Any:
    if type(pool).__name__ not in _KNOWN:
        raise ConfigError(
            f"pool must be one of {', '.join(_KNOWN)}, got {type(pool).__name__}, whose pages kvarve's linker does not "
            "know: use kvarve as HiCache's storage instead (docs/sglang.md)"
        )
    return pool


def _by_page(slots: torch.Tensor, page: int) -> torch.Tensor:
    return slots[: len(slots) // page * page].reshape(-1, page, *slots.shape[1:])


def _attention(pool: Any, layers: dict[int, int], page: int) -> Layers:
    """The tensors of an attention pool; `layers`: the model's layers and their places in the pool."""
    latent = hasattr(_known(pool), "kv_buffer")
    buffers = [pool.kv_buffer] if latent else [pool.k_buffer, pool.v_buffer]
    index = getattr(pool, "index_k_with_scale_buffer", None)  # of DSA, by page: no transfer of SGLang's names them
    return {
        layer: [*(_by_page(buffer[i], page) for buffer in buffers), *([] if index is None else [index[i]])]
        for layer, i in layers.items()
    }


def _compressed(kv: Any, params: Any, components: set[ComponentType]) -> dict[PoolName, Layers]:
    """DeepSeek-V4's side pools, as SGLang groups them for a linker. A row of each is a page: of attention's slots
    (compressed KV, index keys), or of the windows' (the states of compressors)."""
    asked = {"kvcache": kv, "page_size": params.page_size, "params": params, "components": components}
    found = dict[PoolName, Layers]()
    try:
        for pool in resolve_hybrid_device_pool_group(**asked).entries:
            layers = found.setdefault(pool.indices_from_pool, {})
            for layer, place in pool.layer_mapping.items():
                layers.setdefault(layer, []).extend(buffers[place] for buffers in pool.components)
    except ValueError as e:
        raise ConfigError(f"kvarve's linker cannot keep these pools of DeepSeek-V4: {e}") from None
    return found


def _layers(params: Any, components: set[ComponentType]) -> dict[PoolName, Layers]:
    """The tensors of each pool."""
    page = params.page_size
    kv, found = _known(params.token_to_kv_pool_allocator.get_kvcache()), dict[PoolName, Layers]()
    if type(kv).__name__ == _COMPRESSED:
        return _compressed(kv, params, components)
    full = getattr(kv, "full_kv_pool", kv)
    if (ComponentType.SWA in components) != hasattr(kv, "swa_kv_pool"):
        raise ConfigError("windows must be matched with prompts, or their KV is not restored: use HiCache instead")
    if ComponentType.SWA in components:
        places: dict[bool, dict[int, int]] = {True: {}, False: {}}
        for layer, (place, in_window) in kv.layers_mapping.items():
            places[bool(in_window)][layer] = place
        found[PoolName.KV] = _attention(full, places[False], page)
        found[PoolName.SWA] = _attention(kv.swa_kv_pool, places[True], page)
    else:
        first = getattr(full, "start_layer", 0)
        plain = {first + place: place for place in range(full.layer_num)}
        found[PoolName.KV] = _attention(full, getattr(kv, "full_attention_layer_id_mapping", plain), page)
    if ComponentType.MAMBA in components:
        pool = _known(params.req_to_token_pool.mamba_pool)
        if getattr(pool, "replayssm_write_pos", None) is not None:
            raise ConfigError("kvarve's linker cannot keep states that are replayed: start without linear replayssm")
        if beside := [type(each).__name__ for each in pool._slot_siblings]:
            raise ConfigError(f"kvarve's linker cannot keep what is beside states ({', '.join(beside)}): use HiCache")
        parts = [part for part in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if part.numel()]
        places_of = params.req_to_token_pool.mamba_map
        found[PoolName.MAMBA] = {layer: [part[place] for part in parts] for layer, place in places_of.items()}
    return found


def _arena(name: PoolName, layers: Layers, lookback: int | None, replicated: bool) -> EngineArena:
    tensors = {f"layers.{layer}.{i}": part for layer, parts in sorted(layers.items()) for i, part in enumerate(parts)}
    pages = min(map(len, tensors.values()))
    tensors = {which: tensor[:pages] for which, tensor in tensors.items()}
    buffers = [BufferSpec(which, (1, tensor[0].nbytes), "uint8") for which, tensor in tensors.items()]
    return EngineArena(PoolSpec(name.value, tuple(buffers), lookback, replicated=replicated), tensors, pages)


def _check(server_args: Any, params: Any) -> None:
    """ConfigError for settings of the engine with which the linker cannot work."""
    sizes = ("pp_size", params.pp_size), ("attn_cp_size", params.attn_cp_size), ("dcp_size", server_args.dcp_size)
    for what, size in sizes:
        if size > 1:
            raise ConfigError(f"{what} must be 1, as SGLang asks one stage alone what it may load, got {size}")
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools or params.mtp_draft_mamba_pools:
        raise ConfigError("kvarve's linker cannot keep the KV of draft models: start without speculative decoding")
    if getattr(server_args, "enable_int8_mamba_checkpoint", False):
        raise ConfigError("kvarve's linker cannot keep int8 checkpoints of states: unset enable_int8_mamba_checkpoint")
    if params.page_size > 1:
        allocator = params.token_to_kv_pool_allocator
        for each in (getattr(allocator, f"{name}attn_allocator", allocator) for name in ("full_", "swa_")):
            if each.page_size != params.page_size:
                raise ConfigError(f"slots must be allocated by pages of {params.page_size}, got {each.page_size}")


# --- what SGLang waits for


class Counter:
    """What SGLang's pools ask in the forward: each layer waits for its part of the batch's pages."""

    def __init__(self, linker: "KvarveLinker") -> None:
        self._linker, self.consumer_index = linker, -1

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        if self.consumer_index >= 0:
            self._linker.wait_for(self.consumer_index, layer)


class KvarveLinker(UnifiedCacheLinker):
    """One rank's host memory and storage behind SGLang's pools. ConfigError, StorageError: it cannot work."""

    def __init__(
        self, server_args: Any, params: Any, *, components: set[ComponentType], extra_config: Any, forward_stream: Any
    ) -> None:
        _check(server_args, params)
        self.settings = ConnectorSettings.read(extra_config or {}, WHERE)
        self.forward_stream, self._page = forward_stream, params.page_size
        window = -(-(params.sliding_window_size or 0) // self._page)  # as many pages as SGLang's tree asks for
        lookbacks = {PoolName.KV: None, PoolName.SWA: window, PoolName.MAMBA: 1}
        parallel = get_parallel()
        ranks = parallel.attn_tp_size
        layers = _layers(params, components)
        kv = params.token_to_kv_pool_allocator.get_kvcache()
        alike: set[PoolName] = set()  # latents are the same on all ranks
        if ranks > 1 and type(kv).__name__ == _COMPRESSED:
            alike = {*layers}
        elif ranks > 1 and hasattr(getattr(kv, "full_kv_pool", kv), "kv_buffer"):
            alike = {PoolName.KV}
        self.pools = {name: _arena(name, found, lookbacks[name], name in alike) for name, found in layers.items()}
        self._names, arenas = [*self.pools], [*self.pools.values()]
        device = arenas[0].device
        shapes = [
            f"{name} {[(tuple(part.shape[1:]), str(part.dtype)) for part in parts]}"
            for name, found in layers.items()
            for parts in found.values()
        ]
        width = max(self._page, NAME_WORDS)
        identity = ModelIdentity(
            architecture=f"sglang {type(kv).__name__}",
            weights=server_weights(self.settings.weights, str(server_args.model_path)),
            dtype=str(layers[PoolName.KV][min(layers[PoolName.KV])][0].dtype).removeprefix("torch."),
            page_tokens=width,
            chunk_tokens=width,
            pools=tuple(arena.pool for arena in arenas),
            layout=f"{LAYOUT_FORMAT} of sglang: pages of {self._page}; {'; '.join(dict.fromkeys(shapes))}",
            ranks=ranks,
            numerics=server_numerics(),
        )
        self.worker = CacheWorker(
            identity,
            self.settings.cache_of(ranks),
            device=str(device),
            rank=parallel.attn_tp_rank,
            blocks=arenas,
        )
        self.worker.transfers.layerwise = True
        attached = self.worker.attached
        self.scheduler = CacheScheduler(
            identity,
            self.worker.config,
            self.worker.slots,
            storage=attached is not None,
            only_read=attached is not None and attached.only_read,
        )
        self.planner = LinkPlanner(self.scheduler, self._page)
        self.layer_done_counter = Counter(self)
        if ComponentType.MAMBA in components:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._same_weights = SameWeights("the server is started anew")
        self._batches = 0  # started so far
        self._before: Sequence[str] = ()  # names of the pages before those of the call that is being made
        self._blocks_before: Before = list  # and the blocks of them
        self._held = set[str]()  # requests that wait for their turn, the same on all ranks
        module = get_device_module()
        self._on, self._stream = module.stream, module.Stream(device)
        self._teller: Teller | None = None
        self._live = None
        port = port_of(parallel.dp_rank or parallel.attn_dp_rank, os.environ) if VARIABLE in os.environ else None
        if port is not None and parallel.attn_tp_rank == 0:  # each rank has a process, and this one tells of itself
            name, self._teller = str(server_args.served_model_name or server_args.model_path), Teller(self.worker)
            self._live = page_of(port, log, name, self.scheduler, {0: self._teller.take()}, lambda: None)
        self._turn()
        log.info("kvarve keeps %s in %s", identity, self.worker.config)

    def meet(self, wrapper: Any) -> None:
        """SGLang tells a linker the names of a call's pages, and not of those before them: its tree is asked. And a
        request waits for storage where it would wait for HiCache's."""
        cache, match, offload, release = wrapper.cache, wrapper.match, wrapper._offload_node, wrapper.release_request
        admitted = cache.finish_storage_prefetch_admission

        def matched(key: Any, req: Any, result: Any) -> Any:
            node = result.last_device_node
            self._before = [*cache.get_prefix_hash_values(node), *cache.tree_core.get_hash_values(node)]
            self.planner.seen(req.rid, len(self._before), len(key) // self._page, time.monotonic())
            return match(key, req, result)

        def offloaded(node_id: Any, transfers: Any) -> None:
            def blocks() -> list[list[int]]:
                slots = cache.path_device_indices(node_id)[:: self._page]
                found = {PoolName.KV: slots}
                if PoolName.SWA in self.pools:
                    found[PoolName.SWA] = cache.token_to_kv_pool_allocator.full_to_swa_index_mapping[slots]
                return [(found[name] // self._page).tolist() if name in found else [] for name in self._names]

            self._before, self._blocks_before = cache.get_prefix_hash_values(node_id), blocks
            offload(node_id, transfers)

        def ready(request: Any) -> bool:
            if request.rid not in self._held:
                return True
            self._turn()
            waits = torch.tensor([int(self.planner.waits(request.rid, time.monotonic()))])
            cache._all_reduce_attn_groups(waits, torch.distributed.ReduceOp.MAX)
            if waits.item():
                return False
            self._held.discard(request.rid)
            if came := self.planner.turn(request.rid, time.monotonic()):  # for SGLang's metrics
                cache.prefetch_loaded_tokens_by_reqid[request] = len(came) * self._page
                cache.prefetch_loaded_storage_start_by_reqid[request] = came.start * self._page
            return True

        def began(request: Any, fulfilled_tokens: int, reason: str | None) -> None:
            admitted(request, fulfilled_tokens, reason)
            self.planner.began(request.rid)

        def released(rid: str) -> None:
            release(rid)
            self._held.discard(rid)
            self.planner.leave(rid)

        wrapper.match, wrapper._offload_node, wrapper.release_request = matched, offloaded, released
        cache.check_prefetch_progress, cache.finish_storage_prefetch_admission = ready, began

    def arrived(self, rid: str) -> None:
        """A request that has been looked up waits for its turn, and then for storage."""
        self._held.add(rid)
        self.planner.hold(rid)

    # --- loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        self._turn()
        if not self._same_weights():
            return []
        found = self.planner.lookup(rid, self._chain(transfers), time.monotonic())
        self._turn()
        return found

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        chain = self._chain(transfers)
        names = chain.names[chain.first * KEY_BYTES :]
        return self.planner.load(rid, names, self._pages(transfers, chain))

    def start_layer_wise_loading(self) -> int:
        if not self.planner.queued:
            return -1
        self._batches += 1
        self.planner.start(self._batches)
        self._turn()
        return self._batches

    def wait_for(self, index: int, layer: int) -> None:
        """Wait until a layer of a batch's pages is in place, or its load has failed."""
        while not self.planner.coming(index):
            self.worker.wait(TURN_S)
            self._turn()
        for arrival in self.worker.transfers.arrivals():
            try:
                arrival.wait(layer)
            except Broken as e:  # `finish_layer_wise_loading` tells it: the forward runs on
                log.error("%s", e)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        while (landed := self.planner.landed(counter_index)) is None:
            self.worker.wait(TURN_S)
            self._turn()
        self.planner.finished(counter_index)
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        return self.planner.cancel(rid)

    # --- offloads

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        if not self._same_weights():
            return False
        chain = self._chain(transfers)
        queued = self.planner.offload(chain, self._pages(transfers, chain), self._blocks_before)
        self._turn()
        return queued

    def num_completed_offloads(self) -> int:
        self._turn()
        return self.planner.ended()

    def pop_completed_offload(self) -> bool:
        return self.planner.pop()

    # --- life

    def reset(self) -> None:
        self.planner.stop()
        end = time.monotonic() + SETTLE_S
        while self.planner.uses_blocks() and time.monotonic() < end:
            self.worker.wait(TURN_S)
            self._turn()
        if self.planner.uses_blocks():
            log.error("copies from and to SGLang's slots take longer than %g s", SETTLE_S)
        self.planner.reset()
        self._held.clear()
        self.layer_done_counter.set_consumer(-1)

    def close(self) -> None:
        self.reset()
        self._turn()
        for each in (self._live, self._teller):
            if each is not None:
                each.end()
        self.worker.close(CLOSING_S, CLOSE_S, up=self.worker.up)
        if told := ", ".join(f"{count:,} {what}" for what, count in sorted(self.planner.counts.items()) if count):
            log.info("kvarve's linker: %s", told)

    def _turn(self) -> None:
        """Take in what has ended, and carry out what is due."""
        report = self.worker.report()
        orders = self.planner.step(report, time.monotonic())
        if self._live is not None and self._teller is not None:
            if self._teller.new:
                self._live.reported({0: self._teller.take()})
            self._live.look(self.planner.reasons, [report.up])
        if not orders:
            return
        ready = self.record_offload_ready()
        with self._on(self._stream):  # copies come after what SGLang's streams have been told so far
            for event in ready:
                self._stream.wait_event(event)
            self.worker.do(orders)

    def _chain(self, transfers: Sequence[PoolTransfer]) -> Chain:
        before = self._before
        return Chain(bytes.fromhex("".join([*before, *transfers[0].keys])), len(before))

    def _pages(self, transfers: Sequence[PoolTransfer], chain: Chain) -> list[dict[int, int]]:
        """By pool, the rows of a call's pages by position; those without a slot are left out."""
        given = {PoolName(each.name): each for each in transfers}
        positions = {key: chain.first + at for at, key in enumerate(given[PoolName.KV].keys)}
        found = []
        for name in self._names:
            mine, each = dict[int, int](), given.get(name)
            if each is not None:
                page = 1 if name is PoolName.MAMBA else self._page
                for key, slot in zip(each.keys, each.device_indices[::page].tolist(), strict=True):
                    assert slot % page == 0, "slots are allocated by pages"
                    if slot // page != NULL_BLOCK:
                        mine[positions[key]] = slot // page
            found.append(mine)
        return found


def _always(answer: object) -> Callable[..., Any]:
    return lambda *_, **__: answer


class KvarveOrNone(UnifiedCacheLinker):
    """kvarve's linker by KVARVE=1 (`sglang_plugin.py`). A server whose pools kvarve does not know has one that finds
    and takes nothing, on all ranks alike."""

    def __new__(cls, server_args: Any, params: Any, *, components: set[ComponentType], **given: Any) -> Any:
        try:
            _check(server_args, params)
            _layers(params, components)
        except ConfigError as e:
            log.warning("KVARVE=1 changes nothing, as kvarve cannot serve this model: %s", e)
            return super().__new__(cls)
        if "storage" not in (extra := given.pop("extra_config")):  # it has a password, which SGLang would print
            extra = {**extra, "storage": engine_defaults.settings(os.environ)["storage"]}
        return KvarveLinker(server_args, params, components=components, extra_config=extra, **given)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pools: dict[PoolName, object] = {}
        self.layer_done_counter = LayerWiseLoadCounter(0)

    lookup = _always(())
    load = offload = cancel_queued_load = _always(False)
    start_layer_wise_loading, finish_layer_wise_loading = _always(-1), _always(True)
    num_completed_offloads = _always(0)
    pop_completed_offload = reset = close = _always(None)


_made = UnifiedCacheLinkerWrapper.__init__


@wraps(_made)
def _make(self: Any, cache: Any, cache_linker: Any) -> None:
    _made(self, cache, cache_linker)
    if isinstance(cache_linker, KvarveLinker):
        cache_linker.meet(self)


UnifiedCacheLinkerWrapper.__init__ = _make


def _arriving(prefetch: Callable[..., Any]) -> Callable[..., Any]:
    """As a request joins its queue, SGLang's scheduler has HiCache fetch its pages from storage, and later asks whether
    they have come (`check_prefetch_progress`). With kvarve's linker it does the same, if there is a storage."""

    @wraps(prefetch)
    def arriving(self: Any, req: Any, storage_hit_end: int | None = None) -> Any:
        linker = getattr(getattr(self.tree_cache, "linker", None), "cache_linker", None)
        if not isinstance(linker, KvarveLinker) or linker.worker.attached is None:
            return prefetch(self, req, storage_hit_end)
        self.enable_hicache_storage = True
        req.init_next_round_input(self.tree_cache, cow_mamba=False)
        linker.arrived(req.rid)
        return None

    return arriving


if (_scheduler := sys.modules.get("sglang.srt.managers.scheduler")) is not None:  # it is in a scheduler's process
    _scheduler.Scheduler._prefetch_kvcache = _arriving(_scheduler.Scheduler._prefetch_kvcache)
