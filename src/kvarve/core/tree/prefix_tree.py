"""The prefix trees of all root keys: their shape, which changes only here, what has left them, how runs are used."""

from collections.abc import Iterator

from kvarve.core.context import Context
from kvarve.core.tree.ghosts import Ghosts
from kvarve.core.tree.tree import Root, Run, upward


class PrefixTree:
    def __init__(self, context: Context, ghosts: Ghosts) -> None:
        config, self._context, self.ghosts = context.config, context, ghosts
        self._size = len(config.pools), config.page_tokens, len(config.memory)
        self.roots: dict[bytes, Root] = {}
        self.shape = 0  # how often runs were made, split, lengthened or dropped
        self.tick = 0  # how often runs were used

    def root(self, key: bytes) -> Run:
        """The empty run above all prompts that share this root key."""
        root = self.roots.get(key)
        if root is None:
            self.shape += 1
            root = self.roots[key] = Root(key, *self._size)
        return root

    def runs(self, root: bytes | None = None) -> Iterator[Run]:
        """All runs, or those under a root key, parents first."""
        stack: list[Run] = [*self.roots.values()] if root is None else [*filter(None, [self.roots.get(root)])]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    def forget(self, key: bytes) -> None:
        """Drop a root without runs, so that salts out of use cost no memory."""
        root = self.roots.get(key)
        if root is not None and not root.children:
            self.shape += 1
            del self.roots[key]

    def lengthen(self, tail: Run, pages: tuple[bytes, bytes, bytes], whole: bool, followed: bool) -> Run:
        """Add pages (tokens, keys and heads) behind a run: to itself if it is a leaf and may grow, being no `whole`,
        else to a new run. `followed`: whether another page has followed the last of them. Returns the run of them."""
        self.shape += 1
        if tail.parent is not None and not tail.children and not whole:
            tail.append(*pages, followed)
            return tail
        child = tail.add_child(*pages, followed)
        child.used_s = self._context.now
        return child

    def split(self, run: Run, at: int) -> Run:
        """Cut a run before position `at`; returns the front (`Run.split`)."""
        self.shape += 1
        return run.split(at)

    def cut(self, run: Run, end: int) -> bool:
        """Drop the positions of a leaf run from `end` on, which have no pages or pins; whether the run has left."""
        self.shape += 1
        if end > run.first:
            run.trim(end)
            return False
        run.detach()
        return True

    def touch(self, run: Run, positions: int) -> None:
        """The runs that hold these positions have just been used: a request uses the pages up to `run`."""
        self.tick += 1
        for each, _ in upward(run, positions):
            each.used = self.tick
        at, now = run, self._context.now
        while at.parent is not None:
            at.used_s = now
            at = at.parent

    def inherit(self, parent: Run, child: Run) -> None:
        """A run's child goes: the run was last used when either was."""
        parent.used = max(parent.used, child.used)

    def count(self, run: Run, priority: int, again: bool) -> None:
        """A request resumes from pages of a run; `again`: its use has been counted."""
        run.uses += not again
        run.priority = max(run.priority, priority)

    def brought(self, run: Run, priority: int) -> bool:
        """A request has computed pages of a run, which counts as its first use; whether it was the first."""
        run.priority = max(run.priority, priority)
        first, run.uses = not run.uses, run.uses or 1
        return first
