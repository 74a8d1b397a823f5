"""Folders that cannot be served are refused in one line, the same by `kvarve models` and `kvarve serve`."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvarve.errors import KvarveError, ModelError
from kvarve.reference.engine.families import describe_model, lines
from kvarve.reference.engine.model import check_model, load_model
from tests.sim.models import save_checkpoint, tiny_model

Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    save_checkpoint(tiny_model("qwen3"), folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "folder"))


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(KvarveError) as e:
        ask()
    text = str(e.value)
    assert "\n" not in text and len(text) < 700, text
    return text


def both(folder: Path) -> str:
    """The message of `models`, which is also that of `serve`."""
    said = refusal(lambda: describe_model(str(folder), "auto", 64, 256))
    assert refusal(lambda: load_model(str(folder))) == said
    assert refusal(lambda: check_model(str(folder))) == said, "it is known before any weight is read"
    return said


def config(folder: Path, **changed: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changed))


def in_shards(folder: Path) -> dict[str, str]:
    """Divide the weights between two files; which weight is in which."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {name: shard for shard, part in shards.items() for name in part}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def with_tensor(name: str, dtype: torch.dtype) -> Break:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights[name] = torch.zeros(4, 4).to(dtype)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


# --- quantized weights

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("aqlm", {"quantization_config": {"quant_method": "aqlm", "nbits_per_codebook": 16}}),
    ("unheard-of", {"quantization_config": {"quant_method": "unheard-of"}}),
    ("NVFP4_AWQ", {"quantization_config": {"quant_algo": "NVFP4_AWQ"}}),
    ("unknown", {"quantization_config": {}}),
    ("vptq", {"a": {"b": {"compression_config": {"quant_method": "vptq"}}}}),
]


@pytest.mark.parametrize(("method", "changed"), WAYS, ids=[method for method, _ in WAYS])
def test_quantized_weights_of_other_formats_are_refused_by_their_config(
    folder: Path, method: str, changed: dict[str, Any]
) -> None:
    config(folder, **changed)
    assert f"qwen3: its weights are quantized ({method}), which this version cannot load: it reads" in both(folder)
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    assert "quantized" in both(folder), "the config alone says so"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.self_attn.q_proj.weight", torch.float8_e4m3fn),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", torch.uint8),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.float32),
        ("model.layers.0.mlp.up_proj.weight", torch.int8),
    ],
)
def test_quantized_weights_are_found_in_the_files_where_the_config_is_silent(
    folder: Path, name: str, dtype: torch.dtype
) -> None:
    with_tensor(name, dtype)(folder)
    assert f"model.safetensors: {name} is quantized (" in both(folder)


# --- models that are not ours


def test_a_checkpoint_whose_code_would_have_to_be_run_is_refused_and_it_is_not_run(folder: Path) -> None:
    config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    assert "mine: transformers" in both(folder) and not (folder / "ran").exists()


# --- files


def no_shard(folder: Path) -> None:
    in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def shard_of_another(folder: Path) -> None:
    index = in_shards(folder)
    write_index(folder, index | {"model.unheard_of": "model-00001-of-00002.safetensors"})


def shard_elsewhere(folder: Path) -> None:
    index = in_shards(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "outside.safetensors")
    write_index(folder, dict.fromkeys(index, "../outside.safetensors"))


def a_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def renamed(name: str, other: str) -> Break:
    def rename(folder: Path) -> None:
        (path,) = folder.glob(f"{name}*")
        path.rename(path.with_name(path.name.replace(name, other)))

    return rename


def huge_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)


def append(folder: Path, data: bytes, anew: bool = False) -> None:
    with (folder / "model.safetensors").open("wb" if anew else "ab") as file:
        file.write(data)


