"""One vLLM engine in a process of its own, for measurements: run by vLLM's Python, commands come in as lines of JSON,
answers go out as lines.

    python vllm_engine.py '{"models": FOLDER, "model": NAME, "side": SIDE, "threads": 1, "host_bytes": N, ...}'

SIDE: "plain", "connector" (kvarve's), or "tiering" (vLLM's own host memory, with the tests' worker, for vLLM's needs a
GPU). Scheduler and worker run in this process.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = json.loads(sys.argv[1])
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=str(SETTINGS["threads"]),
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints is no answer

from tiny_models import MODELS, made  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

# 109 million parameters: three linear layers, with heads of 128, to one of attention, as in Qwen3.5.
MODELS["hybrid_100m"] = (
    "qwen3_5_text",
    {
        "vocab_size": 32768,
        "hidden_size": 640,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "bfloat16",
    2048,
)


def transfer() -> KVTransferConfig | None:
    if SETTINGS["side"] == "connector":
        more = {"storage": SETTINGS["storage"]} if "storage" in SETTINGS else {}
        return KVTransferConfig(
            kv_connector="KvarveConnector",
            kv_connector_module_path="kvarve.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host_memory": SETTINGS["host_bytes"]} | more | SETTINGS.get("policies", {}),
        )
    if SETTINGS["side"] == "tiering":
        spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "tier_worker"}
        return KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=spec | {"cpu_bytes_to_use": SETTINGS["host_bytes"]},
        )
    return None


class Engine:
    def __init__(self) -> None:
        name = SETTINGS["model"]
        found = transfer()
        self.llm = LLM(
            model=str(made(name, Path(SETTINGS["models"]))),
            dtype=MODELS[name][2],
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=4096,
            max_num_seqs=8,
            disable_log_stats=False,
            **(SETTINGS.get("engine", {}) | ({} if found is None else {"kv_transfer_config": found})),
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._asked = 0

    # --- commands

    def ask(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """One request alone: seconds until its first token, and until its last."""
        engine, self._asked = self.llm.llm_engine, self._asked + 1
        begun = time.perf_counter()
        engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, sampling(tokens))
        first_s: float | None = None
        while True:
            for output in engine.step():
                now = time.perf_counter() - begun
                first_s = now if first_s is None else first_s
                if output.finished:
                    return {"first_s": first_s, "last_s": now, "cached": output.num_cached_tokens}

    def drain(self) -> float:
        """Step until no copy is in flight; the seconds that this took."""
        begun = time.perf_counter()
        while self.core.scheduler.has_requests():
            self.core.step()
        return time.perf_counter() - begun

    def reset(self, everywhere: bool = False) -> None:
        """Empty the device, or all memory."""
        self.drain()
        assert self.llm.reset_prefix_cache(reset_connector=everywhere and SETTINGS["side"] != "plain")

    def empty_host(self) -> None:
        """So that pages come from storage."""
        from kvarve.model import Tier

        self.reset()
        self.core.scheduler.connector._scheduler_side.scheduler.flush((Tier.HOST,))

    def play(self, messages: list[list[list[int]]], batches: list[list[int]], answer: int) -> dict[str, Any]:
        """Conversations: of each in a batch the next message is asked, after all that was said before."""
        said: list[list[int]] = [[] for _ in messages]
        asked = cached = 0
        before, begun = self._sources(), time.perf_counter()
        for batch in batches:
            for talk in batch:
                said[talk] += messages[talk].pop(0)
            prompts: Any = [{"prompt_token_ids": said[talk]} for talk in batch]
            outputs = self.llm.generate(prompts, sampling(answer), use_tqdm=False)
            for talk, output in zip(batch, outputs, strict=True):
                asked, cached = asked + len(said[talk]), cached + output.num_cached_tokens
                said[talk] += output.outputs[0].token_ids
        seconds = time.perf_counter() - begun
        sources = {name: count - before.get(name, 0) for name, count in self._sources().items()}
        return {"asked": asked, "cached": cached, "sources": sources, "seconds": seconds}

    def _sources(self) -> dict[str, float]:
        return {
            metric.labels["source"]: metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:prompt_tokens_cached_by_source")
        }


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)


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
    print(json.dumps({"answer": None}), file=ANSWERS, flush=True)
    os._exit(0)  # without vLLM's threads


main()
