"""The next chunk of many sequences in one forward: rows of different lengths, aligned at their ends.

A chunk is one token of an answer, or the tail of a prompt: the tokens after its last whole chunk, which are not
published. The model's code sees what its own `generate` makes of prompts padded on the left: a mask of each row's
columns, and each row's positions. Every attention layer gathers its rows' tokens from the pages (`grouped.py`: rows of
other lengths apart, where the model allows it), and recurrent states are views of one tensor, so that nothing is copied
in or out while a batch stays the same. Rounding differs from a row
computed alone.

The effect of padding depends on the layer: attention masks it; a recurrent state ignores it if the row has no past, and
is corrupted by it if there is one. What a model's code can do is not known by name: each kind of batch is tried when an
engine starts, on a few tokens; a kind that fails is computed row by row.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvarve.reference.engine.grouped import grouped
from kvarve.reference.engine.layers import Layer, Recurrent, compute, movable, narrowed, new_cache, widened
from kvarve.reference.engine.model import forward
from kvarve.reference.engine.paging import PagedTape, PagedWorkspace
from kvarve.reference.engine.shards import FailedOnRank
from kvarve.reference.engine.stepwise import make_batchable
from kvarve.reference.engine.workspace import StateLayout

log = logging.getLogger(__name__)

# Tokens before and in each row of the trials: answers, and tails without a past, of one length, and any.
ANSWERS, FRESH = ((3, 1), (5, 1), (12, 1)), ((0, 5), (0, 12), (0, 3))
EQUAL, ANY = ((5, 4), (0, 4), (12, 4)), ((5, 4), (0, 7), (12, 3))
TWICE = 2  # a tail is padded to at most this many times its own length
APART = 3  # columns of padding, beyond which the trial has rows apart
# The cost of another forward beside reading the weights, that of another group in one buffer of a forward, and how
# often keys and values of a padded column are read or written, by gathering and attention (`benchmarks/engine.py`).
FORWARD_BYTES = 16 << 20
GROUP_BYTES = 256 << 10
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


def spare_tokens(model: Any, layout: StateLayout, apart: bool) -> int:
    """How many columns of padding cost as much as another group in a forward, where rows are `apart`; else as another
    forward, which reads all weights again."""
    another = sum(weight.nbytes for weight in model.parameters()) + FORWARD_BYTES
    if apart and layout.bytes_per_token:  # windows and states do not grow, so groups of them gain nothing
        another = GROUP_BYTES * sum(len(pool.buffers) for pool in layout.pools if pool.lookback is None)
    return int(another / max(1, PADDED * layout.bytes_per_token))


class _Gather:
    """Where the tokens of one pool are in this forward: rows of a flat tensor, the same in all of its layers."""

    def __init__(self) -> None:
        self.written = torch.empty(0)
        self.read: Sequence[Tensor] = ()
        self.new: Tensor | None = None
        self.padded = False  # the model needs all rows in one tensor

    def aim(self, read: Sequence[Tensor], valid: Tensor | None, new: int) -> None:
        """`read`, of each group of rows, [rows, columns]: all that are attended to, the new ones last; `valid`
        [rows, new]: which of these are not padding, and are written (None: all)."""
        written = torch.cat([part[:, -new:].flatten() for part in read])
        self.read, self.new = read, None if valid is None else valid.flatten().nonzero()[:, 0]
        self.written = written if self.new is None else written[self.new]

    def pads(self) -> None:
        self.padded = True


class _Column:
    """One buffer of all rows: a flat tensor [tokens, *shape], the gather of its pool, and its scale in FP8."""

    def __init__(self, flat: Tensor, gather: _Gather, scale: float) -> None:
        self.flat, self.gather, self.scale = flat, gather, scale

    def push(self, tokens: Tensor) -> list[Tensor]:
        """Write [rows, new, *shape], and read [rows, columns, *shape] of each group."""
        tokens, gather, flat = tokens.flatten(0, 1), self.gather, movable(self.flat)
        fresh = narrowed(tokens if gather.new is None else tokens[gather.new], self.flat.dtype, self.scale)
        flat.index_copy_(0, gather.written, movable(fresh))
        found = (flat.index_select(0, read.flatten()).view(*read.shape, *flat.shape[1:]) for read in gather.read)
        return [widened(part.view(self.flat.dtype), tokens.dtype, self.scale) for part in found]

    def turned(self, tokens: Tensor) -> list[Tensor]:
        """The same with heads before tokens."""
        return [part.transpose(1, 2) for part in self.push(tokens.transpose(1, 2))]


class _InRows(Layer):
    """Attention: a batch of sequences that have been padded on the left."""

    columns: dict[str, _Column]
    cumulative_length: int  # before the new tokens, of the longest row; a sliding layer makes its mask by it

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take [rows, heads, new, width]; returns [rows, heads, columns, width]."""
        self.arrive()
        keys = self.columns["keys"].turned(key_states)
        values = [part[..., : value_states.shape[-1]] for part in keys]  # if one tape is both, or they have no width
        if "values" in self.columns:
            values = self.columns["values"].turned(value_states)
        self.cumulative_length += key_states.shape[2]
        pads = self.columns["keys"].gather.pads
        return grouped(keys, pads), grouped(values, pads)

    def get_seq_length(self) -> int:
        return self.cumulative_length


