"""From logits to a token, and how likely that was. Pure: tensors in, a token out; nothing here knows an engine."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvarve.engine.requests import Likelihood, Sampling


def choose(
    logits: Tensor,
    sampling: Sampling,
    random: torch.Generator | None,
    heard: Collection[int] = (),
    said: Sequence[int] = (),
    ends: Collection[int] = (),
) -> int:
    """The next token from logits [vocabulary], after the tokens `heard` in the prompt and `said` in the answer.

    First what may change which token is the best, in vLLM's order: no `ends` within min_tokens, logit_bias, penalties.
    Then the temperature, then top_k, then top_p among what that leaves, then min_p: the order of transformers. (vLLM's
    present engine has min_p before top_k; that differs only where min_p and top_p both drop something.)
    """
    logits = _weighed(logits, sampling, heard, said, ends)
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.double().cpu()
    # The best token at 0, so that no temperature however small makes an infinity of the others.
    chances = torch.softmax((logits - logits.max()) / sampling.temperature, -1)
    if 0 < sampling.top_k < len(chances):
        chances[chances < chances.topk(sampling.top_k).values[-1]] = 0
        chances /= chances.sum()
    if sampling.top_p < 1:
        ordered, index = chances.sort(descending=True)
        # A token stays if those before it do not reach top_p yet; so at least one does.
        ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0
        chances = torch.zeros_like(chances).scatter_(0, index, ordered)
    if sampling.min_p > 0:
        chances[chances < sampling.min_p * chances.max()] = 0
    return int(torch.multinomial(chances, 1, generator=random))


def _weighed(
    logits: Tensor, sampling: Sampling, heard: Collection[int], said: Sequence[int], ends: Collection[int]
) -> Tensor:
    """New logits in float32; the very same ones if nothing is asked of them."""
    too_early = len(said) < sampling.min_tokens
    repetition = sampling.repetition_penalty
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    if not (too_early or sampling.logit_bias or repetition != 1 or frequency or presence):
        return logits
    logits = logits.float().clone()
    if too_early:
        for end in ends:
            logits[end] = -torch.inf
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if repetition != 1 and (seen := [*{*heard, *said}]):
        known = logits[seen]
        logits[seen] = torch.where(known > 0, known / repetition, known * repetition)
    if said and (frequency or presence):
        times = torch.bincount(torch.tensor(said, device=logits.device), minlength=len(logits))
        logits -= frequency * times + presence * (times > 0)
    return logits


def likelihood(logits: Tensor, token: int, alternatives: int, offset: int) -> Likelihood:
    """How likely a token was by the model's own logits [vocabulary], before anything that `choose` does to them."""
    logprobs = torch.log_softmax(logits.float(), -1)
    best = logprobs.topk(min(alternatives, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Likelihood(token, float(logprobs[token]), top, offset)
