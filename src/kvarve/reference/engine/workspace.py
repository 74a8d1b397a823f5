"""The state of a model while it computes: its pools, and one request's private workspace of tensors.

Pools follow from the buffers that the cache layers of a model keep (`layers.py`); no model is known here, no tree, tier
or thread: pages are copied in, tokens are computed, pages are copied out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvarve.errors import ConfigError, ModelError
from kvarve.pages import boundaries
from kvarve.pages.pools import BufferSpec, PoolSpec, window_lookback
from kvarve.reference.engine.layers import (
    FP8,
    LayerPlan,
    Tape,
    compute,
    dry_run,
    movable,
    new_cache,
    page_multiple,
    plan_layers,
)
from kvarve.reference.engine.model_errors import MISFITS, in_words
from kvarve.reference.engine.stepwise import layers_ignoring_state

TRIED_TOKENS = 4
KEYS_AND_VALUES = ("keys", "values")


@dataclass(frozen=True)
class StateLayout:
    """The pools of a model and the layers that fill them."""

    page_tokens: int
    chunk_tokens: int
    pools: tuple[PoolSpec, ...]
    layers: tuple[LayerPlan, ...]
    cache_class: type  # of transformers, which the model requires
    rounded: bool = False  # pages are shared whatever chunk computed them
    scales: Mapping[str, float] | None = None  # of keys and values in FP8, by buffer, where they are not 1

    @classmethod
    def of(
        cls, model: Any, page_tokens: int, chunk_tokens: int, scales: Mapping[str, float] | None = None
    ) -> "StateLayout":
        """Compute a few tokens with a causal language model of transformers and read the buffers that its layers kept.

        With `scales` keys and values are kept in FP8, and all else in the model's own types.
        Raises ModelError if a layer keeps its state in a way that is not known here, or keeps none at all, ConfigError
        if pages cannot have this size. On torch's meta device nothing is computed, only shapes.
        """
        name = type(model).__name__
        plans = plan_layers(model.config, name)
        check_pages(plans, page_tokens, name)
        tried = dry_run(model, plans)
        if model.device.type != "meta" and (lost := layers_ignoring_state(model, plans, tried.cache_class)):
            raise ModelError(
                f"{name}: layer {min(lost)} forgets its state when several tokens are computed at once, so a prompt "
                f"cannot be resumed: call kvarve.reference.engine.stepwise.make_resumable(model) first"
            )
        # By the tokens of one entry, and those of its window or None.
        entries: dict[tuple[int, int | None], list[BufferSpec]] = {}
        states: list[BufferSpec] = []
        for number, (plan, layer) in enumerate(zip(plans, tried.layers, strict=True)):
            per_token, per_sequence = plan.mixin.per_token(layer), plan.mixin.per_sequence(layer)
            if not (per_token or per_sequence) and plan.keeps:
                raise ModelError(f"{name}: layer {number} ({layer}) keeps nothing in the cache that it is given")
            if number in tried.one_for_both:
                del per_token["values"]
            for what, found in per_token.items():
                if 0 in found.entries.shape[1:]:  # nothing to keep
                    continue
                shape = (page_tokens // found.tokens, *found.entries.shape[1:])
                kind = found.tokens, plan.window if found.tokens == 1 else None
                dtype = found.entries.dtype if scales is None or what not in KEYS_AND_VALUES else FP8
                entries.setdefault(kind, []).append(_buffer(number, what, shape, dtype))
            states += [_buffer(number, what, state.shape[1:], state.dtype) for what, state in per_sequence.items()]
        if entries and all(tokens > 1 for tokens, _ in entries):
            raise ModelError(f"{name} has no attention layer, whose tokens could be counted")
        chains: dict[str, list[BufferSpec]] = {}
        for (tokens, window), buffers in entries.items():
            if window is None:
                chains.setdefault("attention" if tokens == 1 else "compressed", []).extend(buffers)
        windows = sorted((window, buffers) for (_, window), buffers in entries.items() if window is not None)
        pools = [PoolSpec(chain, tuple(buffers), lookback=None) for chain, buffers in sorted(chains.items())]
        pools += [
            PoolSpec(f"window-{window}", tuple(buffers), window_lookback(window, page_tokens))
            for window, buffers in windows
        ]
        if states:
            pools.append(PoolSpec("state", tuple(states), lookback=1, in_place=True))
        layout = cls(page_tokens, chunk_tokens, tuple(pools), plans, tried.cache_class, scales=scales)
        layout._try(model)
        return layout

    def _try(self, model: Any) -> None:
        """ModelError unless a model computes a few tokens, and one more after them, with a workspace of this layout."""
        name, workspace = type(model).__name__, Workspace(self, TRIED_TOKENS + 1, model.device)
        for start, stop in ((0, TRIED_TOKENS), (TRIED_TOKENS, TRIED_TOKENS + 1)):
            ids = torch.arange(start, stop, device=model.device)[None]
            try:
                compute(model, workspace.cache, input_ids=ids, position_ids=ids)
            except MISFITS as e:
                raise ModelError(f"{name} does not compute with the cache that its pages fill: {in_words(e)}") from e
            workspace.computed(stop - start)
            if workspace.tokens != stop:
                raise ModelError(f"{name} keeps {workspace.tokens} tokens of a prompt of {stop}: it adds its own")

    @property
    def page_multiple(self) -> int:
        """Tokens of which a page, and so a chunk, has to be a multiple."""
        return page_multiple(self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in the pages of all chains."""
        return sum(pool.payload_bytes for pool in self.pools if pool.lookback is None) / self.page_tokens

    @property
    def bytes_per_snapshot(self) -> int:
        """Bytes needed, beside the chains, to resume at one boundary: windows and states."""
        return sum(pool.payload_bytes * pool.lookback for pool in self.pools if pool.lookback is not None)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of a running request's workspace, beside the pages of chains: windows and states."""
        total = 0
        for pool in self.pools:
            if pool.lookback is not None:
                capacity = window_capacity(pool.lookback, self.page_tokens, self.chunk_tokens) // self.page_tokens
                total += sum(buffer.nbytes for buffer in pool.buffers) * (1 if pool.in_place else capacity)
        return total

    @property
    def grid_tokens(self) -> int:
        """Where prompts resume: at every chunk, since other chunks round differently; or at every page."""
        return self.page_tokens if self.rounded else self.chunk_tokens

    @property
    def shortest_hit(self) -> int:
        """Tokens of the shortest prompt that can hit: up to the first line of the grid, and a token left to compute."""
        return self.grid_tokens + 1

    def read_before(self, tokens: int) -> int:
        """Of the last tokens before a boundary after `tokens`, how many are in pages that a resume there reads."""
        reach = (tokens if pool.lookback is None else pool.lookback * self.page_tokens for pool in self.pools)
        return min(tokens, max(reach))

    def chunk_end(self, computed: int, until: int, snapshots: int) -> int:
        """Where the chunk ends that begins after `computed` tokens of a prompt of `until`.

        No chunk goes beyond a boundary of the set `snapshots` (in pages), as a state is that of the last token; nor
        beyond the last line of the grid below the prompt's end, from which the same prompt resumes.
        """
        chunk, grid, page = self.chunk_tokens, self.grid_tokens, self.page_tokens
        ends = [until, (computed // chunk + 1) * chunk, (until - 1) // grid * grid]
        if ahead := snapshots >> computed // page + 1:
            ends.append((computed // page + (ahead & -ahead).bit_length()) * page)
        return min(end for end in ends if end > computed)

    @property
    def kv_cache_dtype(self) -> str:
        """What --kv-cache-dtype says."""
        return "auto" if self.scales is None else "fp8_e4m3"

    def scale(self, buffer: str) -> float:
        """By which the numbers of a buffer were divided."""
        return (self.scales or {}).get(buffer, 1.0)

    def pool(self, name: str) -> PoolSpec:
        return next(pool for pool in self.pools if pool.name == name)


def window_capacity(lookback: int, page_tokens: int, chunk_tokens: int) -> int:
    """Capacity of a window in tokens: twice what is kept, so that its front moves seldom, not at each token."""
    return 2 * (lookback * page_tokens + chunk_tokens)


def check_pages(plans: Sequence[LayerPlan], page_tokens: int, name: str) -> None:
    """ConfigError if a page would cut an entry of one of the layers in two."""
    multiple = page_multiple(plans)
    if page_tokens % multiple:
        fits = -(-page_tokens // multiple) * multiple
        raise ConfigError(
            f"{name} compresses {multiple} tokens into one entry, which a page of {page_tokens} tokens would cut in "
            f"two: page tokens must be a multiple such as {fits}, and chunk tokens a multiple of them"
        )


def _buffer(layer: int, what: str, shape: Sequence[int], dtype: torch.dtype) -> BufferSpec:
    return BufferSpec(f"layers.{layer}.{what}", tuple(shape), str(dtype).removeprefix("torch."))


class Workspace:
    """The state of one request while it computes: load cached pages, `resume`, compute, save new pages.

    `cache` goes into the model's forward. It is private: `load` copies pages in and `save`
    copies them out, so no later token can change a page that others share. Arenas are mappings from the buffer's
    name to [slots, *buffer.shape] on the workspace's device.
    """

    def __init__(self, layout: StateLayout, max_tokens: int, device: torch.device | str = "cpu") -> None:
        self.layout, self.max_tokens, self.device = layout, max_tokens, torch.device(device)
        layers = [plan.build() for plan in layout.layers]
        self.cache = new_cache(layout.cache_class, layers)
        self._tapes: dict[str, Tape] = {}
        self._states: dict[str, Tensor] = {}
        self._loaded = dict.fromkeys((pool.name for pool in layout.pools), 0)  # pages, as a set of bits
        for pool in layout.pools:
            for buffer in pool.buffers:
                _, number, what = buffer.name.split(".", 2)
                layer, kind = layers[int(number)], {"dtype": getattr(torch, buffer.dtype), "device": self.device}
                if pool.in_place:
                    self._states[buffer.name] = layer.hold(what, torch.zeros(1, *buffer.shape, **kind))
                else:
                    self._tapes[buffer.name] = layer.tapes[what] = self._tape(pool, buffer)
        self._counted = 0  # tokens of a model of states alone, whose layers count none
        self._clock = next((tape for tape in self._tapes.values() if tape.per_page == layout.page_tokens), None)

    def _tape(self, pool: PoolSpec, buffer: BufferSpec) -> Tape:
        """The entries of one buffer: here, in memory of the workspace's own."""
        per_page, *shape = buffer.shape
        tokens = self.layout.page_tokens // per_page  # of one entry
        capacity = window_capacity(pool.lookback or 0, self.layout.page_tokens, self.layout.chunk_tokens)
        if pool.lookback is None:  # all windows have one size, so that rows of a batch can lie together
            capacity = min(self.max_tokens, capacity)
        data = torch.empty(capacity // tokens, *shape, dtype=getattr(torch, buffer.dtype), device=self.device)
        keep = pool.lookback and pool.lookback * per_page
        return Tape(data, per_page, self.max_tokens // tokens, keep, self.layout.scale(buffer.name))

    @property
    def tokens(self) -> int:
        """How many tokens have been computed or loaded."""
        return self._counted if self._clock is None else self._clock.end

    def computed(self, tokens: int) -> None:
        """A forward has computed this many tokens."""
        self._counted += tokens

    def load(self, pool_name: str, positions: range, arena: Mapping[str, Tensor], slots: Sequence[int]) -> None:
        """Copy the pages at `positions` of a sequence in, `slots[i]` of the arena to `positions[i]`.

        A window's pages come in order; of a state, the last page loaded counts.
        """
        pool = self.layout.pool(pool_name)
        assert positions.stop * self.layout.page_tokens <= self.max_tokens, "more pages than this workspace is for"
        index = torch.tensor(slots, device=self.device)
        for buffer in pool.buffers:
            into = self._states[buffer.name] if pool.in_place else self._tapes[buffer.name].extend(positions)
            assert len(into) == len(slots) == len(positions)  # or torch would resize it
            self._copy_in(buffer, movable(arena[buffer.name]), index, movable(into))
        known = 0 if pool.in_place else self._loaded[pool_name]
        self._loaded[pool_name] = known | boundaries.span(positions.start, positions.stop)

    def _copy_in(self, buffer: BufferSpec, arena: Tensor, index: Tensor, into: Tensor) -> None:
        torch.index_select(arena, 0, index, out=into)

    def arrived(self) -> None:
        """All pages have been copied in: always, here."""

    def resume(self, boundary: int) -> None:
        """Let the next forward compute the first token behind `boundary` pages; 0 begins a sequence."""
        for pool in self.layout.pools:
            pages = list(boundaries.members(boundaries.needed(boundary, pool.lookback) & ~self._loaded[pool.name]))
            assert not pages, f"cannot resume at page {boundary}: {pool.name} pages {pages} were not loaded"
        self._counted = boundary * self.layout.page_tokens
        for tape in self._tapes.values():
            tape.rewind(boundary * tape.per_page)
        for layer in self.cache.layers:
            layer.resume_at(boundary * self.layout.page_tokens)

    def save(self, pool_name: str, positions: Sequence[int], arena: Mapping[str, Tensor], slots: Sequence[int]) -> None:
        """Copy the pages at `positions`, in ascending order, out to `slots` of the arena.

        A recurrent state is that of the last token, so it can be saved only while exactly its page's tokens are in.
        """
        pool = self.layout.pool(pool_name)
        if not positions:
            return
        index = torch.tensor(slots, device=self.device)
        start, stop = positions[0], positions[-1] + 1
        consecutive, last = stop - start == len(positions), stop * self.layout.page_tokens
        for buffer in pool.buffers:
            if pool.in_place:
                assert self.tokens == last and consecutive, (
                    f"the state after page {stop - 1} can be saved at token {last} only, not at {self.tokens}"
                )
                pages = self._states[buffer.name]
            else:
                tape = self._tapes[buffer.name]
                assert tape.front <= start * tape.per_page and stop * tape.per_page <= tape.end, (
                    f"{pool_name} pages {start} to {stop - 1} are not whole: "
                    f"{tape.front} to {tape.end} are here, {tape.per_page} a page"
                )
                pages = movable(tape.pages(start, stop))
                if not consecutive:
                    pages = pages[[position - start for position in positions]]
            movable(arena[buffer.name]).index_copy_(0, index, pages)

    def own(self) -> None:
        """Copy windows and states that are views of a batch's tensors into its own, or it would keep those alive."""
        for name, state in self._states.items():
            if state.untyped_storage().nbytes() > state.nbytes:
                self._put_state(name, state.clone())
        for tape in self._tapes.values():
            tape.own()

    def _put_state(self, name: str, state: Tensor) -> None:
        """Keep a state in another tensor from now on."""
        _, number, what = name.split(".", 2)
        of, _, index = what.partition(".")
        getattr(self.cache.layers[int(number)], f"{of}_states")[int(index)] = self._states[name] = state
