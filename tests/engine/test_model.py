"""From a name to a loaded model, or one line that says why not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvarve.errors import ConfigError, ModelError
from kvarve.reference.engine.model import check_model, choose_device, forward, load_model
from kvarve.reference.engine.workspace import Workspace
from tests.sim.models import VOCAB, byte_tokenizer, save_checkpoint, tiny_model

PAGE, CHUNK = 16, 64


def a_prompt(tokens: int) -> Tensor:
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3_5"
    save_checkpoint(tiny_model("qwen3_5"), folder)
    return folder


def test_a_token_too_many_for_the_workspace_is_refused_before_it_is_computed(qwen: Path) -> None:
    loaded = load_model(str(qwen), page_tokens=PAGE, chunk_tokens=CHUNK)
    workspace = Workspace(loaded.layout, 40)
    with pytest.raises(AssertionError, match="token 41 is beyond the 40 of this workspace"):
        forward(loaded.model, workspace, a_prompt(41))
    assert workspace.tokens == 0


def test_auto_takes_a_gpu_that_torch_can_use_and_else_says_how_to_use_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.cuda.is_available()
    assert choose_device("auto", tmp_path) == ("cuda" if gpu else "cpu") and not caplog.text
    assert choose_device("meta", tmp_path) == "meta"
    (tmp_path / "nvidia0").touch()
    choose_device("auto", tmp_path)
    assert gpu or ("this machine has a GPU" in caplog.text and "or give --device cpu" in caplog.text)


def test_a_check_reads_no_weights_but_says_what_is_wrong(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    check_model(str(qwen))
    with pytest.raises(ConfigError, match="a page of 48 tokens does not fit the model's prefill grid of 256"):
        load_model(str(qwen), page_tokens=48)
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, bfloat16, float16, got 'int4'"):
        load_model(str(qwen), dtype="int4")
    with pytest.raises(ConfigError, match=r"context_length must be at most .* as the model can attend to, got 9999999"):
        check_model(str(qwen), context_length=9999999)
    with pytest.raises(ModelError, match="nowhere: no such folder"):
        check_model("nowhere")
    with pytest.raises(ModelError, match="there is no builtin:huge; known: builtin:tiny"):
        check_model("builtin:huge")


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


def test_a_chat_is_written_as_the_template_says_or_refused(qwen: Path) -> None:
    loaded = load_model(str(qwen))
    assert (loaded.eos_ids, loaded.max_tokens) == ({256}, 1024)
    assert loaded.render_chat([{"role": "user", "content": "hei"}]) == "user: hei\nassistant:"
    with pytest.raises(ModelError, match="refuses these messages: unknown role tool"):
        loaded.render_chat([{"role": "tool", "content": "hei"}])
    with pytest.raises(ModelError, match="refuses these messages"):
        loaded.render_chat([{"role": "user", "content": None}])
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        replace(loaded, tokenizer=bare).render_chat([])
