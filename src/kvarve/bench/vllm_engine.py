"""One vLLM engine in this process, scheduler and worker too. `vllm_process` starts it and talks to it in lines of JSON.

    python -P -m kvarve.bench.vllm_engine '{"engine": {…}, "kvarve": {…} or null}'

`engine`: what vLLM's LLM takes. `kvarve`: the connector's settings; null: vLLM alone.
"""

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm import __version__ as VLLM_VERSION
from vllm.config import KVTransferConfig

from kvarve.pages.pools import Tier

COUNTED = ("backed_up", "stored", "fetched", "loaded", "bad_host", "bad_storage")


class Engine:
    """Commands are its methods; each answers what JSON can say."""

    def __init__(self, settings: dict[str, Any]) -> None:
        more = dict(settings["engine"])
        if settings["kvarve"] is not None:
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvarveConnector",
                kv_connector_module_path="kvarve.connectors.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=settings["kvarve"],
            )
        self.llm = LLM(
            skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=True, disable_log_stats=False, **more
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._connected = settings["kvarve"] is not None
        self._asked = 0

    def about(self) -> dict[str, Any]:
        """Of vLLM, and, if the connector is there, its pages by what became of them since the start."""
        found = {"vllm": VLLM_VERSION, "page": self.core.scheduler.block_size}
        if self._connected:
            side = self.core.scheduler.connector
            stats = side.scheduler.stats()
            found |= {"groups": len(side._groups), "counts": {name: stats[name] for name in COUNTED}}
        return found

    def ask(self, prompt: list[int], tokens: int, read: bool) -> dict[str, Any]:
        """One request alone: its tokens and their logprobs, seconds until the first and the last of them, and the
        prompt's tokens by where they came from. `read`: whether it may hit a cache."""
        engine, self._asked = self.llm.llm_engine, self._asked + 1
        given = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            detokenize=False,
            ignore_eos=True,
            logprobs=1,
            skip_reading_prefix_cache=not read,
        )
        before = self._sources()
        begun = time.perf_counter()
        engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, given)
        first_s: float | None = None
        while True:
            for output in engine.step():
                now = time.perf_counter() - begun
                first_s = now if first_s is None else first_s
                if output.finished:
                    (best,) = output.outputs
                    logprobs = [
                        float(found[token].logprob) for token, found in zip(best.token_ids, best.logprobs, strict=True)
                    ]
                    sources = {name: count - before.get(name, 0) for name, count in self._sources().items()}
                    return {
                        "tokens": [*best.token_ids],
                        "logprobs": logprobs,
                        "first_s": first_s,
                        "last_s": now,
                        "sources": {name: int(count) for name, count in sources.items() if count},
                    }

    def drain(self) -> None:
        """Step until no copy is in flight."""
        while self.core.scheduler.has_requests():
            self.core.step()
        while self._connected and self.core.scheduler.connector.go_on():
            pass

    def empty(self, host: bool) -> None:
        """Make vLLM's own blocks forget what they have, and host memory too."""
        self.drain()
        assert self.llm.reset_prefix_cache(), "a block is still in use"
        if host:
            self.core.scheduler.connector.scheduler.core.flush((Tier.HOST,))

    def _sources(self) -> dict[str, float]:
        return {
            metric.labels["source"]: metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:prompt_tokens_cached_by_source")
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if name == "end":
            break
        print(json.dumps({"answer": getattr(engine, name)(**command)}), file=answers, flush=True)
    engine.llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"answer": None}), file=answers, flush=True)
    os._exit(0)  # without vLLM's threads


if __name__ == "__main__":
    main()
