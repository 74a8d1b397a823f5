"""The buffers that each cache layer of transformers keeps, and kvarve's layer that replaces it.

Only this module knows the cache classes of transformers, by their names, never by a model's. It knows no page and no
pool: a layer is read token by token or whole, and gets tapes and tensors to write to.
"""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from kvarve.errors import ModelError
from kvarve.reference.engine.model_errors import MISFITS, in_words
from kvarve.reference.engine.wrappers import model_class

# transformers calls the cache of a model `cache`; before 5.24 `past_key_values`, and `cache_params` in state spaces.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
CACHE_PARAMS = "cache_params"
FP8 = torch.float8_e4m3fn
FP8_MOST = torch.finfo(FP8).max


def cache_argument(model: Any) -> str:
    """The argument by which a model takes its cache, and the field in which its output has it."""
    return CACHE_PARAMS if CACHE_PARAMS in _arguments(type(model).forward) else CACHE


@cache
def _arguments(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def compute(model: Any, cache: Any, **inputs: Any) -> Any:
    """The output of a model for some tokens after those in the cache, which takes them too."""
    with torch.no_grad():
        return model(**inputs, **{cache_argument(model): cache}, use_cache=True)


def narrowed(entries: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The entries as a buffer of this dtype keeps them: FP8 a `scale` smaller, and at most its largest number.

    That of one entry depends on no other, so it has the same bits in any chunk and any batch.
    """
    if dtype != FP8:
        return entries
    return (entries if scale == 1 else entries.float() / scale).clamp(-FP8_MOST, FP8_MOST).to(FP8)


def widened(kept: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What attention reads of entries that a buffer keeps, in its own dtype."""
    if kept.dtype != FP8:
        return kept
    return kept.to(dtype) if scale == 1 else (kept.float() * scale).to(dtype)


def movable(entries: Tensor) -> Tensor:
    """The same memory in a dtype that torch copies by index."""
    return entries.view(torch.uint8) if entries.dtype == FP8 else entries


class Tape:
    """The entries of one buffer, one after the other in one tensor [capacity, *shape], from `front` up to `end`.

    An entry belongs to one token, or to several compressed into one. A page is a slice and a run of pages is a longer
    slice, so both are copied without a loop. `keep` says how many entries before a chunk are still read: None all of
    them, or those of a sliding window, whose older pages are dropped whole when the tensor is full. So every page
    between `front` and `end` is complete, and a tensor with room for what is kept and for a chunk is never replaced.
    """

    def __init__(self, data: Tensor, per_page: int, limit: int, keep: int | None, scale: float = 1.0) -> None:
        """Begin with `data` [entries, *shape], of any content; without a `keep` it is doubled, up to `limit`. In FP8
        it keeps entries `scale` times smaller."""
        self._data, self.per_page, self.limit, self.keep, self.scale = data, per_page, limit, keep, scale
        self.front = self.end = 0

    def append(self, entries: Tensor) -> None:
        """Write [n, *shape] behind the last entry."""
        stop = self.end + len(entries)
        self._reserve(stop)
        self._data[self.end - self.front : stop - self.front].copy_(narrowed(entries, self._data.dtype, self.scale))
        self.end = stop

    def read(self, start: int, stop: int) -> Tensor:
        """The entries [stop - start, *shape] as a view, whose strides do not depend on the tensor's capacity."""
        return self._data[start - self.front : stop - self.front]

    def pages(self, start: int, stop: int) -> Tensor:
        """The pages [stop - start, per_page, *shape] as a view."""
        entries = self.read(start * self.per_page, stop * self.per_page)
        return entries.view(stop - start, self.per_page, *entries.shape[1:])

    def extend(self, pages: range) -> Tensor:
        """A view of those pages to write into; the tape reaches to their end, and a window's begins with its first."""
        start, stop = pages.start * self.per_page, pages.stop * self.per_page
        if self.keep is not None:
            if not self.end:
                self.front = self.end = start
            assert start == self.end, f"the pages of a window come in order: token {start} after {self.end}"
        self._reserve(stop)
        self.end = max(self.end, stop)
        return self.pages(pages.start, pages.stop)

    def rewind(self, end: int) -> None:
        """Drop the entries from `end` on; at 0 all of them."""
        assert end == 0 or self.front <= end <= self.end
        self.end, self.front = end, self.front if end else 0

    def own(self) -> None:
        """Copy the entries to a tensor of their own, if they are a part of a larger one."""
        if self._data.untyped_storage().nbytes() > self._data.nbytes:
            self._data = self._data.clone()

    def _reserve(self, stop: int) -> None:
        capacity = len(self._data)
        if stop - self.front <= capacity:
            return
        front = self.front
        if self.keep is not None:
            front = max(front, (self.end - self.keep) // self.per_page * self.per_page)
        else:
            capacity = min(2 * capacity, self.limit)
        kept, capacity = self.read(front, self.end), max(capacity, stop - front)
        if capacity == len(self._data):
            kept = kept.clone()
        else:
            self._data = kept.new_empty((capacity, *kept.shape[1:]))
        self._data[: len(kept)] = kept
        self.front = front


# A buffer is named by the attribute of transformers' layer that holds it, and by the key if that is a dictionary:
# "keys", "recurrent.0", "compressed_kv.indexer".


@dataclass(frozen=True)
class Kept:
    """A buffer of a layer of transformers after a few tokens: entries [n, *shape], each for `tokens` tokens."""

    entries: Tensor
    tokens: int = 1


class Layer:
    """Mixed into a layer of transformers, which keeps its types and masks; this one keeps no buffers."""

    tapes: dict[str, Tape]
    past: int | None  # how many tokens before the new ones the layer reads: None all of them
    pending: Callable[[], None] | None = None  # has its pages arrive

    @staticmethod
    def per_token(layer: Any) -> dict[str, Kept]:
        """The buffers that a layer of transformers keeps for each token."""
        return {}

    @staticmethod
    def per_sequence(layer: Any) -> dict[str, Tensor]:
        """The states that a layer of transformers keeps once for all tokens, as [1, *shape]."""
        return {}

    def hold(self, name: str, state: Tensor) -> Tensor:
        """Keep the state `name` of `per_sequence` in this tensor, from here on only written in place."""
        raise NotImplementedError

    def arrive(self) -> None:
        """Before its buffers are used: have its pages arrive that are still being copied."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending()

    def resume_at(self, tokens: int) -> None:
        """The next token comes after `tokens`, to which the tapes and states belong."""


class _OnTape(Layer):
    """Attention: keys and values of all tokens or a window's. Where the values are the keys, one tape is both."""

    cumulative_length: int  # a sliding layer makes its mask by it

    @staticmethod
    def per_token(layer: Any) -> dict[str, Kept]:
        if not layer.is_initialized:
            return {}
        return {name: Kept(getattr(layer, name)[0].transpose(0, 1)) for name in ("keys", "values")}

    def resume_at(self, tokens: int) -> None:
        super().resume_at(tokens)
        self.cumulative_length = tokens

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take [1, heads, n, width]; returns all that the layer attends to, new tokens included."""
        keys = self._push("keys", key_states[0].transpose(0, 1)).transpose(0, 1)[None]
        values = keys[..., : value_states.shape[-1]]  # where one tape is both, or values have no width
        if "values" in self.tapes:
            values = self._push("values", value_states[0].transpose(0, 1)).transpose(0, 1)[None]
        self.cumulative_length = self.get_seq_length()
        return keys, values

    def get_seq_length(self) -> int:
        return self.tapes["keys"].end

    @property
    def keys(self) -> Tensor:
        """The keys [1, heads, n, width] of all tokens here, by which some models count them."""
        self.arrive()
        tape = self.tapes["keys"]
        return tape.read(tape.front, tape.end).transpose(0, 1)[None]

    def _push(self, name: str, tokens: Tensor) -> Tensor:
        self.arrive()
        tape = self.tapes[name]
        start = 0 if self.past is None else max(0, tape.end - self.past)
        tape.append(tokens)
        return widened(tape.read(start, tape.end), tokens.dtype, tape.scale)


class _Indexed(_OnTape):
    """Sparse attention, which also keeps the keys of its indexer and, in some models, their positions."""

    @staticmethod
    def per_token(layer: Any) -> dict[str, Kept]:
        kept = _OnTape.per_token(layer)
        if layer.is_indexer_initialized:
            kept["indexer_keys"] = Kept(layer.indexer_keys[0])
        if layer.indexer_position_ids is not None:
            kept["indexer_position_ids"] = Kept(layer.indexer_position_ids[:, 0].T)
        return kept

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take [1, n, width]; returns the index keys of all tokens."""
        return self._push("indexer_keys", indexer_key_states[0])[None]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [dims, 1, tokens] of all tokens, or None before the first: models set it whole, we add the new."""
        self.arrive()
        tape = self.tapes.get("indexer_position_ids")
        return tape.read(0, tape.end).T[:, None] if tape and tape.end else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        if positions is not None:
            tape = self.tapes["indexer_position_ids"]
            tape.append(positions[:, 0, tape.end :].T)


class _IndexedByHeads(_OnTape):
    """MiniMax-M3: attention to blocks of tokens, with the keys by which an indexer chooses the blocks."""

    @staticmethod
    def per_token(layer: Any) -> dict[str, Kept]:
        kept = _OnTape.per_token(layer)
        if layer.idx_keys is not None:
            kept["idx_keys"] = Kept(layer.idx_keys[0].transpose(0, 1))
        return kept

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Take [1, 1, n, width]; returns the index keys of all tokens."""
        return self._push("idx_keys", idx_k[0].transpose(0, 1)).transpose(0, 1)[None]


class _Compressing(_OnTape):
    """DeepSeek-V4: a window, and the tokens before it compressed, 4 or 128 into one entry.

    Tokens that do not fill an entry yet are buffered, so a page has to end where an entry does: then the buffers are
    empty. Overlapping entries also need the last tokens of the entry before, which are a state.
    """

    compress_rate: int
    entry_count: dict[str, int]  # by compressor: the layer's own and, with sparse attention, the indexer's
    compressed_kv: dict[str, Tensor]
    buffer_kv: dict[str, Tensor | None]
    buffer_gate: dict[str, Tensor | None]
    overlap_kv: dict[str, Tensor]
    overlap_gate: dict[str, Tensor]

    @staticmethod
    def per_token(layer: Any) -> dict[str, Kept]:
        kept = _OnTape.per_token(layer)
        for name, entries in layer.compressed_kv.items():
            kept[f"compressed_kv.{name}"] = Kept(entries[0], layer.compress_rate)
        return kept

    @staticmethod
    def per_sequence(layer: Any) -> dict[str, Tensor]:
        overlaps = {of: getattr(layer, of, {}) for of in ("overlap_kv", "overlap_gate")}
        return {f"{of}.{name}": state for of, states in overlaps.items() for name, state in states.items()}

    def hold(self, name: str, state: Tensor) -> Tensor:
        of, _, compressor = name.partition(".")
        getattr(self, of)[compressor] = state
        return state

    def resume_at(self, tokens: int) -> None:
        super().resume_at(tokens)
        assert tokens % self.compress_rate == 0
        for name in self.entry_count:
            self.entry_count[name] = tokens // self.compress_rate
            self.buffer_kv[name] = self.buffer_gate[name] = None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Take new entries [1, n, width], n may be 0; returns all entries."""
        self.arrive()
        tape = self.tapes[f"compressed_kv.{name}"]
        tape.append(compressed[0])
        self.entry_count[name] = tape.end
        return tape.read(0, tape.end)[None]

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Keep the last window of [1, windows, rate, width]; returns the one before, or None at the beginning."""
        self.arrive()
        before: list[Tensor | None] = []
        for state, windows in ((self.overlap_kv[name], chunk_kv), (self.overlap_gate[name], chunk_gate)):
            before.append(state.clone() if self.entry_count[name] else None)
            state.copy_(windows[:, -1, :, :head_dim])
        return before[0], before[1]


def _arriving(name: str) -> Any:
    """An attribute of a layer, whose pages arrive before it is read."""

    def read(self: Layer) -> dict[int, Tensor]:
        self.arrive()
        found: dict[int, Tensor] = vars(self)[name]
        return found

    return property(read, lambda self, states: vars(self).__setitem__(name, states))


class Recurrent(Layer):
    """Linear attention and state spaces: one state for all tokens so far, overwritten by each."""

    number_of_states: int
    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]
    has_previous_state: dict[int, bool]
    lazy_initialization: Callable[..., None]

    # Models read the states as attributes of the layer.
    conv_states = _arriving("conv_states")
    recurrent_states = _arriving("recurrent_states")

    @staticmethod
    def per_sequence(layer: Any) -> dict[str, Tensor]:
        of = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
        return {f"{name}.{n}": state for name, states in of.items() for n, state in states.items() if state is not None}

    def hold(self, name: str, state: Tensor) -> Tensor:
        of, _, number = name.partition(".")
        states = f"{of}_states"
        self.lazy_initialization(**{states: state}, state_idx=int(number))
        getattr(self, states)[int(number)] = state
        return state

    def resume_at(self, tokens: int) -> None:
        super().resume_at(tokens)
        for number in range(self.number_of_states):  # a layer may have slots for more states than it uses
            used = self.is_conv_states_initialized[number] or self.is_recurrent_states_initialized[number]
            self.has_previous_state[number] = tokens > 0 and used


class _OnTapeAndRecurrent(_OnTape, Recurrent):
    """Attention and a recurrent state side by side in one layer."""

    @staticmethod
    def per_sequence(layer: Any) -> dict[str, Tensor]:
        return Recurrent.per_sequence(layer)


class _LinearInLayers(Cache):  # type: ignore[misc]  # transformers is untyped
    """MiniMax's cache holds the states of linear attention in a list of its own; here they are in the layers."""

    def __init__(self, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)
        self.linear_cache: list[Tensor] = []  # MiniMax's cache takes its length from it

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        state: Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True


# By the names of transformers' classes, some of which are defined beside a model that need not be imported for this.
LAYERS: dict[str, type[Layer]] = {
    "DynamicLayer": _OnTape,
    "DynamicSlidingWindowLayer": _OnTape,
    "DynamicIndexedLayer": _Indexed,
    "MiniMaxM3VLSparseCacheLayer": _IndexedByHeads,
    "DeepseekV4HCACache": _Compressing,
    "DeepseekV4CSACache": _Compressing,
    "LinearAttentionLayer": Recurrent,
    "LinearAttentionAndFullAttentionLayer": _OnTapeAndRecurrent,
    "LinearAttentionAndSlidingWindowAttentionLayer": _OnTapeAndRecurrent,
    "DummyLayer": Layer,
}
CACHES: dict[str, type[Any] | None] = {"DynamicCache": None, "MiniMaxCache": _LinearInLayers}


_MIXED: dict[tuple[type, type], type] = {}


def _mixed(mixin: type, base: type) -> Any:
    if (mixin, base) not in _MIXED:
        # With a `_layer_type`, transformers would register our class and use it for every cache.
        _MIXED[mixin, base] = type(f"{base.__name__}OnTape", (mixin, base), {"_layer_type": None})
    return _MIXED[mixin, base]


@dataclass(frozen=True)
class LayerPlan:
    """How to build one layer: a fresh one of transformers, to be copied and to become ours."""

    fresh: Any
    mixin: type[Layer]

    @property
    def window(self) -> int | None:
        """Tokens of the sliding window, including the one that is being computed."""
        window: int | None = getattr(self.fresh, "sliding_window", None)
        return window

    @property
    def keeps(self) -> bool:
        """Whether it keeps buffers: not without attention, nor if it reads another layer's."""
        return self.mixin is not Layer

    @property
    def rate(self) -> int:
        """Tokens that are compressed into one entry; 1 without compression."""
        rate: int = getattr(self.fresh, "compress_rate", 1)
        return rate

    def build(self) -> Any:
        ours = _mixed(self.mixin, type(self.fresh))
        layer = ours.__new__(ours)
        layer.__dict__.update(copy.deepcopy(self.fresh.__dict__))
        layer.past = None if self.window is None else self.window - 1
        layer.tapes = {}
        return layer


def plan_layers(config: Any, name: str) -> tuple[LayerPlan, ...]:
    """The cache layers for a model of this config; ModelError if the kind of one is unknown here."""
    model_class(config)  # some layers are registered only when their model is imported
    try:
        fresh = DynamicCache(config=config).layers
    except Exception as e:  # each config class works its layers out, and fails with exceptions of its own
        raise ModelError(f"{name}: transformers makes no cache of this config: {in_words(e)}") from e
    for number, layer in enumerate(fresh):
        if type(layer).__name__ not in LAYERS:
            raise ModelError(f"{name}: layer {number} keeps its state in a {layer}, which this version cannot keep yet")
    return tuple(LayerPlan(layer, LAYERS[type(layer).__name__]) for layer in fresh)


def page_multiple(plans: Sequence[LayerPlan]) -> int:
    """Tokens of which a page has to be a multiple, so that no entry of any layer is cut in two."""
    return math.lcm(*(plan.rate for plan in plans))


def new_cache(cache_class: type, layers: Sequence[Any]) -> Any:
    """A cache of the class that a model requires, over these layers."""
    mixin = CACHES[cache_class.__name__]
    return Cache(layers=[*layers]) if mixin is None else _mixed(mixin, cache_class)([*layers])


@dataclass(frozen=True)
class DryRun:
    """How a model computed a few tokens."""

    cache_class: type  # of transformers, which the model requires
    layers: list[Any]  # transformers' own, with their buffers
    one_for_both: frozenset[int]  # layers that got one tensor as keys and as values


def dry_run(model: Any, plans: Sequence[LayerPlan]) -> DryRun:
    """Have a model compute a few tokens; ModelError if it works with no cache that is known here."""
    name = type(model).__name__
    # Enough to fill an entry, as some buffers are made only then.
    tokens = max([4, *(plan.rate for plan in plans if hasattr(plan.fresh, "overlap_kv"))])
    ids = torch.zeros((1, tokens), dtype=torch.long, device=model.device)
    cache_class: type = DynamicCache
    try:
        try:
            cache, one_for_both = _watched(cache_class, plans)
            compute(model, cache, input_ids=ids)
        except MISFITS:  # it may require a cache class of its own
            cache_class = type(compute(model, None, input_ids=ids)[cache_argument(model)])
            if cache_class is DynamicCache:
                raise
            if cache_class.__name__ not in CACHES:
                theirs = cache_class.__name__
                raise ModelError(f"{name} keeps its state in a {theirs}, which this version cannot keep yet") from None
            cache, one_for_both = _watched(cache_class, plans)
            compute(model, cache, input_ids=ids)
    except MISFITS as e:
        raise ModelError(f"{name} does not compute text with a cache: {in_words(e)}") from e
    if len(cache.layers) != len(plans):
        raise ModelError(f"{name} adds layers to its cache while it computes, which this version cannot keep yet")
    return DryRun(cache_class, list(cache.layers), frozenset(one_for_both))


def _watched(cache_class: type, plans: Sequence[LayerPlan]) -> tuple[Any, set[int]]:
    """A fresh cache, and the layers that get one tensor as keys and as values, filled in as it is used."""
    cache, one_for_both = new_cache(cache_class, [copy.deepcopy(plan.fresh) for plan in plans]), set()
    update = cache.update

    def spy(keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if keys is values:
            one_for_both.add(layer_idx)
        return update(keys, values, layer_idx, *args, **kwargs)

    cache.update = spy
    return cache, one_for_both
