"""Access control: bearer keys, their limits, and no requests that a browser sends on behalf of another site's page."""

import time

from fastapi import Request as Http

from kvarve.reference.server.api import Refused
from kvarve.reference.server.keyfile import Key, Keyring
from kvarve.reference.server.quotas import Quotas
from kvarve.reference.server.request_log import seen

JSON = "application/json"
# Media types that a browser sends to any site without a CORS preflight.
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_BEARER = b"Bearer "


class Access:
    """Who may ask what of one server. Its methods are dependencies of endpoints."""

    def __init__(self, keys: Keyring) -> None:
        self.keys, self.quotas = keys, Quotas(time.monotonic)
        # A flush needs an admin key if there may be one.
        self.flushing = self.operator if keys.guards_admin else self.api

    async def api(self, http: Http) -> None:
        """The request needs an API key, if the server has any; one that is no GET counts towards the key's limits."""
        if self.keys.guards_api:
            key = self._admitted(http, admin=False)
            if http.method not in ("GET", "HEAD"):
                seen(http).visit = self.quotas.begin(key)

    async def bodies(self, http: Http) -> None:
        """A request with a body needs a key of either kind, if the server has API keys: nothing is read for a stranger.
        Which endpoints the key opens is for others to say, and what is asked counts towards no limit here."""
        sends = http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers
        if sends and self.keys.guards_api:
            self._admitted(http, admin=self._given(http, admin=True) is not None)

    async def operator(self, http: Http) -> None:
        """The request needs an admin key, and is refused if the server has none."""
        if not self.keys.guards_admin:
            message = "the server has no admin key, so this is off: start it with --admin-key or $KVARVE_ADMIN_KEY"
            raise Refused(403, message, code="no_admin_key")
        self._admitted(http, admin=True)

    def _admitted(self, http: Http, *, admin: bool) -> Key:
        key = self._given(http, admin=admin)
        if key is None:
            name, given = "admin" if admin else "API", "authorization" in http.headers
            message = f"wrong {name} key" if given else f"this needs the {name} key: Authorization: Bearer KEY"
            code, headers = f"invalid_{name.lower()}_key", {"WWW-Authenticate": "Bearer"}
            raise Refused(401, message, code=code, headers=headers)
        seen(http).key = key.name
        return key

    def _given(self, http: Http, *, admin: bool) -> Key | None:
        given = http.headers.get("authorization", "").encode("latin-1")
        return self.keys.find(given.removeprefix(_BEARER), admin=admin) if given.startswith(_BEARER) else None


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
