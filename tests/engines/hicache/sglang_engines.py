"""SGLang's own storage fixtures with kvarve as their storage: engines that produce pages and engines that consume them.

Each is a whole HiCache: radix tree, device pools, host pools, controller and its threads. No test stands here.
"""

import json
import unittest
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import fixtures as kit
from sglang.test.kits.unified_radix_cache import mixins
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang_witness import Witness

from kvarve.connectors.sglang.hicache import page_key

LAYOUTS = ("page_first_direct", "layer_first")
LONG_S = 60.0
_numbers = count()


def config(label: str) -> CacheConfig:
    """A configuration of SGLang's fixtures, by its label."""
    (found,) = [each for each in CONFIGS if each.label == label]
    return found


KINDS = [config(label) for label in ("FULL_ps16", "FULL_SWA_ps16_sw16", "FULL_MAMBA_ps4", "FULL_SWA_MAMBA_ps64_sw64")]


@dataclass(frozen=True)
class LatentConfig(CacheConfig):
    """Latent KV, and index keys beside it (DSA). SGLang's fixtures take these pools for those that they build."""

    page_size: int = 64  # the one of which DSA has index keys
    num_layers: int = 3
    kv_size: int = 1024
    max_context_len: int = 1024
    index_keys: bool = False

    @property
    def label(self) -> str:
        return "DSA" if self.index_keys else "MLA"

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "MHATokenToKVPool": self._pool,
            "TokenToKVPoolAllocator": partial(PagedTokenToKVPoolAllocator, page_size=self.page_size),
        }

    def _pool(self, *, head_num: int, head_dim: int, **sizes: Any) -> Any:
        sizes |= {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
        if not self.index_keys:
            return MLATokenToKVPool(**sizes)
        return DSATokenToKVPool(**sizes, kv_cache_dim=80, index_head_dim=128)


LATENTS = [LatentConfig(), LatentConfig(index_keys=True)]


def _device_tensors(pool: Any) -> Iterator[torch.Tensor]:
    """The tensors in which a device pool keeps its tokens or states."""
    for name in ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer", "conv", "temporal"):
        held = getattr(pool, name, None)
        yield from held if isinstance(held, (list, tuple)) else [held] if isinstance(held, torch.Tensor) else []
    for name in ("mamba_cache", "full_kv_pool", "swa_kv_pool"):
        if (inner := getattr(pool, name, None)) is not None:
            yield from _device_tensors(inner)


class Engine:
    """One HiCache on one storage. Every request of a test has other bytes on the device."""

    def __init__(self, fixtures: "Fixtures", group: Any = None, **extra: Any) -> None:
        """`group`: of this and other ranks."""
        self.fixtures = fixtures
        params = partial(kit.CacheInitParams, tp_cache_group=group)
        with mock.patch.multiple(kit, CacheInitParams=params, **getattr(fixtures.cfg, "parts", {})):
            self.cache, self.allocator, self.requests = kit.build_fixture(fixtures.cfg)
        fixtures._init_hicache(
            self.cache,
            storage_backend="file",  # which becomes the dynamic one, see `Fixtures`
            storage_dir=str(fixtures.folder),
            prefetch_threshold=1,
            storage_extra={**fixtures.extra, **extra},
        )
        for entry in self.cache.host_pool_group.entries:
            entry.host_pool.pin_memory = False

    @property
    def backend(self) -> Any:
        """The backend, or SGLang's failure injector around it."""
        return self.cache.cache_controller.storage_backend

    @property
    def witness(self) -> Witness:
        return getattr(self.backend, "_backend", self.backend)  # type: ignore[no-any-return]

    def produce(self, tokens: Sequence[int]) -> None:
        """Compute a prompt and back it up to the host and to storage."""
        self.fixtures._insert(self.cache, self.allocator, self.requests, [*tokens])
        for entry in self.cache.host_pool_group.entries:
            for tensor in _device_tensors(entry.device_pool):
                tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
        leaf = match_prefix(self.cache, tokens).last_device_node
        self.fixtures._backup_node(self.cache, leaf)
        self.fixtures._write_path_to_l3(self.cache, leaf)
        self.fixtures._flush_l3_backups(self.cache, timeout=LONG_S)

    def consume(self, tokens: Sequence[int]) -> int:
        """Prefetch a prompt from storage; returns the tokens that the host has of it afterwards."""
        request = CacheRequestHandle(f"request {next(_numbers)}", 0)
        self.cache.prefetch_from_storage(request, self.cache.root_node_handle(), array("q", tokens), None, None)
        self.fixtures._run_prefetch_to_completion(self.cache, request, timeout=LONG_S)
        self.cache.sanity_check()
        return int(match_prefix(self.cache, tokens).host_hit_length)

    def lose(self, pool: str, tokens: Sequence[int], start: int) -> None:
        """Storage has a pool's pages of a prompt no more from the page `start` on."""
        pages = self.witness._pages
        keys = get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=self.fixtures.cfg.page_size)
        assert pages.objects.road is not None
        pages.objects.road.storage.delete([pages.pools[pool].kind.name(page_key(key)) for key in keys[start:]])

    def settle(self) -> None:
        """Wait until no call of the storage is in flight."""
        assert self.witness._objects.road.buffers.wait_for_all(LONG_S)


class Fixtures(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """SGLang's fixtures for one configuration. The "file" backend that they ask for is kvarve as a dynamic one."""

    __test__ = False  # for pytest, which takes every TestCase for tests

    def runTest(self) -> None: ...

    def __init__(self, cfg: CacheConfig, folder: Path, layout: str, **extra: Any) -> None:
        super().__init__()
        self.cfg, self.folder = cfg, folder
        self.extra = {
            "backend_name": "kvarve",
            "module_path": "sglang_witness",
            "class_name": "Witness",
            "interface_v1": 1,
            "storage": f"file://{folder}/pages?capacity=1GiB",
            "weights": "those of the fixtures",
            "deadline_s": 9,
            **extra,
        }
        real = ServerArgs

        def dynamic(**settings: Any) -> ServerArgs:
            settings |= {"hicache_io_backend": "direct", "hicache_mem_layout": layout}
            if settings.get("hicache_storage_backend"):
                settings["hicache_storage_backend"] = "dynamic"
            return real(**settings)

        mixins.ServerArgs = dynamic
        self.addCleanup(setattr, mixins, "ServerArgs", real)
        self.engines: list[Engine] = []

    def engine(self, **extra: Any) -> Engine:
        self.engines.append(Engine(self, **extra))
        return self.engines[-1]

    def end(self) -> None:
        """End all engines, as their processes would."""
        for engine in self.engines:
            if engine.cache.enable_storage:
                engine.cache.cache_controller.detach_storage_backend()
        self.engines.clear()
        self.doCleanups()

    @property
    def window_pages(self) -> int:
        return -(-(self.cfg.sliding_window_size or 0) // self.cfg.page_size)

    @property
    def pages(self) -> int:
        """A prompt's pages: a whole window, and more."""
        return 2 + self.window_pages if self.cfg.has_swa else 4

    def prompt(self, pages: int, start: int = 1) -> list[int]:
        return self._make_seq(start, pages)

    def extra_json(self, **extra: Any) -> str:
        return json.dumps({**self.extra, **extra, "prefetch_threshold": 1})


MakeFixtures = Callable[..., Fixtures]


def long(*params: Any) -> list[Any]:
    return [pytest.param(*(it if isinstance(it, tuple) else (it,)), marks=pytest.mark.long) for it in params]
