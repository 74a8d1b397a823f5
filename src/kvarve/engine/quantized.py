"""Quantized checkpoints: which formats are read, and how their weights become numbers that any device computes with.

Weights are dequantized while they are loaded, one after the other, by transformers' own readers. Its kernels for
quantized weights come from a model hub when they are first used, and no hub is ever asked here.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

# By the name of the method in a config, the packages that transformers needs to read it.
READ: dict[str, tuple[str, ...]] = {
    "fp8": ("accelerate",),
    "mxfp4": (),
    "compressed-tensors": ("accelerate", "compressed_tensors"),
}
METHODS = ", ".join(sorted(READ))
# Keys of a config that speak of quantization.
KEYS = ("quantization_config", "compression_config")


def method_of(config: Mapping[str, Any]) -> str:
    """The quantization named anywhere in the content of a config.json; empty if there is none."""
    for key, value in config.items():
        if key in KEYS and value is not None:
            return (
                str(value.get("quant_method", value.get("quant_algo", "unknown"))) if isinstance(value, dict) else key
            )
        if isinstance(value, dict) and (found := method_of(value)):
            return found
    return ""


def unreadable(method: str) -> str:
    """Why weights of this quantization cannot be loaded, and what to do; empty if they can."""
    if method not in READ:
        return f"its weights are quantized ({method}), which this version cannot load: it reads {METHODS}"
    if missing := [name for name in READ[method] if importlib.util.find_spec(name) is None]:
        packages = " and ".join(name.replace("_", "-") for name in missing)
        return f"its weights are quantized ({method}), which needs {packages}: install kvarve's extra 'quantized'"
    return ""


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
