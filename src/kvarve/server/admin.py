"""The operator's side of the server: /admin/storage, for who has the admin key. No key, no admin."""

import asyncio
import hashlib
import hmac
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from fastapi import APIRouter, Depends
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response

from kvarve.admin import Admin
from kvarve.runtime import UnderWay
from kvarve.server.api import AttachAsked, Refused, parse

T = TypeVar("T")

WRONG_KEYS, WITHIN_S = 5, 60.0  # so many wrong keys within so long, and wrong keys are not looked at for a while


class Doorkeeper:
    """Lets in who has the key, always; who tries others too often is told to wait."""

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._digest, self._clock = _digest(b"Bearer " + key.encode()), clock
        self._wrong: deque[float] = deque(maxlen=WRONG_KEYS)  # when the last wrong keys came
        self._lock = threading.Lock()

    def admit(self, authorization: bytes) -> None:
        """Refused unless this is the key. How long that takes says nothing about it, not even its length."""
        if hmac.compare_digest(_digest(authorization), self._digest):
            return
        headers = {"WWW-Authenticate": "Bearer"}
        if not authorization:
            raise Refused(401, "this needs the admin key: Authorization: Bearer KEY", headers=headers)
        now = self._clock()
        with self._lock:
            wait_s = self._wrong[0] + WITHIN_S - now if len(self._wrong) == WRONG_KEYS else 0.0
            self._wrong.append(now)
        if wait_s > 0:
            headers = {"Retry-After": str(math.ceil(wait_s))}
            raise Refused(429, "too many wrong admin keys: wait", code="too_many_wrong_keys", headers=headers)
        raise Refused(401, "wrong admin key", code="invalid_admin_key", headers=headers)


def admin_routes(admin: Admin, key: str | None, read: Callable[[Http], Awaitable[bytes]]) -> APIRouter:
    """GET, PUT and DELETE of /admin/storage; `read` answers a body, as far as it may go."""
    door = None if key is None else Doorkeeper(key)

    async def admit(http: Http) -> None:
        if door is None:
            message = "the server has no admin key, so this is off: start it with --admin-key or $KVARVE_ADMIN_KEY"
            raise Refused(403, message, code="no_admin_key")
        door.admit(http.headers.get("authorization", "").encode("latin-1"))

    async def status() -> Response:
        return JSONResponse(await _apart(admin.status))

    async def attach(http: Http) -> Response:
        asked = parse(AttachAsked, await read(http))

        def change() -> Response:
            return JSONResponse(
                admin.attach(
                    asked.url, prefetch=asked.prefetch_policy, write=asked.write_policy, back_up=bool(asked.back_up)
                )
            )

        return await _changed(change)

    async def detach() -> Response:
        return await _changed(lambda: JSONResponse(admin.detach()))

    router = APIRouter(prefix="/admin/storage", dependencies=[Depends(admit)])
    router.get("")(status)
    router.put("")(attach)
    router.delete("")(detach)
    return router


async def _changed(change: Callable[[], Response]) -> Response:
    try:
        return await _apart(change)
    except UnderWay as e:
        raise Refused(409, str(e), code="change_under_way") from None


async def _apart(work: Callable[[], T]) -> T:
    """Wait for something that may take long. A program that ends does not: not for this thread."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            result = work()
        except BaseException as e:  # noqa: BLE001  it belongs to who asked
            if answer.set_running_or_notify_cancel():
                answer.set_exception(e)
        else:
            if answer.set_running_or_notify_cancel():
                answer.set_result(result)

    threading.Thread(target=call, name="kvarve admin", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
