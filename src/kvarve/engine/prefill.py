"""Where a request's private workspace and the cache meet: pages in before prefill, pages out after each whole chunk."""

import torch

from kvarve.core.lease import Lease
from kvarve.engine.state import StateLayout, Workspace
from kvarve.runtime import PrefixCache


def resumed(
    cache: PrefixCache, lease: Lease, layout: StateLayout, max_tokens: int, device: torch.device | str
) -> Workspace:
    """A workspace for `max_tokens` that goes on where a ready lease's pages end."""
    workspace = Workspace(layout, max_tokens, device)
    for pool, (positions, slots) in cache.pages(lease).items():
        if positions:
            workspace.load(pool, positions, cache.arena(pool), slots)
    workspace.resume(lease.boundary)
    cache.resumed(lease)
    return workspace


def keep(cache: PrefixCache, lease: Lease, workspace: Workspace) -> None:
    """Publish what was computed, if it ends at a line of the grid: only pages of whole chunks are everybody's."""
    layout = workspace.layout
    upto = min(workspace.tokens // layout.page_tokens, cache.core.keepable(lease))
    if workspace.tokens % layout.chunk_tokens or upto <= lease.room:
        return
    for pool, fresh in cache.grow(lease, upto).items():
        workspace.save(pool, [*fresh], cache.arena(pool), [*fresh.values()])
    cache.publish(lease, lease.room)
