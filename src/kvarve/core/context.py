"""What all parts of a core share: its settings, time and counters, and who listens to what happens."""

from collections.abc import Callable

from kvarve.core.core_config import CoreConfig, Counters
from kvarve.core.tree.tree import Run

Heard = Callable[[Run, int, int], None]


class Observers:
    """By event, the methods that hear it. Observers are told of pages and requests; nothing is decided by them.

    `entered`, `left`: pages of a run at local positions (bits) enter a place, or leave it · `stored`: storage has pages
    of a run and a pool · `lacks`: storage does not have a page of a pool, by its key · `came`: pages [known, end) of a
    prompt under a root key are in the tree anew, the last in a run · `asked`: a request begins that is to use the pages
    up to a run · `resumed`: a request under a root key resumes at a boundary above 0, whose last page is in a run or
    above it · `waited`: a request has waited for storage for some seconds.
    """

    def __init__(self) -> None:
        self.entered: list[Heard] = []
        self.left: list[Heard] = []
        self.stored: list[Heard] = []
        self.lacks: list[Callable[[int, bytes], None]] = []
        self.came: list[Callable[[bytes, Run, int, int], None]] = []
        self.asked: list[Callable[[Run], None]] = []
        self.resumed: list[Callable[[bytes, Run, int], None]] = []
        self.waited: list[Callable[[float], None]] = []

    def add(self, observer: object) -> None:
        """From now on an observer hears the events of which it has a method."""
        for event, heard in vars(self).items():
            if (method := getattr(observer, event, None)) is not None:
                heard.append(method)


class Context:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.now = 0.0
        self.counters = Counters()
        self.tell = Observers()
