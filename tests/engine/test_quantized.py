"""Quantized checkpoints: what their publishers wrote is what is computed, and `models`, `serve`, `verify` agree."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvarve.cli.main import main
from kvarve.errors import ModelError
from kvarve.reference.engine import quantized
from kvarve.reference.engine.families import describe_model
from kvarve.reference.engine.model import load_model
from tests.sim.models import tiny_model
from tests.sim.quantized_models import FORMATS, save_quantized

SMALL = ("nvfp4", "modelopt")  # blocks, which take long to make
every_format = pytest.mark.parametrize(
    "format_", [pytest.param(each, marks=pytest.mark.long if each in SMALL else ()) for each in FORMATS]
)
OTHERS = [format_ for format_ in FORMATS if format_ != "awq"]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("quantized")


def a_folder(folders: Path, format_: str) -> Path:
    return folders / format_ if (folders / format_).exists() else save_quantized(format_, folders / format_)


@pytest.mark.parametrize("format_", ["awq", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
def test_models_describes_what_serve_loads(folders: Path, format_: str) -> None:
    folder = str(a_folder(folders, format_))
    facts, loaded = describe_model(folder, "auto", 16, 64), load_model(folder, page_tokens=16, chunk_tokens=64)
    assert facts.supported and not facts.unloadable
    assert facts.dtype == loaded.identity.dtype == "bfloat16"
    assert facts.parameters == sum(weight.numel() for weight in loaded.model.parameters())
    assert [pool.page_bytes for pool in facts.pools] == [pool.payload_bytes for pool in loaded.layout.pools]


@every_format
def test_the_loaded_weights_are_near_those_before_quantization_and_are_not_them(folders: Path, format_: str) -> None:
    loaded = load_model(str(a_folder(folders, format_)), dtype="float32")
    family, changed, _, about = FORMATS[format_]
    before = tiny_model(family, torch.bfloat16, **changed).state_dict()
    rounded = 0
    for name, weight in loaded.model.state_dict().items():
        error = (weight - before[name].float()).abs().max() / before[name].float().abs().max().clamp(min=1e-9)
        assert error < 0.3, name  # of 4 bits, the largest of a group may be cut off
        rounded += bool(error > 0)
    assert rounded >= 6
    assert loaded.identity.quantisation == f"{about['quant_method']}, dequantized"


def test_a_block_of_fp8_has_the_scale_of_its_own_place_even_where_the_last_block_is_short(folders: Path) -> None:
    """DeepSeek's latent projection has 576 rows, which are 4.5 blocks."""
    folder = a_folder(folders, "fp8")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    written, scales = weights[name].float(), weights[f"{name}_scale_inv"]
    assert written.shape == (160, 192) and scales.shape == (2, 2)
    read = dict(load_model(str(folder), dtype="float32").model.named_parameters())[name]
    for row, column in ((0, 0), (127, 127), (128, 0), (159, 191), (0, 128)):
        assert read[row, column] == written[row, column] * scales[row // 128, column // 128]


def test_an_mxfp4_number_is_its_code_times_the_power_of_two_of_its_group(folders: Path) -> None:
    folder = a_folder(folders, "mxfp4")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"
    blocks, exponents = weights[f"{name}_blocks"], weights[f"{name}_scales"]
    read = dict(load_model(str(folder), dtype="float32").model.named_parameters())[name]
    for expert, out, into in ((0, 0, 0), (1, 5, 33), (3, 63, 63), (2, 17, 2)):
        byte = int(blocks[expert, out, into // 32, into % 32 // 2])
        code = byte >> 4 if into % 2 else byte & 15
        number = FP4[code % 8] * (-1 if code > 7 else 1) * 2.0 ** (int(exponents[expert, out, into // 32]) - 127)
        assert read[expert, into, out] == number


def test_pages_of_a_quantized_checkpoint_are_not_those_of_an_unquantized_one_with_the_same_weights(
    folders: Path, tmp_path: Path
) -> None:
    quantized_ = load_model(str(a_folder(folders, "int8")))
    quantized_.model.save_pretrained(tmp_path)
    quantized_.tokenizer.save_pretrained(tmp_path)
    plain = load_model(str(tmp_path))
    assert plain.identity.weights == quantized_.identity.weights
    assert plain.identity.fingerprint() != quantized_.identity.fingerprint()


@pytest.mark.long
@every_format
def test_a_quantized_folder_is_verified(folders: Path, format_: str, tmp_path: Path) -> None:
    words = ("verify", "--model", a_folder(folders, format_), "--quick", "--json", tmp_path / "out")
    code = main([*map(str, (*words, "--page-tokens", 16, "--chunk-tokens", 64))])
    report = json.loads((tmp_path / "out").read_text())
    assert [row for row in (*report["paths"], *report["damages"]) if not row["ok"]] == []
    assert code == 0 and report["ok"] is True


def test_a_missing_package_is_named_with_the_extra_that_has_it(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_folder(folders, "fp8")
    monkeypatch.setitem(quantized.READ, "fp8", ("accelerate_that_is_not_there",))
    complaint = r"\(fp8\), which needs accelerate-that-is-not-there: install kvarve's extra 'quantized'"
    for ask in (lambda: load_model(str(folder)), lambda: describe_model(str(folder), "auto", 16, 64)):
        with pytest.raises(ModelError, match=complaint):
            ask()
