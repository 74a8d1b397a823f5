"""What a mooncake URL may say: mooncake://MASTER[:50051]?protocol=rdma&segment=64GiB, and see docs/mooncake.md.

What it leaves out comes from Mooncake's own environment variables.
"""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kvarve.errors import ConfigError
from kvarve.pages.sizes import parse_size
from kvarve.storage.base import Storage, check_settings
from kvarve.storage.mooncake._client import Settings, load
from kvarve.storage.mooncake._mooncake_storage import MooncakeStorage
from kvarve.storage.urls import Backend, StorageUrl, host_and_port

DEFAULT_PORT, METRICS_PORT = 50051, 9003  # of mooncake_master
_MISSING = "mooncake:// needs the Mooncake client: pip install '.[server,mooncake]' in kvarve's checkout"

# By parameter: the variable, and the name in the file of MOONCAKE_CONFIG_PATH, as Mooncake itself reads them.
_ELSEWHERE = {
    "master": ("MOONCAKE_MASTER", "master_server_address"),
    "protocol": ("MOONCAKE_PROTOCOL", "protocol"),
    "device": ("MOONCAKE_DEVICE", "device_name"),
    "segment": ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "global_segment_size"),
    "metadata": ("MOONCAKE_TE_META_DATA_SERVER", "metadata_server"),
    "hostname": ("MOONCAKE_LOCAL_HOSTNAME", "local_hostname"),
}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([kmgt]?)b?\s*", re.IGNORECASE)


class MooncakeBackend(Backend):
    example = "mooncake://10.0.0.1:50051?protocol=tcp&segment=4GiB"
    parameters = frozenset(
        {"protocol", "device", "segment", "metadata", "hostname", "replicas", "soft_pin", "hard_pin", "metrics"}
    )
    shared = True
    managed_by = "its master: see mooncake_master's own metrics and tools"

    @classmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        check_settings(1, label)
        settings = read_settings(url)
        load()  # else a missing library would be noticed late if the master is not up yet
        return lambda: MooncakeStorage(settings, label, description)


def read_settings(url: StorageUrl, environ: Mapping[str, str] = os.environ) -> Settings:
    """ConfigError: the URL is invalid, or the library is missing."""
    text, parameters = url.text, url.parameters
    if url.path not in ("", "/"):
        raise ConfigError(f"{text}: it needs a master and no path, as in mooncake://10.0.0.1:{DEFAULT_PORT}")
    file = _file(environ.get("MOONCAKE_CONFIG_PATH"))
    found = {name: parameters[name] for name in _ELSEWHERE if name in parameters}
    if url.place:
        found["master"] = url.place
    sources = dict.fromkeys(found, text)
    for name, (variable, field) in _ELSEWHERE.items():
        if name not in found and environ.get(variable):
            found[name], sources[name] = environ[variable], variable
        elif name not in found and str(file.get(field) or ""):
            found[name], sources[name] = str(file[field]), f"{field} in {environ['MOONCAKE_CONFIG_PATH']}"
    if "master" not in found:
        raise ConfigError(f"{text}: it must say where the master is, as in mooncake://10.0.0.1:{DEFAULT_PORT}")
    master = _with_port(found["master"], DEFAULT_PORT, sources["master"])
    host = master.rpartition(":")[0]
    segment_bytes = 0
    if "segment" in found:
        size = parse_size if sources["segment"] == text else _their_size
        segment_bytes = size(found["segment"])
    settings = Settings(
        master,
        found.get("protocol", "tcp").lower(),
        found.get("device", ""),
        segment_bytes,
        found.get("metadata", "P2PHANDSHAKE"),
        found.get("hostname", ""),
        url.whole_number("replicas", 1, most=99),
        url.yes("soft_pin", default=False),
        url.yes("hard_pin", default=False),
        _with_port(parameters.get("metrics", host), METRICS_PORT, text),
    )
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(_MISSING)
    return settings


def _file(path: str | None) -> dict[str, object]:
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"MOONCAKE_CONFIG_PATH: {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"MOONCAKE_CONFIG_PATH: {path} must hold settings")
    return content


def _with_port(place: str, port: int, source: str) -> str:
    """The place as host:port; an IPv6 address is in brackets."""
    return ":".join(map(str, host_and_port(place, port, source)))


def _their_size(text: str) -> int:
    """A size as Mooncake reads it: 1 gb is 1024**3 bytes."""
    match = _SIZE.fullmatch(text)
    try:
        assert match is not None
        return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
    except (AssertionError, ValueError):
        raise ConfigError(f"MOONCAKE_GLOBAL_SEGMENT_SIZE must be a size, such as 4gb, got {text!r}") from None
