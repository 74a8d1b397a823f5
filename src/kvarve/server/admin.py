"""The operator's endpoint, /admin/storage. It needs the admin key and is off without one."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import APIRouter, Depends
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response

from kvarve.admin import Admin
from kvarve.server.access import AccessControl, no_pages
from kvarve.server.api import AttachRequest, Refused, parse
from kvarve.server.lanes import apart


def admin_routes(
    admin: Admin, access: AccessControl | None, read: Callable[[Http], AbstractAsyncContextManager[bytes]]
) -> APIRouter:
    """GET, PUT and DELETE of /admin/storage; `read` yields a request's body within the server's limits."""

    async def admit(http: Http) -> None:
        if access is None:
            message = "the server has no admin key, so this is off: start it with --admin-key or $KVARVE_ADMIN_KEY"
            raise Refused(403, message, code="no_admin_key")
        await access.admit(http)

    async def status() -> Response:
        return JSONResponse(await apart(admin.status))

    async def attach(http: Http) -> Response:
        async with read(http) as body:
            given = await apart(lambda: parse(AttachRequest, body))

        def change() -> Response:
            return JSONResponse(
                admin.attach(
                    given.url, prefetch=given.prefetch_policy, write=given.write_policy, back_up=bool(given.back_up)
                )
            )

        return await apart(change)

    async def detach() -> Response:
        return await apart(lambda: JSONResponse(admin.detach()))

    router = APIRouter(prefix="/admin/storage", dependencies=[Depends(no_pages), Depends(admit)])
    router.get("")(status)
    router.put("")(attach)
    router.delete("")(detach)
    return router
