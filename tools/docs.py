"""Writes the generated blocks of the pages in docs/: python tools/docs.py [--check] [--quick]

A block stands between `<!-- from the code: NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit
code says whether everything is up to date.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import transformers
from prometheus_client.core import Metric

import performance
import residency
from kvarve import metrics, testing
from kvarve.core.copies import in_flight
from kvarve.core.lease import MOVES, Cause, Phase
from kvarve.core.observe.histograms import Ages, Histogram
from kvarve.core.observe.reasons import Reason
from kvarve.core.tree.tree import Run
from kvarve.metrics import Snapshot
from kvarve.pages.pools import Tier
from kvarve.reference.engine import families
from kvarve.settings import engine_flags
from kvarve.storage.base import StorageUsage
from kvarve.storage.urls import Backend, StorageUrl, backend_of
from kvarve.transfer.flows import LANES, Flow

DOCS, TESTS = Path(__file__).parents[1] / "docs", Path(__file__).parents[1] / "tests" / "storage"
GC_DOES = ("capacity", "ttl")  # where a storage does not by itself
PART = re.compile(r"(<!-- from the code: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def edges() -> str:
    """The four edges between tiers, by their names in the code."""
    named = {
        edge: name.lower()
        for name, edge in vars(in_flight).items()
        if name.isupper() and isinstance(edge, tuple) and edge[0] is not edge[1]
    }
    tiers = [*Tier]
    assert set(named) == {pair for near, far in pairwise(tiers) for pair in ((near, far), (far, near))}
    down, up = tiers[0].name.lower(), " " * len(tiers[0].name)
    for near, far in pairwise(tiers):
        down += f"  ──{named[near, far]:─<7}──►  {far.name.lower()}"
        up += f"  ◄──{named[far, near]:─<7}──  {' ' * len(far.name)}"
    return f"```\n{down}\n{up.rstrip()}\n```\n"


def facts() -> str:
    """The facts that a run holds about its positions."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in Run.__slots__.items()]
    return "\n".join(["| fact | meaning |", "|---|---|", *rows]) + "\n"


def phases() -> str:
    """The moves of a lease: for each cause, the next phase by the present one."""
    rows = [f"| cause | {' | '.join(phase.name for phase in Phase)} |", "|---" * (1 + len(Phase)) + "|"]
    for cause in Cause:
        cells = [MOVES[phase, cause].name if (phase, cause) in MOVES else "" for phase in Phase]
        rows.append(f"| {cause.value} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def reasons() -> str:
    """Why a token was cached or not."""
    rows = [f"| `{reason.value}` | {reason.meaning} |" for reason in Reason]
    return "\n".join(["| reason | a token has it if |", "|---|---|", *rows]) + "\n"


def flags() -> str:
    """Flags of other servers, and what becomes of each."""

    def fate(flag: engine_flags.Flag) -> str:
        if flag.ours:
            return f"`{flag.ours}`" + (f", {flag.why}" if flag.why else "")
        if flag.fine is None:
            return f"refused: {flag.why}"
        only = f" ({' or '.join(flag.fine)} only)" if any(flag.fine) else ""
        return f"changes nothing{only}: {flag.why}"

    rows = [f"| `{name}` | {fate(flag)} |" for name, flag in engine_flags.FLAGS.items()]
    return "\n".join(["| flag | here |", "|---|---|", *rows]) + "\n"


class _Figures(dict[str, float]):
    """The figures of a cache of which only the tiers are known."""

    def __missing__(self, name: str) -> float:
        return 0.0


def all_numbers() -> Snapshot:
    """A snapshot for which every family is told, if without samples."""
    return Snapshot(
        model="",
        version="",
        up=True,
        running=0,
        waiting={},
        ends={},
        prompt_tokens=0,
        computed_tokens=0,
        recomputed_tokens=0,
        output_tokens=0,
        preempted=0,
        reasons={},
        histograms=defaultdict(Histogram),
        cache=_Figures({"memory_bytes.device": 0.0, "memory_bytes.host": 0.0}),
        ages=Ages(1, 2, lambda: 0.0),
        flows={lane: Flow(()) for lane in LANES.values()},
        storage=StorageUsage(0, 0, 0, 0),
        storage_up=True,
        storage_kinds=("file",),
        connections=0,
        spans={},
    )


def _table(families: Iterable[Metric]) -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows) + "\n"


