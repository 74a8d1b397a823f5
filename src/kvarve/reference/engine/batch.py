"""One token for many sequences in one forward: rows of different lengths, aligned at their ends.

The model's code sees what its own `generate` makes of prompts padded on the left: a mask of each row's columns, and
each row's positions. Every attention layer gathers its rows' tokens from the pages, and recurrent states are views of
one tensor, so that nothing is copied in or out while a batch stays the same. Rounding differs from a row computed
alone. Whether a model's code supports this is tried on a few tokens, not known by name.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvarve.reference.engine.compressors import make_batchable
from kvarve.reference.engine.layers import Layer, LayerPlan, new_cache
from kvarve.reference.engine.model import forward
from kvarve.reference.engine.paging import PagedTape, PagedWorkspace, RollingTape
from kvarve.reference.engine.shards import FailedOnRank
from kvarve.reference.engine.workspace import StateLayout
from kvarve.reference.engine.wrappers import compute

log = logging.getLogger(__name__)

TRIED_LENGTHS = (5, 12, 3)  # tokens of the prompts with which batching is tried
# The cost of another forward beside reading the weights, and how often the keys and values of a padded column are read
# or written, by gathering and attention; measured with `benchmarks/engine.py`.
FORWARD_BYTES = 16 << 20
PADDED = 4
# The allowed difference from the logits of a row computed alone, as a share of the largest: a wrong mask or position is
# far above it, and rounding far below.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def by_length(lengths: Sequence[int], spare: int) -> list[list[int]]:
    """Groups of rows, by their numbers, to be computed in a forward each; `lengths` ascend.

    In a group all rows are padded to the longest. `spare` columns of padding cost what another forward costs. All
    lengths grow alike, so the best groups stay the best for as long as the rows are the same.
    """
    best: list[tuple[int, int]] = [(0, 0)]  # for the first rows: the least cost, and where the last group begins
    for stop in range(1, len(lengths) + 1):
        longest, padding, least = lengths[stop - 1], 0, (best[stop - 1][0] + spare, stop - 1)
        for start in range(stop - 2, -1, -1):
            padding += longest - lengths[start]
            if padding >= least[0]:  # a wider group only has more padding
                break
            least = min(least, (best[start][0] + spare + padding, start))
        best.append(least)
    groups, stop = [], len(lengths)
    while stop:
        start = best[stop][1]
        groups.append([*range(start, stop)])
        stop = start
    return groups[::-1]


def spare_tokens(model: Any, layout: StateLayout) -> int:
    """How many columns of padding cost as much as another forward, which reads all weights again."""
    weights_bytes = sum(weight.nbytes for weight in model.parameters())
    return int((weights_bytes + FORWARD_BYTES) / max(1, PADDED * layout.bytes_per_token))  # 0 without a chain


class _Gather:
    """Where the tokens of one pool are in this forward: rows of a flat tensor, the same in all of its layers."""

    def __init__(self) -> None:
        self.written = self.read = torch.empty(0)

    def aim(self, written: Tensor, read: Tensor) -> None:
        """`written` [rows]: where the new tokens go; `read` [rows, columns]: all that are attended to."""
        self.written, self.read = written, read


class _Column:
    """One buffer of all rows: a flat tensor [tokens, *shape] and the gather of its pool."""

    def __init__(self, flat: Tensor, gather: _Gather) -> None:
        self.flat, self.gather = flat, gather

    def push(self, tokens: Tensor) -> Tensor:
        """Write [rows, *shape], and read [rows, columns, *shape]."""
        self.flat.index_copy_(0, self.gather.written, tokens)
        read = self.gather.read
        return self.flat.index_select(0, read.flatten()).view(*read.shape, *self.flat.shape[1:])


class _InRows(Layer):
    """Attention: a batch of sequences that have been padded on the left."""

    columns: dict[str, _Column]
    cumulative_length: int  # of the longest row; a sliding layer makes its mask by it

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take [rows, heads, 1, width]; returns [rows, heads, columns, width]."""
        keys = self.columns["keys"].push(key_states[:, :, 0]).transpose(1, 2)
        values = keys[..., : value_states.shape[-1]]  # where one tape is both, or values have no width
        if "values" in self.columns:
            values = self.columns["values"].push(value_states[:, :, 0]).transpose(1, 2)
        self.cumulative_length += 1
        return keys, values

    def get_seq_length(self) -> int:
        return self.cumulative_length


class _IndexedInRows(_InRows):
    """Sparse attention, whose indexer takes the best columns of each row; padding has the worst scores of all."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take [rows, 1, width]; returns [rows, columns, width]."""
        return self.columns["indexer_keys"].push(indexer_key_states[:, 0])


