"""What people of SGLang and vLLM call things: flags of `serve`, and storage backends. Plain data.

A flag of theirs becomes one of kvarve, is explained in a line, or is refused in one, so that a command that people have
either means the same here or says why not. `translate` reads a whole command by it.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from kvarve.errors import ConfigError


@dataclass(frozen=True)
class Flag:
    """One of their flags. With neither `ours` nor a `fine` value it is refused."""

    why: str = ""  # for people: its unit, why it says nothing here, or what to do instead
    ours: str | None = None  # our flag that means the same
    value: Callable[[str], str] = str  # from their value to ours
    switch: bool = False  # it takes no value
    fine: tuple[str, ...] | None = None  # values that change nothing here, () for all of them; "" is a switch
    unset: tuple[str, ...] = ("None",)  # values that mean there that nothing was given
    several: bool = False  # it stands for all that begin like it, with a value or without

    def allows(self, value: str) -> bool:
        return self.fine is not None and (not self.fine or value in self.fine)


def _only(value: str, why: str) -> Flag:
    return Flag(why, fine=(value,))


def _count(value: str) -> str:
    """A number as vLLM takes it, 32k (thousands) or 32K (1,024s), in digits; any other text as it is."""
    if not (found := re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([kmgtKMGT])", value)):
        return value
    return str(int(float(found[1]) * (1024 if found[2].isupper() else 1000) ** ("kmgt".index(found[2].lower()) + 1)))


def _by(name: str, ours: str, values: Mapping[str, str]) -> Flag:
    return Flag(
        ", ".join(f"{theirs} is {here}" for theirs, here in values.items() if theirs != here),
        ours,
        lambda value: str(_known(values, name, value)),
    )


_same, _no, _no_switch, _none = partial(Flag, ""), Flag, partial(Flag, switch=True), partial(Flag, several=True)
_nothing, _always = partial(Flag, fine=()), partial(Flag, switch=True, fine=("",))
BACKEND, EXTRA, RATIO = "--hicache-storage-backend", "--hicache-storage-backend-extra-config", "--hicache-ratio"
HOST, OFFLOADED, TOKENS = "--hicache-size", "--kv-offloading-size", "--max-total-tokens"
FRACTIONS = ("--mem-fraction-static", "--gpu-memory-utilization")
_ITS_CACHE = "a server is its cache; a request leaves it out by skip_reading_prefix_cache"
_PIPELINE = "a model is divided by heads (--tp), not by layers"
_SERVERS = "start several servers behind a router: docs/several-servers.md"
_BYTES = "of a GPU's memory, less the weights; on a CPU it changes nothing: --device-memory says it"
_ADAPTERS = "adapters are not loaded: merge one into its model"
_TOOLS = "templates write tools into a prompt, and a client reads calls from the answer's text: nothing is parsed here"
_KERNELS = "it is about kernels and graphs of that engine"
_START = "it is about that server's own start and watch"
_CONSTRAINED = "answers cannot be constrained here: run kvarve behind vLLM or SGLang"
_DRAFTS = "there is no speculative decoding here: run kvarve behind vLLM or SGLang"
_REASONING = "reasoning stays in the answer's text"
_TOKENIZER = "the tokenizer is the one in the model's folder"
_TIERS = "the tiers are kvarve's own: --host-memory and --storage"
_STATES = "--keep-states says where states are kept"
_EXPERTS = "experts are divided among the ranks of --tp"
_POOLS = "each kind of layer has a pool of its own"
_CHUNKS = "prompts are always computed in chunks"
_SMALL = "pages have the model's own type"
THEIR_CONFIG = Flag("it is a file of that engine, which is not read: give its settings as flags")
# vLLM's short forms.
SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
}

FLAGS: Mapping[str, Flag] = {
    # SGLang's cache
    "--enable-hierarchical-cache": _always("there are host pages unless --host-memory is 0"),
    RATIO: Flag("of --device-memory", "--host-memory"),
    HOST: Flag("in GB; 0 is --hicache-ratio", "--host-memory", lambda value: f"{value}GB", unset=("None", "0")),
    "--hicache-write-policy": Flag("", "--write-policy", lambda value: str(our_write(value))),
    "--hicache-io-backend": _nothing("copies run on streams of their own, through pinned memory"),
    "--hicache-mem-layout": _nothing("a page lies in host memory as it lies in storage, all layers together"),
    BACKEND: Flag("a URL, or file, mooncake or hf3fs", "--storage"),
    EXTRA: Flag("what else its URL says, as JSON or @FILE", "--storage"),
    "--hicache-storage-prefetch-policy": Flag("", "--storage-wait", lambda value: str(our_wait(value))),
    "--radix-eviction-policy": _same("--eviction"),
    "--enable-cache-report": _always("every answer's usage says how many tokens were cached, and where"),
    "--disable-radix-cache": _no_switch(_ITS_CACHE),
    "--admin-api-key": _same("--admin-key"),
    "--page-size": _same("--page-tokens"),
    # vLLM's cache
    "--block-size": _same("--page-tokens"),
    "--enable-prefix-caching": _always("it is always on"),
    "--no-enable-prefix-caching": _no_switch(_ITS_CACHE),
    "--prefix-caching-hash-algo": _only("sha256", "keys are chained SHA-256"),
    OFFLOADED: Flag("in GiB, of all ranks together", "--host-memory"),
    "--kv-transfer-config": _no(_TIERS),
    "--kv-offloading-backend": _only("native", _TIERS),
    "--mamba-cache-mode": _nothing(_STATES),
    "--mamba-block-size": _nothing(_STATES),
    **dict.fromkeys(("--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--mamba-ssm-dtype"), _only("auto", _SMALL)),
    "--disable-hybrid-kv-cache-manager": _no_switch(_POOLS),
    "--no-disable-hybrid-kv-cache-manager": _always(_POOLS),
    "--kv-cache-dtype": _by(
        "--kv-cache-dtype", "--kv-cache-dtype", {"auto": "auto", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}
    ),
    # memory and batches
    **dict.fromkeys(FRACTIONS, Flag(_BYTES, "--device-memory")),
    TOKENS: Flag("in tokens: the model says how many bytes that is", "--device-memory"),
    "--max-mamba-cache-size": _same("--states"),
    "--mamba-scheduler-strategy": _by(
        "--mamba-scheduler-strategy",
        "--keep-states",
        {"no_buffer": "ends", "extra_buffer": "ends,branches", "auto": "ends,branches,chunks"},
    ),
    "--chunked-prefill-size": Flag("-1 is the default of kvarve", "--turn-tokens", unset=("None", "-1")),
    "--max-num-batched-tokens": Flag("", "--turn-tokens", _count),
    "--kv-cache-memory-bytes": Flag("in bytes", "--device-memory", lambda value: f"{_count(value)}B"),
    "--max-running-requests": _same("--max-running"),
    "--max-num-seqs": _same("--max-running"),
    "--max-queued-requests": _same("--max-waiting"),
    "--schedule-policy": Flag(
        "the engine begins with the request that has most pages in memory, and at most 8 overtake one",
        fine=("lpm",),
    ),
    # the model
    "--model-path": _same("--model"),
    "--max-model-len": Flag("", "--context-length", _count, unset=("None", "-1", "auto")),
    "--tokenizer": _no(_TOKENIZER),
    "--tokenizer-path": _no(_TOKENIZER),
    "--tokenizer-mode": _only("auto", _TOKENIZER),
    "--trust-remote-code": _always("no code of a checkpoint is ever run"),
    "--quantization": _no("how weights are quantized is read from the checkpoint"),
    "--load-format": _only("auto", "weights are read from *.safetensors"),
    "--random-seed": _nothing("a request has its own seed"),
    "--seed": _nothing("a request has its own seed"),
    # ranks
    "--tp-size": _same("--tp"),
    "--tensor-parallel-size": _same("--tp"),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), _only("1", _SERVERS)),
    "--data-parallel-*": _none(_SERVERS),
    "--enable-dp-attention": _no_switch(_SERVERS),
    **dict.fromkeys(("--pp", "--pp-size", "--pipeline-parallel-size"), _only("1", _PIPELINE)),
    **dict.fromkeys(("--ep", "--ep-size", "--expert-parallel-size"), _nothing(_EXPERTS)),
    "--enable-expert-parallel": _always(_EXPERTS),
    "--master-addr": Flag("with vLLM's port 29501", "--dist-init-addr", lambda value: f"{value}:29501"),
    "--headless": _always("--node-rank says which machine answers"),
    # who may ask
    "--ssl-certfile": _same("--tls-cert"),
    "--ssl-keyfile": _same("--tls-key"),
    "--allowed-origins": _no("give each origin that may ask by --cors-origin"),
    # what is shown
    "--enable-metrics": _always("/metrics is always on"),
    "--enable-log-requests": _always("each request has a line at --log-level info"),
    "--log-requests": _always("each request has a line at --log-level info"),
    "--disable-log-requests": _always("--log-level warning leaves them out"),
    # what kvarve does not do
    "--enable-lora": _no_switch(_ADAPTERS),
    "--lora-paths": _no(_ADAPTERS),
    "--lora-modules": _no(_ADAPTERS),
    "--tool-call-parser": _nothing(_TOOLS),
    "--enable-auto-tool-choice": _always(_TOOLS),
    "--reasoning-parser": _nothing(_REASONING),
    "--reasoning-parser-plugin": _nothing(_REASONING),
    "--language-model-only": _always("of a model with images its text part alone is served"),
    "--enable-reasoning": _always(_REASONING),
    # how they compute and start
    "--attention-backend": _nothing(_KERNELS),
    "--decode-attention-backend": _nothing(_KERNELS),
    "--prefill-attention-backend": _nothing(_KERNELS),
    "--sampling-backend": _nothing(_KERNELS),
    "--cuda-graph-*": Flag(_KERNELS, fine=(), several=True),
    "--max-cudagraph-capture-size": _nothing(_KERNELS),
    "--disable-cuda-graph": _always(_KERNELS),
    "--enforce-eager": _always(_KERNELS),
    "--compilation-config": _nothing(_KERNELS),
    "--enable-torch-compile": _always(_KERNELS),
    "--moe-runner-backend": _nothing(_KERNELS),
    "--disable-overlap-schedule": _always(_KERNELS),
    "--async-scheduling": _always(_KERNELS),
    "--skip-server-warmup": _always(_START),
    "--watchdog-timeout": _nothing(_START),
    "--distributed-executor-backend": _nothing(_START),
    "--dist-timeout": _same("--rank-deadline-s"),
    "--enable-chunked-prefill": _always(_CHUNKS),
    "--no-enable-chunked-prefill": _no_switch(_CHUNKS),
    "--disable-log-stats": _always("/metrics is always on"),
    "--grammar-backend": _no(_CONSTRAINED),
    "--structured-outputs-config": _no(_CONSTRAINED),
    "--speculative-*": _none(_DRAFTS),
    "--disaggregation-*": _none("a server prefills and decodes; kv_transfer_params hands a prompt over: docs/http.md"),
}


def flag_of(name: str) -> Flag | None:
    """What is known of a flag by its name; None if it is not one of theirs."""
    if name in FLAGS or not name.startswith("--"):
        return FLAGS.get(name)
    return next((flag for begin, flag in FLAGS.items() if flag.several and name.startswith(begin[:-1])), None)


# --- policies

_WRITES = {"write_through": "through", "write_through_selective": "through:2", "write_back": "back"}
_WAITS = {"best_effort": "none", "timeout": "2s+0.25s/Ki", "wait_complete": "all"}


def our_write(theirs: str | None) -> str | None:
    """The write policy that SGLang has this name for. ConfigError if it has none."""
    return _known(_WRITES, "hicache_write_policy", theirs)


def our_wait(theirs: str | None) -> str | None:
    return _known(_WAITS, "hicache_storage_prefetch_policy", theirs)


def _known(policies: Mapping[str, str], name: str, theirs: str | None) -> str | None:
    if theirs is not None and theirs not in policies:
        raise ConfigError(f"{name} must be one of {', '.join(policies)}, got {theirs[:40]!r}")
    return theirs and policies[theirs]


def their_write(ours: str) -> str:
    """SGLang's name of a write policy."""
    return next((name for name, policy in _WRITES.items() if policy == ours), "write_through_selective")


