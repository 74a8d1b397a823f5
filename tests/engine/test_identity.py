"""Two models have one identity only if nothing differs that may change a bit; and a model that changes is noticed."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import SavedModule, adapt, adapted

import forks
from kvarve.errors import ModelError
from kvarve.pages.pools import ModelIdentity
from kvarve.reference.engine import identity
from kvarve.reference.engine.identity import Marks, config_digest, identity_of, numerics, without_threads
from kvarve.reference.engine.workspace import StateLayout
from tests.sim.models import tiny_model

CPU = torch.device("cpu")


def an_identity(model: Any) -> ModelIdentity:
    return identity_of(model, StateLayout.of(model, 16, 64))


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever is set here is as it was afterwards."""
    count, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(count)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.set_flags(True)


# --- config


class Color(Enum):
    RED = "red"


CONFIG: dict[str, Any] = {
    "model_type": "tiny",
    "hidden_size": 32,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "layer_types": ["full_attention", "sliding_attention"],
    "text_config": {"model_type": "tiny_text", "rms_norm_eps": 1e-6, "_name_or_path": "/one", "dtype": "float32"},
    "quantization_config": {"quant_method": "fp8", "dtype": "float8_e4m3fn"},
    "_name_or_path": "/models/one",
    "transformers_version": "5.23.0",
    "dtype": "bfloat16",
    "architectures": ["TinyForCausalLM"],
    "color": Color.RED,
    "sets": {3, 1, 2},
    "kind": torch.float16,
    "none": None,
}


@pytest.mark.parametrize(
    "other",
    [
        dict(reversed(CONFIG.items())),
        CONFIG | {"_name_or_path": "elsewhere", "transformers_version": "6", "dtype": None, "architectures": None},
        CONFIG | {"text_config": {"rms_norm_eps": 1e-6, "model_type": "tiny_text", "torch_dtype": "float16"}},
        CONFIG | {"sets": {2, 3, 1}, "layer_types": ("full_attention", "sliding_attention")},
    ],
    ids=["order", "names", "names-inside", "sets-and-tuples"],
)
def test_what_a_config_is_called_and_how_it_is_written_down_makes_no_other_digest(other: dict[str, Any]) -> None:
    assert config_digest(other) == config_digest(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 33},
        {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"text_config": {"model_type": "tiny_text", "rms_norm_eps": 1e-5}},
        {"quantization_config": {"quant_method": "fp8", "dtype": "float8_e5m2"}},
        {"unheard_of": 0},
        {"kind": torch.bfloat16},
        {"sets": {1, 2}},
    ],
    ids=str,
)
def test_a_config_that_differs_anywhere_else_has_another_digest(change: dict[str, Any]) -> None:
    assert config_digest(CONFIG | change) != config_digest(CONFIG)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    ("gpt_oss", {"sliding_window": 25}),
    ("gpt_oss", {"num_experts_per_tok": 1}),
    ("deepseek_v32", {"index_topk": 21}),
]


@pytest.mark.parametrize(("family", "changed"), CHANGES, ids=lambda each: str(each)[:40])
def test_models_with_the_same_weights_and_another_config_are_others(family: str, changed: dict[str, Any]) -> None:
    one, other = tiny_model(family), tiny_model(family, **changed)
    assert one.state_dict().keys() == other.state_dict().keys()
    other.load_state_dict(one.state_dict())
    found, changed_ = an_identity(one), an_identity(other)
    assert found.fingerprint() != changed_.fingerprint() and found.config != changed_.config


# --- weights


