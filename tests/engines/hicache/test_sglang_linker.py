"""Pages come back from kvarve's host memory and storage into SGLang's slots, as they were offloaded."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from linker_bed import KINDS, Engine, prompt
from sglang.srt.runtime_context import get_parallel

Make = Callable[..., Engine]
BEDS = [pytest.param(kind, page) for kind in KINDS for page in (16, 64) if (kind, page) != ("DSA", 16)]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Engine] = []

    def engine(kind: str, page: int, **extra: Any) -> Engine:
        made.append(Engine(kind, page, **extra))
        return made[-1]

    with get_parallel().override(tp_rank=0, tp_size=1, attn_tp_rank=0, attn_tp_size=1, pp_rank=0, pp_size=1):
        yield engine
        for each in made:
            each.close()


@pytest.mark.parametrize(("kind", "page"), BEDS)
@pytest.mark.parametrize("core", ["python", "rust"])
def test_what_left_the_device_is_restored(make: Make, kind: str, page: int, core: str) -> None:
    engine = make(kind, page, core=core)
    asked = prompt(5, page)
    assert engine.serve(asked) == (0, 0, 5)
    engine.settle()
    assert engine.serve(asked) == (5, 0, 0)
    engine.forget()
    assert engine.serve(asked) == (0, 5, 0)
    engine.flush()
    longer = prompt(8, page, 2, after=asked)
    assert engine.serve(longer) == (0, 5, 3)
    engine.audit()