class _IndexedInRows(_InRows):
    """Sparse attention, whose indexer takes the best columns of each row; padding has the worst scores of all."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take [rows, new, width]; returns [rows, columns, width]."""
        self.arrive()
        column = self.columns["indexer_keys"]
        return grouped(column.push(indexer_key_states), column.gather.pads)


class _CompressingInRows(_InRows):
    """A window of the rows, and for what each has compressed its own cache: see `stepwise.py`."""

    caches: Sequence[Any]  # of each row


class _InRowsAndRecurrent(_InRows, Recurrent):
    """Attention and a recurrent state side by side in one layer."""


# Our replacement for each class of transformers. A model with any other layer is computed row by row.
IN_ROWS: dict[str, type[Layer]] = {
    "DynamicLayer": _InRows,
    "DynamicSlidingWindowLayer": _InRows,
    "DynamicIndexedLayer": _IndexedInRows,
    "DeepseekV4HCACache": _CompressingInRows,
    "DeepseekV4CSACache": _CompressingInRows,
    "LinearAttentionLayer": Recurrent,
    "LinearAttentionAndFullAttentionLayer": _InRowsAndRecurrent,
    "LinearAttentionAndSlidingWindowAttentionLayer": _InRowsAndRecurrent,
    "DummyLayer": Layer,
}


COLUMNS = frozenset({"keys", "values", "indexer_keys"})  # buffers of tokens that rows can be gathered from


def in_rows(layout: StateLayout) -> bool:
    """Whether each layer and each of its buffers is known here, so that it is worth trying."""
    return all(type(plan.fresh).__name__ in IN_ROWS for plan in layout.layers) and all(
        buffer.shape[0] < layout.page_tokens or buffer.name.split(".", 2)[2] in COLUMNS
        for pool in layout.pools
        if not pool.in_place
        for buffer in pool.buffers
    )


