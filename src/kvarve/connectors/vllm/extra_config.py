"""What a user may tell kvarve's connector in an engine's configuration: names of kvarve's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvarve.cache.config import CacheConfig
from kvarve.connectors.written import Given
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError

# The engine says which windows and states there are, and mixes its salts into the names of its blocks.
_ENGINES = ("snapshot_", "salt_share")
_POLICIES = {field.name: field.type for field in fields(Policies) if not field.name.startswith(_ENGINES)}
_KNOWN = ("host_memory", "storage", "storage_key", "weights", *_POLICIES)


@dataclass(frozen=True)
class ExtraConfig:
    """The settings of a cache behind an engine. `weights`: what the user says the weights are, or nothing."""

    cache: CacheConfig
    weights: str = ""


def extra_config(values: Mapping[str, Any], where: str) -> ExtraConfig:
    """Read the settings; ConfigError, which names `where` they stand, for any that cannot work."""
    given = Given(where, values)
    given.check_keys(_KNOWN)
    if "host_memory" not in values:
        raise given.refuse("'host_memory' is missing: give the memory for pages, such as '4GiB'")
    host_memory, storage, weights = given.size("host_memory", 0), given.storage(), given.text("weights")
    key_file = given.text("storage_key") or None
    chosen = {key: _policy(given, key) for key in _POLICIES if key in values}
    try:
        cache = CacheConfig(0, host_memory, storage or None, policies=Policies(**chosen), storage_key=key_file)
    except ConfigError as e:
        raise given.refuse(str(e)) from None
    return ExtraConfig(cache, weights)


def _policy(given: Given, key: str) -> Any:
    value, kind = given.values[key], _POLICIES[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # type: ignore[arg-type]
        raise given.refuse(f"{key!r} is {value!r}; it has to be a {kind.__name__}")  # type: ignore[union-attr]
    return value
