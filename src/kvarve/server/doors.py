"""Who may ask for what: by key, and never from a page of another site that somebody's browser shows."""

import hashlib
import hmac

from fastapi import Request as Http

from kvarve.server.api import Refused

JSON = "application/json"
# A browser sends these to any site without asking it first, whatever page it shows.
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


class Door:
    """Lets in whoever has the key. How long that takes says nothing about the key, not even its length."""

    def __init__(self, key: str, name: str) -> None:
        """`name`: of the key, as messages and error codes say it, such as "API"."""
        # What is no UTF-8 in an environment variable reads as surrogates; these are its bytes again.
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
    """Refuse whatever a browser sends on behalf of a page: nothing of ours is one."""
    if _of_a_page(http):
        raise Refused(403, "no page in a browser may ask for this", code="from_a_page")


async def no_simple_requests(http: Http) -> None:
    """Refuse what a browser sends on behalf of a page of another site without asking us first, whether it may."""
    if http.method not in ("GET", "HEAD") and _of_a_page(http) and _media_type(http) != JSON:
        message = f"no page in a browser may ask for this without Content-Type: {JSON}"
        raise Refused(403, message, code="from_a_page")


async def no_forms(http: Http) -> None:
    """Refuse bodies in a form that older browsers send from any page without saying so."""
    if (kind := _media_type(http)) in SIMPLE:
        raise Refused(415, f"this is not read as {kind}: send no body, or Content-Type: {JSON}")


def _of_a_page(http: Http) -> bool:
    """Browsers name the page's site in all that can change something, and what is asked by hand has none."""
    return "origin" in http.headers or http.headers.get("sec-fetch-site", "none") != "none"


def _media_type(http: Http) -> str:
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
