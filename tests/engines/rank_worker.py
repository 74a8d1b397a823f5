"""What the tests have in each worker of an engine with several: vLLM makes the worker's class of these.

A rank's storage fails as told, and a recorder compares each page's bytes when it has been loaded with those saved.
"""

import os
from pathlib import Path
from typing import Any

from prints import Prints
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_recorder import Recorder, shifted

from kvarve.testing import FaultyStorage
from kvarve.transfer import storage_connection

STORAGES: list[Any] = []
_opened = storage_connection.open_storage


def opened(*urls: Any, **more: Any) -> Any:
    STORAGES.append(FaultyStorage(_opened(*urls, **more)))
    return STORAGES[-1]


storage_connection.open_storage = opened  # type: ignore[assignment]


class Staged(CPUWorker):  # type: ignore[misc]
    """vLLM makes the buffers between pipeline stages in a dummy run that its CPU worker leaves out in eager mode."""

    def load_model(self, *given: Any, **more: Any) -> None:
        super().load_model(*given, **more)
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


class RankWorker:
    """Its methods are called in every rank; `rank` says on which one they do something."""

    rank: int
    prints: Prints

    def record(self, file: str) -> int:
        """Begin to compare pages; the worker's process."""
        side = get_kv_transfer_group()
        self.prints = Prints(Path(f"{file}.{self.rank}"), others=side.worker.identity.by_groups)
        Recorder(side, self.prints)
        return os.getpid()

    def found(self) -> tuple[int, list[str]]:
        """Pages that were restored, and those of them whose bytes are wrong."""
        return self.prints.restored, self.prints.wrong

    def trouble(self, rank: int, how: str) -> None:
        if self.rank != rank:
            return
        storage = STORAGES[-1]
        if how == "dead":
            storage.dead = True
        elif how == "stall":
            storage.stall("get")
        else:  # it has lost the first page that it stored
            storage.inner.delete(storage.puts[0][:1])

    def shift(self, by: float) -> None:
        """Change weights that the keys and values of all layers follow from."""
        shifted(self, by)

    def recover(self) -> None:
        for storage in STORAGES:
            storage.dead = False
            storage.release()

    def up(self) -> bool:
        return bool(get_kv_transfer_group().worker.up)

    def objects(self) -> int:
        """How many objects its storage has."""
        return int(STORAGES[-1].inner.usage().objects)
