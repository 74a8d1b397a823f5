"""Stands where a `CacheScheduler` would, and asks one in another process."""

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from wire import Answer, Call, Number, Standing, Wire

from kvarve.core.lease import Phase

ATTRIBUTES = {"now", "storage_up", "core.counters"}


class FarLease:
    """A lease of another process, as it stood at the last answer."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.standing, name)

    @property
    def ready(self) -> bool:
        return self.standing.phase is Phase.READY

    @property
    def on_device(self) -> bool:
        return self.standing.phase in (Phase.LOADING, Phase.READY)

    def from_tiers(self) -> tuple[int, int, int]:
        return self.standing.tiers


class Far:
    """An object of another process, such as `core`: what is called or read of it is asked there by its whole name."""

    def __init__(self, ask: Callable[..., Any], name: str) -> None:
        self._asked, self._name = ask, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        whole = f"{self._name}{name}"
        return self._asked(whole) if whole in ATTRIBUTES else partial(self._asked, whole)


class FarScheduler(Far):
    """Made as a `CacheScheduler` is, alone among the ranks."""

    made: list["FarScheduler"] = []  # noqa: RUF012  by the caches of a test

    def __init__(
        self,
        identity: Any,
        config: Any,
        slots: Any,
        *,
        storage: bool,
        only_read: bool,
        agreement: Any,
        prefill_tokens: int,
    ) -> None:
        assert agreement.ranks == 1
        super().__init__(self._ask, "")
        self.agreement, self.core = agreement, Far(self._ask, "core.")
        self.core.growth = Far(self._ask, "core.growth.")
        program = [sys.executable, str(Path(__file__).parent / "scheduler_process.py")]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.wire = Wire(self.process.stdout, self.process.stdin)  # type: ignore[arg-type]
        self._lock = threading.Lock()  # one call at a time
        self._leases: dict[int, FarLease] = {}
        FarScheduler.made.append(self)
        self._ask("made", identity, config, slots, storage, only_read, prefill_tokens)

    def _ask(self, name: str, *words: Any) -> Any:
        with self._lock:
            self.wire.send(Call(name, plain(words)))
            answer: Answer = self.wire.receive()
            for each in answer.leases:
                self._leases.setdefault(each.number, FarLease(each)).standing = each
            value = self._leases[answer.value.lease] if isinstance(answer.value, Number) else answer.value
            for each in answer.leases:
                if each.phase is Phase.CLOSED:
                    del self._leases[each.number]
        assert not answer.trouble, answer.trouble
        return value

    def end(self) -> None:
        """Close the pipes: the process ends by itself."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        self.process.stdout.close()


def plain(words: Any) -> Any:
    """The arguments with numbers in place of leases and tensors."""
    if isinstance(words, FarLease):
        return Number(words.number)
    if isinstance(words, np.ndarray):
        return words.tolist()
    return type(words)(map(plain, words)) if type(words) in (tuple, list) else words
