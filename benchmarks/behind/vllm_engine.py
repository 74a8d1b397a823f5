"""A vLLM engine for measurements, run by vLLM's Python; see tests/engines/engine_commands.py.

    python vllm_engine.py '{"models": FOLDER, "model": NAME, "side": SIDE, "threads": 1, "host_bytes": N, ...}'

SIDE: "plain", "connector" (kvarve's), or "tiering" (vLLM's own host memory).
"""

import time
from pathlib import Path
from typing import Any

from engine_commands import SETTINGS, Engine, sampling, serve
from tiny_models import MODELS, Model, made

# 109 million parameters: three linear layers, with heads of 128, to one of attention, as in Qwen3.5.
MODELS["hybrid_100m"] = Model(
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
# Of 123 million parameters, made by benchmarks/answers.py.
MODELS["dense_100m"] = Model("qwen3", {}, "float32", 128)


class Measured(Engine):
    def __init__(self) -> None:
        name, side, host = SETTINGS["model"], SETTINGS["side"], SETTINGS.get("host_bytes")
        storage = {"storage": SETTINGS["storage"]} if "storage" in SETTINGS else {}
        extra = (
            {"host_memory": host} | storage | SETTINGS.get("policies", {})
            if side == "connector"
            else {"cpu_bytes_to_use": host}
        )
        path = made(name, Path(SETTINGS["models"]))
        super().__init__(str(path), MODELS[name].dtype, side, extra, SETTINGS.get("engine", {}))
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
        super().drain()
        return time.perf_counter() - begun

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


if __name__ == "__main__":  # workers in processes of their own import this anew
    serve(Measured)
