"""A flush waits for the backups under way, no longer than it may, and holds up no other."""

import threading

import pytest

from engines import LONG_S, MIB, Make, a_model, a_request, by_hand, turns
from kvarve.errors import Busy
from kvarve.pages.pools import MEMORY_TIERS
from kvarve.reference.engine import engine as file
from kvarve.reference.engine.engine import Engine
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage

HOURS_S = 9000.0


def used(engine: Engine) -> int:
    return int(sum(count for name, count in engine.cache.stats().items() if name.startswith("used.")))


def test_a_flush_waits_for_backups_as_long_as_it_may_whoever_else_flushes(make: Make) -> None:
    model = a_model()
    storage = FaultyStorage(MemoryStorage(64 * MIB, model.identity.fingerprint(), "test"), stall_limit_s=HOURS_S)
    engine = make(model, storage=storage, start=False)
    storage.stall("put")
    try:
        by_hand(engine, a_request())
        patient, hasty = (engine.begin_flush(MEMORY_TIERS, seconds) for seconds in (HOURS_S, 0.0))
        turns(engine, hasty.done, at_most=200)
        assert hasty.result() > 0 and not patient.done()
    finally:
        storage.release()
    turns(engine, patient.done)
    assert not used(engine)


def test_under_write_back_a_flush_ends_when_what_it_had_copied_down_is_gone(make: Make) -> None:
    engine = make(start=False, write_policy="back")
    by_hand(engine, a_request())
    flush = engine.begin_flush(MEMORY_TIERS, HOURS_S)
    turns(engine, flush.done)
    assert flush.result() > 0 and not used(engine)


def test_a_flush_that_a_long_turn_leaves_no_time_for_is_never_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun, may_go_on = make(), threading.Event(), threading.Event()
    engine.submit(a_request()).result(LONG_S)
    there = engine.ask(lambda: used(engine), LONG_S)

    def computes() -> int:
        begun.set()
        assert may_go_on.wait(LONG_S)
        return used(engine)

    computing = threading.Thread(target=lambda: after.append(engine.ask(computes, LONG_S)))
    after = list[int]()
    computing.start()
    assert begun.wait(LONG_S)
    monkeypatch.setattr(file, "TURN_S", 0.01)
    patient = engine.begin_flush(MEMORY_TIERS, HOURS_S)
    with pytest.raises(Busy, match="did not get round to it within"):
        engine.flush(timeout_s=0.0)
    may_go_on.set()
    assert patient.result(LONG_S) == there > 0
    computing.join(LONG_S)
    assert after == [there]
