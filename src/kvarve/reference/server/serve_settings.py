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
from kvarve.settings.commands import Dtype, KvCacheDtype
from kvarve.settings.options import FLAT

# The options in the help of `kvarve serve`. Test: each is here or among those that few need.
GROUPS = {
    "Model": "model served-model-name dtype kv-cache-dtype device context-length chat-template hits page-tokens "
    "chunk-tokens",
    "Memory and tiers": "device-memory host-memory keep-states eviction salt-share",
    "Storage": "storage storage-key write-policy storage-wait",
    "Requests": "max-running max-waiting turn-tokens deterministic drain-s drain-at-least-s",
    "Ranks": "tp nnodes node-rank dist-init-addr",
    "Access and TLS": "host port api-key api-keys admin-key tls-cert tls-key allowed-host cors-origin",
    "Observability": "log-level log-format metrics-compat trace-out otlp-traces-endpoint kv-events-config config",
}
PAGE_TOKENS = 64  # of a page, where neither the settings nor the model say more
ADVANCED = (
    "threads verify-host hash-sample states load-at-least fetch-at-least host-share offload-pays-at storage-deadline-s "
    "rank-deadline-s max-connections max-body-bytes ready-file"
)


def check_key(name: str, key: str) -> None:
    """ConfigError for an API or admin key that no HTTP header carries as it is. The message does not repeat it."""
    if not key.strip():
        raise ConfigError(f"an {name} key cannot be empty")
    if key != key.strip() or min(key) < " " or "\x7f" in key:
        raise ConfigError(f"an {name} key must have no spaces or line ends around it, and no control characters")


@FLAT
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a server; `check_settings` says which cannot work."""

    model: str = "builtin:tiny-hybrid"
    """Model to serve: builtin:... or a folder with config.json"""
    served_model_name: str | None = None
    """Name that clients ask for [default: the model's own]"""
    chat_template: str | None = None
    """Jinja file in place of the model's own chat template, or the text of one"""
    context_length: int | None = None
    """Most tokens of a prompt and its answer together [default: as many as the model can attend to]"""
    host: str = "127.0.0.1"
    """Address to listen on"""
    port: int = 8000
    """Port to listen on; 0 takes any free one"""
    device_memory: Size = Size(256 << 20)
    """Memory on the device for pages, beside the model"""
    host_memory: Size = Size(512 << 20)
    """Memory on the host for pages that left the device; 0 for none"""
    storage: tuple[str, ...] = field(default=(), repr=False)
    """URL of a storage, such as file:///var/kvarve?capacity=100GiB. Give several for several tiers, the fast one
    first [default: none]"""
    storage_key: str | None = None
    """File of 32 random bytes that only this user can read. Pages in storage that were not sealed with it are misses"""
    page_tokens: int = 0
    """Tokens of a page; --chunk-tokens must be a multiple of it [default: 64, or what the model needs]"""
    chunk_tokens: int = 256
    """Tokens of a prompt that are computed at once"""
    hits: Literal["exact", "rounded"] = "exact"
    """Where prompts resume: at whole chunks, with the bits of prefill (exact), or at every page, with rounding as any
    other batch size causes it (rounded)"""
    dtype: Dtype = "auto"
    """Type in which the model computes; auto takes the checkpoint's"""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Type in which keys and values are kept: the model's own (auto), or FP8 in half of bfloat16's bytes (fp8_e4m3)"""
    device: Literal["auto", "cpu", "cuda"] | str = "auto"
    """Device to compute on, as torch names it; auto takes a GPU if torch can use one"""
    tp: int = 1
    """Processes among which the model is divided by heads; each has the memory and threads given here"""
    nnodes: int = 1
    """Machines that compute together, with as many processes each. Run the command on all, with the same options"""
    node_rank: int = 0
    """Number of this machine; 0 is the one that serves"""
    dist_init_addr: str | None = None
    """HOST:PORT of machine 0, where the machines meet; PORT + 1 is used as well"""
    rank_deadline_s: float = 60.0
    """Seconds within which all processes end when one is lost; one may keep the others waiting for half of them"""
    policies: Annotated[Policies, FLAT] = Policies()
    max_running: int = 64
    """Most requests side by side, as far as memory allows"""
    max_waiting: int = 4096
    """Most requests that wait; more get 503"""
    turn_tokens: int = 512
    """Tokens computed in one step, those of answers first, and at least one chunk of a prompt"""
    deterministic: bool = False
    """Make answers depend on their own prompt alone, to the last bit"""
    threads: int | None = None
    """Threads of torch [default: its own choice]"""
    api_key: Annotated[str | None, Parameter(env_var="KVARVE_API_KEY", show_env_var=True)] = None
    """Key that clients must send. Prefer $KVARVE_API_KEY: `ps` shows arguments"""
    admin_key: Annotated[str | None, Parameter(env_var="KVARVE_ADMIN_KEY", show_env_var=True)] = None
    """Key that opens /admin, which is off without one. Prefer $KVARVE_ADMIN_KEY: `ps` shows arguments"""
    api_keys: Path | None = None
    """TOML file of several keys, read again when it changes: see `kvarve keys --help`"""
    tls_cert: Path | None = None
    """PEM file of a certificate and its chain, for HTTPS; read again on SIGHUP"""
    tls_key: Path | None = None
    """PEM file of the certificate's key [default: in --tls-cert]"""
    allowed_host: tuple[str, ...] = ()
    """Name that requests may have in Host: a name, *.example.com or '*'. Addresses are always answered [default:
    localhost on the loopback interface, '*' elsewhere]"""
    cors_origin: tuple[str, ...] = ()
    """Origin such as https://chat.example.com whose pages may send requests [default: none]"""
    max_connections: int | None = None
    """Most open connections [default: half of the descriptors, 4096 at most]"""
    drain_s: float = 60.0
    """Seconds after SIGTERM for running requests to end, while /health answers 503; SIGINT ends them at once"""
    drain_at_least_s: float = 0.0
    """Seconds after SIGTERM in which new requests get 503 with Retry-After, before the port closes"""
    max_body_bytes: Size = Size(8 << 20)
    """Most bytes of a request's body; a larger one gets 413"""
    metrics_compat: Literal["vllm", "sglang", "vllm,sglang"] | None = None
    """Names of vLLM's or SGLang's metrics that /metrics has beside its own [default: none]"""
    otlp_traces_endpoint: str | None = field(default=None, repr=False)
    """URL of an OpenTelemetry collector (OTLP over HTTP) to which a span for each request is sent"""
    kv_events_config: str | None = None
    """JSON as vLLM's: {"enable_kv_cache_events": true} publishes over ZeroMQ which pages enter and leave each tier"""
    trace_out: Path | None = None
    """File to which a trace of the prompts is appended, for kvarve plan: times, lengths and keyed hashes, no text"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity of a line of the log"""
    log_format: Literal["text", "json"] = "text"
    """Form of the log: text, or json with one object a line and a span's fields for each request"""
    ready_file: Path | None = None
    """File that is written with the URL as soon as connections are accepted"""

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
