"""GPTQ, AWQ and NVFP4: numbers worked out by hand, and folders and configs that are refused in one line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvarve.errors import KvarveError, ModelError
from kvarve.reference.engine.families import describe_model
from kvarve.reference.engine.model import check_model, load_model
from kvarve.reference.engine.packed import LAYOUTS, NVFP4, Parts, Settings, packed_modules
from kvarve.reference.engine.quantized import unreadable
from tests.sim.quantized_models import FORMATS, save_quantized

Weights = dict[str, Tensor]
GPTQ = {"bits": 4, "group_size": 4, "sym": False}
AWQ = {"bits": 4, "group_size": 2}


def words(*rows: list[int]) -> Tensor:
    """int32 of numbers that are written as they are in memory, without a sign."""
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def matrix(layout: str, config: dict[str, Any], **parts: Tensor) -> Tensor:
    return LAYOUTS[layout].matrix(LAYOUTS[layout].settings(config), parts)


# --- numbers by hand


def a_gptq_weight(g_idx: list[int]) -> Weights:
    """8 inputs, 8 outputs, 2 groups of 4. Output 0 has the codes 0 to 7, output 1 has 15 to 8, the others 8.

    Stored zero points are 7, but that of output 0 in group 1, which is 15, and of output 1 in group 1, which is 2.
    """
    return {
        "qweight": words([0x76543210, 0x89ABCDEF, *[0x88888888] * 6]),
        "qzeros": words([0x77777777], [0x7777772F]),
        "scales": torch.tensor([[0.5] * 8, [2.0] * 8], dtype=torch.float16),
        "g_idx": torch.tensor(g_idx, dtype=torch.int32),
    }


def test_a_gptq_number_is_its_code_less_one_more_than_the_stored_zero_point_times_the_scale_of_its_group() -> None:
    weight = matrix("gptq", GPTQ | {"desc_act": False}, **a_gptq_weight([0, 0, 0, 0, 1, 1, 1, 1]))
    # Group 0: (code - 8) * 0.5. Group 1: (code - 0) * 2 for output 0, (code - 3) * 2 for output 1.
    assert weight[0].tolist() == [-4.0, -3.5, -3.0, -2.5, 8.0, 10.0, 12.0, 14.0]
    assert weight[1].tolist() == [3.5, 3.0, 2.5, 2.0, 16.0, 14.0, 12.0, 10.0]
    assert weight[2:].unique().tolist() == [0.0]


def test_g_idx_names_the_group_of_each_input_of_gptq() -> None:
    weight = matrix("gptq", GPTQ | {"desc_act": True}, **a_gptq_weight([1, 0, 1, 0, 0, 1, 1, 0]))
    assert weight[0].tolist() == [0.0, -3.5, 4.0, -2.5, -2.0, 10.0, 12.0, -0.5]
    assert weight[1].tolist() == [24.0, 3.0, 20.0, 2.0, 1.5, 14.0, 12.0, 0.0]


def test_gptq_v2_stores_zero_points_as_they_are() -> None:
    config = GPTQ | {"desc_act": False, "checkpoint_format": "gptq_v2"}
    weight = matrix("gptq", config, **a_gptq_weight([0, 0, 0, 0, 1, 1, 1, 1]))
    assert weight[0].tolist() == [-3.5, -3.0, -2.5, -2.0, -22.0, -20.0, -18.0, -16.0]
    assert weight[1].tolist() == [4.0, 3.5, 3.0, 2.5, 18.0, 16.0, 14.0, 12.0]
    assert weight[2].tolist() == [0.5] * 4 + [2.0] * 4


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [0x7F7F7F7F, 0x80808080])
def test_8_bits_of_symmetric_gptq_are_less_128_however_that_is_stored(kind: str, stored: int) -> None:
    config = {"bits": 8, "group_size": -1, "sym": True, "checkpoint_format": kind}
    scales = torch.tensor([[0.25, 1.0, 1.0, 1.0]])
    weight = matrix(
        "gptq", config, qweight=words([0xFF817F00, *[0x80808080] * 3]), qzeros=words([stored]), scales=scales
    )
    assert weight.tolist() == [[-32.0, -0.25, 0.25, 31.75], *[[0.0] * 4] * 3]


def test_an_awq_word_has_outputs_0_2_4_6_1_3_5_7_from_its_lowest_bits() -> None:
    parts = {
        # By output, from 0 to 7: input 0 has the codes 0, 4, 1, 5, 2, 6, 3, 7; input 1 has 15; 2 and 3 have 9.
        "qweight": words([0x76543210], [0xFFFFFFFF], [0x99999999], [0x99999999]),
        # Group 0: zero points 1, 0, 2, 0, 3, 0, 4, 0. Group 1: 8, but 15 of output 7.
        "qzeros": words([0x00004321], [0xF8888888]),
        "scales": torch.tensor([[0.5] * 7 + [4.0], [1.0, 2.0] * 4], dtype=torch.float16),
    }
    weight = matrix("awq", AWQ, **parts).T
    assert weight[0].tolist() == [-0.5, 2.0, -0.5, 2.5, -0.5, 3.0, -0.5, 28.0]
    assert weight[1].tolist() == [7.0, 7.5, 6.5, 7.5, 6.0, 7.5, 5.5, 60.0]
    assert weight[2].tolist() == weight[3].tolist() == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, -12.0]


def test_awq_without_zero_points_counts_from_8() -> None:
    scales = torch.tensor([[0.5] * 8])
    weight = matrix("awq", AWQ | {"zero_point": False}, qweight=words([0x76543210], [0x8888888F]), scales=scales)
    assert weight.T.tolist() == [[-4.0, -2.0, -3.5, -1.5, -3.0, -1.0, -2.5, -0.5], [3.5, *[0.0] * 7]]


def an_nvfp4_weight() -> tuple[Tensor, Tensor]:
    """One output, 32 inputs: all 16 numbers from 0 to -6 in order, then 1 and -1 in turn; scales 2 and 0.5."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0xA2] * 8]], dtype=torch.uint8)
    return packed, torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)