def flip(tensor: torch.Tensor, at: int) -> None:
    tensor.detach().view(-1).view(torch.uint8)[at] ^= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_weight_or_buffer_makes_another_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer counts though it is in no checkpoint; large tensors are read piece by piece."""
    model = tiny_model("qwen3", dtype)
    before = an_identity(model)
    monkeypatch.setattr(identity, "PIECE_BYTES", 100)
    for tensor in (*[*model.parameters()][:: len([*model.parameters()]) - 1], model.model.rotary_emb.inv_freq):
        flip(tensor, -1)
        assert an_identity(model).weights != before.weights
        flip(tensor, -1)
        assert an_identity(model) == before


def test_weights_are_told_apart_by_name_shape_and_type_as_well() -> None:
    model = tiny_model("qwen3")
    layers = model.model.layers
    before = an_identity(model).weights
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
    assert an_identity(model).weights != before
    half = tiny_model("qwen3").to(torch.bfloat16)
    assert an_identity(half).weights != before and an_identity(half).dtype == "bfloat16"


def test_another_process_makes_the_same_identity() -> None:
    script = (
        "import torch; torch.set_num_threads({threads})\n"
        "from kvarve.reference.engine.identity import identity_of\n"
        "from kvarve.reference.engine.workspace import StateLayout\n"
        "from tests.sim.models import tiny_model\n"
        "model = tiny_model('qwen3')\n"
        "print(identity_of(model, StateLayout.of(model, 16, 64)).fingerprint().hex())"
    )
    model, threads = tiny_model("qwen3"), torch.get_num_threads()
    ours = identity_of(model, StateLayout.of(model, 16, 64)).fingerprint().hex()
    words = [sys.executable, "-c", script.format(threads=threads)]
    said = forks.run(words, check=True, capture_output=True, text=True, timeout=200).stdout
    assert said.split()[-1] == ours


# --- numerics


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.backends.mkldnn.set_flags(False),
    ],
    ids=["threads", "precision", "deterministic", "no oneDNN"],
)
def test_a_setting_of_torch_that_rounds_otherwise_is_another_identity(
    threads: None, change: Callable[[], None]
) -> None:
    before = numerics([CPU])
    change()
    assert numerics([CPU]) != before


@pytest.mark.parametrize("name", identity.CHOICES)
def test_an_environment_that_chooses_other_kernels_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics([CPU])
    monkeypatch.setenv(name, "COMPATIBLE")
    assert f"{name}=COMPATIBLE" in numerics([CPU]) != before


def a_gpu(**change: Any) -> Any:
    return SimpleNamespace(**{"name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132} | change)


@pytest.mark.parametrize(
    "change", [{"name": "NVIDIA H200"}, {"major": 10}, {"multi_processor_count": 66}], ids=lambda each: next(iter(each))
)
def test_gpus_that_differ_are_told_apart(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    gpus = {"cuda:0": a_gpu(), "cuda:1": a_gpu(**change), "cuda:2": a_gpu()}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[str(device)])
    said = [numerics([torch.device(name), CPU]) for name in gpus]
    assert "NVIDIA H100 9.0 with 132 multiprocessors" in said[0]
    assert said[0] == said[2] != said[1]
    assert numerics([torch.device("cuda:0")]) != numerics([CPU]) != said[1]


def test_what_a_gpu_may_round_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: a_gpu())
    gpu, matmul = torch.device("cuda:0"), torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for allowed in (False, True):
            matmul.allow_tf32 = allowed
            assert ("with tf32+" in numerics([gpu])) == allowed
    finally:
        matmul.allow_tf32 = before
    for backend in torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION:
        with torch.nn.attention.sdpa_kernel(backend):
            told = numerics([gpu])
        math = backend == torch.nn.attention.SDPBackend.MATH
        assert ("+math attention" in told, "+flash attention" in told) == (math, not math)
        assert "+efficient attention" not in told and "+cudnn attention" not in told


# --- models without an identity


def test_weights_that_are_not_in_memory_are_refused() -> None:
    model = tiny_model("qwen3")
    layout = StateLayout.of(model, 16, 64)
    model.lm_head.weight = torch.nn.Parameter(torch.empty(300, 32, device="meta"))
    with pytest.raises(ModelError, match=r"lm_head\.weight is not in memory"):
        identity_of(model, layout)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.train(), r"call model.eval\(\) first"),
        (
            lambda model: model.model.norm.register_buffer("packed", torch.zeros(3).as_subclass(Packed)),
            "packed is a Packed, which is more than its bytes",
        ),
        (
            lambda model: setattr(model, "peft_config", {"default": SimpleNamespace(is_prompt_learning=True)}),
            "puts tokens of its own before each prompt",
        ),
        (
            lambda model: setattr(
                model, "peft_config", {"default": SimpleNamespace(peft_type="LORA", alora_invocation_tokens=[5, 6])}
            ),
            "looks at the whole prompt",
        ),
        (lambda model: setattr(model.config, "thing", SimpleNamespace(a=1)), r"config\.thing is a SimpleNamespace"),
    ],
)
def test_a_model_that_has_no_identity_is_refused(change: Callable[[Any], None], told: str) -> None:
    model = tiny_model("qwen3")
    layout = StateLayout.of(model, 16, 64)
    change(model)
    with pytest.raises(ModelError, match=told):
        identity_of(model, layout)


class Packed(torch.Tensor):
    """Weights whose meaning is not all in their bytes."""


# --- adapters


def test_adapters_at_work_are_told_apart_by_name_weights_scale_and_whether_they_are_merged() -> None:
    seen = {}
    model = adapt(tiny_model("qwen3"), "poet", "lawyer")
    layers = adapted(model)

    def note(what: str) -> None:
        seen[what] = an_identity(model)

    note("poet")
    for layer in layers:
        layer.set_adapter("lawyer")
    note("lawyer")
    layers[0].set_adapter("poet")
    note("one of each")
    for layer in layers:
        layer.set_adapter("poet")
    layers[0].scaling["poet"] = 0.5
    note("weaker")
    layers[0].scaling["poet"] = 2.0
    layers[0].enable_adapters(False)
    note("off in one")
    layers[0].enable_adapters(True)
    assert an_identity(model) == seen["poet"], "the same switches, the same identity"
    for layer in layers:
        layer.merge()
    note("merged")
    assert len({each.fingerprint() for each in seen.values()}) == len(seen)
    assert seen["poet"].adapters.startswith("poet (") and seen["one of each"].adapters.startswith("lawyer+poet (")


def test_a_module_that_was_saved_whole_with_an_adapter_is_switched_with_it() -> None:
    model = tiny_model("qwen3")
    model.model.embed_tokens = saved = SavedModule(model.model.embed_tokens, ["poet", "lawyer"])
    model.eval()
    poet, marks = an_identity(model), Marks.of(model)
    for switch in ({"_active_adapter": ["lawyer"]}, {"_disable_adapters": True}):
        before = {name: getattr(saved, name) for name in switch}
        vars(saved).update(switch)
        assert an_identity(model).fingerprint() != poet.fingerprint()
        with pytest.raises(ModelError, match="its adapters are"):
            marks.require_same(model)
        vars(saved).update(before)
        marks.require_same(model)


# --- is it still the same model?


def another(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.lm_head.weight.detach()[3].add_(1), "its weights have changed"),
        (another, "its weights have changed"),
        (lambda model: model.load_state_dict(tiny_model("qwen3", seed=1).state_dict()), "its weights have changed"),
        (lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight + 1), "its weights have changed"),
        (lambda model: model.train(), "it is in training mode"),
        (lambda model: setattr(model.config, "sliding_window", 7), "its config has changed"),
        (lambda model: model.set_attn_implementation("eager"), "it is computed by .*attention eager"),
        (lambda model: adapt(model, "poet"), "its adapters are poet .*, and were none"),
    ],
    ids=["in-place", "replaced", "loaded", "behind-torch", "training", "config", "attention", "adapter"],
)
def test_a_model_that_was_changed_is_noticed(change: Callable[[Any], None], told: str) -> None:
    model = tiny_model("qwen3")
    marks = Marks.of(model)
    with torch.no_grad():
        model(torch.zeros((1, 5), dtype=torch.long))
    marks.require_same(model)
    change(model)
    with pytest.raises(ModelError, match=f"no longer the model whose pages these are: {told}"):
        marks.require_same(model)


def test_a_model_that_was_changed_back_is_the_same() -> None:
    model = adapt(tiny_model("qwen3"), "poet", "lawyer")
    marks = Marks.of(model)
    for layer in adapted(model):
        layer.set_adapter("lawyer")
    with pytest.raises(ModelError, match=r"its adapters are lawyer .*, and were poet"):
        marks.require_same(model)
    for layer in adapted(model):
        layer.set_adapter("poet")
    marks.require_same(model)


def test_the_threads_are_all_that_is_left_out_of_the_numerics_for_any_number_of_ranks() -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(numerics([torch.device("cpu")], ["attention eager"]))
    finally:
        torch.set_num_threads(before)
    assert found[0] != found[1]
    assert without_threads(found[0]) == without_threads(found[1]) == found[0].replace(", threads 1", "")


def test_kernels_that_are_installed_are_told_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"causal-conv1d": "1.5.0", "flash-linear-attention": "0.4.1"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or real(name))
    identity._libraries.cache_clear()
    try:
        said = numerics([CPU])
    finally:
        identity._libraries.cache_clear()
    assert "causal-conv1d 1.5.0" in said and "flash-linear-attention 0.4.1" in said and "mamba-ssm" not in said


def test_a_model_whose_frequencies_follow_the_length_is_the_same_after_a_long_prompt() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=16)
    marks = Marks.of(model)
    with torch.no_grad():
        model(torch.zeros((1, 40), dtype=torch.long))
    marks.require_same(model)
