"""SGLang's own tree, allocators and pools with kvarve's linker behind them, driven as its scheduler does. No test here.

A page's bytes follow from its name alone, so that whoever computes it writes the same, and each restored one is known.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool, get_compress_state_ring_size
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType as Kind
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from kvarve.connectors.sglang import linker as linker_module
from kvarve.pages.pools import Tier

KINDS = {
    "FULL": (Kind.FULL,),
    "FULL+SWA": (Kind.FULL, Kind.SWA),
    "FULL+MAMBA": (Kind.FULL, Kind.MAMBA),
    "FULL+SWA+MAMBA": (Kind.FULL, Kind.SWA, Kind.MAMBA),
    "DSA": (Kind.FULL,),
    "V4": (Kind.FULL, Kind.SWA),
}
LATENT = {"DSA", "V4"}
DEVICE_PAGES = 48
ALL = EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20, mamba_num=1 << 10)
_rids = count()


def config(kind: str, page: int, window_pages: int = 2) -> CacheConfig:
    slots = DEVICE_PAGES * page
    return CacheConfig(
        page_size=page,
        components=KINDS[kind],
        num_layers=4,
        full_attention_layer_ids=(1, 3),
        sliding_window_size=window_pages * page if Kind.SWA in KINDS[kind] else None,
        enable_mamba_extra_buffer=page > 1,
        mamba_cache_size=40,
        kv_size=slots,
        max_context_len=slots,
        head_num=1,
        head_dim=16,
    )


def compressed(cfg: CacheConfig) -> tuple[Any, Any]:
    """DeepSeek-V4's pools, one layer of windows alone and others with each ratio, and their allocator."""
    slots, pages = cfg.kv_size, cfg.kv_size // cfg.page_size + 1
    kv = DeepSeekV4TokenToKVPool(
        max_num_reqs=cfg.max_num_reqs,
        swa_size=slots,
        c4_size=slots // 4,
        c128_size=slots // 128,
        c4_state_pool_size=pages * get_compress_state_ring_size(4),
        c128_state_pool_size=0,
        page_size=cfg.page_size,
        swa_page_size=cfg.page_size,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=4,
        start_layer=0,
        end_layer=4,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[0, 4, 128, 4],
        full_size=slots,
    )
    sizes = {"size": slots, "size_swa": slots, "page_size": cfg.page_size, "dtype": cfg.dtype}
    return SWATokenToKVPoolAllocator(**sizes, device="cpu", kvcache=kv, need_sort=False), kv


class Pool(NamedTuple):
    """A pool's tensors as bytes [pages, bytes]."""

    rows: list[torch.Tensor]

    def page(self, row: int) -> bytes:
        return b"".join(tensor[row].numpy().tobytes() for tensor in self.rows)

    def write(self, row: int, content: Callable[[int], bytes]) -> None:
        raw = content(sum(tensor.shape[1] for tensor in self.rows))
        for tensor in self.rows:
            mine, raw = raw[: tensor.shape[1]], raw[tensor.shape[1] :]
            tensor[row] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)


