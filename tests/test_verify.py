"""`kvarve verify` says yes to a cache that is right, and no to each of many that are not."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache as cached
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvarve.cache.scheduler
import kvarve.cache.worker
import kvarve.pages.keys
import kvarve.reference.verify.damage
import kvarve.reference.verify.prover
import kvarve.reference.verify.watched
from kvarve.cli.main import main
from kvarve.core.core import Core
from kvarve.core.lease import Lease, Phase
from kvarve.core.requests.growth import Growth
from kvarve.core.requests.paths import Paths
from kvarve.pages import boundaries
from kvarve.pages.keys import root_key
from kvarve.pages.pools import BufferSpec, PoolSpec
from kvarve.reference.engine.answers_again import AnswersAgain
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.workspace import Workspace
from kvarve.reference.verify.damage import damages
from kvarve.reference.verify.proof_paths import abort, branches, conversation, deepest, eviction, partial, tiers
from kvarve.reference.verify.prover import Prover
from kvarve.reference.verify.serving import answers, together
from kvarve.reference.verify.watched import same_bits
from kvarve.storage.altered import AlteredStorage
from kvarve.storage.file.maintenance import FolderUpkeep
from tests.sim.models import save_checkpoint, tiny_model

PAGE, CHUNK = 16, 64
LONG = pytest.mark.long


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random models as folders."""

    @cached
    def checkpoint(family: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / family
        save_checkpoint(tiny_model(family), folder)
        return folder

    return checkpoint


class Verify:
    """Runs the command in this process; the last one's report is kept."""

    def __init__(self, checkpoint: Callable[[str], Path], folder: Path) -> None:
        self._checkpoint, self._file = checkpoint, folder / "verify.json"
        self.report: dict[str, Any] = {}

    def __call__(self, family: str, *words: object) -> int:
        shape = ("--page-tokens", PAGE, "--chunk-tokens", CHUNK, "--quick", "--json", self._file)
        code = main([*map(str, ("verify", "--model", self._checkpoint(family), *shape, *words))])
        self.report = json.loads(self._file.read_text())
        assert self.report["ok"] is (code == 0)
        return code

    def wrong(self) -> set[str]:
        """The paths that went wrong, and where damage did."""
        paths = {path["name"] for path in self.report["paths"] if not path["ok"]}
        return paths | {f"{row['what']} in {row['where']}" for row in self.report["damages"] if not row["ok"]}


@pytest.fixture
def verify(checkpoint: Callable[[str], Path], tmp_path: Path) -> Verify:
    return Verify(checkpoint, tmp_path)


# --- a cache that is right


@LONG
def test_a_device_that_pools_cannot_share_has_room_for_every_path(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU without virtual memory, or with too little: memory is divided by how far apart snapshots may be."""
    for module in (kvarve.cache.worker, kvarve.reference.verify.prover):
        monkeypatch.setattr(module, "on_host", lambda _: False)
    assert verify("gpt_oss") == 0, verify.wrong()


@LONG
def test_the_effect_of_rounded_hits_is_measured(verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("lfm2", "--hits", "rounded") == 0
    rows = {row["name"]: row for row in verify.report["paths"]}
    assert [*rows] == ["rounded", "damage"] and not verify.wrong()
    assert 0 < verify.report["rounding"]["tokens"] == rows["rounded"]["resumed"]["device"]
    assert rows["rounded"]["resumed"]["device"] >= 3 * 2 * CHUNK, "three answers crossed the end of a second chunk"
    assert 0 < verify.report["rounding"]["share"] < 1e-4, "the pieces were other ones"
    said = capsys.readouterr().out
    assert "Measured" in said and "every bit equal" not in said


# --- caches that are wrong: each of these is a bug that a cache could have


def a_state_one_channel_off(patch: pytest.MonkeyPatch) -> None:
    """The restored workspace is not the saved one."""
    load = Workspace.load

    def wrong(self: Workspace, pool: str, at: range, arena: Mapping[str, Tensor], slots: Sequence[int]) -> None:
        turned = {name: pages.roll(1, 1) if ".conv." in name else pages for name, pages in arena.items()}
        load(self, pool, at, turned, slots)

    patch.setattr(Workspace, "load", wrong)


def a_hit_is_the_least_of_the_pools_lengths(patch: pytest.MonkeyPatch) -> None:
    def resume_at(present: Sequence[int], lookbacks: Sequence[int | None], limit: int, grid: int = 1) -> int:
        each = (
            boundaries.legal(*pool, limit) & boundaries.multiples(grid, limit)
            for pool in zip(present, lookbacks, strict=True)
        )
        return 1 << min(map(boundaries.deepest, each))

    patch.setattr(boundaries, "resume_at", resume_at)
    # It waits for pages that no tier has, again and again.
    patch.setattr(kvarve.reference.verify.prover, "STORAGE_S", 1.0)
    patch.setattr(kvarve.reference.verify.watched, "ANSWER_S", 20.0)


def all_salts_share_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvarve.cache.scheduler, "root_key", lambda namespace, salt: root_key(namespace, salt.split()[1]))


def a_key_is_of_its_page_alone(patch: pytest.MonkeyPatch) -> None:
    right = kvarve.pages.keys.extend
    width = PAGE * 4

    def extend(parent: bytes, tokens: bytes, page_tokens: int) -> list[bytes]:
        pages = (tokens[at : at + width] for at in range(0, len(tokens) // width * width, width))
        return [right(b"nobody", page, page_tokens)[0] for page in pages]

    patch.setattr(kvarve.pages.keys, "extend", extend)


def pages_are_known_in_every_chunk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvarve.cache.scheduler, "bind_to_chunk", lambda packed, *_: packed)


def nothing_is_kept_where_prompts_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Growth, "_snapshots", lambda *_: 0)
    patch.setattr(Growth, "_has_room_at", lambda *_: False)


def what_is_evicted_is_still_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Paths, "hold", lambda *_: None)


def an_aborted_request_keeps_its_pins(patch: pytest.MonkeyPatch) -> None:
    def close(self: Core, lease: Lease) -> None:
        if lease.phase is Phase.READY and lease.done < lease.pages:
            lease.prefix_pins = 0
        right(self, lease)

    right = Core.close
    patch.setattr(Core, "close", close)


def the_pages_are_not_read(patch: pytest.MonkeyPatch) -> None:
    """The run that is compared is the one that it is compared with."""
    patch.setattr(kvarve.reference.verify.damage, "differences", lambda *_: [])


def nothing_is_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvarve.records.record.Stamp.intact", lambda *_: True)


def a_bad_page_stays_in_storage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AlteredStorage, "delete", lambda self, names: [True] * len(names))


def the_length_of_a_window_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    resume = Workspace.resume

    def forgetful(self: Workspace, boundary: int) -> None:
        resume(self, boundary)
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = 0

    patch.setattr(Workspace, "resume", forgetful)


def answers_change_each_others_rounding(patch: pytest.MonkeyPatch) -> None:
    """As they do side by side, and many times more."""
    sample = Engine._sample

    def noisy(self: Engine, jobs: list[Any], logits: Tensor) -> None:
        answering = sum(not other.prefilling for other in self.scheduler.running)
        sample(self, jobs, torch.nextafter(logits, logits + 1) if answering > 1 else logits)

    patch.setattr(Engine, "_sample", noisy)


def answers_are_kept_in_every_mode(patch: pytest.MonkeyPatch) -> None:
    computed = Engine._decoded

    def keeping(self: Engine, job: Any) -> None:
        self._exact = False
        computed(self, job)

    patch.setattr(Engine, "_decoded", keeping)


def answers_are_not_computed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AnswersAgain, "ended", lambda *_: None)


EVERY_TIER = {"device", "host", "storage", "restart"}


@pytest.mark.parametrize(
    ("bug", "family", "step", "wrong"),
    [
        (a_state_one_channel_off, "lfm2", tiers, EVERY_TIER),
        (what_is_evicted_is_still_in_use, "lfm2", eviction, {"eviction"}),
        (an_aborted_request_keeps_its_pins, "lfm2", abort, {"abort"}),
        *(
            pytest.param(*each, marks=LONG)  # the others show the same of every step
            for each in (
                (a_key_is_of_its_page_alone, "qwen3", branches, {"branches"}),
                (all_salts_share_pages, "qwen3", tiers, {"salt"}),
                (a_hit_is_the_least_of_the_pools_lengths, "lfm2", partial, {"partial"}),
                (nothing_is_kept_where_prompts_end, "lfm2", conversation, {"conversation"}),
                (the_length_of_a_window_is_forgotten, "gemma3", tiers, EVERY_TIER),
                (answers_change_each_others_rounding, "lfm2", together, {"together"}),
                (answers_are_kept_in_every_mode, "lfm2", together, {"together"}),
                (pages_are_known_in_every_chunk, "gpt_oss", together, {"together"}),
                (answers_are_not_computed_again, "lfm2", answers, {"answers"}),
                (answers_are_kept_in_every_mode, "lfm2", answers, {"answers"}),
                (nothing_is_checked, "lfm2", damages, {"a bit in host", "a bit in storage"}),
                (a_bad_page_stays_in_storage, "lfm2", damages, {"a bit in storage"}),
                (the_pages_are_not_read, "lfm2", damages, {"a page in device", "a page in host"}),
            )
        ),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_a_cache_that_is_wrong_is_not_proved(
    bug: Callable[[pytest.MonkeyPatch], None],
    family: str,
    step: Callable[[Prover], None],
    wrong: set[str],
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The other steps would notice some of them too.
    monkeypatch.setattr(kvarve.reference.verify, "STEPS", {"exact": (step,)})
    bug(monkeypatch)
    assert verify(family) == 1
    assert wrong <= verify.wrong(), verify.report


# --- proofs that are refused


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "--tokens 100",
            "--tokens 100 is too little to prove anything: the shortest prompt that can hit has 65 tokens",
        ),
        ("--chunk-tokens 1024", "a context of 1024 is too little"),
        ("--page-tokens 48", "a page of 48 tokens does not fit the model's prefill grid of 64"),
        ("--device abacus", "device must be auto or one that torch can use, got 'abacus'"),
        ("--storage memory://small?capacity=1MiB", "memory://small?capacity=1MiB: the proof needs"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    words: str, complaint: str, checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--model", checkpoint("lfm2"), "--page-tokens", PAGE, "--chunk-tokens", CHUNK)
    capsys.readouterr()  # a bar of saving it
    assert main([*map(str, ("verify", *shape)), *words.split()]) == 2
    _, error = capsys.readouterr()
    assert complaint in error
    assert error.startswith("kvarve: ") and error.count("\n") == 1


@LONG
def test_a_storage_of_ones_own_is_left_as_it_was(
    verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvarve.reference.verify, "STEPS", {"exact": (tiers,)})
    store = tmp_path / "store"
    verify("lfm2", "--storage", f"file://{store}?capacity=64MiB")
    assert verify.wrong() == set()
    assert verify.report["paths"][-1]["resumed"]["storage"] > 0
    (model,) = FolderUpkeep(store).contents().models
    with FolderUpkeep(store).inspect(model) as inspection:
        assert inspection.objects() == []


def test_without_damage_nothing_is_proved(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvarve.reference.verify, "STEPS", {"exact": (conversation,)})
    assert verify("lfm2") == 1
    assert verify.wrong() == set()


# --- the arithmetic of its own


@settings(max_examples=30)
@given(
    lookbacks=st.lists(st.sampled_from([None, 1, 2, 5]), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    grid=st.sampled_from([1, 2, 4]),
    limit=st.integers(0, 12),
)
def test_the_deepest_boundary_is_the_caches_own(lookbacks: list[int | None], seed: int, grid: int, limit: int) -> None:
    random, size = np.random.default_rng(seed), BufferSpec("b", (1,), "float32")
    pools = [PoolSpec(f"pool-{i}", (size,), lookback) for i, lookback in enumerate(lookbacks)]
    have = {pool.name: {at for at in range(12) if random.random() < 0.8} for pool in pools}
    found = boundaries.resume_at([boundaries.of(have[pool.name]) for pool in pools], lookbacks, limit, grid)
    assert deepest(pools, have, grid, limit) == boundaries.deepest(found)


def test_bits_are_compared_and_not_numbers() -> None:
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
