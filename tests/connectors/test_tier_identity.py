"""What may change a byte of what vLLM keeps is in the identity; what may not is not."""

import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvarve.connectors.vllm.chunks import namespace_of
from kvarve.connectors.vllm.vllm_identity import groups_fields, model_digest, plain, weights_of


class Config(SimpleNamespace):
    """A configuration of vLLM or transformers, as far as the identity reads it."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class Backend(Enum):
    FLASH = 1
    OTHER = 2


def configs(**changes: Any) -> Any:
    """vLLM's configuration, with some fields changed by their path, such as `model_config__dtype`."""
    found = Config(
        model_config=Config(
            model="/models/a",
            revision=None,
            hf_config=Config(
                model_type="a",
                hidden_size=64,
                rope={"theta": 1e6},
                vision_config={"model_type": "v", "depth": 4, "_name_or_path": "/models/v"},
                _name_or_path="/models/a",
                transformers_version="5",
            ),
            architectures=["AForCausalLM"],
            dtype="bfloat16",
            quantization=None,
            quantization_config=None,
            enforce_eager=False,
            max_model_len=4096,
            seed=0,
        ),
        cache_config=Config(cache_dtype="auto", mamba_cache_dtype="auto", kv_cache_layout="LBHNC", gpu_blocks=100),
        parallel_config=Config(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        load_config=Config(load_format="auto", download_dir=None),
        attention_config=Config(backend=Backend.FLASH),
        speculative_config=None,
        lora_config=None,
    )
    for path, value in changes.items():
        *places, last = path.split("__")
        it = found
        for place in places:
            it = getattr(it, place)
        setattr(it, last, value)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__hf_config__hidden_size": 65},
        {"model_config__hf_config__rope": {"theta": 1e4}},
        {"model_config__hf_config__vision_config": {"model_type": "v", "depth": 5}},
        {"model_config__architectures": ["AForOther"]},
        {"model_config__dtype": "float32"},
        {"model_config__quantization": "fp8"},
        {"model_config__quantization_config": {"bits": 4}},
        {"model_config__enforce_eager": True},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__calculate_kv_scales": True},
        {"cache_config__mamba_ssm_cache_dtype": "float32"},
        {"cache_config__kv_cache_layout": "LBNHC"},
        {"parallel_config__tensor_parallel_size": 2},
        {"attention_config__backend": Backend.OTHER},
        {"attention_config__flash_attn_version": 3},
        {"use_v2_model_runner": True},
        {"lora_config": Config(lora_dtype="float32")},
        {"speculative_config": Config(method="eagle", model="d", num_speculative_tokens=3)},
    ],
    ids=str,
)
def test_what_may_change_a_byte_changes_the_identity(change: dict[str, Any]) -> None:
    assert model_digest(configs(**change)) != model_digest(configs())


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model": "/elsewhere/a"},
        {"model_config__hf_config___name_or_path": "/elsewhere/a"},
        {"model_config__hf_config__vision_config": {"model_type": "v", "depth": 4, "_name_or_path": "/elsewhere/v"}},
        {"model_config__max_model_len": 8192},
        {"model_config__seed": 7},
        {"cache_config__gpu_blocks": 200},
        {"parallel_config__data_parallel_size": 8},
    ],
    ids=str,
)
def test_what_changes_no_byte_does_not(change: dict[str, Any]) -> None:
    assert model_digest(configs(**change)) == model_digest(configs())


def test_the_longest_context_counts_where_positions_depend_on_it() -> None:
    rope = {"model_config__hf_config__rope": {"rope_type": "longrope"}}
    short, long = (configs(**rope, model_config__max_model_len=tokens) for tokens in (4096, 8192))
    assert model_digest(short) != model_digest(long)


def test_groups_tell_their_layers_and_what_they_keep() -> None:
    def of(layers: list[str], spec: str) -> dict[str, object]:
        return groups_fields(Config(kv_cache_groups=[Config(layer_names=layers, kv_cache_spec=spec)]))

    assert len({namespace_of(each) for each in (of(["l.0"], "x"), of(["l.1"], "x"), of(["l.0"], "y"))}) == 3


def test_weights_are_named_read_or_found_in_the_hub_s_cache(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 99)
    asked = []

    def snapshot(name: str, **more: object) -> str:
        asked.append((name, more))
        return str(tmp_path)

    local = weights_of(configs(model_config__model=str(tmp_path)), "", find=snapshot)
    assert asked == []
    hub = configs(model_config__model="org/name", model_config__revision="r2")
    assert weights_of(hub, "", find=snapshot) == local
    assert asked == [("org/name", {"revision": "r2", "cache_dir": None, "local_files_only": True})]
    assert len({local, weights_of(hub, "read", find=snapshot), weights_of(hub, "v1", find=snapshot)}) == 3


@pytest.mark.parametrize("how", ["written", "renamed", "linked"])
def test_weights_whose_files_are_newer_than_the_engine_are_like_no_others(tmp_path: Path, how: str) -> None:
    """vLLM has read the files before kvarve does: a trainer may have overwritten them since."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode() * 99)
    (tmp_path / "latest").symlink_to(tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    began_s = max(file.stat().st_ctime, (tmp_path / "latest").lstat().st_ctime)
    engine = configs(model_config__model=str(tmp_path / "latest"))
    expected = weights_of(engine, "", began_s)
    assert expected == weights_of(engine, "")
    while (tmp_path / "later").touch() or (tmp_path / "later").stat().st_ctime <= began_s:
        (tmp_path / "later").unlink()
    if how == "written":
        file.write_bytes(file.read_bytes())
    elif how == "renamed":
        (tmp_path / "new" / "model.safetensors").rename(file)
    else:
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to(tmp_path / "new")
    assert len({expected, *(weights_of(engine, "", began_s) for _ in range(2))}) == 3
    assert weights_of(engine, "v1", began_s) == "named v1"


def test_a_draft_model_s_weights_count_once_and_too(tmp_path: Path) -> None:
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode() * 9)
    alone = configs(model_config__model=str(tmp_path / "model"))
    own, others = (
        configs(
            model_config__model=str(tmp_path / "model"),
            speculative_config=Config(draft_model_config=Config(model=str(tmp_path / it), revision=None)),
        )
        for it in ("model", "draft")
    )
    assert weights_of(alone, "") == weights_of(own, "") != weights_of(others, "")


def test_any_value_becomes_plain_and_without_addresses() -> None:
    value = {"a": [1, 2.5, float("inf"), None, True], "b": {3, 1}, "c": Backend.FLASH, "d": object(), "e": Config(x=1)}
    assert json.loads(json.dumps(plain(value))) == {
        "a": [1, "2.5", "inf", None, True],
        "b": ["1", "3"],
        "c": "Backend.FLASH",
        "d": "object",
        "e": {"x": 1},
    }
