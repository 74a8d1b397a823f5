"""Where a Mooncake master is and how to reach it: from a URL, else from Mooncake's own environment variables."""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvarve.errors import ConfigError
from kvarve.pages.sizes import parse_size

DEFAULT_PORT, METRICS_PORT = 50051, 9003  # of mooncake_master
PARAMETERS = frozenset(
    {"protocol", "device", "segment", "metadata", "hostname", "replicas", "soft_pin", "hard_pin", "metrics"}
)
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


@dataclass(frozen=True)
class Settings:
    """How to reach one master, and what this client contributes."""

    master: str  # host:port
    protocol: str = "tcp"
    device: str = ""  # of RDMA
    segment_bytes: int = 0  # of this process's memory, lent to all clients
    metadata: str = "P2PHANDSHAKE"
    hostname: str = ""  # by which the other clients reach this one; empty: the address from which it reaches the master
    replicas: int = 1
    soft_pin: bool = False
    hard_pin: bool = False
    metrics: str = ""  # host:port of the master's own figures

    @property
    def address(self) -> tuple[str, int]:
        return _address(self.master)

    @property
    def metrics_address(self) -> tuple[str, int]:
        return _address(self.metrics)


def read_settings(
    text: str, place: str, path: str, parameters: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> Settings:
    """The settings of the parsed URL `text`. ConfigError: it is invalid, or the library is missing."""
    if path not in ("", "/"):
        raise ConfigError(f"{text}: a mooncake URL has a master and no path, as in mooncake://10.0.0.1:{DEFAULT_PORT}")
    file = _file(environ.get("MOONCAKE_CONFIG_PATH"))
    found = {name: parameters[name] for name in _ELSEWHERE if name in parameters}
    if place:
        found["master"] = place
    sources = dict.fromkeys(found, text)
    for name, (variable, field) in _ELSEWHERE.items():
        if name not in found and environ.get(variable):
            found[name], sources[name] = environ[variable], variable
        elif name not in found and str(file.get(field) or ""):
            found[name], sources[name] = str(file[field]), f"{field} in {environ['MOONCAKE_CONFIG_PATH']}"
    if "master" not in found:
        raise ConfigError(f"{text}: say where the master is, as in mooncake://10.0.0.1:{DEFAULT_PORT}")
    master = _with_port(found["master"], DEFAULT_PORT, sources["master"])
    host = master.rpartition(":")[0]
    segment_bytes = 0
    if "segment" in found:
        size = parse_size if sources["segment"] == text else _their_size
        segment_bytes = size(found["segment"])
    replicas = parameters.get("replicas", "1")
    if not re.fullmatch("[1-9][0-9]?", replicas):
        raise ConfigError(f"{text}: replicas is a number from 1 to 99, not {replicas!r}")
    settings = Settings(
        master,
        found.get("protocol", "tcp").lower(),
        found.get("device", ""),
        segment_bytes,
        found.get("metadata", "P2PHANDSHAKE"),
        found.get("hostname", ""),
        int(replicas),
        _flag(text, parameters, "soft_pin"),
        _flag(text, parameters, "hard_pin"),
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
        raise ConfigError(f"MOONCAKE_CONFIG_PATH: {path} holds no settings")
    return content


def _with_port(place: str, port: int, source: str) -> str:
    """The place as host:port; an IPv6 address is in brackets."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:/@\s]+)(?::([0-9]{1,5}))?", place)
    if match is None or not 0 < int(match[2] or port) < 1 << 16:
        raise ConfigError(f"{source}: {place!r} is not host:port")
    return f"{match[1]}:{match[2] or port}"


def _address(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def _their_size(text: str) -> int:
    """A size as Mooncake reads it: 1 gb is 1024**3 bytes."""
    match = _SIZE.fullmatch(text)
    try:
        assert match is not None
        return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
    except (AssertionError, ValueError):
        raise ConfigError(f"MOONCAKE_GLOBAL_SEGMENT_SIZE: {text!r} is not a size, such as 4gb") from None


def _flag(text: str, parameters: Mapping[str, str], name: str) -> bool:
    value = parameters.get(name, "false").lower()
    if value not in ("true", "false", "1", "0", "yes", "no"):
        raise ConfigError(f"{text}: {name} is true or false, not {value!r}")
    return value in ("true", "1", "yes")
