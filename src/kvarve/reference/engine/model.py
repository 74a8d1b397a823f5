"""From a name to a model that computes: checkpoint, tokenizer, identity, one forward, text in and text out.

Local files only; no model hub is ever asked and no code of a checkpoint is ever run. An error in a checkpoint is one
line, raised before any weight is read if possible.
"""

import hashlib
import inspect
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import torch
import transformers
from safetensors import SafetensorError, safe_open
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvarve.errors import ConfigError, ModelError
from kvarve.pages.field_checks import require
from kvarve.pages.pools import HeadGroups, ModelIdentity, check_grid
from kvarve.reference.engine.identity import Marks, identity_of, weights_digest
from kvarve.reference.engine.layers import compute, plan_layers
from kvarve.reference.engine.model_errors import in_words, one_line
from kvarve.reference.engine.quantized import (
    Packing,
    dequantizing,
    method_of,
    section_of,
    unreadable,
    without_quantization,
)
from kvarve.reference.engine.rank_processes import Ranks
from kvarve.reference.engine.shards import divide, head_groups, with_groups, with_replicated
from kvarve.reference.engine.stepwise import make_resumable
from kvarve.reference.engine.workspace import StateLayout, Workspace, check_pages
from kvarve.reference.engine.wrappers import model_class, own_config, require_causal

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
BUILTIN = Path(__file__).parent / "builtin"
UNKNOWN_LIMIT = 32768  # tokens, for a model whose config names no limit, such as one without positions
CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
TIKTOKEN = "tiktoken.model"
GENERATION = "generation_config.json"
MODELOPT = "hf_quant_config.json"
# What calibration says of keys and values in FP8: model.layers.3.self_attn.k_proj.k_scale, and without the projection.
SCALE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?([kv])_scale")
# Types under which only code of a checkpoint knows a model, and the type under which transformers has the same.
ALIASES = {"kimi_k2": "deepseek_v3"}
# Signs of quantized weights in a file: dtypes and names.
PACKED_TYPES = ("F8_", "F6_", "F4")
PACKED_NAMES = ("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv", "_blocks", "absmax", "SCB")
WHOLE_NUMBERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with its tokenizer, layout, identity and limits."""

    name: str
    model: Any  # a transformers PreTrainedModel, in eval mode
    tokenizer: Any  # a transformers PreTrainedTokenizerFast
    layout: StateLayout
    identity: ModelIdentity
    max_tokens: int
    eos_ids: frozenset[int]
    marks: Marks | None = field(default=None, repr=False)  # of the model when its identity was made

    def require_same(self) -> None:
        """ModelError if the model is no longer the one that its identity was made of."""
        if self.marks is not None:
            self.marks.require_same(self.model)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt for the next answer, as the model's own chat template writes it, with tools and other variables.

        Raises ModelError if there is no template, or if it refuses these messages; ConfigError for a
        variable that would be a setting of the tokenizer's instead, such as another template.
        """
        if self.tokenizer.chat_template is None:
            raise ModelError(f"{self.name} has no chat template: use completions, or add chat_template.jinja to it")
        settings = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if taken := next((name for name in variables if name in settings), None):
            raise ConfigError(f"chat_template_kwargs must be variables of a template's own, got {taken!r}")
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as e:
            raise ModelError(f"the chat template of {self.name} refuses these messages: {one_line(e)}") from e
        return text


class Detokenizer:
    """Tokens in one by one, text out as soon as it is certain: never half a character.

    Each token is decoded together with those of the last text, since some tokenizers write the first token of a text
    without its leading space. Where bytes turn out to be no character, text that has been returned stays.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer.backend_tokenizer, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._last: list[int] = []  # tokens of the last whole text
        self._held: list[int] = []  # tokens after it, of which no text has been returned

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty in the middle of a character."""
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001  of no narrower type: with this token, those before it decode to another text
            return self.flush()
        if text is not None:
            self._last, self._held = self._held, []
            return text
        # A character has 4 bytes at most; bytes still undecodable after many tokens will stay so.
        return self.flush() if len(self._held) > 16 else ""

    def flush(self) -> str:
        """The text that was held back, at the end."""
        text = self._decode(self._last + self._held)[len(self._decode(self._last)) :]
        self._held = []
        self._stream = DecodeStream(self._last, self._skip)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))


