"""The prover's engine notices what an answer or its own end hides."""

import pytest
import torch

from engines import CHUNK, a_model, a_prompt
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.reference.engine.requests import Finish, OutputChunk, Request, Sampling, TokenUsage
from kvarve.reference.verify.watched import Question, Stuck, Transcript, WatchedEngine, watched


def test_an_answer_that_lost_tokens_is_none() -> None:
    request, engine = Request([1, 2, 3], Sampling(4)), object.__new__(WatchedEngine)
    engine._begin_to_serve = lambda: None  # type: ignore[method-assign]
    likeliest = {at: torch.eye(10)[token] for at, token in zip(range(3, 7), (5, 6, 7, 8), strict=True)}
    request.outputs.put(OutputChunk("a", (5,), Finish.LENGTH, TokenUsage.of(3, 1, None)))
    with pytest.raises(Stuck, match="likeliest tokens"):
        engine._answer(Question([1, 2, 3], 4), request, Transcript(likeliest))


def test_an_engine_that_breaks_after_its_last_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    cache = PrefixCache(model.identity, CacheConfig("8MiB", "8MiB"))

    def broken(*_: object) -> None:
        raise KeyError("planted")

    with pytest.raises(Stuck, match="planted"), watched(model, cache, deterministic=True, turn_tokens=CHUNK) as engine:
        engine.answers([Question(a_prompt(CHUNK + 1), 2)])
        monkeypatch.setattr(cache.scheduler.core, "step", broken)
