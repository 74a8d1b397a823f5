"""One thread: the machine is shared, and sums in another order are other bits.

Tests of this folder import `engines` and `recorder`, which stand beside them.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from recorder import Recorder

from engines import engines
from kvarve.engine.engine import Engine


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Makes engines, started unless told otherwise, and shuts them down at the end."""
    yield from engines()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
