"""A real server over real HTTP, with a model that has learned one song by heart, so that what it says is text.

Tests of this folder import `talk` and `servers`, which stand beside them.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from servers import settings

from kvarve.reference.engine.model import quiet_libraries
from kvarve.reference.server.serve import Server
from tests.sim.models import byte_tokenizer, save_checkpoint, tiny_model

SONG = "hvarv på åkern, 日本語の川 🐟 and so on; "  # its characters are 1 to 4 bytes, and a token is one byte


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def song() -> str:
    return SONG


@pytest.fixture(scope="session")
def ids() -> list[int]:
    """The song's tokens, one a byte."""
    return list(byte_tokenizer().encode(SONG))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid model that goes on singing wherever a prompt leaves off."""
    quiet_libraries()
    ids = torch.tensor(byte_tokenizer().encode(SONG) * 5)
    cycle, length = len(SONG.encode()), 3 * len(SONG.encode())
    model = tiny_model("qwen3_5").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(0)
    for _ in range(60):
        starts = torch.randint(cycle, (2,), generator=random).tolist()
        batch = torch.stack([ids[start : start + length] for start in starts])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("models") / "singer"
    save_checkpoint(model.eval(), folder)
    return folder


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage") / "pages"


@pytest.fixture(scope="session")
def server(checkpoint: Path, storage: Path) -> Iterator[Server]:
    logging.getLogger("kvarve").setLevel(logging.INFO)
    with Server(settings(checkpoint, storage, deterministic=False)) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """A test's own corner of the cache."""
    return str(request.node.name)


@pytest.fixture
def own_server(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server to break, with the settings that the test's parameter gives."""
    with Server(settings(checkpoint, **getattr(request, "param", {}))) as server:
        yield server


@pytest.fixture
def own_client(own_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_server.url, timeout=60) as client:
        yield client
