"""Which KV heads a worker's blocks hold, so that with rounded hits pages are stored by head.

Engines of every size of tensor parallelism share such pages, since a head's bytes are the same on whichever rank it is.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvarve.connectors.vllm.block_layout import head_layout
from kvarve.connectors.vllm.block_plan import Group
from kvarve.connectors.vllm.groups import kv_heads, layout_of, on_all_stages, same_on_all_ranks
from kvarve.pages.pools import HeadGroups, share

log = logging.getLogger("vllm.kvarve")


class Heads(NamedTuple):
    """Of one group's pages: the heads that they hold here, the model's, and how one head's bytes lie, for the identity.
    What is not divided counts as one head."""

    here: int
    of: int
    layout: str

    def groups(self, buffers: int) -> HeadGroups:
        return HeadGroups(self.of, ((0, (1,)),) * buffers)


def heads_of(
    config: Any, cache: Any, groups: Sequence[Group], tensors: Sequence[Mapping[str, torch.Tensor]], page_tokens: int
) -> list[Heads] | None:
    """By group its heads; None, with a word in the log, if pages of some can only be stored as each rank has them."""
    found, why = list[Heads](), ""
    for group, mine in zip(groups, tensors, strict=True):
        each = _heads(config, cache, group, mine, page_tokens)
        if isinstance(each, str):
            why = why or f"{group.name}: {each}"
        else:
            found.append(each)
    if why and config.parallel_config.rank % config.parallel_config.tensor_parallel_size == 0:
        log.warning("hits rounded: no page is shared with another tensor_parallel_size, as of group %s", why)
    return found if on_all_stages(not why) else None


def _heads(config: Any, cache: Any, group: Group, tensors: Mapping[str, torch.Tensor], page_tokens: int) -> Heads | str:
    """Or why there are none that engines of other sizes could share, and what to do."""
    spec, parallel = cache.kv_cache_groups[group.number], config.parallel_config
    layers, size = config.compilation_config.static_forward_context, parallel.tensor_parallel_size
    if same_on_all_ranks(spec.kv_cache_spec, config):
        return Heads(1, 1, layout_of(spec, tensors))
    if group.offered:
        return "states are kept as each rank has them; only models without states share pages"
    if group.cells(page_tokens) > 1:
        return f"its pages of {page_tokens} tokens are parts of blocks; leave out --prefix-match-unit"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "each rank calculates scales of its own; leave out --calculate-kv-scales"
    if (getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None) or {}).get("strategy") == "attn_head":
        return "each head has scales of its own, which kvarve does not tell apart from another layout"
    if not any(name in layers for name in tensors):  # they are on another pipeline stage
        return Heads(1, 1, f"{group.kind} {group.block_tokens} elsewhere")
    if len({getattr(layers[name], "num_kv_heads", 0) for name in tensors}) > 1:
        return "its layers, or those of a draft model among them, have several numbers of KV heads"
    found = head_layout(layers, tensors, cache.num_blocks, group.block_tokens)
    if found is None:
        return "a KV head's bytes must be in one piece of a block; set VLLM_KV_CACHE_LAYOUT=HND"
    here, digest = found
    of = here * size if here > 1 or size == 1 else kv_heads(config)
    part = of and share(of, parallel.rank % size, size)
    if not of or not part or len(part) != here:
        return "which head each rank has is not known, as layers have several numbers of them; take fewer ranks"
    return Heads(here, of, f"{group.kind} {group.block_tokens} by head {digest}")
