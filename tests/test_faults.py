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
from kvarve.memory.record import HEADER_BYTES
from kvarve.model import ModelIdentity
from kvarve.prefix_cache import PrefixCache
from kvarve.storage import FileStorage
from kvarve.testing.models import byte_tokenizer, tiny_model

PAGE, CHUNK = 16, 64
PROMPT, HIT = 5 * CHUNK + 23, 5 * CHUNK
DECODED = 4
LONG_S = 60.0
MIB = 1 << 20


@cached
def a_model(family: str) -> LoadedModel:
    model = tiny_model(family)
    layout = StateLayout.of(model, PAGE, CHUNK)
    identity = ModelIdentity(family, "random", "float32", PAGE, CHUNK, layout.pools)
    return LoadedModel(family, model, byte_tokenizer(), layout, identity, 1024, frozenset({256}))


def a_prompt(seed: int) -> list[int]:
    return list(map(int, torch.randint(256, (PROMPT,), generator=torch.Generator().manual_seed(seed))))


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

    def name(self, pool: str, seed: int, page: int) -> str:
        root = root_key(self.namespace)
        return object_name(root, extend(root, bind_to_chunk(pack(a_prompt(seed)), PAGE, CHUNK), PAGE)[page], pool)

    def beside(self) -> AbstractContextManager[FileStorage]:
        """The same store, opened by another process."""
        return closing(FileStorage(self.path, 1 << 30, self.namespace, str(self.model.identity)))

    def read(self, name: str) -> bytes:
        with self.beside() as storage:
            buffer = bytearray(MIB)
            (size,) = storage.get([name], [memoryview(buffer)])
            assert size is not None
            return bytes(buffer[:size])

    def flip(self, name: str) -> None:
        """One bit of a page in its slab, past the store."""
        with self.beside() as storage:
            slab, row = storage._index.place(name)
            at = slab.shape.slot_at(row) + HEADER_BYTES + 3
        data = bytearray(slab.path.read_bytes())
        data[at] ^= 16
        slab.path.write_bytes(data)

    def write(self, name: str, data: bytes) -> None:
        with self.beside() as storage:
            storage.delete([name])
            assert storage.put([name], [memoryview(data)]) == [True]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    folder = Folder(tmp_path / "store", request.param, monkeypatch)
    yield folder
    folder.engine.shutdown(10)


@pytest.mark.parametrize(
    ("folder", "pool", "page", "how"),
    [
        ("qwen3_5", "state", HIT // PAGE - 1, "flip"),
        *(
            pytest.param(*each, how, marks=pytest.mark.long)
            for how in ("flip", "truncate", "swap")
            for each in (
                ("qwen3_5", "attention", 7),
                ("gpt_oss", "attention", 0),
                ("gpt_oss", "window-24", HIT // PAGE - 2),
            )
        ),
    ],
    indirect=["folder"],
)
def test_a_damaged_page_costs_time_and_nothing_else_and_is_made_good_after_a_restart(
    folder: Folder, pool: str, page: int, how: str
) -> None:
    cold = {seed: folder.ask(seed) for seed in (1, 2)}
    assert [usage.cached for *_, usage in cold.values()] == [0, 0]
    victim, other = folder.name(pool, 1, page), folder.name(pool, 2, page)
    hurt = {victim, other} if how == "swap" else {victim}

    def damage() -> None:
        before, after = folder.read(victim), folder.read(other)
        good.update({victim: before, other: after})
        if how == "flip":
            folder.flip(victim)
        elif how == "truncate":
            folder.write(victim, before[:-4096])
        else:
            folder.write(victim, after)
            folder.write(other, before)

    def same(seed: int) -> TokenUsage:
        tokens, logits, usage = folder.ask(seed)
        expected, cold_logits, _ = cold[seed]
        assert tokens == expected
        assert {*logits} == {position for position in cold_logits if position > usage.cached}
        for position, found in logits.items():
            assert torch.equal(found, cold_logits[position]), f"prompt {seed}, token {position}"
        return usage

    good: dict[str, bytes] = {}
    folder.restart(damage)
    usages = {seed: same(seed) for seed in (1, 2)}
    assert usages[1].cached < HIT and (usages[2] == TokenUsage(PROMPT, DECODED, 0, 0, HIT)) == (how != "swap")
    assert folder.engine.cache.counters.bad_storage == len(hurt)
    folder.restart()
    assert {name: folder.read(name) for name in good} == good, "not there again"
    for seed in (1, 2):
        assert same(seed) == TokenUsage(PROMPT, DECODED, 0, 0, HIT)


@pytest.mark.long
@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_pages_that_vanish_while_the_engine_runs_are_misses(folder: Folder) -> None:
    cold = folder.ask(1)
    assert folder.engine.settle(LONG_S)
    with folder.beside() as storage:
        assert storage.drop() > 0
    assert folder.engine.flush() > 0
    tokens, logits, usage = folder.ask(1)
    assert (tokens, usage.cached) == (cold[0], 0)
    assert all(torch.equal(found, cold[1][position]) for position, found in logits.items())
    folder.restart()
    assert folder.ask(1)[2].storage == HIT
