"""A vLLM with processes of its own, whose page a test or `tools/pictures.py` asks for. Run as

    KVARVE_PORT=... python vllm_page.py '{"model": FOLDER, "storage": URL, "ranks": 1, "talk_s": 0}'

It computes one prompt, again from vLLM's blocks, and again from kvarve's host; or talks for as long as it is to, with
conversations that begin alike. Then it prints that, and stays as it is until its input ends.
"""

import json
import os
import random
import sys
import time
from typing import Any


def main() -> None:
    from engine_process import prompt
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    given: dict[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = LLM(
        model=given["model"],
        served_model_name="tiny-gemma3",
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1536,
        tensor_parallel_size=given["ranks"],
        num_gpu_blocks_override=100 * given["ranks"],
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvarveConnector",
            kv_connector_module_path="kvarve.connectors.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host_memory": "24MiB", "storage": given["storage"]},
        ),
    )
    how = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)

    def ask(tokens: list[int]) -> None:
        llm.generate([{"prompt_token_ids": tokens}], how, use_tqdm=False)

    if not given["talk_s"]:
        for _ in range(2):
            ask(prompt(1000, 1))
        llm.reset_prefix_cache()
        ask(prompt(1000, 1))
    dice, end = random.Random(1), time.monotonic() + given["talk_s"]
    while time.monotonic() < end:
        said = prompt(500, dice.randrange(8))
        for _ in range(dice.randrange(1, 4)):
            said += prompt(130, dice.randrange(1 << 30))
            ask(said)
            time.sleep(dice.expovariate(2.0))
        if dice.random() < 0.1:
            llm.reset_prefix_cache()
    print(json.dumps("done"), file=answers, flush=True)
    sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # the engine's process imports this anew
    main()
