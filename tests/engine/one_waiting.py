"""A node with one of several ranks, whose device waits for another one: `one_waiting.py NODE NODES ADDRESS END`.

It says `ready` when all are about to compute. END: what the last rank does. It `waits` for ever as the others do,
`fails`, or `lags`: it computes on for a moment after the others have computed and left.
"""

import sys
import time

from kvarve.engine.ranks import Ranks, started

DEADLINE_S = 10.0

if __name__ == "__main__":
    node, nodes, address, end = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    where = {"nodes": nodes, "node": node, "address": address, "deadline_s": DEADLINE_S}
    with started(print, None, nodes, **where) as (place, listener):  # type: ignore[arg-type]
        ranks = Ranks(place, place.meet("waiting", listener), watched=True)
        with ranks.ended():
            ranks.meet()
            print("ready", flush=True)
            if node == nodes - 1 and end == "fails":
                raise RuntimeError("no memory is left on its device")
            with ranks.computing():
                time.sleep(0.5 * (node == nodes - 1) if end == "lags" else 600)
