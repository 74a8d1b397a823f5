"""Access control: bearer keys, and no requests that a browser sends on behalf of another site's page."""

from fastapi import APIRouter, Depends
from fastapi import Request as Http
from fastapi.params import Depends as Dependency
from fastapi.security import HTTPBearer

from kvarve.reference.server.api import Refused
from kvarve.reference.server.keyfile import Keyring
from kvarve.reference.server.openapi import errors
from kvarve.reference.server.request_log import acts, changes, seen

JSON = "application/json"
# Media types that a browser sends to any site without a CORS preflight.
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_BEARER = b"Bearer "
# What the document says of a key; `Access` looks at it.
_KEY, _ADMIN_KEY = (Depends(HTTPBearer(scheme_name=name, auto_error=False)) for name in ("key", "admin_key"))


class Access:
    """Who may ask what of one server. Its methods are dependencies of endpoints, and routers with these."""

    def __init__(self, keys: Keyring) -> None:
        self.keys = keys
        # A flush needs an admin key if there may be one.
        self.flushing = self.operator if keys.guards_admin else self.api

    def for_clients(self) -> APIRouter:
        """A router of endpoints that need an API key, if the server has any."""
        return self._router([Depends(no_simple_requests), Depends(self.api)], admin=False)

    def for_flushes(self) -> APIRouter:
        before = [Depends(acts), Depends(no_pages), Depends(no_forms), Depends(self.flushing)]
        return self._router(before, admin=self.keys.guards_admin, statuses=(403, 415))

    def for_operators(self) -> APIRouter:
        """A router of endpoints that need an admin key."""
        return self._router([Depends(changes), Depends(no_pages), Depends(self.operator)], admin=True, statuses=(403,))

    def _router(self, before: list[Dependency], *, admin: bool, statuses: tuple[int, ...] = ()) -> APIRouter:
        if admin or self.keys.guards_api:
            before, statuses = [*before, _ADMIN_KEY if admin else _KEY], (401, *statuses)
        return APIRouter(dependencies=before, responses=errors(*statuses))

    async def api(self, http: Http) -> None:
        """The request needs an API key, if the server has any."""
        if self.keys.guards_api:
            self._admitted(http, admin=False)

    async def operator(self, http: Http) -> None:
        """The request needs an admin key, and is refused if the server has none."""
        if not self.keys.guards_admin:
            message = "the server has no admin key, so this is off: start it with --admin-key or $KVARVE_ADMIN_KEY"
            raise Refused(403, message, code="no_admin_key")
        self._admitted(http, admin=True)

    def _admitted(self, http: Http, *, admin: bool) -> None:
        given = http.headers.get("authorization", "").encode("latin-1")
        key = self.keys.find(given.removeprefix(_BEARER), admin=admin) if given.startswith(_BEARER) else None
        if key is None:
            name = "admin" if admin else "API"
            asked = f"this needs the {name} key: Authorization: Bearer KEY"
            message = f"wrong {name} key" if "authorization" in http.headers else asked
            code, headers = f"invalid_{name.lower()}_key", {"WWW-Authenticate": "Bearer"}
            raise Refused(401, message, code=code, headers=headers)
        seen(http).key = key


async def no_pages(http: Http) -> None:
    """Refuse a request that a browser sends on behalf of any page: the live page changes nothing."""
    if _of_a_page(http):
        raise Refused(403, "no page in a browser may ask for this", code="from_a_page")


async def no_browsers(http: Http) -> None:
    """Refuse a GET that changes something to any browser: it may send one ahead of what its user types."""
    if "sec-fetch-site" in http.headers:
        raise Refused(403, "no browser may ask for this with GET: use POST", code="from_a_page")


async def no_simple_requests(http: Http) -> None:
    """Refuse a request that a browser sends on behalf of a page without a CORS preflight."""
    if http.method not in ("GET", "HEAD") and _of_a_page(http) and _media_type(http) != JSON:
        message = f"no page in a browser may ask for this without Content-Type: {JSON}"
        raise Refused(403, message, code="from_a_page")


async def no_forms(http: Http) -> None:
    """Refuse form bodies: older browsers send them from any page without `Origin` or `Sec-Fetch-Site`."""
    if (kind := _media_type(http)) in SIMPLE:
        raise Refused(415, f"this is not read as {kind}: send no body, or Content-Type: {JSON}")


def _of_a_page(http: Http) -> bool:
    """Browsers send one of these headers with any request that can change state; other clients send neither."""
    return "origin" in http.headers or http.headers.get("sec-fetch-site", "none") != "none"


def _media_type(http: Http) -> str:
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()
