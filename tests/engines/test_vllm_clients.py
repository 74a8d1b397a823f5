"""vLLM's benchmark and OpenAI's SDK talk to a kvarve server as they talk to vLLM's."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarve_server import MODEL, serving

openai = pytest.importorskip("openai")

HERE = Path(__file__).parent
PROMPTS, NEW = 4, 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--block-size", "64", "--chunk-tokens", "64", "--enable-prefix-caching", "--api-key", "door") as url:
        yield url


@pytest.fixture
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="door", max_retries=0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "backend",
    [("openai", "/v1/completions"), pytest.param(("openai-chat", "/v1/chat/completions"), marks=pytest.mark.long)],
)
def test_the_benchmark_of_vllm_runs_unmodified(url: str, backend: tuple[str, str], tmp_path: Path) -> None:
    words = ["--backend", backend[0], "--base-url", url, "--endpoint", backend[1], "--num-prompts", str(PROMPTS)]
    words += ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", str(NEW), "--ignore-eos"]
    words += ["--tokenizer", str(MODEL), "--save-result", "--result-dir", str(tmp_path), "--disable-tqdm"]
    words += ["--result-filename", "figures.json", "--header", "Authorization=Bearer door"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "vllm_bench.py"), *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "figures.json").read_text())
    assert (told["completed"], told["failed"], told["total_output_tokens"]) == (PROMPTS, 0, PROMPTS * NEW)
    assert told["mean_ttft_ms"] > 0 and told["mean_itl_ms"] > 0


def test_openais_sdk_reads_answers_streams_and_errors(client: Any) -> None:
    (model,) = client.models.list().data
    messages = [{"role": "user", "content": "Once upon a time"}]
    chat = client.chat.completions.create(model=model.id, messages=messages, max_tokens=NEW, temperature=0)
    assert chat.usage.completion_tokens == NEW or chat.choices[0].finish_reason == "stop"
    said, usage = "", None
    same = {"model": model.id, "messages": messages, "max_tokens": NEW, "temperature": 0}
    with client.chat.completions.create(**same, stream=True, stream_options={"include_usage": True}) as chunks:
        for chunk in chunks:
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    assert (
        said == chat.choices[0].message.content and usage is not None and usage.total_tokens == chat.usage.total_tokens
    )
    both = client.completions.create(model=model.id, prompt=["One", "Two"], max_tokens=2, echo=True)
    assert [choice.text[:3] for choice in both.choices] == ["One", "Two"]
    raw = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model.id, prompt="a " * 100_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model.id, messages=messages, response_format={"type": "json_object"})
    assert caught.value.param == "response_format" and caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="window", max_retries=0).models.list()
