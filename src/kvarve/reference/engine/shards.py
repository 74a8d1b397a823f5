"""How a model is divided among ranks: what part of each weight a rank has, as rows of data, and what applies them.

Attention and linear attention are divided by heads, feed-forward layers and experts by their columns. The part that
each rank computes of a module's output is added up over the ranks. A module that no row knows, or whose heads do not
divide, is computed whole on every rank: a rank then keeps the same state as all others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from kvarve.errors import Broken
from kvarve.pages.pools import HeadGroups, PoolSpec, share

SHARDING = "heads and columns"  # in the identity of a divided model; to be changed with the rows below
BY_GROUPS = f"{SHARDING}, stored by head group"

Sum = Callable[[Tensor], None]  # adds a tensor up over all ranks, in place
Around = Callable[[], AbstractContextManager[None]]
Units = tuple[str, ...]  # what lies along a dimension of a weight, one after the other, such as ("k", "k", "v")


@dataclass(frozen=True)
class Cut:
    """A weight is divided along `dim`, where `units` lie."""

    units: Units
    dim: int = 0


@dataclass(frozen=True)
class Kind:
    """How modules of one kind are divided.

    `counts`: how many heads or columns of each unit a module has, and their width where units of several kinds lie
    along one dimension. `sums`: the part whose output is added up; "" is the module itself. `whole`: children that
    every rank computes alike. A module with other weights is not of this kind.
    """

    needs: frozenset[str]
    counts: Callable[[Any], dict[str, tuple[int, int]]]
    cuts: Mapping[str, Cut]
    sums: str
    whole: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()  # added on one rank only: biases of what is summed
    sizes: Mapping[str, Units] = field(default_factory=dict)  # attributes: the product of counts and widths
    # By buffer that the cache keeps: the weight by whose units it is divided, if there is one, and along which axis.
    keeps: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def _attention(module: Any) -> dict[str, tuple[int, int]]:
    width = getattr(module, "v_head_dim", None) or module.head_dim
    for norm in (getattr(module, name, None) for name in ("q_norm", "k_norm")):
        if norm is not None and norm.weight.numel() != width:
            return {}  # of all heads together
    heads = module.o_proj.in_features // width
    if not module.num_key_value_groups:  # Kimi Linear's config says more key heads than heads
        return {}
    if hasattr(getattr(module, "indexer", None), "build_block_mask"):  # MiniMax-M3's chooses for each key head
        return {}
    return {"q": (heads, 1), "kv": (heads // module.num_key_value_groups, 1)}


def _delta_net(module: Any) -> dict[str, tuple[int, int]]:
    return {"k": (module.num_k_heads, module.head_k_dim), "v": (module.num_v_heads, module.head_v_dim)}


def _columns(module: Any) -> dict[str, tuple[int, int]]:
    return {"column": (module.down_proj.in_features, 1)}


def _expert_columns(module: Any) -> dict[str, tuple[int, int]]:
    before, after, transposed = module.gate_up_proj, module.down_proj, getattr(module, "is_transposed", False)
    columns = after.shape[1 if transposed else 2]
    if before.shape[2 if transposed else 1] != 2 * columns:  # Llama 4 has the input first and does not say so
        return {}
    if len(before) != len(after):  # LongCat's other experts return their input, which would be added up
        return {}
    return {"column": (columns, 1)}


_Q, _KV, _K, _V = Cut(("q",)), Cut(("kv",)), Cut(("k",)), Cut(("v",))
_PAIR = ("column", "column")  # gate and up, one after the other
_MIXED = Cut(("k", "k", "v"))
_DELTA = {"conv1d.weight": _MIXED, "dt_bias": _V, "A_log": _V, "out_proj.weight": Cut(("v",), 1)}
_DELTA_KEEPS = {"conv.0": ("conv1d.weight", 0), "recurrent.0": ("A_log", 0)}
_DELTA_SIZES = {"num_k_heads": ("k/",), "num_v_heads": ("v/",), "key_dim": ("k",), "value_dim": ("v",)}

KINDS = (
    Kind(  # attention, MLA included: its latents and the index keys are computed whole
        needs=frozenset({"o_proj.weight"}),
        counts=_attention,
        cuts={
            **{f"{name}.{what}": _Q for name in ("q_proj", "q_b_proj", "kv_b_proj") for what in ("weight", "bias")},
            **{f"{name}.{what}": _KV for name in ("k_proj", "v_proj") for what in ("weight", "bias")},
            "o_proj.weight": Cut(("q",), 1),
            "sinks": _Q,
        },
        sums="o_proj",
        whole=frozenset(
            {"q_norm", "k_norm", "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "indexer"}
        ),
        once=frozenset({"o_proj.bias"}),
        sizes={"num_heads": ("q/",), "num_key_value_heads": ("kv/",)},
        keeps={"keys": ("k_proj.weight", 1), "values": ("k_proj.weight", 1)},
    ),
    Kind(  # Gated DeltaNet of Qwen3.5
        needs=frozenset({"in_proj_qkv.weight", "A_log"}),
        counts=_delta_net,
        cuts={
            **_DELTA,
            "in_proj_qkv.weight": _MIXED,
            **{f"in_proj_{name}.weight": _V for name in "zba"},
        },
        sums="out_proj",
        whole=frozenset({"norm"}),
        sizes=_DELTA_SIZES,
        keeps=_DELTA_KEEPS,
    ),
    Kind(  # Gated DeltaNet of Qwen3-Next: all that belongs to a key head lies together
        needs=frozenset({"in_proj_qkvz.weight", "A_log"}),
        counts=_delta_net,
        cuts={**_DELTA, "in_proj_qkvz.weight": _K, "in_proj_ba.weight": _K},
        sums="out_proj",
        whole=frozenset({"norm"}),
        sizes=_DELTA_SIZES,
        keeps=_DELTA_KEEPS,
    ),
    Kind(
        needs=frozenset({"gate_proj.weight", "up_proj.weight", "down_proj.weight"}),
        counts=_columns,
        cuts={
            **{f"{name}.{what}": Cut(("column",)) for name in ("gate_proj", "up_proj") for what in ("weight", "bias")},
            "down_proj.weight": Cut(("column",), 1),
        },
        sums="down_proj",
        once=frozenset({"down_proj.bias"}),
    ),
    Kind(
        needs=frozenset({"gate_up_proj", "down_proj"}),
        counts=_expert_columns,
        cuts={"gate_up_proj": Cut(_PAIR, 1), "down_proj": Cut(("column",), 2)},
        sums="",
        sizes={"intermediate_dim": ("column",), "intermediate_size": ("column",)},
    ),
    Kind(  # experts of gpt-oss: input first, and gate and up by turns
        needs=frozenset({"gate_up_proj", "down_proj", "gate_up_proj_bias"}),
        counts=_expert_columns,
        cuts={
            "gate_up_proj": Cut(("column",), 2),
            "gate_up_proj_bias": Cut(("column",), 1),
            "down_proj": Cut(("column",), 1),
        },
        sums="",
        once=frozenset({"down_proj_bias"}),
        sizes={"intermediate_size": ("column",)},
    ),
)


class FailedOnRank(Broken):
    """The model has raised on one rank, where others may go on computing."""


def divide(model: Any, rank: int, ranks: int, add_up: Sum, computing: Around = nullcontext) -> None:
    """Leave a model in memory with this rank's part of its weights; `add_up` then runs inside of each forward, and each
    forward inside of `computing`.

    From then on any exception of the model is FailedOnRank: the other ranks would compute without this one.
    """
    for module in [*model.modules()]:
        weights = dict(module.named_parameters())
        for kind in KINDS:
            if _is(kind, weights) and (shares := _shares(kind, module, weights, rank, ranks)) is not None:
                _divide(kind, module, weights, shares, rank)
                part = module.get_submodule(kind.sums)
                part.register_forward_hook(lambda _, __, output: _summed(output, add_up))
                break
    compute = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            with computing():
                return compute(*args, **kwargs)
        except Broken:
            raise
        except Exception as e:
            raise FailedOnRank(f"the model on rank {rank} of {ranks}: {type(e).__name__}: {e}") from e

    model.forward = forward


def with_replicated(pools: Sequence[PoolSpec], whole: Sequence[PoolSpec]) -> tuple[PoolSpec, ...]:
    """A divided model's pools, beside those of the whole model: where no buffer is smaller, all ranks hold the same."""
    return tuple(
        replace(mine, replicated=mine.buffers == all_of_it.buffers)
        for mine, all_of_it in zip(pools, whole, strict=True)
    )


