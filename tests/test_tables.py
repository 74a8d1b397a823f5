"""Tables fit a terminal of 80 columns, and nothing in them is cut off."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from kvarve.core.observe.reasons import Reason
from kvarve.pages.pools import Tier
from kvarve.planner.replayer import SimulationReport
from kvarve.planner.simulate_command import _curve, _table
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.sweep import COMPARED, Point
from kvarve.reference.engine.families import Facts, Pool
from kvarve.reference.engine.families import table as models_table
from kvarve.reference.verify.report import Damage, ProofReport, Rounding
from kvarve.reference.verify.report import Path as ProofPath

WIDTH, TOKENS = 80, 123_456_789


def lines(table: Table) -> list[str]:
    console = Console(width=WIDTH, record=True, file=StringIO())
    console.print(table)
    found = console.export_text().splitlines()
    assert max(map(len, found)) <= WIDTH
    assert not [line for line in found if "…" in line]
    return found


def test_families() -> None:
    pools = tuple(
        Pool(name, back, 1 << 20, 2) for name, back in (("compressed", None), ("window-4096", 64), ("state", 1))
    )
    facts = Facts(
        name="Granite 4 (MoE hybrid)",
        model_type="granitemoehybrid",
        supported=True,
        page_multiple=128,
        shortest_hit=1025,
        bytes_per_token=109772.8,
        bytes_per_snapshot=245_288_000,
        pools=pools,
    )
    text = " ".join(lines(models_table([facts])))
    assert all(word in text for word in ("window-4096", "(64)", "state (1)", "107.2 KiB", "233.9 MiB", "× 128", "1025"))


def test_a_simulation_and_a_sweep() -> None:
    report = SimulationReport(requests=1_000_000, prompt_tokens=TOKENS, infinite_hit_tokens=TOKENS)
    report.hit_tokens = dict.fromkeys(report.hit_tokens, TOKENS // 4)
    report.reasons = {reason.value: TOKENS // 10 for reason in Reason}
    report.slots = dict.fromkeys(("device.attention", "host.attention"), 1_234_567)
    report.evicted = dict.fromkeys(("device.attention", "host.attention", "storage.attention"), 12_345_678)
    report.moved_bytes = {"device_to_host": 1 << 45, "host_to_storage": 1 << 45}
    config = SimulationConfig(device_memory=1003 << 20, host_memory=1003 << 30, storage_memory=1003 << 30)
    hit = dict.fromkeys(COMPARED, 1.0)
    lines(_curve([Point(share=1.0, memory=1003 << 20, hit=hit, bound=1.0)], Tier.STORAGE))
    text = " ".join(lines(_table(report, config)))
    words = [word for reason in Reason if not reason.value.startswith("hit") for word in reason.value.split("_")]
    assert not [word for word in words if word not in text]


def test_a_proof() -> None:
    path = ProofPath("interleaved", "", requests=1000, compared=99_999, differ=9_999, seconds=999.9)
    path.resumed = dict.fromkeys(path.resumed, 999_999)
    damage = Damage("window-4096", "compressed entries", "storage", "noticed", "none", idle=True)
    measured = Rounding("pages of answers, decoded", 99_999, 0.000123, 12.0)
    report = ProofReport({}, paths=[path], damages=[damage], rounding=measured, sharding=measured)
    for table in report.tables():
        lines(table)


BLOCK = re.compile(r"^```\n\$ kvarve (simulate [^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_worked_example_of_sizing_prints_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvarve.cli.main import main

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    shown = BLOCK.findall((ROOT / "docs" / "sizing.md").read_text())
    assert len(shown) == 2
    for command, text in shown:
        assert main(command.split()) == 0
        printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert printed == [line.strip() for line in text.splitlines()], command
