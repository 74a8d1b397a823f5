"""What lies between a server's sockets and its application: keys, TLS, names and pages that it answers to, drain."""

from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarve.errors import ConfigError
from kvarve.reference.server.api import Refused
from kvarve.reference.server.connections import Connections, most_connections
from kvarve.reference.server.drain import Drain
from kvarve.reference.server.hosts import NamedHosts, check_hosts, check_origins, names_for, with_origins
from kvarve.reference.server.serve_settings import Settings
from kvarve.reference.server.tls import Certificate


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

    def around(self, address: str) -> Callable[[ASGIApp], ASGIApp]:
        """Puts an application behind it. `address`: what its socket is bound to."""
        names = names_for(self._settings.allowed_host, self._settings.host, address)

        def put(app: ASGIApp) -> ASGIApp:
            answering = OneLength(with_origins(self.drain.around(app), self._settings.cors_origin))
            return answering if names is None else NamedHosts(answering, names)

        return put


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
        refused = Refused(400, message, code="two_lengths")
        await JSONResponse(refused.body(), refused.status, {"Connection": "close"})(scope, receive, send)
