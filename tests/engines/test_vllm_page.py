"""kvarve's page beside a vLLM whose engine and worker are processes of their own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_process import HERE, ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

LONG_S = 60.0


def test_hits_by_tier_lanes_and_the_storage_are_on_the_page_of_an_engine_that_is_idle(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"model": str(model_folder("gemma3")), "storage": f"file://{tmp_path}/pages?capacity=64MiB"}
    environment = os.environ | {"KVARVE_PORT": str(port), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}

    def get(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LONG_S) as answer:
            return str(answer.read().decode())

    def page(holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        end = time.monotonic() + LONG_S
        while not holds(found := json.loads(get("/live/data"))):
            assert time.monotonic() < end, f"it does not come: {found}"
            time.sleep(0.1)
        return dict(found)

    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "vllm_page.py"), json.dumps(given | {"ranks": 1, "talk_s": 0})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline(), (tmp_path / "log").read_text()[-4000:]
        found = page(
            lambda found: sum(found["late"]["cached_tokens"].values()) == 2 * 896 and found["storage"]["objects"]
        )
        assert found["late"]["cached_tokens"] == {"device": 896, "host": 896, "storage": 0}
        assert found["total"] == {"prompt_tokens": 3000, "cached_tokens": 2 * 896}
        assert found["model"] == "tiny-gemma3" and found["trouble"] == []
        assert [each["up"] for each in found["ranks"]] == [True]
        moved = page(lambda found: max(map(len, (each["past_bytes_per_s"] for each in found["lanes"]))))["lanes"]
        assert {each["name"] for each in moved if sum(each["past_bytes_per_s"])} >= {"device-to-host", "host-to-device"}
        assert page(lambda found: found["hottest"])["hottest"][0]["hits"] == 2
        text = get("/metrics")
        assert 'kvarve_cached_tokens_total{tier="host"} 896.0' in text
        assert 'kvarve_cached_tokens_total{tier="device"} 896.0' in text
        before = page(lambda _: True)["age_s"], time.monotonic()
        assert page(lambda found: found["age_s"] < before[0] + time.monotonic() - before[1] - 1.0), (
            "an idle engine looks"
        )
        process.stdin.close()
        process.wait(60)
