"""SGLang's host pools that its CPU fixtures do not build (MLA, index keys, DeepSeek-V4), under kvarve's backend.

The pools are SGLang's own, in each layout that they have; there is no tree and no device copy.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

from kvarve.connectors.sglang.hicache_storage import HiCacheKvarve

TOKENS, LAYERS, PAGES = 64, 3, 12
KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(6)]
LAYOUTS = ("layer_first", "page_first", "page_first_direct")

Backend = Callable[..., HiCacheKvarve]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    """Makes a rank's backend, all on one store."""
    made: list[HiCacheKvarve] = []

    def make(tp_rank: int = 0, tp_size: int = 1, *, metrics: bool = False) -> HiCacheKvarve:
        extra = {"storage": f"file://{tmp_path}/pages?capacity=256MiB", "weights": "w", "interface_v1": 1}
        config = HiCacheStorageConfig(tp_rank, tp_size, 0, 1, 0, 1, True, metrics, False, "m", extra_config=extra)
        made.append(HiCacheKvarve(config, {}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def mla_pools(layout: str) -> dict[str, Any]:
    """The host pools of a model with latent KV and index keys, full of random bytes."""
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0):
        device = DSATokenToKVPool(
            size=TOKENS * 2,
            page_size=TOKENS,
            kv_lora_rank=64,
            dtype=torch.bfloat16,
            qk_rope_head_dim=16,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=80,
        )
        latent = MLATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            1.0,
            0,
            TOKENS,
            layout,
            pin_memory=False,
            device_capacity_tokens=device.size,
            start_layer=0,
            end_layer=LAYERS,
            target_layer_num=LAYERS,
            host_token_capacity=PAGES * TOKENS,
        )
        index = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), latent, pin_memory=False)
    latent.kv_buffer.normal_()
    index.index_k_with_scale_buffer.random_(0, 256)
    return {"kv": latent, "indexer": index}


def registered(backend: HiCacheKvarve, pools: dict[str, Any]) -> HiCacheKvarve:
    """As SGLang does it: the anchor, then every pool by name."""
    backend.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, PoolName(name))
    backend.on_host_pools_registered()
    return backend


def tokens(pages: list[int], page_tokens: int = TOKENS) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_tokens, (page + 1) * page_tokens) for page in pages])


