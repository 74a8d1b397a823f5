"""Packs matrices as GPTQ's, AWQ's and NVFP4's publishers do, number by number and bit by bit.

Slow, and on purpose without anything of `kvarve.reference.engine.packed`, which reads the result.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Rows of whole numbers in int32 words; `order` says which of a word's numbers comes first, in the lowest bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint32)
    for row in range(packed.shape[0]):
        for word in range(packed.shape[1]):
            value = 0
            for place, which in enumerate(order):
                value += int(numbers[row, word * per_word + which]) * 2 ** (bits * place)
            packed[row, word] = value
    return torch.from_numpy(packed.view(np.int32))


def _rounded(weight: Array, groups: Array, bits: int, middle: bool) -> tuple[Array, Array, Array]:
    """Codes of weights [in, out], scales and zero points [groups, out]; `middle`: all zero points are the middle."""
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((count, weight.shape[1]), np.float16), np.zeros((count, weight.shape[1]), np.int64)
    codes = np.zeros(weight.shape, np.int64)
    for group in range(count):
        for output in range(weight.shape[1]):
            of = weight[groups == group, output]
            low, high = min(of.min(), 0.0), max(of.max(), 0.0)
            if middle:
                low, high = -max(-low, high), max(-low, high)
            scale = np.float16((high - low) / top)
            zero = 2 ** (bits - 1) if middle else round(-low / float(scale))
            scales[group, output], zeros[group, output] = scale, zero
            codes[groups == group, output] = np.clip(np.round(of / np.float32(scale)) + zero, 0, top)
    return codes, scales, zeros


def gptq(weight: Tensor, bits: int, group: int, act_order: bool, v2: bool) -> dict[str, Tensor]:
    """The parts of a weight [out, in]; `act_order`: inputs are in groups by their size, the largest first."""
    numbers = weight.float().numpy().T
    inputs = len(numbers)
    order = np.argsort(-np.abs(numbers).sum(1)) if act_order else np.arange(inputs)
    groups = np.zeros(inputs, np.int32)
    for place, which in enumerate(order):
        groups[which] = 0 if group == -1 else place // group
    codes, scales, zeros = _rounded(numbers, groups, bits, middle=not act_order)
    stored = zeros if v2 else (zeros - 1) % 2**bits
    return {
        "qweight": words(codes.T, bits).T.contiguous(),
        "qzeros": words(stored, bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(groups),
    }


def awq(weight: Tensor, group: int) -> dict[str, Tensor]:
    """The parts of a weight [out, in] in AutoAWQ's layout "gemm"."""
    numbers = weight.float().numpy().T
    codes, scales, zeros = _rounded(numbers, np.arange(len(numbers)) // group, 4, middle=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes, 4, order), "qzeros": words(zeros, 4, order), "scales": torch.from_numpy(scales)}


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Bytes [out, in / 2] of a weight [out, in], scales in e4m3 [out, in / 16], and what these are multiplied by."""
    numbers = weight.float().numpy()
    factor = float(np.abs(numbers).max()) / (6.0 * 448.0)
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // 2), np.uint8)
    scales = torch.zeros(numbers.shape[0], numbers.shape[1] // 16).to(torch.float8_e4m3fn)
    for row, values in enumerate(numbers):
        for group in range(len(values) // 16):
            of = values[group * 16 : group * 16 + 16]
            scales[row, group] = max(float(np.abs(of).max()) / 6.0 / factor, 2.0**-6)
            scale = float(scales[row, group]) * factor
            for place, value in enumerate(of):
                code = int(np.argmin([abs(abs(value) / scale - number) for number in E2M1])) + (8 if value < 0 else 0)
                packed[row, group * 8 + place // 2] += code * (16 if place % 2 else 1)
    return torch.from_numpy(packed), scales, factor
