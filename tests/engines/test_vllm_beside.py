"""What people use beside a prefix cache in vLLM: with kvarve the answers are those of the same engine without it.

The device is emptied between two equal requests, so that the second one's pages come from the host.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_process import VllmProcess, prompt
from test_vllm import same
from tiny_models import MODELS

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]

LONG = prompt(700, 1)
EXTRA = {"host_memory": "64MiB", "storage": "memory://beside?capacity=16MiB"}
Start = Callable[..., VllmProcess]

# Of an engine: by name, its arguments, and how many tokens of the prompt the second request hits.
ENGINES: dict[str, tuple[dict[str, Any], int]] = {
    "ngram": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}, 640),
    "eagle": ({"speculative_config": {"method": "eagle", "model": "llama_eagle", "num_speculative_tokens": 2}}, 640),
    "draft-model": ({"speculative_config": {"model": "llama", "num_speculative_tokens": 2}}, 640),
    "several-connectors": ({}, 640),
    "priority": ({"scheduling_policy": "priority"}, 640),
    "fp8": ({"kv_cache_dtype": "fp8_e5m2"}, 640),
    "small-chunks": ({"max_num_batched_tokens": 80}, 640),
    "chunked-off": (
        {"max_num_batched_tokens": 1536, "enable_chunked_prefill": False, "num_gpu_blocks_override": 200},
        640,
    ),
    "cbor": ({"prefix_caching_hash_algo": "sha256_cbor"}, 640),
}
# Of a request: sampling parameters and what stands beside its tokens.
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "salt": ({}, {"cache_salt": "a"}, 640),
    "prompt-logprobs": ({"prompt_logprobs": 1}, {}, 0),  # of every token of the prompt, which vLLM computes for that
    "seed": ({"seed": 7, "top_p": 0.9}, {}, 640),
    "parallel": ({"stop_token_ids": [9]}, {}, 640),
}


def twice(engine: VllmProcess, how: dict[str, Any], more: dict[str, Any]) -> list[dict[str, Any]]:
    engine.call("reset")
    found = [engine.call("ask_so", prompt=LONG, how=how, **more)]
    if engine.seam != "plain":
        engine.call("reset")
    return [*found, engine.call("ask_so", prompt=LONG, how=how, **more)]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_with_this_is_answered_from_the_host_as_from_the_device(
    start: Start, model_folder: Callable[[str], Path], name: str
) -> None:
    changes, hits = ENGINES[name]
    told, model = [], "gemma3"
    if draft := changes.get("speculative_config", {}).get("model"):
        model, changes = (
            "llama",
            {"speculative_config": changes["speculative_config"] | {"model": str(model_folder(draft))}},
        )
    for seam in ("plain", "several" if name == "several-connectors" else "connector"):
        more = {"num_gpu_blocks_override": MODELS["gemma3"].blocks, "max_model_len": 1536} | changes
        chunk = more.pop("max_num_batched_tokens", MODELS["gemma3"].block)
        engine = start(model, seam, more=more, chunk=chunk, extra=EXTRA)
        told.append(twice(engine, {}, {}))
        assert engine.about()["wrong"] == []
        engine.close()
    assert all(map(same, *told))
    assert [each["cached"] for each in told[1]] == [0, hits]


@pytest.fixture(scope="module")
def engines(start: Start) -> list[VllmProcess]:
    return [start("gemma3", seam, extra=EXTRA) for seam in ("plain", "connector")]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_with_this_is_answered_from_the_host_as_from_the_device(
    engines: list[VllmProcess], name: str
) -> None:
    how, more, hits = REQUESTS[name]
    for engine in engines:
        engine.call("reset", everywhere=True)
    plain, ours = (twice(engine, how, more) for engine in engines)
    assert all(map(same, plain, ours))
    assert ours[1]["cached"] == hits


def test_a_salt_finds_no_pages_of_another(engines: list[VllmProcess]) -> None:
    _, engine = engines
    twice(engine, {}, {"cache_salt": "mine"})
    engine.call("reset")
    assert engine.call("ask_so", prompt=LONG, how={}, cache_salt="theirs")["cached"] == 0


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("beams", {}),
        ("one_of", {"choices": ["the", "a cat"]}),
        ("embedding", {"runner": "pooling", "convert": "embed"}),
    ],
    ids=["beam-search", "structured-output", "embeddings"],
)
def test_other_ways_to_ask_get_from_the_host_what_they_get_without_kvarve(
    start: Start, what: str, more: dict[str, Any]
) -> None:
    told = []
    arguments = {} if "runner" not in more else more
    asked = {} if arguments else more
    for seam in ("plain", "connector"):
        settings = {"num_gpu_blocks_override": 70, "max_model_len": 1536, "skip_tokenizer_init": False} | arguments
        engine = start("gemma3_words", seam, more=settings, extra=EXTRA)
        told.append([])
        for _ in range(2):
            told[-1].append(engine.call(what, prompt=LONG, **asked))
            engine.call("reset")
        restored = engine.about()["restored"]
        engine.close()
    assert [each[0] for each in told[0]] == [each[0] for each in told[1]]
    assert restored, "the second request's pages came from the host"


def test_a_prompt_with_another_picture_finds_no_pages_of_this_one(start: Start) -> None:
    told = []
    for seam in ("plain", "connector"):
        settings = {"num_gpu_blocks_override": 70, "max_model_len": 1536, "skip_tokenizer_init": False}
        engine = start("llava", seam, more=settings, extra=EXTRA)
        told.append([])
        for colour in ("red", "red", "blue"):
            told[-1].append(engine.call("picture", prompt="<image> " + "once upon a time " * 100, colour=colour))
            engine.call("reset")
        engine.close()
    plain, ours = told
    assert all(map(same, plain, ours))
    assert ours[1]["cached"] > 0 == ours[2]["cached"] and not same(*ours[1:])
