"""Makes a trace of conversations, as the one in docs/ is: python -m tests.sim.conversations > trace.jsonl

Every conversation begins with one of a few system prompts and grows by a question and an answer a turn. Most end
after a few turns; the lines are of the format of Mooncake's traces.
"""

import json
import random
from collections.abc import Iterator
from itertools import count
from typing import Any

BLOCK = 512  # tokens of an id
SYSTEMS = (3, 1)  # blocks of each system prompt
AT_ONCE = 6  # conversations side by side
AGAIN = 0.7  # the chance that a conversation goes on after a turn


def conversations(requests: int = 60, seed: int = 7) -> Iterator[dict[str, Any]]:
    """The lines of a trace."""
    dice, fresh, now = random.Random(seed), count(), 0
    systems = [[next(fresh) for _ in range(blocks)] for blocks in SYSTEMS]
    talks: list[list[int]] = []
    for _ in range(requests):
        if len(talks) < AT_ONCE:
            talks.append([*dice.choice(systems)])
        talk = talks.pop(dice.randrange(len(talks)))
        talk += [next(fresh) for _ in range(dice.randint(1, 4))]
        length = len(talk) * BLOCK + dice.randrange(1, BLOCK)
        yield {"timestamp": now, "input_length": length, "output_length": dice.randint(20, 400), "hash_ids": [*talk]}
        if dice.random() < AGAIN:
            talks.append(talk)
        now += dice.randint(200, 3000)


if __name__ == "__main__":
    for row in conversations():
        print(json.dumps(row))
