"""The time to the first token tells a tenant what its own salt has cached, and nothing about anybody else's.

A tenant who guesses a prompt cannot learn whether another one has sent it: requests for prompts that another salt has
cached, in memory or in storage, and for prompts that nobody has sent, in random order, take equally long. The same two
samples under the salt that has cached them differ beyond doubt, so the test would see a difference.
`tests/core/test_salt_privacy.py` shows the same of the core without a clock.
"""

import random
import time
from bisect import bisect_right
from collections.abc import Iterator
from math import exp
from pathlib import Path
from string import ascii_lowercase

import httpx
import pytest
from servers import settings
from talk import COMPLETIONS

from kvarve.reference.server.serve import Server

PROMPT_TOKENS = 320
# One round of a hundred finds a difference between equal times by chance. One round that finds none is enough, so
# equal times fail this test with a chance of 1e-8; also on a busy machine, as the order is random and what else runs
# hits both samples alike. That times differ has to be found in one round, which chance does once in 250,000 tests.
ROUNDS, EQUAL = 4, 0.01
DIFFERENT = 1e-6


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    storage = (f"file://{tmp_path}/pages?capacity=4GiB",)
    with Server(settings(checkpoint, storage, device_memory=1 << 30, host_memory=1 << 30)) as server:
        yield server


class Tenant:
    def __init__(self, client: httpx.Client, salt: str) -> None:
        self.client, self.salt = client, salt

    def ttft_s(self, prompt: str) -> float:
        """How long the first token takes, as a client sees it; the answer is read to its end."""
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": self.salt, "temperature": 0, "stream": True}
        began = time.perf_counter()
        with self.client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            taken = time.perf_counter() - began
            for _ in lines:
                pass
        assert response.status_code == 200
        return taken


def kolmogorov_smirnov(one: list[float], other: list[float]) -> float:
    """The p-value of two samples being of one kind, by its limit for many (Numerical Recipes 14.3.3)."""
    one, other = sorted(one), sorted(other)
    m, n = len(one), len(other)
    distance = max(abs(bisect_right(one, x) / m - bisect_right(other, x) / n) for x in one + other)
    root = (m * n / (m + n)) ** 0.5
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0  # the series converges too slowly, and is 1 to 12 digits
    return 2 * sum((-1) ** (k - 1) * exp(-2 * (k * scaled) ** 2) for k in range(1, 100))


def p_value(dice: random.Random, asks: Tenant, known: list[str], new: list[str]) -> float:
    """Of the two samples being of one kind."""
    order = [(prompt, True) for prompt in known] + [(prompt, False) for prompt in new]
    dice.shuffle(order)
    times: dict[bool, list[float]] = {True: [], False: []}
    for prompt, is_known in order:
        times[is_known].append(asks.ttft_s(prompt))
    return kolmogorov_smirnov(times[True], times[False])


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("where", ["storage", "memory"])
@pytest.mark.parametrize("each", [60, 1000])
def test_what_another_salt_has_cached_takes_as_long_as_what_nobody_has(server: Server, each: int, where: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)

    def prompts() -> list[str]:
        return ["".join(dice.choices(ascii_lowercase, k=PROMPT_TOKENS)) for _ in range(each)]

    with httpx.Client(base_url=server.url, timeout=60) as client:

        def leave_memory() -> None:
            if where == "storage":
                client.post("/flush_cache").raise_for_status()

        victim, found = Tenant(client, "victim"), []
        for number in range(ROUNDS):
            known = prompts()
            for prompt in known:
                victim.ttft_s(prompt)
            leave_memory()
            found.append(p_value(dice, Tenant(client, f"attacker {number}"), known, prompts()))
            if found[-1] > EQUAL:
                break
        print("p under another salt", found)
        assert found[-1] > EQUAL
        leave_memory()
        own: list[float] = []
        while len(own) < ROUNDS and (not own or own[-1] >= DIFFERENT):
            own.append(p_value(dice, victim, known, prompts()))
        print("p under the same salt", own)
        assert own[-1] < DIFFERENT