class Batch:
    """Sequences whose next chunks are computed together. Another set of sequences is another batch."""

    def __init__(self, workspaces: Sequence[PagedWorkspace], spare: int | None = None) -> None:
        """`spare`: by how many columns a row of an answer may be padded (`by_length`); None: to the longest."""
        self.workspaces, self._spare = tuple(workspaces), spare
        self._groups: list[list[int]] = []  # of answers, which all grow alike
        first = workspaces[0]
        self.layout, self.device = first.layout, first.device
        layers = [replace(plan, mixin=IN_ROWS[type(plan.fresh).__name__]).build() for plan in self.layout.layers]
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
                if pool.lookback is not None:
                    self._arrive(int(number))
                if pool.in_place and isinstance(layer, Recurrent):
                    self._stack_states(layer, buffer.name)
                elif not pool.in_place and buffer.shape[0] == self.layout.page_tokens:  # else each row's own
                    self._gathers.setdefault(pool.name, _Gather())
                    flat, scale = self._stack_tokens(buffer.name), self.layout.scale(buffer.name)
                    layer.columns[what] = _Column(flat, self._gathers[pool.name], scale)

    def _arrive(self, number: int) -> None:
        for workspace in self.workspaces:
            workspace.cache.layers[number].arrive()

    def _stack_states(self, layer: Any, name: str) -> None:
        """One tensor of all rows' states; each workspace's state is a view of it from now on."""
        stack = torch.cat([workspace._states[name] for workspace in self.workspaces])
        layer.hold(name.split(".", 2)[2], stack)
        layer.resume_at(max(workspace.tokens for workspace in self.workspaces))
        for row, workspace in enumerate(self.workspaces):
            workspace._put_state(name, stack[row : row + 1])

    def _stack_tokens(self, name: str) -> Tensor:
        """A flat tensor that holds the tokens of all rows."""
        tapes = [workspace._tapes[name] for workspace in self.workspaces]
        if isinstance(tapes[0], PagedTape):
            return tapes[0]._data
        stack = torch.stack([tape._data for tape in tapes])
        for tape, data in zip(tapes, stack, strict=True):
            tape._data = data
        return stack.flatten(0, 1)

    def forward(self, model: Any, ids: Sequence[Sequence[int]]) -> Tensor:
        """Compute some tokens of each row; the logits [rows, vocabulary] after the last of each. If it fails, the rows'
        states are lost."""
        if any(workspace.coming for workspace in self.workspaces):  # or a table has moved to such pages
            for number, layer in enumerate(self.cache.layers):
                layer.pending = partial(self._arrive, number)
        counts, device = [len(row) for row in ids], self.device
        ends = [workspace.tokens + count for workspace, count in zip(self.workspaces, counts, strict=True)]
        new, longest = max(counts), max(ends)
        before = longest - new
        for layer in self._attention:
            layer.cumulative_length = before
        columns, starts = torch.arange(longest, device=device), longest - torch.tensor(ends, device=device)[:, None]
        mask = (columns >= starts).long() if min(ends) < longest else None
        valid = None
        if min(counts) < new:  # a column of padding may be one of the row's past
            valid = columns[:new] >= new - torch.tensor(counts, device=device)[:, None]
        self._aim(columns - starts, ends, counts, valid)
        output = compute(
            model,
            self.cache,
            input_ids=torch.tensor([[*[0] * (new - len(row)), *row] for row in ids], device=device),
            position_ids=(columns[before:] - starts).clamp(min=0),
            attention_mask=mask,
            logits_to_keep=1,
        )
        for workspace, count in zip(self.workspaces, counts, strict=True):
            workspace.advance(count)
        logits: Tensor = output.logits[:, -1]
        return logits

    @property
    def padded(self) -> bool:
        """Whether the model needed keys or values of all rows in one tensor, so that groups gain nothing."""
        return any(gather.padded for gather in self._gathers.values())

    def _apart(self, counts: Sequence[int]) -> list[slice]:
        """The groups of rows that are padded to the same length."""
        if self._spare is None or max(counts) > 1:
            return [slice(len(counts))]
        self._groups = self._groups or by_length([workspace.tokens for workspace in self.workspaces], self._spare)
        return [slice(group[0], group[-1] + 1) for group in self._groups]

    def _aim(self, at: Tensor, ends: Sequence[int], counts: Sequence[int], valid: Tensor | None) -> None:
        """`at` [rows, columns]: which token of its row each column has, below 0 in the padding. `ends`: the tokens of
        each row."""
        size, new, groups, longest = self.layout.page_tokens, max(counts), self._apart(counts), max(ends)
        held = [at[rows, longest - max(ends[rows]) :] for rows in groups]
        for pool in self.layout.pools:
            if pool.name not in self._gathers:
                continue
            read = []
            if pool.lookback is None:
                for rows, tokens in zip(groups, held, strict=True):
                    tables = [workspace.tables[pool.name].index for workspace in self.workspaces[rows]]
                    token = tokens.clamp(min=0)  # in the padding: any token of the row, as the mask hides it
                    read.append(pad_sequence(tables, True).gather(1, token // size) * size + token % size)
            else:
                first = pool.buffers[0]
                tapes = [workspace._tapes[first.name] for workspace in self.workspaces]
                for workspace, count in zip(self.workspaces, counts, strict=True):
                    workspace.make_room(pool.name, count)
                front = torch.tensor([tape.front for tape in tapes], device=self.device)[:, None]
                rooms = torch.arange(len(tapes), device=self.device)[:, None] * len(tapes[0]._data)
                window = self.layout.layers[first.layer].window
                assert window is not None
                for rows, tokens in zip(groups, held, strict=True):
                    width = min(new + window - 1, tokens.shape[1])
                    read.append(tokens[:, -width:].maximum(front[rows]) + (rooms - front)[rows])
            self._gathers[pool.name].aim(read, valid, new)


@dataclass(frozen=True)
class Together:
    """What a model computes together; nothing by default."""

    answers: bool = False  # one token of each row
    apart: bool = False  # the same, with rows of other lengths in groups of their own
    fresh: bool = False  # tails of any lengths that have no past
    equal: bool = False  # tails of one length
    any: bool = False  # all tails

    def groups(self, shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Which tails (tokens before, tokens), by their numbers, are computed together; the others one by one."""
        kinds: dict[object, list[int]] = {}
        for row, (before, tokens) in enumerate(shapes):
            if self.any or (self.fresh and not before):
                kinds.setdefault("padded", []).append(row)
            elif self.equal:
                kinds.setdefault(tokens, []).append(row)
        found: list[list[int]] = []
        for rows in kinds.values():
            group: list[int] = []
            for row in sorted(rows, key=lambda row: -shapes[row][1]):
                if group and shapes[group[0]][1] > TWICE * shapes[row][1]:
                    found.append(group)
                    group = []
                group.append(row)
            found.append(group)
        return [group for group in found if len(group) > 1]


# --- what a model's code can do

# What a model raises that cannot do what is tried. All ranks try the same, and say afterwards how far they have come.
CANNOT = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, FailedOnRank)
_tried: "weakref.WeakKeyDictionary[Any, Together]" = weakref.WeakKeyDictionary()


def together(model: Any, layout: StateLayout) -> Together:
    """What a model computes in a batch as it does each row alone. It is tried once, on a few tokens."""
    if model not in _tried:
        if layout.scales is not None:  # rounding to FP8 would be taken for a wrong mask
            layout = StateLayout.of(model, layout.page_tokens, layout.chunk_tokens)
        # On a GPU a group costs launches, which no card has measured beside a forward.
        apart = (
            model.device.type == "cpu" and in_rows(layout) and _agrees(model, layout, ANSWERS, again=True, spare=APART)
        )
        answers = apart or (in_rows(layout) and _agrees(model, layout, ANSWERS, again=True))
        tails = answers and all(plan.rate == 1 for plan in layout.layers)
        tried = (tails and _agrees(model, layout, rows) for rows in (FRESH, EQUAL, ANY))
        _tried[model] = Together(answers, apart, *tried)
        log.debug("%s computes together: %s", type(model).__name__, _tried[model])
    return _tried[model]


def _agrees(
    model: Any, layout: StateLayout, rows: Sequence[tuple[int, int]], again: bool = False, spare: int | None = None
) -> bool:
    """Whether rows computed together have the logits of each alone, then and after one more token, which reads the
    state that the first wrote: alone or, `again`, together too. With `spare`: in groups, none of which is padded."""
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = [[(7 * at + before) % vocabulary for at in range(before)] for before, _ in rows]
    ids = [[(5 * at + tokens) % vocabulary for at in range(tokens)] for _, tokens in rows]
    more, most = [[1 % vocabulary]] * len(rows), max(tokens for _, tokens in rows) + 1
    try:
        make_batchable(model, layout.layers, layout.cache_class)
        in_batch, alone = (computed(model, layout, prompts, most) for _ in range(2))
        batch = Batch(in_batch, spare)
        found = [batch.forward(model, ids), batch.forward(model, more) if again else _alone(model, in_batch, more)]
        each = [_alone(model, alone, ids), _alone(model, alone, more)]
        allowed = ROUNDING.get(model.dtype, 0.1)
        return not batch.padded and all(
            torch.allclose(ours.float(), theirs.float(), rtol=0, atol=allowed * float(theirs.float().abs().max()))
            for ours, theirs in zip(found, each, strict=True)
        )
    except CANNOT as e:
        log.debug("%s in a batch of %s: %s", type(model).__name__, rows, e)  # its code does not support it
        return False


def _alone(model: Any, workspaces: Sequence[PagedWorkspace], ids: Sequence[Sequence[int]]) -> Tensor:
    chunks = (torch.tensor([[*row]], device=model.device) for row in ids)
    return torch.stack([forward(model, *each) for each in zip(workspaces, chunks, strict=True)])


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