class _CompressingInRows(_InRows):
    """A window of the rows, and for what each has compressed its own cache: see `compressors.py`."""

    caches: Sequence[Any]  # of each row


class _StatesInRows(Layer):
    """Recurrent states: one tensor of all rows' states."""

    has_previous_state: dict[int, bool]
    lazy_initialization: Callable[..., None]

    def hold(self, name: str, state: Tensor) -> Tensor:
        of, _, number = name.partition(".")
        states = f"{of}_states"
        self.lazy_initialization(**{states: state}, state_idx=int(number))
        getattr(self, states)[int(number)] = state
        self.has_previous_state[int(number)] = True
        return state


class _InRowsWithStates(_InRows, _StatesInRows):
    """Attention and a recurrent state side by side in one layer."""


# Our replacement for each class of transformers. A model with any other layer is computed row by row.
IN_ROWS: dict[str, type[Layer]] = {
    "DynamicLayer": _InRows,
    "DynamicSlidingWindowLayer": _InRows,
    "DynamicIndexedLayer": _IndexedInRows,
    "DeepseekV4HCACache": _CompressingInRows,
    "DeepseekV4CSACache": _CompressingInRows,
    "LinearAttentionLayer": _StatesInRows,
    "LinearAttentionAndFullAttentionLayer": _InRowsWithStates,
    "LinearAttentionAndSlidingWindowAttentionLayer": _InRowsWithStates,
    "DummyLayer": Layer,
}


COLUMNS = frozenset({"keys", "values", "indexer_keys"})  # buffers of tokens that rows can be gathered from


def in_rows(layout: StateLayout) -> bool:
    """Whether each layer and each of its buffers is known here, so that it is worth trying."""
    return all(_in_rows(plan) is not None for plan in layout.layers) and all(
        buffer.shape[0] < layout.page_tokens or buffer.name.split(".", 2)[2] in COLUMNS
        for pool in layout.pools
        if not pool.in_place
        for buffer in pool.buffers
    )


def _in_rows(plan: LayerPlan) -> type[Layer] | None:
    return IN_ROWS.get(type(plan.fresh).__name__)


def _build(plan: LayerPlan) -> Any:
    mixin = _in_rows(plan)
    assert mixin is not None
    return replace(plan, mixin=mixin).build()


class Batch:
    """Sequences that are decoded together. Another set of sequences is another batch."""

    def __init__(self, workspaces: Sequence[PagedWorkspace]) -> None:
        self.workspaces = tuple(workspaces)
        for workspace in workspaces:
            workspace.arrived()
        first = workspaces[0]
        self.layout, self.device = first.layout, first.device
        layers = [_build(plan) for plan in self.layout.layers]
        self.cache = new_cache(self.layout.cache_class, layers)
        self._attention = [layer for layer in layers if isinstance(layer, _InRows)]
        for layer in self._attention:
            layer.columns = {}
            if isinstance(layer, _CompressingInRows):
                layer.caches = [workspace.cache for workspace in workspaces]
        self._gathers: dict[str, _Gather] = {}
        for pool in self.layout.pools:
            for buffer in pool.buffers:
                _, number, what = buffer.name.split(".", 2)
                layer = layers[int(number)]
                if pool.in_place and isinstance(layer, _StatesInRows):
                    self._stack_states(layer, buffer.name)
                elif not pool.in_place and buffer.shape[0] == self.layout.page_tokens:  # else each row's own
                    self._gathers.setdefault(pool.name, _Gather())
                    layer.columns[what] = _Column(self._stack_tokens(buffer.name), self._gathers[pool.name])

    def _stack_states(self, layer: Any, name: str) -> None:
        """One tensor of all rows' states; each workspace's state is a view of it from now on."""
        stack = torch.cat([workspace._states[name] for workspace in self.workspaces])
        layer.hold(name.split(".", 2)[2], stack)
        for row, workspace in enumerate(self.workspaces):
            workspace._put_state(name, stack[row : row + 1])

    def _stack_tokens(self, name: str) -> Tensor:
        """A flat tensor that holds the tokens of all rows."""
        tapes = [workspace._tapes[name] for workspace in self.workspaces]
        if isinstance(tapes[0], PagedTape):
            return tapes[0]._data
        assert all(isinstance(tape, RollingTape) for tape in tapes)
        stack = torch.stack([tape._data for tape in tapes])
        for tape, data in zip(tapes, stack, strict=True):
            tape._data = data
        return stack.flatten(0, 1)

    def forward(self, model: Any, tokens: Sequence[int]) -> Tensor:
        """Compute one token for each row; the logits [rows, vocabulary]. If it fails, the rows' states are lost."""
        for workspace in self.workspaces:  # a table may have moved to pages that are still being copied
            workspace.arrived()
        lengths = torch.tensor([workspace.tokens for workspace in self.workspaces], device=self.device)
        longest = max(workspace.tokens for workspace in self.workspaces)
        self._aim(lengths, longest)
        for layer in self._attention:
            layer.cumulative_length = longest
        padding = longest - lengths
        mask = None
        if bool(padding.any()):
            mask = (torch.arange(longest + 1, device=self.device) >= padding[:, None]).long()
        output = compute(
            model,
            self.cache,
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            position_ids=lengths[:, None],
            attention_mask=mask,
            logits_to_keep=1,
        )
        for workspace in self.workspaces:
            workspace.advance()
        logits: Tensor = output.logits[:, -1]
        return logits

    def _aim(self, lengths: Tensor, longest: int) -> None:
        size = self.layout.page_tokens
        for pool in self.layout.pools:
            if pool.name not in self._gathers:
                continue
            name = pool.buffers[0].name
            if pool.lookback is None:
                table = pad_sequence([workspace.tables[pool.name].index for workspace in self.workspaces], True)
                at = torch.arange(longest + 1, device=self.device) - (longest - lengths)[:, None]
                at.clamp_(min=0)  # in the padding: any token of the row, as the mask hides it
                read = table.gather(1, at // size) * size + at % size
            else:
                past = min(self._past(name), longest)
                tapes = [workspace._tapes[name] for workspace in self.workspaces]
                for workspace in self.workspaces:
                    workspace.make_room(pool.name)
                front = torch.tensor([tape.front for tape in tapes], device=self.device)
                rooms = torch.arange(len(tapes), device=self.device) * len(tapes[0]._data)
                at = torch.arange(past + 1, device=self.device) + (lengths - past)[:, None]
                at.clamp_(min=0)
                read = at + (rooms - front)[:, None]
            self._gathers[pool.name].aim(read[:, -1], read)

    def _past(self, buffer: str) -> int:
        window = self.layout.layers[int(buffer.split(".")[1])].window
        assert window is not None
        return window - 1


# --- what a model's code can do

# What a model raises that cannot do what is tried. All ranks try the same, and say afterwards how far they have come.
CANNOT = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, FailedOnRank)
_tried: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def batches(model: Any, layout: StateLayout) -> bool:
    """Whether a model computes sequences in a batch as it does each alone. It is tried once, on a few tokens."""
    if model not in _tried:
        _tried[model] = _try(model, layout)
        log.debug("%s decodes %s", type(model).__name__, "in batches" if _tried[model] else "one by one")
    return _tried[model]


