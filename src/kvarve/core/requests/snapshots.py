"""Which windows and recurrent states are worth keeping: a snapshot is large, and most are never read again."""

from dataclasses import dataclass

from kvarve.pages.boundaries import members


@dataclass(frozen=True)
class Snapshots:
    """Keep them where a prompt ends (`ends`), where it branches off a known prompt (`branches`), and at every multiple
    of `every` tokens (0: where they take little). None is admitted that would save fewer than `gap` tokens over the one
    before it."""

    ends: bool = True
    branches: bool = True
    every: int = 0
    gap: int = 0

    def boundaries(
        self, pages: int, limit: int, branch: int, kept: int, page_tokens: int, grid: int, step: int = 0
    ) -> int:
        """The set of boundaries to keep, on the prefill grid.

        For a prompt of `pages` full pages that can be resumed at most at `limit` when it comes again, that branches off
        known prompts after `branch` pages (0: nowhere), and whose boundaries `kept` have their windows and states.
        `step`: pages after which they take little (0: nowhere).
        """
        marks: list[int] = []
        if self.ends:
            marks += pages, limit
        if self.branches:
            marks.append(branch)
        if self.every:
            marks += range(apart := max(1, self.every // page_tokens), pages + 1, apart)
        if step:
            marks += range(step, pages + 1, step)
        wanted = 0
        for mark in marks:
            wanted |= 1 << mark // grid * grid
        wanted &= ~1
        return self._admitted(wanted, kept, page_tokens) if self.gap else wanted

    def _admitted(self, wanted: int, kept: int, page_tokens: int) -> int:
        """The wanted boundaries that are kept already, or far enough from the one before them."""
        admitted, last = 0, 0
        for boundary in members(wanted | kept):
            if kept >> boundary & 1 or (boundary - last) * page_tokens >= self.gap:
                admitted |= 1 << boundary
                last = boundary
        return admitted & wanted
