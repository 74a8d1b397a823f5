"""Checkpoints of models that also take images, and of types that only their own code knows, as models of text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from kvarve.errors import ModelError
from kvarve.reference.engine.families import describe_model
from kvarve.reference.engine.model import LoadedModel, load_model
from tests.sim.models import VOCAB, byte_tokenizer, save_checkpoint, tiny_config, tiny_model

OTHERS = ("llama4", "mistral3", "internvl", "qwen2_5_vl", "glm4v", "kimi_k25")
# What the names of a language model's weights begin with, in files as their publishers write them.
TOKENS = 70


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits
    return found


def some_ids() -> torch.Tensor:
    return torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(7))


def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), page_tokens=16, chunk_tokens=64)


@pytest.mark.parametrize("family", ["qwen3_vl", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
def test_a_model_that_takes_images_computes_text_without_what_computes_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    save_checkpoint(whole, tmp_path)
    found = loaded(tmp_path)
    # Llama 4's wrapper in transformers 5.24 asks the output of its text for images.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    with torch.no_grad():
        assert torch.equal(logits(found.model, some_ids()), whole(input_ids=some_ids()).logits)
    parameters = sum(weight.numel() for weight in found.model.parameters())
    assert parameters < sum(weight.numel() for weight in whole.parameters())
    described = describe_model(str(tmp_path), "auto", 16, 64)
    assert (described.parameters, described.unloadable) == (parameters, "")
    assert described.model_type == found.model.config.model_type


@pytest.mark.parametrize("family", [pytest.param("deepseek_v3", marks=pytest.mark.long), "kimi_k25"])
def test_kimi_k2_is_computed_as_deepseek_v3_and_its_code_is_not_run(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    save_checkpoint(model, tmp_path)
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model", "AutoTokenizer": ["mine.Tok", None]}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((tmp_path / name).read_text())
        if name == "config.json":
            content.get("text_config", content).update({"model_type": "kimi_k2", "auto_map": code})
        (tmp_path / name).write_text(json.dumps(content | {"auto_map": code}))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    found = loaded(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert torch.equal(logits(found.model, some_ids()), logits(model, some_ids()))
    assert found.tokenizer.encode("hei") == byte_tokenizer().encode("hei")
    assert describe_model(str(tmp_path), "auto", 16, 64).model_type == model.config.model_type


def test_a_model_that_attends_to_tokens_ahead_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("gemma3", use_bidirectional_attention=True), tmp_path)
    for read in (loaded, lambda folder: describe_model(str(folder), "auto", 16, 64)):
        with pytest.raises(ModelError, match="attends to tokens ahead"):
            read(tmp_path)
