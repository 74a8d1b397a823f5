"""The settings of a tier below an engine's host memory, as its operator writes them. Knows no engine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvarve.connectors.written import Given

WHERE = "a kvarve tier"


@dataclass(frozen=True)
class TierSettings:
    """One tier. Each field is a key of its configuration; `read_settings` has the checks."""

    storage: tuple[str, ...] = field(repr=False)  # it may hold a password
    """URLs of storages, nearest first, such as file:///var/kvarve?capacity=100GiB"""
    deadline_s: float = 5.0
    """seconds after which a call to the storage counts as hanging and its chunks as misses"""
    weights: str = ""
    """what tells these weights apart, instead of a sample of their files; "read": all bytes of the files"""
    identity: str = ""
    """anything else that tells apart what must not be shared, such as the version of an adapter"""
    enable_kv_events: bool = False
    """tell vLLM's KV event stream what is stored here, and what turned out to be gone"""
    locality: str | None = None
    """LOCAL or REMOTE: where the storage lies, for KV events and requests that choose tiers by it"""
    storage_key: str = ""
    """a file of 32 random bytes, of this user alone: chunks in storage that were not sealed with it are misses"""


_KNOWN = tuple(field.name for field in fields(TierSettings))


def read_settings(values: Mapping[str, Any], written: Collection[str] | None = None) -> TierSettings:
    """The settings in `values`. ConfigError: what is wrong, and what to do.

    `written`: the keys that the operator has written, if they are known; an engine may add arguments of its own, which
    are ignored. Without it every key counts as the operator's.
    """
    mine = {key: value for key, value in values.items() if key in _KNOWN or written is None or key in written}
    given = Given(WHERE, mine)
    given.check_keys(_KNOWN)
    locality = given.values.get("locality")
    if locality not in (None, "LOCAL", "REMOTE"):
        raise given.refuse(f"'locality' is {locality!r}; it has to be LOCAL or REMOTE")
    return TierSettings(
        given.needed_storage(),
        given.seconds("deadline_s", TierSettings.deadline_s),
        given.text("weights"),
        given.text("identity"),
        given.flag("enable_kv_events", False),
        locality,
        given.text("storage_key"),
    )