def bytes_of(pool: Any, page: int) -> bytes:
    return pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_kv_and_its_index_keys_come_back_together(backend: Backend, layout: str) -> None:
    one, other = mla_pools(layout), mla_pools(layout)
    saver, loader = registered(backend(), one), registered(backend(), other)
    there, here = [2, 7, 5, 0], [1, 3, 4, 9]
    index = PoolTransfer(PoolName.INDEXER, keys=KEYS[:4], host_indices=tokens(there), indices_from_pool=PoolName.KV)
    assert saver.batch_set_v2([index]) == {PoolName.INDEXER: [True] * 4}
    assert saver.batch_set_v1(KEYS[:4], tokens(there)) == [True] * 4
    asked = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES, indices_from_pool=PoolName.KV)
    found = loader.batch_exists_v2(KEYS, [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.INDEXER: 4}
    assert loader.batch_get_v1(KEYS[:4], tokens(here)) == [True] * 4
    index = PoolTransfer(PoolName.INDEXER, keys=KEYS[:4], host_indices=tokens(here))
    assert loader.batch_get_v2([index]) == {PoolName.INDEXER: [True] * 4}
    for name in one:
        assert [bytes_of(one[name], page) for page in there] == [bytes_of(other[name], page) for page in here]
    in_pieces = {name: pool.pages.in_pieces for name, pool in loader._pages.pools.items()}
    assert in_pieces == {"kv": True, "indexer": layout != "layer_first"}


def test_fewer_index_pages_than_kv_pages_bound_the_hit_and_whole_groups_do_not(backend: Backend) -> None:
    saver = registered(backend(), mla_pools(LAYOUTS[1]))
    saver.batch_set_v1(KEYS, tokens([*range(6)]))
    saver.batch_set_v2([PoolTransfer(PoolName.INDEXER, keys=KEYS[:2], host_indices=tokens([0, 1]))])
    asked = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
    found = saver.batch_exists_v2(KEYS, [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.INDEXER: 2}
    saver.batch_set_v2([PoolTransfer(PoolName.INDEXER, keys=KEYS[:4], host_indices=tokens([*range(4)]))])
    groups = PoolTransfer(
        PoolName.INDEXER, keys=KEYS, hit_policy=PoolHitPolicy.BLOCK_GROUPS, group_pages=2, block_pages=3
    )
    found = saver.batch_exists_v2(KEYS, [groups])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (6, {PoolName.KV: 6, PoolName.INDEXER: 6})


def test_latent_kv_is_stored_once_for_all_tensor_ranks(backend: Backend) -> None:
    pools = [mla_pools(LAYOUTS[1]) for _ in range(2)]
    ranks = [registered(backend(rank, 2), pools[rank]) for rank in range(2)]
    assert ranks[0].batch_set_v1(KEYS, tokens([*range(6)])) == [True] * 6
    assert ranks[1].batch_get_v1(KEYS, tokens([*range(6, 12)])) == [True] * 6
    assert [bytes_of(pools[0]["kv"], page) for page in range(6)] == [
        bytes_of(pools[1]["kv"], page) for page in range(6, 12)
    ]
    assert registered(backend(1, 4), mla_pools(LAYOUTS[1])).batch_exists(KEYS) == 0, "another division of the model"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_pools_on_an_anchor_without_bytes_come_back(backend: Backend, layout: str) -> None:
    def pools() -> dict[str, Any]:
        made = {
            name: DeepSeekV4PagedHostPool(
                name, [torch.empty(1) for _ in range(LAYERS)], 576, PAGES, TOKENS, layout, pin_memory=False
            )
            for name in ("deepseek_v4_c4", "deepseek_v4_c4_indexer_state")
        }
        for pool in made.values():
            buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]
            for buffer in buffers:
                buffer.random_(0, 256)
        return {"kv": LogicalHostPool(PAGES * TOKENS, TOKENS, layout), **made}

    one, other = pools(), pools()
    saver, loader = registered(backend(), one), registered(backend(), other)
    names = [PoolName(name) for name in one if name != "kv"]
    policies = [PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES]
    sides = [PoolTransfer(name, keys=KEYS[:3], host_indices=tokens([5, 1, 8])) for name in names]
    assert saver.batch_set_v2(sides) == {name: [True] * 3 for name in names}
    asked = [PoolTransfer(name, keys=KEYS[:2], hit_policy=policy) for name, policy in zip(names, policies, strict=True)]
    assert loader.batch_exists_v2(KEYS, asked).kv_hit_pages == 0, "the anchor's pages are marked last"
    assert saver.batch_set_v1(KEYS[:3], tokens([5, 1, 8])) == [True] * 3
    assert loader.batch_exists_v2(KEYS, asked).restorable_prefix_pages == [1, 2, 3]
    assert loader.batch_get_v1(KEYS[:3], tokens([0, 2, 4])) == [True] * 3
    sides = [PoolTransfer(name, keys=KEYS[:3], host_indices=tokens([0, 2, 4])) for name in names]
    assert loader.batch_get_v2(sides) == {name: [True] * 3 for name in names}
    for name in names:
        assert [bytes_of(one[name], page) for page in (5, 1, 8)] == [bytes_of(other[name], page) for page in (0, 2, 4)]


def test_metrics_are_there_however_often_storage_is_attached(backend: Backend) -> None:
    for turn in range(1, 3):
        attached = registered(backend(metrics=True), mla_pools(LAYOUTS[1]))
        attached.batch_set_v1(KEYS[turn : turn + 1], tokens([0]))
        assert sum(attached.get_stats().backup_pgs) == 1 and attached.get_stats().backup_pgs == []
        page_bytes = attached._pages.pools["kv"].kind.payload_bytes
        labels = {"what": "stored", "tp_rank": "0"}
        assert prometheus.REGISTRY.get_sample_value("kvarve_hicache_objects_total", labels) == turn
        assert prometheus.REGISTRY.get_sample_value("kvarve_hicache_bytes_total", labels) == turn * page_bytes
        assert prometheus.REGISTRY.get_sample_value("kvarve_hicache_storage_up", {"tp_rank": "0"}) == 1
        attached.close()
