"""Which models can be cached, their pools, and why others cannot be: found by building them, not written down.

A model is built from its config on torch's meta device, where tensors have shapes and no bytes: 600 billion parameters
are described in seconds, and no weight is read.
"""

import hashlib
import importlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.overrides import TorchFunctionMode

from kvarve.errors import ConfigError, KvarveError, ModelError
from kvarve.pages.sizes import format_size
from kvarve.reference.engine.layers import page_multiple, plan_layers
from kvarve.reference.engine.model import (
    build_model,
    check_model,
    in_fp8,
    is_bare,
    load_model,
    read_config,
    torch_dtype,
)
from kvarve.reference.engine.model_errors import MISFITS, in_words
from kvarve.reference.engine.workspace import StateLayout
from kvarve.reference.engine.wrappers import require_causal
from kvarve.reports import check_file, is_stdout, plain_table, write_json
from kvarve.settings.commands import Models

# Where a shape depends on the number of nonzero values, torch can be told to assume that all are.
NOTHING_IS_ZERO: Any = importlib.import_module("torch.fx.experimental._config")


@dataclass(frozen=True)
class Family:
    """A family of models: its name, transformers' config class, and settings without a useful default."""

    name: str
    config_class: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        """The config with transformers' default sizes; ModelError if this version of transformers has none."""
        known = getattr(transformers, self.config_class, None)
        if known is None:
            raise ModelError(f"transformers {transformers.__version__} has no {self.config_class}")
        try:
            return known(**self.settings)
        except Exception as e:  # each config class checks its fields with exceptions of its own
            raise ModelError(f"transformers {transformers.__version__} refuses this config: {in_words(e)}") from e


# Of its published config, where it differs from DeepSeek-V3's.
KIMI_K2 = {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
}

HALF_ROTATED = {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}