def test_the_global_scale_of_compressed_tensors_divides_and_that_of_modelopt_multiplies() -> None:
    packed, scales = an_nvfp4_weight()
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers += [-number for number in numbers]
    scale = torch.tensor([4.0])
    read = matrix(NVFP4, {}, weight_packed=packed, weight_scale=scales, weight_global_scale=scale)
    assert read.tolist() == [[number * 0.5 for number in numbers] + [0.125, -0.125] * 8]
    read = matrix("modelopt", {"quant_algo": "NVFP4"}, weight=packed, weight_scale=scales, weight_scale_2=scale)
    assert read.tolist() == [[number * 8.0 for number in numbers] + [2.0, -2.0] * 8]


# --- folders


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("packed")

    def a_folder(format_: str) -> Path:
        return folder / format_ if (folder / format_).exists() else save_quantized(format_, folder / format_)

    return a_folder


@pytest.fixture
def copy_of(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda format_: Path(shutil.copytree(made(format_), tmp_path / "folder"))


def refusal(folder: Path) -> str:
    """The message of `models`, which is also that of `serve`."""
    said = set()
    for ask in (lambda: describe_model(str(folder), "auto", 16, 64), lambda: load_model(str(folder)), None):
        with pytest.raises(KvarveError) as e:
            ask() if ask is not None else check_model(str(folder))
        said.add(str(e.value))
    assert len(said) == 1, said
    text = said.pop()
    assert "\n" not in text and len(text) < 500
    return text


def change(folder: Path, **changed: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changed
    (folder / "config.json").write_text(json.dumps(config))


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 3}, "bits 3 is not read, only 4 and 8"),
    ("gptq", {"group_size": 0}, "group_size 0 is not read"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read, only gptq and gptq_v2"),
    ("awq", {"version": "gemv"}, "version 'gemv' is not read, only gemm"),
    ("awq", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is not a list of names"),
    ("nvfp4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not read, only dense weights"),
    (
        "nvfp4",
        {"config_groups": {"a": {"weights": {"num_bits": 8}}}},
        "config_groups: a: num_bits 8 is not read, only 4",
    ),
    (
        "nvfp4",
        {"format": "mixed-precision", "config_groups": {"a": {"format": NVFP4}, "b": {"format": "float-quantized"}}},
        "nvfp4-pack-quantized is read alone, not together with other formats",
    ),
    ("modelopt_fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not read, only nvfp4 and fp8"),
    ("modelopt", {"quant_algo": "FP8"}, "config_groups: group_0: num_bits 4 is not read, only 8"),
]


@pytest.mark.parametrize(
    ("format_", "changed", "complaint"), SETTINGS, ids=[f"{a}-{[*b]}-{c[-9:]}" for a, b, c in SETTINGS]
)
def test_settings_that_are_not_read_are_refused_by_the_config_alone(
    copy_of: Callable[[str], Path], format_: str, changed: dict[str, Any], complaint: str
) -> None:
    change(folder := copy_of(format_), **changed)
    method = FORMATS[format_][3]["quant_method"]
    said = refusal(folder)
    assert "config.json: qwen3" in said or "config.json: deepseek_v3" in said
    assert f"its weights are quantized ({method}): {complaint}" in said
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == said


def without(part: str) -> Callable[[Weights], None]:
    def drop(weights: Weights) -> None:
        del weights[f"{UP}.{part}"]

    return drop


def put(part: str, new: Callable[[Tensor], Tensor]) -> Callable[[Weights], None]:
    def replace(weights: Weights) -> None:
        weights[f"{UP}.{part}"] = new(weights[f"{UP}.{part}"]).contiguous()

    return replace


def beside(part: str) -> Callable[[Weights], None]:
    return lambda weights: weights.update({f"{UP}.{part}": torch.ones(8)})


UP = "model.layers.0.mlp.up_proj"
BROKEN: list[tuple[str, Callable[[Weights], None], str]] = [
    ("gptq", without("qzeros"), "up_proj: no qzeros, without which qweight cannot be read"),
    ("gptq", without("qweight"), "up_proj.g_idx is there without a packed qweight"),
    ("gptq", put("qweight", lambda old: old[:-1]), "up_proj.g_idx is [64], and [56] by its qweight and the config"),
    ("gptq", put("scales", lambda old: old.to(torch.int8)), "up_proj.scales is I8, not F16 or BF16 or F32"),
    ("gptq", put("qweight", lambda old: old[0]), "up_proj.qweight is not a matrix: [64]"),
    ("gptq", put("g_idx", lambda old: old + 1), "up_proj.g_idx names groups from 1 to 2, and there are 2"),
    ("gptq", beside("weight"), "up_proj.weight is beside a packed qweight, and this version does not know what for"),
    (
        "gptq_v2",
        put("qzeros", lambda old: old + 1),
        "up_proj.qzeros are not all in the middle, and the config says sym",
    ),
    (
        "awq",
        put("qweight", lambda old: old[:-8]),
        "up_proj.qweight is [56, 8], whose inputs are not whole groups of 32",
    ),
    ("nvfp4", without("weight_global_scale"), "up_proj: no weight_global_scale, without which"),
    (
        "nvfp4",
        put("weight_global_scale", lambda old: old.repeat(2)),
        "up_proj.weight_global_scale is [2], and [] by its",
    ),
    (
        "modelopt_fp8",
        put("weight_scale", lambda old: old.repeat(2)),
        "up_proj.weight_scale is [2], and [] by its weight",
    ),
    (
        "modelopt_fp8",
        beside("weight_scale_2"),
        "up_proj.weight_scale_2 is beside a packed weight, and this version does",
    ),
    (
        "modelopt_fp8",
        lambda weights: weights.update({f"{UP}s.fused": torch.ones(8).to(torch.float8_e4m3fn)}),
        "up_projs.fused is F8_E4M3, and no weight that is known",
    ),
    ("modelopt", put("weight_scale_2", lambda old: old * float("nan")), "weight_scale_2 is nan, not a number above 0"),
]


@pytest.mark.parametrize(("format_", "break_it", "complaint"), BROKEN, ids=[f"{a}-{c[8:30]}" for a, _, c in BROKEN])
def test_a_truncated_or_contradictory_folder_is_refused_before_a_weight_is_dequantized(
    copy_of: Callable[[str], Path], format_: str, break_it: Callable[[Weights], None], complaint: str
) -> None:
    weights = load_file((folder := copy_of(format_)) / "model.safetensors")
    break_it(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert complaint in refusal(folder)


@pytest.mark.parametrize(
    ("format_", "changed", "complaint"),
    [
        ("gptq", {"desc_act": False}, "g_idx is not in order, and the config says desc_act false"),
        ("gptq", {"bits": 8}, "qzeros is [2, 8], and [1, 16] by its qweight and the config"),
        ("awq", {"modules_to_not_convert": ["self_attn"]}, "qweight is packed, and the config says that it is not"),
        ("modelopt", {"ignore": ["model.layers.1*"]}, "weight is packed, and the config says that it is not"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    copy_of: Callable[[str], Path], format_: str, changed: dict[str, Any], complaint: str
) -> None:
    change(folder := copy_of(format_), **changed)
    assert complaint in refusal(folder)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats()
    | st.sampled_from(["gptq", "gemm", NVFP4, "NVFP4", "FP8", "\n"]),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.sampled_from(["weights", "format", "a\n"]), each),
    max_leaves=5,
)
OF_A_CONFIG = (
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "dynamic",
    "version",
    "zero_point",
    "format",
)
OF_A_CONFIG += (
    "config_groups",
    "ignore",
    "modules_to_not_convert",
    "quant_algo",
    "transform_config",
    "sparsity_config",
)


@settings(max_examples=30)
@given(
    st.sampled_from(["gptq", "awq", "compressed-tensors", "modelopt"]),
    st.dictionaries(st.sampled_from(OF_A_CONFIG), ANYTHING),
)
def test_whatever_a_config_says_it_is_read_or_refused_in_one_line(method: str, said: dict[str, Any]) -> None:
    text = unreadable({"quantization_config": {"quant_method": method, **said}})
    assert "\n" not in text and len(text) < 500


@settings(max_examples=30)
@given(
    st.sampled_from([*LAYOUTS]),
    st.dictionaries(
        st.sampled_from(["a", "b.c"]).flatmap(
            lambda module: st.sampled_from([f"{module}.{part}" for one in LAYOUTS.values() for part in one.dtypes])
        ),
        st.tuples(st.sampled_from(["I32", "F16", "U8", "F32", "F8_E4M3"]), st.lists(st.integers(0, 16), max_size=3)),
    ),
    st.sampled_from([None, 1, 16]),
)
def test_whatever_a_header_says_its_modules_are_whole_or_it_is_refused(
    name: str, said: dict[str, tuple[str, list[int]]], group: int | None
) -> None:
    layout, settings = LAYOUTS[name], Settings(group=group)
    try:
        found = packed_modules(layout, settings, {key: (dtype, (*shape,)) for key, (dtype, shape) in said.items()})
    except ModelError:
        return
    assert all(f"{module}.{part}" in said for module, parts in found.items() for part in parts)
    assert found and all(layout.packed in parts for parts in found.values())


# --- what is read all the same


def loaded(folder: Path) -> dict[str, Tensor]:
    return dict(load_model(str(folder), dtype="float32").model.state_dict())


def test_symmetric_gptq_that_stores_the_middle_itself_and_says_gptq_is_read_as_it_was_meant(
    made: Callable[[str], Path], copy_of: Callable[[str], Path]
) -> None:
    before = loaded(made("gptq_v2"))
    change(folder := copy_of("gptq_v2"), checkpoint_format="gptq")
    assert all(torch.equal(weight, before[name]) for name, weight in loaded(folder).items())


def test_one_weight_is_dequantized_at_a_time_though_transformers_reads_in_threads(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[torch.Size] = []
    layout, busy = LAYOUTS["awq"], Lock()

    def alone(settings: Settings, parts: Parts) -> Tensor:
        assert busy.acquire(blocking=False)
        try:
            done.append(layout.matrix(settings, parts).shape)
        finally:
            busy.release()
        return layout.matrix(settings, parts)

    monkeypatch.setitem(LAYOUTS, "awq", replace(layout, matrix=alone))
    load_model(str(made("awq")))
    assert len(done) == 14
