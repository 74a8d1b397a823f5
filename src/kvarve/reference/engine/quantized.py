"""Quantized checkpoints: which formats are read, and how their weights become numbers that any device computes with.

Weights are dequantized while they are loaded, one after the other: those of `engine/packed.py` by it, the others by
transformers' own readers. Its kernels for quantized weights come from a model hub when they are first used, and no hub
is ever asked here.
"""

import copy
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from kvarve.errors import ModelError
from kvarve.reference.engine.packed import (
    LAYOUTS,
    MODELOPT_FP8,
    NVFP4,
    Header,
    Layout,
    Settings,
    check_values,
    leftovers,
    packed_modules,
)

# By the name of the method in a config, the packages that it takes to read it.
READ: dict[str, tuple[str, ...]] = {
    "fp8": ("accelerate",),
    "mxfp4": (),
    "compressed-tensors": ("accelerate", "compressed_tensors"),
    "gptq": (),
    "awq": (),
    "modelopt": (),
}
METHODS = ", ".join(sorted(READ))
# Keys of a config that speak of quantization.
KEYS = ("quantization_config", "compression_config")


def section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the content of a config.json says of quantization, anywhere in it; None if nothing."""
    for key, value in config.items():
        if key in KEYS and value is not None:
            return value if isinstance(value, dict) else {"quant_method": key}
        if isinstance(value, dict) and (found := section_of(value)) is not None:
            return found
    return None


def method_of(config: Mapping[str, Any]) -> str:
    """The quantization named anywhere in the content of a config.json; empty if there is none."""
    section = section_of(config)
    return "" if section is None else str(section.get("quant_method", section.get("quant_algo", "unknown")))


def unreadable(config: Mapping[str, Any]) -> str:
    """Why weights of this config's quantization cannot be loaded, and what to do; empty if they can."""
    if not (method := method_of(config)):
        return ""
    if method not in READ:
        return f"its weights are quantized ({method}), which this version cannot load: it reads {METHODS}"
    try:
        if Packing.of(config) is not None:
            return ""
    except ModelError as e:
        return f"its weights are quantized ({method}): {' '.join(str(e).split())[:300]}"
    if missing := [name for name in READ[method] if importlib.util.find_spec(name) is None]:
        packages = " and ".join(name.replace("_", "-") for name in missing)
        return f"its weights are quantized ({method}), which needs {packages}: install kvarve's extra 'quantized'"
    return ""


# --- formats that are read here


@dataclass(frozen=True)
class Packing:
    """The layout of a checkpoint's packed weights, and what its config says of them."""

    layout: Layout
    settings: Settings

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Packing | None":
        """By the content of a config.json; None if transformers reads it. ModelError for settings that are not read."""
        section = section_of(config) or {}
        method = section.get("quant_method")
        if method == "compressed-tensors":
            method = _nvfp4_or_other(section)
        elif method == "modelopt" and str(section.get("quant_algo")).lower() == "fp8":
            method = MODELOPT_FP8
        layout = LAYOUTS.get(str(method))
        return None if layout is None else cls(layout, layout.settings(section))

    def check(self, files: Sequence[Path]) -> None:
        """ModelError unless these files hold packed weights with all that belongs to them; no weight is read."""
        with _Files.opened(files) as opened:
            for module, parts in packed_modules(self.layout, self.settings, opened.header).items():
                small = [part for part in self.layout.checked(self.settings) if part in parts]
                check_values(self.settings, module, {part: opened.read(f"{module}.{part}") for part in small})

    @contextmanager
    def opened(self, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
        """The weights of these files by name, for `from_pretrained`; each is read when it is asked for."""
        with _Files.opened(files) as opened:
            modules = packed_modules(self.layout, self.settings, opened.header)
            gone = leftovers(self.layout, modules)
            weights = {name: opened.lazy(name) for name in opened.header if name not in gone}
            one_at_a_time = Lock()
            for module, parts in modules.items():
                weights[f"{module}.weight"] = _Packed(self, opened, module, parts, one_at_a_time)
            yield weights


def _nvfp4_or_other(section: Mapping[str, Any]) -> str:
    groups = section.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    formats = [group.get("format") for group in listed if isinstance(group, dict)]
    if NVFP4 in formats and section.get("format") != NVFP4:
        raise ModelError(f"{NVFP4} is read alone, not together with other formats")
    return str(section.get("format"))


class _Files:
    """Safetensors files as one, while they are open."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._where = {name: file for file in files for name in file.keys()}  # noqa: SIM118  no mappings
        slices = {name: self.lazy(name) for name in self._where}
        self.header: Header = {name: (str(at.get_dtype()), tuple(at.get_shape())) for name, at in slices.items()}

    @classmethod
    @contextmanager
    def opened(cls, paths: Sequence[Path]) -> "Iterator[_Files]":
        with ExitStack() as stack:
            yield cls([stack.enter_context(safe_open(path, framework="pt")) for path in paths])

    def lazy(self, name: str) -> Any:
        """A tensor that is read by `[...]`."""
        return self._where[name].get_slice(name)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


@dataclass(frozen=True)
class _Packed:
    """A weight that is read and dequantized by `[...]`, in float32; one at a time, whatever threads ask."""

    packing: Packing
    files: _Files
    module: str
    parts: tuple[str, ...]
    one_at_a_time: Lock

    def __getitem__(self, _: EllipsisType) -> Tensor:
        with self.one_at_a_time:
            parts = {part: self.files.read(f"{self.module}.{part}") for part in self.parts}
            return self.packing.layout.matrix(self.packing.settings, parts)


def without_quantization(config: Any) -> Any:
    """A copy of a model's config without quantization."""
    config = copy.deepcopy(config)
    for each in (config, config.get_text_config(decoder=True)):
        for key in KEYS:
            if hasattr(each, key):
                delattr(each, key)
    return config


# --- formats that transformers reads


@contextmanager
def dequantizing(config: Any) -> Iterator[None]:
    """Within it, transformers dequantizes the weights of this config's checkpoint as it loads them."""
    text = config.get_text_config(decoder=True)
    for each in (config, text):
        if (found := getattr(each, "quantization_config", None)) is not None:
            each.quantization_config = {**found, "dequantize": True}
    theirs = Fp8Dequantize._dequantize_one
    Fp8Dequantize._dequantize_one = _with_whole_blocks(theirs)
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = theirs


def _with_whole_blocks(dequantize: Any) -> Any:
    """transformers takes a block's size from the number of scales, but the last block of a row or column may be short.

    So it is in every DeepSeek-V3: 576 rows in blocks of 128 have 5 scales.
    """

    def padded(self: Any, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        block = self.hf_quantizer.quantization_config.weight_block_size
        rows, columns = quantized.shape[-2:] if quantized.ndim > 1 else (1, 1)
        if not block or quantized.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or scales.ndim < 2:
            return dequantize(self, quantized, scales, output_dtype)  # type: ignore[no-any-return]
        whole = [-(-size // of) * of for size, of in zip((rows, columns), block, strict=True)]
        if [size // of for size, of in zip(whole, block, strict=True)] != [*scales.shape[-2:]]:
            return dequantize(self, quantized, scales, output_dtype)  # type: ignore[no-any-return]
        filled = torch.zeros(*quantized.shape[:-2], *whole, dtype=torch.float32, device=quantized.device)
        filled[..., :rows, :columns] = quantized.to(torch.float32)
        found: Tensor = dequantize(self, filled, scales, output_dtype)
        return found[..., :rows, :columns].contiguous()

    return padded
