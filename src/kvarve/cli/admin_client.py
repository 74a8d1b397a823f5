"""The client of a running server's /admin/storage, for `kvarve storage`, and the text of its answers."""

from typing import Any

import httpx

from kvarve.errors import ConfigError, StorageError
from kvarve.pages.sizes import format_size
from kvarve.reference.server.serve_settings import check_key
from kvarve.reports import aligned

CONNECT_S = 10.0
ANSWER_S = 600.0  # a large storage may be slow to open


def storage(method: str, server: str, key: str, body: dict[str, Any] | None = None) -> str:
    """Call a server's /admin/storage; returns the storage's status as text.

    ConfigError: no such server, or it refuses; StorageError: the change failed.
    """
    if not server.startswith(("http://", "https://")):
        raise ConfigError(f"--server must be the URL of a server, such as http://127.0.0.1:8000, got {server!r}")
    check_key("admin", key)
    headers = {b"Authorization": b"Bearer " + key.encode("utf-8", "surrogateescape")}  # as `AccessControl` reads it
    try:
        # No proxy from the environment: the key is for this server alone.
        with httpx.Client(timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S), trust_env=False) as client:
            response = client.request(method, server.rstrip("/") + "/admin/storage", headers=headers, json=body)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:  # also a URL that is no UTF-8
        raise ConfigError(f"{server} cannot be asked: no answer: {e}") from None
    try:
        answer = response.json()
        if response.status_code == 200:
            return describe(answer)
        message = str(answer["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{server} must be a kvarve server, and answers {response.status_code}") from None
    raise (StorageError if response.status_code >= 500 else ConfigError)(f"{server}: {message}")


def describe(status: dict[str, Any]) -> str:
    """A storage's status as text."""
    lines = [("storage", "none")]
    if status["attached"]:
        state = f"{'up' if status['up'] else 'down'} for {status['for_s']:.0f} s"
        if status["last_error"]:
            state += f"; last trouble: {status['last_error']}"
        urls = [status["url"]] if isinstance(status["url"], str) else status["url"] or ["one that has no URL"]
        lines = [("storage", ", then ".join(urls)), ("state", state)]
        if status["bytes"] is not None:
            most = "" if status["capacity_bytes"] is None else f" of {format_size(status['capacity_bytes'])}"
            lines.append(("holds", f"{status['objects']} objects, {format_size(status['bytes'])}{most}"))
        if status["read_only"]:
            lines.append(("stores", "nothing: it is only read"))
        elif status["room_bytes"] is not None:
            lines.append(("room", f"{format_size(status['room_bytes'])} of the disk are left for it"))
        if status["lost_objects"] or status["damaged_objects"]:
            lost, damaged = status["lost_objects"] or 0, status["damaged_objects"] or 0
            lines.append(("trouble", f"{lost} objects lost, {damaged} that could not be read"))
        lines += [(f"compressed {pool}", _compressed(total)) for pool, total in status["compressed"].items()]
        lines.append(("pages", _counts(status["pages"])))
        lines += [(name, _counts(lane)) for name, lane in status["lanes"].items()]
    lines.append(("policies", f"write {status['write_policy']}, storage wait {status['storage_wait']}"))
    if status.get("previous_closed") is False:
        lines.append(("before", "a call to the storage that was attached hangs: it is closed when that comes back"))
    return aligned(lines)


def _compressed(total: dict[str, int]) -> str:
    plain, stored = total["plain_bytes"], total["stored_bytes"]
    share = f", {stored / plain:.0%}" if plain else ""
    off = "" if total["on"] else "; off, as it does not pay"
    return f"{format_size(plain)} stored as {format_size(stored)}{share}{off}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
