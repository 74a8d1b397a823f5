"""From logits to tokens and their likelihoods. Pure: tensors in, tokens out; nothing here knows an engine."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarve.reference.engine.requests import Likelihood, Sampling

COLDEST = 1e-30  # a lower temperature samples the same, and would be 0 in float32
BLOCK = 8  # rows at a time, so that intermediate values stay in a processor's cache


class Draw(NamedTuple):
    """How one row is sampled: ids of its prompt's and its answer's tokens, and those (`ends`) that would end it."""

    sampling: Sampling
    random: torch.Generator | None
    prompt_ids: Collection[int] = ()
    output_ids: Sequence[int] = ()
    ends: Collection[int] = ()


def choose_all(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row of logits [rows, vocabulary]; None for a row whose probabilities are NaN.

    First the steps that may change the best token, in vLLM's order: no `ends` within min_tokens, logit_bias, penalties.
    Then the temperature, then top_k, then top_p among what that leaves, then min_p: the order of transformers. (vLLM's
    present engine has min_p before top_k; that differs only where min_p and top_p both drop tokens.) A row's token
    depends on no other row: every request draws one number a token from a generator of its own.
    """
    changed = [row for row, draw in enumerate(draws) if _is_weighed(draw)]
    if changed:
        logits = logits.float().clone()
        for row in changed:
            _weigh(logits[row], draws[row])
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
    if rows[-1] - first == count - 1:  # consecutive, as they ascend
        return logits[first : first + count]
    return logits[torch.tensor(rows, device=logits.device)]


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """Draw a token for each row of float32 logits."""
    temperatures = [[max(COLDEST, draw.sampling.temperature)] for draw in draws]
    # The best token at 0, so that no temperature makes infinities, however small.
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.tensor(temperatures, device=logits.device)
    probs = torch.softmax(scaled, -1)
    numbers = probs[:, 0].isfinite().tolist()  # if one is NaN, all are
    where = [torch.rand((), dtype=torch.float64, generator=draw.random).item() for draw in draws]
    tokens: list[int | None] = [None] * len(draws)
    limited = [row for row, draw in enumerate(draws) if numbers[row] and _is_limited(draw.sampling, probs.shape[1])]
    if limited:
        some = _some(probs, limited)
        floors = _floors(some, [draws[row].sampling for row in limited])
        for row, (index, found) in zip(limited, _above(some, floors), strict=True):
            tokens[row] = int(index[_draw(found, draws[row].sampling, where[row])])
    if free := [row for row, is_number in enumerate(numbers) if is_number and row not in limited]:
        sums = _some(probs, free).double().cumsum(-1)
        marks = sums[:, -1:] * torch.tensor([[where[row]] for row in free], dtype=torch.float64, device=sums.device)
        last = sums.shape[1] - 1
        for row, token in zip(free, torch.searchsorted(sums, marks, right=True)[:, 0].tolist(), strict=True):
            tokens[row] = min(token, last)
    return tokens


def _above(probs: Tensor, floors: Tensor) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Per row, the tokens whose probabilities are not below its floor, and those probabilities."""
    rows, vocabulary = probs.shape
    kept = (probs >= floors).flatten()
    flat = torch.from_numpy(np.flatnonzero(kept.numpy())) if kept.device.type == "cpu" else kept.nonzero()[:, 0]
    index, found = flat.cpu().numpy(), probs.flatten()[flat].cpu().numpy()
    stops = np.searchsorted(index, [vocabulary * (row + 1) for row in range(rows)])
    for row, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        yield index[start:stop] - vocabulary * row, found[start:stop]


def _is_limited(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.top_p < 1 or 0 < sampling.top_k < vocabulary or sampling.min_p > 0


def _floors(probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Per row, a probability [rows, 1] below which no token can be drawn, so that only few need be sorted.

    Tokens that each have less than (1 - top_p) / vocabulary have less than 1 - top_p together, so they are not among
    the best that make up top_p; half of that allows for rounding.
    """
    vocabulary = probs.shape[1]
    by_p = [0.5 * (1 - each.top_p) / vocabulary for each in samplings]
    by_min = [each.min_p for each in samplings]
    floors = torch.tensor(by_min, device=probs.device)[:, None] * probs.amax(-1, keepdim=True)
    floors = floors.maximum(torch.tensor(by_p, device=probs.device)[:, None])
    counted = [row for row, each in enumerate(samplings) if 0 < each.top_k < vocabulary]
    if counted:
        most = [samplings[row].top_k for row in counted]
        best = _some(probs, counted).topk(max(most)).values
        last = best.gather(1, torch.tensor(most, device=probs.device)[:, None] - 1)
        # top_p is a share of what top_k leaves, so all of that is needed, and tokens as likely as the last too.
        floors[torch.tensor(counted, device=probs.device)] = last
    return floors


def _draw(probs: npt.NDArray[np.float32], sampling: Sampling, where: float) -> int:
    """The index of the token drawn from these probabilities: `where` in [0, 1) says which."""
    best = np.sort(probs)[::-1]  # values alone, as an argsort would take ten times as long
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
        better = probs > last
        equal = np.flatnonzero(probs == last)[: keep - int(better.sum())]
        better[equal] = True
        probs = np.where(better, probs, 0)
    sums = probs.astype(np.float64).cumsum()
    return min(int(np.searchsorted(sums, where * sums[-1], side="right")), len(sums) - 1)


def _is_weighed(draw: Draw) -> bool:
    sampling = draw.sampling
    early = len(draw.output_ids) < sampling.min_tokens and bool(draw.ends)
    penalties = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return bool(early or sampling.logit_bias or penalties)


def _weigh(logits: Tensor, draw: Draw) -> None:
    """Apply bias and penalties to logits [vocabulary] in float32."""
    sampling, _, prompt_ids, output_ids, ends = draw
    repetition = sampling.repetition_penalty
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
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


def likelihood(logits: Tensor, token: int, alternatives: int, offset: int) -> Likelihood:
    """How likely a token was by the model's own logits [vocabulary], before `choose_all` changes them."""
    logprobs = torch.log_softmax(logits.float(), -1)
    best = logprobs.topk(min(alternatives, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Likelihood(token, float(logprobs[token]), top, offset)
