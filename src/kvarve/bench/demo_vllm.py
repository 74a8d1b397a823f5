"""The demo with vLLM computing: the same conversations in vLLM alone, and in vLLM with kvarve's connector.

Every request of a round has to give the tokens and logprobs of vLLM alone, bit for bit.

Engines run in processes of their own (`vllm_engine.py`). The model is made here with random weights: it is
about what is kept, not what is said.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvarve.bench.demo_report import FOLLOW_UPS, finish, sections
from kvarve.bench.figures import figures
from kvarve.bench.load import TIERS, Record, Round
from kvarve.bench.run import bars
from kvarve.bench.vllm_process import EngineProcess, python_with_vllm
from kvarve.errors import ConfigError
from kvarve.reference.server.server_process import empty_log
from kvarve.settings.commands import Demo

ALONE = "vLLM alone"
ROUNDS = {
    ALONE: "without kvarve; nothing is read from a cache",
    "cold": "with kvarve; nothing is read from a cache, and all is saved",
    "device": "from vLLM's own blocks",
    "host": "vLLM's blocks are emptied before each request",
    "storage": "vLLM was restarted, and all memory is emptied before each request",
}
SOURCE = {"device": "device", "host": "host", "storage": "disk"}  # what vLLM calls them
TOKENIZER = Path(__file__).parents[1] / "reference" / "engine" / "builtin" / "tiny-hybrid"
# Three linear layers to one of attention, as Qwen3.5 has them; vLLM's CPU build computes linear heads of 128 only, in
# bfloat16. Weights are drawn wide enough for a wrong page to change logits.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "max_position_embeddings": 8192,
}
# vLLM's page of that shape is 384 or 640 tokens, by the type of its states. A step takes one page at most, so that a
# prompt is computed in the same pieces wherever it resumes, and its bits are the same.
STEP_TOKENS = 512
WARM_UP = [*range(3, 203)]  # a prompt that no page keeps: costs of the first use are not TTFT


@dataclass(frozen=True)
class Size:
    """The amount of work."""

    conversations: int = 4
    turns: int = 3
    tokens: int = 3000  # of each first prompt, about
    answer_tokens: int = 16


QUICK = Size(conversations=1, turns=2, tokens=1200, answer_tokens=8)


def make_model(folder: Path) -> int:
    """A checkpoint with the weights of seed 0 and the tokenizer of `builtin:tiny-hybrid`; the number of parameters."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    own = json.loads((TOKENIZER / "config.json").read_text())
    fields = {name: value for name, value in own.items() if name != "layer_types"} | SHAPE
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)
    return int(model.num_parameters())


