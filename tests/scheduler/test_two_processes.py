"""A scheduler in one process and its worker in another, with pickled plain data between them, are the same cache."""

import hashlib
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from far_scheduler import FarScheduler
from filling import a_config, a_store, an_identity, prompt, run, settle, until, used
from torch import Tensor
from wire import PLAIN

import kvarve.cache.prefix_cache
from kvarve.cache.config import CacheConfig
from kvarve.cache.messages import ChangeMade, ChangeRefused
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.worker import UnderWay
from kvarve.core.copies.effects import Copy, Pages, Probe
from kvarve.core.policies import Policies
from kvarve.errors import StorageError
from kvarve.pages.pools import Tier
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel, load_model
from kvarve.reference.engine.requests import Request, Sampling

MIB = 1 << 20
LONG_S = 240.0
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("builtin:tiny-hybrid")


class Served(NamedTuple):
    """Of each round of prompts the answers, their cached tokens by tier, and the logits of each token, as a digest."""

    answers: list[list[int]]
    cached: list[tuple[int, ...]]
    logits: list[str]


def served(model: LoadedModel, folder: Path) -> Served:
    """Prompts asked cold, from each tier, and after a restart from storage."""
    config = CacheConfig(64 * MIB, 64 * MIB, f"file://{folder}?capacity=1GiB", Policies(storage_wait="all"))
    prompts, found = [[7 * seed % 256 + at % 200 for at in range(280)] for seed in (1, 2)], Served([], [], [])

    def watch(_: int, logits: Tensor) -> None:
        found.logits.append(hashlib.sha256(logits.float().numpy().tobytes()).hexdigest())

    for rounds in (((), ("device",), ("device", "host")), ((),)):
        cache = PrefixCache(model.identity, config)
        engine = Engine(model, cache).start()
        try:
            for flushed in rounds:
                engine.settle(LONG_S)
                if flushed:
                    engine.flush([TIERS[tier] for tier in flushed])
                for prompt in prompts:
                    engine.submit(request := Request(prompt, Sampling(4), watch=watch))
                    _, tokens, last = request.result(LONG_S)
                    assert last.usage is not None, last.error
                    found.answers.append(tokens)
                    found.cached.append((last.usage.device, last.usage.host, last.usage.storage))
            engine.ask(cache.scheduler.audit, LONG_S)
        finally:
            engine.shutdown(LONG_S)
        assert not engine.broken
    return found


@pytest.mark.long
def test_in_two_processes_an_engine_has_the_same_hits_answers_and_logits(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = served(model, tmp_path / "together")
    monkeypatch.setattr(kvarve.cache.prefix_cache, "CacheScheduler", FarScheduler)
    FarScheduler.made.clear()
    apart = served(model, tmp_path / "apart")
    assert apart == together
    assert apart.answers[:2] * 4 == apart.answers, "all rounds have the same answers"
    assert apart.cached[::2] == [(0, 0, 0), (0, 256, 0), (0, 0, 256), (0, 0, 256)]
    assert len(FarScheduler.made) == 2
    for each in FarScheduler.made:
        nothing_but_plain_data(each)
        each.end()
    assert Probe in FarScheduler.made[1].wire.received, "after the restart storage is asked"


def nothing_but_plain_data(far: FarScheduler) -> None:
    about = far.about()
    assert (about["torch"], about["threads"], about["files"]) == (False, 0, 0)
    assert {Copy, Pages} <= far.wire.received <= PLAIN
    assert {"Ended", "Report"} <= about["received"] <= {each.__name__ for each in PLAIN}


def test_in_two_processes_storages_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvarve.cache.prefix_cache, "CacheScheduler", FarScheduler)
    FarScheduler.made.clear()
    stores = [a_store(seed=seed) for seed in range(3)]
    cache, tokens = PrefixCache(an_identity(), a_config()), prompt(8.5)
    (far,) = FarScheduler.made
    assert run(cache, tokens) == (0, 0, 0)
    for store in stores[:2]:
        change = cache.worker.attach(store, back_up=True, write="through:2")
        with pytest.raises(UnderWay):
            cache.worker.detach()
        cache.step()
        change.made.result(0)
        settle(cache)
        assert cache.worker.config.policies.write_policy == "through:2" and store.usage().objects
        cache.flush()
        assert run(cache, tokens) == (0, 0, 8)
    declined = cache.worker.decline(StorageError("this rank cannot"))
    cache.step()
    with pytest.raises(StorageError, match="this rank cannot"):
        declined.made.result(0)
    stores[1].dead = True
    seeds = count(10)
    until(cache, lambda: run(cache, prompt(4.5, seed=next(seeds))) == (0, 0, 0) and not far.storage_up)
    stores[1].dead = False
    until(cache, lambda: far.storage_up)
    gone = cache.worker.detach()
    cache.step()
    assert gone.made.result(0) is not None and cache.worker.attached is None and not far.storage_up
    cache.flush()
    assert not used(cache) and not cache.stats()["leases"]
    assert {"ChangeProposed", "Began"} <= far.about()["received"]
    assert {ChangeMade, ChangeRefused} <= far.wire.received
    nothing_but_plain_data(far)
    cache.shutdown(5)
    far.end()
