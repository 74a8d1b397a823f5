"""A request resumes while its pages are still being copied to the device, and reads no page before it has come."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from engines import CHUNK, GRID_FLOOR, LONG_S, Make, a_model, a_prompt, a_request, by_hand, every_family, turns
from kvarve.core.observe.reasons import Reason
from kvarve.errors import Broken
from kvarve.memory.page_copies import DeviceCopies, Slots
from kvarve.pages.pools import Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.requests import Finish, Request
from kvarve.transfer.arrivals import Arrival


class LastMoment:
    """Each load fills its slots with other bits first, and copies a layer only when the engine waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._changed, self._wanted = threading.Condition(), -1
        self.loads = 0
        self.all_at_once = False  # have them come
        self.waits: list[int] = []
        self.error: Exception | None = None
        load, wait = DeviceCopies.load, Arrival.wait

        def late(copies: DeviceCopies, pages: Mapping[int, Slots], ready: Any, copied: Any = None) -> None:
            if copied is None:
                load(copies, pages, ready)
                return
            self.loads += 1
            self._wanted = -1
            layers, whole = copies._layers, [*copies._layers.items()]
            for _, buffers in whole:
                for pool, _, (near, _) in copies._buffers[buffers]:
                    for _, slot in pages.get(pool, ()):
                        near[slot] = 0xFF
            for number, buffers in whole:
                with self._changed:
                    assert self._changed.wait_for(lambda n=number: self.all_at_once or self._wanted >= n, LONG_S)  # type: ignore[misc]
                if self.error is not None:
                    raise self.error
                copies._layers = {number: buffers}
                load(copies, pages, ready, copied)
                copies._layers = layers

        def waits(arrival: Arrival, layer: int) -> None:
            self.waits.append(layer)
            with self._changed:
                self._wanted = max(self._wanted, layer)
                self._changed.notify_all()
            wait(arrival, layer)

        patch.setattr(DeviceCopies, "load", late)
        patch.setattr(Arrival, "wait", waits)

    def release(self) -> None:
        with self._changed:
            self.all_at_once = True
            self._changed.notify_all()


@pytest.fixture
def last_moment(monkeypatch: pytest.MonkeyPatch) -> Iterator[LastMoment]:
    found = LastMoment(monkeypatch)
    yield found
    found.release()


def answered(engine: Engine, *requests: Request) -> list[list[int]]:
    return [tokens for _, tokens, _ in by_hand(engine, *requests)]


def to_the_host(engine: Engine) -> None:
    assert engine.cache.settle(LONG_S)
    engine.cache.scheduler.core.flush([Tier.DEVICE])


@every_family
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_layer_reads_a_page_before_it_waited_for_it(
    family: str, deterministic: bool, make: Make, last_moment: LastMoment
) -> None:
    """If one did, it would read the bits that the load began with."""
    model = a_model(family)
    engine = make(model, start=False, deterministic=deterministic)
    logits: list[dict[int, torch.Tensor]] = [{}, {}]
    (cold,) = answered(engine, a_request(watch=logits[0].__setitem__))
    to_the_host(engine)
    (warm,) = answered(engine, a_request(watch=logits[1].__setitem__))
    read = model.layout.read_before(GRID_FLOOR - CHUNK)
    assert last_moment.loads > 0 and engine.counts.reasons[Reason.HIT_HOST] >= read
    assert cold == warm
    assert [*logits[1]] == [*logits[0]][-len(logits[1]) :]
    assert all(torch.equal(row, logits[0][at]) for at, row in logits[1].items())
    assert not engine.cache.worker.transfers.arrivals()


def test_requests_that_share_the_pages_of_a_load_wait_for_it_too(make: Make, last_moment: LastMoment) -> None:
    """In one turn: the second resumes from pages that the first one's load still fills."""
    engine = make(start=False)
    prompts = [a_prompt(GRID_FLOOR, 3) + a_prompt(20 + more, more) for more in range(3)]
    cold = [answered(engine, a_request(prompt))[0] for prompt in prompts]
    to_the_host(engine)
    assert answered(engine, *map(a_request, prompts)) == cold
    assert last_moment.loads > 0


