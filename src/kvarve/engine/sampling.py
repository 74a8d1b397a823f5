"""From logits to a token, and how likely that was. Pure: tensors in, a token out; nothing here knows an engine."""

import torch
from torch import Tensor

from kvarve.engine.requests import Likelihood, Sampling


def choose(logits: Tensor, sampling: Sampling, random: torch.Generator | None) -> int:
    """The next token from logits [vocabulary].

    First the temperature, then top_k, then top_p among what that leaves, then min_p: the order of transformers. (vLLM's
    present engine has min_p before top_k; that differs only where min_p and top_p both drop something.)
    """
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


def likelihood(logits: Tensor, token: int, alternatives: int, offset: int) -> Likelihood:
    """How likely a token was by the model's own logits [vocabulary], before anything that `choose` does to them."""
    logprobs = torch.log_softmax(logits.float(), -1)
    best = logprobs.topk(min(alternatives, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Likelihood(token, float(logprobs[token]), top, offset)
