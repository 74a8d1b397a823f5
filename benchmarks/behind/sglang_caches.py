"""SGLang's tree, pools and allocators on a CPU with one of two caches behind them, run by SGLang's Python; see
`linker.py`. What SGLang's scheduler does for one request after the other is done here. The last line printed is JSON.

    python sglang_caches.py '{"do": "play", "side": "HiCache" or "kvarve", "mix": "FULL", "trace": FILE, "requests": N,
        "folder": DIR, "host_bytes": of kvarve}'
    python sglang_caches.py '{"do": "times", "rounds": N}'
    python sglang_caches.py '{"do": "match", "tokens": N, "page": P, "rounds": N}'
"""

import json
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import sglang_on_cpu

sglang_on_cpu.prepare()

import torch  # noqa: E402
from linker_bed import Engine, config, prompt  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402

from kvarve.planner.traces import read_trace  # noqa: E402

BLOCK_TOKENS, PAGE = 512, 16  # tokens of the trace's blocks, and of the pages that they become
DEVICE_PAGES = 2048  # the longest prompt has 1,696
STATES = 320  # of the device: 0.9 of the bytes of its attention, which is what SGLang gives them
POLL_S = 0.0005


def sized(mix: str) -> CacheConfig:
    """One layer of attention; beside it, in a hybrid, a state of six pages, as in Qwen3-Next with pages of 512."""
    return replace(
        config(mix, PAGE),
        num_layers=2 if "MAMBA" in mix else 1,
        full_attention_layer_ids=(0,),
        kv_size=DEVICE_PAGES * PAGE,
        max_context_len=DEVICE_PAGES * PAGE,
        head_num=2,
        head_dim=128,
        mamba_cache_size=STATES,
        mamba_num_heads=32,
        mamba_state_size=84,
    )


class Cached(Engine):
    """An engine that computes nothing, and counts what it would not have to compute."""

    def __init__(self, mix: str, **settings: Any) -> None:
        self.hits = dict.fromkeys(("asked", "device", "host", "storage"), 0)
        super().__init__(mix, PAGE, core="rust", sized=sized(mix), **settings)

    def fill(self, names: Sequence[str], slots: torch.Tensor) -> None: ...

    def arrive(self, req: Any, tokens: Sequence[int]) -> int:
        """A request waits for storage; returns the tokens that came to the host for it."""
        raise NotImplementedError

    def restore(self, req: Any, match: Any) -> tuple[int, torch.Tensor]:
        """Bring what the host has to the device; returns how many tokens are the tree's, and the slots of all."""
        raise NotImplementedError

    def await_storage(self, req: Any) -> int:
        while not self.cache.check_prefetch_progress(req.cache_request_handle):
            time.sleep(POLL_S)
            self.cache.check_hicache_events()
        return int(self.cache.pop_prefetch_loaded_tokens(req.cache_request_handle))

    def ask(self, tokens: Sequence[int]) -> None:
        """One request, until all copies of it have ended."""
        req = self._make_req(self.requests)
        req.origin_input_ids, req.rid = array("q", tokens), req.cache_request_handle.rid
        stored = self.arrive(req, tokens)
        match = self.match(req, tokens)
        lock = self.cache.lock(req.last_node)
        owned, slots = self.restore(req, match)
        self.cache.finish_storage_prefetch_admission(req.cache_request_handle, fulfilled_tokens=stored, reason=None)
        self.cache.unlock(lock)
        lock = self.cache.lock(req.last_node)
        if fresh := len(tokens) - len(slots):
            slots = torch.cat([slots, self.alloc(fresh)])
        self.cache.unlock(lock)
        found = len(tokens) - fresh - match.device_prefix_len
        self._insert_all(req, tokens, slots, owned)
        self.finish(req)
        self.settle()
        stored = min(stored, found)
        seen = {"asked": len(tokens), "device": match.device_prefix_len, "host": found - stored, "storage": stored}
        self.hits = {name: count + seen[name] for name, count in self.hits.items()}


class Linked(Cached):
    """kvarve's linker."""

    def arrive(self, req: Any, tokens: Sequence[int]) -> int:
        self.match(req, tokens)
        self.linker.arrived(req.rid)
        return self.await_storage(req)

    def settle(self) -> None:
        super().settle()
        while not self.linker.scheduler.core.idle():  # pages are written to storage
            self.linker.worker.wait(1.0)
            self.linker._turn()

    def restore(self, req: Any, match: Any) -> tuple[int, torch.Tensor]:
        loaded = self.load(req, match)
        slots = self.cache.prefix_device_indices(req)
        if loaded:
            self.cache.ready_to_load_host_cache()
            assert self.cache.finish_external_linker_loads([req]) == []
        return match.device_prefix_len, slots


