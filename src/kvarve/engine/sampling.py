"""From logits to tokens, and how likely these were. Pure: tensors in, tokens out; nothing here knows an engine."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarve.engine.requests import Likelihood, Sampling

COLDEST = 1e-30  # a temperature below it chooses as this one does, and would be 0 in float32
BLOCK = 8  # rows at a time: what comes between logits and chances stays in a processor's cache


class Draw(NamedTuple):
    """What one row asks: token ids of its prompt and of its answer so far, and those (`ends`) that would end it."""

    sampling: Sampling
    random: torch.Generator | None
    prompt_ids: Collection[int] = ()
    output_ids: Sequence[int] = ()
    ends: Collection[int] = ()


def choose(logits: Tensor, *asked: object) -> int:
    """The next token from logits [vocabulary]; what is asked are the fields of a `Draw`. ValueError: no numbers."""
    (token,) = choose_all(logits[None], [Draw(*asked)])  # type: ignore[arg-type]
    if token is None:
        raise ValueError("the logits are not numbers")
    return token


def choose_all(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row of logits [rows, vocabulary]; None for a row whose chances are no numbers.

    First what may change which token is the best, in vLLM's order: no `ends` within min_tokens, logit_bias, penalties.
    Then the temperature, then top_k, then top_p among what that leaves, then min_p: the order of transformers. (vLLM's
    present engine has min_p before top_k; that differs only where min_p and top_p both drop something.) What a row gets
    depends on no other row: every request draws one number a token from a generator of its own.
    """
    changed = [row for row, draw in enumerate(draws) if _is_weighed(draw)]
    if changed:
        logits = logits.float().clone()
        for row in changed:
            sampling, _, prompt_ids, output_ids, ends = draws[row]
            logits[row] = _weighed(logits[row], sampling, prompt_ids, output_ids, ends)
    chosen: list[int | None] = [None] * len(draws)
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0]
    if greedy:
        best = _some(logits, greedy).argmax(-1).tolist()
        for row, token in zip(greedy, best, strict=True):
            chosen[row] = token
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    for start in range(0, len(drawn), BLOCK):
        block = drawn[start : start + BLOCK]
        tokens = _drawn(_some(logits, block).float(), [draws[row] for row in block])
        for row, token in zip(block, tokens, strict=True):
            chosen[row] = token
    return chosen


def _some(logits: Tensor, rows: list[int]) -> Tensor:
    first, count = rows[0], len(rows)
    if rows[-1] - first == count - 1:  # one behind the other: they ascend
        return logits[first : first + count]
    return logits[torch.tensor(rows, device=logits.device)]


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """Draw a token for each row of float32 logits."""
    temperatures = [[max(COLDEST, draw.sampling.temperature)] for draw in draws]
    # The best token at 0, so that no temperature however small makes an infinity of the others.
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.tensor(temperatures, device=logits.device)
    chances = torch.softmax(scaled, -1)
    numbers = chances[:, 0].isfinite().tolist()  # if one is none, none is
    where = [torch.rand((), dtype=torch.float64, generator=draw.random).item() for draw in draws]
    tokens: list[int | None] = [None] * len(draws)
    limited = [row for row, draw in enumerate(draws) if numbers[row] and _is_limited(draw.sampling, chances.shape[1])]
    if limited:
        some = _some(chances, limited)
        floors = _floors(some, [draws[row].sampling for row in limited])
        for row, (index, found) in zip(limited, _above(some, floors), strict=True):
            tokens[row] = int(index[_one(found, draws[row].sampling, where[row])])
    if free := [row for row, is_number in enumerate(numbers) if is_number and row not in limited]:
        sums = _some(chances, free).double().cumsum(-1)
        marks = sums[:, -1:] * torch.tensor([[where[row]] for row in free], dtype=torch.float64, device=sums.device)
        last = sums.shape[1] - 1
        for row, token in zip(free, torch.searchsorted(sums, marks, right=True)[:, 0].tolist(), strict=True):
            tokens[row] = min(token, last)
    return tokens


