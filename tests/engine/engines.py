"""Engines on tiny models, stepped by hand or running, and their requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache as cached
from typing import Any

import pytest
import torch

from kvarve.cache.config import CacheConfig, cut_memory, split
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.pages.pools import ModelIdentity
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.requests import OutputChunk, Request, Sampling
from kvarve.reference.engine.workspace import StateLayout
from tests.sim.models import FAMILIES, byte_tokenizer, tiny_grid, tiny_model

# One of each kind of state in every run of the tests, and all of them in the long form.
OF_EACH_KIND = ("qwen3_5", "gpt_oss_wide", "deepseek_v32", "deepseek_v4", "jamba", "minimax")


def every_family(test: Any) -> Any:
    names = [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.long) for name in FAMILIES]
    return pytest.mark.usefixtures("kinds")(pytest.mark.parametrize("family", names)(test))


every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=["float32", "bfloat16"]
)

PAGE, CHUNK = 16, 64
PROMPT = 2 * CHUNK + 23
GRID_FLOOR = 2 * CHUNK
DECODED = 3
LONG_S = 60.0
MIB = 1 << 20


def a_model(family: str = "qwen3_5", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return _made(family, dtype)


@cached
def _made(family: str, dtype: torch.dtype) -> LoadedModel:
    model = tiny_model(family, dtype)
    page, chunk = tiny_grid(family)
    layout = StateLayout.of(model, page, chunk)
    name = str(dtype).removeprefix("torch.")
    identity = ModelIdentity(family, "random", name, page, chunk, layout.pools)
    return LoadedModel(family, model, byte_tokenizer(), layout, identity, 1024, frozenset({256}))


def a_prompt(tokens: int = PROMPT, seed: int = 7) -> list[int]:
    return list(map(int, torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(seed))))


def a_request(prompt: Sequence[int] | None = None, max_tokens: int = DECODED, **kwargs: Any) -> Request:
    names = {field.name for field in fields(Sampling)}
    sampling = {"ignore_eos": True} | {key: kwargs.pop(key) for key in [*kwargs] if key in names}
    return Request(a_prompt() if prompt is None else prompt, Sampling(max_tokens, **sampling), **kwargs)


Make = Callable[..., Engine]


def engines() -> Iterator[Make]:
    """Makes engines, started unless told otherwise, and shuts them down at the end."""
    made_engines: list[Engine] = []

    def made(
        model: LoadedModel | None = None,
        *,
        start: bool = True,
        storage: Any = None,
        clock: Callable[[], float] | None = None,
        max_running: int = 8,
        max_waiting: int = 256,
        turn_tokens: int = 2 * CHUNK,
        deterministic: bool = False,
        exact: bool = False,
        device: int = 64 * MIB,
        host: int = 64 * MIB,
        **policies: Any,
    ) -> Engine:
        model = model or a_model()
        url = storage if isinstance(storage, str) else None
        kwargs: dict[str, Any] = {} if clock is None else {"clock": clock}
        if storage is not None and url is None:
            kwargs["storage"] = storage
        cache = PrefixCache(model.identity, CacheConfig(device, host, url, Policies(**policies)), **kwargs)
        engine = Engine(
            model,
            cache,
            max_running=max_running,
            max_waiting=max_waiting,
            turn_tokens=turn_tokens,
            deterministic=deterministic,
            exact=exact,
        )
        made_engines.append(engine.start() if start else engine)
        return engine

    yield made
    for engine in made_engines:
        engine.shutdown(10)


def room_for(model: LoadedModel, tokens: int, shared: bool = False) -> int:
    """The least device memory that holds one sequence of this many tokens, if it is divided once; or if pools share
    it."""
    page, chunk = model.layout.page_tokens, model.layout.chunk_tokens
    low, high = 0, 64 * MIB
    while low < high:
        middle = (low + high) // 2
        try:
            slots = split(middle, model.identity.pools, page, chunk, records=False, what="device")[0]
            if shared and (cut := cut_memory(middle, model.identity.pools, page, chunk, records=False)):
                slots = cut.most(0)
        except ConfigError:
            slots = 0
        low, high = (low, middle) if slots * page >= tokens else (middle + 1, high)
    return low


def turns(engine: Engine, until: Callable[[], bool], at_most: int = 2000) -> int:
    """Turn a stopped engine by hand until something holds; how many turns that took."""
    for turn in range(at_most):
        if until():
            engine.cache.scheduler.audit()
            return turn
        if not engine._turn():
            engine.cache.wait(0.02)
    raise AssertionError(f"not within {at_most} turns")


def by_hand(engine: Engine, *requests: Request) -> list[tuple[str, list[int], OutputChunk]]:
    """Submit to an engine that is not started, and turn it until all have been answered."""
    finished = engine.counts.finished
    for request in requests:
        engine.submit(request)
    turns(engine, lambda: engine.counts.finished == finished + len(requests))
    return [request.result(0.1) for request in requests]


@cached
def alone(family: str, tokens: int, seed: int, max_tokens: int) -> list[int]:
    """A model's answer, alone and without a cache."""
    model = a_model(family)
    cache = PrefixCache(model.identity, CacheConfig(MIB * 64))
    engine = Engine(model, cache)
    ((_, answer, _),) = by_hand(engine, a_request(a_prompt(tokens, seed), max_tokens))
    engine.shutdown(5)
    return answer
