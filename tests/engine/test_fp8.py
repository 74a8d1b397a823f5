"""Keys and values in FP8: what pages have, that no bit depends on how they came, and whose pages they are."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import Recorder
from safetensors.torch import load_file, save_file

from engines import LONG_S, Make, a_prompt, a_request
from engines import a_model as a_plain_model
from kvarve.errors import ConfigError, ModelError
from kvarve.pages.pools import Tier
from kvarve.reference.engine.batch import together
from kvarve.reference.engine.families import describe_model
from kvarve.reference.engine.layers import FP8, narrowed, widened
from kvarve.reference.engine.model import LoadedModel, forward, in_fp8, load_model
from kvarve.reference.engine.workspace import StateLayout, Workspace
from tests.sim.models import tiny_grid, tiny_model
from tests.sim.quantized_models import save_quantized

SCALES = {"layers.0.keys": 0.5, "layers.0.values": 0.5, "layers.1.keys": 0.25, "layers.1.values": 0.25}


@cache
def a_model(family: str) -> LoadedModel:
    plain = a_plain_model(family)
    layout = StateLayout.of(plain.model, *tiny_grid(family), {})
    return replace(plain, layout=layout, identity=replace(plain.identity, pools=layout.pools))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantized("modelopt_fp8", tmp_path_factory.mktemp("fp8") / "model")


def logits(model: LoadedModel) -> torch.Tensor:
    return forward(model.model, Workspace(model.layout, 64), torch.tensor([a_prompt(40)]))


# --- numbers


def test_a_number_is_the_nearest_of_fp8_that_is_a_scale_smaller_and_never_above_the_largest() -> None:
    numbers = torch.tensor([0.3, -1.06, 1000.0, -float("inf"), 20.0], dtype=torch.bfloat16)
    for scale, expected in ((1.0, [0.3125, -1.0, 448.0, -448.0, 20.0]), (4.0, [0.3125, -1.0, 1024.0, -1792.0, 20.0])):
        kept = narrowed(numbers, FP8, scale)
        assert kept.dtype == FP8
        assert widened(kept, torch.bfloat16, scale).tolist() == expected
    assert narrowed(numbers, torch.bfloat16, 4.0) is numbers


@pytest.mark.parametrize(
    ("family", "pools"), [("qwen3", {"attention"}), ("gemma3", {"attention", "window-9"}), ("qwen3_5", {"attention"})]
)
def test_pages_of_keys_and_values_have_a_quarter_of_float32s_bytes_and_states_stay(
    family: str, pools: set[str]
) -> None:
    ours, plain = a_model(family).layout, a_plain_model(family).layout
    for pool in plain.pools:
        share = 4 if pool.name in pools else 1
        assert pool.payload_bytes == share * ours.pool(pool.name).payload_bytes
    assert {pool.name for pool in plain.pools} == pools | ({"state"} if family == "qwen3_5" else set())


# --- the same bits


@pytest.mark.parametrize("family", ["qwen3", pytest.param("falcon_h1", marks=pytest.mark.long)])
def test_what_is_computed_in_a_batch_does_not_depend_on_the_type_of_the_pages(family: str) -> None:
    plain, model = a_plain_model(family), tiny_model(family)  # a model is tried once
    assert together(model, a_model(family).layout) == together(plain.model, plain.layout)


def test_a_hit_from_the_host_has_the_bits_of_a_cold_answer(make: Make, recorder: Recorder) -> None:
    engine = make(a_model("gemma3"), deterministic=True)
    engine.submit(a_request()).result(LONG_S)
    cold = recorder.take()
    assert engine.settle() and engine.flush([Tier.DEVICE]) > 0
    last = engine.submit(a_request()).result(LONG_S)[2]
    warm = recorder.take()
    assert last.usage is not None and last.usage.tiers[Tier.HOST] > 0
    assert warm and all(torch.equal(logits, cold[at]) for at, logits in warm.items())


# --- checkpoints


def test_logits_of_modelopts_fp8_are_those_of_its_weights_times_their_scales(folder: Path, tmp_path: Path) -> None:
    weights, plain = load_file(folder / "model.safetensors"), {}
    for name, weight in weights.items():
        if weight.dtype == FP8:
            plain[name] = (weight.float() * weights[f"{name}_scale"]).bfloat16()
        elif not name.endswith("_scale"):
            plain[name] = weight
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_hand, read = load_model(str(tmp_path)), load_model(str(folder))
    assert torch.equal(logits(by_hand), logits(read))
    assert read.identity.quantisation == "modelopt, dequantized" and read.layout.kv_cache_dtype == "auto"
    # ModelOpt's own file says the same where config.json says nothing.
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert torch.equal(logits(load_model(str(tmp_path))), logits(read)), section


def test_pages_in_fp8_are_scaled_as_the_checkpoint_says_and_are_read_by_no_other_model(folder: Path) -> None:
    plain, ours = (load_model(str(folder), kv_cache_dtype=each) for each in ("auto", "fp8_e4m3"))
    assert ours.layout.scales == SCALES
    unscaled = replace(ours.identity, quantisation=plain.identity.quantisation)
    assert len({each.fingerprint() for each in (plain.identity, ours.identity, unscaled)}) == 3
    assert [2 * pool.payload_bytes for pool in ours.layout.pools] == [pool.payload_bytes for pool in plain.layout.pools]
    told = describe_model(str(folder), "auto", None, None, "fp8_e4m3").pools
    assert [pool.page_bytes for pool in told] == [pool.payload_bytes for pool in ours.layout.pools]
    assert not torch.equal(logits(plain), logits(ours))
    tape = Workspace(ours.layout, 64)._tapes["layers.1.values"]
    assert tape.scale == 0.25 and tape._data.dtype == FP8


@pytest.mark.parametrize("wrong", [torch.zeros(()), torch.ones(2), torch.tensor(float("nan"))])
def test_a_scale_of_pages_that_is_no_number_above_0_is_refused(folder: Path, tmp_path: Path, wrong: Any) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors") | {"model.layers.1.self_attn.k_scale": wrong}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn.k_scale is .*, not a number above 0"):
        load_model(str(tmp_path), kv_cache_dtype="fp8_e4m3")


def test_another_type_of_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8_e4m3, got 'fp8_e5m2'"):
        in_fp8("fp8_e5m2")
