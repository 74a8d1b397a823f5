"""The prover's findings: rows of tables, for people and as JSON. No cache is known here."""

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from kvarve.pages.pools import Tier
from kvarve.reference.verify.watched import Transcript, largest
from kvarve.reports import plain_table

TIERS = tuple(tier.name.lower() for tier in Tier)
SHOWN = 3  # of a path's troubles, in a terminal


@dataclass
class Path:
    """One way from a prompt to an answer. `compared`: vectors of logits; `resumed`: prompt tokens by tier."""

    name: str
    says: str
    requests: int = 0
    prompt_tokens: int = 0
    resumed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    compared: int = 0
    differ: int = 0
    troubles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.troubles and not self.differ

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"seconds": round(self.seconds, 3), "ok": self.ok}


@dataclass
class Damage:
    """A page damaged on purpose. `expected`: "caught" by a check that is on, or "noticed" in the logits.

    `idle`: it changed no logit, as damage to one of several kinds of buffers may; so it is not covered by the proof.
    """

    pool: str
    what: str
    where: str
    expected: str
    check: str  # on, off, or none where there is no check
    idle: bool = False
    troubles: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.troubles

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"ok": self.ok}


@dataclass
class Rounding:
    """The effect of computing in other pieces: the largest difference of two logits, which is no fault. `tokens`: how
    many were computed so, `what` says how."""

    what: str
    tokens: int = 0
    difference: float = 0.0
    largest_logit: float = 0.0

    def take(self, found: Transcript, expected: Transcript, at: int) -> None:
        """Compare the logits after `at` tokens."""
        self.difference = max(self.difference, largest(found, expected, [at]))
        self.largest_logit = max(self.largest_logit, float(expected.logits[at].abs().max()))

    @property
    def share(self) -> float:
        return self.difference / self.largest_logit if self.largest_logit else 0.0

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"share": self.share}


@dataclass
class ProofReport:
    """The whole report. `about`: the model and the plan, which bound the proof."""

    about: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    rounding: Rounding | None = None  # of resuming from pages that were computed in other pieces
    sharding: Rounding | None = None  # of computing on several ranks
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        rows = [row.ok for row in self.paths], [row.ok for row in self.damages]
        return all(all(each) and bool(each) for each in rows)

    @property
    def uncovered(self) -> list[str]:
        """The kinds of buffers on which no answer depended."""
        return [f"{row.what} ({row.pool})" for row in self.damages if row.idle]

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "about": self.about,
            "notes": self.notes,
            "uncovered": self.uncovered,
            "paths": [path.as_json() for path in self.paths],
            "rounding": self.rounding and self.rounding.as_json(),
            "sharding": self.sharding and self.sharding.as_json(),
            "damages": [damage.as_json() for damage in self.damages],
            "compared": sum(path.compared for path in self.paths),
            "seconds": round(self.seconds, 3),
        }

    def tables(self) -> list[Table]:
        """Narrow enough for 80 columns."""
        figures = ("requests", "device", "host", "storage", "logits", "differ", "s")
        paths = plain_table("path", right=figures)
        for path in self.paths:
            mark = "-" if path.ok else "[bold red]X[/bold red]"
            found = f"{path.differ:,}" if path.differ else mark
            tiers = [f"{path.resumed[tier]:,}" for tier in TIERS]
            paths.add_row(path.name, f"{path.requests:,}", *tiers, f"{path.compared:,}", found, f"{path.seconds:.1f}")
        damages = plain_table("damage to", "what", "where", "check", "has to be", "was")
        for damage in self.damages:
            was = "[yellow]idle[/yellow]" if damage.idle else damage.expected
            was = was if damage.ok else "[bold red]not[/bold red]"
            damages.add_row(damage.pool, damage.what, damage.where, damage.check, damage.expected, was)
        measured = []
        for by in filter(None, (self.sharding, self.rounding)):
            measured.append(plain_table(by.what, right=("logits differ by", "of the largest")))
            measured[-1].add_row(f"{by.tokens:,} tokens", f"{by.difference:.2g}", f"{by.share:.2g}")
        return [paths, *measured, damages]

    def troubles(self) -> list[str]:
        """The troubles, a line each, the first few of each row."""
        lines = []
        named = [(path.name, path.troubles) for path in self.paths]
        named += [(f"{row.what}, {row.pool}, {row.where}", row.troubles) for row in self.damages]
        for name, troubles in named:
            lines += [f"{name}: {trouble}" for trouble in troubles[:SHOWN]]
            if len(troubles) > SHOWN:
                lines.append(f"{name}: and {len(troubles) - SHOWN} more")
        return lines
