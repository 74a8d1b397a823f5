"""Which windows and recurrent states are worth keeping: a snapshot is dear in bytes, and most are never read again."""

from dataclasses import dataclass

from kvarve.boundaries import members, of
from kvarve.errors import ConfigError


@dataclass(frozen=True)
class Snapshots:
    """Keep them where a prompt ends (`ends`), where it leaves a known prompt (`branches`), and every so many tokens
    (`every`; 0: not). None is admitted that would save fewer than `gap` tokens over the one before it on the way."""

    ends: bool = True
    branches: bool = True
    every: int = 0
    gap: int = 0

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"snapshot every {self.every} tokens: give 0 or more")
        if self.gap < 0:
            raise ConfigError(f"a snapshot gap of {self.gap} tokens: give 0 or more")

    def boundaries(self, pages: int, limit: int, branch: int, kept: int, page_tokens: int, grid: int) -> int:
        """The set of boundaries to keep, on the prefill grid.

        For a prompt of `pages` full pages that can be resumed at most at `limit` when it comes again, that leaves known
        prompts after `branch` pages (0: nowhere), where boundaries `kept` have their windows and states already.
        """
        marks: set[int] = set()
        if self.ends:
            marks |= {pages, limit}
        if self.branches:
            marks.add(branch)
        if self.every:
            step = max(1, self.every // page_tokens)
            marks.update(range(step, pages + 1, step))
        wanted = of({mark // grid * grid for mark in marks} - {0})
        return self._admitted(wanted, kept, page_tokens) if self.gap else wanted

    def _admitted(self, wanted: int, kept: int, page_tokens: int) -> int:
        """Those that are kept already, and those that are far enough from the one before them."""
        admitted, last = 0, 0
        for boundary in members(wanted | kept):
            if kept >> boundary & 1 or (boundary - last) * page_tokens >= self.gap:
                admitted |= 1 << boundary
                last = boundary
        return admitted & wanted


ENDS_AND_BRANCHES = Snapshots()
