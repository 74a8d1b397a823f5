"""What lies between a server's sockets and its application: keys, TLS, names and pages that it answers to, drain.

TLS has a certificate chain and its key from two PEM files, read again on SIGHUP when they have been renewed. A drain
refuses new requests from SIGTERM on, while running ones end; health checks say so to load balancers.

DNS rebinding lets a page of any site send requests to a server on its visitor's machine, with the site's name in Host.
An IP address or `localhost` there cannot come of it, so these are always answered.
"""

import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence, Set
from ipaddress import ip_address
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarve.errors import ConfigError
from kvarve.reference.server.api import Refused
from kvarve.reference.server.connections import Connections, most_connections
from kvarve.reference.server.request_log import refuse
from kvarve.reference.server.serve_settings import Settings

log = logging.getLogger(__name__)

ALWAYS = ("/metrics", "/livez", "/live/data")  # answered to the end of a drain
LOOK_S = 0.1  # as uvicorn at its end
ANY = "*"
_ORIGIN = re.compile(r"https?://[a-z0-9._-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class Edge:
    """ConfigError if the settings, the file of keys or the certificate cannot be used."""

    def __init__(self, settings: Settings) -> None:
        check_hosts(settings.allowed_host)
        check_origins(settings.cors_origin)
        if settings.tls_key is not None and settings.tls_cert is None:
            raise ConfigError("--tls-key needs --tls-cert, of which it is the key")
        self._settings = settings
        self.keys, self.drain = settings.keyring(), Drain()
        chain = settings.tls_cert
        self.certificate = None if chain is None else Certificate(chain, settings.tls_key)

    def connections(self) -> Connections:
        """The server's connections, which begin with TLS if there is a certificate."""
        context = None if self.certificate is None else self.certificate.context
        return Connections(self._settings.max_connections or most_connections(), context=context)

    @property
    def reloads(self) -> bool:
        """Whether there is something to read again."""
        return self.certificate is not None or self._settings.api_keys is not None

    def reload(self) -> None:
        self.keys.reload()
        if self.certificate is not None:
            self.certificate.reload()

    def around(self, app: ASGIApp, address: str) -> ASGIApp:
        """`app` behind it. `address`: what its socket is bound to."""
        names = names_for(self._settings.allowed_host, self._settings.host, address)
        answering = OneLength(with_origins(self.drain.around(app), self._settings.cors_origin))
        return answering if names is None else NamedHosts(answering, names)


class OneLength:
    """`app`, for requests whose body has one length. One that is sized and chunked at once ends elsewhere for a proxy
    that reads the other, which takes the rest for the next client's request (RFC 9112, 6.3)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope.get("headers", ())]
        if b"content-length" not in names or b"transfer-encoding" not in names:
            await self._app(scope, receive, send)
            return
        message = "a request has Content-Length or Transfer-Encoding, not both"
        refused = Refused(400, message, code="two_lengths", headers={"Connection": "close"})
        await refuse(refused, scope, receive, send)


class Drain:
    """Whether requests are admitted. Any thread may ask it to drain."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.running: Set[object] = frozenset()  # uvicorn's tasks, one for each request
        self.draining = False
        self._clock, self._sleep = clock, sleep

    def around(self, app: ASGIApp) -> ASGIApp:
        async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
            if not self.draining or scope["path"] in ALWAYS:
                await app(scope, receive, send)
                return
            message = "the server is draining: another one has to answer this"
            refused = Refused(503, message, code="draining", headers={"Retry-After": "1", "Connection": "close"})
            await refuse(refused, scope, receive, send)

        return admitted

    def drain(self, patience_s: float, at_least_s: float = 0.0) -> int:
        """Admit no more requests, and wait until those that run have ended; returns how many have not after
        `patience_s`. New requests get 503 for `at_least_s` at least: a balancer needs that long to look elsewhere."""
        self.draining, begun_s = True, self._clock()
        while (s := self._clock() - begun_s) < at_least_s or (self.running and s < patience_s):
            self._sleep(LOOK_S)
        return len(self.running)


class Certificate:
    """What the server shows to clients: TLS 1.2 and newer. Connections that are open keep what they began with."""

    def __init__(self, chain: Path, key: Path | None) -> None:
        """`key`: a file of its own, unless the chain's file has it. ConfigError if they cannot be used."""
        self._chain, self._key = chain, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(self.context)

    def reload(self) -> None:
        """Show what the files have now. Files that cannot be used are logged, and the certificate stays."""
        try:
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))  # a failed load may leave half of it
            self._load(self.context)
        except ConfigError as e:
            log.error("the certificate stays as it is: %s", e)
        else:
            log.info("certificate read again: %s", self._chain)

    def _load(self, context: ssl.SSLContext) -> None:
        for option, path in (("--tls-cert", self._chain), ("--tls-key", self._key)):
            if path is not None:
                try:
                    path.open("rb").close()
                except OSError as e:
                    raise ConfigError(f"{option}: {path}: {e.strerror}") from None
        try:
            context.load_cert_chain(self._chain, self._key, password=_no_password)
        except (ssl.SSLError, ValueError) as e:
            what = "belong together" if "MISMATCH" in str(e).upper() else "be a PEM certificate and its key"
            raise ConfigError(
                f"--tls-cert {self._chain}, --tls-key {self._key or 'not given'}: they must {what}"
            ) from None


def _no_password() -> str:
    """Of an encrypted key: without this, OpenSSL would ask for it at the terminal."""
    raise ValueError


def check_hosts(names: Sequence[str]) -> None:
    """ConfigError for a name that no Host header has."""
    for name in names:
        if name != ANY and not _NAME.fullmatch(name.lower()):
            raise ConfigError(
                f"--allowed-host: {name[:80]!r} must be a name without scheme and port, such as "
                "kvarve.example.com, *.example.com, or '*' for any"
            )


def check_origins(origins: Sequence[str]) -> None:
    """ConfigError for what no browser sends as Origin, and for all of them: each page that may ask is named."""
    for origin in origins:
        if origin == ANY:
            raise ConfigError("--cors-origin must be one origin, not every page of the web: give each that may ask")
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin: {origin[:80]!r} must be an origin: scheme, name and port in lower case, no path, "
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

    def __init__(self, app: ASGIApp, names: tuple[str, ...], instead: str = "--allowed-host adds one") -> None:
        """`instead`: what its user can do about another name."""
        self._app, self._instead = app, instead
        self._names = {name for name in names if not name.startswith("*.")}
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if all(self._answers_to(_name_in(value)) for value in given):
            await self._app(scope, receive, send)
            return
        message = f"this server does not answer to the name in Host: {self._instead}"
        await refuse(Refused(421, message, code="unknown_host"), scope, receive, send)

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
