"""A real engine on a real folder: whatever happens to a stored page, the answer is right and the page is made good."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvarve.engine.engine as engine_module
from kvarve.config import CacheConfig
from kvarve.engine.engine import Engine
from kvarve.engine.model import LoadedModel
from kvarve.engine.requests import Request, Sampling, Usage
from kvarve.engine.state import StateLayout, Workspace
from kvarve.keys import extend, object_name, pack, root_key, seal
from kvarve.memory.record import HEADER_BYTES, Stamp
from kvarve.model import ModelIdentity
from kvarve.runtime import PrefixCache
from kvarve.storage import FileStorage
from kvarve.testing.models import byte_tokenizer, tiny_model

PAGE, CHUNK = 16, 64
PROMPT, HIT = 5 * CHUNK + 23, 5 * CHUNK
DECODED = 4
LONG_S = 60.0
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@cached
def a_model(family: str) -> LoadedModel:
    model = tiny_model(family)
    layout = StateLayout.of(model, PAGE, CHUNK)
    identity = ModelIdentity(family, "random", "float32", PAGE, CHUNK, layout.pools)
    return LoadedModel(family, model, byte_tokenizer(), layout, identity, 1024, frozenset({256}))


def a_prompt(seed: int) -> list[int]:
    return list(map(int, torch.randint(256, (PROMPT,), generator=torch.Generator().manual_seed(seed))))


class Folder:
    """A folder of pages, and engines that come and go on it."""

    def __init__(self, path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.model = path, a_model(family)
        self.namespace = self.model.identity.fingerprint()
        self._forward, self._logits = engine_module.forward, {}  # type: ignore[var-annotated]
        monkeypatch.setattr(engine_module, "forward", self._record)
        self.engine = self.opened()

    def _record(self, model: Any, workspace: Workspace, ids: Tensor) -> Tensor:
        logits = self._forward(model, workspace, ids)
        self._logits[workspace.tokens] = logits.clone()
        return logits

    def opened(self) -> Engine:
        config = CacheConfig(64 * MIB, 64 * MIB, f"file://{self.path}?capacity=1GiB", prefetch_policy="wait_complete")
        return Engine(self.model, PrefixCache(self.model.identity, config)).start()

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        assert self.engine.settle(LONG_S)
        self.engine.shutdown(LONG_S)
        meanwhile()
        self.engine = self.opened()

    def ask(self, seed: int) -> tuple[list[int], dict[int, Tensor], Usage]:
        self._logits = {}
        request = Request(a_prompt(seed), Sampling(DECODED, ignore_eos=True))
        _, tokens, last = self.engine.submit(request).result(LONG_S)
        assert last.usage is not None
        assert not last.error
        return tokens, self._logits, last.usage

    @property
    def counters(self) -> Any:
        return self.engine.cache.core.counters

    def key(self, seed: int, page: int) -> bytes:
        return extend(root_key(self.namespace), seal(pack(a_prompt(seed)), PAGE, CHUNK), PAGE)[page]

    def slot(self, pool: str, seed: int, page: int) -> "Slot":
        """Where the page lies now, as another process would find it."""
        name = object_name(root_key(self.namespace), self.key(seed, page), pool)
        with closing(FileStorage(self.path, 1024 * MIB, self.namespace, "another process")) as storage:
            slab, row = storage._books.place(name)
            return Slot(self, name, slab.path, slab.shape.slot_at(row), int(slab.length[row]))

    def is_good(self, pool: str, seed: int, page: int) -> bool:
        payload_bytes = self.model.layout.pool(pool).payload_bytes
        data = self.slot(pool, seed, page).read()
        return Stamp(self.namespace, pool, payload_bytes).intact(memoryview(data), self.key(seed, page))


@dataclass(frozen=True)
class Slot:
    """A page where it lies in a slab, for somebody who knows nothing of storages."""

    folder: Folder
    name: str
    path: Path
    at: int
    size: int

    def read(self) -> bytearray:
        with self.path.open("rb") as file:
            file.seek(self.at)
            return bytearray(file.read(self.size))

    def write(self, data: bytes, at: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.at + at)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # what is read past the page cache has to be on the disk


Victim = tuple[str, int, int]  # pool, the prompt's seed, page


def flip(victim: Slot, other: Slot) -> None:
    data = victim.read()
    data[HEADER_BYTES + 3] ^= 16
    victim.write(data)


def tear(victim: Slot, other: Slot) -> None:
    victim.write(bytes(4096), victim.size - 4096)


def empty(victim: Slot, other: Slot) -> None:
    victim.write(bytes(victim.size))


def swap(victim: Slot, other: Slot) -> None:
    one, two = victim.read(), other.read()
    assert one != two
    victim.write(two)
    other.write(one)


def delete(victim: Slot, other: Slot) -> None:
    with closing(FileStorage(victim.folder.path, 1024 * MIB, victim.folder.namespace, "another process")) as storage:
        assert storage.delete([victim.name]) == [True]


def garbage(victim: Slot, other: Slot) -> None:
    victim.write(torch.randint(256, (victim.size,), dtype=torch.uint8).numpy().tobytes())


FAULTS = [flip, tear, empty, swap, delete, garbage]
CASES = [
    ("qwen3_5", "attention", 7),
    ("qwen3_5", "state", HIT // PAGE - 1),
    ("gpt_oss", "attention", 0),
    ("gpt_oss", "window-24", HIT // PAGE - 2),
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    folder = Folder(tmp_path / "store", request.param, monkeypatch)
    yield folder
    folder.engine.shutdown(10)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize(
    ("folder", "pool", "page"), CASES, indirect=["folder"], ids=[f"{family}-{pool}" for family, pool, _ in CASES]
)
def test_a_damaged_page_costs_time_and_nothing_else_and_is_made_good(
    folder: Folder, pool: str, page: int, fault: Callable[[Slot, Slot], None]
) -> None:
    cold = {seed: folder.ask(seed) for seed in (1, 2)}
    assert [usage.cached for *_, usage in cold.values()] == [0, 0]

    victim, other = (pool, 1, page), (pool, 2, page)
    hurt = [victim, other] if fault is swap else [victim]

    def damage() -> None:
        assert folder.is_good(*victim)
        assert folder.is_good(*other)
        fault(folder.slot(*victim), folder.slot(*other))

    def same(seed: int) -> Usage:
        tokens, logits, usage = folder.ask(seed)
        expected, cold_logits, _ = cold[seed]
        assert tokens == expected
        assert {*logits} == {position for position in cold_logits if position > usage.cached}
        for position, found in logits.items():
            assert torch.equal(found, cold_logits[position]), f"prompt {seed}, token {position}"
        return usage

    folder.restart(damage)
    usages = {seed: same(seed) for seed in (1, 2)}
    for seed, usage in usages.items():
        if any(of == seed for _, of, _ in hurt):
            assert usage.cached < HIT
        else:
            assert usage == Usage(PROMPT, DECODED, 0, 0, HIT)
    assert folder.counters.bad_storage == (0 if fault is delete else len(hurt))

    assert folder.engine.settle(LONG_S)
    assert all(folder.is_good(*page) for page in hurt), "not there again"
    folder.restart()
    for seed in (1, 2):
        assert same(seed) == Usage(PROMPT, DECODED, 0, 0, HIT)
    assert folder.counters.bad_storage == 0


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_a_folder_of_nothing_but_damage_is_an_empty_one(folder: Folder) -> None:
    cold = folder.ask(1)

    def damage() -> None:
        for pool, page in (("attention", page) for page in range(HIT // PAGE)):
            flip(slot := folder.slot(pool, 1, page), slot)

    folder.restart(damage)
    for _ in range(2):
        tokens, logits, usage = folder.ask(1)
        assert tokens == cold[0]
        assert all(torch.equal(found, cold[1][position]) for position, found in logits.items())
    assert usage == Usage(PROMPT, DECODED, HIT, 0, 0)
    folder.restart()
    assert folder.ask(1)[2] == Usage(PROMPT, DECODED, 0, 0, HIT)


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_slabs_that_vanish_while_the_engine_runs_cost_a_restart_its_hits_and_nothing_else(folder: Folder) -> None:
    cold = folder.ask(1)
    assert folder.engine.settle(LONG_S)
    slabs = [path for path in folder.path.rglob("slab-*") if path.is_file()]
    assert slabs
    for slab in slabs:
        slab.unlink()
    for expected in (0, HIT):
        folder.restart()
        tokens, logits, usage = folder.ask(1)
        assert (tokens, usage.storage) == (cold[0], expected)
        assert all(torch.equal(found, cold[1][position]) for position, found in logits.items())
