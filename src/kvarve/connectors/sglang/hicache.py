"""What HiCache, SGLang's hierarchical cache, asks of a storage: names, boundaries, and pages as bytes.

`hicache_storage` is the class that SGLang loads; it turns SGLang's words into these. Nothing here imports SGLang.
"""

import ctypes
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvarve.connectors.checkpoint import local_files, weights_fingerprint
from kvarve.connectors.sglang.objects import Objects
from kvarve.errors import ConfigError
from kvarve.pages import boundaries
from kvarve.pages.keys import KEY_BYTES
from kvarve.records.record import FORMAT
from kvarve.records.seals import CHECKSUM, Seal
from kvarve.transfer.storage_road import Kind

log = logging.getLogger(__name__)

KV = "kv"
MAMBA = "mamba"
DRAFT = "draft"  # the beginning of the names of pools of a draft model

PIECES_MOST = 8  # of a page that is copied piece by piece; of more, SGLang makes a flat page


# --- identity and names


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that serve a model, and whether all tensor ranks hold the same KV (MLA)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    replicated: bool = False

    @property
    def size(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size

    def number(self, *, sharded: bool) -> int:
        """The rank in a page's name; of a pool that tensor ranks hold alike, that of their first."""
        tp_rank = self.tp_rank if sharded or not self.replicated else 0
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + tp_rank


@dataclass(frozen=True)
class Identity:
    """Everything that decides what the numbers of a page mean, but for how its pool lies in memory."""

    model: str
    weights: str
    numerics: str
    ranks: tuple[int, int, int, bool]  # tensor, pipeline and context parallel sizes; replicated
    format: str = f"kvarve-hicache/1 record/{FORMAT}"

    def fingerprint(self) -> bytes:
        """The label of the model's objects."""
        text = json.dumps([self.format, self.model, self.weights, self.numerics, self.ranks], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    def __str__(self) -> str:
        tp, pp, cp, _ = self.ranks
        return f"SGLang {self.model}, weights {self.weights[:12]}, tp {tp}, pp {pp}, cp {cp}"


def page_key(key: str) -> bytes:
    """32 bytes for SGLang's name of a page, which is the chained SHA-256 of its tokens, salt and adapter."""
    if len(key) == 2 * KEY_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return hashlib.sha256(b"kvarve-hicache-key" + key.encode()).digest()


def checkpoint(model: str, revision: str | None = None, *, whole: bool = False) -> str:
    """A fingerprint of the config and weights of a model or an adapter: of a folder, or of one in the local cache of
    Hugging Face.

    ConfigError: they are not on this machine.
    """
    folder = local_files(model, revision)
    configs = [folder / name for name in ("config.json", "adapter_config.json")]
    read = b"".join(config.read_bytes() for config in configs if config.is_file())
    return hashlib.sha256(read + weights_fingerprint(folder, whole=whole).encode()).hexdigest()


# --- the pages of a host pool, as bytes


class HostPool(Protocol):
    """What is used of a host pool (`sglang.srt.mem_cache.pool_host`). An index is that of a page's first token."""

    page_size: int
    layout: str

    def get_data_page(self, index: int, flat: bool = True) -> Tensor: ...
    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None: ...
    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]] | None: ...


