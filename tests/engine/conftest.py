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

from engines import OF_EACH_KIND, a_model, a_prompt, a_request, by_hand, engines
from kvarve.reference.engine.engine import Engine


@pytest.fixture(scope="session")
def tried() -> None:
    """The model of most tests: what its code can compute together is found by trying, once in a process."""
    try_together("qwen3_5")


@pytest.fixture(scope="session")
def kinds(tried: None) -> None:
    """The same of a model for each kind of state."""
    for family in OF_EACH_KIND:
        try_together(family)


def try_together(family: str) -> None:
    for make in engines():
        by_hand(make(a_model(family), start=False), a_request(a_prompt(20), 2))


@pytest.fixture
def make(tried: None) -> Iterator[Callable[..., Engine]]:
    """Makes engines, started unless told otherwise, and shuts them down at the end."""
    yield from engines()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
