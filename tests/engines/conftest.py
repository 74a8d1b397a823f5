"""Tests inside vLLM, run by its interpreter (`make test-engines`); where it is missing they are not collected."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from engine_process import VllmProcess  # noqa: E402
from tiny_models import MODELS  # noqa: E402

import forks  # noqa: E402


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All tests with a model run in one process, which starts the model's engines once; so do all of a file of clients,
    which share a server."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModel(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            alone = file if file.endswith("_clients.py") else nodeid
            return next((name for name in MODELS if f"[{name}-" in nodeid), alone)

    return ByModel(config, log)


collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm*.py"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model's checkpoint, which another process makes when it is needed first."""
    models = Path(os.environ.get("KVARVE_TINY_MODELS", tmp_path_factory.mktemp("models")))

    def made(name: str) -> Path:
        if not (models / name / "made.json").exists():
            command = [sys.executable, str(HERE / "tiny_models.py"), name, str(models)]
            forks.run(command, check=True, capture_output=True)
        return models / name

    return made


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]
) -> Iterator[Callable[..., VllmProcess]]:
    """Start an engine with this model: without kvarve ("plain"), or behind a seam and with its settings."""
    folder = tmp_path_factory.mktemp("engines")
    running: list[VllmProcess] = []

    def begin(model: str, seam: str = "plain", **more: Any) -> VllmProcess:
        settings = {
            "model": str(model_folder(model)),
            "dtype": MODELS[model].dtype,
            "chunk": MODELS[model].block,
            "more": {"num_gpu_blocks_override": MODELS[model].blocks, "max_model_len": 1536},
            "seam": seam,
            "prints": str(folder / f"{model}-{seam}.prints"),
        }
        engine = VllmProcess(settings | more, folder / f"{len(running)}.log")
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.kill()
