"""An engine whose model is changed while it runs refuses requests, and keeps no page of the changed model."""

from collections.abc import Callable
from dataclasses import replace

from adapters import adapt, adapted

from engines import CHUNK, GRID_FLOOR, a_model, a_prompt, a_request, by_hand
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.identity import Marks, identity_of
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.requests import Finish, OutputChunk
from tests.sim.models import tiny_model


def a_model_with_adapters() -> LoadedModel:
    model, plain = adapt(tiny_model("qwen3"), "poet", "lawyer"), a_model("qwen3")
    return replace(plain, model=model, identity=identity_of(model, plain.layout), marks=Marks.of(model))


def cached(last: OutputChunk) -> int:
    assert last.usage is not None
    return last.usage.cached


def switch(engine: Engine, name: str) -> None:
    for layer in adapted(engine.model.model):
        layer.set_adapter(name)


def test_a_request_after_another_adapter_was_switched_on_ends_with_an_error_and_finds_and_keeps_nothing(
    make: Callable[..., Engine],
) -> None:
    engine = make(a_model_with_adapters(), start=False)
    ((_, poem, _),) = by_hand(engine, a_request())
    switch(engine, "lawyer")
    ((text, said, last),) = by_hand(engine, a_request())
    assert (text, said, last.finish) == ("", [], Finish.ERROR)
    assert "no longer the model whose pages these are: its adapters are lawyer" in last.error
    fresh = a_prompt(seed=8)
    by_hand(engine, a_request(fresh))
    switch(engine, "poet")
    ((_, again, last),) = by_hand(engine, a_request())
    assert again == poem and cached(last) == GRID_FLOOR
    ((_, _, last),) = by_hand(engine, a_request(fresh))
    assert cached(last) == 0, "no page of the refused prompt is kept"


def test_what_was_computed_as_the_adapter_was_switched_is_not_kept(make: Callable[..., Engine]) -> None:
    engine = make(a_model_with_adapters(), start=False)
    chunks = []

    def at_the_second(*_: object) -> None:
        chunks.append(0)
        if len(chunks) == 2:
            switch(engine, "lawyer")

    hook = engine.model.model.model.norm.register_forward_hook(at_the_second)
    ((_, _, last),) = by_hand(engine, a_request())
    hook.remove()
    assert last.finish is Finish.ERROR and "adapters" in last.error
    switch(engine, "poet")
    ((_, _, last),) = by_hand(engine, a_request())
    assert cached(last) == CHUNK
