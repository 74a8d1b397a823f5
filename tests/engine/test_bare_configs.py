"""`kvarve models --model DIR` of a config.json alone: described, or refused in one line that a person understands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RoFormerConfig, RoFormerForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvarve.cache.config import CacheConfig
from kvarve.errors import KvarveError, ModelError
from kvarve.reference.engine.families import Facts, describe_model
from kvarve.reference.engine.model import load_model
from kvarve.transformers import PrefixCachedModel
from tests.sim.models import COMMON, save_checkpoint

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
# What Python says of a config that lacks a value, and what is said of a folder that lacks weights.
NO_WORDS = ("NoneType", "has no attribute", "unsupported operand", "Traceback", "no *.safetensors", "'NoneType'")
SMALL = {**COMMON, "num_hidden_layers": 2}


def bare(folder: Path, model_type: str, **settings: Any) -> Facts:
    """What is said of a folder that holds such a config and nothing else."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **settings}))
    return describe_model(str(folder), "auto", None, None)


def refused(folder: Path, model_type: str, **settings: Any) -> str:
    with pytest.raises(KvarveError) as e:
        bare(folder, model_type, **settings)
    return str(e.value)


@pytest.mark.long
@pytest.mark.parametrize("model_type", TYPES)
def test_a_bare_config_of_every_type_is_described_or_refused_in_words(model_type: str, tmp_path: Path) -> None:
    try:
        facts = bare(tmp_path, model_type)
    except KvarveError as e:
        said = str(e)
        assert "\n" not in said and len(said) < 600
        assert not [words for words in NO_WORDS if words in said], said
    else:
        assert facts.supported and facts.pools and facts.unloadable


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("hunyuan_v1_dense", "the config gives no value for head_dim"),
        ("nemotron", "the config gives no value for num_key_value_heads"),
        ("dbrx", "the config has no rope_theta"),
        ("cohere_compass_text", "there is no 'full_attention' (modeling_cohere_compass.py, line "),
        ("reformer", "make sure that `is_decoder=True`."),
    ],
)
def test_a_config_without_a_value_is_refused_and_the_value_named(model_type: str, said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, model_type)


@pytest.mark.parametrize(
    ("model_type", "settings", "said"),
    [
        (
            "xlstm",
            {"hidden_size": 256, "num_heads": 2, "num_hidden_layers": 2},
            "keeps its state in a xLSTMCache, which",
        ),
        ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2}, "layer 0 (DynamicLayer) keeps nothing in the cache"),
        (
            "cpmant",
            {"hidden_size": 32, "num_hidden_layers": 1, "dim_head": 16},
            "keeps 36 tokens of a prompt of 4: it adds",
        ),
        (
            "bamba",
            {"hidden_size": 64, "num_hidden_layers": 2},
            "the current Cache seem to only contain LinearAttention",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_of_a_model_cannot_be_kept_is_said(
    model_type: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, model_type, **settings)


def test_a_model_whose_shapes_depend_on_values_is_said_to_need_weights(tmp_path: Path) -> None:
    said = refused(tmp_path, "jetmoe", hidden_size=32, num_hidden_layers=1, kv_channels=16, intermediate_size=32)
    assert "cannot be described from its config alone: shapes depend on values that its code reads" in said


AHEAD = {"model_type": "roformer", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
AHEAD |= {"intermediate_size": 32, "vocab_size": 300, "max_position_embeddings": 256, "initializer_range": 0.15}


def test_a_model_that_attends_to_tokens_ahead_and_does_not_say_so_is_refused_by_what_it_computes(
    tmp_path: Path,
) -> None:
    """RoFormer attends to all tokens unless its config says that it decodes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ahead, causal = (RoFormerForCausalLM(RoFormerConfig(**AHEAD, is_decoder=each)).eval() for each in (False, True))
    for name, model in (("ahead", ahead), ("causal", causal)):
        save_checkpoint(model, tmp_path / name)
    for use in (lambda: load_model(str(tmp_path / "ahead")), lambda: PrefixCachedModel(ahead, CacheConfig(1 << 20))):
        with pytest.raises(ModelError, match="RoFormerForCausalLM attends to tokens ahead"):
            use()
    assert load_model(str(tmp_path / "causal")).layout.pools


def test_a_wrapper_of_another_model_is_described_by_its_text(tmp_path: Path) -> None:
    """transformers computes a PP-Chart2Table by the class of another wrapper, GOT-OCR2."""
    facts = bare(tmp_path, "pp_chart2table", text_config={"model_type": "qwen2", **SMALL})
    assert [pool.name for pool in facts.pools] == ["attention"]
    assert facts.parameters < 100_000, "without what computes images"
