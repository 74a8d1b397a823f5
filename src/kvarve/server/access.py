"""Access control: bearer keys, and no requests that a browser sends on behalf of another site's page."""

import hashlib
import hmac

from fastapi import Request as Http

from kvarve.server.api import Refused

JSON = "application/json"
# Media types that a browser sends to any site without a CORS preflight.
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


class AccessControl:
    """Admits requests that carry the key. The comparison's time says nothing about the key, not even its length."""

    def __init__(self, key: str, name: str) -> None:
        """`name`: of the key in messages and error codes, such as "API"."""
        # Bytes of an environment variable that are not UTF-8 read as surrogates; this restores them.
        self._digest = _digest(b"Bearer " + key.encode("utf-8", "surrogateescape"))
        self._name = name

    async def admit(self, http: Http) -> None:
        given = http.headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(_digest(given), self._digest):
            return
        message = f"wrong {self._name} key" if given else f"this needs the {self._name} key: Authorization: Bearer KEY"
        code, headers = f"invalid_{self._name.lower()}_key", {"WWW-Authenticate": "Bearer"}
        raise Refused(401, message, code=code, headers=headers)


async def no_pages(http: Http) -> None:
    """Refuse a request that a browser sends on behalf of any page: the server has no pages of its own."""
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


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
