"""The tails of many prompts in one forward: the tokens after a prompt's last whole chunk, which are not published.

Rows are padded on the left, as in a batch of answers, and each resumes where its own pages end. The effect of padding
depends on the layer: attention masks it; a recurrent state ignores it if the row has no past, and is corrupted by it if
there is one. So three kinds of batch are tried when an engine starts, on a few tokens each; a kind that fails is
computed row by row.
"""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvarve.reference.engine.batch import CANNOT, IN_ROWS, ROUNDING, computed, in_rows
from kvarve.reference.engine.layers import Layer, LayerPlan, new_cache
from kvarve.reference.engine.model import forward
from kvarve.reference.engine.paging import PagedWorkspace
from kvarve.reference.engine.workspace import StateLayout
from kvarve.reference.engine.wrappers import compute

log = logging.getLogger(__name__)

# Tokens before and in each row of the trials: rows without a past, rows of one length, any rows.
FRESH, EQUAL, ANY = ((0, 5), (0, 12), (0, 3)), ((5, 4), (0, 4), (12, 4)), ((5, 4), (0, 7), (12, 3))
PADDING = 2  # a row is padded to at most this many times its own length


class _InTails(Layer):
    """Attention over what each row's own tape holds, aligned at the end."""

    rows: list[Any]  # the same layer of each row's workspace
    lengths: list[int]  # of the new tokens of each row
    cumulative_length: int  # tokens before the new ones, of the longest row

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take [rows, heads, n, width]; returns [rows, heads, columns, width]."""
        new = key_states.shape[2]
        columns = new + (self.cumulative_length if self.past is None else min(self.past, self.cumulative_length))
        keys = self._push("keys", key_states.transpose(1, 2), columns).transpose(1, 2)
        values = keys[..., : value_states.shape[-1]]  # where one tape is both, or values have no width
        if "values" in self.rows[0].tapes:
            values = self._push("values", value_states.transpose(1, 2), columns).transpose(1, 2)
        self.cumulative_length += new
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take [rows, n, width]; returns [rows, columns, width] of all columns."""
        before = [layer.tapes["indexer_keys"].end for layer in self.rows]
        columns = max(had + new for had, new in zip(before, self.lengths, strict=True))
        return self._push("indexer_keys", indexer_key_states, columns)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def _push(self, name: str, states: Tensor, columns: int) -> Tensor:
        """Write the last tokens of each row to its tape, and read the last `columns`; zeros where it has fewer."""
        read = states.new_zeros(len(self.rows), columns, *states.shape[2:])
        for row, (layer, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            layer.arrive()
            tape = layer.tapes[name]
            start = 0 if self.past is None else max(0, tape.end - self.past)
            tape.append(states[row, states.shape[1] - length :])
            found = tape.read(start, tape.end)
            read[row, columns - len(found) :] = found
        return read


def _in_tails(plan: LayerPlan) -> type[Layer]:
    """Our replacement for a layer: this kind of attention where it has any, and states in rows as in a batch."""
    in_batch = IN_ROWS[type(plan.fresh).__name__]
    kinds = [each for each in in_batch.__mro__ if each.__module__ == in_batch.__module__]
    names = [kind.__name__ for kind in kinds]
    if "_InRows" not in names:
        return in_batch
    states = tuple(kind for kind in kinds if kind.__name__ == "_StatesInRows")
    return _MIXINS.setdefault(states, type("_InTails", (_InTails, *states), {}) if states else _InTails)


_MIXINS: dict[tuple[type, ...], type[Layer]] = {}


@dataclass(frozen=True)
class Tails:
    """Which tails a model computes together; none by default."""

    fresh: bool = False  # rows of any lengths that have no past
    equal: bool = False  # rows of one length
    any: bool = False  # all rows

    def groups(self, shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Which rows (tokens before, tokens), by their numbers, are computed together; the others one by one."""
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
                if group and shapes[group[0]][1] > PADDING * shapes[row][1]:
                    found.append(group)
                    group = []
                group.append(row)
            found.append(group)
        return [group for group in found if len(group) > 1]

    def forward(self, model: Any, workspaces: Sequence[PagedWorkspace], ids: Sequence[Sequence[int]]) -> Tensor:
        """Compute tokens in each workspace; the logits [rows, vocabulary] after the last of each. If it fails, the
        rows' states are lost."""
        layout, device = workspaces[0].layout, workspaces[0].device
        past, lengths = [workspace.tokens for workspace in workspaces], [len(row) for row in ids]
        new, before = max(lengths), 0
        longest = max(had + length for had, length in zip(past, lengths, strict=True))
        before = longest - new
        layers = [replace(plan, mixin=_in_tails(plan)).build() for plan in layout.layers]
        for number, layer in enumerate(layers):
            if isinstance(layer, _InTails):
                layer.rows = [workspace.cache.layers[number] for workspace in workspaces]
                layer.lengths, layer.cumulative_length = lengths, before
        held: dict[str, Tensor] = {}
        for pool in layout.pools:
            for buffer in pool.buffers if pool.in_place else ():
                _, number_, what = buffer.name.split(".", 2)
                for workspace in workspaces:
                    workspace.cache.layers[int(number_)].arrive()
                states = torch.cat([workspace._states[buffer.name] for workspace in workspaces])
                held[buffer.name] = layers[int(number_)].hold(what, states)
        for layer in layers:
            if hasattr(layer, "has_previous_state"):
                for number in layer.has_previous_state:
                    layer.has_previous_state[number] = layer.has_previous_state[number] and any(past)
        padded = torch.tensor([[0] * (new - len(row)) + [*row] for row in ids], device=device)
        columns = torch.arange(longest, device=device)
        starts = torch.tensor(
            [longest - had - length for had, length in zip(past, lengths, strict=True)], device=device
        )
        mask = (columns >= starts[:, None]).long() if bool(starts.any()) else None
        positions = (columns[before:] - starts[:, None]).clamp(min=0)
        cache = new_cache(layout.cache_class, layers)
        output = compute(model, cache, input_ids=padded, position_ids=positions, attention_mask=mask, logits_to_keep=1)
        for row, workspace in enumerate(workspaces):
            workspace.computed(lengths[row])
            workspace.arrived()
            for name, states in held.items():
                workspace._states[name].copy_(states[row : row + 1])
            for layer in workspace.cache.layers:
                layer.resume_at(workspace.tokens)
        logits: Tensor = output.logits[:, -1]
        return logits


# --- what a model's code can do

_tried: "weakref.WeakKeyDictionary[Any, Tails]" = weakref.WeakKeyDictionary()


def tails(model: Any, layout: StateLayout) -> Tails:
    """Which tails of prompts a model can compute together. It is tried once, on a few tokens."""
    if model not in _tried:
        possible = in_rows(layout) and all(plan.rate == 1 for plan in layout.layers)
        ways = [possible and _agrees(model, layout, rows) for rows in (FRESH, EQUAL, ANY)]
        _tried[model] = Tails(*ways)
        log.debug("%s computes tails of prompts together: %s", type(model).__name__, _tried[model])
    return _tried[model]


def _agrees(model: Any, layout: StateLayout, rows: Sequence[tuple[int, int]]) -> bool:
    """Whether rows computed together have the logits of each alone, then and after one more token."""
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = [[(7 * at + before) % vocabulary for at in range(before)] for before, _ in rows]
    ids = [[(5 * at + tokens) % vocabulary for at in range(tokens)] for _, tokens in rows]
    most = max(tokens for _, tokens in rows) + 1
    try:
        together, alone = (computed(model, layout, prompts, most) for _ in range(2))
        found = [Tails().forward(model, together, ids)]
        each = [torch.stack([_alone(model, workspace, row) for workspace, row in zip(alone, ids, strict=True)])]
        for workspaces, logits in ((together, found), (alone, each)):
            logits.append(torch.stack([_alone(model, workspace, [1 % vocabulary]) for workspace in workspaces]))
        allowed = ROUNDING.get(model.dtype, 0.1)
        return all(
            torch.allclose(ours.float(), theirs.float(), rtol=0, atol=allowed * float(theirs.float().abs().max()))
            for ours, theirs in zip(found, each, strict=True)
        )
    except CANNOT as e:
        log.debug("tails of prompts in %s: %s", type(model).__name__, e)  # its code does not support it
        return False


def _alone(model: Any, workspace: PagedWorkspace, ids: Sequence[int]) -> Tensor:
    return forward(model, workspace, torch.tensor([[*ids]], device=model.device))
