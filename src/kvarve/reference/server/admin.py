"""The operator's endpoints: /admin/storage, and SGLang's for the same. Without an admin key they are off."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from fastapi import APIRouter, Depends
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response

from kvarve.reference.engine.engine import Engine
from kvarve.reference.server.access import Access, no_pages
from kvarve.reference.server.api import AttachHiCache, AttachRequest, parse
from kvarve.reference.server.request_log import changes, seen
from kvarve.reference.server.sglang_routes import storage_state
from kvarve.reference.server.work_threads import apart
from kvarve.storage.urls import shown

MOST_SHOWN = 500  # characters of URLs in the log
HICACHE = "/hicache/storage-backend"


def admin_routes(
    engine: Engine, access: Access, read: Callable[[Http], AbstractAsyncContextManager[bytes]]
) -> APIRouter:
    """GET, PUT and DELETE of both; `read` yields a request's body within the server's limits."""
    admin = engine.admin

    async def status() -> Response:
        return JSONResponse(await apart(admin.status))

    def attach(kind: type[AttachRequest] | type[AttachHiCache]) -> Callable[[Http], Awaitable[Response]]:
        async def attached(http: Http) -> Response:
            async with read(http) as body:
                given = await apart(lambda: parse(kind, body).storage())

            urls = [given.url] if isinstance(given.url, str) else given.url
            seen(http).act = f"attach {', '.join(map(shown, urls))[:MOST_SHOWN]!r}"

            def change() -> Response:
                return JSONResponse(
                    admin.attach(
                        given.url, prefetch=given.prefetch_policy, write=given.write_policy, back_up=bool(given.back_up)
                    )
                )

            return await apart(change)

        return attached

    async def detach() -> Response:
        return await apart(lambda: JSONResponse(admin.detach()))

    async def clear() -> Response:
        """Drop this model's pages from the storage; those in memory stay."""
        return JSONResponse({"dropped_objects": await apart(admin.clear)})

    async def hicache_status() -> Response:
        return JSONResponse(storage_state(engine) | await apart(admin.status))

    router = APIRouter(dependencies=[Depends(changes), Depends(no_pages), Depends(access.operator)])
    for path, kind, told in (("/admin/storage", AttachRequest, status), (HICACHE, AttachHiCache, hicache_status)):
        router.get(path)(told)
        router.put(path)(attach(kind))
        router.delete(path)(detach)
    router.post(f"{HICACHE}/clear")(clear)
    return router