def their_wait(ours: str) -> str:
    return next((name for name, policy in _WAITS.items() if policy == ours), "timeout")


# --- storages

# By SGLang's name of a backend: the parameter of its URL for each key of the extra config.
_MOONCAKE = {
    "protocol": "protocol",
    "device_name": "device",
    "global_segment_size": "segment",
    "metadata_server": "metadata",
    "local_hostname": "hostname",
}
_FOLDER = {"path": "", "file_path_prefix": "", "capacity": "capacity"}
# Keys of the extra config that concern SGLang's own prefetching: flags of ours say it.
_PREFETCH = {
    "prefetch_threshold": "--fetch-at-least",
    "prefetch_timeout_base": "--storage-wait",
    "prefetch_timeout_per_ki_token": "--storage-wait",
}
_EXAMPLE = """'{"path": "/var/kvarve", "capacity": "100GiB"}'"""


def storage_url(backend: str, extra: str | None) -> str:
    """The storage that SGLang's `hicache_storage_backend` and its extra config (JSON) name; a URL of kvarve is itself.

    ConfigError for a backend that there is none of, and for a key of the config that has no meaning here.
    """
    given = _config(extra)
    if "://" in backend:
        if given:
            raise ConfigError("a storage that is given as a URL cannot have an extra config: the URL says everything")
        return backend
    if backend == "file":
        path = _taken(given, "path", "")
        return _url("file://" + _path(path), {"capacity": _taken(given, "capacity", "10GiB")}, given)
    if backend == "hf3fs":
        path = _taken(given, "path", "") or _taken(given, "file_path_prefix", "")
        if not path or "capacity" not in given:
            raise ConfigError(f"hf3fs: the extra config must say a folder and how much it may hold, such as {_EXAMPLE}")
        known = {"capacity": _taken(given, "capacity", "")}
        if "metadata" in given:  # where several processes share it
            known["metadata"] = _taken(given, "metadata", "")
        return _url("hf3fs://" + _path(path), known, given)
    if backend == "mooncake":
        master = _taken(given, "master_server_address", "")
        found = {ours: _taken(given, theirs, "") for theirs, ours in _MOONCAKE.items() if theirs in given}
        if str(found.get("segment", "")).isdigit():
            found["segment"] = f"{found['segment']}B"
        return _url(f"mooncake://{quote(master, safe=':[]')}", found, given)
    raise ConfigError(
        f"unknown storage {backend!r}: file, mooncake and hf3fs have these names, others are URLs, "
        "such as redis://HOST:6379"
    )


