"""One vLLM engine in a process of its own plays scenes over the tier and writes down what happened.

`python tier_scenes.py JOB`: a JSON file with the model, the tier's settings (none: without kvarve) and names of scenes;
the answers stand beside it, in JOB with the suffix .out.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

import torch
from tier_worker import TIERS, WatchedTier
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvarve.testing import Rule

DEADLINE_S = 2.0
PROMPT_TOKENS, MORE_TOKENS, PREFIX_TOKENS, ANSWER_TOKENS = 1000, 300, 700, 12
Answer = dict[str, Any]


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        more = dict(job.get("engine", {}))
        if job.get("tier"):
            tier = {"type": "WatchedTier", "module_path": "tier_worker", "deadline_s": DEADLINE_S, **job["tier"]}
            extra = {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tier_worker",
                "cpu_bytes_to_use": job.get("host_bytes", 200 << 20),
                "secondary_tiers": [tier],
            }
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
            )
        self.llm = LLM(
            model=job["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=4096,
            max_num_batched_tokens=512,
            max_num_seqs=8,
            disable_log_stats=False,
            dtype=job.get("dtype", "bfloat16"),
            **more,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.params = SamplingParams(
            temperature=0, max_tokens=ANSWER_TOKENS, detokenize=False, ignore_eos=True, logprobs=1
        )
        dice = torch.Generator().manual_seed(3)
        self.longer = torch.randint(3, 512, (PROMPT_TOKENS + MORE_TOKENS,), generator=dice).tolist()
        self.prompt, self.shorter = self.longer[:PROMPT_TOKENS], self.longer[:PREFIX_TOKENS]
        self.others = [torch.randint(3, 512, (PROMPT_TOKENS,), generator=dice).tolist() for _ in range(4)]

    @property
    def tier(self) -> WatchedTier:
        return TIERS[-1]

    def ask(self, prompt: list[int]) -> Answer:
        return self.ask_together([prompt])[0]

    def ask_together(self, prompts: list[list[int]]) -> list[Answer]:
        before, begun = dict(self.tier.chunks.counts) if TIERS else {}, time.monotonic()
        outputs = self.llm.generate([{"prompt_token_ids": each} for each in prompts], self.params, use_tqdm=False)
        seconds = time.monotonic() - begun
        counts = self.tier.chunks.counts if TIERS else {}
        return [
            {
                "tokens": [*output.outputs[0].token_ids],
                "logprobs": [next(iter(each.values())).logprob for each in output.outputs[0].logprobs],
                "cached": output.num_cached_tokens,
                "seconds": seconds,
                "counts": {name: count - before.get(name, 0) for name, count in counts.items()},
            }
            for output in outputs
        ]

    def settle(self) -> None:
        """Step until everything has been stored that is going to be."""
        while self.core.scheduler.has_requests():
            self.core.step()

    def reset(self) -> None:
        """Empty device and host."""
        if TIERS:
            self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=bool(TIERS))

    def objects(self) -> list[str]:
        """The names of all that is stored."""
        return sorted({self.tier.chunks.name(key) for key in self.tier.stored})

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


# --- scenes: each begins with an empty device and host


def plain(engine: Engine) -> dict[str, Answer]:
    """Without kvarve: every prompt from its beginning, and from what the engine's own cache has."""
    found = {"prompt": engine.ask(engine.prompt), "device": engine.ask(engine.prompt)}
    found["longer, device"] = engine.ask(engine.longer)
    engine.reset()
    for name in ("longer", "shorter"):
        found[name] = engine.ask(getattr(engine, name))
        engine.reset()
    for at, name in enumerate(("other", "second other")):
        found[name] = engine.ask(engine.others[at])
        engine.reset()
    return found


