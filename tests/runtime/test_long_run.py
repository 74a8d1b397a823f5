"""A long run with too little memory and a storage with every fault: slow at worst, never a wrong byte."""

import random

import pytest
from filling import CHUNK, PAGE, POOLS, Clock, Request, a_config, a_store, an_identity, nothing_is_left, prompt

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.records.record import record_bytes
from kvarve.testing import Rule

RULES = (
    Rule("raise", probability=0.03),
    Rule("raise", call="get", probability=0.03),
    Rule("lose", probability=0.05),
    Rule("truncate", probability=0.05),
    Rule("flip", probability=0.05),
    Rule("swap", probability=0.05),
    Rule("short", probability=0.03),
)
LONG = pytest.mark.long
WAITS = ("none", "1s+0.25s/Ki", "all")


def least(*, records: bool) -> int:
    """The least memory that a cache accepts: of each pool two chunks of a prompt."""
    sizes = (record_bytes(pool.payload_bytes) if records else pool.payload_bytes for pool in POOLS)
    counts = (2 * (pool.lookback or CHUNK // PAGE) for pool in POOLS)
    return sum(size * count for size, count in zip(sizes, counts, strict=True)) + 1024


class Life:
    """Several requests side by side in random order; every page that one resumes from is looked at."""

    def __init__(self, seed: int, policy: str, **settings: object) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.store = a_store(*RULES, seed=seed)
        self.settings = {
            "device": least(records=False) + self.rng.randrange(6000),
            "host": least(records=True) + 4096 * self.rng.randrange(40),
            "write_policy": policy,
            "storage_wait": self.rng.choice(WAITS),
            "keep_states": "ends,branches,chunks" + self.rng.choice(["", ",every:256"]),
        } | settings
        stem = prompt(20, seed=99)
        self.prompts = [prompt(10 + i, seed=i, prefix=stem[: i * PAGE * 2]) for i in range(7)]
        self.requests: list[Request] = []
        self.found = [0, 0, 0]
        self.open()

    def open(self) -> None:
        self.cache = PrefixCache(an_identity(), a_config(**self.settings), storage=self.store, clock=self.clock)

    def finish(self, request: Request) -> None:
        self.requests.remove(request)
        for tier, pages in enumerate(request.close().from_tiers()):
            self.found[tier] += pages

    def turn(self) -> None:
        self.cache.step()
        self.cache.scheduler.audit()
        self.clock.now += self.rng.choice([0.0, 0.0, 0.3])
        if self.rng.random() < 0.3:
            self.cache.wait(0.002)
        if len(self.requests) < 3 and self.rng.random() < 0.5:
            tokens = self.rng.choice(self.prompts)
            tokens = tokens[: self.rng.randrange(len(tokens) + 1)] if self.rng.random() < 0.3 else tokens
            salt, read = self.rng.choice(["", "", "s"]), self.rng.random() < 0.9
            self.requests.append(Request(self.cache, tokens, salt, read))
        for request in [*self.requests]:
            if self.rng.random() < 0.02:
                self.finish(request)
            elif not request.lease.claimed or not request.lease.ready:
                if self.rng.random() < 0.7 and self.cache.claim(request.lease):
                    request.look()
            elif not request.chunk():
                self.finish(request)

    def end(self) -> None:
        for request in [*self.requests]:
            self.finish(request)
        self.store.rules.clear()
        assert nothing_is_left(self.cache)


@pytest.mark.parametrize("policy", ["through", "through:2", "back"])
@pytest.mark.parametrize(("seed", "turns"), [(0, 50), *(pytest.param(seed, 500, marks=LONG) for seed in range(3))])
def test_in_a_long_life_with_a_storage_full_of_faults_no_request_resumes_from_a_wrong_byte(
    seed: int, turns: int, policy: str
) -> None:
    print(f"Life({seed}, {policy!r})")
    life = Life(seed, policy)
    for turn in range(turns):
        life.turn()
        if turn == turns // 2:  # a restart in the middle of everything
            for request in [*life.requests]:
                life.finish(request)
            life.cache.shutdown(10)
            life.open()
    life.end()
    life.cache.shutdown(10)
    assert sum(life.found) > 0
    assert sum(life.store.counts[rule.fault] for rule in RULES) > 0


@LONG
def test_long_lives_find_pages_on_every_tier_and_see_every_trouble() -> None:
    """The test above proves little if nothing was ever found or refused."""
    found, counters = [0, 0, 0], {"bad_storage": 0, "failed": 0, "duplicates": 0}
    for seed, policy in ((10, "through"), (11, "back"), (12, "through")):
        life = Life(seed, policy, storage_wait="all")
        for _ in range(400):
            life.turn()
        life.end()
        for tier in range(3):
            found[tier] += life.found[tier]
        for name in counters:
            counters[name] += getattr(life.cache.scheduler.core.counters, name)
        life.cache.shutdown(10)
    assert min(found) > 0, found
    assert min(counters.values()) > 0, counters