# Attributes of a host pool that say what its bytes are, where it has them.
_SHAPE = (
    *("dtype", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_lora_rank"),
    *("qk_rope_head_dim", "kv_cache_dim", "index_head_dim", "indexer_dtype", "indexer_page_stride_size"),
    *("quant_block_size", "item_bytes", "size_per_token", "num_mamba_layers", "conv_dtype", "conv_state_shapes"),
    *("temporal_dtype", "temporal_state_shape", "storage_format_tag"),
)


class HostPages:
    """Reads and writes whole pages of one host pool.

    A page that lies in a few pieces (the page-first layouts) is copied from and to them, without a tensor between. Any
    other is gathered by the pool itself into a flat page. Which of both decides the order of the bytes, so it is part
    of `shape`. ConfigError: the pool offers neither.
    """

    def __init__(self, pool: HostPool, *, flat: bool = False) -> None:
        self.pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        flat_page, no_flat = _flat_page(pool)
        flat_bytes = None if flat_page is None else flat_page.nbytes
        self.dtype = None if flat_page is None else flat_page.dtype
        sizes = [] if flat else _piece_sizes(pool, self.page_tokens)
        self.in_pieces = 0 < len(sizes) <= PIECES_MOST and (flat_bytes is None or sum(sizes) == flat_bytes)
        if not self.in_pieces and flat_bytes is None:
            raise ConfigError(
                f"the pages of the host pool {type(pool).__name__} cannot be accessed in the layout {pool.layout!r} "
                f"({no_flat}): choose --hicache-mem-layout page_first or page_first_direct"
            )
        self.payload_bytes = sum(sizes) if self.in_pieces else flat_bytes or 0
        known = {name: str(getattr(pool, name)) for name in _SHAPE if hasattr(pool, name)}
        self.shape = {
            "pool": type(pool).__name__,
            "layout": str(pool.layout),
            "page_tokens": str(self.page_tokens),
            "pieces": str(sizes if self.in_pieces else [self.payload_bytes]),
            "order": "pieces" if self.in_pieces else "flat",
            **known,
        }

    def located(self, indices: Sequence[int]) -> "LocatedPages":
        """The pages at these tokens, `page_tokens` of them a page."""
        return LocatedPages(self, indices)


class LocatedPages:
    """Pages of a batch, while SGLang lends them."""

    def __init__(self, pages: HostPages, indices: Sequence[int]) -> None:
        self._pages = pages
        self._first = indices[:: pages.page_tokens]
        self._pieces: list[list[tuple[int, int]]] = []
        if pages.in_pieces and indices:
            meta = pages.pool.get_page_buffer_meta(torch.tensor(indices, dtype=torch.int64))
            assert meta is not None
            addresses, sizes = meta
            each = len(addresses) // len(self._first)
            found = [*zip(addresses, sizes, strict=True)]
            self._pieces = [found[at : at + each] for at in range(0, len(found), each)]
            assert all(sum(size for _, size in piece) == pages.payload_bytes for piece in self._pieces)

    def take_up(self, i: int, payload: memoryview) -> None:
        """Copy page `i` of the batch from the host pool."""
        if not self._in_pieces(i, payload, ctypes.memmove):
            copy_from(self._pages.pool.get_data_page(self._first[i], flat=True), payload)

    def put_down(self, i: int, payload: memoryview) -> None:
        """Copy page `i` of the batch to the host pool."""
        if not self._in_pieces(i, payload, lambda at, address, size: ctypes.memmove(address, at, size)):
            assert self._pages.dtype is not None
            page = torch.frombuffer(payload, dtype=torch.uint8).view(self._pages.dtype)
            self._pages.pool.set_from_flat_data_page(self._first[i], page)

    def _in_pieces(self, i: int, payload: memoryview, copy: Callable[[int, int, int], object]) -> bool:
        """Copy a page that lies in pieces, or has no bytes; False: it is a flat page."""
        if self._pages.in_pieces and payload.nbytes:
            at = int(np.frombuffer(payload, np.uint8).ctypes.data)
            for address, size in self._pieces[i]:
                copy(at, address, size)
                at += size
        return self._pages.in_pieces or not payload.nbytes


def copy_from(page: Tensor, payload: memoryview) -> None:
    """Copy a tensor's bytes to a payload of the same size."""
    raw = page.detach().contiguous().view(torch.uint8).reshape(-1)
    np.copyto(np.frombuffer(payload, np.uint8), raw.numpy())


def copy_to(page: Tensor, payload: memoryview) -> None:
    """Copy a payload to a contiguous tensor of the same size."""
    page.view(torch.uint8).reshape(-1).copy_(torch.frombuffer(payload, dtype=torch.uint8))


def _flat_page(pool: HostPool) -> tuple[Tensor | None, str]:
    """The first flat page, of which only the form counts; None, and why, if the pool makes none."""
    try:
        return pool.get_data_page(0, flat=True), ""
    except Exception as e:  # noqa: BLE001  each pool refuses in its own way
        return None, f"{type(e).__name__}: {e}"


def _piece_sizes(pool: HostPool, page_tokens: int) -> list[int]:
    """The sizes of the pieces in which a page lies; none if the pool does not tell."""
    try:
        meta = pool.get_page_buffer_meta(torch.arange(page_tokens, dtype=torch.int64))
    except Exception:  # noqa: BLE001  as above
        return []
    return [int(size) for size in meta[1]] if meta else []


# --- what a lookup finds


class Found(NamedTuple):
    """What storage has of a prompt. `pages`: the deepest boundary, `legal` all of them, ascending; `by_pool`: the
    deepest boundary of each pool that was asked, whatever the others have."""

    pages: int
    by_pool: dict[str, int]
    legal: list[int]


NOTHING = Found(0, {}, [])


class Asked(NamedTuple):
    """A pool in a lookup. `lookback`: the pages before a boundary that it has to bring, None for all of them."""

    pool: str
    lookback: int | None


def resumable(asked: Sequence[Asked], found: Sequence[Sequence[bool]]) -> Found:
    """The boundaries at which every pool may resume; the first pool's chain bounds those of all others."""
    limit = len(found[0])
    pages = [boundaries.of(i for i, there in enumerate(each) if there) for each in found]
    chain = boundaries.leading(pages[0])
    own = [boundaries.legal(here, pool.lookback, min(limit, chain)) for pool, here in zip(asked, pages, strict=True)]
    legal = boundaries.shared(own, limit)
    return Found(
        boundaries.deepest(legal),
        {pool.pool: boundaries.deepest(each) for pool, each in zip(asked, own, strict=True)},
        [b for b in boundaries.members(legal) if b],
    )


# --- the pages of a model in a storage


@dataclass
class Pool:
    """A host pool and the kind of its objects."""

    pages: HostPages
    kind: Kind


@dataclass
class Pages:
    """A model's pages in a storage, by pool; used by several threads once its pools are known.

    Nothing here raises but for a bug; a batch whose numbers do not fit each other is refused and counted.
    """

    objects: Objects
    label: bytes
    ranks: Ranks
    pools: dict[str, Pool] = field(default_factory=dict)
    seal: Seal = CHECKSUM

    def register(self, name: str, pool: HostPool, *, flat: bool = False) -> None:
        """ConfigError: the pool's pages cannot be read as bytes."""
        pages = HostPages(pool, flat=flat)
        # SGLang's writers: state is divided among tensor ranks even where KV is not, and so is a draft's KV of heads.
        sharded = name == MAMBA or (name.startswith(DRAFT) and hasattr(pool, "head_num"))
        shape = json.dumps(pages.shape, sort_keys=True).encode()
        namespace = hashlib.sha256(self.label + shape).digest()
        rank = self.ranks.number(sharded=sharded)
        kind = Kind(namespace, name, pages.payload_bytes, rank, self.ranks.size, self.seal)
        self.pools[name] = Pool(pages, kind)
        how = "in pieces" if pages.in_pieces else "as flat pages"
        log.info("kvarve keeps pool %s: %d bytes a page, copied %s", name, pages.payload_bytes, how)

    def lookup(self, keys: Sequence[str], asked: Sequence[Asked]) -> Found:
        """Where a prompt with these page keys may resume; `asked` begins with the KV pool."""
        known = [pool for pool in asked if pool.pool in self.pools]
        if not keys or len(known) < len(asked):  # a pool that was never registered has nothing stored
            return NOTHING
        page_keys = [page_key(key) for key in keys]
        found = self.objects.exists([self.pools[pool.pool].kind for pool in asked], [page_keys] * len(asked))
        return NOTHING if found is None else resumable(asked, found)

    def present(self, pool: str, keys: Sequence[str]) -> list[bool]:
        """Which pages of one pool are there."""
        if pool not in self.pools:
            return [False] * len(keys)
        found = self.objects.exists([self.pools[pool].kind], [[page_key(key) for key in keys]])
        return [False] * len(keys) if found is None else found[0]

    def whole_groups(self, pool: str, keys: Sequence[str], group_pages: int, block_pages: int) -> int:
        """The KV pages that a pool's leading whole groups cover; each has `group_pages` keys, for `block_pages`."""
        if group_pages < 1:
            return 0
        there = self.present(pool, keys)
        whole = [
            all(there[at : at + group_pages]) for at in range(0, len(keys) // group_pages * group_pages, group_pages)
        ]
        return (whole + [False]).index(False) * block_pages

    def load(self, pool: str, keys: Sequence[str], indices: Sequence[int] | None) -> list[bool]:
        """Read pages into the host pool at these token indices."""
        return self._move(pool, keys, indices, lambda kind, of, at: self.objects.load(kind, of, at.put_down))

    def store(self, pool: str, keys: Sequence[str], indices: Sequence[int] | None) -> list[bool]:
        """Store pages from the host pool at these token indices."""
        return self._move(pool, keys, indices, lambda kind, of, at: self.objects.store(kind, of, at.take_up))

    def _move(
        self,
        name: str,
        keys: Sequence[str],
        indices: Sequence[int] | None,
        move: Callable[[Kind, Sequence[bytes], LocatedPages], list[bool]],
    ) -> list[bool]:
        pool = self.pools.get(name)
        if pool is None or indices is None or len(indices) != len(keys) * pool.pages.page_tokens:
            log.error("pool %s: %s token slots do not hold %d pages", name, indices and len(indices), len(keys))
            return [False] * len(keys)
        return move(pool.kind, [page_key(key) for key in keys], pool.pages.located(indices))