def head_groups(model: Any, pools: Sequence[PoolSpec]) -> list[HeadGroups | None]:
    """For each pool of a model that is not divided yet its head groups: as many as divide the heads of all buffers.
    None if some of them are divided by heads, and others are whole."""
    heads: dict[str, tuple[int, list[tuple[int, int]]]] = {}  # by buffer: the axis; the count and width of each unit
    for module in model.modules():
        weights = dict(module.named_parameters())
        kind = next((kind for kind in KINDS if _is(kind, weights)), None)
        if kind is None or not (counts := kind.counts(module)):
            continue
        for what, (weight, axis) in kind.keeps.items():
            if weight in weights:
                units = kind.cuts[weight].units
                found = [counts[unit] if len({*units}) > 1 else (counts[unit][0], 1) for unit in units]
                heads[f"layers.{module.layer_idx}.{what}"] = axis, found
    return [_groups_of(pool, heads) for pool in pools]


def _groups_of(pool: PoolSpec, heads: Mapping[str, tuple[int, list[tuple[int, int]]]]) -> HeadGroups | None:
    known = [heads[buffer.name] for buffer in pool.buffers if buffer.name in heads]
    if not known:
        return HeadGroups(1, ())
    if len(known) < len(pool.buffers):
        return None
    count = gcd(*(heads for _, units in known for heads, _ in units))
    return HeadGroups(
        count, tuple((axis, tuple(heads * width // count for heads, width in units)) for axis, units in known)
    )


def with_groups(
    pools: Sequence[PoolSpec], whole: Sequence[PoolSpec], groups: Sequence[HeadGroups | None], rank: int, ranks: int
) -> tuple[PoolSpec, ...]:
    """A divided model's pools, stored by head group if each rank has whole groups of every pool; else as they are."""
    found = []
    for mine, all_of_it, each in zip(pools, whole, groups, strict=True):
        part = None if each is None else share(each.count, rank, ranks)
        if each is None or part is None:
            return tuple(pools)
        if each.shapes(all_of_it.buffers, each.count) != all_of_it.buffers:
            return tuple(pools)
        if each.shapes(all_of_it.buffers, len(part)) != mine.buffers:
            return tuple(pools)
        found.append(replace(mine, groups=each))
    return tuple(found)


@dataclass(frozen=True)
class _Share:
    mine: range
    count: int
    width: int


def _is(kind: Kind, weights: Mapping[str, Tensor]) -> bool:
    known = kind.cuts.keys() | kind.once
    return kind.needs <= weights.keys() and all(name in known or name.split(".")[0] in kind.whole for name in weights)


def _shares(kind: Kind, module: Any, weights: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, _Share] | None:
    """This rank's part of each unit; None if some do not divide."""
    shares = {}
    for unit, (count, width) in kind.counts(module).items():
        mine = share(count, rank, ranks)
        if mine is None:
            return None
        shares[unit] = _Share(mine, count, width)
    if not shares:
        return None
    summed = {unit for name, cut in kind.cuts.items() if cut.dim and name in weights for unit in cut.units}
    if any(shares[unit].count % ranks for unit in summed):  # it would be added up more than once
        return None
    alone = {cut.units[0] for name, cut in kind.cuts.items() if name in weights and len(cut.units) == 1}
    if "k" in alone and shares["k"].count % ranks:  # value heads that lie with a key head are not divided further
        return None
    return shares


def _divide(kind: Kind, module: Any, weights: Mapping[str, Tensor], shares: Mapping[str, _Share], rank: int) -> None:
    for name, weight in weights.items():
        if name in kind.cuts:
            _put(module, name, _cut(weight, kind.cuts[name], shares))
        elif name in kind.once and rank:
            _put(module, name, torch.zeros_like(weight))
    for name, units in kind.sizes.items():
        if getattr(module, name, None) is not None:
            parts = [shares[unit.rstrip("/")] for unit in units]
            size = sum(
                len(part.mine) * (1 if unit.endswith("/") else part.width)
                for unit, part in zip(units, parts, strict=True)
            )
            setattr(module, name, size)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = len(shares["q"].mine) // len(shares["kv"].mine)


def _cut(weight: Tensor, cut: Cut, shares: Mapping[str, _Share]) -> Tensor:
    parts = [shares[unit] for unit in cut.units]
    pieces, at = [], 0
    for part in parts:
        each = part.width if len({*cut.units}) > 1 else weight.shape[cut.dim] // sum(each.count for each in parts)
        pieces.append(weight.narrow(cut.dim, at + part.mine.start * each, len(part.mine) * each))
        at += part.count * each
    return torch.cat(pieces, cut.dim)


def _put(module: Any, name: str, weight: Tensor) -> None:
    path, _, own = name.rpartition(".")
    of = module.get_submodule(path)
    setattr(of, own, nn.Parameter(weight.detach().clone(), requires_grad=False))
    if isinstance(of, nn.Linear):
        of.out_features, of.in_features = of.weight.shape
    elif isinstance(of, nn.Conv1d) and own == "weight":
        of.in_channels = of.out_channels = of.groups = len(of.weight)


def _summed(output: Tensor, add_up: Sum) -> Tensor:
    output = output.contiguous()
    add_up(output)
    return output
