"""Packed weights: how GPTQ, AWQ, NVFP4 and ModelOpt's FP8 lay a matrix out in tensors, and which numbers these are.

Headers and tensors come in, matrices go out; nothing here opens a file or knows transformers. A layout is a row of
LAYOUTS. Its tensors are *parts* of a module: `model.layers.0.mlp.up_proj.scales` is the part `scales`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from kvarve.errors import ModelError

Shape = tuple[int, ...]
Parts = Mapping[str, Tensor]
Header = Mapping[str, tuple[str, Shape]]  # dtype (as safetensors names it) and shape, by the name of the tensor
WORD_BITS = 32
ROWS = 1024  # of a matrix that are unpacked at once; a multiple of what a word holds
NVFP4_GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each 4 bits of a word, from the lowest
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True)
class Settings:
    """What a config says of its packed weights."""

    bits: int = 4
    group: int | None = None  # inputs that share a scale; None: all
    zeros_less_one: bool = False  # the stored zero points are one less than the real ones
    middle: bool = False  # the real ones are the middle of the range, whichever of the two is stored
    any_order: bool = False  # g_idx names each input's group; else groups are in order
    zero_points: bool = True  # they are stored; where they are not, all are the middle of the range
    excluded: tuple[str, ...] = ()  # modules that are not packed

    def groups(self, inputs: int) -> int:
        return 1 if self.group is None else -(-inputs // self.group)


@dataclass(frozen=True)
class Layout:
    """One way to store matrices: its parts, the shapes that they must have, and the numbers that they mean."""

    packed: str  # the part with the numbers; a module is packed if it has it, in the dtype below
    dtypes: Mapping[str, tuple[str, ...]]
    settings: Callable[[Mapping[str, Any]], Settings]  # of a config; ModelError for what is not read
    shapes: Callable[[Settings, Shape], Mapping[str, Shape]]  # of all parts, from that of the numbers; of one, empty
    matrix: Callable[[Settings, Parts], Tensor]  # [out, in] in float32
    optional: Callable[[Settings], tuple[str, ...]] = lambda _: ()
    unused: tuple[str, ...] = ()  # of activations, which stay as they are
    checked: Callable[[Settings], tuple[str, ...]] = lambda _: ()  # small parts, for `check_values`
    beside: tuple[str, ...] = ("bias", "k_scale", "v_scale")  # plain tensors of a packed module


# --- what a config says


def _choice(found: Mapping[str, Any], key: str, known: tuple[Any, ...], *default: Any) -> Any:
    """A setting that is one of `known`; it is written in any case if it is a text."""
    value = found.get(key, *default)
    same = value.lower() if isinstance(value, str) else value
    if not any(type(same) is type(one) and same == one for one in known):
        raise ModelError(f"{key} {value!r:.80} is not read, only {' and '.join(str(one) for one in known)}")
    return same


def _group(found: Mapping[str, Any]) -> int | None:
    value = found.get("group_size")
    if type(value) is not int or (value != -1 and value <= 0):
        raise ModelError(f"group_size {value!r:.80} is not read, only -1 and whole numbers above 0")
    return None if value == -1 else value


def _names(found: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = found.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"{key} is not a list of names")
    return tuple(value)


def _none_of(found: Mapping[str, Any], *keys: str) -> None:
    if there := next((key for key in keys if found.get(key)), None):
        raise ModelError(f"{there} {found[there]!r:.80} is not read")


def _gptq_settings(found: Mapping[str, Any]) -> Settings:
    _none_of(found, "is_marlin_format")
    kind = _choice(found, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = _choice(found, "bits", (4, 8), None)
    act_order = _choice(found, "desc_act", (False, True), False)
    symmetric = _choice(found, "sym", (False, True), False)
    dynamic = found.get("dynamic") or {}
    # GPTQModel's settings for some modules: "-:regex" leaves them as they are, others change how they are packed.
    if not isinstance(dynamic, dict) or not all(str(key).startswith("-:") for key in dynamic):
        raise ModelError("dynamic is not read where it gives modules settings of their own")
    less_one = kind == "gptq"
    return Settings(bits, _group(found), zeros_less_one=less_one, middle=symmetric, any_order=act_order)


def _awq_settings(found: Mapping[str, Any]) -> Settings:
    _choice(found, "version", ("gemm",), "gemm")
    _choice(found, "backend", ("autoawq",), "autoawq")
    bits = _choice(found, "bits", (4,), None)
    zero_points = _choice(found, "zero_point", (False, True), True)
    return Settings(bits, _group(found), zero_points=zero_points, excluded=_names(found, "modules_to_not_convert"))


def _check_groups(found: Mapping[str, Any], bits: int, group_size: int | None) -> None:
    """ModelError if `config_groups` quantizes any weights in another way."""
    groups = found.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError("config_groups is not an object of objects")
    for name, group in groups.items():
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise ModelError(f"config_groups: {name} does not say how weights are quantized")
        try:
            _choice(group, "format", (NVFP4, None), None)
            _choice(weights, "num_bits", (bits,), None)
            _choice(weights, "type", ("float",), None)
            _choice(weights, "group_size", (group_size,), None)
        except ModelError as e:
            raise ModelError(f"config_groups: {name}: {e}") from None


def _compressed_settings(found: Mapping[str, Any]) -> Settings:
    _none_of(found, "transform_config")  # it rotates activations as well
    sparsity = found.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
        raise ModelError("sparsity_config is not read, only dense weights")
    _check_groups(found, 4, NVFP4_GROUP)
    return Settings(group=NVFP4_GROUP, excluded=_names(found, "ignore"))


def _modelopt_settings(found: Mapping[str, Any]) -> Settings:
    if _choice(found, "quant_algo", ("nvfp4", "fp8"), None) == "fp8":
        _check_groups(found, 8, None)
        group = None
    else:
        _choice(found, "group_size", (NVFP4_GROUP,), NVFP4_GROUP)
        _check_groups(found, 4, NVFP4_GROUP)
        group = NVFP4_GROUP
    return Settings(group=group, excluded=(*_names(found, "ignore"), *_names(found, "exclude_modules")))


# --- shapes


def _gptq_shapes(settings: Settings, packed: Shape) -> Mapping[str, Shape]:
    per_word = WORD_BITS // settings.bits
    inputs, outputs = packed[0] * per_word, packed[1]
    groups = settings.groups(inputs)
    return {
        "qweight": packed,
        "qzeros": (groups, -(-outputs // per_word)),
        "scales": (groups, outputs // per_word * per_word),  # a last word of zero points that is not full is no layout
        "g_idx": (inputs,),
    }


def _awq_shapes(settings: Settings, packed: Shape) -> Mapping[str, Shape]:
    groups = settings.groups(packed[0])
    whole = groups * (settings.group or packed[0])
    return {
        "qweight": (whole, packed[1]),
        "qzeros": (groups, packed[1]),
        "scales": (groups, packed[1] * len(AWQ_ORDER)),
    }


def _nvfp4_shapes(packed_name: str, scalar: str) -> Callable[[Settings, Shape], Mapping[str, Shape]]:
    def shapes(settings: Settings, packed: Shape) -> Mapping[str, Shape]:
        groups = settings.groups(packed[1] * 2)
        return {packed_name: (packed[0], groups * NVFP4_GROUP // 2), "weight_scale": (packed[0], groups), scalar: ()}

    return shapes


# --- numbers


def _unpack(words: Tensor, bits: int) -> Tensor:
    """The numbers of int32 words [...] from the lowest bits, in a new last dimension."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    # A negative word drags its sign in from the left, which the mask takes off.
    return (words[..., None] >> shifts) & ((1 << bits) - 1)