def test_a_request_aborted_during_its_copy_leaves_the_pages_to_the_next(make: Make, last_moment: LastMoment) -> None:
    engine = make(start=False)
    (cold,) = answered(engine, a_request())
    to_the_host(engine)
    first = a_request()
    engine.submit(first)
    turns(engine, lambda: bool(engine.cache.worker.transfers.arrivals()))
    engine.abort(first)
    engine._take_calls()
    engine._run_calls(b"")
    assert first.result(0.1)[2].finish is Finish.ABORT
    assert answered(engine, a_request()) == [cold]
    assert last_moment.loads == 1 and engine.cache.settle(LONG_S)


def test_answers_go_on_while_a_prompt_s_pages_are_copied(make: Make, last_moment: LastMoment) -> None:
    engine = make(start=False)
    (cold,) = answered(engine, a_request())
    to_the_host(engine)
    talk = a_request(a_prompt(20, 5), max_tokens=40)
    engine.submit(talk)
    turns(engine, lambda: engine.counts.output_tokens > 6)
    again = a_request()
    engine.submit(again)
    turns(engine, lambda: bool(engine.cache.worker.transfers.arrivals()))
    for _ in range(5):
        engine._turn()
    assert not last_moment.waits, "an answer waited for another request's copy"
    turns(engine, lambda: engine.counts.finished == 3)
    assert again.result(0.1)[1] == cold


def test_a_copy_that_fails_after_the_check_stops_the_engine(make: Make, last_moment: LastMoment) -> None:
    engine = make()
    a = a_request()
    engine.submit(a)
    a.result(LONG_S)
    engine.settle(LONG_S)
    engine.flush([Tier.DEVICE], LONG_S)
    last_moment.error = RuntimeError("an illegal memory access")
    b = a_request()
    engine.submit(b)
    assert b.result(LONG_S)[2].finish is Finish.ERROR
    engine._thread.join(LONG_S)
    assert not engine._thread.is_alive() and engine.broken


def test_a_wait_for_a_layer_that_never_comes_ends() -> None:
    arrival = Arrival([0, 1], lambda _: None, patience_s=0.0)
    assert arrival.done, "a request that finds it need not be put off any longer"
    with pytest.raises(Broken, match="no layer has been copied to the device for 0 s; its copy hangs"):
        arrival.wait(1)
    arrival.wait(7)  # a layer without pages


def test_a_layer_that_has_come_is_not_waited_for_when_the_next_one_fails() -> None:
    order: list[str] = []
    arrival = Arrival([0, 1], order.append, LONG_S)
    arrival.came(0, "event of 0")
    assert not arrival.done
    arrival.fail(RuntimeError("gone"))
    arrival.wait(0)
    assert order == ["event of 0"] and arrival.done
    with pytest.raises(Broken, match="the copy of layer 1 to the device has failed: gone"):
        arrival.wait_all()


def test_a_layer_is_computed_before_the_next_one_is_copied(
    make: Make, last_moment: LastMoment, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(start=False)
    (cold,) = answered(engine, a_request(max_tokens=1))
    to_the_host(engine)
    layers, computed, seen = engine.model.model.model.layers, list[int](), dict[int, int]()
    hooks = [layer.register_forward_hook(lambda *_, n=n: computed.append(n)) for n, layer in enumerate(layers)]
    wait = Arrival.wait

    def noted(arrival: Arrival, layer: int) -> None:
        seen.setdefault(layer, len(computed))
        wait(arrival, layer)

    monkeypatch.setattr(Arrival, "wait", noted)
    assert answered(engine, a_request(max_tokens=1)) == [cold]
    for hook in hooks:
        hook.remove()
    assert seen == {layer: layer for layer in range(len(layers))}
