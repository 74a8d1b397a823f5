"""The model as bytes, the memory that it gets, and how fast it is: the settings of a replay."""

from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from typing import Annotated, Literal, get_args

from kvarve.cache.config import NO_HOST, divide
from kvarve.core.core_config import CoreConfig, Slots
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.pages.field_checks import require
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier, window_lookback
from kvarve.pages.sizes import Size
from kvarve.reference.server.serve_settings import PAGE_TOKENS, Settings
from kvarve.settings.commands import Dtype, KvCacheDtype
from kvarve.settings.options import FLAT, needs

# Of `Policies`: where no copy takes time, no request waits for one; and no byte can be wrong.
WAITING = ("storage_wait", "storage_deadline_s")
MEANINGLESS = (*WAITING, "verify_host", "hash_sample")
Routing = Literal["prefix", "random"]
SIZES = ("kv_bytes_per_token", "state_bytes", "window_tokens", "window_bytes_per_token")  # that a model says
SERVED = Settings()


@dataclass(frozen=True)
class SimulationConfig:
    """A model as bytes, the memory that it gets, and its speeds; sizes in bytes. ConfigError for values that cannot
    work; without device memory, only `core` says so."""

    device_memory: Size = Size(0)
    """Memory on the device for pages, such as 40GiB"""
    host_memory: Size = Size(0)
    """Memory on the host for pages that left the device; 0 for none"""
    storage_memory: Size = Size(0)
    """Size of the storage, which all replicas share; 0 for none"""
    model: str | None = None
    """Model whose sizes count instead of those below: builtin:... or a folder with config.json"""
    dtype: Dtype = "auto"
    """Type in which --model computes; auto takes the checkpoint's"""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Type in which --model keeps keys and values, as for kvarve serve"""
    kv_bytes_per_token: Size = Size(128 << 10)  # Llama 3 8B: 32 layers, 8 heads of 128, keys and values, 2 bytes each
    """Bytes of attention KV per token; 0 for none"""
    state_bytes: Size = Size(0)
    """Bytes of a recurrent model's state after any token; 0 for none"""
    window_tokens: int = 0
    """Tokens of a sliding window; 0 for none"""
    window_bytes_per_token: Size = Size(0)
    """Bytes that the window keeps for each of its tokens"""
    block_tokens: int = 512
    """Tokens that one id of the trace stands for"""
    page_tokens: int = 0
    """Tokens of a page; 0 takes 512, or with --model the default of kvarve serve"""
    chunk_tokens: int = 0
    """Tokens of a prompt that are computed at once (the prefill grid); 0 takes the page size, or with --model the
    default of kvarve serve"""
    cost_doubles_at: int = 0
    """Tokens after which attention costs as much as all else, for the share of computing saved; 0 for never"""
    prefill_tokens_per_s: int = 0
    """Tokens that a replica computes per second; 0 computes at once"""
    storage_bytes_per_s: Size = Size(0)
    """Bytes per second that a replica reads from storage, and as many that it writes; 0 copies at once"""
    storage_prices: str | None = None
    """Prices of the storage: of 1,000 puts, of 1,000 gets or questions, and of a GiB that is read, such as
    0.005,0.0004,0.09"""
    host_bytes_per_s: Size = Size(0)
    """Bytes per second between host and device, each way; 0 copies at once"""
    replicas: int = 1
    """Servers, each with the device and host memory given; they share the storage"""
    routing: Routing = "prefix"
    """Way in which requests find a replica: the longest hit, unless it has much more work than others (prefix), or by
    chance (random)"""
    policies: Annotated[Policies, FLAT] = Policies()

    def __post_init__(self) -> None:
        served = self.model is not None and not self.page_tokens
        object.__setattr__(self, "page_tokens", self.page_tokens or (PAGE_TOKENS if served else 512))
        if served and not self.chunk_tokens:
            object.__setattr__(self, "chunk_tokens", SERVED.chunk_tokens)
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"{name.replace('_', ' ')} cannot be below zero, and is {value}")
        for name in MEANINGLESS:
            if getattr(self.policies, name) != getattr(Policies, name) and not (self.late and name in WAITING):
                raise ConfigError(
                    f"a replay cannot depend on the setting {name}, as its copies are instant: leave it out"
                    + (", or give storage bytes per s" if name in WAITING else "")
                )
        if not self.block_tokens:
            raise ConfigError("block_tokens must be at least 1, got 0")
        if self.grid % self.page_tokens:
            raise ConfigError(f"chunks of {self.grid} tokens must be whole pages of {self.page_tokens}")
        given = [name for name in SIZES if getattr(self, name) != getattr(type(self), name)]
        if given and self.model is not None:
            raise ConfigError(f"the model says its {given[0].replace('_', ' ')}: it cannot be given too")
        if self.model is None and {self.dtype, self.kv_cache_dtype} != {"auto"}:
            raise ConfigError(f"{'kv cache ' * (self.dtype == 'auto')}dtype needs a model: give a model too")
        if bool(self.window_tokens) != bool(self.window_bytes_per_token):
            raise ConfigError("a window needs both: its tokens and the bytes that it keeps per token")
        if not self.pools:
            raise ConfigError(
                "a replay needs something to cache: KV bytes per token, a window, or the bytes of a state"
            )
        if self.storage_memory and not self.host_memory:
            raise ConfigError(NO_HOST)
        if self.storage_bytes_per_s and not self.storage_memory:
            raise ConfigError("a speed of storage needs storage: give storage memory too")
        if self.prices and not self.storage_memory:
            raise ConfigError("prices of storage need storage: give storage memory too")
        if self.host_bytes_per_s and not self.host_memory:
            raise ConfigError("a speed of the host needs a host: give host memory too")
        if self.late and not self.prefill_tokens_per_s:
            raise ConfigError(
                "copies that take time need prefill tokens per s: they are waited for instead of computing"
            )
        if not self.replicas:
            raise ConfigError("replicas must be at least 1, got 0")
        require(self.routing in get_args(Routing), "routing", f"one of {', '.join(get_args(Routing))}", self.routing)
        if self.routing != "prefix" and self.replicas == 1:
            raise ConfigError("routing needs several replicas: one has all requests")
        if self.device_memory:
            self.core()

    @property
    def prices(self) -> tuple[float, ...]:
        """Of a put, of a get or a question, and of a byte that is read; empty: there are none."""
        if self.storage_prices is None:
            return ()
        try:
            prices = [float(price) for price in self.storage_prices.split(",")]
        except ValueError:
            prices = []
        if len(prices) != 3 or not all(0 <= price < inf for price in prices):
            raise ConfigError(
                f"storage prices must be three numbers, such as 0.005,0.0004,0, got {self.storage_prices!r}"
            )
        return prices[0] / 1000, prices[1] / 1000, prices[2] / (1 << 30)

    @property
    def late(self) -> bool:
        """Whether copies take time."""
        return bool(self.storage_bytes_per_s or self.host_bytes_per_s)

    @property
    def grid(self) -> int:
        return self.chunk_tokens or self.page_tokens

    def cost(self, pages: int) -> float:
        """The cost of computing the first pages of a prompt, in first pages: attention reads all pages before."""
        grows = self.page_tokens / self.cost_doubles_at if self.cost_doubles_at else 0.0
        return pages * (1 + grows * (pages - 1) / 2)

    @cached_property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The model's pools."""
        if self.model is not None:
            with needs("engine", "simulate --model"):
                from kvarve.reference.engine.families import (
                    describe_model,  # torch and transformers take seconds to import
                )
                from kvarve.reference.engine.model import quiet_libraries

                quiet_libraries()
            shape = self.page_tokens, self.grid
            found = describe_model(self.model, self.dtype, *shape, self.kv_cache_dtype).pools
            return tuple(
                PoolSpec(pool.name, (BufferSpec("bytes", (pool.page_bytes,), "uint8"),), pool.lookback)
                for pool in found
            )
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
        shape, slots = (self.pools, self.page_tokens, self.grid), Slots()
        for tier, memory in {Tier.DEVICE: self.device_memory, Tier.HOST: self.host_memory}.items():
            if memory or tier is Tier.DEVICE:
                what = tier.name.lower()
                slots[tier] = divide(memory, *shape, self.policies, records=tier is Tier.HOST, what=what)
        return CoreConfig(
            shape[0],
            slots,
            self.page_tokens,
            self.grid,
            storage=bool(self.storage_memory),
            policies=self.policies,
            prefill_tokens=self.chunk_tokens,
        )
