"""A node with one of several ranks, whose device waits for another one.

    one_waiting.py NODE NODES ADDRESS ODD END [GPU]

It says `ready` when all are about to compute. END: what the rank ODD does. It `waits` for ever, as the others do (on a
GPU these wait for it within a sum), `fails`, or `lags`: it computes for a moment after the others have left. Or it
fails and `leaves` a sum, for which it waits when it gives back its device's memory, or `closes` in vain what nccl has.
Or what all do: they `work` for some seconds, or `compile` before their sum, for longer than the deadline.
"""

import sys
import time
from contextlib import suppress

import torch
import torch.distributed as dist

from kvarve.reference.engine.rank_processes import Ranks, started

DEADLINE_S = 5.0


class Left:
    """The event of a device's last sum."""

    def __init__(self, made: bool = False) -> None:
        self.made = made

    def query(self) -> bool:
        return self.made


if __name__ == "__main__":
    node, nodes, address, odd, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    device = "cuda" if sys.argv[6:] == ["GPU"] else "cpu"
    where = {"nodes": nodes, "node": node, "address": address, "deadline_s": DEADLINE_S}
    with started(print, None, nodes, **where) as (place, listener):  # type: ignore[arg-type]
        ranks = Ranks(place, place.meet("waiting", listener), device, watched=True)
        with ranks.ended():
            with ranks.computing():
                ranks.add_up(torch.ones(1, device=device))  # the first one lets nccl's ranks meet
            ranks.meet()
            print("ready", flush=True)
            if node == odd and end == "fails":
                raise RuntimeError("no memory is left on its device")
            if node == odd and end == "leaves":
                ranks._summed = Left()  # type: ignore[assignment]
                with suppress(RuntimeError), ranks.computing():
                    raise RuntimeError("no memory is left on its device")
                ranks.group.fail("RuntimeError: no memory is left on its device")
                time.sleep(600)
            if node == odd and end == "closes":
                ranks._summed = Left(made=True)  # type: ignore[assignment]
                dist.destroy_process_group = lambda: time.sleep(600)
                raise RuntimeError("no memory is left on its device")
            with ranks.computing():
                if end == "work":
                    for _ in range(30):
                        time.sleep(0.1)
                elif end == "compile":
                    time.sleep(2 * DEADLINE_S)
                    ranks.add_up(torch.ones(1, device=device))
                elif device == "cuda" and node != odd:
                    ranks.add_up(torch.ones(1, device=device))
                else:
                    time.sleep(0.5 * (node == odd) if end == "lags" else 600)
