"""A node with one of two ranks, whose device waits for the other one for ever: `one_waiting.py NODE ADDRESS END`.

Rank 0 says `ready` when both are about to compute. END: rank 1 `waits` as rank 0 does, or `fails`.
"""

import sys
import time

from kvarve.engine.ranks import Ranks, started

DEADLINE_S = 2.0

if __name__ == "__main__":
    node, address, end = int(sys.argv[1]), *sys.argv[2:]
    with started(print, None, 2, nodes=2, node=node, address=address, deadline_s=DEADLINE_S) as (place, listener):
        ranks = Ranks(place, place.meet("waiting", listener), watched=True)
        with ranks.ended():
            ranks.meet()
            print("ready", flush=True)
            if node and end == "fails":
                raise RuntimeError("no memory is left on its device")
            with ranks.computing():
                time.sleep(600)
