"""The table of families agrees with the code, for the families it lists and for any other config."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvarve.reference.engine import families
from kvarve.reference.engine.families import FAMILIES, Facts, Family, describe, survey
from kvarve.reference.engine.layers import LAYERS, page_multiple, plan_layers
from kvarve.reference.engine.model import forward, load_model
from kvarve.reference.engine.workspace import StateLayout, Workspace
from tests.sim.models import FAMILIES as PROVEN
from tests.sim.models import VOCAB, save_checkpoint, tiny_config, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
OTHERS = [family for family in PROVEN if family != "qwen3"]
CHEAP = ("LFM2", "Falcon-Mamba", "Qwen3", "gpt-oss", "Gemma 4", "Nemotron-H", "MiniMax-M3", "RWKV")


@cache
def documented() -> dict[str, tuple[str, ...]]:
    """The rows of docs/families.md by family."""
    rows = [
        tuple(cell.strip() for cell in line.split("|")[1:-1])
        for line in PAGE.read_text().partition("\n## Quantized")[0].splitlines()
        if line[:1] == "|"
    ]
    assert rows[0] == families.HEADINGS
    return {row[0]: row for row in rows[2:]}


def grid(config: Any, family: str) -> tuple[int, int]:
    page = max(16, page_multiple(plan_layers(config, family)))
    return page, 2 * page


@cache
def tiny(family: str) -> Facts:
    """The description of a tiny model on the meta device."""
    config = tiny_config(family)
    return describe(family, config, torch.bfloat16, *grid(config, family))


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
def test_shapes_alone_say_what_a_loaded_checkpoint_shows(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.bfloat16)
    save_checkpoint(model, tmp_path)
    page, chunk = grid(model.config, family)
    loaded = load_model(str(tmp_path), page_tokens=page, chunk_tokens=chunk)
    layout = StateLayout.of(model, page, chunk)
    parameters = sum(tensor.numel() for tensor in model.parameters())
    assert layout.pools == loaded.layout.pools
    assert families.facts(family, model.config, layout, "bfloat16", parameters) == tiny(family)
    ids = torch.randint(VOCAB, (1, chunk + 20), generator=torch.Generator().manual_seed(7))
    workspaces = Workspace(layout, 1000), Workspace(loaded.layout, 1000)
    for piece in (ids[:, :chunk], ids[:, chunk:]):
        made, read = forward(model, workspaces[0], piece), forward(loaded.model, workspaces[1], piece)
    # Bits may differ: where weights lie in memory decides by which kernel they are multiplied.
    torch.testing.assert_close(made, read, rtol=0, atol=0.2)


@pytest.mark.long
def test_the_table_supports_what_is_proven_and_nothing_else() -> None:
    supported = {row[1]: row for row in documented().values() if not row[2].startswith("no: ")}
    assert set(supported) == {tiny(family).model_type for family in PROVEN}
    assert [row[0] for row in documented().values()] == [family.name for family in FAMILIES]
    for family in PROVEN:
        row, facts = supported[tiny(family).model_type], tiny(family)
        kinds = {re.sub(r"\d+", "", pool.name) for pool in facts.pools}
        assert {re.sub(r"\d+", "", pool.split(" (")[0]) for pool in row[2].split(", ")} == kinds
        assert row[5] == families.columns(facts)[5]


@pytest.mark.long
@pytest.mark.parametrize("name", CHEAP)
def test_the_page_says_what_the_command_prints(name: str) -> None:
    for facts in survey([family for family in FAMILIES if family.name == name]):
        assert documented()[facts.name] == families.columns(facts)


def test_what_cannot_be_kept_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LAYERS, "DynamicIndexedLayer")
    unknown = Family("Tomorrow", "TomorrowConfig")
    wrong = Family("Broken", "LlamaConfig", {"num_attention_heads": 7})
    sparse = next(family for family in FAMILIES if family.name == "DeepSeek-V3.2")
    facts = {fact.name: fact for fact in survey([unknown, wrong, sparse])}
    assert not any(fact.supported for fact in facts.values())
    assert "has no TomorrowConfig" in facts["Tomorrow"].why
    assert "refuses this config" in facts["Broken"].why
    assert "layer 0 keeps its state in a DynamicIndexedLayer" in facts["DeepSeek-V3.2"].why


def test_what_was_found_once_is_read_from_the_users_cache_until_the_file_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = Family("Small", "LlamaConfig", {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 32})
    found = [*families._surveyed(None, None, [small])]
    assert [fact.supported for fact in found] == [True]
    assert [*families._surveyed(None, None, [])] == found, "no model was built"
    (file,) = (tmp_path / "kvarve").iterdir()
    file.write_text('[{"name": "Small"}]')
    assert [*families._surveyed(None, None, [small])] == found
    assert [*families._surveyed(16, 64, [])] == [], "of other sizes nothing is known"


@pytest.mark.long
def test_pages_are_as_large_as_a_model_needs_unless_told_otherwise() -> None:
    v4 = next(family for family in FAMILIES if family.name == "DeepSeek-V4")
    small = Family(v4.name, v4.config_class, {"num_hidden_layers": 3})
    (facts,) = survey([small])
    assert (facts.page_tokens, facts.chunk_tokens, facts.page_multiple, facts.shortest_hit) == (128, 256, 128, 257)
    (facts,) = survey([small], page_tokens=64)
    assert not facts.supported and "must be a multiple such as 128" in facts.why


def test_a_layout_that_depends_on_what_the_code_reads_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, seen = StateLayout.of, list[int]()

    def of(model: Any, *sizes: int) -> StateLayout:
        seen.append(int(torch.zeros(1, dtype=torch.long, device="meta").item()))
        found = theirs(model, *sizes)
        return replace(found, pools=found.pools[: 1 - seen[-1]])

    monkeypatch.setattr(StateLayout, "of", of)
    with pytest.raises(families._Opaque, match="depend on values"):
        describe("odd", tiny_config("qwen3"), torch.bfloat16, 16, 32)
    assert seen == [0, 1]


@pytest.mark.long
def test_a_model_with_eyes_is_described_by_the_part_that_reads() -> None:
    """Its picture tower wants to see values that the meta device has not."""
    whole = Family("Gemma 4 with eyes", "Gemma4Config", {"text_config": tiny_config("gemma4").to_dict()})
    (facts,) = survey([whole])
    assert facts.supported, facts.why
    assert [pool.name for pool in facts.pools] == [pool.name for pool in tiny("gemma4").pools]