def _pages(tensors: Sequence[torch.Tensor], page: int) -> list[torch.Tensor]:
    cut = [each[: len(each) // page * page] for each in tensors]
    return [each.view(torch.uint8).reshape(len(each) // page, -1) for each in cut]


class Served(NamedTuple):
    """Pages of a request's prompt: found on the device, restored, and computed."""

    device: int
    restored: int
    computed: int


class Failed(Exception):
    """The load failed, and SGLang aborts the request."""


class Engine(UnifiedRadixCacheFixtures):
    """One rank's cache, and what its scheduler does with it for one request after the other."""

    def __init__(
        self,
        kind: str,
        page: int,
        *,
        core: str = "python",
        group: Any = None,
        paged: bool = True,
        sized: CacheConfig | None = None,
        **extra: Any,
    ) -> None:
        """`sized`: other sizes than the bed's."""
        self.kind, self.cfg, self.page = kind, sized or config(kind, page), page
        _, self.allocator, self.requests = build_fixture(self.cfg)
        kv: Any = self.allocator.get_kvcache()
        if kind == "DSA":
            kv = DSATokenToKVPool(
                size=self.cfg.kv_size,
                page_size=page,
                kv_lora_rank=128,
                dtype=torch.bfloat16,
                qk_rope_head_dim=64,
                layer_num=4,
                device="cpu",
                enable_memory_saver=False,
                index_head_dim=128,
                kv_cache_dim=192,
            )
        if kind == "V4":
            self.allocator, kv = compressed(self.cfg)
        if kind == "DSA" or (
            page > 1 and paged and not self.cfg.has_swa
        ):  # as a server has it; the fixtures' has no pages
            sizes = self.cfg.kv_size, page, torch.bfloat16, "cpu", kv, False
            self.allocator = PagedTokenToKVPoolAllocator(*sizes)
        built = build_fixture(self.cfg)[0].cache_init_params
        params = dataclasses.replace(
            built,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.requests,
            tree_core_backend=core,
            tp_cache_group=group,
        )
        self.cache = UnifiedRadixCache(params)
        self.states = getattr(self.requests, "mamba_allocator", None)
        self.connect(kv, params, **extra)
        self.pools = self._tensors(kv)
        self.free = self._free()

    def connect(self, kv: Any, params: Any, linker: str = "KvarveLinker", **extra: Any) -> None:
        """Put kvarve behind the tree."""
        self.linker = create_unified_cache_linker(
            ServerArgs(model_path="dummy", page_size=self.page),
            params,
            backend="dynamic",
            config={
                "linker": linker,
                "linker_module_path": "kvarve.connectors.sglang.linker",
                "linker_extra_config": {"host_memory": "8MiB", "weights": "those of the bed", **extra},
            },
            components=set(self.cache.components),
        )
        self.cache.init_cache_linker(self.linker)
        kv.register_layer_transfer_counter(self.linker.layer_done_counter)

    def _tensors(self, kv: Any) -> dict[str, Pool]:
        full = getattr(kv, "full_kv_pool", kv)
        if self.kind == "DSA":
            index = [each.view(torch.uint8).reshape(len(each), -1) for each in full.index_k_with_scale_buffer]
            return {"kv": Pool(_pages(full.kv_buffer, self.page) + index)}
        if self.kind == "V4":
            states = [
                _pages([pool.kv_score_buffer.kv_score], pool.ring_size)[0]
                for pools in (kv.compress_state_pools, kv.indexer_compress_state_pools)
                for pool in pools
                if pool is not None and not pool.request_scoped
            ]
            latents = [*kv.c4_kv_pool.kv_buffer, *kv.c128_kv_pool.kv_buffer]
            return {
                "kv": Pool([*latents, *kv.c4_indexer_kv_pool.index_k_with_scale_buffer]),
                "swa": Pool([*kv.swa_kv_pool.kv_buffer, *states]),
            }
        found = {"kv": Pool(_pages([*full.k_buffer, *full.v_buffer], self.page))}
        if self.cfg.has_swa:
            window = kv.swa_kv_pool
            found["swa"] = Pool(_pages([*window.k_buffer, *window.v_buffer], self.page))
        if self.cfg.has_mamba:
            state = self.requests.mamba_pool.mamba_cache
            parts = [part[layer] for part in (state.temporal, *state.conv) for layer in range(len(part))]
            found["mamba"] = Pool(_pages(parts, 1))
        return found

    # --- pages

    def names(self, tokens: Sequence[int]) -> list[str]:
        key = RadixKey(array("q", tokens))
        found: list[str] = get_storage_hash_str(key, None, page_size=self.page) if tokens else []
        return found

    def content(self, pool: str, name: str) -> Callable[[int], bytes]:
        rank = 0 if self.kind in LATENT else get_parallel().attn_tp_rank  # latents are the same on all
        return hashlib.shake_128(f"{pool} {name} {rank}".encode()).digest

    def _window(self, slots: torch.Tensor) -> list[int]:
        found = self.allocator.full_to_swa_index_mapping[slots[:: self.page]].tolist()
        return [slot // self.page for slot in found]

    def fill(self, names: Sequence[str], slots: torch.Tensor) -> None:
        """Compute pages into these slots."""
        for name, slot in zip(names, slots[:: self.page].tolist(), strict=True):
            self.pools["kv"].write(slot // self.page, self.content("kv", name))
        for name, row in zip(names, self._window(slots) if self.cfg.has_swa else (), strict=False):
            self.pools["swa"].write(row, self.content("swa", name))

    def check(self, names: Sequence[str], slots: torch.Tensor, state: int | None) -> None:
        """A prompt that resumes after these pages reads the bytes that were computed."""
        rows = {"kv": [slot // self.page for slot in slots[:: self.page].tolist()]}
        if self.cfg.has_swa:
            rows["swa"] = self._window(slots[-(self.cfg.sliding_window_size or 0) :])
        if state is not None:
            rows["mamba"] = [state]
        for pool, mine in rows.items():
            for name, row in zip(names[-len(mine) :], mine, strict=True):
                found = self.pools[pool].page(row)
                assert found == self.content(pool, name)(len(found)), f"{pool}: page {name[:8]} in row {row}"

    # --- a request

    def alloc(self, tokens: int) -> torch.Tensor:
        slots = self._alloc(self.allocator, tokens)
        if slots is None:
            self.settle()
            self.cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=tokens))
            slots = self._alloc(self.allocator, tokens)
        assert slots is not None
        return slots  # type: ignore[no-any-return]

    def begin(self, tokens: Sequence[int]) -> tuple[Any, Any]:
        """A request that waits: it is matched."""
        req = self._make_req(self.requests)
        req.rid, req.origin_input_ids = f"r{next(_rids)}", array("q", tokens)
        req.cache_request_handle = CacheRequestHandle(req.rid, 0)
        return req, self.match(req, tokens)

    def arrive(self, tokens: Sequence[int]) -> Any:
        """A request joins the queue of SGLang's scheduler, which asks for it, and then whether it may begin."""
        req, _ = self.begin(tokens)
        req.init_next_round_input = lambda cache, cow_mamba: None
        queue = SimpleNamespace(tree_cache=self.cache, enable_hicache_storage=False)
        linker_module._arriving(lambda *_: None)(queue, req)
        assert queue.enable_hicache_storage
        return req

    def may_begin(self, req: Any) -> bool:
        """Whether it needs to wait no longer."""
        return bool(self.cache.check_prefetch_progress(req.cache_request_handle))

    def wait_for_storage(self, req: Any) -> None:
        while not self.may_begin(req):
            self.linker.worker.wait(1.0)

    def match(self, req: Any, tokens: Sequence[int]) -> Any:
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)), req=req))
        self._apply_match_to_req(req, match)
        return match

    def end(self, req: Any) -> None:
        """A request is aborted before it has begun."""
        self.cache.release_aborted_request(req.cache_request_handle)
        self.finish(req)

    def finish(self, req: Any) -> None:
        """A request's own slot and states are free again."""
        if self.cfg.has_mamba:
            self.requests.free_mamba_cache(req)
        self.requests.free(req)

    def end_unused(self, req: Any, slots: torch.Tensor) -> None:
        """A request ends without its forward, and its slots are free."""
        self.end(req)
        if len(slots):
            self.allocator.free(slots)

    def load(self, req: Any, match: Any) -> int:
        """SGLang names slots for what was found: pages that are queued to be loaded."""
        if not match.host_hit_length:
            return 0
        asked = InitLoadBackParams(
            best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=req
        )
        tokens, _ = self.cache.init_load_back(asked)
        req.prefix_len += tokens
        return tokens // self.page

    def serve(self, tokens: Sequence[int], *, between: Callable[[], None] = lambda: None) -> Served:
        """One request from its match to its insert; `between` is called while its pages are loaded."""
        req, match = self.begin(tokens)
        return self.run(req, match, tokens, between)

    def run(self, req: Any, match: Any, tokens: Sequence[int], between: Callable[[], None] = lambda: None) -> Served:
        names, device = self.names(tokens), match.device_prefix_len // self.page
        node = req.last_node
        lock = self.cache.inc_lock_ref(node).to_dec_params()
        try:
            restored = self.load(req, match)
            self.cache.finish_storage_prefetch_admission(req.cache_request_handle, fulfilled_tokens=0, reason=None)
            slots = self.cache.prefix_device_indices(req)
            here = len(slots) // self.page
            if restored:
                index = self.cache.ready_to_load_host_cache()
                self.linker.layer_done_counter.set_consumer(index)
                between()
                for layer in range(self.cfg.num_layers):
                    self.linker.layer_done_counter.wait_until(layer)
                if self.cache.finish_external_linker_loads([req]):
                    self.end_unused(req, slots[match.device_prefix_len :])
                    raise Failed(req.discard_output_reason.message)
                loaded = int(req.kv.mamba_pool_idx) if self.cfg.has_mamba else None
                self.check(names[:here], slots, loaded)
            computed = len(names) - here
            if computed:
                fresh = self.alloc(computed * self.page)
                self.fill(names[here:], fresh)
                slots = torch.cat([slots, fresh])
        finally:
            self.cache.dec_lock_ref(node, lock)
        self._insert_all(req, tokens, slots, match.device_prefix_len)
        self.finish(req)
        return Served(device, restored, computed)

    def _insert_all(self, req: Any, tokens: Sequence[int], slots: torch.Tensor, owned_from: int) -> None:
        """What a request has computed joins the tree, which offloads it."""
        params = InsertParams(key=RadixKey(array("q", tokens)), value=slots, prev_prefix_len=owned_from)
        if self.states is not None:
            if not self.states.available_size():
                self.settle()
                self.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
            params.mamba_value = self.states.alloc(1)
            assert params.mamba_value is not None
            self.pools["mamba"].write(int(params.mamba_value), self.content("mamba", self.names(tokens)[-1]))
        if self.cfg.has_swa and req.kv is not None:
            params.set_evicted_seqlen(Kind.SWA, req.kv.get_evicted_seqlen(Kind.SWA))
        result = self.cache.insert(params)
        if self.states is not None and result.mamba_exist:
            self.states.free(params.mamba_value)

    def wait(self, tokens: Sequence[int], pages: int) -> tuple[Any, Any]:
        """A request that waits, and is looked up in every round, until so many pages are found for it."""
        req, match = self.begin(tokens)
        while match.host_hit_length < pages * self.page:
            self.linker.worker.wait(1.0)
            match = self.match(req, tokens)
        return req, match

    # --- around it

    def drain(self) -> None:
        """Until no copy is in flight, and none is due; other ranks may have others."""
        self.settle()
        while not self.linker.scheduler.core.idle():
            self.linker.worker.wait(1.0)
            self.linker._turn()

    def drop_host(self) -> None:
        """kvarve's host memory has nothing any more."""
        self.drain()
        self.linker.scheduler.core.flush((Tier.HOST,))

    def drop_host_unheld(self) -> None:
        """The same of what nothing pins."""
        self.linker.scheduler.core.flush((Tier.HOST,))

    def page_keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of a prompt's pages, as kvarve has them."""
        keys = self.linker.planner._prompt(bytes.fromhex("".join(self.names(tokens)))).keys
        return [keys[at : at + 32] for at in range(0, len(keys), 32)]

    def attach(self, storage: Any) -> None:
        change = self.linker.worker.attach(storage)
        while not change.made.done():
            self.cache.check_hicache_events()
        change.made.result()

    def settle(self) -> None:
        """Until no offload is pending; a copy in flight is waited for."""
        self.cache.check_hicache_events()
        while self.cache.linker.pending_offloads:
            self.linker.worker.wait(1.0)
            self.cache.check_hicache_events()

    def evict(self) -> None:
        self.settle()
        self.cache.evict(ALL)

    def scramble(self) -> None:
        """Other bytes in all of the device."""
        for pool in self.pools.values():
            for tensor in pool.rows:
                tensor.copy_(torch.randint(256, tensor.shape, dtype=torch.uint8))

    def forget(self) -> None:
        """The device has nothing any more."""
        self.evict()
        self.scramble()

    def flush(self) -> None:
        """As SGLang's `flush_cache`, without requests."""
        self.cache.reset()
        self.requests.clear()
        self.allocator.clear()
        self.scramble()

    def _free(self) -> tuple[int, ...]:
        names = ("full_attn_allocator", "swa_attn_allocator") if self.cfg.has_swa else ("",)
        found = [getattr(self.allocator, name, self.allocator).available_size() for name in names]
        states = 0 if self.states is None else self.states.available_size()
        return (*found, states, self.requests.available_size())

    def audit(self) -> None:
        """SGLang's and kvarve's own checks; without requests nothing is locked, and after an eviction all is free."""
        self.settle()
        self.cache.sanity_check()
        self.linker.scheduler.audit()
        assert self.cache.protected_size() == 0
        self.cache.evict(ALL)
        assert self._free() == self.free

    def close(self) -> None:
        self.cache.release_host_resources()


def prompt(pages: int, page: int, seed: int = 1, *, after: Sequence[int] = ()) -> list[int]:
    """Tokens of whole pages, others for each seed."""
    start = len(after)
    return [*after, *range(seed * 100_000 + start, seed * 100_000 + pages * page)]


MakeEngine = Callable[..., Engine]
