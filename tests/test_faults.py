"""A real engine on a real folder: whatever happens to a page there, the answer is right and the page is replaced."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvarve.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.engine import turns as turns_module
from kvarve.engine.engine import Engine
from kvarve.engine.model import LoadedModel
from kvarve.engine.requests import Request, Sampling, TokenUsage
from kvarve.engine.state import StateLayout, Workspace
from kvarve.keys import bind_to_chunk, extend, object_name, pack, root_key
from kvarve.memory.record import HEADER_BYTES, Stamp
from kvarve.model import ModelIdentity
from kvarve.prefix_cache import PrefixCache
from kvarve.storage import FileStorage
from kvarve.storage.file import maintenance
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


class Stored:
    """A page's bytes in a slab, to be damaged: through the store, or past it."""

    def __init__(self, folder: "Folder", name: str) -> None:
        self.folder, self.name = folder, name

    def read_bytes(self) -> bytes:
        with self.folder.beside() as storage:
            buffer = bytearray(MIB)
            (size,) = storage.get([self.name], [memoryview(buffer)])
            assert size is not None
            return bytes(buffer[:size])

    def write_bytes(self, data: bytes) -> None:
        with self.folder.beside() as storage:
            slab, row = storage._index.place(self.name)
            if len(data) == slab.length[row]:
                with slab.path.open("r+b") as file:
                    file.seek(slab.shape.slot_at(row))
                    file.write(data)
            else:
                storage.delete([self.name])
                assert storage.put([self.name], [memoryview(data)]) == [True]

    def unlink(self) -> None:
        with self.folder.beside() as storage:
            assert storage.delete([self.name]) == [True]


class Folder:
    """A folder of pages, and engines that open and close it."""

    def __init__(self, path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.model = path, a_model(family)
        self.namespace = self.model.identity.fingerprint()
        self._forward, self._logits = turns_module.forward, {}  # type: ignore[var-annotated]
        monkeypatch.setattr(turns_module, "forward", self._record)
        self.engine = self.opened()

    def _record(self, model: Any, workspace: Workspace, ids: Tensor) -> Tensor:
        logits = self._forward(model, workspace, ids)
        self._logits[workspace.tokens] = logits.clone()
        return logits

    def opened(self) -> Engine:
        config = CacheConfig(
            64 * MIB, 64 * MIB, f"file://{self.path}?capacity=1GiB", policies=Policies(prefetch_policy="wait_complete")
        )
        return Engine(self.model, PrefixCache(self.model.identity, config)).start()

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        assert self.engine.settle(LONG_S)
        self.engine.shutdown(LONG_S)
        meanwhile()
        self.engine = self.opened()

    def ask(self, seed: int) -> tuple[list[int], dict[int, Tensor], TokenUsage]:
        self._logits = {}
        request = Request(a_prompt(seed), Sampling(DECODED, ignore_eos=True))
        _, tokens, last = self.engine.submit(request).result(LONG_S)
        assert last.usage is not None
        assert not last.error
        return tokens, self._logits, last.usage

    @property
    def counters(self) -> Any:
        return self.engine.cache.scheduler.core.counters

    def key(self, seed: int, page: int) -> bytes:
        return extend(root_key(self.namespace), bind_to_chunk(pack(a_prompt(seed)), PAGE, CHUNK), PAGE)[page]

    def beside(self) -> AbstractContextManager[FileStorage]:
        """The same store, opened by another process."""
        return closing(FileStorage(self.path, 1 << 30, self.namespace, str(self.model.identity)))

    def everything(self) -> list[Stored]:
        (model,) = maintenance.models(self.path)
        with maintenance.inspect(self.path, model) as inspection:
            return [Stored(self, each.name) for each in inspection.objects()]

    def file(self, pool: str, seed: int, page: int) -> Stored:
        return Stored(self, object_name(root_key(self.namespace), self.key(seed, page), pool))

    def is_good(self, pool: str, seed: int, page: int) -> bool:
        payload_bytes = self.model.layout.pool(pool).payload_bytes
        data = self.file(pool, seed, page).read_bytes()
        return Stamp(self.namespace, pool, payload_bytes).intact(memoryview(data), self.key(seed, page))


Victim = tuple[str, int, int]  # pool, the prompt's seed, page


def flip(victim: Stored, other: Stored) -> None:
    data = bytearray(victim.read_bytes())
    data[HEADER_BYTES + 3] ^= 16
    victim.write_bytes(data)


def truncate(victim: Stored, other: Stored) -> None:
    victim.write_bytes(victim.read_bytes()[:-4096])


def empty(victim: Stored, other: Stored) -> None:
    victim.write_bytes(b"")


def swap(victim: Stored, other: Stored) -> None:
    one, two = victim.read_bytes(), other.read_bytes()
    assert one != two
    victim.write_bytes(two)
    other.write_bytes(one)


def delete(victim: Stored, other: Stored) -> None:
    victim.unlink()


def garbage(victim: Stored, other: Stored) -> None:
    victim.write_bytes(torch.randint(256, (len(victim.read_bytes()),), dtype=torch.uint8).numpy().tobytes())


FAULTS = [flip, truncate, empty, swap, delete, garbage]
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
def test_a_damaged_file_costs_time_and_nothing_else_and_is_made_good(
    folder: Folder, pool: str, page: int, fault: Callable[[Stored, Stored], None]
) -> None:
    cold = {seed: folder.ask(seed) for seed in (1, 2)}
    assert [usage.cached for *_, usage in cold.values()] == [0, 0]

    victim, other = (pool, 1, page), (pool, 2, page)
    hurt = [victim, other] if fault is swap else [victim]

    def damage() -> None:
        assert folder.is_good(*victim)
        assert folder.is_good(*other)
        fault(folder.file(*victim), folder.file(*other))

    def same(seed: int) -> TokenUsage:
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
            assert usage == TokenUsage(PROMPT, DECODED, 0, 0, HIT)
    assert folder.counters.bad_storage == (0 if fault is delete else len(hurt))

    assert folder.engine.settle(LONG_S)
    assert all(folder.is_good(*page) for page in hurt), "not there again"
    folder.restart()
    for seed in (1, 2):
        assert same(seed) == TokenUsage(PROMPT, DECODED, 0, 0, HIT)
    assert folder.counters.bad_storage == 0


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_a_folder_of_nothing_but_damage_is_an_empty_one(folder: Folder) -> None:
    cold = folder.ask(1)

    def damage() -> None:
        for file in folder.everything():
            flip(file, file)

    folder.restart(damage)
    for _ in range(2):
        tokens, logits, usage = folder.ask(1)
        assert tokens == cold[0]
        assert all(torch.equal(found, cold[1][position]) for position, found in logits.items())
    assert usage == TokenUsage(PROMPT, DECODED, HIT, 0, 0)
    folder.restart()
    assert folder.ask(1)[2] == TokenUsage(PROMPT, DECODED, 0, 0, HIT)


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_files_that_vanish_while_the_engine_runs_are_misses(folder: Folder) -> None:
    cold = folder.ask(1)
    assert folder.engine.settle(LONG_S)
    for file in folder.everything():
        file.unlink()
    assert folder.engine.flush() > 0
    tokens, logits, usage = folder.ask(1)
    assert (tokens, usage.cached) == (cold[0], 0)
    assert all(torch.equal(found, cold[1][position]) for position, found in logits.items())
    folder.restart()
    assert folder.ask(1)[2].storage == HIT