def _try(model: Any, layout: StateLayout) -> bool:
    if not in_rows(layout):
        return False
    tokens = model.get_input_embeddings().num_embeddings
    prompts = [[(7 * at + length) % tokens for at in range(length)] for length in TRIED_LENGTHS]
    try:
        make_batchable(model, layout.layers, layout.cache_class)
        rows, alone = computed(model, layout, prompts, 2), computed(model, layout, prompts, 2)
        batch = Batch(rows)
        for token in (1 % tokens, 2 % tokens):  # the second reads the state that the first wrote
            together = batch.forward(model, [token] * len(rows)).float()
            ids = torch.tensor([[token]], device=model.device)
            each = torch.stack([forward(model, workspace, ids) for workspace in alone]).float()
            allowed = ROUNDING.get(model.dtype, 0.1) * float(each.abs().max())
            if not torch.allclose(together, each, rtol=0, atol=allowed):
                return False
    except CANNOT as e:
        log.debug("%s in a batch: %s", type(model).__name__, e)  # its code does not support it
        return False
    return True


def computed(model: Any, layout: StateLayout, prompts: Sequence[Sequence[int]], more: int) -> list[PagedWorkspace]:
    """Sequences that have computed their prompts, in an arena of their own, with slots for `more` tokens."""
    pages = 1 + (max(map(len, prompts)) + more) // layout.page_tokens
    arenas = _arenas(layout, pages * len(prompts), model.device)
    found = []
    for number, prompt in enumerate(prompts):
        workspace = PagedWorkspace(layout, pages * layout.page_tokens, model.device, arenas)
        for table in workspace.tables.values():
            table.put(0, range(number * pages, (number + 1) * pages), 0)
        workspace.resume(0)
        if prompt:
            forward(model, workspace, torch.tensor([prompt], device=model.device))
        found.append(workspace)
    return found


def _arenas(layout: StateLayout, slots: int, device: torch.device) -> Mapping[str, Mapping[str, Tensor]]:
    return {
        pool.name: {
            buffer.name: torch.zeros((slots, *buffer.shape), dtype=getattr(torch, buffer.dtype), device=device)
            for buffer in pool.buffers
        }
        for pool in layout.pools
        if pool.lookback is None
    }
