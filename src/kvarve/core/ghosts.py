"""What has left memory: the pages of each salt that were evicted last, without their bytes.

Where a prompt leaves another one that has been evicted meanwhile, the next such prompt will branch off too, so a state
is worth keeping there. A page's name here is its trace (`Run.traces`); the lists are bounded, and what has fallen off
is unknown.
"""

from collections import OrderedDict

from xxhash import xxh3_64_intdigest

from kvarve.core.tree import Run, root_of

LEAST = 1024  # pages of a salt, at least


class Ghosts:
    def __init__(self, limit: int) -> None:
        """`limit`: pages that are remembered of all salts together; a salt that has more than its even share loses its
        own first. 0: none is, which costs nothing."""
        self._limit = limit
        self._pages = 0
        self._of: OrderedDict[bytes, OrderedDict[int, bool]] = OrderedDict()  # by root: whether a page followed it

    def left(self, run: Run, start: int) -> None:
        """The pages of a run from a local position on leave the tree; the run has their tokens still."""
        if not self._limit:
            return
        name = root_of(run).named
        ghosts = self._of.setdefault(name, OrderedDict())
        self._of.move_to_end(name)
        self._pages -= len(ghosts)
        traces = run.traces
        for local in range(start, len(traces)):
            ghosts[traces[local]] = ghosts.pop(traces[local], False) or local + 1 < len(traces) or run.followed
        self._pages += len(ghosts)
        while self._pages > self._limit:
            share = max(LEAST, self._limit // len(self._of))
            oldest = name if len(ghosts) > share else next(iter(self._of))
            self._of[oldest].popitem(last=False)
            self._pages -= 1
            if not self._of[oldest]:
                del self._of[oldest]

    def branch(self, root: bytes, tail: Run, tokens: bytes, known: int) -> int:
        """How many of a prompt's full pages other prompts had before it went its own way: `known` ones are in the tree,
        the last of them in `tail`. `known` where it does not: where the other prompt ended, it may only have grown."""
        ghosts = self._of.get(root)
        if not ghosts:
            return known
        trace = tail.traces[known - tail.first - 1] if known > tail.first else xxh3_64_intdigest(root)
        at, width, followed = known, tail.width, False
        while (at + 1) * width <= len(tokens):
            trace = xxh3_64_intdigest(tokens[at * width : (at + 1) * width], trace)
            found = ghosts.get(trace)
            if found is None:
                return at if followed else known
            at, followed = at + 1, found
        return known
