"""One vLLM engine with several workers, each in a process; see `engine_commands`. The scheduler is in this one."""

import time
from typing import Any

from engine_commands import SETTINGS, serve
from vllm_process import SETTLED, SETTLED_S, Watched


class Ranked(Watched):
    """Its `about` is of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        if self.seam == "connector":
            self.pids = self._all("record", SETTINGS["prints"])

    def _open(self) -> None:
        """Nothing of the workers is in this process; a tier is in the scheduler's."""
        self.scheduler = self.core.scheduler.connector
        if self.seam == "tiering":
            super()._open()

    def _make_faulty(self) -> None:
        pass

    def _all(self, name: str, *given: Any) -> list[Any]:
        return list(self.core.model_executor.collective_rpc(name, args=given))

    def about(self) -> dict[str, Any]:
        if self.seam == "tiering":
            return super().about()
        found = self._all("found")
        return {
            "restored": [restored for restored, _ in found],
            "wrong": [each for _, wrong in found for each in wrong],
            "stats": self.scheduler.scheduler.stats() | {"failed_loads": self.scheduler.planner.failed_loads},
            "left": len(self.scheduler.scheduler.core.leases) + sum(self.scheduler._held.values()),
            "page": self.core.scheduler.block_size,
            "pools": [[pool.name, pool.replicated] for pool in self.scheduler.scheduler.pools],
            "heads": [pool.groups and pool.groups.count for pool in self.scheduler.scheduler.pools],
            "objects": self._all("objects"),
        }

    def rollouts(self, rounds: int, prompts: list[list[int]]) -> list[list[dict[str, Any]]]:
        """As a loop of training has them: in each round other weights, in every third given while the engine sleeps, at
        level 1 or 2; and each prompt twice, from the host in between. What was answered."""
        told = []
        for number in range(rounds):
            if sleeps := number % 3 == 0:
                self.llm.sleep(level=1 + number % 2)
            self._all("shift", -0.01 * (number + 1))
            if sleeps:
                self.llm.wake_up()
            self.reset()
            found = self.ask(prompts[:1]) + self.ask(prompts[1:])
            self.reset()
            told.append(found + self.ask(prompts[:1]) + self.ask(prompts[1:]))
        return told

    def fault(self, rank: int, how: str) -> None:
        self._all("trouble", rank, how)

    def recover(self) -> None:
        self._all("recover")
        end = time.monotonic() + SETTLED_S
        while not all(self._all("up")) and time.monotonic() < end:
            self.core.step()
        self.drain()

    def drain(self) -> bool:
        if self.seam == "connector":
            for _ in range(SETTLED):
                if not self.core.scheduler.has_requests() and not self.scheduler.go_on():
                    return True
                if self.core.scheduler.has_requests():
                    self.step()
        while self.core.scheduler.has_requests():
            self.step()
        return True

    def step(self) -> None:
        (self.core.step_with_batch_queue if self.core.batch_queue is not None else self.core.step)()


if __name__ == "__main__":
    serve(Ranked)
