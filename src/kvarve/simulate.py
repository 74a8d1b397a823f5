"""What does memory buy? Replays a trace of prompts through the product's own core, without a model or a byte of KV.

Transfers are instant: a copy that the core asks for is good at the next step, and requests follow one another in the
trace's order. So its figures show the effect of the tree, the eviction order and the memory sizes, but not of waiting.

A trace is JSON lines, plain or gzip: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id
per block of `block_tokens` tokens, of which the last block may be short and may lack its id. An id stands for its
block *and all blocks before it*. Only prompts are cached: traces do not have the tokens of answers.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from json import loads
from pathlib import Path
from typing import IO, Annotated, Any, cast

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvarve.config import NO_HOST, cut_memory, spacing, split
from kvarve.core.cache import Core
from kvarve.core.effects import Copy, Ended, Hurry, Page, Probe, Transfer
from kvarve.core.policies import WAIT_COMPLETE, Policies
from kvarve.core.settings import CoreConfig, Slots
from kvarve.errors import ConfigError
from kvarve.keys import TOKEN_BYTES, object_name, root_key
from kvarve.memory.record import record_bytes
from kvarve.model import BufferSpec, PoolSpec, Tier, window_lookback
from kvarve.options import FLAT, ConfigFile
from kvarve.reports import check_file, write_json
from kvarve.sizes import Size, format_size
from kvarve.storage.base import LruIndex

# Of `Policies`: a replay waits for all pages, no copy of it takes time, and no byte of it can be wrong.
MEANINGLESS = ("prefetch_policy", "prefetch_base_s", "prefetch_per_ki_token_s", "storage_deadline_s", "verify_host")
MOST_TOKENS = 1 << 27  # in one prompt: a longer one is a damaged line, not a request

Advance = Callable[[int, int], None]  # bytes of the trace file that are done, and its size


@dataclass(frozen=True)
class SimulationConfig:
    """A model as bytes, and the memory that it gets. Sizes in bytes; ConfigError for values that cannot work."""

    device_memory: Size
    """for pages on the device, such as 40GiB"""
    host_memory: Size = Size(0)
    """for pages that left the device, 0 for none"""
    storage_memory: Size = Size(0)
    """for pages in storage, 0 for none"""
    kv_bytes_per_token: Size = Size(128 << 10)  # Llama 3 8B: 32 layers, 8 heads of 128, keys and values, 2 bytes each
    """bytes of attention KV per token, 0 for none"""
    state_bytes: Size = Size(0)
    """of a recurrent model's state after any token, 0 for none"""
    window_tokens: int = 0
    """length of a sliding window, 0 for none"""
    window_bytes_per_token: Size = Size(0)
    """that the window keeps for each of its last tokens"""
    block_tokens: int = 512
    """tokens that one id stands for"""
    page_tokens: int = 512
    """tokens of a page"""
    chunk_tokens: int = 0
    """the prefill grid; 0: the page size"""
    policies: Annotated[Policies, FLAT] = Policies()

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"{name.replace('_', ' ')} cannot be below zero, and is {value}")
        for name in MEANINGLESS:
            if getattr(self.policies, name) != getattr(Policies, name):
                raise ConfigError(
                    f"a replay does not depend on the setting {name}, as its copies are instant: leave it out"
                )
        if not self.block_tokens or not self.page_tokens:
            raise ConfigError("a block and a page have at least one token each")
        if self.grid % self.page_tokens:
            raise ConfigError(f"chunks of {self.grid} tokens do not consist of pages of {self.page_tokens}")
        if bool(self.window_tokens) != bool(self.window_bytes_per_token):
            raise ConfigError("a window needs both: its tokens and the bytes that it keeps per token")
        if not self.pools():
            raise ConfigError("nothing to cache: give KV bytes per token, a window, or the bytes of a state")
        if self.storage_memory and not self.host_memory:
            raise ConfigError(NO_HOST)
        self.core()

    @property
    def grid(self) -> int:
        return self.chunk_tokens or self.page_tokens

    @property
    def spacing(self) -> int:
        """The distance in tokens between windows or states for which memory is divided."""
        asked, every = self.policies.tokens_per_snapshot, self.policies.snapshot_every
        return spacing(self.pools(), self.page_tokens, self.grid, asked, every)

    def pools(self) -> tuple[PoolSpec, ...]:
        """The model's pools."""
        rows = (
            ("kv", self.kv_bytes_per_token * self.page_tokens, None),
            (
                "window",
                self.window_bytes_per_token * self.page_tokens,
                window_lookback(self.window_tokens, self.page_tokens),
            ),
            ("state", self.state_bytes, 1),
        )
        return tuple(
            PoolSpec(name, (BufferSpec("bytes", (size,), "uint8"),), lookback, in_place=name == "state")
            for name, size, lookback in rows
            if size
        )

    def core(self) -> CoreConfig:
        """The settings of the core, with memory turned into slots as the real cache does it."""
        shape, slots = (self.pools(), self.page_tokens, self.grid), Slots()
        for tier, memory in {Tier.DEVICE: self.device_memory, Tier.HOST: self.host_memory}.items():
            if memory or tier is Tier.DEVICE:
                records, asked = tier is Tier.HOST, self.policies.tokens_per_snapshot
                division = split(memory, *shape, records=records, what=tier.name.lower(), per_snapshot=self.spacing)
                slots[tier] = (None if asked else cut_memory(memory, *shape, records=records)) or division
        return CoreConfig(
            shape[0], slots, self.page_tokens, self.grid, storage=bool(self.storage_memory), policies=self.policies
        )


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace. `ids` may lack the id of a last block that is not full."""

    timestamp_ms: float
    input_length: int
    output_length: int
    ids: list[int]


@dataclass
class SimulationReport:
    """The result of a replay. `infinite_hit_tokens`: the hits of a cache of full blocks that never evicts."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys((tier.name.lower() for tier in Tier), 0))
    infinite_hit_tokens: int = 0
    cost: float = 0.0  # of computing all prompts, in pages at a prompt's beginning
    saved_cost: float = 0.0  # of the pages that hits saved
    unique_blocks: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    uncached_pages: int = 0
    stored_bytes: int = 0
    used_bytes: int = 0  # of pages from storage that a request resumed from
    paused_requests: int = 0  # while storing paused, since it did not pay

    @property
    def hit_rate(self) -> float:
        """Tokens found in any tier, of all prompt tokens."""
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)

    @property
    def infinite_hit_rate(self) -> float:
        return self.infinite_hit_tokens / max(1, self.prompt_tokens)

    @property
    def saved_rate(self) -> float:
        return self.saved_cost / max(1.0, self.cost)

    def as_json(self) -> dict[str, Any]:
        rates = ("hit_rate", "infinite_hit_rate", "saved_rate")
        return asdict(self) | {name: getattr(self, name) for name in rates}