def forward(model: Any, workspace: Workspace, ids: Tensor) -> Tensor:
    """Compute the tokens ids [1, n] after those in the workspace; the logits [vocabulary] after the last."""
    start, stop = workspace.tokens, workspace.tokens + ids.shape[1]
    assert stop <= workspace.max_tokens, f"token {stop} is beyond the {workspace.max_tokens} of this workspace"
    positions = torch.arange(start, stop, device=ids.device)[None]
    output = compute(model, workspace.cache, input_ids=ids, position_ids=positions, logits_to_keep=1)
    workspace.computed(ids.shape[1])
    workspace.arrived()
    logits: Tensor = output.logits[0, -1]
    return logits


def build_model(config: Any, dtype: torch.dtype) -> Any:
    """A model with random weights, or none on the meta device, in the dtypes in which a checkpoint would be loaded.

    transformers keeps some weights in float32 whatever the others' dtype, but only when it loads them.
    """
    model = _model_class(config)._from_config(own_config(config), dtype=dtype).eval()
    precise = {*(model._keep_in_fp32_modules_strict or ())} if dtype in (torch.float16, torch.bfloat16) else set()
    if dtype == torch.float16:
        precise |= {*(model._keep_in_fp32_modules or ())}
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_floating_point() and any(part in name for part in precise):
            weight.data = weight.data.float()
    return model


def read_config(name: str) -> Any:
    """The config of `builtin:...` or a folder, if it is that of a causal language model; ModelError otherwise."""
    folder = _folder(name)
    config = _read_config(folder)
    if model_class(config) is None:
        raise ModelError(f"{folder}: a {config.model_type} is not a causal language model that transformers knows")
    return config


def is_bare(name: str) -> bool:
    """Whether a folder holds a config and nothing else of a checkpoint: its model can be described, not loaded."""
    folder = _folder(name)
    return not (folder / TOKENIZER).exists() and not _weight_files(folder)


