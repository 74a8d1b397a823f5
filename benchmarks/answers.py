"""How many tokens of answers does kvarve's own engine compute in a second, and how many does vLLM?

    .venv/bin/python benchmarks/answers.py [--quick] [--json FILE] [--vllm-python PYTHON]

The same prompts, all at once, 16 computed together, to the engine behind `kvarve serve` and to vLLM, both on two
threads without a cache hit; a dense model of 0.1 billion random parameters in float32. vLLM is run by the Python of
`--vllm-python`, of KVARVE_VLLM_PYTHON, or of .venv-vllm, and left out where there is none. `own_over_vllm`: tokens a
second, the median of the rounds.
"""

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from behind import vllm
from common import arguments, machine, show, watched, write_json
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.pages.pools import ModelIdentity
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel, quiet_libraries
from kvarve.reference.engine.workspace import StateLayout
from server import through_engine
from tests.sim.models import byte_tokenizer

MODEL, VOCABULARY = "dense_100m", 32768
TOGETHER, THREADS = 16, 2
PAGE, CHUNK = 64, 256
GIB = 1 << 30


@dataclass(frozen=True)
class Size:
    rounds: int = 3
    requests: int = 48
    prompt_tokens: int = 512
    answer_tokens: int = 64


QUICK = Size(rounds=1, requests=4, prompt_tokens=64, answer_tokens=4)


def prompts(size: Size, seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(1, VOCABULARY) for _ in range(size.prompt_tokens)] for _ in range(size.requests)]


def made(folder: Path) -> Path:
    """A checkpoint where vLLM's process looks for it."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    shape = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "max_position_embeddings": 4096}
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **heads, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path := folder / "models" / MODEL)
    (path / "made.json").write_text(json.dumps(shape))
    return path


def own(checkpoint: Path) -> Engine:
    net = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    layout = StateLayout.of(net, PAGE, CHUNK)
    identity = ModelIdentity(MODEL, "random", "float32", PAGE, CHUNK, layout.pools)
    model = LoadedModel(MODEL, net, byte_tokenizer(), layout, identity, 4096, frozenset())
    return Engine(model, PrefixCache(identity, CacheConfig(GIB)), max_running=TOGETHER).start()


def main() -> int:
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="of the environment that has vLLM")
    args = parser.parse_args()
    size, about, python = QUICK if args.quick else Size(), machine(), vllm.python_of(args.vllm_python)
    quiet_libraries()
    torch.set_num_threads(THREADS)
    took: dict[str, list[float]] = {"kvarve serve": []}
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-") as name:
        folder, theirs = Path(name), None
        checkpoint = made(folder)
        if python is not None:
            took["vLLM"], more = [], {"max_num_seqs": TOGETHER}
            theirs = vllm.Engine(python, folder, model=MODEL, side="plain", threads=THREADS, engine=more)
        ours = own(checkpoint)
        try:
            for number in watched(range(size.rounds + 1), "round", size.rounds + 1):
                asked = prompts(size, number)
                took["kvarve serve"].append(through_engine(ours, asked, size.answer_tokens))
                if theirs is not None:
                    all_of_them = [*range(len(asked))]
                    messages = [[prompt] for prompt in asked]
                    played = theirs.call("play", messages=messages, batches=[all_of_them], answer=size.answer_tokens)
                    took["vLLM"].append(played["seconds"])
        finally:
            ours.shutdown(10)
            if theirs is not None:
                theirs.end()
    tokens = size.requests * size.answer_tokens
    speed = {engine: median(tokens / seconds for seconds in rounds[1:]) for engine, rounds in took.items()}
    rows = [{"engine": engine, "tokens/s": value} for engine, value in speed.items()]
    ratios = {"own_over_vllm": speed["kvarve serve"] / speed["vLLM"]} if "vLLM" in speed else {}
    show(f"{size.requests} prompts of {size.prompt_tokens} tokens, {size.answer_tokens} answered", rows)
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
