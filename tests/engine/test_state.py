"""A request that resumes from saved pages computes the same bits as without them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvarve import boundaries
from kvarve.engine.layers import Tape
from kvarve.engine.model import forward
from kvarve.engine.state import StateLayout, Workspace
from kvarve.testing.models import VOCAB, tiny_model

PAGE, CHUNK = 16, 64
PROMPT = 4 * CHUNK + 23
DECODED = 3
PAGES = PROMPT // PAGE
# One for each form in which a workspace holds a layer's state; tests/engine/test_families.py has all families.
every_kind = pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss_wide", "deepseek_v32", "falcon_h1"])


@cache
def a_model(family: str) -> tuple[Any, StateLayout]:
    model = tiny_model(family)
    return model, StateLayout.of(model, PAGE, CHUNK)


def a_prompt(tokens: int = PROMPT, seed: int = 7) -> Tensor:
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


def schedule(start: int, stop: int) -> list[tuple[int, int]]:
    """The chunks of the grid between two tokens."""
    return [(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]


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
class Run:
    """The output of a run: the logits after every chunk and every decoded token, and the tokens it chose."""

    logits: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


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

    def only(self, boundary: int) -> "SavedPages":
        """Only the pages that this boundary needs, in other slots."""
        other = SavedPages(self.layout, self.pages, self.seed + 1)
        for pool in self.layout.pools:
            for page in boundaries.members(boundaries.needed(boundary, pool.lookback)):
                for name, arena in other.arenas[pool.name].items():
                    arena[other.slots[pool.name][page]] = self.arenas[pool.name][name][self.slots[pool.name][page]]
        return other

    def resume(self, workspace: Workspace, boundary: int) -> None:
        for pool in self.layout.pools:
            needed = list(boundaries.members(boundaries.needed(boundary, pool.lookback)))
            if needed:
                self.load(workspace, pool.name, range(needed[0], needed[-1] + 1))
        workspace.resume(boundary)


def compute(model: Any, workspace: Workspace, prompt: Tensor, kept: SavedPages | None = None) -> Run:
    """Prefill the rest of a prompt on the grid, then decode greedily; save each chunk's pages."""
    run = Run()
    for start, stop in schedule(workspace.tokens, prompt.shape[1]):
        run.logits.append(forward(model, workspace, prompt[:, start:stop]))
        if kept is not None:
            for pool in workspace.layout.pools:
                whole = range(start // PAGE, stop // PAGE)
                if not pool.in_place:
                    kept.save(workspace, pool.name, whole)
                elif stop % PAGE == 0:
                    kept.save(workspace, pool.name, whole[-1:])
    for _ in range(DECODED):
        run.tokens.append(int(run.logits[-1].argmax()))
        run.logits.append(forward(model, workspace, torch.tensor([run.tokens[-1:]])))
    return run


def equal(one: Run, other: Run) -> bool:
    """Bit for bit, over the chunks that both computed: a resumed run's chunks are the last ones of a cold run."""
    count = min(len(one.logits), len(other.logits))
    return one.tokens == other.tokens and all(
        torch.equal(a, b) for a, b in zip(one.logits[-count:], other.logits[-count:], strict=True)
    )


@every_kind
def test_nothing_but_the_pages_that_a_boundary_needs_decides_the_bits(family: str) -> None:
    """Pages that are not needed are NaN, and a workspace may have any capacity."""
    model, layout = a_model(family)
    kept = SavedPages(layout, PAGES)
    cold = compute(model, Workspace(layout, PROMPT + DECODED), a_prompt(), kept)
    assert not torch.stack(cold.logits).isnan().any()
    for boundary in range(0, PAGES + 1, 2 * CHUNK // PAGE):
        workspace = Workspace(layout, 400)
        kept.only(boundary).resume(workspace, boundary)
        assert workspace.tokens == boundary * PAGE
        assert equal(compute(model, workspace, a_prompt()), cold), f"resumed at page {boundary}"


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
    compute(model, Workspace(layout, 400), a_prompt(), kept)
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
    compute(model, workspace, a_prompt())
    with pytest.raises(AssertionError, match="window-24 pages 0 to 1 are not whole"):
        kept.save(workspace, "window-24", [0, 1])
    with pytest.raises(AssertionError, match="attention pages 17 to 18 are not whole"):
        workspace.save("attention", [17, 18], kept.arenas["attention"], [0, 1])
    assert all(arena.isnan().all() for pool in kept.arenas.values() for arena in pool.values())
