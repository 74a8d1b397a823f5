"""README's command for vLLM, as it stands there but for the model and the folder of the storage."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from engine_environment import ENVIRONMENT
from engine_process import HERE, ROOT, prompt

from doc_blocks import command, stored_in

pytestmark = pytest.mark.timeout(1800)

START_S = 900


def test_the_command_of_readme_serves_and_keeps_what_it_computed(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    program, serve, _, *words = command("README.md", "vllm serve")
    assert (program, serve) == ("vllm", "serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = model_folder("gemma3")
    run = [sys.executable, str(HERE / "vllm_command.py"), "serve", str(model), "--skip-tokenizer-init"]
    run += [
        "--enforce-eager",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *(stored_in(each, tmp_path) for each in words),
    ]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT / "src"), "VLLM_LOGGING_LEVEL": "INFO"}
    with (tmp_path / "log").open("w") as log, subprocess.Popen(run, env=environment, stdout=log, stderr=log) as process:
        try:
            until = time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < until:
                try:
                    urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (URLError, ConnectionError, TimeoutError):
                    time.sleep(0.5)  # it tells nobody when it listens
            body = {"model": str(model), "prompt": prompt(1000, 1), "max_tokens": 1, "detokenize": False}
            asked = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
            asked.add_header("Content-Type", "application/json")
            with urlopen(asked, timeout=600) as answer:
                assert json.load(answer)["usage"]["prompt_tokens"] == 1000
            while not stored(tmp_path / "pages", environment):  # it stores after it has answered
                assert process.poll() is None and time.monotonic() < until
            process.send_signal(signal.SIGINT)
            process.wait(600)
        except BaseException:
            print((tmp_path / "log").read_text()[-6000:])
            raise
        finally:
            process.kill()
    assert stored(tmp_path / "pages", environment)


def stored(folder: Path, environment: dict[str, str]) -> int:
    """How many objects the storage has."""
    stat = [sys.executable, "-m", "kvarve", "storage", "stat", str(folder), "--json", "-"]
    told = json.loads(subprocess.run(stat, env=environment, check=True, capture_output=True).stdout)
    return sum(model["objects"] for model in told["models"])
