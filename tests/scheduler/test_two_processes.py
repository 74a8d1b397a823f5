"""A scheduler in one process and its worker in another, with pickled plain data between them, are the same cache."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from far_scheduler import FarScheduler
from filling import a_config, a_store, an_identity, prompt, run, settle, until, used
from torch import Tensor
from wire import PLAIN

import kvarve.prefix_cache
from kvarve.config import CacheConfig
from kvarve.core.effects import Copy, Page, Probe
from kvarve.core.policies import Policies
from kvarve.demo import QUICK, ROUNDS, Answer, Round, conversations, run_round
from kvarve.engine.engine import Engine
from kvarve.engine.model import LoadedModel, load_model
from kvarve.engine.recall import recall_task
from kvarve.engine.requests import Request, Sampling
from kvarve.errors import StorageError
from kvarve.messages import ChangeMade, ChangeRefused
from kvarve.model import Tier
from kvarve.prefix_cache import PrefixCache
from kvarve.worker import UnderWay

MIB = 1 << 20
LONG_S = 240.0
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("builtin:tiny-hybrid")


@pytest.fixture
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every cache that is made has its scheduler in another process."""
    monkeypatch.setattr(kvarve.prefix_cache, "CacheScheduler", FarScheduler)
    FarScheduler.made.clear()
    yield
    for each in FarScheduler.made:
        each.end()


class Client:
    """Asks an engine as the demo's client asks a server; `logits` are those of each token, by their digest."""

    def __init__(self, model: LoadedModel, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self.logits: list[str] = []

    def chat(self, messages: list[dict[str, str]], max_tokens: int, read_cache: bool) -> Answer:
        text = self._model.render_chat(messages, None, {})
        prompt = self._model.tokenizer.encode(text, add_special_tokens=False)
        request = Request(prompt, Sampling(max_tokens), read_cache=read_cache, watch=self._watch)
        self._engine.submit(request)
        said, tokens, last = request.result(LONG_S)
        by_tier = {"device": last.usage.device, "host": last.usage.host, "storage": last.usage.storage}
        return Answer(said, 0.0, 0.0, len(prompt), len(tokens), by_tier)

    def flush(self, tiers: str) -> None:
        self._engine.flush([TIERS[tier] for tier in tiers.split(",")])

    def _watch(self, logits: Tensor) -> None:
        self.logits.append(hashlib.sha256(logits.float().numpy().tobytes()).hexdigest())


class Served(NamedTuple):
    """The results of the demo's workload: of each round the answers, their cached tokens by tier, and the scores."""

    answers: list[list[str]]
    cached: list[list[dict[str, int]]]
    prompts: list[list[int]]
    scores: list[list[float]]
    logits: list[str]


def demo(model: LoadedModel, folder: Path) -> Served:
    """The demo's four rounds, with a restart before the last one."""
    patient = Policies(prefetch_policy="wait_complete")
    config = CacheConfig(256 * MIB, 512 * MIB, f"file://{folder}?capacity=1GiB", patient)
    tasks = [recall_task(seed, tokens=QUICK.tokens, facts=QUICK.facts, questions=QUICK.turns) for seed in range(2)]
    rounds, logits = [Round(name) for name in ROUNDS], []
    for served in (rounds[:3], rounds[3:]):
        cache = PrefixCache(model.identity, config)
        engine = Engine(model, cache).start()
        try:
            client = Client(model, engine)
            for each in served:
                run_round(each, client, QUICK, conversations(QUICK), tasks, lambda _: None)  # type: ignore[arg-type]
            engine.ask(cache.audit, LONG_S)
        finally:
            engine.shutdown(LONG_S)
        assert not engine.broken
        logits += client.logits
    return Served(
        [[answer.text for answer in each.answers] for each in rounds],
        [[answer.by_tier for answer in each.answers] for each in rounds],
        [[answer.prompt for answer in each.answers] for each in rounds],
        [each.scores for each in rounds],
        logits,
    )


@pytest.fixture(scope="module")
def together(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The demo with both in one process."""
    return demo(model, tmp_path_factory.mktemp("storage") / "pages")


@pytest.mark.usefixtures("_apart")
def test_in_two_processes_the_demo_has_the_same_hits_answers_and_logits(
    model: LoadedModel, together: Served, tmp_path: Path
) -> None:
    apart = demo(model, tmp_path / "pages")
    assert apart == together
    assert len({*map(str, apart.answers)}) == 1, "all rounds have the same answers"
    assert len(apart.logits) >= len(ROUNDS) * len(apart.answers[0])
    for name, prompts, cached in zip(ROUNDS[1:], apart.prompts[1:], apart.cached[1:], strict=True):
        assert sum(by_tier[name] for by_tier in cached) >= 0.9 * sum(prompts), f"warm from {name}"
    assert len(FarScheduler.made) == 2 and all(each.calls > 100 for each in FarScheduler.made)
    for each in FarScheduler.made:
        nothing_but_plain_data(each)
    assert Probe in FarScheduler.made[1].wire.received, "after the restart storage is asked"


def nothing_but_plain_data(far: FarScheduler) -> None:
    about = far.about()
    assert (about["torch"], about["threads"], about["files"]) == (False, 0, 0)
    assert {Copy, Page} <= far.wire.received <= PLAIN
    assert {"Ended", "Report"} <= about["received"] <= {each.__name__ for each in PLAIN}


@pytest.mark.usefixtures("_apart")
def test_in_two_processes_storages_come_and_go() -> None:
    stores = [a_store(seed=seed) for seed in range(3)]
    cache, tokens = PrefixCache(an_identity(), a_config()), prompt(8.5)
    (far,) = FarScheduler.made
    assert run(cache, tokens) == (0, 0, 0)
    for store in stores[:2]:
        change = cache.attach(store, back_up=True, write="write_through_selective")
        with pytest.raises(UnderWay):
            cache.detach()
        cache.step()
        change.made.result(0)
        settle(cache)
        assert cache.config.policies.write_policy == "write_through_selective" and store.usage().objects
        cache.flush()
        assert run(cache, tokens) == (0, 0, 8)
    declined = cache.decline(StorageError("this rank cannot"))
    cache.step()
    with pytest.raises(StorageError, match="this rank cannot"):
        declined.made.result(0)
    stores[1].dead = True
    until(cache, lambda: run(cache, prompt(4.5, seed=cache.counters.requests)) == (0, 0, 0) and not far.storage_up)
    stores[1].dead = False
    until(cache, lambda: far.storage_up)
    gone = cache.detach()
    cache.step()
    assert gone.made.result(0) is not None and cache.attached is None and not far.storage_up
    cache.flush()
    assert not used(cache) and not cache.stats()["leases"]
    assert {"ChangeProposed", "Began"} <= far.about()["received"]
    assert {ChangeMade, ChangeRefused} <= far.wire.received
    nothing_but_plain_data(far)
    cache.shutdown(5)


def test_a_process_with_a_scheduler_alone_has_no_torch() -> None:
    what = "import sys, kvarve.scheduler; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", what], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
