"""What a model keeps while it computes: which pools it has, and one request's private workspace of tensors.

This is the one module that knows the cache layers of transformers, and it knows them by their class, never by a
model's name. It knows no tree, no tier and no thread: pages are copied in, tokens are computed, pages are copied out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvarve import boundaries
from kvarve.errors import ModelError
from kvarve.model import BufferSpec, PoolSpec, window_lookback


class Tape:
    """The tokens of one buffer, one after the other in one tensor [room, *shape], from token `front` up to `end`.

    A page is a slice and a run of pages is a longer slice, so both are copied without a loop. `keep` says how many
    tokens before a chunk are still of use: None all of them, or a sliding window's, whose older pages are dropped,
    always whole ones, when the room is used up. So every page between `front` and `end` is complete.
    """

    def __init__(self, room: Tensor, page_tokens: int, limit: int, keep: int | None) -> None:
        """Begin with `room` [tokens, *shape], of any content; without a `keep` it is doubled, up to the limit."""
        self._data, self.page_tokens, self.limit, self.keep = room, page_tokens, limit, keep
        self.front = self.end = 0

    def append(self, tokens: Tensor) -> None:
        """Write [n, *shape] behind the last token."""
        stop = self.end + len(tokens)
        self._make_room(stop)
        self._data[self.end - self.front : stop - self.front].copy_(tokens)
        self.end = stop

    def read(self, start: int, stop: int) -> Tensor:
        """The tokens [stop - start, *shape] as a view, whose strides say nothing about the room behind them."""
        return self._data[start - self.front : stop - self.front]

    def pages(self, start: int, stop: int) -> Tensor:
        """The pages [stop - start, page_tokens, *shape] as a view."""
        tokens = self.read(start * self.page_tokens, stop * self.page_tokens)
        return tokens.view(stop - start, self.page_tokens, *tokens.shape[1:])

    def extend(self, pages: range) -> Tensor:
        """A view of those pages to write into; the tape reaches to their end, and a window's begins with its first."""
        start, stop = pages.start * self.page_tokens, pages.stop * self.page_tokens
        if self.keep is not None:
            if not self.end:
                self.front = self.end = start
            assert start == self.end, f"the pages of a window come in order: token {start} after {self.end}"
        self._make_room(stop)
        self.end = max(self.end, stop)
        return self.pages(pages.start, pages.stop)

    def rewind(self, end: int) -> None:
        """Forget what is behind token `end`; nothing at all is left at 0."""
        assert end == 0 or self.front <= end <= self.end
        self.end, self.front = end, self.front if end else 0

    def _make_room(self, stop: int) -> None:
        room = len(self._data)
        if stop - self.front <= room:
            return
        front = self.front
        if self.keep is not None:
            front = max(front, (self.end - self.keep) // self.page_tokens * self.page_tokens)
        else:
            room = min(2 * room, self.limit)
        kept = self.read(front, self.end)
        self._data = kept.new_empty((max(room, stop - front), *kept.shape[1:]))
        self._data[: len(kept)] = kept
        self.front = front


class _OnTape:
    """Mixed into an attention layer of transformers: the tokens live on our tapes; types and masks stay theirs."""

    tapes: dict[str, Tape]
    cumulative_length: int  # where a sliding layer looks when it makes its mask
    past: int | None  # how many tokens before the new ones the layer reads: None all of them

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take [1, heads, n, width] and give back what the layer attends to, new tokens included."""
        keys = self._push("keys", key_states[0].transpose(0, 1)).transpose(0, 1)[None]
        values = self._push("values", value_states[0].transpose(0, 1)).transpose(0, 1)[None]
        self.cumulative_length = self.get_seq_length()
        return keys, values

    def get_seq_length(self) -> int:
        return self.tapes["keys"].end

    def _push(self, name: str, tokens: Tensor) -> Tensor:
        tape = self.tapes[name]
        start = 0 if self.past is None else max(0, tape.end - self.past)
        tape.append(tokens)
        return tape.read(start, tape.end)


class _OnTapeIndexed(_OnTape):
    """The same for sparse attention, which also keeps the keys of its indexer and, in some models, their positions."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take [1, n, width] and give back the index keys of all tokens."""
        return self._push("indexer_keys", indexer_key_states[0])[None]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [dims, 1, tokens] of all tokens, or None before the first: models set it whole, we add the new."""
        tape = self.tapes.get("indexer_position_ids")
        return tape.read(0, tape.end).T[:, None] if tape and tape.end else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        if positions is not None:
            tape = self.tapes["indexer_position_ids"]
            tape.append(positions[:, 0, tape.end :].T)


ON_TAPE = {
    DynamicLayer: _OnTape,
    DynamicSlidingWindowLayer: _OnTape,
    DynamicIndexedLayer: _OnTapeIndexed,
    LinearAttentionAndFullAttentionLayer: _OnTape,
    LinearAttentionAndSlidingWindowAttentionLayer: _OnTape,
}
# What stands in for each class of transformers. A class that is not here keeps something that we do not know.
STAND_INS: dict[type, type] = {
    base: type(f"{base.__name__}OnTape", (mixin, base), {}) for base, mixin in ON_TAPE.items()
} | {LinearAttentionLayer: LinearAttentionLayer, DummyLayer: DummyLayer}


@dataclass(frozen=True)
class LayerPlan:
    """How to build one layer of the cache: a class of transformers and what its constructor takes."""

    cache_class: type
    sliding_window: int | None
    number_of_states: int

    @classmethod
    def of(cls, layer: Any) -> "LayerPlan":
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        states = layer.number_of_states if isinstance(layer, LinearAttentionLayer) else 0
        return cls(type(layer), window, states)

    def build(self) -> Any:
        layer = STAND_INS[self.cache_class](sliding_window=self.sliding_window, number_of_states=self.number_of_states)
        if isinstance(layer, _OnTape):
            layer.tapes = {}
            layer.past = None if self.sliding_window is None else self.sliding_window - 1
        return layer


@dataclass(frozen=True)
class StateLayout:
    """The pools of a model and the layers that fill them."""

    page_tokens: int
    chunk_tokens: int
    pools: tuple[PoolSpec, ...]
    layers: tuple[LayerPlan, ...]

    @classmethod
    def of(cls, model: Any, page_tokens: int, chunk_tokens: int) -> "StateLayout":
        """Compute a few tokens with a causal language model of transformers and see what its layers kept.

        Raises ModelError if a layer keeps its state in a way that is not known here, or keeps none at all.
        """
        tokens: dict[int | None, list[BufferSpec]] = {}  # by the size of the window, None without one
        states: list[BufferSpec] = []
        plans = []
        for number, layer in enumerate(_probe(model)):
            plan = LayerPlan.of(layer)
            per_token, per_sequence = _kept_per_token(layer), _kept_per_sequence(layer)
            if not (per_token or per_sequence or isinstance(layer, DummyLayer)):
                raise ModelError(f"{type(model).__name__}: layer {number} ({layer}) kept nothing to put in a page")
            for what, kept in per_token.items():
                buffer = _buffer(number, what, (page_tokens, *kept.shape[1:]), kept.dtype)
                tokens.setdefault(plan.sliding_window, []).append(buffer)
            states += [_buffer(number, what, kept.shape[1:], kept.dtype) for what, kept in per_sequence.items()]
            plans.append(plan)
        pools = [
            PoolSpec("attention", tuple(buffers), lookback=None)
            if window is None
            else PoolSpec(f"window-{window}", tuple(buffers), window_lookback(window, page_tokens))
            for window, buffers in sorted(tokens.items(), key=lambda item: item[0] or 0)
        ]
        if not pools:
            raise ModelError(f"{type(model).__name__} has no attention layer, whose tokens could be counted")
        if states:
            pools.append(PoolSpec("state", tuple(states), lookback=1, in_place=True))
        return cls(page_tokens, chunk_tokens, tuple(pools), tuple(plans))

    def pool(self, name: str) -> PoolSpec:
        return next(pool for pool in self.pools if pool.name == name)


def _buffer(layer: int, what: str, shape: Sequence[int], dtype: torch.dtype) -> BufferSpec:
    return BufferSpec(f"layers.{layer}.{what}", tuple(shape), str(dtype).removeprefix("torch."))


def _probe(model: Any) -> list[Any]:
    """The cache layers of transformers after a forward of a few tokens."""
    name = type(model).__name__
    try:
        cache = DynamicCache(config=model.config)
    except KeyError as e:
        raise ModelError(f"{name}: transformers has no cache layer for {e}") from e
    for number, layer in enumerate(cache.layers):
        if type(layer) not in STAND_INS:
            raise ModelError(f"{name}: layer {number} keeps its state in a {layer}, which this version cannot keep yet")
    ids = torch.zeros((1, 4), dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except (TypeError, ValueError, AttributeError, NotImplementedError) as e:
        raise ModelError(f"{name} does not compute with a cache of transformers' own: {e}") from e
    return list(cache.layers)


def _kept_per_token(layer: Any) -> dict[str, Tensor]:
    """What the layer keeps for each token, as [tokens, *shape]."""
    kept = {}
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        kept = {"keys": layer.keys[0].transpose(0, 1), "values": layer.values[0].transpose(0, 1)}
    if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
        kept["indexer_keys"] = layer.indexer_keys[0]
    if isinstance(layer, DynamicIndexedLayer) and layer.indexer_position_ids is not None:
        kept["indexer_position_ids"] = layer.indexer_position_ids[:, 0].T
    return kept


def _kept_per_sequence(layer: Any) -> dict[str, Tensor]:
    """What the layer keeps once for all tokens, as [1, *shape]."""
    if not isinstance(layer, LinearAttentionLayer):
        return {}
    states = {f"conv.{index}": state for index, state in layer.conv_states.items()}
    states |= {f"recurrent.{index}": state for index, state in layer.recurrent_states.items()}
    return {name: state for name, state in states.items() if state is not None}


class Workspace:
    """The state of one request while it computes: load what is known, `resume`, compute, save what is new.

    `cache` goes into the model's forward as `past_key_values`. It is private: `load` copies pages in and `save`
    copies them out, so no later token can change a page that others share. Arenas are mappings from the buffer's
    name to [slots, *buffer.shape] on the workspace's device.
    """

    def __init__(self, layout: StateLayout, max_tokens: int, device: torch.device | str = "cpu") -> None:
        self.layout, self.max_tokens, self.device = layout, max_tokens, torch.device(device)
        layers = [plan.build() for plan in layout.layers]
        self.cache = Cache(layers=layers)
        self._tapes: dict[str, Tape] = {}
        self._states: dict[str, Tensor] = {}
        self._loaded = dict.fromkeys((pool.name for pool in layout.pools), 0)  # pages, as a set of bits
        for pool in layout.pools:
            keep = pool.lookback and pool.lookback * layout.page_tokens
            for buffer in pool.buffers:
                _, number, what, *index = buffer.name.split(".")
                layer, kind = layers[int(number)], {"dtype": getattr(torch, buffer.dtype), "device": self.device}
                if pool.in_place:
                    states, state_idx = f"{what}_states", int(index[0])
                    layer.lazy_initialization(**{states: torch.zeros(1, *buffer.shape, **kind)}, state_idx=state_idx)
                    self._states[buffer.name] = getattr(layer, states)[state_idx]  # only ever written in place
                else:
                    self._tapes[buffer.name] = layer.tapes[what] = self._tape(pool, buffer, keep)

    def _tape(self, pool: PoolSpec, buffer: BufferSpec, keep: int | None) -> Tape:
        """Where the tokens of one buffer lie: here, in memory of the workspace's own."""
        # Twice what is kept, so that a window moves its front once in `keep` tokens and not at each.
        room = min(self.max_tokens, 2 * ((keep or 0) + self.layout.chunk_tokens))
        data = torch.empty(room, *buffer.shape[1:], dtype=getattr(torch, buffer.dtype), device=self.device)
        return Tape(data, self.layout.page_tokens, self.max_tokens, keep)

    @property
    def tokens(self) -> int:
        """How many tokens have been computed or loaded."""
        return next(iter(self._tapes.values())).end

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
            torch.index_select(arena[buffer.name], 0, index, out=into)
        known = 0 if pool.in_place else self._loaded[pool_name]
        self._loaded[pool_name] = known | boundaries.span(positions.start, positions.stop)

    def resume(self, boundary: int) -> None:
        """Let the next forward compute the first token behind `boundary` pages; 0 begins a sequence."""
        for pool in self.layout.pools:
            pages = list(boundaries.members(boundaries.needed(boundary, pool.lookback) & ~self._loaded[pool.name]))
            assert not pages, f"cannot resume at page {boundary}: {pool.name} pages {pages} were not loaded"
        for tape in self._tapes.values():
            tape.rewind(boundary * self.layout.page_tokens)
        for layer in self.cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = boundary * self.layout.page_tokens
            if isinstance(layer, LinearAttentionLayer):
                used = layer.is_conv_states_initialized  # a layer may have room for more states than it uses
                layer.has_previous_state = {index: boundary > 0 and used[index] for index in used}

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
                assert tape.front <= start * tape.page_tokens and last <= tape.end, (
                    f"{pool_name} pages {start} to {stop - 1} are not whole: tokens {tape.front} to {tape.end} are here"
                )
                pages = tape.pages(start, stop)
                if not consecutive:
                    pages = pages[[position - start for position in positions]]
            arena[buffer.name].index_copy_(0, index, pages)
