"""What each key has used of its limits. No clock, no socket: the time is given.

Requests and tokens each have a bucket that holds what a minute allows and fills up evenly. A prompt's tokens are taken
when they are known, an answer's as they are computed. A bucket may so fall below zero, and refuses until it has filled
up again: a prompt of more tokens than a minute allows is answered, and then the key has to wait.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvarve.errors import KvarveError
from kvarve.reference.server.keyfile import Key

MOST_WAIT_S = 3600.0


class OverQuota(KvarveError):
    """A key has used up a limit. `wait_s`: until it is worth a try."""

    def __init__(self, key: Key, limit: str, allowed: int, wait_s: float) -> None:
        super().__init__(f"the key {key.name} has used up its {limit.replace('_', ' ')} ({allowed})")
        self.limit, self.wait_s = limit, min(wait_s, MOST_WAIT_S)


@dataclass
class Bucket:
    """Holds `allowed` at most and gains as much in a minute."""

    left: float = math.inf
    at_s: float = 0.0

    def filled(self, allowed: int | None, now: float) -> float:
        """What is left now; a lower limit than before counts at once."""
        if allowed is None:
            self.left = math.inf
        elif math.isinf(self.left):
            self.left = allowed
        else:
            self.left = min(allowed, self.left + (now - self.at_s) * allowed / 60)
        self.at_s = now
        return self.left

    def wait_s(self, allowed: int, least: float) -> float:
        """Until there is `least`."""
        return max(0.0, least - self.left) * 60 / allowed


@dataclass
class Account:
    """One key's use since the start."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    running: int = 0
    asked: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by limit


class Visit:
    """One request of a key, from its admission to its end."""

    def __init__(self, quotas: "Quotas", key: Key) -> None:
        self.key, self._quotas = key, quotas

    def prompt(self, tokens: int) -> None:
        """The `tokens` of its prompts are about to be computed. OverQuota."""
        self._quotas.prompt(self.key, tokens)

    def answered(self, tokens: int) -> None:
        """So many more `tokens` of its answers have been computed, whether its client reads them or not."""
        self._quotas.answered(self.key, tokens)

    def end(self) -> None:
        self._quotas.end(self.key)


class Quotas:
    """The accounts of all keys. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}  # by the key's name, so a change of limits does not begin anew
        self._lock = threading.Lock()

    def begin(self, key: Key) -> Visit:
        """Admit a request. OverQuota, and nothing is taken, if a limit is used up."""
        with self._lock:
            account, now = self._account(key), self._clock()
            most = key.concurrent_requests
            if most is not None and account.running >= most:
                raise self._over(account, key, "concurrent_requests", most, 1.0)
            self._check_tokens(account, key, now)
            rate, left = key.requests_per_minute, account.requests.filled(key.requests_per_minute, now)
            if rate is not None and left < 1:
                raise self._over(account, key, "requests_per_minute", rate, account.requests.wait_s(rate, 1))
            account.requests.left -= 1
            account.running += 1
            account.asked += 1
        return Visit(self, key)

    def prompt(self, key: Key, tokens: int) -> None:
        with self._lock:
            account = self._account(key)
            self._check_tokens(account, key, self._clock())
            account.tokens.left -= tokens
            account.prompt_tokens += tokens

    def answered(self, key: Key, tokens: int) -> None:
        with self._lock:
            account = self._account(key)
            account.tokens.filled(key.tokens_per_minute, self._clock())
            account.tokens.left -= tokens
            account.output_tokens += tokens

    def end(self, key: Key) -> None:
        with self._lock:
            self._account(key).running -= 1

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """By what is counted, then by key (`refused`: by key and limit, with a dot between them)."""
        with self._lock:
            accounts = dict(self._accounts)
            return {
                "requests": {name: each.asked for name, each in accounts.items()},
                "running": {name: each.running for name, each in accounts.items()},
                "prompt_tokens": {name: each.prompt_tokens for name, each in accounts.items()},
                "output_tokens": {name: each.output_tokens for name, each in accounts.items()},
                "refused": {
                    f"{name}.{limit}": count for name, each in accounts.items() for limit, count in each.refused.items()
                },
            }

    def _account(self, key: Key) -> Account:
        return self._accounts.setdefault(key.name, Account())

    def _check_tokens(self, account: Account, key: Key, now: float) -> None:
        rate, left = key.tokens_per_minute, account.tokens.filled(key.tokens_per_minute, now)
        if rate is not None and left <= 0:
            raise self._over(account, key, "tokens_per_minute", rate, account.tokens.wait_s(rate, 1))

    def _over(self, account: Account, key: Key, limit: str, allowed: int, wait_s: float) -> OverQuota:
        account.refused[limit] += 1
        return OverQuota(key, limit, allowed, wait_s)