FAMILIES = (
    Family("Qwen3", "Qwen3Config"),
    Family("Llama", "LlamaConfig"),
    Family("Qwen3.5", "Qwen3_5TextConfig"),
    Family("Qwen3.5 MoE", "Qwen3_5MoeTextConfig"),
    Family("Qwen3-Next", "Qwen3NextConfig"),
    Family("gpt-oss", "GptOssConfig"),
    Family("Gemma 3", "Gemma3TextConfig"),
    Family("Gemma 4", "Gemma4TextConfig"),
    Family("DeepSeek-V3", "DeepseekV3Config"),
    Family("DeepSeek-V3.2", "DeepseekV32Config"),
    Family("Kimi-K2", "DeepseekV3Config", KIMI_K2),
    Family("LongCat-Flash", "LongcatFlashConfig"),
    Family("GLM-5", "GlmMoeDsaConfig"),
    Family("GLM-5.3", "Glm5NextConfig"),
    Family("DeepSeek-V4", "DeepseekV4Config"),
    Family("Kimi-Linear", "KimiLinearConfig"),
    Family("Jamba", "JambaConfig"),
    # Without these its layers would all be of one kind.
    Family("Bamba", "BambaConfig", {"attn_layer_indices": [9, 18, 27]}),
    Family("Falcon-H1", "FalconH1Config"),
    Family("Nemotron-H", "NemotronHConfig"),
    Family(
        "Granite 4 (MoE hybrid)",
        "GraniteMoeHybridConfig",
        {"layer_types": [["linear_attention", "full_attention"][number % 10 == 9] for number in range(32)]},
    ),
    Family("Zamba2", "Zamba2Config"),
    Family("LFM2", "Lfm2Config", {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
    Family(
        "LFM2-MoE",
        "Lfm2MoeConfig",
        {"layer_types": [["conv", "full_attention"][number % 4 == 2] for number in range(32)]},
    ),
    Family("OLMo-hybrid", "OlmoHybridConfig"),
    Family("MiniMax-01", "MiniMaxConfig"),
    Family(
        "MiniMax-M3",
        "MiniMaxM3VLTextConfig",
        {"num_hidden_layers": 4, "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3},
    ),
    Family(
        "Qwen4 (experimental)",
        "Qwen4ExpTextConfig",
        {
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
        },
    ),
    # States alone.
    Family("Mamba", "MambaConfig"),
    Family("Mamba-2", "Mamba2Config"),
    Family("Falcon-Mamba", "FalconMambaConfig"),
    # Language models inside of models that take images, too.
    Family("Llama 4", "Llama4Config"),
    Family("Mistral 3", "Mistral3Config", {"text_config": {"model_type": "mistral", "sliding_window": None}}),
    Family("InternVL", "InternVLConfig"),
    Family("Qwen2.5-VL", "Qwen2_5_VLConfig"),
    Family("Qwen3-VL", "Qwen3VLConfig"),
    Family(
        "GLM-4V",
        "Glm4vConfig",
        {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **HALF_ROTATED}}},
    ),
    Family("Kimi-K2.5", "Kimi_K25Config", {"text_config": {"model_type": "kimi_k2", **KIMI_K2}}),
    Family("RWKV", "RwkvConfig"),
)


@dataclass(frozen=True)
class Pool:
    """A pool in figures: how many pages before a boundary are read (None: all), and the bytes of a page."""

    name: str
    lookback: int | None
    page_bytes: int
    buffers: int


@dataclass(frozen=True)
class Facts:
    """The facts of a family or a model. If it is not supported, `why` says why and the rest is empty."""

    name: str
    model_type: str
    supported: bool
    why: str = ""
    unloadable: str = ""  # why it cannot be loaded from its folder, such as for lack of weights
    dtype: str = ""
    parameters: int = 0
    page_tokens: int = 0
    chunk_tokens: int = 0
    page_multiple: int = 1
    shortest_hit: int = 0  # tokens
    bytes_per_token: float = 0.0
    bytes_per_snapshot: int = 0
    pools: tuple[Pool, ...] = ()


def facts(name: str, config: Any, layout: StateLayout, dtype: str, parameters: int) -> Facts:
    """The facts of a model with this layout."""
    return Facts(
        name=name,
        model_type=config.model_type,
        supported=True,
        dtype=dtype,
        parameters=parameters,
        page_tokens=layout.page_tokens,
        chunk_tokens=layout.chunk_tokens,
        page_multiple=layout.page_multiple,
        shortest_hit=layout.shortest_hit,
        bytes_per_token=layout.bytes_per_token,
        bytes_per_snapshot=layout.bytes_per_snapshot,
        pools=tuple(Pool(pool.name, pool.lookback, pool.payload_bytes, len(pool.buffers)) for pool in layout.pools),
    )


def describe(
    name: str, config: Any, dtype: torch.dtype, page_tokens: int, chunk_tokens: int, fp8: bool = False
) -> Facts:
    """The facts of a model of this config, without its weights.

    Raises ModelError or ConfigError as `StateLayout.of` does, and _Opaque if shapes alone do not tell.
    """
    try:
        with torch.device("meta"):
            model = build_model(config, dtype)
        model.set_experts_implementation("batched_mm")  # the one whose shapes are known in every dtype
        require_causal(model)
        layout = _layout(model, page_tokens, chunk_tokens, {} if fp8 else None)
    except MISFITS as e:
        raise ModelError(f"{name}: no model can be built of this config: {in_words(e)}") from e
    except RuntimeError as e:  # torch's words for a value that is read have "meta tensor" or "device meta"
        raise _Opaque(VALUES if "meta" in str(e) else in_words(e)) from e
    parameters = sum(tensor.numel() for tensor in model.parameters())
    return facts(name, model.config, layout, str(dtype).removeprefix("torch."), parameters)


VALUES = "shapes depend on values that its code reads, and without weights there are none"


class _Opaque(Exception):
    """A model does not compute on the meta device, as if its shapes depend on values; with weights it may."""


class _Answering(TorchFunctionMode):
    """Gives a number where a model reads a whole number out of a tensor without bytes, and where it asks which values
    are not zero, such as the experts that tokens go to, the indices of `number` + 1 values."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.asked = number, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta and not args[0].is_floating_point():
            self.asked = True
            return self.number
        if func is torch.Tensor.nonzero and args[0].is_meta and not (kwargs or {}).get("as_tuple"):
            self.asked = True
            return args[0].new_empty((self.number + 1, args[0].ndim), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def _layout(model: Any, *shape: Any) -> StateLayout:
    """The layout of a model on the meta device. If its code asks for values, such as the number of an expert, two
    answers have to give the same layout: otherwise it depends on them, and this raises _Opaque."""
    with NOTHING_IS_ZERO.patch(meta_nonzero_assume_all_nonzero=True):
        with _Answering(0) as answering:
            layout = StateLayout.of(model, *shape)
        if answering.asked:
            with _Answering(1):
                other = StateLayout.of(model, *shape)
            if other.pools != layout.pools:
                raise _Opaque(VALUES)
    return layout


def describe_model(
    name: str, dtype: str, page_tokens: int | None, chunk_tokens: int | None, kv_cache_dtype: str = "auto"
) -> Facts:
    """The facts of `builtin:...` or of a folder with a config.json; weights are read only if shapes depend on values.

    Other files in the folder have to be valid for `load_model`, or this raises its error.
    """
    config = read_config(name)
    loaded_as = torch_dtype(dtype, config)
    page, chunk = _grid(config, name, page_tokens, chunk_tokens)
    bare = is_bare(name)
    if not bare:
        check_model(name, page_tokens=page, chunk_tokens=chunk, dtype=dtype)
    try:
        found = describe(name, config, loaded_as, page, chunk, in_fp8(kv_cache_dtype))
        return replace(found, unloadable="it has no weights and no tokenizer yet") if bare else found
    except _Opaque as e:
        if bare:
            raise ModelError(f"{name}: it cannot be described from its config alone: {e}") from e
        loaded = load_model(name, dtype=dtype, page_tokens=page, chunk_tokens=chunk, kv_cache_dtype=kv_cache_dtype)
        parameters = sum(tensor.numel() for tensor in loaded.model.parameters())
        return facts(name, config, loaded.layout, loaded.identity.dtype, parameters)


def survey(
    families: Iterable[Family] = FAMILIES, page_tokens: int | None = None, chunk_tokens: int | None = None
) -> Iterator[Facts]:
    """The facts of each family in bfloat16, one after the other, since each takes a moment."""
    for family in families:
        model_type = family.config_class
        try:
            config = family.config()
            model_type = config.model_type
            page, chunk = _grid(config, family.name, page_tokens, chunk_tokens)
            yield describe(family.name, config, torch.bfloat16, page, chunk)
        except (KvarveError, _Opaque) as e:
            yield Facts(family.name, model_type, supported=False, why=str(e))


def page_of(config: Any, name: str, page_tokens: int = 64) -> int:
    """The tokens of a page: `page_tokens`, or the least multiple of it that this model can have."""
    return math.lcm(page_tokens, page_multiple(plan_layers(config, name)))


def _grid(config: Any, name: str, page_tokens: int | None, chunk_tokens: int | None) -> tuple[int, int]:
    """The given sizes, or else pages of 64 tokens and chunks of 256, or the next larger that this model can have."""
    if page_tokens is None:
        page_tokens = page_of(config, name)
    if chunk_tokens is None:
        chunk_tokens = math.lcm(256, page_tokens)
    if chunk_tokens % page_tokens:
        raise ConfigError(f"chunks must be whole pages of {page_tokens} tokens, got {chunk_tokens} tokens")
    return page_tokens, chunk_tokens


# --- for people


def reads(lookback: int | None) -> str:
    """How far back a pool reads, in words."""
    return "all pages" if lookback is None else f"last {lookback} page{'s' * (lookback > 1)}"


def takes(bytes_per_token: float, bytes_per_snapshot: int) -> str:
    """The size of a token and a snapshot, in words."""
    snapshot = f", a snapshot {format_size(bytes_per_snapshot)}" if bytes_per_snapshot else ""
    return f"a token takes {format_size(round(bytes_per_token))}{snapshot}"


def lines(fact: Facts) -> str:
    """One model that can be cached, line by line."""
    multiple = f", any multiple of {fact.page_multiple}" if fact.page_multiple > 1 else ""
    words = [
        ("model", f"{fact.name}, {fact.model_type}, {fact.dtype}, {fact.parameters:,} parameters"),
        ("pages", f"{fact.page_tokens} tokens{multiple}; prompts computed {fact.chunk_tokens} at a time"),
    ]
    for pool in fact.pools:
        size = f"{format_size(pool.page_bytes)} a page in {pool.buffers} buffers"
        words.append((f"pool {pool.name}", f"reads {reads(pool.lookback)}, {size}"))
    sizes = takes(fact.bytes_per_token, fact.bytes_per_snapshot)
    words.append(("hits", f"prompts of {fact.shortest_hit} tokens and more; {sizes}"))
    if fact.unloadable:
        words.append(("serve", f"not from this folder: {fact.unloadable}"))
    width = max(len(word) for word, _ in words)
    return "\n".join(f"  {word:<{width}}  {text}" for word, text in words)


def columns(fact: Facts) -> tuple[str, ...]:
    """One row of the table: family, type, pools, bytes per token, bytes per snapshot, page, shortest hit."""
    if not fact.supported:
        return (fact.name, fact.model_type, f"no: {fact.why}", "", "", "", "")
    pools = ", ".join(f"{pool.name} ({reads(pool.lookback)})" for pool in fact.pools)
    page = f"× {fact.page_multiple}" if fact.page_multiple > 1 else "any"
    snapshot = format_size(fact.bytes_per_snapshot) if fact.bytes_per_snapshot else "—"
    per_token = format_size(round(fact.bytes_per_token))
    return (fact.name, fact.model_type, pools, per_token, snapshot, page, f"{fact.shortest_hit} tokens")


HEADINGS = ("family", "model type", "pools (what they read)", "a token", "a snapshot", "page", "shortest hit")


def main(options: Models) -> int:
    """Print the table; with --model, of that model alone, and an error if it cannot be cached."""
    transformers.utils.logging.set_verbosity_error()
    check_file("--json", options.json)
    console = Console(quiet=is_stdout(options.json))
    if options.model is not None:
        shape = options.page_tokens, options.chunk_tokens
        found = [describe_model(options.model, options.dtype, *shape, options.kv_cache_dtype)]
    else:
        found = [*_surveyed(options.page_tokens, options.chunk_tokens)]
    write_json(options.json, {"transformers": transformers.__version__, "models": [asdict(fact) for fact in found]})
    if options.model is not None:
        console.print(lines(found[0]), soft_wrap=True, markup=False, highlight=False)
        return 0
    console.print(table([fact for fact in found if fact.supported]))
    for fact in found:
        if not fact.supported:
            console.print(f"{fact.name}: no: {fact.why}", markup=False, highlight=False)
    return 0


def _surveyed(
    page_tokens: int | None, chunk_tokens: int | None, families: Sequence[Family] = FAMILIES
) -> Iterator[Facts]:
    """The facts of all families, kept in a file of the user's cache until this code, torch or transformers change."""
    versions = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        versions.update(source.read_bytes())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvarve"
    except RuntimeError:  # a user without a home: nothing is kept
        cache = Path(os.devnull)
    file = cache / f"models-{page_tokens}-{chunk_tokens}-{versions.hexdigest()[:16]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # it is made anew then
        kept = json.loads(file.read_text())
        yield from [Facts(**each | {"pools": tuple(Pool(**pool) for pool in each["pools"])}) for each in kept]
        return
    found, console = list[Facts](), Console(stderr=True)
    if not console.is_terminal:
        console.print(f"building {len(families)} models without weights: this takes a minute, once")
    doing, quiet = "building models without weights", not console.is_terminal
    for family in track(families, doing, console=console, transient=True, disable=quiet):
        found += survey([family], page_tokens, chunk_tokens)
        yield found[-1]
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps([asdict(fact) for fact in found]))
        whole.replace(file)


def table(found: Iterable[Facts]) -> Table:
    """Families that can be cached, in 80 columns."""
    shown = plain_table("family", "pools (pages read)", right=("token", "snapshot", "page", "hit"))
    shown.columns[1].no_wrap, shown.columns[1].overflow = False, "fold"
    for fact in found:
        name, _, _, *sizes, hit = columns(fact)
        pools = ", ".join(f"{pool.name} ({pool.lookback or 'all'})" for pool in fact.pools)
        shown.add_row(name, pools, *sizes, hit.removesuffix(" tokens"))
    shown.caption, shown.caption_justify = CAPTION.format(version=transformers.__version__), "left"
    return shown


CAPTION = """\
sizes: of transformers {version}'s defaults, in bfloat16; --model DIR: a checkpoint's
snapshot: windows and states, kept where a prompt ends or branches off
page: its tokens are a multiple of this; hit: tokens of the shortest prompt that hits"""


def markdown() -> str:
    """The table for docs/families.md."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(columns(fact) for fact in survey())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