def _affine(
    settings: Settings, inputs: int, parts: Parts, codes: Callable[[int, int], Tensor], zeros: Tensor
) -> Tensor:
    """(code - zero point) * scale, with codes [inputs from..to, out] and zero points [groups, out]."""
    scales = parts["scales"].float()
    group = parts["g_idx"].long() if settings.any_order else torch.arange(inputs) // (settings.group or inputs)
    weight = torch.empty(scales.shape[1], inputs)
    for start in range(0, inputs, ROWS):
        stop = min(start + ROWS, inputs)
        of = group[start:stop]
        weight[:, start:stop] = ((codes(start, stop) - zeros[of]) * scales[of]).T
    return weight


def _gptq_matrix(settings: Settings, parts: Parts) -> Tensor:
    """AutoGPTQ's layout: https://github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py.

    `qweight` packs inputs, `qzeros` outputs, the first in the lowest bits. "gptq" stores zero points less one, in as
    many bits, so that 0 is stored as all ones; "gptq_v2" of https://github.com/ModelCloud/GPTQModel stores them as
    they are. Some that say "gptq" do so too (https://github.com/vllm-project/vllm/pull/38966), so where the config says
    `sym`, which puts all zero points into the middle, they are there.
    """
    per_word, words = WORD_BITS // settings.bits, parts["qweight"]

    def codes(start: int, stop: int) -> Tensor:
        return _unpack(words[start // per_word : stop // per_word], settings.bits).transpose(1, 2).flatten(0, 1)

    zeros = _unpack(parts["qzeros"], settings.bits).flatten(1)
    if settings.middle:
        zeros = torch.full_like(zeros, 1 << (settings.bits - 1))
    elif settings.zeros_less_one:
        zeros = (zeros + 1) & ((1 << settings.bits) - 1)
    return _affine(settings, len(words) * per_word, parts, codes, zeros)


def _awq_matrix(settings: Settings, parts: Parts) -> Tensor:
    """AutoAWQ's "gemm": https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py.

    `qweight` and `qzeros` pack eight outputs in AWQ_ORDER. Without zero points, codes are above or below the middle, 8.
    """
    words, place = parts["qweight"], torch.tensor(AWQ_ORDER).argsort()

    def in_order(words: Tensor) -> Tensor:
        return _unpack(words, settings.bits)[..., place].flatten(1)

    if "qzeros" in parts:
        zeros = in_order(parts["qzeros"])
    else:
        zeros = torch.full((settings.groups(len(words)), words.shape[1] * len(AWQ_ORDER)), 8, dtype=torch.int32)
    return _affine(settings, len(words), parts, lambda start, stop: in_order(words[start:stop]), zeros)


def _e2m1(packed: Tensor, scales: Tensor) -> Tensor:
    """Pairs of 4-bit floats, the first in the low half of a byte, times a scale for each 16."""
    weight = torch.empty(len(packed), packed.shape[1] * 2)
    for start in range(0, len(packed), ROWS):
        rows = slice(start, start + ROWS)
        codes = torch.stack((packed[rows] & 15, packed[rows] >> 4), -1).to(torch.int32)
        of_16 = E2M1[codes].view(len(codes), -1, NVFP4_GROUP)
        weight[rows] = (of_16 * scales[rows, :, None]).flatten(1)
    return weight


def _compressed_matrix(_: Settings, parts: Parts) -> Tensor:
    """https://github.com/vllm-project/compressed-tensors, compressed_tensors/compressors/nvfp4/base.py: scales are
    divided by the global one."""
    return _e2m1(parts["weight_packed"], parts["weight_scale"].float() / parts["weight_global_scale"].reshape(()))


def _modelopt_matrix(_: Settings, parts: Parts) -> Tensor:
    """https://github.com/NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py: scales
    are multiplied by `weight_scale_2`."""
    return _e2m1(parts["weight"], parts["weight_scale"].float() * parts["weight_scale_2"].reshape(()))


def _fp8_matrix(_: Settings, parts: Parts) -> Tensor:
    return parts["weight"].float() * parts["weight_scale"].float().reshape(())


NVFP4, MODELOPT_FP8 = "nvfp4-pack-quantized", "modelopt fp8"
FLOATS = ("F16", "BF16", "F32")
# By quant_method in a config; NVFP4 is a format of compressed-tensors, and FP8 the other of modelopt.
LAYOUTS: dict[str, Layout] = {
    "gptq": Layout(
        packed="qweight",
        dtypes={"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": ("I32", "I64")},
        settings=_gptq_settings,
        shapes=_gptq_shapes,
        matrix=_gptq_matrix,
        optional=lambda settings: () if settings.any_order else ("g_idx",),
        checked=lambda settings: ("g_idx", "qzeros") if settings.middle else ("g_idx",),
    ),
    "awq": Layout(
        packed="qweight",
        dtypes={"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS},
        settings=_awq_settings,
        shapes=_awq_shapes,
        matrix=_awq_matrix,
        optional=lambda settings: () if settings.zero_points else ("qzeros",),
    ),
    NVFP4: Layout(
        packed="weight_packed",
        dtypes={"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",), "weight_global_scale": ("F32",)},
        settings=_compressed_settings,
        shapes=_nvfp4_shapes("weight_packed", "weight_global_scale"),
        matrix=_compressed_matrix,
        unused=("input_global_scale",),
        checked=lambda _: ("weight_global_scale",),
    ),
    "modelopt": Layout(
        packed="weight",
        dtypes={"weight": ("U8",), "weight_scale": ("F8_E4M3",), "weight_scale_2": ("F32",)},
        settings=_modelopt_settings,
        shapes=_nvfp4_shapes("weight", "weight_scale_2"),
        matrix=_modelopt_matrix,
        unused=("input_scale",),
        checked=lambda _: ("weight_scale_2",),
    ),
    MODELOPT_FP8: Layout(
        packed="weight",
        dtypes={"weight": ("F8_E4M3",), "weight_scale": FLOATS},
        settings=_modelopt_settings,
        shapes=lambda _, packed: {"weight": packed, "weight_scale": ()},
        matrix=_fp8_matrix,
        unused=("input_scale",),
        checked=lambda _: ("weight_scale",),
    ),
}


# --- what a folder holds


def packed_modules(layout: Layout, settings: Settings, header: Header) -> dict[str, tuple[str, ...]]:
    """The packed modules of a checkpoint and the parts that each has, by its header alone.

    ModelError if parts are missing, left over, or contradict each other or the config; or if nothing is packed.
    """
    modules: dict[str, dict[str, tuple[str, Shape]]] = {}
    for name, about in header.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = about
    found = {}
    for module, there in modules.items():
        if there.get(layout.packed, ("",))[0] in layout.dtypes[layout.packed]:
            found[module] = _parts_of(layout, settings, module, there)
        elif lost := next((part for part in there if part in layout.dtypes and part != "weight"), None):
            raise ModelError(f"{module}.{lost} is there without a packed {layout.packed}")
        elif odd := next((part for part, (dtype, _) in there.items() if dtype.startswith("F8_")), None):
            raise ModelError(f"{module}.{odd} is {there[odd][0]}, and no {layout.packed} that is known")
    if not found:
        raise ModelError(f"it holds no packed weight, which would be a {layout.packed}")
    return found


def _parts_of(
    layout: Layout, settings: Settings, module: str, there: Mapping[str, tuple[str, Shape]]
) -> tuple[str, ...]:
    if any(_names_module(pattern, module) for pattern in settings.excluded):
        raise ModelError(f"{module}.{layout.packed} is packed, and the config says that it is not")
    optional = layout.optional(settings)
    if missing := [part for part in layout.dtypes if part not in there and part not in optional]:
        raise ModelError(f"{module}: no {missing[0]}, without which {layout.packed} cannot be read")
    if odd := sorted(there.keys() - layout.dtypes.keys() - {*layout.unused, *layout.beside}):
        raise ModelError(
            f"{module}.{odd[0]} is beside a packed {layout.packed}, and this version does not know what for"
        )
    if len(there[layout.packed][1]) != 2 or not all(there[layout.packed][1]):
        raise ModelError(f"{module}.{layout.packed} is not a matrix: {[*there[layout.packed][1]]}")
    shapes = layout.shapes(settings, there[layout.packed][1])
    parts = tuple(part for part in layout.dtypes if part in there)
    for part in parts:
        dtype, shape = there[part]
        if dtype not in layout.dtypes[part]:
            raise ModelError(f"{module}.{part} is {dtype}, not {' or '.join(layout.dtypes[part])}")
        if part == layout.packed and shape != shapes[part]:
            raise ModelError(f"{module}.{part} is {[*shape]}, whose inputs are not whole groups of {settings.group}")
        if (() if shape == (1,) and not shapes[part] else shape) != shapes[part]:
            raise ModelError(
                f"{module}.{part} is {[*shape]}, and {[*shapes[part]]} by its {layout.packed} and the config"
            )
    return parts


def _names_module(pattern: str, module: str) -> bool:
    """Whether whole words of a module's name are the pattern, or its stars match the name.

    Publishers' libraries differ in what else they take for a match, so what else may match is left to the tensors.
    """
    if pattern.startswith("re:"):
        return False
    return fnmatchcase(module, pattern) if "*" in pattern else f".{pattern}." in f".{module}."


def check_values(settings: Settings, module: str, parts: Parts) -> None:
    """ModelError if the values of a module's `checked` parts cannot be used."""
    for part, values in parts.items():
        if part == "g_idx":
            _check_order(settings, module, values)
        elif part == "qzeros":
            stored = torch.unique(_unpack(values, settings.bits)).tolist()
            if stored not in ([1 << (settings.bits - 1)], [(1 << (settings.bits - 1)) - 1]):
                raise ModelError(f"{module}.qzeros are not all in the middle, and the config says sym true")
        elif not 0 < (scale := float(values.reshape(()))) < float("inf"):
            raise ModelError(f"{module}.{part} is {scale}, not a number above 0")


def _check_order(settings: Settings, module: str, g_idx: Tensor) -> None:
    groups, low, high = settings.groups(len(g_idx)), int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ModelError(f"{module}.g_idx names groups from {low} to {high}, and there are {groups}")
    in_order = torch.arange(len(g_idx)) // (settings.group or len(g_idx))
    if not settings.any_order and not torch.equal(g_idx.long(), in_order):
        raise ModelError(f"{module}.g_idx is not in order, and the config says desc_act false")


def leftovers(layout: Layout, modules: Iterable[str]) -> frozenset[str]:
    """Names of tensors that belong to packed modules and are no weights of a model."""
    return frozenset(f"{module}.{part}" for module in modules for part in (*layout.dtypes, *layout.unused))
