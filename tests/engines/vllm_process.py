"""One vLLM engine in a process of its own, for tests: commands come in as lines of JSON, answers go out as lines.

    python vllm_process.py '{"model": FOLDER, "dtype": ..., "chunk": ..., "kvarve": {...} or null, ...}'

Scheduler and worker run in this process, so that a test can see both. A recorder takes a fingerprint of each page's
bytes in the engine's tensors when it is saved, and compares them when the page has been loaded, in this or another
process that shares the file of fingerprints.
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

SETTINGS = json.loads(sys.argv[1])
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints is no answer

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: E402

SAMPLING = {"temperature": 0, "detokenize": False, "ignore_eos": True, "logprobs": 1}


class Recorder:
    """Fingerprints of pages by pool and key."""

    def __init__(self, side: Any, file: Path) -> None:
        self.side, self.file = side, file
        self.restored, self.wrong = 0, 0
        self._loads: dict[int, Any] = {}
        self._do, self._collect = side.do, side.collect
        side.do, side.collect = self.do, self.collect

    def do(self, orders: Any) -> None:
        from kvarve.core.effects import Copy
        from kvarve.model import Tier

        with self.file.open("a") as out:
            for order in orders.plan.orders:
                if isinstance(order, Copy) and order.source is Tier.DEVICE:
                    for page in order.pages:
                        print(page.pool, page.key.hex(), self._print(page.pool, page.source), file=out)
                elif isinstance(order, Copy) and order.target is Tier.DEVICE:
                    self._loads[order.op] = order.pages
        self._do(orders)

    def collect(self) -> Any:
        found = self._collect()
        saved = None
        for event in self.side._report.events:
            pages = self._loads.pop(getattr(event, "op", -1), ()) if hasattr(event, "good") else ()
            for at, page in enumerate(pages):
                if event.good >> at & 1:
                    saved = saved or self._saved()
                    self.restored += 1
                    self.wrong += self._print(page.pool, page.target) not in saved.get((page.pool, page.key.hex()), ())
        return found

    def _print(self, pool: int, handle: int) -> str:
        arena = self.side.worker.transfers._copies._device[pool]
        digest = hashlib.sha256()
        for number, piece in enumerate(arena.pieces()):
            (rows, _) = arena.rows([handle], [0])[number % arena.columns]
            for row in rows:
                digest.update(piece[row].numpy().tobytes())
        return digest.hexdigest()

    def _saved(self) -> dict[tuple[int, str], set[str]]:
        saved: dict[tuple[int, str], set[str]] = {}
        for line in self.file.read_text().splitlines():
            pool, key, found = line.split()
            saved.setdefault((int(pool), key), set()).add(found)
        return saved


class Engine:
    def __init__(self) -> None:
        more: dict[str, Any] = dict(SETTINGS.get("more", {}))
        if SETTINGS["kvarve"] is not None:
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvarveConnector",
                kv_connector_module_path="kvarve.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=SETTINGS["kvarve"],
            )
        if SETTINGS.get("events"):
            more["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if SETTINGS.get("faulty"):
            self._make_faulty()
        self.llm = LLM(
            model=SETTINGS["model"],
            dtype=SETTINGS["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_num_batched_tokens=SETTINGS["chunk"],
            max_num_seqs=8,
            disable_log_stats=False,
            **({"max_model_len": 4096} | more),
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.events: list[Any] = []
        self.recorder = None
        if SETTINGS["kvarve"] is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.worker = get_kv_transfer_group()._worker_side
            self.scheduler = self.core.scheduler.connector._scheduler_side
            self.recorder = Recorder(self.worker, Path(SETTINGS["prints"]))
            if SETTINGS.get("events"):
                publisher = self.core.scheduler.kv_event_publisher
                publisher.publish = lambda batch: self.events.extend(batch.events)

    def _make_faulty(self) -> None:
        """The connector's storage fails on demand."""
        from kvarve import worker
        from kvarve.testing.faulty import FaultyStorage

        real = worker.open_storage

        def opened(*urls: Any, **more: Any) -> Any:
            self.storage = FaultyStorage(real(*urls, **more))
            return self.storage

        worker.open_storage = opened

    # --- commands

    def ask(self, prompts: list[list[int]], tokens: int = 12) -> list[dict[str, Any]]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, SamplingParams(max_tokens=tokens, **SAMPLING), use_tqdm=False)
        self.drain()
        return [self._told(output) for output in outputs]

    def drain(self) -> bool:
        """Step until no copy is in flight; False if some hang."""
        for _ in range(5000):
            if not self.core.scheduler.has_requests():
                return True
            self.core.step()
        return False

    def reset(self, connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def storm(self, seed: int, prompts: list[list[int]], tokens: int, aborts: int, resets: bool) -> dict[str, Any]:
        """Requests that arrive while others are computed, some of which are aborted at any time."""
        dice, engine = random.Random(seed), self.llm.llm_engine
        before = self._preemptions()
        left, outputs, gone = dict(enumerate(prompts)), {}, []
        live: set[str] = set()
        for _ in range(20_000):
            if left and dice.random() < 0.3:
                number, prompt = left.popitem()
                given = SamplingParams(max_tokens=dice.randrange(1, tokens), **SAMPLING)
                engine.add_request(str(number), {"prompt_token_ids": prompt}, given)
                live.add(str(number))
            if live and aborts and dice.random() < 0.05:
                name = dice.choice(sorted(live))
                engine.abort_request([name])
                live.discard(name)
                gone.append(name)
                aborts -= 1
            if resets and dice.random() < 0.02:
                self.reset()
            for output in engine.step():
                if output.finished and output.request_id in live:
                    live.discard(output.request_id)
                    outputs[output.request_id] = self._told(output)
            if not left and not live:
                break
        assert not live and not left, f"requests hang: {sorted(live)}"
        drained = self.drain()
        return {
            "outputs": outputs,
            "aborted": gone,
            "drained": drained,
            "preempted": self._preemptions() - before,
            "used_blocks": self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
            - self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            - 1,
        }

    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = {"page": self.core.scheduler.block_size}
        if self.recorder is not None:
            stats = self.scheduler.scheduler.stats() | {"failed_loads": self.scheduler.planner.failed_loads}
            found |= {"stats": stats, "restored": self.recorder.restored, "wrong": self.recorder.wrong}
            found["leases"] = len(self.scheduler.scheduler.core.leases)
            found["held"] = sum(self.scheduler._held.values())
        return found

    def metrics(self) -> dict[str, float]:
        return {
            f"{metric.name} {metric.labels.get('source') or metric.labels.get('group') or ''}".strip(): metric.value
            for metric in self.llm.get_metrics()
            if hasattr(metric, "value")
        }

    def stored_events(self) -> list[dict[str, Any]]:
        return [
            {
                "medium": event.medium,
                "group": event.group_idx,
                "kind": event.kv_cache_spec_kind,
                "size": event.block_size,
            }
            for event in self.events
            if type(event).__name__ == "BlockStored"
        ]

    def spoil_host(self) -> int:
        """Change a byte in every page in host memory."""
        count = 0
        for arena in self.worker.worker.host:
            for slot in range(arena.slots):
                record = arena.record(slot)
                if bytes(record[:8]) == b"kvarvepg":
                    record[300] ^= 1
                    count += 1
        return count

    def spoil_storage(self, how: str) -> int:
        names = [name for name in self._stored_names() if self.storage.exists([name])[0]]
        for name in names:
            if how == "corrupt":
                self.storage.flip(name)
            elif how == "short":
                self.storage.truncate(name)
            else:
                self.storage.delete([name])
        return len(names)

    def dead(self, dead: bool) -> None:
        """From now on every call of the storage fails, or none does."""
        self.storage.dead = dead

    def stall(self) -> None:
        self.storage.stall()

    def release(self) -> None:
        self.storage.release()

    def empty_host(self) -> int:
        from kvarve.model import Tier

        return int(self.scheduler.scheduler.flush((Tier.HOST,)))

    def _stored_names(self) -> list[str]:
        from kvarve.keys import object_name, root_key

        root = root_key(self.worker.worker.identity.fingerprint(), "")
        pools = self.worker.worker.identity.pools
        found = {tuple(line.split()[:2]) for line in Path(SETTINGS["prints"]).read_text().splitlines()}
        return [object_name(root, bytes.fromhex(key), pools[int(pool)].name) for pool, key in sorted(found)]

    def _preemptions(self) -> float:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")

    def _told(self, output: Any) -> dict[str, Any]:
        (best,) = output.outputs
        chosen = [float(found[token].logprob) for token, found in zip(best.token_ids, best.logprobs, strict=True)]
        return {"tokens": [*best.token_ids], "logprobs": chosen, "cached": output.num_cached_tokens}


def main() -> None:
    engine = Engine()
    print(json.dumps({"ready": True}), file=ANSWERS, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if name == "end":
            break
        print(json.dumps({"answer": getattr(engine, name)(**command)}), file=ANSWERS, flush=True)
    engine.llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"answer": True}), file=ANSWERS, flush=True)
    os._exit(0)  # without vLLM's threads


main()
