"""From a name to a loaded model, or one line that says why not."""

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvarve.engine.model import check_model, forward, load_model
from kvarve.engine.state import Workspace
from kvarve.errors import ConfigError, ModelError
from kvarve.testing.models import VOCAB, byte_tokenizer, save_checkpoint, tiny_model

PAGE, CHUNK = 16, 64


def a_prompt(tokens: int) -> Tensor:
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3_5"
    save_checkpoint(tiny_model("qwen3_5"), folder)
    return folder


@pytest.fixture
def broken(qwen: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(qwen, tmp_path / "broken"))


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss", "deepseek_v32", "qwen4_exp"])
def test_any_checkpoint_folder_computes_what_the_model_that_was_saved_computed(family: str, tmp_path: Path) -> None:
    original = tiny_model(family)
    save_checkpoint(original, tmp_path)
    loaded = load_model(str(tmp_path), page_tokens=PAGE, chunk_tokens=CHUNK)
    ids = a_prompt(CHUNK)
    with torch.no_grad():
        expected = original(input_ids=ids).logits[0, -1]
    assert torch.allclose(forward(loaded.model, Workspace(loaded.layout, CHUNK), ids), expected, atol=1e-5)
    assert loaded.eos_ids == {256}
    assert loaded.max_tokens == 1024
    assert loaded.identity.pools == loaded.layout.pools
    assert f", attention {'eager' if family == 'gpt_oss' else 'sdpa'}, " in loaded.identity.numerics


def test_a_token_too_many_for_the_workspace_is_refused_before_it_is_computed(qwen: Path) -> None:
    loaded = load_model(str(qwen), page_tokens=PAGE, chunk_tokens=CHUNK)
    workspace = Workspace(loaded.layout, 40)
    with pytest.raises(AssertionError, match="token 41 is beyond the 40 of this workspace"):
        forward(loaded.model, workspace, a_prompt(41))
    assert workspace.tokens == 0


def test_models_share_pages_only_if_nothing_that_decides_a_bit_differs(qwen: Path, broken: Path) -> None:
    def identity(folder: Path, dtype: str = "auto", page_tokens: int = 64) -> bytes:
        return load_model(str(folder), dtype=dtype, page_tokens=page_tokens).identity.fingerprint()

    assert identity(qwen) == identity(broken) == identity(qwen, dtype="float32")
    assert identity(qwen) != identity(qwen, dtype="bfloat16")
    assert identity(qwen) != identity(qwen, page_tokens=128)
    weights = broken / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert identity(qwen) != identity(broken)
    shutil.copy(qwen / "model.safetensors", weights)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert identity(qwen) != identity(broken)


def test_a_check_reads_no_weights_but_says_what_is_wrong(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    check_model(str(qwen))
    with pytest.raises(ConfigError, match="a page of 48 tokens does not fit the model's prefill grid of 256"):
        load_model(str(qwen), page_tokens=48)
    with pytest.raises(ConfigError, match="unknown dtype 'int4'; known: auto, float32, bfloat16, float16"):
        load_model(str(qwen), dtype="int4")


def trouble(name: str | Path) -> str:
    """The one line that check_model says, which load_model says as well."""
    with pytest.raises(ModelError) as checked:
        check_model(str(name))
    with pytest.raises(ModelError) as loaded:
        load_model(str(name))
    assert str(checked.value) == str(loaded.value)
    assert "\n" not in str(checked.value)
    return str(checked.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere: no such folder" in trouble(tmp_path / "nowhere")


def test_a_builtin_that_does_not_exist_is_answered_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tiny-hybrid").mkdir()
    monkeypatch.setattr("kvarve.engine.model.BUILTIN", tmp_path)
    assert trouble("builtin:huge") == "there is no builtin:huge; known: builtin:tiny-hybrid"


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", r"no \*.safetensors"),
        ("tokenizer.json", "no tokenizer.json"),
    ],
)
def test_a_file_that_is_missing_is_named(broken: Path, file: str, complaint: str) -> None:
    (broken / file).unlink()
    assert complaint.replace("\\", "") in trouble(broken)


def test_weights_in_another_format_are_to_be_converted(broken: Path) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    assert "no *.safetensors, only pytorch_model.bin: convert it to safetensors first" in trouble(broken)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["{'no': json", "", "[]"])
def test_a_broken_file_is_named(broken: Path, file: str, content: str) -> None:
    (broken / file).write_text(content)
    assert file in trouble(broken)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "hal9000"}, "does not know this architecture"),
        ({"model_type": "vit"}, "not a causal language model"),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "names no model_type"),
        ({"model_type": "qwen3_5_text", "num_hidden_layers": "four"}, "num_hidden_layers"),
    ],
)
def test_a_config_that_cannot_work_is_refused(broken: Path, config: dict[str, object], complaint: str) -> None:
    (broken / "config.json").write_text(json.dumps(config))
    assert complaint in trouble(broken)


@pytest.mark.parametrize("bytes_left", [0, 5, 100, -1])
def test_truncated_weights_are_found_by_their_size(broken: Path, bytes_left: int) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:bytes_left])
    assert "model.safetensors: truncated" in trouble(broken)


def test_a_file_of_another_kind_is_not_taken_for_weights(broken: Path) -> None:
    (broken / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"\x00" * 100)
    assert "not a safetensors file" in trouble(broken)


def test_a_checkpoint_that_lacks_a_weight_is_not_filled_up_with_random_numbers(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "layer_types": [*config["layer_types"], "full_attention"]}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\d+ weights are not in the checkpoint, such as model.layers.3"):
        load_model(str(broken))


def test_a_model_whose_frequencies_change_beyond_a_length_is_served_up_to_that(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2 * CHUNK}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    model = tiny_model("llama", rope_parameters=rope)
    save_checkpoint(model, tmp_path)
    loaded = load_model(str(tmp_path), page_tokens=PAGE, chunk_tokens=CHUNK)
    assert loaded.max_tokens == 2 * CHUNK < model.config.max_position_embeddings

    def differ_by(tokens: int) -> float:
        """By how much the logits after `tokens` tokens differ when they are computed in chunks."""
        ids, workspace = a_prompt(tokens), Workspace(loaded.layout, 1024)
        for piece in ids.split(CHUNK, dim=1):
            logits = forward(loaded.model, workspace, piece)
        with torch.no_grad():
            return float((loaded.model(input_ids=ids).logits[0, -1] - logits).abs().max())

    assert differ_by(loaded.max_tokens) < 1e-4
    assert differ_by(3 * CHUNK) > 0.01, "which is why it is not served any further"


def test_weights_of_another_shape_are_refused(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelError, match="the weights cannot be loaded"):
        load_model(str(broken))


def test_a_chat_is_written_as_the_template_says_or_refused(qwen: Path) -> None:
    loaded = load_model(str(qwen))
    assert loaded.render_chat([{"role": "user", "content": "hei"}]) == "user: hei\nassistant:"
    with pytest.raises(ModelError, match="refuses these messages: unknown role tool"):
        loaded.render_chat([{"role": "tool", "content": "hei"}])
    with pytest.raises(ModelError, match="refuses these messages"):
        loaded.render_chat([{"role": "user", "content": None}])
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        replace(loaded, tokenizer=bare).render_chat([])
