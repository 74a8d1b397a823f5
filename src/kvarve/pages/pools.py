"""What a model keeps per page, as rows of data. Words only: no tensor, no tree, no file is known here."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property

from kvarve.errors import ConfigError
from kvarve.pages.field_checks import require, require_types

# The bytes of one element, by the name that torch and safetensors give the type.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

BUFFER_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class Tier(IntEnum):
    """Where a page can be, ordered by distance from the compute."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


MEMORY_TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True)
class BufferSpec:
    """One tensor that a page of a pool holds, for example one layer's keys: its name, shape per page and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        require_types(self)
        which = f"buffer {self.name}:"
        require(self.dtype in DTYPE_BYTES, f"{which} dtype", f"one of {', '.join(DTYPE_BYTES)}", self.dtype)
        some = bool(self.shape) and min(self.shape) > 0
        require(some, f"{which} shape", "one side or more, each at least 1", self.shape)

    @property
    def layer(self) -> int:
        """The layer that reads it, from a name such as "layers.3.keys"; 0 for any other name."""
        first, _, rest = self.name.partition(".")
        number = rest.partition(".")[0]
        return int(number) if first == "layers" and number.isdecimal() else 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class HeadGroups:
    """The smallest parts in which a divided model's pages are stored, so that any number of ranks puts them together.

    `cuts`: for each buffer of a pool the axis of its heads, and the lengths along it that a group has of each section
    there, one after the other (of a convolution: queries, keys, values). A pool of one group is whole on every rank.
    """

    count: int
    cuts: tuple[tuple[int, tuple[int, ...]], ...]

    def shapes(self, buffers: tuple["BufferSpec", ...], groups: int) -> tuple["BufferSpec", ...]:
        """The buffers of a pool with this number of groups."""
        if self.count == 1:
            return buffers
        found = []
        for buffer, (axis, sections) in zip(buffers, self.cuts, strict=True):
            shape = (*buffer.shape[:axis], groups * sum(sections), *buffer.shape[axis + 1 :])
            found.append(replace(buffer, shape=shape))
        return tuple(found)


@dataclass(frozen=True)
class PoolSpec:
    """One kind of per-page state that is kept, found, copied and dropped together.

    `lookback` says how many pages before a boundary the layers still read: None all of them (attention), k a
    sliding window of `ceil((W - 1) / page_tokens)` pages, 1 a recurrent state. `in_place`: the engine overwrites
    the state while it computes, so a request resumes on a private copy. `replicated`: every rank holds the same
    bytes. `groups`: its pages are stored by head group, and None as each rank has them.
    """

    name: str
    buffers: tuple[BufferSpec, ...]
    lookback: int | None
    in_place: bool = False
    replicated: bool = False
    groups: HeadGroups | None = None

    def __post_init__(self) -> None:
        require_types(self)
        plain = self.name.isascii() and self.name.replace("-", "").replace("_", "").isalnum() and len(self.name) <= 32
        require(plain, "pool name", "1 to 32 letters, digits, '-' and '_'", self.name)
        which = f"pool {self.name}:"
        require(bool(self.buffers), f"{which} buffers", "at least one", self.buffers)
        back = self.lookback is None or self.lookback > 0
        require(back, f"{which} lookback", "None or at least 1 page", self.lookback)

    def offsets(self) -> tuple[int, ...]:
        """The byte at which each buffer starts in the page's payload, and last the payload's length."""
        starts, at = [], 0
        for buffer in self.buffers:
            starts.append(at)
            at += math.ceil(buffer.nbytes / BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        return (*starts, at)

    @cached_property
    def payload_bytes(self) -> int:  # asked for with every page that moves
        return self.offsets()[-1]

    def parts(self, rank: int, ranks: int) -> tuple[range, int]:
        """The parts of a page that a rank has, by which its records are named, and how many there are."""
        if self.groups is None:
            number = 0 if self.replicated else rank
            return range(number, number + 1), ranks
        mine = share(self.groups.count, rank, ranks)
        assert mine is not None, "pages are stored by group only where groups divide"
        return mine, self.groups.count


def share(count: int, rank: int, ranks: int) -> range | None:
    """A rank's part of `count` heads or columns: with more ranks than heads several ranks have the same head. None if
    they do not divide."""
    if count % ranks == 0:
        return range(rank * count // ranks, (rank + 1) * count // ranks)
    if ranks % count == 0:
        return range(rank * count // ranks, rank * count // ranks + 1)
    return None


def check_grid(page_tokens: int, chunk_tokens: int) -> None:
    """ConfigError unless a chunk of the prefill grid is a whole number of pages."""
    require(page_tokens > 0, "page_tokens", "at least 1", page_tokens)
    require(chunk_tokens > 0, "chunk_tokens", "at least 1", chunk_tokens)
    if chunk_tokens % page_tokens:
        raise ConfigError(
            f"a page of {page_tokens} tokens does not fit the model's prefill grid of {chunk_tokens}: its size must "
            f"divide {chunk_tokens}"
        )


def window_lookback(window_tokens: int, page_tokens: int) -> int:
    """Pages before a boundary that a sliding window of `window_tokens` still reads.

    The token being computed is inside its own window, hence the -1.
    """
    return max(1, math.ceil((window_tokens - 1) / page_tokens))


# How buffers lie in a page, and the format of the record around it (`records.record`); to be raised whenever a page
# that is stored would be read otherwise.
LAYOUT_FORMAT = "kvarve-page/2"


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that decides what the numbers in a page mean; two models share pages only if all of it is equal.

    `identity.py` makes it of a model in memory; the cache adds among how many ranks the model is divided.
    """

    architecture: str
    weights: str  # fingerprint of the weights' bytes
    dtype: str
    page_tokens: int
    chunk_tokens: int  # the prefill grid: other chunks round differently
    pools: tuple[PoolSpec, ...]
    layout: str = LAYOUT_FORMAT
    config: str = ""  # digest of all that the model's config says of how it computes
    ranks: int = 1  # a rank of eight holds other heads than that rank of four, and adds up in another order
    sharding: str = ""  # how the model is divided among the ranks, where that is not by whole attention heads
    adapters: str = ""  # those at work, and how
    quantisation: str = ""
    numerics: str = ""  # processors, libraries, kernels and settings that change the last bit

    def __post_init__(self) -> None:
        require_types(self)
        check_grid(self.page_tokens, self.chunk_tokens)
        require(self.ranks > 0, "ranks", "at least 1", self.ranks)
        names = [pool.name for pool in self.pools]
        require(len({*names}) == len(names) > 0, "pools", "at least one, each with a name of its own", names)

    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever any field differs: the namespace of all of this model's keys and pages.

        Where pages are stored by head group they are those of the whole model, whatever the number of ranks.
        """
        fields = asdict(self._whole() if self.by_groups else self)
        for pool in fields["pools"] if not self.by_groups else ():
            del pool["groups"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    @property
    def by_groups(self) -> bool:
        """Whether pages are stored by head group, for any number of ranks."""
        return all(pool.groups is not None for pool in self.pools)

    def _whole(self) -> "ModelIdentity":
        """The identity of the whole model's pages."""
        pools = [
            replace(pool, buffers=pool.groups.shapes(pool.buffers, pool.groups.count))
            for pool in self.pools
            if pool.groups is not None
        ]
        return replace(self, ranks=1, pools=tuple(pools))

    def __str__(self) -> str:
        extra = {"adapters": self.adapters, "quantisation": self.quantisation, "sharding": self.sharding}
        if self.ranks > 1 and not self.by_groups:
            extra["ranks"] = str(self.ranks)
        return (
            f"{self.architecture} {self.dtype}, weights {self.weights[:12]}, config {self.config[:12] or 'unknown'}, "
            f"pages of {self.page_tokens}, grid {self.chunk_tokens}, {self.layout}"
            + "".join(f", {word} {value}" for word, value in extra.items() if value)
        )
