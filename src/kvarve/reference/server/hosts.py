"""Which names the server answers to, and which web pages may read its answers.

DNS rebinding lets a page of any site send requests to a server on its visitor's machine, with the site's name in Host.
An IP address or `localhost` there cannot come of it, so these are always answered.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarve.errors import ConfigError
from kvarve.reference.server.api import Refused

ANY = "*"
_ORIGIN = re.compile(r"https?://[a-z0-9._-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def check_hosts(names: Sequence[str]) -> None:
    """ConfigError for a name that no Host header has."""
    for name in names:
        if name != ANY and not _NAME.fullmatch(name.lower()):
            raise ConfigError(
                f"--allowed-host: {name[:80]!r} is no name: give it without scheme and port, such as "
                "kvarve.example.com, *.example.com, or '*' for any"
            )


def check_origins(origins: Sequence[str]) -> None:
    """ConfigError for what no browser sends as Origin, and for all of them: each page that may ask is named."""
    for origin in origins:
        if origin == ANY:
            raise ConfigError("--cors-origin: every page of the web is too many: give each origin that may ask")
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin: {origin[:80]!r} is no origin: give scheme, name and port in lower case and no path, "
                "such as https://chat.example.com"
            )


def names_for(allowed: Sequence[str], host: str, address: str) -> tuple[str, ...] | None:
    """The names to answer to, besides addresses and `localhost`; None for any.

    `allowed`: what the operator names; `host` and `address`: what the server listens on, as given and as bound. Unless
    names are given, a server on the loopback interface answers to none but its own, as only a browser on this machine
    could mean it by another; any other server is reached under names that it cannot know.
    """
    if ANY in allowed or (not allowed and not ip_address(address).is_loopback):
        return None
    return tuple(name.lower() for name in (*allowed, host) if _NAME.fullmatch(name.lower()))


class NamedHosts:
    """`app`, for requests whose Host is one of the names."""

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        self._app = app
        self._names = {name for name in names if not name.startswith("*.")}
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if all(self._answers_to(_name_in(value)) for value in given):
            await self._app(scope, receive, send)
            return
        message = "this server does not answer to the name in Host: --allowed-host adds one"
        await Refused(421, message, code="unknown_host").response()(scope, receive, send)

    def _answers_to(self, name: str) -> bool:
        if name in self._names or name.endswith(self._endings) or name in ("", "localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _name_in(host: str) -> str:
    """The name or address in a Host header."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, whose answers pages of these origins may read; no cookie admits them."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )
