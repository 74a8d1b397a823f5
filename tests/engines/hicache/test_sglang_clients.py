"""SGLang's clients measure a kvarve server as they measure its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvarve_server import MODEL, serving

HERE = Path(__file__).parent
PROMPTS, NEW = 4, 6
FLAGS = ["--page-size", "64", "--chunk-tokens", "64", "--enable-hierarchical-cache", "--enable-cache-report"]


def run(folder: Path, *clients: list[Any]) -> str:
    """What they print; their files come into the folder."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "sglang_clients.py"), json.dumps(clients)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_the_clients_of_sglang_run_unmodified_and_report_the_hits(tmp_path: Path) -> None:
    out, questions = tmp_path / "figures.jsonl", tmp_path / "questions.jsonl"
    asked = [{"question": f"How many are {n} and {n}?", "answer": f"It is #### {2 * n}"} for n in range(1, 7)]
    questions.write_text("".join(json.dumps(each) + "\n" for each in asked))
    chats = tmp_path / "chats.json"  # as ShareGPT, from which the lengths asked for are cut
    talks = [[{"from": who, "value": f"boat {n} and its fish "} for who in ("human", "gpt")] for n in range(9)]
    chats.write_text(json.dumps([{"conversations": turns} for turns in talks]))
    with serving(*FLAGS) as url:
        same = ["--base-url", url, "--num-prompts", str(PROMPTS), "--output-file", str(out), "--disable-tqdm"]
        same += ["--dataset-name", "random-ids", "--random-input-len", "300", "--random-output-len", str(NEW)]
        same += ["--random-range-ratio", "1.0", "--cache-report"]
        benches = [
            ["--backend", "sglang", "--flush-cache"],
            ["--backend", "sglang"],
            ["--backend", "sglang-oai-chat"],
            ["--backend", "sglang-oai-chat"],
            ["--backend", "vllm", "--flush-cache"],
            ["--backend", "sglang-oai"],
        ]
        host = [f"--host={urlsplit(url).hostname}", f"--port={urlsplit(url).port}"]
        gsm8k = [f"--data-path={questions}", "--num-shots=3", "--num-questions=3", "--max-new-tokens=4", "--parallel=2"]
        # Of bench_multiturn, which is in no wheel: its requests, and what it expects to be cached of each turn.
        turned = {"base_url": url, "model_path": str(MODEL), "dataset_path": str(chats), "num_clients": 3}
        turned |= {"request_length": 100, "output_length": NEW}
        told = run(
            tmp_path,
            ["sglang.test.kits.cache_hit_kit:run_multiturn_cache_hit_test", turned],
            *(["sglang.bench_serving", *words, *same] for words in benches),
            ["sglang.test.few_shot_gsm8k", *host, *gsm8k],
        )
    figures = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["backend"] for each in figures] == [words[1] for words in benches]
    for each in figures:
        assert (each["completed"], each["total_output_tokens"]) == (PROMPTS, PROMPTS * NEW), told[-4000:]
        assert each["server_info"]["page_size"] == 64
        assert each["mean_ttft_ms"] > 0
    cold, warm, _, chat, _, completions = (each["cache_report"] for each in figures)
    assert cold["total_cached_tokens"] == 0
    for report in (warm, chat, completions):
        assert report["total_cached_tokens"] == report["device_cached_tokens"] >= PROMPTS * 256
    assert "Accuracy: " in told and "Overall cache_hit_rate=" in told
