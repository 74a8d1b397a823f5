"""Tests inside SGLang, run by its interpreter (`make test-engines`); where it is missing they are not collected."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what stands beside the tests

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob.append("test_sglang*.py")
else:
    import sglang_on_cpu

    sglang_on_cpu.prepare()

    from linker_bed import Engine
    from sglang.srt.runtime_context import get_parallel
    from sglang_engines import LAYOUTS, Fixtures
    from sglang_witness import Witness


@pytest.fixture
def make(tmp_path: Path) -> Iterator["Callable[..., Fixtures]"]:
    """Makes SGLang's fixtures for a configuration; in the end no page was restored with other bytes than were saved."""
    Witness.forget()
    made: list[Fixtures] = []

    def fixtures(cfg: Any, layout: str = "", **extra: Any) -> Fixtures:
        made.append(Fixtures(cfg, tmp_path, layout or LAYOUTS[0], **extra))
        return made[-1]

    yield fixtures
    for each in made:
        each.end()
    assert Witness.wrong == []


@pytest.fixture
def make_engine() -> Iterator["Callable[..., Engine]"]:
    """Makes engines with kvarve's linker, on one rank; in the end they are closed."""
    made: list[Engine] = []

    def engine(kind: str, page: int, **extra: Any) -> Engine:
        made.append(Engine(kind, page, **extra))
        return made[-1]

    alone = {f"{what}_{of}": of == "size" for what in ("tp", "attn_tp", "pp") for of in ("rank", "size")}
    with get_parallel().override(**{name: int(value) for name, value in alone.items()}):
        yield engine
        for each in made:
            each.close()
