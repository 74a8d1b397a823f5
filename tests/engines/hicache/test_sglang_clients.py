"""SGLang's benchmark measures a kvarve server as it measures its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvarve_server import serving

HERE = Path(__file__).parent
PROMPTS, NEW = 4, 6
PAGES = ["--page-size", "64", "--chunk-tokens", "64"]


@pytest.mark.timeout(300)
def test_the_benchmark_of_sglang_runs_unmodified_and_reports_the_hits(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    with serving("--enable-hierarchical-cache", *PAGES, "--enable-cache-report") as url:
        same = ["--base-url", url, "--num-prompts", str(PROMPTS), "--output-file", str(out), "--disable-tqdm"]
        same += ["--dataset-name", "random-ids", "--random-input-len", "300", "--random-output-len", str(NEW)]
        same += ["--random-range-ratio", "1.0", "--cache-report"]
        runs = [
            ["--backend", "sglang", "--flush-cache"],
            ["--backend", "sglang"],
            ["--backend", "sglang-oai-chat"],
            ["--backend", "sglang-oai-chat"],
            ["--backend", "vllm", "--flush-cache"],
        ]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "sglang_bench.py"), json.dumps([run + same for run in runs])],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["backend"] for each in told] == [run[1] for run in runs]
    for each in told:
        assert (each["completed"], each["total_output_tokens"]) == (PROMPTS, PROMPTS * NEW), done.stdout[-4000:]
        assert each["server_info"]["page_size"] == 64
        assert each["mean_ttft_ms"] > 0
    cold, warm, _, chat, _ = (each["cache_report"] for each in told)
    assert cold["total_cached_tokens"] == 0
    for report in (warm, chat):
        assert report["total_cached_tokens"] == report["device_cached_tokens"] >= PROMPTS * 256
