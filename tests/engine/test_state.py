"""What a workspace saves, and what it refuses to save or to resume from; test_families.py shows the bits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvarve.pages import boundaries
from kvarve.reference.engine.layers import Tape
from kvarve.reference.engine.model import forward
from kvarve.reference.engine.workspace import StateLayout, Workspace
from tests.sim.models import VOCAB, tiny_model

PAGE, CHUNK = 16, 64
PROMPT = 4 * CHUNK + 23
DECODED = 3
PAGES = PROMPT // PAGE


# One for each form in which a workspace holds a layer's state; tests/engine/test_families.py has all families.
@cache
def a_model(family: str) -> tuple[Any, StateLayout]:
    model = tiny_model(family)
    return model, StateLayout.of(model, PAGE, CHUNK)


def a_prompt(tokens: int = PROMPT, seed: int = 7) -> Tensor:
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


def arenas(layout: StateLayout, slots: int) -> dict[str, dict[str, Tensor]]:
    """Memory for pages by pool, full of garbage: not a number where the type has one."""
    return {
        pool.name: {
            buffer.name: torch.full(
                (slots, *buffer.shape),
                float("nan") if getattr(torch, buffer.dtype).is_floating_point else -(1 << 40),
                dtype=getattr(torch, buffer.dtype),
            )
            for buffer in pool.buffers
        }
        for pool in layout.pools
    }


@dataclass
class SavedPages:
    """Pages of a sequence in shuffled slots; all other slots are garbage."""

    layout: StateLayout
    pages: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.arenas = arenas(self.layout, 2 * self.pages)
        rng = random.Random(self.seed)
        self.slots = {pool.name: rng.sample(range(2 * self.pages), self.pages) for pool in self.layout.pools}

    def save(self, workspace: Workspace, pool: str, positions: Sequence[int]) -> None:
        workspace.save(pool, positions, self.arenas[pool], [self.slots[pool][p] for p in positions])

    def load(self, workspace: Workspace, pool: str, positions: range) -> None:
        workspace.load(pool, positions, self.arenas[pool], [self.slots[pool][p] for p in positions])

    def resume(self, workspace: Workspace, boundary: int) -> None:
        for pool in self.layout.pools:
            needed = list(boundaries.members(boundaries.needed(boundary, pool.lookback)))
            if needed:
                self.load(workspace, pool.name, range(needed[0], needed[-1] + 1))
        workspace.resume(boundary)


def compute(model: Any, workspace: Workspace, kept: SavedPages | None = None) -> None:
    """Prefill a prompt on the grid, then a few single tokens; save each chunk's pages."""
    for start in range(0, PROMPT, CHUNK):
        stop = min(start + CHUNK, PROMPT)
        forward(model, workspace, a_prompt()[:, start:stop])
        if kept is not None:
            for pool in workspace.layout.pools:
                whole = range(start // PAGE, stop // PAGE)
                if not pool.in_place:
                    kept.save(workspace, pool.name, whole)
                elif stop % PAGE == 0:
                    kept.save(workspace, pool.name, whole[-1:])
    for _ in range(DECODED):
        forward(model, workspace, torch.tensor([[7]]))


def test_a_saved_state_is_a_private_copy() -> None:
    model, layout = a_model("qwen3_5")
    kept = SavedPages(layout, PAGES)
    first = Workspace(layout, 400)
    forward(model, first, a_prompt()[:, :CHUNK])
    for pool in layout.pools:
        kept.save(first, pool.name, range(3, 4) if pool.in_place else range(4))
    saved = {pool: {name: arena.clone() for name, arena in arena.items()} for pool, arena in kept.arenas.items()}
    second = Workspace(layout, 400)
    kept.resume(second, 4)
    for workspace in (first, second):  # many tokens at once and single ones, which take another way
        forward(model, workspace, a_prompt()[:, CHUNK : CHUNK + 5])
        forward(model, workspace, a_prompt()[:, :1])
    for pool, arena in saved.items():
        for name, tensor in arena.items():
            assert torch.equal(tensor.nan_to_num(9), kept.arenas[pool][name].nan_to_num(9))


@pytest.mark.parametrize(("tokens", "page"), [(CHUNK, 2), (CHUNK + 5, 3), (CHUNK + 5, 4)])
def test_a_state_is_saved_only_at_the_token_it_belongs_to(tokens: int, page: int) -> None:
    model, layout = a_model("qwen3_5")
    kept, workspace = SavedPages(layout, PAGES), Workspace(layout, 400)
    forward(model, workspace, a_prompt()[:, :tokens])
    with pytest.raises(AssertionError, match=f"the state after page {page} can be saved at token"):
        kept.save(workspace, "state", [page])
    assert all(arena.isnan().all() for arena in kept.arenas["state"].values())


def test_a_page_that_was_not_loaded_is_missed_before_anything_is_computed() -> None:
    model, layout = a_model("qwen3_5")
    kept = SavedPages(layout, PAGES)
    compute(model, Workspace(layout, 400), kept)
    workspace = Workspace(layout, 400)
    kept.load(workspace, "attention", range(8))
    kept.load(workspace, "state", range(3, 4))  # of another boundary
    with pytest.raises(AssertionError, match=r"cannot resume at page 8: state pages \[7\] were not loaded"):
        workspace.resume(8)


@pytest.mark.parametrize("chunks", [[CHUNK] * 8, [CHUNK] * 4 + [1] * 150, [23, 1, 1, 200, 64, 5]])
@pytest.mark.parametrize("window", [9, 16, 17, 24, 100], ids=lambda tokens: f"window-{tokens}")
def test_a_page_of_a_window_is_whole_or_refused(window: int, chunks: list[int]) -> None:
    """A page that lacks a token is right at one boundary and wrong at the next."""
    lookback = -(-(window - 1) // PAGE)
    tape = Tape(torch.empty(2 * (lookback * PAGE + CHUNK), 2), PAGE, 1000, lookback * PAGE)
    everything = torch.arange(2.0 * sum(chunks)).reshape(-1, 2)
    done = 0
    for chunk in chunks:
        tape.append(everything[done : done + chunk])
        assert tape.front % PAGE == 0
        assert torch.equal(
            tape.read(max(0, done - window + 1), tape.end), everything[max(0, done - window + 1) : tape.end]
        )
        for boundary in range(-(-done // PAGE), tape.end // PAGE + 1):  # where this chunk could be resumed from
            start = max(0, boundary - lookback)
            expected = everything[start * PAGE : boundary * PAGE].reshape(-1, PAGE, 2)
            assert torch.equal(tape.pages(start, boundary), expected)
        done += chunk
    assert len(tape._data) <= 2 * (lookback * PAGE + max(chunks))


def test_a_page_that_a_window_has_dropped_is_refused() -> None:
    model, layout = a_model("gpt_oss")
    kept, workspace = SavedPages(layout, PAGES), Workspace(layout, 400)
    compute(model, workspace)
    with pytest.raises(AssertionError, match="window-24 pages 0 to 1 are not whole"):
        kept.save(workspace, "window-24", [0, 1])
    with pytest.raises(AssertionError, match="attention pages 17 to 18 are not whole"):
        workspace.save("attention", [17, 18], kept.arenas["attention"], [0, 1])
    assert all(arena.isnan().all() for pool in kept.arenas.values() for arena in pool.values())
