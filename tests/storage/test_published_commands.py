"""Commands that people of SGLang use start `kvarve serve`, with a tiny model of the family and two ranks."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from mooncake_cluster import MASTER, Cluster, own_network, require_mooncake
from processes import until

from kvarve.settings.translate import command_of
from tests.sim.models import save_checkpoint, tiny_model

FILE = Path(__file__).parents[1] / "published_commands.toml"
COMMANDS = tomllib.loads(FILE.read_text())["command"]
PATIENCE_S = 120.0
# Ranks, gigabytes and fabrics that this machine has; all else is as published.
SMALLER = {
    r"HOST:50051": MASTER,
    r"http://HOST:8080/metadata": "P2PHANDSHAKE",
    r"HOST": "127.0.0.1",
    r"PROTOCOL=rdma": "PROTOCOL=tcp",
    r"MOONCAKE_DEVICE=\S+ ": "",
    r"(--tp|--tp-size) \d+": r"\1 2",
    r"--hicache-size [1-9]\d*": "--hicache-size 1",
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True, scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real master and memory for it, in a network in which every port is free."""
    require_mooncake()
    with own_network():
        cluster = Cluster(tmp_path_factory.mktemp("mooncake"))
        try:
            cluster.owner()
            yield
        finally:
            cluster.close()


@contextmanager
def started(theirs: str, folder: Path) -> Iterator[str]:
    """The server of a command, on as many machines as it asks for; its URL."""
    for pattern, here in SMALLER.items():
        theirs = re.sub(pattern, here, theirs)
    variables, flags = command_of(theirs.replace("MODEL", str(folder / "model")).replace("FILE", str(folder / "chat")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVARVE_")}
    environment |= dict(each.split("=", 1) for each in variables)
    port = flags[flags.index("--port") + 1] if "--port" in flags else "8000"
    with ExitStack() as ends:
        for node in range(2 if "--nnodes" in flags else 1):
            words = [str(node) if word == "N" else word for word in flags]
            log = ends.enter_context((folder / f"log{node}").open("w"))
            command = [sys.executable, "-m", "kvarve", "serve", *words]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            ends.callback(process.wait)
            ends.callback(process.kill)

        def ready() -> bool:
            told = (folder / "log0").read_text()
            assert process.poll() is None, told
            return "\nready" in told

        until(ready, "a server that is ready")
        yield f"http://127.0.0.1:{port}"


@pytest.mark.long
@pytest.mark.parametrize("published", COMMANDS, ids=lambda each: each["family"])
def test_a_published_command_starts_a_server_whose_prompts_hit(published: dict[str, str], tmp_path: Path) -> None:
    save_checkpoint(tiny_model(published["family"], max_position_embeddings=65536), tmp_path / "model")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    body = {"prompt": "a" * 600, "max_tokens": 2, "ignore_eos": True, "cache_salt": str(tmp_path)}
    with started(published["theirs"], tmp_path) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        cached = [
            client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for _ in range(2)
        ]
    assert cached == [0, 512]
