"""The time to the first token tells a tenant what its own salt has cached, and nothing about anybody else's.

A tenant who guesses a prompt cannot learn whether another one has sent it: requests for prompts that another salt has
cached, and for prompts that nobody has sent, in random order, take equally long. The same two samples under the salt
that has cached them differ beyond doubt, so the test would see a difference.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scipy.stats import ks_2samp
from servers import settings
from talk import COMPLETIONS

from kvarve.server.serve import Server

PROMPT_TOKENS = 640
# Equal samples differ by chance: that all rounds do, of which one that does not is enough, has a chance of 1e-8.
ROUNDS, EQUAL = 4, 0.01
DIFFERENT = 1e-6


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(settings(checkpoint, tmp_path / "pages", device_memory=1 << 30, host_memory=1 << 30)) as server:
        yield server


class Tenant:
    def __init__(self, client: httpx.Client, salt: str) -> None:
        self.client, self.salt = client, salt

    def ttft_s(self, prompt: list[int]) -> float:
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


def p_value(dice: random.Random, asks: Tenant, known: list[list[int]], new: list[list[int]]) -> float:
    """Of the two samples being of one kind."""
    order = [(prompt, True) for prompt in known] + [(prompt, False) for prompt in new]
    dice.shuffle(order)
    times: dict[bool, list[float]] = {True: [], False: []}
    for prompt, is_known in order:
        times[is_known].append(asks.ttft_s(prompt))
    return float(ks_2samp(times[True], times[False]).pvalue)


@pytest.mark.parametrize("each", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_what_another_salt_has_cached_takes_as_long_as_what_nobody_has(server: Server, each: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)

    def prompts() -> list[list[int]]:
        return [[dice.randrange(1, 250) for _ in range(PROMPT_TOKENS)] for _ in range(each)]

    with httpx.Client(base_url=server.url, timeout=60) as client:
        victim, found = Tenant(client, "victim"), []
        for number in range(ROUNDS):
            known = prompts()
            for prompt in known:
                victim.ttft_s(prompt)
            found.append(p_value(dice, Tenant(client, f"attacker {number}"), known, prompts()))
            if found[-1] > EQUAL:
                break
        print("p under another salt", found)
        assert found[-1] > EQUAL
        own = p_value(dice, victim, known, prompts())
        print("p under the same salt", own)
        assert own < DIFFERENT