def _config(extra: str | None) -> dict[str, Any]:
    if not extra or not extra.strip():
        return {}
    try:
        given = json.loads(extra)
    except (ValueError, RecursionError):
        raise ConfigError(f"the extra config must be JSON, as in {_EXAMPLE}") from None
    if not isinstance(given, dict) or not all(isinstance(value, str | int | float) for value in given.values()):
        raise ConfigError(f"the extra config must be an object of texts and numbers, as in {_EXAMPLE}")
    for name, flag in _PREFETCH.items():
        if name in given:
            raise ConfigError(f"the extra config's {name} is the flag {flag} of kvarve serve, and cannot stand here")
    return given


def _taken(given: dict[str, Any], name: str, default: str) -> str:
    return str(given.pop(name, default))


def _path(path: str) -> str:
    if path and not path.startswith("/"):
        raise ConfigError(f"the extra config's path {path!r} must begin with a slash")
    return quote(path)


def _url(place: str, parameters: dict[str, str], left: dict[str, Any]) -> str:
    if left:
        known = ", ".join([*_FOLDER, "master_server_address", *_MOONCAKE])
        raise ConfigError(f"the extra config's {min(left)[:40]!r} is unknown; known: {known}")
    return place + ("?" + urlencode(parameters, safe=":/,") if parameters else "")
