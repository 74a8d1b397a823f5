"""A vLLM whose engine and worker are processes of their own. Run by a test, as

    python vllm_idle.py '{"model": FOLDER, "storage": URL, "prompts": [[...], ...]}'

It computes the prompts, pauses, prints how long that took, and stays as it is until its input ends.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    given: dict[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = LLM(
        model=given["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1536,
        num_gpu_blocks_override=200,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvarveConnector",
            kv_connector_module_path="kvarve.connectors.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host_memory": "256MiB", "storage": given["storage"]},
        ),
    )
    how = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": each} for each in given["prompts"]]
    llm.generate(prompts, how, use_tqdm=False)
    begun = time.monotonic()
    llm.sleep(level=0)  # a pause
    print(json.dumps({"paused_s": time.monotonic() - begun}), file=answers, flush=True)
    sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # the engine's process imports this anew
    main()