# --- the trace


def read_trace(path: Path, block_tokens: int, advance: Advance = lambda done, size: None) -> Iterator[TraceRequest]:
    """The requests of a trace file, one at a time. ConfigError names a line that is not a request."""
    line, before, found = 0, 0.0, False
    rests_on: dict[int, int | None] = {}  # by id: the block before it, which must always be the same
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            lines = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            for text in lines:
                line += 1
                if text.strip():
                    request = _request(text, block_tokens)
                    if request.timestamp_ms < before:
                        raise ValueError("it happened before the line above: sort the trace by timestamp")
                    for last, each in zip([None, *request.ids], request.ids, strict=False):
                        if rests_on.setdefault(each, last) != last:
                            raise ValueError(f"hash id {each} follows another block here than in a line above")
                    before, found = request.timestamp_ms, True
                    yield request
                    advance(raw.tell(), size)
    except (OSError, EOFError, zlib.error) as e:
        after = f" after line {line}" if line else ""
        raise ConfigError(f"trace {path}: cannot be read{after}: {getattr(e, 'strerror', None) or e}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"trace {path}, line {line}: {e}") from e
    if not found:
        raise ConfigError(f"trace {path} holds no requests")


def _request(text: bytes, block_tokens: int) -> TraceRequest:
    """Parse one line of a trace; ValueError if it is not a request."""
    try:
        row = loads(text)
    except ValueError:
        raise ValueError("not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if missing := [name for name in ("timestamp", "input_length", "output_length", "hash_ids") if name not in row]:
        raise ValueError(f"no {', '.join(missing)}")
    timestamp, tokens, output, ids = row["timestamp"], row["input_length"], row["output_length"], row["hash_ids"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp < 2**63:
        raise ValueError(f"timestamp is {timestamp!r}, not milliseconds")
    if type(tokens) is not int or not 0 < tokens <= MOST_TOKENS:
        raise ValueError(f"input_length is {tokens!r}, not a number of tokens")
    if type(output) is not int or output < 0:
        raise ValueError(f"output_length is {output!r}, not a number of tokens")
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        raise ValueError("hash_ids is not a list of whole numbers")
    full, rest = divmod(tokens, block_tokens)
    if len(ids) not in (full, full + (rest > 0)):
        raise ValueError(f"{len(ids)} hash_ids do not stand for {tokens} tokens in blocks of {block_tokens}")
    return TraceRequest(timestamp, tokens, output, ids)


class Prompts:
    """Makes packed tokens from ids: every block is one token of its own, repeated."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._token: dict[int, bytes] = {}  # by id: ids may be wider than tokens are
        self._tokens = 0

    def packed(self, request: TraceRequest) -> bytes:
        rest = request.input_length - len(request.ids) * self._block_tokens
        blocks = [self._of(each) * self._block_tokens for each in request.ids]
        if rest > 0:  # the short last block without an id: no other prompt has it
            blocks.append(self._fresh() * rest)
        return b"".join(blocks)[: request.input_length * TOKEN_BYTES]

    def _of(self, id_: int) -> bytes:
        token = self._token.get(id_)
        if token is None:
            token = self._token[id_] = self._fresh()
        return token

    def _fresh(self) -> bytes:
        self._tokens += 1
        return self._tokens.to_bytes(TOKEN_BYTES, "little")


class Infinite:
    """The hits of a cache of full blocks that never evicts, from the ids alone, without a core."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.seen: set[int] = set()

    def hit(self, request: TraceRequest) -> int:
        """Tokens of the request that earlier requests had; remembers its blocks."""
        full = request.ids[: request.input_length // self._block_tokens]
        known = next((at for at, each in enumerate(full) if each not in self.seen), len(full))
        self.seen.update(full[known:])
        return known * self._block_tokens


# --- the replay


class InstantTransfers:
    """Transfers that take no time, and a storage of names alone with LRU eviction."""

    def __init__(self, pools: tuple[PoolSpec, ...], storage_bytes: int) -> None:
        self._names = [pool.name for pool in pools]
        self._payloads = [pool.payload_bytes for pool in pools]
        self._records = [record_bytes(pool.payload_bytes) for pool in pools]
        self.storage = LruIndex(storage_bytes)
        self.moved_bytes: dict[str, int] = {}

    def answer(self, effect: Transfer) -> Ended:
        if isinstance(effect, Probe):
            return Ended(effect.op, self._there([self._name(effect.root, page) for page in effect.pages]))
        sizes, good = self._payloads, (1 << len(effect.pages)) - 1
        if Tier.STORAGE in (effect.source, effect.target):
            sizes = self._records
            good = self._store(effect) if effect.target is Tier.STORAGE else self._fetch(effect)
        edge = f"{effect.source.name}_to_{effect.target.name}".lower()
        moved = sum(sizes[page.pool] for i, page in enumerate(effect.pages) if good >> i & 1)
        self.moved_bytes[edge] = self.moved_bytes.get(edge, 0) + moved
        return Ended(effect.op, good)

    def _name(self, root: bytes, page: Page) -> str:
        return object_name(root, page.key, self._names[page.pool])

    def _there(self, names: list[str]) -> int:
        return sum(1 << i for i, name in enumerate(names) if name in self.storage.entries)

    def _fetch(self, copy: Copy) -> int:
        names = [self._name(copy.root, page) for page in copy.pages]
        self.storage.touch(names)
        return self._there(names)

    def _store(self, copy: Copy) -> int:
        """As a storage backend does it: an object that exists is kept, and no page evicts one of its own batch."""
        good, mine = 0, dict[str, None]()
        for i, page in enumerate(copy.pages):
            name, size = self._name(copy.root, page), self._records[page.pool]
            if name not in self.storage.entries:
                victims = self.storage.victims(size, mine)
                if victims is None:
                    continue
                for victim in victims:
                    self.storage.drop(victim)
                self.storage.evicted += len(victims)
                self.storage.add(name, size)
                mine[name] = None
            good |= 1 << i
        self.storage.touch([*mine])
        return good


def replay(
    trace_path: str | Path,
    config: SimulationConfig,
    *,
    limit: int | None = None,
    advance: Advance = lambda done, size: None,
) -> SimulationReport:
    """Run a trace, or its first `limit` requests, through a new core; ConfigError if it is not a trace."""
    return replayed(islice(read_trace(Path(trace_path), config.block_tokens, advance), limit), config)


def replayed(requests: Iterable[TraceRequest], config: SimulationConfig) -> SimulationReport:
    """Run requests, in the order of their time, through a new core."""
    core, now = Core(config.core()), 0.0

    def step() -> None:
        core.step([transfers.answer(each) for each in core.take() if not isinstance(each, Hurry)], now)

    transfers = InstantTransfers(core.pools, config.storage_memory)
    prompts, infinite = Prompts(config.block_tokens), Infinite(config.block_tokens)
    cost = config.policies.cost(config.page_tokens)
    root, report = root_key(b"kvarve-simulate"), SimulationReport()
    for request in requests:
        now = request.timestamp_ms / 1000
        lease = core.open(root, prompts.packed(request), now, WAIT_COMPLETE)
        while not core.claim(lease, now):
            step()
        for tier, pages in zip(Tier, lease.from_tiers(), strict=True):
            report.hit_tokens[tier.name.lower()] += pages * config.page_tokens
        report.cost += cost.of(0, request.input_length // config.page_tokens)
        report.saved_cost += cost.of(0, lease.boundary)
        core.grow(lease, core.keepable(lease))
        core.publish(lease, lease.grown)
        core.close(lease)
        step()
        while not core.idle():
            step()
        report.requests += 1
        report.paused_requests += core.governor.paused
        report.prompt_tokens += request.input_length
        report.output_tokens += request.output_length
        report.infinite_hit_tokens += infinite.hit(request)
    report.unique_blocks = len(infinite.seen)
    report.moved_bytes = transfers.moved_bytes
    report.uncached_pages = core.counters.uncached
    report.stored_bytes, report.used_bytes = core.counters.stored_bytes, core.counters.used_bytes
    for place, capacity in enumerate(core.slot_pools.capacity):
        if capacity:  # where pools share a tier, what they have in the end
            name = f"{Tier(place // len(core.pools)).name.lower()}.{core.pools[place % len(core.pools)].name}"
            report.slots[name], report.evicted[name] = core.slot_pools.committed(place), core.slot_pools.evicted[place]
    if config.storage_memory:
        report.evicted["storage"] = transfers.storage.evicted
    return report


# --- the command


def main(
    trace: Annotated[Path, Parameter(help="JSON lines, plain or gzip, with hash_ids per block")],
    /,
    *,
    settings: Annotated[SimulationConfig, FLAT],
    limit: Annotated[PositiveInt | None, Parameter(help="only the first N requests of the trace")] = None,
    json: Annotated[Path | None, Parameter(help="write the report there too")] = None,
    config: ConfigFile = None,
) -> int:
    """Replay a trace through the cache's own code and say what memory buys."""
    check_file("--json", json)
    console = Console()
    errors = Console(stderr=True)
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(trace.name)
        report = replay(
            trace,
            settings,
            limit=limit,
            advance=lambda done, size: progress.update(task, completed=done, total=size),
        )
    console.print(_table(report, settings))
    write_json(json, {"config": asdict(settings), **report.as_json()})
    return 0


def _table(report: SimulationReport, config: SimulationConfig) -> Table:
    tokens = max(1, report.prompt_tokens)
    table = Table(title=f"{report.requests:,} requests, {report.prompt_tokens:,} prompt tokens")
    for heading in ("tier", "memory", "pages", "hit tokens", "hit rate", "evicted pages"):
        table.add_column(heading, justify="left" if heading == "tier" else "right")
    memory = (config.device_memory, config.host_memory, config.storage_memory)
    for tier, size in zip(Tier, memory, strict=True):
        name = tier.name.lower()
        pages = sum(slots for place, slots in report.slots.items() if place.partition(".")[0] == name)
        gone = sum(evicted for place, evicted in report.evicted.items() if place.partition(".")[0] == name)
        hit = report.hit_tokens[name]
        if size:
            table.add_row(
                name, format_size(size), f"{pages:,}" if pages else "", f"{hit:,}", f"{hit / tokens:.1%}", f"{gone:,}"
            )
    table.add_section()
    table.add_row("all tiers", "", "", f"{sum(report.hit_tokens.values()):,}", f"{report.hit_rate:.1%}")
    table.add_row("infinite cache", "", "", f"{report.infinite_hit_tokens:,}", f"{report.infinite_hit_rate:.1%}")
    moved = ", ".join(f"{edge.replace('_', ' ')} {format_size(size)}" for edge, size in report.moved_bytes.items())
    saved = f"{report.saved_rate:.1%} of the computation saved"
    table.caption = f"{saved}; moved: {moved or 'nothing'}; computed and not kept: {report.uncached_pages:,} pages"
    if config.policies.tokens_per_snapshot and any(pool.lookback is not None for pool in config.pools()):
        table.caption += f"; memory divided for a snapshot every {config.spacing:,} tokens"
    if config.storage_memory:
        used = f"{report.used_bytes / max(1, report.stored_bytes):.1%} of the {format_size(report.stored_bytes)} stored"
        table.caption += f"; {used} was used, storing paused for {report.paused_requests:,} requests"
    return table
