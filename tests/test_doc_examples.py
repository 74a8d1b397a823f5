"""The examples of README and of the documentation do what is said there."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: F401  which would count as the first test's otherwise

import kvarve.transformers  # noqa: F401
from doc_blocks import blocks, run, stored_in
from kvarve import PrefixCache
from kvarve.reference.engine.model import BUILTIN, quiet_libraries

FOUND = PrefixCache  # which imports torch


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_libraries()


@pytest.mark.parametrize("page", ["your-engine", "python", pytest.param("transformers", marks=pytest.mark.long)])
def test_a_page_can_be_run_from_its_top_to_its_end(page: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    for code in blocks(f"docs/{page}.md"):
        run(stored_in(code, tmp_path), names)
    assert names.keys() & {"PrefixCache", "PrefixCachedModel"}


def test_the_engine_of_readme_needs_no_page_of_a_prompt_twice(capsys: pytest.CaptureFixture[str]) -> None:
    _, own_engine = blocks("README.md")
    run(own_engine, {})
    assert capsys.readouterr().out == "0 of 3 pages need no computing\n3 of 3 pages need no computing\n"


@pytest.mark.long
def test_a_second_run_of_readmes_transformers_reads_the_prompt_from_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the model's name and the folder of the storage differ from what stands there."""
    with_transformers, _ = blocks("README.md")
    local = with_transformers.replace('"Qwen/Qwen3-0.6B"', repr(str(BUILTIN / "tiny-hybrid")))
    assert local != with_transformers
    for _ in range(2):
        run(stored_in(local, tmp_path), {})
    said = capsys.readouterr().out
    (cold, _), (warm, stored) = re.findall(r"Usage\(prompt_tokens=(\d+), device=0, host=0, storage=(\d+)\)", said)
    assert cold == warm and int(warm) - 256 <= int(stored) < int(warm)
