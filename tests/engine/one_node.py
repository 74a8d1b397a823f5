"""A node with one of two ranks: `one_node.py NODE ADDRESS OPTIONS`; prints what `compare` finds, as JSON."""

import json
import sys

from one_of_ranks import compare

from kvarve.reference.engine.rank_processes import started

if __name__ == "__main__":
    node, address, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    with started(compare, options, 2, nodes=2, node=node, address=address) as (place, listener):
        print(json.dumps(compare(options, place, listener)))
