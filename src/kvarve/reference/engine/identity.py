"""Which model computed a page, to the last bit? The one place that makes a model's identity, for every integration.

The identity has everything that may change a bit of a page, and a model that hides some of it is refused: a needless
difference costs misses, a missing one wrong tokens. It is taken from the model in memory, after all changes (merged,
cast, adapted), and not from the files that it was loaded from.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
import transformers
import xxhash
from torch import Tensor

from kvarve import __version__
from kvarve.errors import ModelError
from kvarve.pages.pools import ModelIdentity
from kvarve.reference.engine.workspace import StateLayout

PIECE_BYTES = 1 << 26  # of weights that are copied to the CPU at once
SAMPLED, SAMPLED_VALUES = 8, 16  # tensors, and values of each, that are compared before each use
# Fields of a config for its name, its path and its writer. The dtype of the weights is a field of the identity.
NOT_OWN = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"})
# Packages whose kernels torch and transformers use in place of their own, where installed.
KERNELS = (
    *("flash-linear-attention", "fla-core", "causal-conv1d", "mamba-ssm", "mambapy", "xlstm", "kernels", "tilelang"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python", "xformers", "triton", "triton-windows"),
    *("deep-gemm", "sonic-moe", "quack-kernels", "grouped-gemm", "liger-kernel", "fast-hadamard-transform"),
    *("torchao", "bitsandbytes", "gptqmodel", "autoawq", "compressed-tensors", "optimum-quanto", "fbgemm-gpu", "hqq"),
)
WHOLE_PROMPT = frozenset({"XLORA", "PeftType.XLORA"})  # adapters that weigh each other by all of a prompt
# Settings of the libraries below torch that choose other kernels or change their rounding.
CHOICES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "USE_HUB_KERNELS"),
)


def identity_of(model: Any, layout: StateLayout) -> ModelIdentity:
    """The identity of a causal language model of transformers as it is in memory now, adapters included.

    Reads all weights once. ModelError if it cannot be told: weights that are not in memory, or that are more than their
    bytes, a model in training mode, adapters that put tokens before the prompt.
    """
    name, config = type(model).__name__, model.config
    if model.training:
        raise ModelError(f"{name} is in training mode, in which it computes at random: call model.eval() first")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise ModelError(
                f"{name}: an adapter puts tokens of its own before each prompt, and no key of a page has them"
            )
        if getattr(adapter, "alora_invocation_tokens", None) or str(getattr(adapter, "peft_type", "")) in WHOLE_PROMPT:
            raise ModelError(f"{name}: an adapter looks at the whole prompt, and a chunk is a part of it")
    weights, marks = weights_digest(model), Marks.of(model)
    return ModelIdentity(
        architecture=f"{config.model_type} {name}",
        config=config_digest(config.to_dict()),
        weights=weights,
        dtype=str(model.dtype).removeprefix("torch."),
        page_tokens=layout.page_tokens,
        chunk_tokens=layout.chunk_tokens,
        pools=layout.pools,
        adapters=marks.adapters,
        quantisation=_quantisation(config),
        numerics=marks.numerics,
    )


# --- its config


def config_digest(config: Mapping[str, Any]) -> str:
    """A digest of all fields of a config but `NOT_OWN`; their order does not matter.

    ModelError for a field that is no number, text, list or dictionary: two of them could not be told apart.
    """
    text = json.dumps(_plain(config, "config"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        skipped = NOT_OWN if "model_type" in value else frozenset()
        # JSON knows only text as names: 1 and "1" are equal, as in a saved config.
        return {str(key): _plain(each, f"{where}.{key}") for key, each in value.items() if key not in skipped}
    if isinstance(value, list | tuple):
        return [_plain(each, where) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(each, where), sort_keys=True) for each in value)
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    raise ModelError(f"{where} is a {type(value).__name__}, which cannot be compared")


def _quantisation(config: Any) -> str:
    """The quantization of the weights, for people; the config's digest has all of it."""
    found = config.to_dict().get("quantization_config") or {}
    return str(found.get("quant_method", "unknown")) if found else ""


# --- its weights