def check_model(
    name: str,
    *,
    page_tokens: int = 64,
    chunk_tokens: int = 256,
    dtype: str = "auto",
    context_length: int | None = None,
) -> None:
    """Check a model as far as possible without reading weights: raises what `load_model` would raise."""
    found = _Checkpoint.find(name, page_tokens, chunk_tokens, dtype)
    _check_context(context_length, token_limit(found.config))


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    page_tokens: int = 64,
    chunk_tokens: int = 256,
    attention: str = "sdpa",
    ranks: Ranks | None = None,
    rounded: bool = False,
    kv_cache_dtype: str = "auto",
) -> LoadedModel:
    """Load `builtin:...` or a folder with config.json, *.safetensors and tokenizer.json; with `ranks` this one's part.

    `rounded`: as `with_rounded_hits`; several ranks then store their pages by head group, where those divide, and share
    them with other numbers of ranks.
    `kv_cache_dtype` fp8_e4m3 keeps keys and values in FP8, with the checkpoint's scales where it has them.
    Prompts are computed in chunks of `chunk_tokens`. A model that has no scaled-dot-product attention gets "eager".
    Raises ModelError for an unusable checkpoint, ConfigError for settings that do not fit together.
    """
    found = _Checkpoint.find(name, page_tokens, chunk_tokens, dtype)
    scales = found.kv_scales() if in_fp8(kv_cache_dtype) else None
    tokenizer = found.tokenizer()
    if attention == "sdpa" and not _model_class(found.config)._supports_sdpa:
        attention = "eager"
    model = found.model(attention)
    try:
        require_causal(model)
        make_resumable(model)
        whole, weights = None, ""
        groups: list[HeadGroups | None] = []
        if ranks is not None:
            whole = StateLayout.of(model, page_tokens, chunk_tokens, scales)
            if rounded:
                groups, weights = head_groups(model, whole.pools), weights_digest(model)
            divide(model, ranks.rank, ranks.ranks, ranks.add_up, ranks.computing)
            ranks.assemble()
        model = model.to(device)
        layout = StateLayout.of(model, page_tokens, chunk_tokens, scales)
        if ranks is not None and whole is not None:
            pools = with_replicated(layout.pools, whole.pools)
            if rounded:
                pools = with_groups(pools, whole.pools, groups, ranks.rank, ranks.ranks)
            layout = replace(layout, pools=pools)
    except (RuntimeError, LookupError, ArithmeticError, AssertionError) as e:  # out of memory, or a broken model
        raise ModelError(f"{found.folder}: the model does not compute on {device}: {in_words(e)}") from e
    identity = identity_of(model, layout)
    if found.quantization:
        identity = replace(identity, quantisation=f"{found.quantization}, dequantized")
    if scales:
        digest = hashlib.sha256(repr(sorted(scales.items())).encode()).hexdigest()[:8]
        identity = replace(identity, quantisation=f"{identity.quantisation} pages scaled by {digest}".strip())
    if ranks is not None:
        identity = ranks.identity(identity, weights if identity.by_groups else "")
    loaded = LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        layout=layout,
        identity=identity,
        max_tokens=token_limit(model.config),
        eos_ids=_eos_ids(model, tokenizer),
        marks=Marks.of(model),
    )
    return with_rounded_hits(loaded) if rounded else loaded


