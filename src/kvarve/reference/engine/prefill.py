"""Between a request's private workspace and the cache: pages in before prefill, out at each line of the grid."""

import torch

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.requests.lease import Lease
from kvarve.reference.engine.workspace import StateLayout, Workspace


def resumed(
    cache: PrefixCache, lease: Lease, layout: StateLayout, max_tokens: int, device: torch.device | str
) -> Workspace:
    """A workspace for `max_tokens` that resumes where a ready lease's pages end."""
    workspace = Workspace(layout, max_tokens, device)
    for arrival in cache.arrivals():
        arrival.wait_all()
    for pool, (positions, slots) in cache.pages(lease).items():
        if positions:
            workspace.load(pool, positions, cache.arena(pool), slots)
    workspace.resume(lease.boundary)
    cache.resumed(lease)
    return workspace


GROW_WAIT_S = 0.5  # for evictions in flight; then a request goes on without keeping its pages


def room_comes(cache: PrefixCache, lease: Lease, layout: StateLayout, tokens: int) -> bool:
    """Whether evictions in flight will free slots for the pages up to a line of the grid at `tokens`."""
    upto = min(tokens // layout.page_tokens, cache.keepable(lease))
    return tokens % layout.grid_tokens == 0 and upto > lease.grown and cache.short(lease, upto)


def wait_for_room(cache: PrefixCache, lease: Lease, workspace: Workspace) -> None:
    """Wait a moment for slots to `keep` pages in, on a thread that has nothing else to do."""
    end = cache.now() + GROW_WAIT_S
    while room_comes(cache, lease, workspace.layout, workspace.tokens) and cache.now() < end:
        cache.wait(0.01)
        cache.step()


def keep(cache: PrefixCache, lease: Lease, workspace: Workspace) -> None:
    """Publish the computed pages, if they end at a line of the grid."""
    layout = workspace.layout
    upto = min(workspace.tokens // layout.page_tokens, cache.keepable(lease))
    if workspace.tokens % layout.grid_tokens or upto <= lease.grown:
        return
    for pool, fresh in cache.grow(lease, upto).items():
        workspace.save(pool, [*fresh], cache.arena(pool), [*fresh.values()])
    cache.publish(lease, lease.grown)
