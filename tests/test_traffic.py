"""The soak of the engine in its short form (`make soak-engine` is the long one), and that it would notice."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from kvarve.pages.pools import BufferSpec
from kvarve.reference.engine.model import LoadedModel, load_model
from kvarve.reference.engine.paging import PagedWorkspace
from tests.sim.traffic import SHORT, Traffic, Wrong, draw, figures, show

pytestmark = pytest.mark.long
REQUESTS = 32  # of each server; time is no measure on a machine that others use
FEW = replace(SHORT, talks=12)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("builtin:tiny-hybrid", page_tokens=SHORT.page, chunk_tokens=SHORT.chunk)


def prepared(model: LoadedModel, folder: Path, seed: int = 7, share: float = 0.05) -> Traffic:
    print(f"seed {seed}")
    traffic = Traffic(model, FEW, share, seed, folder)
    assert [*traffic.prepare()] == [*range(FEW.talks)]
    return traffic


def test_under_mixed_traffic_every_answer_is_the_uncached_one(
    model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic = prepared(model, tmp_path)
    for kind in ("deterministic", "batched") * 2:
        traffic.serve(kind, 0, REQUESTS)
    found = figures(traffic)
    for row in found["engines"].values():
        assert row["servers"] == 2
        assert row["requests"] == 2 * REQUESTS
        assert all(row["reasons"][f"hit_{tier}"] > 0 for tier in ("device", "host", "storage")), "all tiers were hit"
        assert sum(row["reasons"].values()) == pytest.approx(1)
    show(found)
    draw(found, tmp_path / "memory.png")
    assert "Every answer was right" in capsys.readouterr().out
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_state_that_is_not_loaded_is_noticed(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = prepared(model, tmp_path)
    copy_in = PagedWorkspace._copy_in

    def forgetful(self: PagedWorkspace, buffer: BufferSpec, arena: Tensor, index: Tensor, into: Tensor) -> None:
        if not any(into is state for state in self._states.values()):
            copy_in(self, buffer, arena, index, into)

    monkeypatch.setattr(PagedWorkspace, "_copy_in", forgetful)
    with pytest.raises(Wrong, match="of the answer differ"):
        traffic.serve("deterministic", 0, 10 * REQUESTS)