def weights_digest(model: Any) -> str:
    """A hash of all tensors of a model: their names, dtypes, shapes and bytes. It is not for security."""
    digest = xxhash.xxh3_128()
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        for piece in _pieces(name, tensor):
            digest.update(piece)
    return str(digest.hexdigest())


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model by name: its state, and buffers that are in no checkpoint, such as frequencies."""
    found: dict[str, Tensor] = {}
    for name, value in (*model.state_dict().items(), *model.named_buffers()):
        if isinstance(value, Tensor):
            found[name] = value
        elif value is not None:
            raise ModelError(f"{name} is a {type(value).__name__}, which cannot be compared")
    yield from sorted(found.items())


def _pieces(name: str, tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, piece by piece, from any device."""
    if tensor.device.type == "meta":
        raise ModelError(f"{name} is not in memory: load all of the model's weights")
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise ModelError(f"{name} is a {type(tensor).__name__}, which is more than its bytes: it cannot be told apart")
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for at in range(0, len(flat), PIECE_BYTES):
        yield flat[at : at + PIECE_BYTES].cpu().numpy().data


# --- its adapters


Switch = tuple[list[str], list[str], bool, list[tuple[str, str]]]


def _switch(module: Any) -> Switch | None:
    """The switches of a PEFT layer: active adapters, those merged into the weights, whether all are off, scales.

    None for any other module. Such layers are known by their attributes, since PEFT need not be installed; modules that
    were saved whole with an adapter have the same ones. A model has adapters as well, but merges none by itself.
    """
    merged = getattr(module, "merged_adapters", None) if hasattr(type(module), "active_adapters") else None
    if not isinstance(merged, list):
        return None
    scaling = module.__dict__.get("scaling")
    scales = sorted((str(name), str(scale)) for name, scale in scaling.items()) if isinstance(scaling, dict) else []
    return [*module.active_adapters], [*merged], bool(module.disable_adapters), scales


def _adapters(switches: Sequence[Switch]) -> str:
    """The active adapters and a digest of their switches; their tensors count among the weights. Empty if none."""
    if not switches:
        return ""
    names = sorted({name for active, merged, _, _ in switches for name in (*active, *merged)})
    digest = hashlib.sha256(json.dumps(switches).encode()).hexdigest()[:8]
    return f"{'+'.join(names) or 'none'} ({digest})"


# --- its kernels


def _choices(model: Any) -> list[str]:
    """The implementations of attention, experts and the like, which transformers does not write into a config."""
    found = set()
    for config in _configs(model.config):
        for what, name in (("attention", "_attn_implementation"), ("experts", "_experts_implementation")):
            if chosen := getattr(config, name, None):
                found.add(f"{what} {json.dumps(chosen, sort_keys=True) if isinstance(chosen, dict) else chosen}")
    if getattr(model, "_use_kernels", False):
        found.add("kernels of a hub")
    if getattr(model, "_compiled_call_impl", None) is not None:
        found.add("compiled")
    return sorted(found)


