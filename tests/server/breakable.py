"""`kvarve`, with replicas that can be broken: SIGUSR1 has a replica's engine meet a bug in its cache.

A replica is killed after `HUNG_S` without an answer; the front's other times are those of every server.
"""

import signal
import sys
from types import FrameType

from kvarve.cli import main
from kvarve.engine.engine import Engine
from kvarve.engine.turns import Call
from kvarve.server import replicas
from kvarve.server.settings import Settings

HUNG_S = 10.0

serve = replicas._serve


def bug() -> None:
    raise AssertionError("a bug")


def serve_until_broken(number: int, settings: Settings, parent: int) -> None:
    start = Engine.start

    def started(engine: Engine) -> Engine:
        def on_signal(number: int, frame: FrameType | None) -> None:
            engine._calls.put(Call(None, bug))
            engine.cache.wake()

        signal.signal(signal.SIGUSR1, on_signal)
        return start(engine)

    Engine.start = started  # type: ignore[assignment, method-assign]
    serve(number, settings, parent)


if __name__ == "__main__":
    replicas._serve, replicas.HUNG_S = serve_until_broken, HUNG_S
    sys.exit(main())