BROKEN: list[tuple[str, Break, str]] = [
    ("no-shard", no_shard, "no model-00002-of-00002.safetensors, which model.safetensors.index.json names"),
    ("shard-of-another", shard_of_another, "1 weights are not in it, such as model.unheard_of"),
    ("shard-elsewhere", shard_elsewhere, "no ../outside.safetensors, which"),
    ("empty-index", lambda folder: (in_shards(folder), write_index(folder, {}))[1], "it has no weight_map"),
    ("another-name", renamed("model", "consolidated"), "no model.safetensors.index.json, only consolidated"),
    (
        "bin",
        renamed("model.safetensors", "pytorch_model.bin"),
        "only pytorch_model.bin: convert it to safetensors first",
    ),
    ("tiktoken", renamed("tokenizer.json", "tiktoken.model"), "TikTokenConverter"),
    ("no-weights", lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
    ("a-folder", lambda folder: (a_file(folder).unlink(), a_file(folder).mkdir())[1], "model.safetensors: not a file"),
    ("torn", lambda folder: a_file(folder).write_bytes(a_file(folder).read_bytes()[:-1]) and None, "truncated"),
    ("no-header", lambda folder: append(folder, struct.pack("<Q", 4) + bytes(100), True), "not a safetensors file"),
    ("huge-header", huge_header, "not a safetensors file: Error while deserializing header: header too large"),
    ("too-long", lambda folder: append(folder, b"more"), "damaged or not a safetensors file"),
    ("no-tokenizer", lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    ("tokenizer", lambda folder: (folder / "tokenizer.json").write_text('{"model": 7}') and None, "tokenizer"),
    ("adapter", lambda folder: (folder / "adapter_config.json").write_text("{}") and None, "it holds an adapter"),
    ("deep-config", lambda folder: (folder / "config.json").write_text('{"a":' * 100_000) and None, "config.json"),
    ("no-config", lambda folder: (folder / "config.json").unlink(), "no config.json"),
    ("bad-config", lambda folder: (folder / "config.json").write_text("{'no': json") and None, "config.json"),
    ("type", lambda folder: config(folder, model_type=["qwen3"]), "names no model_type"),
    ("unknown-type", lambda folder: config(folder, model_type="hal9000"), "does not know this architecture"),
    ("images", lambda folder: config(folder, model_type="siglip_vision_model"), "is not a causal language model"),
    ("layers", lambda folder: config(folder, num_hidden_layers="four"), "num_hidden_layers"),
]


@pytest.mark.parametrize(("break_it", "complaint"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_broken_folder_is_refused_by_both_commands_before_a_weight_is_read(
    folder: Path, break_it: Break, complaint: str
) -> None:
    break_it(folder)
    assert complaint in both(folder)


def test_weights_in_shards_are_served(folder: Path) -> None:
    in_shards(folder)
    assert describe_model(str(folder), "auto", 64, 256).unloadable == ""
    load_model(str(folder))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_attention_heads": 7, "head_dim": None},
        {"num_hidden_layers": -3},
        {"hidden_act": "unheard-of"},
        {"dtype": "int8"},
        {"layer_types": ["full_attention", "unheard_of"]},
        {"max_position_embeddings": "many"},
    ],
    ids=str,
)
def test_no_config_ends_in_anything_but_one_line(folder: Path, changed: dict[str, Any]) -> None:
    config(folder, **changed)
    refusal(lambda: load_model(str(folder)))
    try:
        describe_model(str(folder), "auto", 64, 256)
    except KvarveError as e:
        assert "\n" not in str(e)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            r"\d+ weights are not in the checkpoint, such as",
        ),
        ({"intermediate_size": 64}, "the weights cannot be loaded"),
    ],
)
def test_weights_of_another_shape_are_not_filled_up_with_random_numbers(
    folder: Path, changed: dict[str, Any], complaint: str
) -> None:
    config(folder, **changed)
    with pytest.raises(ModelError, match=complaint):
        load_model(str(folder))


def test_a_folder_with_a_config_alone_is_described_and_said_to_hold_no_weights(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    facts = describe_model(str(folder), "auto", 64, 256)
    assert facts.supported and "not from this folder: it has no weights" in lines(facts)
    assert "no *.safetensors" in refusal(lambda: load_model(str(folder)))