def hits(engine: Engine) -> dict[str, Answer]:
    found = {"cold": engine.ask(engine.prompt)}
    engine.settle()
    found["device"] = engine.ask(engine.prompt)
    engine.reset()
    found["external"] = engine.ask(engine.prompt)
    found["longer"] = engine.ask(engine.longer)
    engine.reset()
    found["longer, external"] = engine.ask(engine.longer)
    engine.reset()
    found["shorter, external"] = engine.ask(engine.shorter)
    engine.reset()
    return found


def again(engine: Engine) -> dict[str, Answer]:
    """After a restart."""
    return {"restarted": engine.ask(engine.prompt)}


def corrupt(engine: Engine) -> dict[str, Answer]:
    for name in engine.objects():
        if engine.tier.faulty.inner.exists([name]) == [True]:
            engine.tier.faulty.flip(name)
    found = {"corrupt": engine.ask(engine.prompt)}
    engine.reset()
    found["stored anew"] = engine.ask(engine.prompt)
    engine.reset()
    return found


def missing(engine: Engine) -> dict[str, Answer]:
    """Evicted by another process: this one believes that all is there."""
    engine.tier.faulty.inner.delete(engine.objects())
    found = {"missing": engine.ask(engine.prompt)}
    engine.reset()
    found["stored anew"] = engine.ask(engine.prompt)
    engine.reset()
    return found


def failing(engine: Engine) -> dict[str, Answer]:
    faulty = engine.tier.faulty
    faulty.rules = [Rule("raise", "get")]
    found = {"get fails": engine.ask(engine.prompt)}
    engine.reset()
    faulty.rules = [Rule("raise", "put"), Rule("raise", "exists")]
    found["other, put fails"] = engine.ask(engine.others[0])
    engine.reset()
    faulty.rules = []
    while not engine.tier._storage.up:
        time.sleep(0.05)
    found["other, works again"] = engine.ask(engine.others[0])
    engine.reset()
    found["other, external"] = engine.ask(engine.others[0])
    engine.reset()
    return found


def hanging(engine: Engine) -> dict[str, Answer]:
    faulty = engine.tier.faulty
    engine.ask(engine.prompt)
    engine.reset()
    faulty.stall()
    found = {"get hangs": engine.ask(engine.prompt)}
    found["second other, down"] = engine.ask(engine.others[1])
    engine.reset()
    faulty.release()
    while not engine.tier._storage.up:
        time.sleep(0.05)
    found["works again"] = engine.ask(engine.prompt)
    engine.reset()
    found["external"] = engine.ask(engine.prompt)
    engine.reset()
    return found


def together(engine: Engine) -> dict[str, list[Answer]]:
    """Several requests at once: computed, from the engine's own cache, and from the tier."""
    found = {"cold": engine.ask_together(engine.others)}
    engine.settle()
    found["device"] = engine.ask_together(engine.others)
    if TIERS:
        engine.reset()
        found["external"] = engine.ask_together(engine.others)
        engine.reset()
    return found


def aborted(engine: Engine) -> dict[str, Answer]:
    """A request is aborted while its chunks are loaded."""
    faulty = engine.tier.faulty
    engine.ask(engine.prompt)
    engine.reset()
    faulty.stall()
    llm = engine.llm.llm_engine
    llm.add_request("aborted", {"prompt_token_ids": engine.prompt}, engine.params)
    while not engine.tier.loading:
        llm.step()
    llm.abort_request(["aborted"])
    llm.step()
    faulty.release()
    found = {"after an abort": engine.ask(engine.prompt)}
    engine.reset()
    found["external"] = engine.ask(engine.prompt)
    engine.reset()
    return found


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    engine = Engine(job)
    found: dict[str, Any] = {"scenes": {name: globals()[name](engine) for name in job["scenes"]}}
    if TIERS:
        tier = engine.tier
        found |= {"compared": tier.compared, "differ": tier.differ, "counts": dict(tier.chunks.counts)}
        metrics = [metric for metric in engine.llm.get_metrics() if "kvarve" in metric.name]
        found["metrics"] = [{"name": each.name, "labels": each.labels, "value": each.value} for each in metrics]
    engine.close()
    path.with_suffix(".out").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