def tokenizer(folder: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(found.encode(text).ids)


def run_round(
    result: Round, engine: EngineProcess, size: Size, talks: list[list[list[int]]], tick: Callable[[Record], None]
) -> None:
    """All requests of a round, one at a time. `talks`: of each conversation what the user says, turn by turn."""
    for said in talks:
        prompt: list[int] = []
        for message in said:
            prompt = prompt + message
            if result.name in ("host", "storage"):
                engine.call("empty", host=result.name == "storage")
            read = result.name in TIERS
            told = engine.call("ask", prompt=prompt, tokens=size.answer_tokens, read=read)
            engine.call("drain")
            result.records.append(record_of(told, len(prompt)))
            tick(result.records[-1])
            prompt = prompt + told["tokens"]
    result.duration_s = sum(record.end_s for record in result.records)


def record_of(told: dict[str, Any], prompt: int) -> Record:
    return Record(
        due_s=0.0,
        first_s=told["first_s"],
        end_s=told["last_s"],
        prompt=prompt,
        completion=len(told["tokens"]),
        cached={tier: told["sources"].get(source, 0) for tier, source in SOURCE.items()},
        text=json.dumps([told["tokens"], told["logprobs"]]),
    )


def main(options: Demo) -> int:
    """Run it; 0 if every round gave the tokens and logprobs of vLLM alone, 1 if not. Writes demo-vllm.json and .png."""
    if (options.model, options.port, options.context_tokens) != (Demo.model, Demo.port, Demo.context_tokens):
        raise ConfigError(
            "--engine vllm cannot have --model, --port or --context-tokens: it has no server, and computes a model "
            "and texts of its own"
        )
    python = python_with_vllm(options.engine_python)
    console, out = Console(), options.out
    size = QUICK if options.quick else Size()
    log = empty_log(out, "demo-vllm.log")
    rounds = [Round(name) for name in ROUNDS]
    found = {result.name: result for result in rounds}
    requests = size.conversations * size.turns
    with tempfile.TemporaryDirectory(prefix="vllm-", dir=out) as name:
        folder = Path(name)
        parameters = make_model(folder / "model")
        encode = tokenizer(folder / "model")
        talks = [
            [encode(f"{text}\n\n{FOLLOW_UPS[0]}")]
            + [encode(FOLLOW_UPS[turn % len(FOLLOW_UPS)]) for turn in range(1, size.turns)]
            for text in sections(size.conversations, size.tokens)
        ]
        console.print(
            f"[bold]kvarve demo[/bold]: vLLM computes a hybrid of {parameters / 1e6:.1f} million random parameters, "
            f"without kvarve and with it: conversations about texts of {size.tokens:,} tokens, {requests} requests in "
            f"each of {len(rounds)} rounds. Its Python is {escape(str(python))}, its log {escape(str(log))}.\n"
        )
        for each, meaning in ROUNDS.items():
            console.print(f"  {each:10}  {meaning}", highlight=False, soft_wrap=True)
        console.print()
        plain = {
            "model": str(folder / "model"),
            "dtype": "bfloat16",
            "max_model_len": SHAPE["max_position_embeddings"],
            "max_num_seqs": 4,
            "max_num_batched_tokens": STEP_TOKENS,
        }
        url = options.storage or f"file://{(folder / 'storage').resolve()}?capacity=1GiB"
        kvarve: dict[str, Any] = {"host_memory": "256MiB", "storage": url, "storage_wait": "all"}
        with bars(rounds, requests) as begin:

            def engine(settings: dict[str, Any] | None) -> EngineProcess:
                return EngineProcess(python, {"engine": plain, "kvarve": settings}, log)

            def play(engine: EngineProcess, *names: str) -> dict[str, Any]:
                """Some rounds in one engine; what it tells in the end."""
                begin(found[names[0]], "vLLM starts")
                engine.call("ask", prompt=WARM_UP, tokens=2, read=False)
                for each in names:
                    run_round(found[each], engine, size, talks, begin(found[each]))
                return dict(engine.call("about"))

            with engine(kvarve) as first:
                with engine(None) as alone:  # they start at the same time, and compute one after the other
                    begin(found[ALONE], "vLLM starts, half a minute")
                    first.ready()
                    play(alone, ALONE)
                before = play(first, "cold", "device", "host")
            with engine(kvarve) as second:
                after = play(second, "storage")
    counts = {name: int(before["counts"][name] + after["counts"][name]) for name in before["counts"]}
    report = {
        "model": f"vLLM {before['vllm']}, {parameters / 1e6:.1f}M random parameters",
        "page_tokens": before["page"],
        "rounds": [*map(figures, rounds)],
        "pages": counts,
    }
    said = (
        f"kvarve saved {counts['backed_up']} pages in host memory and {counts['stored']} in storage, found "
        f"{counts['fetched']} in storage again and loaded {counts['loaded']} into vLLM's blocks; "
        f"{counts['bad_host'] + counts['bad_storage']} failed their check. A page is what one of the model's "
        f"{before['groups']} cache groups keeps of {before['page']} tokens.",
        "There is no accuracy, since the weights are random: tokens and their logprobs are compared.",
    )
    code = finish(console, out / "demo-vllm.json", report, said, "They differ from those of vLLM alone")
    if not code:
        console.print("[bold green]In every round they are those of vLLM alone, bit for bit.[/bold green]")
    return code