def torch_dtype(dtype: str, config: Any) -> torch.dtype:
    """The dtype in which a checkpoint of this config is loaded. ConfigError for what is none of DTYPES."""
    require(dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", dtype)
    found: torch.dtype | None = config.dtype or config.get_text_config(decoder=True).dtype
    return (found or torch.float32) if dtype == "auto" else getattr(torch, dtype)


def in_fp8(kv_cache_dtype: str) -> bool:
    """Whether keys and values are kept in FP8. ConfigError for what is none of KV_CACHE_DTYPES."""
    known = ", ".join(KV_CACHE_DTYPES)
    require(kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", f"one of {known}", kv_cache_dtype)
    return kv_cache_dtype != "auto"


def with_rounded_hits(model: LoadedModel) -> LoadedModel:
    """The same model for a cache that shares pages whatever chunk computed them: prompts resume at every page.

    Chunks of other lengths round differently, so an answer depends in its last bits on what was cached, and these pages
    get other keys.
    """
    layout = replace(model.layout, rounded=True)
    identity = replace(
        model.identity, chunk_tokens=layout.grid_tokens, numerics=f"{model.identity.numerics}, hits rounded"
    )
    return replace(model, layout=layout, identity=identity)


def keeping_answers(model: LoadedModel) -> LoadedModel:
    """The same model for a cache that also keeps pages computed by decoding.

    Those pages differ in their last bits from prefilled ones, so they get other keys.
    """
    return replace(model, identity=replace(model.identity, numerics=f"{model.identity.numerics}, answers kept"))


def with_context(model: LoadedModel, tokens: int | None) -> LoadedModel:
    """The same model with a shorter context; ConfigError for one longer than it can attend to."""
    _check_context(tokens, model.max_tokens)
    return replace(model, max_tokens=tokens or model.max_tokens)


def _check_context(tokens: int | None, most: int) -> None:
    require(tokens is None or tokens <= most, "context_length", f"at most {most}, as the model can attend to", tokens)


def with_chat_template(model: LoadedModel, template: str | None) -> LoadedModel:
    """The model with another chat template, see `read_template`."""
    if template is not None:
        model.tokenizer.chat_template = read_template(template)
    return model


def read_template(template: str | None) -> str | None:
    """The text of a chat template: a file's, or the one given. ConfigError if it is none."""
    if template is None or any(sign in template for sign in ("{{", "{%")):
        text, source = template, "the text given"
    else:
        source = template
        try:
            text = Path(template).expanduser().read_text()
        except (OSError, ValueError) as e:
            why = one_line(e)
            raise ConfigError(f"chat_template must be a file with a Jinja template, got {template}: {why}") from None
    try:
        _compile_jinja_template(text or "")  # with the tags that templates may have
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError(f"chat_template must be a Jinja template, got {source}: {one_line(e)}") from None
    return text


@dataclass(frozen=True)
class _Checkpoint:
    """A folder that has passed the checks before loading."""

    name: str
    folder: Path
    config: Any
    dtype: str
    quantization: str  # the method, or empty
    files: tuple[Path, ...]  # of weights
    packing: Packing | None  # of weights that are not left to transformers

    @classmethod
    def find(cls, name: str, page_tokens: int, chunk_tokens: int, dtype: str) -> "_Checkpoint":
        require(dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", dtype)
        folder = _folder(name)
        config = read_config(name)
        check_pages(plan_layers(config, _model_class(config).__name__), page_tokens, str(folder))
        check_grid(page_tokens, chunk_tokens)
        content = _content(folder)
        method, packing = method_of(content), Packing.of(content)
        files = _check_weights(folder, method)
        if packing is not None:
            try:
                packing.check(files)
            except ModelError as e:
                raise ModelError(f"{folder}: its weights are quantized ({method}): {one_line(e)}") from None
        if not (folder / TOKENIZER).is_file():
            way = _way_from_tiktoken(folder)
            raise ModelError(f"{folder}: no {TOKENIZER}, which is the only form of tokenizer that is read{way}")
        _read_json(folder / TOKENIZER)
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{folder}: it holds an adapter, which this version does not load: merge it into the model"
            )
        checkpoint = cls(name, folder, config, dtype, method, files, packing)
        checkpoint.tokenizer()
        return checkpoint

    def tokenizer(self) -> Any:
        try:
            return PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        except Exception as e:  # the tokenizers library raises nothing narrower
            raise ModelError(f"{self.folder}: the tokenizer cannot be read: {one_line(e)}") from e

    def model(self, attention: str) -> Any:
        settings: dict[str, Any] = {
            "attn_implementation": attention,
            "use_safetensors": True,
            "local_files_only": True,
            "trust_remote_code": False,
            "output_loading_info": True,
        }
        if self.packing is not None:
            settings["generation_config"] = self._generation_config()
        try:
            if self.packing is not None:
                model, info = self._unpacked(self.packing, settings)
            else:
                with dequantizing(self.config):
                    model, info = _model_class(self.config).from_pretrained(
                        self.folder, config=own_config(self.config), dtype=self.dtype, **settings
                    )
        except Exception as e:  # models check their configs, and libraries their files, with exceptions of their own
            raise ModelError(f"{self.folder}: the weights cannot be loaded: {in_words(e)}") from e
        # transformers would leave these weights random.
        if missing := sorted(info["missing_keys"]):
            raise ModelError(f"{self.folder}: {len(missing)} weights are not in the checkpoint, such as {missing[0]}")
        if self.quantization:  # transformers leaves the other weights in the dtype of the file
            for weight in model.parameters():
                if weight.dtype != torch.float32:
                    weight.data = weight.data.to(model.config.dtype)
        return model.eval()

    def _unpacked(self, packing: Packing, settings: dict[str, Any]) -> Any:
        """The model; its packed weights are dequantized one by one, and transformers takes them for plain ones."""
        config = own_config(without_quantization(self.config))
        dtype = torch_dtype(self.dtype, config)
        with packing.opened(self.files) as weights:
            return _model_class(self.config).from_pretrained(
                None, config=config, dtype=dtype, state_dict=weights, **settings
            )

    def kv_scales(self) -> dict[str, float]:
        """The scales of keys and values in FP8 that the checkpoint has, by buffer."""
        scales = {}
        for path in self.files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  no mapping
                    if (match := SCALE.fullmatch(name)) is None:
                        continue
                    tensor = file.get_tensor(name).float()
                    if tensor.numel() != 1 or not 0 < tensor.item() < float("inf"):
                        raise ModelError(f"{path}: {name} is {tensor.tolist()!s:.80}, not a number above 0")
                    scales[f"layers.{match[1]}.{'keys' if match[2] == 'k' else 'values'}"] = tensor.item()
        return scales

    def _generation_config(self) -> Any:
        """That of the folder; None if it has none, which stands for that of the config."""
        if not (path := self.folder / GENERATION).exists():
            return None
        try:
            return GenerationConfig.from_pretrained(self.folder, local_files_only=True)
        except Exception as e:  # its fields are checked with exceptions of several kinds
            raise ModelError(f"{path}: {one_line(e)}") from e


def _model_class(config: Any) -> Any:
    """The class of a config that `read_config` would return; ModelError if there is none."""
    if (found := model_class(config)) is None:
        raise ModelError(f"a {config.model_type} is not a causal language model that transformers knows")
    return found


def _folder(name: str) -> Path:
    kind, colon, builtin = name.partition(":")
    if kind == "builtin" and colon:
        known = sorted(path.name for path in BUILTIN.glob("*") if path.is_dir())
        if builtin not in known:
            raise ModelError(f"there is no {name}; known: {', '.join(f'builtin:{one}' for one in known) or 'none'}")
        return BUILTIN / builtin
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{name}: no such folder; a model is 'builtin:...' or a folder with config.json")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ModelError(f"{name}: this user cannot read the folder")
    return folder


def _way_from_tiktoken(folder: Path) -> str:
    """What to do about a tokenizer in the form that Kimi's checkpoints have."""
    if not (folder / TIKTOKEN).is_file():
        return ""
    return (
        f": convert {TIKTOKEN}, with the pattern and the special tokens of its tokenizer's code, by "
        f"transformers.convert_slow_tokenizer.TikTokenConverter, and save it as {TOKENIZER}"
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(f"{path}: {one_line(e)}") from e
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content


def _content(folder: Path) -> Mapping[str, Any]:
    """Of config.json; if it does not speak of quantization, with what ModelOpt's own file says of it."""
    content = _read_json(folder / CONFIG)
    if section_of(content) is None and (path := folder / MODELOPT).is_file():
        if not isinstance(section := _read_json(path).get("quantization"), dict):
            raise ModelError(f"{path}: it has no object named quantization")
        if section.get("quant_algo") is not None:  # else the weights are plain
            return {**content, "quantization_config": {**section, "quant_method": "modelopt"}}
    return content


def _read_config(folder: Path) -> Any:
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(f"{folder}: no {CONFIG}")
    content = _content(folder)
    if not isinstance(model_type := content.get("model_type"), str):
        raise ModelError(f"{path}: it names no model_type")
    known, why = ALIASES.get(model_type, model_type), []
    if known not in transformers.CONFIG_MAPPING:
        why.append(f"transformers {transformers.__version__} does not know this architecture")
        if "auto_map" in content:
            why.append("code that comes with a checkpoint is never run")
    if trouble := unreadable(content):
        why.append(trouble)
    if why:
        raise ModelError(f"{path}: {model_type}: {'; '.join(why)}")
    try:
        if known != model_type:
            own = {key: value for key, value in content.items() if key != "auto_map"}
            return transformers.CONFIG_MAPPING[known].from_dict({**own, "model_type": known})
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # each config class checks its fields with exceptions of its own
        raise ModelError(f"{path}: {model_type}: {in_words(e)}") from e


def _weight_files(folder: Path) -> list[Path]:
    """Files of weights in any format."""
    kinds = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    return [path for path in sorted(folder.iterdir()) if path.suffix in kinds or path.name == INDEX]


def _check_weights(folder: Path, quantization: str) -> tuple[Path, ...]:
    """The files that transformers will read; ModelError unless they exist, are whole, and quantized only if so said."""
    single, files = folder / "model.safetensors", {path.name: path for path in _weight_files(folder)}
    if single.name in files:
        _check_safetensors(single, quantization)
        return (single,)
    if INDEX in files:
        index = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
            raise ModelError(f"{folder / INDEX}: it has no weight_map that says which weight is in which file")
        for shard in sorted(set(index.values())):
            if shard not in files:
                raise ModelError(f"{folder}: no {shard}, which {INDEX} names")
            there = _check_safetensors(folder / shard, quantization)
            if lost := sorted(name for name, where in index.items() if where == shard and name not in there):
                raise ModelError(f"{folder / shard}: {len(lost)} weights are not in it, such as {lost[0]}")
        return tuple(folder / shard for shard in sorted(set(index.values())))
    if tensors := [name for name in files if name.endswith(".safetensors")]:
        raise ModelError(f"{folder}: no model.safetensors and no {INDEX}, only {tensors[0]}")
    only = f", only {next(iter(files))}: convert it to safetensors first" if files else ""
    raise ModelError(f"{folder}: no *.safetensors{only}")


def _check_safetensors(path: Path, quantization: str) -> set[str]:
    """The names of its tensors; none of them is read."""
    if not path.is_file():
        raise ModelError(f"{path}: {'No such file: the link leads nowhere' if path.is_symlink() else 'not a file'}")
    try:
        with safe_open(path, framework="pt") as file:
            dtypes = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118  no mapping
    except OSError as e:
        raise ModelError(f"{path}: {one_line(e)}") from e
    except SafetensorError as e:
        raise ModelError(f"{path}: truncated, damaged or not a safetensors file: {one_line(e)}") from e
    for name, dtype in dtypes.items() if not quantization else ():
        numbers = dtype in WHOLE_NUMBERS and name.endswith(".weight")
        if numbers or dtype.startswith(PACKED_TYPES) or name.endswith(PACKED_NAMES):
            raise ModelError(f"{path}: {name} is quantized ({dtype}), and {CONFIG} does not say how")
    return {*dtypes}


def token_limit(config: Any) -> int:
    """The tokens that a model can attend to by its config, as far as their cached pages stay valid.

    Some position encodings ("longrope", "dynamic") change their frequencies once a sequence is longer than the original
    context: pages of its first chunks would differ from those that the same code computes then.
    """
    config = config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else UNKNOWN_LIMIT
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return limit


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens at which an answer ends, by the generation config (or the config) and by the tokenizer."""
    ids = model.generation_config.eos_token_id
    listed = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    if odd := [token for token in listed if token is not None and not isinstance(token, int)]:
        raise ModelError(f"an answer cannot end at a token {odd[0]!r}: eos_token_id is a whole number or several")
    return frozenset(token for token in listed if token is not None)


def choose_device(device: str, nodes: Path = Path("/dev")) -> str:
    """The device that `auto` stands for: a GPU if torch can use one, else the CPU. A GPU that only the system knows is
    warned of."""
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    if found := next((node for node in (nodes / "nvidia0", nodes / "kfd") if node.exists()), None):
        log.warning(
            "this machine has a GPU (%s), but this torch (%s) cannot use it, so the CPU computes: install a torch that "
            "can (pip install torch, see https://pytorch.org), or give --device cpu to say so",
            *(found, torch.__version__),
        )
    return "cpu"


def check_device(device: str) -> None:
    """ConfigError unless torch can compute there."""
    try:
        torch.ones(1, device=device).item()  # the "meta" device holds no data
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        why = str(e).splitlines()[0]
        raise ConfigError(f"device must be auto or one that torch can use, got {device!r}: {why}") from None


def quiet_libraries() -> None:
    """Silence the messages of transformers about the loading of checkpoints."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
