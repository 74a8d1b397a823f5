"""What a user may tell kvarve in an engine's configuration: names of kvarve's settings, checked in one place."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvarve.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.sizes import parse_size

_POLICIES = {field.name: field.type for field in fields(Policies)}
_OWN = {"host_memory": "a size, such as '4GiB'", "storage": "a URL, or a list of URLs", "host_layout": "a text"}
_OWN |= {"weights": "a text that names the model's weights"}


@dataclass(frozen=True)
class ExtraConfig:
    """The settings of a cache behind an engine. `weights`: what the user says the weights are, or nothing."""

    cache: CacheConfig
    weights: str = ""


def extra_config(given: Mapping[str, Any], where: str) -> ExtraConfig:
    """Read the settings; ConfigError, which names `where` they stand, for any that cannot work."""
    for key in given:
        if key not in _POLICIES and key not in _OWN:
            close = difflib.get_close_matches(key, [*_OWN, *_POLICIES], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join([*_OWN, *_POLICIES])}"
            raise ConfigError(f"{where}: unknown setting {key!r}; {hint}")
    if "host_memory" not in given:
        raise ConfigError(f"{where}: 'host_memory' is missing: give the memory for pages, such as '4GiB'")
    size = given["host_memory"]
    if isinstance(size, bool) or not isinstance(size, int | str) or (isinstance(size, int) and size < 1):
        raise ConfigError(f"{where}: 'host_memory' is {size!r}; it has to be {_OWN['host_memory']}")
    storage = given.get("storage")
    urls = None if storage is None else tuple(storage) if isinstance(storage, list) else (storage,)
    if urls is not None and (not urls or not all(isinstance(url, str) and url for url in urls)):
        raise ConfigError(f"{where}: 'storage' is {storage!r}; it has to be {_OWN['storage']}")
    for key in ("host_layout", "weights"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"{where}: {key!r} is {given[key]!r}; it has to be {_OWN[key]}")
    chosen = {key: _value(key, value, where) for key, value in given.items() if key in _POLICIES}
    try:
        host_memory = parse_size(size) if isinstance(size, str) else size
        layout = {"host_layout": given["host_layout"]} if "host_layout" in given else {}
        cache = CacheConfig(0, host_memory, urls, policies=Policies(**chosen), **layout)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None
    return ExtraConfig(cache, given.get("weights", ""))


def _value(key: str, value: Any, where: str) -> Any:
    kind = _POLICIES[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # type: ignore[arg-type]
        raise ConfigError(f"{where}: {key!r} is {value!r}; it has to be a {kind.__name__}")  # type: ignore[union-attr]
    return value
