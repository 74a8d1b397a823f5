"""A pytest plugin for each run of mutants.py: makes it repeatable, reports failures, and checks the sources under test.

The package is installed from a checkout, so a test that starts a process without PYTHONPATH would test that checkout
instead of the mutant. Such a process is reported, and the run does not count.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

import kvarve

SOURCE = Path(os.environ["KVARVE_MUTANT"])  # the sources under test
REPORT = Path(os.environ["KVARVE_MUTANT_REPORT"])  # for mutants.py

found: dict[str, str] = {}

# The same examples each time; no database, no shrinking.
settings.register_profile(
    "mutant", derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("mutant")


def note(what: str, said: str) -> None:
    found.setdefault(what, said)
    REPORT.write_text(json.dumps(found))


def started(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook: a process without our sources first on its path would test something else."""
    if event == "subprocess.Popen":
        program, _, _, environment = args
        path = (os.environ if environment is None else environment).get("PYTHONPATH", "")
        if path.split(os.pathsep)[0] != str(SOURCE):
            note("astray", f"{program} was started with PYTHONPATH={path!r}")


if not Path(kvarve.__file__).is_relative_to(SOURCE):
    note("astray", f"kvarve came from {kvarve.__file__}")
sys.addaudithook(started)


def pytest_runtest_logstart(nodeid: str) -> None:
    found["running"] = nodeid
    REPORT.write_text(json.dumps(found))  # the run may hang from here on


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        note("failed", report.nodeid)
        note("why", reason(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note("unreadable", f"{report.nodeid}: {reason(report)}")


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    return lines[0] if crash else lines[-1]
