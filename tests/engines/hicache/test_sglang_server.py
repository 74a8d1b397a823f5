"""A server of SGLang with KVARVE=1, over HTTP: a prompt comes from the device, the host and, after a kill, storage."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
START_S = 300.0
ON_A_CPU = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "host": "127.0.0.1",
    "max-total-tokens": "8192",
    "max-running-requests": "4",
    "page-size": "16",
}
SWITCHES = ["--disable-overlap-schedule", "--skip-tokenizer-init", "--skip-server-warmup"]
PAGES, PAGE_BYTES = 31, 2 * 2 * 16 * 2 * 16 * 4  # of two layers' keys and values, two heads each


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, head_dim=16, intermediate_size=128, vocab_size=512, max_position_embeddings=4096)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


class Server:
    def __init__(self, model: Path, folder: Path) -> None:
        self.port, self.page = free_ports()
        words = ["-W", "ignore", "-m", "sglang.launch_server", *SWITCHES]
        options = {"model-path": str(model), "port": str(self.port), **ON_A_CPU}
        words += [word for name, value in options.items() for word in (f"--{name}", value)]
        settings = {"KVARVE": "1", "KVARVE_HOST_MEMORY": "64MiB", "KVARVE_PORT": str(self.page)}
        settings |= {"KVARVE_STORAGE": f"file://{folder}/pages?capacity=1GiB", "SGLANG_USE_CPU_ENGINE": "1"}
        found = os.pathsep.join([str(HERE / "server_site"), str(HERE)])
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | settings | {"PYTHONPATH": found},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-6000:]
            try:
                self.call("GET", "/health")
                return
            except OSError:
                time.sleep(0.5)

    def call(self, method: str, path: str, body: Any = None, port: int | None = None) -> bytes:
        connection = HTTPConnection("127.0.0.1", port or self.port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body or {}), {"content-type": "application/json"})
            answer = connection.getresponse()
            told = answer.read()
            assert answer.status == 200, (path, answer.status, told)
            return told
        finally:
            connection.close()

    def ask(self, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
        """The tokens of an answer, and how many of the prompt came from where."""
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        told = json.loads(self.call("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling}))
        cached = told["meta_info"]["cached_tokens_details"] or {}
        return told["output_ids"], {name: count for name, count in cached.items() if type(count) is int and count}

    def stored(self) -> int:
        """Bytes of pages that storage has."""
        lines = self.call("GET", "/metrics", port=self.page).decode().splitlines()
        (line,) = (line for line in lines if line.startswith("kvarve_offload_bytes_stored_total "))
        return int(float(line.split()[-1]))


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[Server]:
    server = Server(model, folder)
    try:
        server.wait()
        yield server
    finally:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(60)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_answer_is_the_same_whether_its_prompt_comes_from_the_device_the_host_or_storage(tmp_path: Path) -> None:
    model, dice = tiny_model(tmp_path / "model"), random.Random(1)
    prompt = [dice.randrange(512) for _ in range(500)]
    with serving(model, tmp_path) as server:
        answer, cached = server.ask(prompt)
        assert cached == {}
        assert server.ask(prompt) == (answer, {"device": 16 * PAGES})
        server.call("POST", "/flush_cache")
        assert server.ask(prompt) == (answer, {"host": 16 * PAGES})
        assert b"kvarve" in server.call("GET", "/", port=server.page)
        while server.stored() < PAGES * PAGE_BYTES:
            time.sleep(0.1)
    with serving(model, tmp_path) as server:
        assert server.ask(prompt) == (answer, {"storage": 16 * PAGES})
        assert server.ask(prompt) == (answer, {"device": 16 * PAGES})
