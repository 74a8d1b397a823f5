"""Every family computes, from pages that have been everywhere, the bits that it computes without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from engines import MIB, every_dtype, every_family
from engines import a_model as a_loaded_model
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.lease import Lease
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError, ModelError
from kvarve.pages.pools import ModelIdentity, Tier
from kvarve.reference.engine.model import forward
from kvarve.reference.engine.paging import keep, resumed
from kvarve.reference.engine.stepwise import make_resumable
from kvarve.reference.engine.workspace import StateLayout, Workspace
from kvarve.storage import MemoryStorage
from tests.sim.models import FAMILIES, STATES_ALONE, VOCAB, tiny_config, tiny_model

PAGE, CHUNK = 16, 64
CHUNKS, TAIL = 2, 23
DECODED = 4


def a_model(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, StateLayout]:
    loaded = a_loaded_model(family, dtype)
    return loaded.model, loaded.layout


def a_prompt(layout: StateLayout, seed: int = 7) -> Tensor:
    tokens = CHUNKS * layout.chunk_tokens + TAIL
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


@dataclass
class Run:
    """The output of a run: the logits after every chunk of the prompt and every decoded token, and its tokens."""

    logits: dict[int, Tensor] = field(default_factory=dict)  # by the number of tokens before them
    tokens: list[int] = field(default_factory=list)

    def goes_on_like(self, cold: "Run") -> bool:
        """Bit for bit, over what this run computed of it."""
        return self.tokens == cold.tokens and all(
            torch.equal(logits, cold.logits[position]) for position, logits in self.logits.items()
        )


def compute(
    model: Any,
    workspace: Workspace,
    prompt: Tensor,
    decoded: int = DECODED,
    kept: tuple[PrefixCache, Lease] | None = None,
) -> Run:
    """Prefill the rest of a prompt on the grid, then decode greedily."""
    run, chunk = Run(), workspace.layout.chunk_tokens
    while workspace.tokens < prompt.shape[1]:
        start = workspace.tokens
        ids = prompt[:, start : start + chunk]
        run.logits[start + ids.shape[1]] = forward(model, workspace, ids)
        if kept is not None:
            keep(*kept, workspace)
    for _ in range(decoded):
        run.tokens.append(int(run.logits[workspace.tokens].argmax()))
        logits = forward(model, workspace, torch.tensor([run.tokens[-1:]]))
        run.logits[workspace.tokens] = logits
    return run


@contextmanager
def a_cache(layout: StateLayout, dtype: torch.dtype) -> Iterator[PrefixCache]:
    """A cache of all three tiers that keeps windows and states at every line of the grid."""
    name = str(dtype).removeprefix("torch.")
    identity = ModelIdentity("tiny", "random", name, layout.page_tokens, layout.chunk_tokens, layout.pools)
    config = CacheConfig(
        32 * MIB,
        32 * MIB,
        policies=Policies(storage_wait="all", keep_states=f"ends,branches,chunks,every:{layout.chunk_tokens}"),
    )
    cache = PrefixCache(identity, config, storage=MemoryStorage(64 * MIB, identity.fingerprint(), "test"))
    try:
        yield cache
    finally:
        cache.shutdown()


def claimed(cache: PrefixCache, tokens: list[int]) -> Lease:
    cache.step()
    lease = cache.open(tokens)
    while not cache.claim(lease):
        assert cache.wait(10), "nothing came from storage"
        cache.step()
    return lease


def filled(cache: PrefixCache, model: Any, layout: StateLayout, prompt: Tensor) -> Run:
    """Compute a prompt from nothing and leave its pages in storage only."""
    lease = claimed(cache, prompt[0].tolist())
    workspace = resumed(cache, lease, layout, prompt.shape[1] + DECODED, "cpu")
    assert workspace.tokens == 0
    cold = compute(model, workspace, prompt, kept=(cache, lease))
    cache.close(lease)
    assert cache.flush() > 0
    return cold


def test_a_chunk_that_is_not_whole_takes_no_slot() -> None:
    """Its pages are full, but no other prompt could be known by them: keys are bound to whole chunks."""
    model, layout = a_model("qwen3")
    tokens = layout.chunk_tokens + 2 * layout.page_tokens
    prompt = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(7))
    with a_cache(layout, torch.float32) as cache:
        lease = claimed(cache, prompt[0].tolist())
        workspace = resumed(cache, lease, layout, tokens, "cpu")
        compute(model, workspace, prompt, decoded=0, kept=(cache, lease))
        cache.close(lease)
        used = [level for name, level in cache.stats().items() if name.startswith("used.device.")]
        assert used == [layout.chunk_tokens // layout.page_tokens]


@every_dtype
@every_family
def test_from_any_boundary_out_of_storage_the_logits_are_those_of_the_cold_run(family: str, dtype: torch.dtype) -> None:
    model, layout = a_model(family, dtype)
    prompt = a_prompt(layout)
    room = prompt.shape[1] + DECODED
    with a_cache(layout, dtype) as cache:
        cold = filled(cache, model, layout, prompt)
        assert all(logits.isfinite().all() for logits in cold.logits.values())
        for chunks in range(1, CHUNKS + 1):
            start = chunks * layout.chunk_tokens
            for pool in layout.pools:  # what is not loaded is no number
                for buffer in cache.worker.arena(pool.name).values():
                    buffer.fill_(float("nan") if buffer.is_floating_point() else -1 << 40)
            lease = claimed(cache, prompt[0, : start + 1].tolist())  # as deep as this one's pages reach
            assert lease.boundary == start // layout.page_tokens
            assert lease.from_tiers()[Tier.STORAGE] == layout.read_before(start) // layout.page_tokens
            workspace = resumed(cache, lease, layout, room, "cpu")
            assert workspace.tokens == start
            assert compute(model, workspace, prompt).goes_on_like(cold), f"resumed at token {start}"
            cache.close(lease)
            cache.flush()


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name != "qwen3_5")]
)
def test_a_wrong_buffer_of_any_page_is_noticed(family: str) -> None:
    """A comparison that cannot fail would show nothing."""
    model, layout = a_model(family)
    prompt = a_prompt(layout)
    with a_cache(layout, torch.float32) as cache:
        cold = filled(cache, model, layout, prompt)
        lease = claimed(cache, prompt[0].tolist())
        pages = cache.pages(lease)
        whole = {pool.name: dict(cache.worker.arena(pool.name)) for pool in layout.pools}

        def resume(arenas: dict[str, dict[str, Tensor]]) -> Workspace:
            workspace = Workspace(layout, prompt.shape[1])
            for pool, (positions, slots) in pages.items():
                workspace.load(pool, positions, arenas[pool], slots)
            workspace.resume(lease.boundary)
            return workspace

        def next_few(arenas: dict[str, dict[str, Tensor]]) -> Tensor:
            workspace = resume(arenas)
            start = workspace.tokens  # a short convolution soon forgets: compare the first tokens
            pieces = [(start, start + 1), (start + 1, start + 3), (start + 3, start + 8), (start + 8, prompt.shape[1])]
            return torch.stack([forward(model, workspace, prompt[:, first:last]) for first, last in pieces])

        assert compute(model, resume(whole), prompt, decoded=0).goes_on_like(Run(cold.logits))
        good = next_few(whole)
        unnoticed = []
        for pool in layout.pools:
            for buffer in pool.buffers:
                broken = whole[pool.name][buffer.name].clone()
                broken[pages[pool.name][1][-1]].neg_().sub_(1)
                bad = next_few(whole | {pool.name: whole[pool.name] | {buffer.name: broken}})
                if torch.equal(bad, good):
                    unnoticed.append(f"{pool.name} {buffer.name}")
        assert not unnoticed
        cache.close(lease)


@every_family
def test_a_prompt_means_in_chunks_what_it_means_at_once(family: str) -> None:
    """Else the restored state could have been wrong from the start: the split changes only the rounding."""
    model, layout = a_model(family)
    prompt = a_prompt(layout)
    with torch.no_grad():
        at_once = model(input_ids=prompt, use_cache=True).logits[0]
    workspace = Workspace(layout, prompt.shape[1])
    while workspace.tokens < prompt.shape[1]:
        logits = forward(model, workspace, prompt[:, workspace.tokens : workspace.tokens + 37])
        torch.testing.assert_close(logits, at_once[workspace.tokens - 1], rtol=0, atol=2e-3)


TOKENS, STATE = {"keys", "values"}, {"conv.0", "recurrent.0"}
ATTENTION = {"attention": (None, False, TOKENS)}
OVERLAPS = {f"overlap_{what}.{whose}" for what in ("kv", "gate") for whose in ("compressor", "indexer")}
POOLS: dict[str, dict[str, tuple[int | None, bool, set[str]]]] = {
    "qwen3": ATTENTION,
    "qwen3_5": ATTENTION | {"state": (1, True, STATE)},
    "jamba": ATTENTION | {"state": (1, True, STATE)},
    **{name: {"state": (1, True, STATE)} for name in STATES_ALONE},
    "minimax_m3": {"attention": (None, False, TOKENS | {"idx_keys"})},
    "lfm2": ATTENTION | {"state": (1, True, {"conv.0"})},
    "minimax": ATTENTION | {"state": (1, True, {"recurrent.0"})},
    "gpt_oss_wide": ATTENTION | {"window-100": (7, False, TOKENS)},
    "deepseek_v32": {"attention": (None, False, TOKENS | {"indexer_keys"})},
    "deepseek_v4": {
        "compressed": (None, False, {"compressed_kv.compressor", "compressed_kv.indexer"}),
        "window-24": (1, False, {"keys"}),  # which are the values, too
        "state": (1, True, OVERLAPS),
    },
}


@every_family
def test_the_layout_says_what_each_family_keeps(family: str) -> None:
    found = {
        pool.name: (pool.lookback, pool.in_place, {buffer.name.split(".", 2)[2] for buffer in pool.buffers})
        for pool in a_model(family)[1].pools
    }
    assert found == POOLS.get(family, found)


@pytest.mark.parametrize("page", [16, 64, 192])
def test_a_page_that_would_cut_a_compressed_entry_in_two_is_refused_and_one_that_fits_named(page: int) -> None:
    fits = {16: 128, 64: 128, 192: 256}[page]
    with pytest.raises(ConfigError, match=f"128 tokens into one entry.* page of {page} .*such as {fits}"):
        StateLayout.of(a_model("deepseek_v4")[0], page, 4 * page)


def test_a_model_that_forgets_between_chunks_is_refused_until_it_has_been_taught() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config("jamba")).eval()
    with pytest.raises(ModelError, match="layer 0 forgets its state when several tokens are computed at once"):
        StateLayout.of(model, PAGE, CHUNK)
    make_resumable(model)
    layout = StateLayout.of(model, PAGE, CHUNK)
    prompt = a_prompt(layout)
    workspace = Workspace(layout, 1000)
    forward(model, workspace, prompt[:, :CHUNK])
    one_by_one, at_once = Workspace(layout, 1000), Workspace(layout, 1000)
    for other in (one_by_one, at_once):
        forward(model, other, prompt[:, :CHUNK])
    for position in range(CHUNK, CHUNK + 5):
        expected = forward(model, one_by_one, prompt[:, position : position + 1])
    torch.testing.assert_close(forward(model, at_once, prompt[:, CHUNK : CHUNK + 5]), expected, rtol=0, atol=1e-4)


def test_a_mixer_that_forgets_is_found_behind_one_that_remembers() -> None:
    """The first layer's output depends on its state, and so do all later layers."""
    model = tiny_model("qwen3_5")
    mixer = model.model.layers[2].linear_attn

    class Forgetful(type(mixer)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            if hidden_states.shape[1] > 1:
                (cache,) = (value for value in kwargs.values() if isinstance(value, Cache))
                cache.layers[2].has_previous_state[0] = False
            return super().forward(hidden_states, **kwargs)

    mixer.__class__ = Forgetful
    with pytest.raises(ModelError, match="layer 2 forgets its state"):
        StateLayout.of(model, PAGE, CHUNK)


def test_a_model_that_remembers_is_left_as_it_is() -> None:
    for family in ("qwen3", "bamba", "minimax", "qwen4_exp"):
        model = tiny_model(family)
        assert not [name for name, module in model.named_modules() if "forward" in vars(module)], family
