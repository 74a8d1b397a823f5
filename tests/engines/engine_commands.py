"""A vLLM engine in a process of its own: commands come in as lines of JSON, answers go out as lines.

Its settings are the process's first argument, as JSON. Scheduler and worker run in the process, and commands see both.
Imported before vLLM, for which it sets the environment; the benches use it as well.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from engine_environment import ENVIRONMENT

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(SETTINGS.get("threads", 1)), VLLM_ENABLE_V1_MULTIPROCESSING="0")
ANSWERS = os.fdopen(os.dup(1), "w")
OURS = ("connector", "several")
os.dup2(2, 1)  # what the engine prints is no answer

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402


def transfer(seam: str, extra: dict[str, Any]) -> KVTransferConfig | None:
    """SEAM: "plain" (none), "connector" (kvarve's), "tiering": vLLM's own host memory, with the tests' worker, for
    vLLM's needs a GPU; or "several": kvarve's connector, and then that memory."""
    if seam == "plain":
        return None
    both: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "tier_worker"}
    ours = both | {
        "kv_connector": "KvarveConnector",
        "kv_connector_module_path": "kvarve.connectors.vllm.connector",
        "kv_connector_extra_config": extra,
    }
    tiering = both | {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": spec | extra}
    if seam == "several":
        tiering["kv_connector_extra_config"] = spec | {"cpu_bytes_to_use": 64 << 20}
        several = {"connectors": [ours, tiering]}
        return KVTransferConfig(**both, kv_connector="MultiConnector", kv_connector_extra_config=several)
    return KVTransferConfig(**(ours if seam == "connector" else tiering))


def sampling(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, **more)


class Engine:
    """Its public methods are the commands."""

    def __init__(self, model: str, dtype: str, seam: str, extra: dict[str, Any], more: dict[str, Any]) -> None:
        self.seam = seam
        self.llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=transfer(seam, extra),
            **({"max_model_len": 4096, "max_num_seqs": 8, "skip_tokenizer_init": True} | more),
        )
        self.core = self.llm.llm_engine.engine_core.engine_core

    def connector(self) -> Any:
        """kvarve's side in the scheduler."""
        found = self.core.scheduler.connector
        return found.sub_connectors[0] if self.seam == "several" else found

    def drain(self) -> None:
        """Step until no copy uses a block of vLLM's, then until none is in flight."""
        while self.core.scheduler.has_requests():
            self.core.step()
        while self.goes_on():
            pass

    def goes_on(self) -> bool:
        """Let copies to and from kvarve's storage go on beside the engine; whether there is more to come."""
        return self.seam in OURS and self.connector().go_on()

    def reset(self, everywhere: bool = False) -> None:
        """Empty the device, or all memory."""
        self.drain()
        assert self.llm.reset_prefix_cache(reset_connector=everywhere and self.seam != "plain")

    def forget(self) -> None:
        """Empty device and host, so that pages come from storage."""
        if self.seam == "tiering":
            import tier_worker

            with tier_worker.same_names():
                self.reset(everywhere=True)
            return
        self.reset()
        if self.seam in OURS:
            from kvarve.pages.pools import Tier

            self.connector().scheduler.core.flush((Tier.HOST,))


def serve(make: Callable[[], Engine]) -> None:
    engine = make()
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