def _above(chances: Tensor, floors: Tensor) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Of each row the tokens whose chances are not below its floor, and those chances."""
    rows, vocabulary = chances.shape
    kept = (chances >= floors).flatten()
    flat = torch.from_numpy(np.flatnonzero(kept.numpy())) if kept.device.type == "cpu" else kept.nonzero()[:, 0]
    index, found = flat.cpu().numpy(), chances.flatten()[flat].cpu().numpy()
    stops = np.searchsorted(index, [vocabulary * (row + 1) for row in range(rows)])
    for row, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        yield index[start:stop] - vocabulary * row, found[start:stop]


def _is_limited(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.top_p < 1 or 0 < sampling.top_k < vocabulary or sampling.min_p > 0


def _floors(chances: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Of each row a chance [rows, 1] below which no token can be drawn, so that only few need be sorted.

    Tokens that have all less than (1 - top_p) / vocabulary have less than 1 - top_p together, so they are not among
    the best that make top_p; half of that leaves room for rounding.
    """
    vocabulary = chances.shape[1]
    by_p = [0.5 * (1 - each.top_p) / vocabulary for each in samplings]
    by_min = [each.min_p for each in samplings]
    floors = torch.tensor(by_min, device=chances.device)[:, None] * chances.amax(-1, keepdim=True)
    floors = floors.maximum(torch.tensor(by_p, device=chances.device)[:, None])
    counted = [row for row, each in enumerate(samplings) if 0 < each.top_k < vocabulary]
    if counted:
        most = [samplings[row].top_k for row in counted]
        best = _some(chances, counted).topk(max(most)).values
        last = best.gather(1, torch.tensor(most, device=chances.device)[:, None] - 1)
        # top_p is a share of what top_k leaves, all of which is therefore needed, and those as likely as the last too.
        floors[torch.tensor(counted, device=chances.device)] = last
    return floors


def _one(chances: npt.NDArray[np.float32], sampling: Sampling, where: float) -> int:
    """Draw one of the chances that may be: `where` in [0, 1) says which."""
    best = np.sort(chances)[::-1]  # values alone: to sort tokens by them would take ten times as long
    keep = len(best)
    if sampling.top_p < 1:
        sums = best.astype(np.float64).cumsum()
        whole = sums[-1] if sampling.top_k > 0 else 1.0
        # A token stays if those before it do not reach top_p yet; so at least one does.
        keep = 1 + int(np.searchsorted(sums[:-1], sampling.top_p * whole))
    if sampling.min_p > 0:
        keep = min(keep, int((best >= sampling.min_p * best[0]).sum()))
    if keep < len(best):
        last = best[keep - 1]
        better = chances > last
        equal = np.flatnonzero(chances == last)[: keep - int(better.sum())]
        better[equal] = True
        chances = np.where(better, chances, 0)
    sums = chances.astype(np.float64).cumsum()
    return min(int(np.searchsorted(sums, where * sums[-1], side="right")), len(sums) - 1)


def _is_weighed(draw: Draw) -> bool:
    sampling = draw.sampling
    early = len(draw.output_ids) < sampling.min_tokens and bool(draw.ends)
    penalties = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return bool(early or sampling.logit_bias or penalties)


def _weighed(
    logits: Tensor, sampling: Sampling, prompt_ids: Collection[int], output_ids: Sequence[int], ends: Collection[int]
) -> Tensor:
    """New logits [vocabulary] in float32 of a row that asks for it."""
    repetition = sampling.repetition_penalty
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    logits = logits.float().clone()
    if len(output_ids) < sampling.min_tokens:
        for end in ends:
            logits[end] = -torch.inf
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if repetition != 1 and (seen := [*{*prompt_ids, *output_ids}]):
        known = logits[seen]
        logits[seen] = torch.where(known > 0, known / repetition, known * repetition)
    if output_ids and (frequency or presence):
        times = torch.bincount(torch.tensor(output_ids, device=logits.device), minlength=len(logits))
        logits -= frequency * times + presence * (times > 0)
    return logits


def likelihood(logits: Tensor, token: int, alternatives: int, offset: int) -> Likelihood:
    """How likely a token was by the model's own logits [vocabulary], before anything that `choose` does to them."""
    logprobs = torch.log_softmax(logits.float(), -1)
    best = logprobs.topk(min(alternatives, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Likelihood(token, float(logprobs[token]), top, offset)
