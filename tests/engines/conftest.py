"""Starts engines in their own venvs (`make test-engines` sets them up)."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from engine_process import VLLM_PYTHON, VllmProcess  # noqa: E402
from tiny_models import MODELS  # noqa: E402


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmProcess]]:
    """Start an engine: with kvarve and its settings, or without (`kvarve=None`)."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"{VLLM_PYTHON} is missing: make test-engines sets it up")
    folder = tmp_path_factory.mktemp("engines")
    models = Path(os.environ.get("KVARVE_TINY_MODELS", folder / "models"))
    running: list[VllmProcess] = []

    def begin(model: str, kvarve: dict[str, Any] | None, **more: Any) -> VllmProcess:
        made = "import sys, tiny_models as t; from pathlib import Path; t.made(sys.argv[1], Path(sys.argv[2]))"
        if not (models / model / "made.json").exists():
            subprocess.run(
                [str(VLLM_PYTHON), "-c", made, model, str(models)], cwd=HERE, check=True, capture_output=True
            )
        settings = {
            "model": str(models / model),
            "dtype": MODELS[model][2],
            "chunk": MODELS[model][3],
            "kvarve": kvarve,
            "prints": str(folder / f"{model}.prints"),
        }
        engine = VllmProcess(settings | more, folder / f"{len(running)}.log")
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.kill()
