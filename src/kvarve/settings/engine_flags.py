"""What people of SGLang and vLLM call things: flags of `serve`, and storage backends. Plain data and its conversion.

A flag of theirs becomes one of kvarve, is explained in a line, or is refused in one, so that a command that people have
either means the same here or says why not.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from kvarve.errors import ConfigError
from kvarve.pages.sizes import parse_size


@dataclass(frozen=True)
class Flag:
    """One of their flags. With neither `ours` nor a `fine` value it is refused."""

    why: str = ""  # for people: its unit, why it says nothing here, or what to do instead
    ours: str | None = None  # our flag that means the same
    value: Callable[[str], str] = str  # from their value to ours
    switch: bool = False  # it takes no value
    fine: tuple[str, ...] | None = None  # values that change nothing here, () for all of them; "" is a switch

    def allows(self, value: str) -> bool:
        return self.fine is not None and (not self.fine or value in self.fine)


def _in(unit: str, ours: str) -> Flag:
    return Flag(f"in {unit}", ours, lambda value: f"{value}{unit}")


def _only(value: str, why: str) -> Flag:
    return Flag(why, fine=(value,))


_same, _no, _no_switch = partial(Flag, ""), Flag, partial(Flag, switch=True)
_nothing, _always = partial(Flag, fine=()), partial(Flag, switch=True, fine=("",))
BACKEND, EXTRA, RATIO = "--hicache-storage-backend", "--hicache-storage-backend-extra-config", "--hicache-ratio"
_ITS_CACHE = "a server is its cache; a request leaves it out by skip_reading_prefix_cache"
_PIPELINE = "a model is divided by heads (--tp), not by layers"
_SERVERS = "start several servers behind a router: docs/several-servers.md"
_BYTES = "memory for pages is given in bytes: --device-memory"
_ADAPTERS = "adapters are not loaded: merge one into its model"
_TOOLS = "templates write tools into a prompt, and a client reads calls from the answer's text: nothing is parsed here"
_CONSTRAINED = "answers cannot be constrained here: run kvarve behind vLLM or SGLang"
_DRAFTS = "there is no speculative decoding here: run kvarve behind vLLM or SGLang"
_TOKENIZER = "the tokenizer is the one in the model's folder"

FLAGS: Mapping[str, Flag] = {
    # SGLang's cache
    "--enable-hierarchical-cache": _always("there are host pages unless --host-memory is 0"),
    RATIO: Flag("of --device-memory", "--host-memory"),
    "--hicache-size": _in("GB", "--host-memory"),
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
    "--kv-offloading-size": _in("GiB", "--host-memory"),
    "--kv-transfer-config": _no("the tiers are kvarve's own: --host-memory and --storage"),
    "--kv-cache-dtype": _only(
        "auto", "pages have the model's own type; ?compress=auto of a --storage makes them small"
    ),
    # memory and batches
    "--mem-fraction-static": _no(_BYTES),
    "--gpu-memory-utilization": _no(_BYTES),
    "--max-total-tokens": _no(_BYTES),
    "--chunked-prefill-size": _same("--turn-tokens"),
    "--max-num-batched-tokens": _same("--turn-tokens"),
    "--max-running-requests": _same("--max-running"),
    "--max-num-seqs": _same("--max-running"),
    "--max-queued-requests": _same("--max-waiting"),
    "--schedule-policy": _only("fcfs", "requests are served in the order of their arrival"),
    # the model
    "--model-path": _same("--model"),
    "--max-model-len": _same("--context-length"),
    "--tokenizer": _no(_TOKENIZER),
    "--tokenizer-path": _no(_TOKENIZER),
    "--trust-remote-code": _no_switch("no code of a checkpoint is ever run"),
    "--quantization": _no("how weights are quantized is read from the checkpoint"),
    "--load-format": _only("auto", "weights are read from *.safetensors"),
    "--random-seed": _nothing("a request has its own seed"),
    "--seed": _nothing("a request has its own seed"),
    # ranks
    "--tp-size": _same("--tp"),
    "--tensor-parallel-size": _same("--tp"),
    "--dp-size": _only("1", _SERVERS),
    "--data-parallel-size": _only("1", _SERVERS),
    "--pp-size": _only("1", _PIPELINE),
    "--pipeline-parallel-size": _only("1", _PIPELINE),
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
    "--tool-call-parser": _no(_TOOLS),
    "--enable-auto-tool-choice": _no_switch(_TOOLS),
    "--reasoning-parser": _no("reasoning stays in the answer's text"),
    "--grammar-backend": _no(_CONSTRAINED),
    "--structured-outputs-config": _no(_CONSTRAINED),
    "--speculative-algorithm": _no(_DRAFTS),
    "--speculative-config": _no(_DRAFTS),
}


def translated(words: Iterable[str], device_memory: int, note: Callable[[str], None]) -> list[str]:
    """The words of a command line of `serve` with our flags for theirs; `note` gets a line for each without meaning.

    `device_memory`: the default, in bytes. ConfigError for a flag that is refused.
    """
    left, ours = [*words], list[str]()
    theirs: dict[str, str] = {}  # of those that mean something together
    while left:
        word = left.pop(0)
        name, given, value = word.partition("=")
        flag = FLAGS.get(name)
        if flag is None:
            ours.append(word)
            continue
        if not given and not flag.switch:
            if not left:
                raise ConfigError(f"{name} needs a value")
            value = left.pop(0)
        if name in (BACKEND, EXTRA, RATIO):
            theirs[name] = value
        elif flag.ours is not None:
            ours += [flag.ours, flag.value(value)]
        elif flag.allows(value):
            note(f"{name} changes nothing here: {flag.why}")
        else:
            asked = "" if flag.switch or flag.fine is None else f" {value[:40]}"
            raise ConfigError(f"{name}{asked} is not supported: {flag.why}")
    return ours + _together(theirs, ours, device_memory)


def _together(theirs: Mapping[str, str], ours: list[str], device_memory: int) -> list[str]:
    """What flags of theirs mean beside others."""
    found = []
    if RATIO in theirs and "--host-memory" not in ours:  # of SGLang's, too, a size goes before a ratio
        device = _device_bytes(ours, device_memory)
        try:
            ratio = Fraction(theirs[RATIO])
        except (ValueError, ZeroDivisionError):
            raise ConfigError(f"{RATIO} must be a number, got {theirs[RATIO][:40]!r}") from None
        if not 0 <= ratio <= 1 << 20:
            raise ConfigError(f"{RATIO}: {theirs[RATIO][:40]!r} must be a ratio of host memory to device memory")
        found += ["--host-memory", f"{int(ratio * device)}B"]
    if EXTRA in theirs and BACKEND not in theirs:
        raise ConfigError(f"{EXTRA} needs {BACKEND}, of which it is the config")
    if BACKEND in theirs:
        extra = theirs.get(EXTRA)
        if extra is not None and extra.startswith("@"):
            try:
                extra = Path(extra[1:]).read_text(encoding="utf-8")
            except (OSError, ValueError) as e:
                raise ConfigError(f"{EXTRA}: {extra[1:]!r} cannot be read: {e}") from None
        found += ["--storage", storage_url(theirs[BACKEND], extra)]
    return found


def _device_bytes(ours: list[str], default: int) -> int:
    """The device memory that the words give, or the environment, or the default."""
    for i in reversed(range(len(ours))):
        name, given, value = ours[i].partition("=")
        if name == "--device-memory" and (given or i + 1 < len(ours)):
            return parse_size(value if given else ours[i + 1])
    if text := os.environ.get("KVARVE_SERVE_DEVICE_MEMORY"):
        return parse_size(text)
    if any(word.partition("=")[0] == "--config" for word in ours):
        raise ConfigError(f"{RATIO} needs --device-memory beside it, of which it is the ratio; or give --host-memory")
    return default


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
