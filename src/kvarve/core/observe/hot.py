"""Which prefixes are resumed from most? For an operator to look at: no decision of the core reads it.

Space-Saving (Metwally, Agrawal and El Abbadi, "Efficient computation of frequent and top-k elements in data streams",
2005) over the boundaries at which requests resume: a new prefix takes the place of the one that was resumed at least
often, and inherits its count. So of N resumptions, every prefix with more than N / `most` of them is here, however
many others there are. Beside that each prefix has its hits: the requests that resumed at it or, below it, at a longer
one. Both are halved now and then, so they are of late.
"""

from bisect import insort
from collections.abc import Iterator

from kvarve.core.tree.tree import Run, covering

MOST = 64  # prefixes
HALVE_EVERY = 4096  # resumptions


class HotPrefix:
    """The first `pages` pages of the prompts under a root key that have these tokens."""

    __slots__ = ("count", "hits", "key", "number", "pages", "root", "run", "trace")

    def __init__(self, root: bytes, pages: int, run: Run, count: int, number: int) -> None:
        self.root, self.pages, self.run, self.count, self.number = root, pages, run, count, number
        self.trace = run.traces[pages - 1 - run.first]  # of all its tokens
        self.hits = 1
        self.key = b""  # of its last page; it has none until it was looked at in memory

    def path(self) -> list[Run]:
        """The runs of its pages from the first on; empty if the tree does not have all of them, as far as is known."""
        run = self.run
        while self.pages <= run.first:  # it was split
            assert run.parent is not None
            run = run.parent
        if self.pages > run.end or run.traces[self.pages - 1 - run.first] != self.trace:
            return []
        path = [run]
        while (above := path[-1].parent) is not None:
            path.append(above)
        return path[-2::-1]  # without the root


class Hot:
    def __init__(self, most: int = MOST, halve_every: int = HALVE_EVERY) -> None:
        self._most, self._halve_every = most, halve_every
        self._of: dict[bytes, list[HotPrefix]] = {}  # by root key, the longest first
        self._size = self._resumptions = self._numbers = 0

    def resumed(self, root: bytes, run: Run, boundary: int) -> None:
        """A request under a root key resumes at a boundary above 0; `run` is that of its last page, or below it."""
        known = False
        for each in self._on(root, run, 0, boundary):
            each.hits += 1
            if each.pages == boundary:
                each.count += 1
                known = True
        if not known:
            self._add(root, run, boundary)
        self._resumptions += 1
        if self._resumptions % self._halve_every == 0:
            self._halve()

    def came(self, root: bytes, run: Run, known: int, end: int) -> None:
        """Pages [known, end) of a prompt are in the tree anew, the last of them in `run`."""
        for _ in self._on(root, run, known, end):
            pass

    def hottest(self, count: int) -> list[HotPrefix]:
        """Those with most hits, at most `count`."""
        return sorted(self._all(), key=lambda each: (-each.hits, -each.pages, each.number))[:count]

    def _on(self, root: bytes, run: Run, start: int, end: int) -> Iterator[HotPrefix]:
        """The prefixes of (start, end] pages that a path has, which are found in its runs from now on."""
        for each in self._of.get(root, ()):
            if not start < each.pages <= end:
                continue
            run = covering(run, each.pages - 1)
            if run.traces[each.pages - 1 - run.first] == each.trace:
                each.run = run
                yield each

    def _add(self, root: bytes, run: Run, pages: int) -> None:
        count = 1
        if self._size == self._most:
            least = min(self._all(), key=lambda each: (each.count, each.hits, each.number))
            count += least.count
            self._drop(least)
        run = covering(run, pages - 1)
        self._numbers += 1
        insort(self._of.setdefault(root, []), HotPrefix(root, pages, run, count, self._numbers), key=_longest_first)
        self._size += 1

    def _halve(self) -> None:
        for each in [*self._all()]:
            each.hits //= 2
            each.count //= 2
            if not each.hits:
                self._drop(each)

    def _drop(self, prefix: HotPrefix) -> None:
        of = self._of[prefix.root]
        of.remove(prefix)
        if not of:
            del self._of[prefix.root]
        self._size -= 1

    def _all(self) -> Iterator[HotPrefix]:
        for of in self._of.values():
            yield from of


def _longest_first(prefix: HotPrefix) -> int:
    return -prefix.pages
