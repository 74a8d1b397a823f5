"""Which of several replicas gets a request: the one that has most of its prompt, unless it has much more work.

Pure: what a replica has is taken to be what it was sent. Prompts are bytes, cut into blocks whose names are chained, so
that a block stands for all of the prompt up to its end.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK_BYTES = 256
NAME_BYTES = 8
MOST_BLOCKS = 1 << 18  # remembered, about 64 MiB of prompts
MOST_OF_ONE = 1 << 12  # blocks of one prompt that are looked at: they tell its replica
MOST_WORK = 1.1  # times the mean of all replicas: one that has more gets no request for the sake of its pages


class PrefixRouter:
    """Remembers which blocks were sent to which replica; those not asked for longest are forgotten first."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # block: a bit for each replica

    def choose(self, salt: bytes, prompt: bytes, work: Sequence[float]) -> int:
        """The replica for a prompt. `work`: of each, in bytes of prompts. Prompts of different salts share no block."""
        most = MOST_WORK * sum(work) / len(work) + len(prompt)
        candidates = [each for each, done in enumerate(work) if done <= most]
        have = sum(1 << each for each in candidates)  # a bit for each that has the prompt so far
        blocks = [*_blocks(salt, prompt)]
        for block in blocks:
            if not (more := have & self._sent.get(block, 0)):
                break
            have = more
        chosen = min((each for each in candidates if have >> each & 1), key=lambda each: work[each])
        self._remember(blocks, chosen)
        return chosen

    def _remember(self, blocks: Sequence[bytes], replica: int) -> None:
        for block in reversed(blocks):  # the first ones are forgotten last, since the others are found through them
            self._sent[block] = self._sent.get(block, 0) | 1 << replica
            self._sent.move_to_end(block)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)


def _blocks(salt: bytes, prompt: bytes) -> Iterator[bytes]:
    """The names of a prompt's first whole blocks."""
    name = hashlib.blake2b(salt, digest_size=NAME_BYTES).digest()
    for at in range(0, min(len(prompt) // BLOCK_BYTES, MOST_OF_ONE) * BLOCK_BYTES, BLOCK_BYTES):
        name = hashlib.blake2b(name + prompt[at : at + BLOCK_BYTES], digest_size=NAME_BYTES).digest()
        yield name