def _configs(config: Any) -> Iterator[Any]:
    """A config and those inside of it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _configs(value)


def numerics(devices: Iterable[torch.device], choices: Iterable[str] = ()) -> str:
    """All software and hardware that may change the last bit on these devices; `choices` are the model's.

    Threads count: torch's own products of [17, 8192] by [8192, 128] in float32 differ between 8 threads and 16, as
    partial sums are added in another order.
    """
    parts = [*_libraries(), *choices, f"float32 {torch.get_float32_matmul_precision()}"]
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic")
    parts += [f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ]
    parts += _processor()  # some operations run on it whatever the device
    for device in sorted({str(device) for device in devices} - {"cpu"}):
        parts += _accelerator(torch.device(device))
    return ", ".join(parts)


def without_threads(numerics: str) -> str:
    """What `numerics` says but for the number of threads."""
    return re.sub(r", threads \d+", "", numerics)


@cache
def _libraries() -> tuple[str, ...]:
    """Versions when this process began; the build digest covers the libraries that torch was built with."""
    build = hashlib.sha256(f"{torch.version.git_version} {torch.__config__.show()}".encode()).hexdigest()[:8]
    kernels = []
    for package in KERNELS:
        try:
            kernels.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"kvarve {__version__}",
        f"torch {torch.__version__} (build {build})",
        f"transformers {transformers.__version__}",
        *kernels,
    )


def _processor() -> list[str]:
    mkldnn: Any = torch.backends.mkldnn
    onednn = "no oneDNN"
    if mkldnn.is_available() and mkldnn.enabled:
        onednn = f"oneDNN {'deterministic ' * bool(mkldnn.deterministic)}{mkldnn.fp32_precision}"
    threads = f"threads {torch.get_num_threads()}"
    return [f"cpu {torch.backends.cpu.get_cpu_capability()} {_features()}", threads, onednn]


@cache
def _features() -> str:
    """The CPU: libraries choose their kernels and block sizes by its name, instructions and caches."""
    features = torch.cpu.get_capabilities()
    digest = hashlib.sha256(json.dumps(features, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{features.get('cpu_name', sys.platform)} ({digest})"


def _accelerator(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [device.type]
    about: Any = torch.cuda.get_device_properties(device)
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    matmul = cuda.matmul
    flags = {
        "tf32": matmul.allow_tf32,
        "cudnn tf32": cudnn.allow_tf32,
        "cudnn benchmark": cudnn.benchmark,
        "cudnn deterministic": cudnn.deterministic,
        "fp16 sums": matmul.allow_fp16_accumulation,
        "fp16 reductions": matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reductions": matmul.allow_bf16_reduced_precision_reduction,
        "flash attention": cuda.flash_sdp_enabled(),
        "efficient attention": cuda.mem_efficient_sdp_enabled(),
        "math attention": cuda.math_sdp_enabled(),
        "cudnn attention": cuda.cudnn_sdp_enabled(),
        "reduced math attention": cuda.fp16_bf16_reduction_math_sdp_allowed(),
    }
    return [
        # A slice of a GPU has the GPU's name and fewer multiprocessors.
        f"{about.name} {about.major}.{about.minor} with {about.multi_processor_count} multiprocessors",
        f"CUDA {torch.version.cuda} HIP {torch.version.hip} cuDNN {cudnn.version()}",
        f"BLAS {cuda.preferred_blas_library()}",
        "with " + "+".join(name for name, on in flags.items() if on),
    ]


# --- has it changed since?


@dataclass(frozen=True)
class Marks:
    """A model's marks, which show without reading the weights whether it is still the one that was identified.

    They show weights that were replaced, moved or written in place, adapters that were added, switched, scaled or
    merged, another config, and other kernels. Of bytes that were changed unseen by torch (through `.data`) they show
    the first of `SAMPLED` tensors, which is enough when all weights are exchanged in this way.
    """

    weights: tuple[tuple[int, int], ...]  # per tensor, its address and version
    sample: bytes
    config: str
    adapters: str
    numerics: str
    training: bool

    @classmethod
    def of(cls, model: Any) -> "Marks":
        tensors: list[Tensor] = []
        switches: list[Switch] = []
        modules, seen = [model], {id(model)}
        while modules:
            module = modules.pop()
            if (switch := _switch(module)) is not None:
                switches.append(switch)
            tensors += [tensor for tensor in module._parameters.values() if tensor is not None]
            # Some models rewrite buffers that no checkpoint has as they compute: frequencies, by the length.
            passing = module._non_persistent_buffers_set
            tensors += [each for name, each in module._buffers.items() if each is not None and name not in passing]
            for inner in module._modules.values():
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    modules.append(inner)
        weights = tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors)
        sample = b"".join(_first_bytes(tensor) for tensor in tensors[:: -(-len(tensors) // SAMPLED) or 1])
        by = numerics({tensor.device for tensor in tensors}, _choices(model))
        config = repr([_own_fields(each) for each in _configs(model.config)])
        return cls(weights, sample, config, _adapters(switches), by, model.training)

    def require_same(self, model: Any) -> None:
        """ModelError, which names the change, unless the model is unchanged."""
        now = Marks.of(model)
        if now == self:
            return
        what = "its weights have changed"
        if now.adapters != self.adapters:
            what = f"its adapters are {now.adapters or 'none'}, and were {self.adapters or 'none'}"
        elif now.numerics != self.numerics:
            what = f"it is computed by {now.numerics}, and was by {self.numerics}"
        elif now.training != self.training:
            what = "it is in training mode"
        elif now.config != self.config:
            what = "its config has changed"
        raise ModelError(
            f"{type(model).__name__} is no longer the model whose pages these are: {what}; change it back, or make a "
            f"new cache for it"
        )


def _own_fields(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not isinstance(value, transformers.PreTrainedConfig)}


def _first_bytes(tensor: Tensor) -> bytes:
    first = tensor.detach().reshape(-1)[:SAMPLED_VALUES]
    return first.view(torch.uint8).cpu().numpy().tobytes()
