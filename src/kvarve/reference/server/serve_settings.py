"""What an operator sets for a server; light to import."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvarve import __version__
from kvarve.cache.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.pages.sizes import Size
from kvarve.reference.server.keyfile import Keyring
from kvarve.settings.options import FLAT

LEVELS = ("debug", "info", "warning", "error")


def check_key(name: str, key: str) -> None:
    """ConfigError for an API or admin key that no HTTP header carries as it is. The message does not repeat it."""
    if not key.strip():
        raise ConfigError(f"an {name} key cannot be empty")
    if key != key.strip() or min(key) < " " or "\x7f" in key:
        raise ConfigError(f"an {name} key has no spaces or line ends around it, and no control characters")


@FLAT
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a server; `check_settings` says which cannot work."""

    model: str = "builtin:tiny-hybrid"
    """builtin:... or a folder with config.json"""
    served_model_name: str | None = None
    """the name that clients ask for; the model's own unless given"""
    chat_template: str | None = None
    """a Jinja file in place of the model's own template, or the text of one"""
    context_length: int | None = None
    """tokens of a prompt and its answer together; as many as the model can attend to unless given"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = 8000
    """port to listen on, 0 for any free one"""
    device_memory: Size = Size(256 << 20)
    """for pages beside the model"""
    host_memory: Size = Size(512 << 20)
    """for pages that left the device, 0 for none"""
    storage: tuple[str, ...] = field(default=(), repr=False)
    """such as file:///var/kvarve?capacity=100GiB; none unless given; several are tiers, the fast one first"""
    storage_key: str | None = None
    """a file of 32 random bytes, of this user alone: pages in storage that were not sealed with it are misses"""
    page_tokens: int = 64
    """tokens of a page; has to divide --chunk-tokens"""
    chunk_tokens: int = 256
    """tokens of a prompt that are computed at once"""
    hits: Literal["exact", "rounded"] = "exact"
    """exact: prompts resume at whole chunks, with the bits of prefill; rounded: at every page, but for rounding"""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16"""
    device: str = "cpu"
    """where to compute, as torch names it"""
    tp: int = 1
    """processes among which the model is divided by heads; memory and threads are of each"""
    nnodes: int = 1
    """machines with as many of them each: run this on all, with the same options"""
    node_rank: int = 0
    """which of the machines this is; 0 is the one that serves"""
    dist_init_addr: str | None = None
    """HOST:PORT of machine 0, where several machines meet; PORT + 1 is used as well"""
    rank_deadline_s: float = 60.0
    """without one of the processes the others end within this time; one may keep them waiting for half of it"""
    policies: Annotated[Policies, FLAT] = Policies()
    max_running: int = 64
    """requests side by side, if memory allows"""
    max_waiting: int = 4096
    """requests that may wait; more get 503"""
    turn_tokens: int = 512
    """tokens computed in one step, answers first; at least a chunk of a prompt"""
    deterministic: bool = False
    """answers depend on their prompt to the last bit"""
    threads: int | None = None
    """of torch; its own choice unless given"""
    api_key: Annotated[str | None, Parameter(env_var="KVARVE_API_KEY", show_env_var=True)] = None
    """that clients must send; the environment says it unseen by `ps`"""
    admin_key: Annotated[str | None, Parameter(env_var="KVARVE_ADMIN_KEY", show_env_var=True)] = None
    """opens /admin, off without one; the environment says it unseen by `ps`"""
    api_keys: Path | None = None
    """a TOML file of several keys, read again when it changes: see `kvarve keys --help`"""
    tls_cert: Path | None = None
    """a PEM file of the certificate and its chain: the server speaks HTTPS; read again on SIGHUP"""
    tls_key: Path | None = None
    """the certificate's key, unless its file has it"""
    allowed_host: tuple[str, ...] = ()
    """a name that requests may have in Host, *.example.com or '*'; unless given localhost alone on the loopback
    interface, any elsewhere; addresses are always answered"""
    cors_origin: tuple[str, ...] = ()
    """an origin such as https://chat.example.com whose pages may ask; none unless given"""
    max_connections: int | None = None
    """open at a time; half of the descriptors, 4096 at most, unless given"""
    drain_s: float = 60.0
    """from SIGTERM on, for running requests to end, while /health says 503; SIGINT ends them at once"""
    drain_at_least_s: float = 0.0
    """seconds from SIGTERM on in which new requests get 503 with Retry-After, before the port closes"""
    max_body_bytes: Size = Size(8 << 20)
    """of a request; a larger one gets 413"""
    metrics_compat: str = ""
    """vllm, sglang or both with a comma between: /metrics has its numbers under their names too"""
    otlp_traces_endpoint: str | None = field(default=None, repr=False)
    """URL of an OpenTelemetry collector (OTLP over HTTP), which gets a span for each request; none unless given"""
    kv_events_config: str | None = None
    """JSON as vLLM's: {"enable_kv_cache_events": true} publishes which pages enter and leave each tier, over ZeroMQ"""
    trace_out: Path | None = None
    """new file for a trace of the prompts, for kvarve plan: times, lengths and keyed hashes, no text"""
    log_level: str = "info"
    """debug, info, warning, error"""
    log_format: Literal["text", "json"] = "text"
    """form of the log: text, or json with one object a line and a span's fields for each request"""
    ready_file: Path | None = None
    """gets the URL as soon as connections are accepted"""

    @property
    def alike(self) -> str:
        """What has to be the same on all ranks."""
        own = {"served_model_name", "host", "port", "storage", "storage_key", "threads", "api_key", "admin_key"}
        own |= {"api_keys", "tls_cert", "tls_key", "allowed_host", "cors_origin", "max_connections", "drain_s"}
        own |= {"max_body_bytes", "log_level", "ready_file", "node_rank", "otlp_traces_endpoint", "metrics_compat"}
        own |= {"kv_events_config", "trace_out", "log_format", "drain_at_least_s"}
        alike = [(each.name, getattr(self, each.name)) for each in fields(self) if each.name not in own]
        return repr((__version__, alike, [url.partition("://")[0] for url in self.storage]))

    @property
    def cache(self) -> CacheConfig:
        """The settings of its cache."""
        return CacheConfig(
            self.device_memory, self.host_memory, self.storage, self.policies, storage_key=self.storage_key
        )

    def keyring(self) -> Keyring:
        """All keys. ConfigError if the file cannot be used."""
        return Keyring(self.api_keys, api_key=self.api_key, admin_key=self.admin_key)
