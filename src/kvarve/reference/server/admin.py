"""The operator's endpoints: /admin/storage, and SGLang's for the same. Without an admin key they are off."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from fastapi import APIRouter
from fastapi import Request as Http
from pydantic import BaseModel

from kvarve.reference.engine.engine import Engine
from kvarve.reference.server.access import Access
from kvarve.reference.server.api import AttachHiCache, AttachRequest, parse
from kvarve.reference.server.engine_routes import storage_state
from kvarve.reference.server.openapi import Json, errors, reads
from kvarve.reference.server.request_log import seen
from kvarve.reference.server.work_threads import apart
from kvarve.storage.urls import shown

MOST_SHOWN = 500  # characters of URLs in the log
HICACHE = "/hicache/storage-backend"


class Dropped(BaseModel):
    dropped_objects: int


def admin_routes(
    engine: Engine, access: Access, read: Callable[[Http], AbstractAsyncContextManager[bytes]]
) -> APIRouter:
    """GET, PUT and DELETE of both; `read` yields a request's body within the server's limits."""
    admin = engine.admin

    async def status() -> Json:
        """The storage."""
        return await apart(admin.status)

    async def hicache_status() -> Json:
        """The storage, in SGLang's names."""
        return storage_state(engine) | await apart(admin.status)

    def attach(kind: type[AttachRequest] | type[AttachHiCache]) -> Callable[[Http], Awaitable[Json]]:
        async def attached(http: Http) -> Json:
            """Attach a storage, or several as tiers."""
            async with read(http) as body:
                given = await apart(lambda: parse(kind, body).storage())

            urls = [given.url] if isinstance(given.url, str) else given.url
            seen(http).act = f"attach {', '.join(map(shown, urls))[:MOST_SHOWN]!r}"

            def change() -> Json:
                return admin.attach(
                    given.url, wait=given.storage_wait, write=given.write_policy, back_up=bool(given.back_up)
                )

            return await apart(change)

        return attached

    async def detach() -> Json:
        """Detach the storage."""
        return await apart(admin.detach)

    async def clear() -> Dropped:
        """Drop this model's pages from the storage; those in memory stay."""
        return Dropped(dropped_objects=await apart(admin.clear))

    router, refusing = access.for_operators(), errors(400, 409)
    for path, kind, told in (("/admin/storage", AttachRequest, status), (HICACHE, AttachHiCache, hicache_status)):
        router.get(path)(told)
        router.put(path, **reads(kind, 409))(attach(kind))
        router.delete(path, responses=refusing)(detach)
    router.post(f"{HICACHE}/clear", responses=refusing)(clear)
    return router