class HiCached(Cached):
    """SGLang's HiCache with its own file backend."""

    def connect(self, kv: Any, params: Any, *, folder: str) -> None:
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.set(folder)
        server = ServerArgs(
            model_path="dummy",
            page_size=PAGE,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_ratio=2.0,  # SGLang's default
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1}),
            hicache_storage_prefetch_policy="wait_complete",
        )
        server._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(server)
        self.cache.init_hicache(server, params)
        pools = {id(entry.host_pool): entry.host_pool for entry in self.cache.host_pool_group.entries}
        self.host_bytes = sum(pool.size * pool.size_per_token for pool in pools.values())
        for pool in pools.values():
            pool.pin_memory = False

    def arrive(self, req: Any, tokens: Sequence[int]) -> int:
        match = self.match(req, tokens)
        found, node = match.device_prefix_len + match.host_hit_length, match.last_host_node
        if self.cache.is_backuped(node) or self.cache.is_root(node):
            anchor = self.cache.get_last_hash_value(node)
            begin, rest = [*tokens[:found]], array("q", tokens[found:])
            self.cache.prefetch_from_storage(
                req.cache_request_handle, node, rest, anchor, None, matched_prefix_tokens=begin
            )
        return self.await_storage(req)

    def restore(self, req: Any, match: Any) -> tuple[int, torch.Tensor]:
        if match.host_hit_length or match.mamba_host_hit_length:
            asked = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
            loaded, req.last_node = self.cache.init_load_back(asked)
            req.prefix_len += loaded
            self.cache.ready_to_load_host_cache()
            while self.cache.ongoing_load_back:
                self.cache.check_hicache_events()
        return req.prefix_len, self.cache.prefix_device_indices(req)

    def settle(self) -> None:
        while True:
            self.cache.check_hicache_events()
            if not (self.cache.ongoing_write_through or self.cache.ongoing_backup):
                return
            time.sleep(POLL_S)


def prompts(trace: Path, requests: int) -> Iterator[list[int]]:
    for request in islice(read_trace(trace, BLOCK_TOKENS), requests):
        full = request.ids[: request.input_length // BLOCK_TOKENS]
        if full:
            yield [token for token in full for _ in range(PAGE)]


def play(side: str, mix: str, trace: str, requests: int, folder: str, host_bytes: int = 0) -> dict[str, Any]:
    engine: Any
    if side == "HiCache":
        engine = HiCached(mix, folder=folder)
        host_bytes = engine.host_bytes
    else:
        engine = Linked(mix, host_memory=host_bytes, storage=f"file://{folder}?capacity=16GiB", storage_wait="all")
    begun = time.perf_counter()
    for tokens in prompts(Path(trace), requests):
        engine.ask(tokens)
    return engine.hits | {"s": time.perf_counter() - begun, "host bytes": host_bytes}


def times(rounds: int) -> dict[str, Any]:
    """What one call takes of the scheduler's thread: `lookup` of 100,000 tokens that the host has, and `offload` of a
    node of 64 pages behind 96,000 tokens; pages of 64 tokens."""
    page, behind, node = 64, 1500, 64
    slots = 4 * behind * page
    cfg = replace(
        config("FULL", page), num_layers=1, full_attention_layer_ids=(0,), kv_size=slots, max_context_len=slots
    )
    engine = Engine("FULL", page, core="rust", sized=cfg, host_memory="256MiB", storage="memory://times?capacity=1GiB")
    took: dict[str, list[float]] = {"lookup": [], "offload": []}

    def timed(name: str, call: Any) -> Any:
        def measured(*given: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            answer = call(*given, **more)
            took[name].append(1000 * (time.perf_counter() - begun))
            return answer

        return measured

    engine.linker.lookup = timed("lookup", engine.linker.lookup)
    engine.linker.offload = timed("offload", engine.linker.offload)
    trunk = prompt(behind, page)
    engine.serve(trunk)
    long = prompt(behind + node, page, 2, after=trunk)
    engine.serve(long)
    engine.settle()
    took["offload"].clear()
    for seed in range(3, rounds + 3):
        engine.serve(prompt(behind + node, page, seed, after=trunk))
        engine.settle()
    engine.flush()
    took["lookup"].clear()
    for _ in range(rounds):
        req, match = engine.begin(long)
        assert match.host_hit_length == len(long)
        engine.end(req)
    return {name: median(each) for name, each in took.items()}


class Alone(Engine):
    """SGLang's tree with nothing behind it."""

    def connect(self, kv: Any, params: Any, **extra: Any) -> None: ...

    def begun(self, tokens: Sequence[int]) -> Any:
        req = self._make_req(self.requests)
        req.origin_input_ids, req.rid = array("q", tokens), req.cache_request_handle.rid
        return req


def match(tokens: int, page: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of SGLang's own match of a prompt that its tree has in one node, with each of its cores."""
    found = {}
    for core in ("python", "rust"):
        cfg = replace(config("FULL", page), kv_size=2 * tokens, max_context_len=2 * tokens, num_layers=1)
        engine = Alone("FULL", page, core=core, sized=replace(cfg, full_attention_layer_ids=(0,)))
        asked, took = prompt(tokens // page, page), list[float]()
        req = engine.begun(asked)
        engine.match(req, asked)
        engine._insert_all(req, asked, engine.alloc(len(asked)), 0)
        engine.finish(req)
        for _ in range(rounds):
            req = engine.begun(asked)
            begun = time.thread_time()
            found_there = engine.match(req, asked)
            took.append(1000 * (time.thread_time() - begun))
            assert found_there.device_prefix_len == len(asked)
            engine.finish(req)
        found[core] = median(took)
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    sizes = {f"{of}_{what}": int(what == "size") for of in ("tp", "attn_tp", "pp") for what in ("rank", "size")}
    with get_parallel().override(**sizes):
        print(json.dumps({"play": play, "times": times, "match": match}[asked.pop("do")](**asked)), flush=True)


if __name__ == "__main__":
    main()