def own_metrics() -> str:
    """Our metrics, in their order."""
    return _table(metrics.own(all_numbers()))


def vllm_metrics() -> str:
    return _table(metrics.OTHERS["vllm"](all_numbers()))


def sglang_metrics() -> str:
    return _table(metrics.OTHERS["sglang"](all_numbers()))


STORAGES = ("file", "s3", "redis", "mooncake", "hf3fs")
SUITE_FILES = {"file": "file_storage", "s3": "objects"}  # where a storage runs the suites, if not in test_SCHEME.py


def storages() -> str:
    """What each storage can do, as its class declares it; and the suites that it passes, as its tests say."""
    backends = {scheme: backend_of(StorageUrl("", scheme, "", "", {})) for scheme in STORAGES}

    def told(has: Callable[[type[Backend]], bool], no: Callable[[type[Backend]], str] = lambda _: "no") -> list[str]:
        return ["yes" if has(backend) else no(backend) for backend in backends.values()]

    def parameter(name: str) -> list[str]:
        return [
            "no" if name not in each.parameters else "by `gc`" if each.by_gc and name in GC_DOES else "yes"
            for each in backends.values()
        ]

    def suites(scheme: str) -> str:
        text = (TESTS / f"test_{SUITE_FILES.get(scheme, scheme)}.py").read_text()
        bases = {base.strip() for found in re.findall(r"class \w+\((.*?)\)", text) for base in found.split(",")}
        return ", ".join(name for name in testing.__all__ if name.endswith("Suite") and name in bases)

    rows = {
        "shared by processes": told(lambda it: it.shared),
        "holds at most its `capacity=`": parameter("capacity"),
        "`ttl=`": parameter("ttl"),
        "`quota=` of a salt": parameter("quota"),
        "`read_only=yes`": parameter("read_only"),
        "`kvarve storage stat`, `ls`, `gc`, `drop`": told(lambda it: it.can_list, lambda it: f"no ({it.managed_by})"),
        "`kvarve storage verify`": told(lambda it: it.can_verify),
        "a password in its URL": told(lambda it: it.secrets),
        "suites of `kvarve.testing`": [*map(suites, backends)],
    }
    heads = " | ".join(f"`{scheme}://`" for scheme in backends)
    table = [f"| | {heads} |", "|---" * (1 + len(backends)) + "|"]
    return "\n".join(table + [f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items()]) + "\n"


# By page: its blocks in order.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "architecture.md": {
        "phases": phases,
        "reasons": reasons,
        "edges": edges,
        "facts": facts,
        "residency": residency.table,
    },
    "families.md": {"families": families.markdown},
    "http.md": {"flags": flags},
    "storages.md": {"storages": storages},
    "performance.md": {"performance": performance.table, "prefixes": performance.prefixes},
    "metrics.md": {"own_metrics": own_metrics, "vllm_metrics": vllm_metrics, "sglang_metrics": sglang_metrics},
}

FAMILIES = "families"  # takes half a minute; tests/engine/test_families_table.py checks samples
RESIDENCY = "residency"  # takes half a minute of simulated lives


def rendered(page: str, parts: dict[str, Callable[[], str]], left_out: set[str]) -> str:
    """The page with each block generated anew, except those in `left_out`."""
    assert [name for _, name, _ in PART.findall(page)] == [*parts], "each block is in the page once, in order"
    return PART.sub(lambda part: part[0] if part[2] in left_out else part[1] + parts[part[2]]() + part[3], page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what the pages in docs/ take from the code.")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date, families left out")
    parser.add_argument("--quick", action="store_true", help="leave the table of residency out as well")
    args = parser.parse_args()
    left_out = ({FAMILIES} if args.check else set()) | ({RESIDENCY} if args.quick else set())
    transformers.utils.logging.set_verbosity_error()
    stale = []
    for name, parts in PAGES.items():
        old = (DOCS / name).read_text()
        new = rendered(old, parts, left_out)
        if old != new:
            stale.append(name)
        if not args.check:
            (DOCS / name).write_text(new)
    if args.check and stale:
        print(f"{', '.join(stale)}: not what the code says: run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
