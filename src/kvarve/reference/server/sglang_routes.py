"""SGLang's endpoints, for its clients: /generate, what the server is, and whether it answers."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from fastapi import Request as Http

from kvarve import __version__
from kvarve.errors import Busy
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.requests import Request, Sampling
from kvarve.reference.server.answers import RETRY_AFTER
from kvarve.reference.server.api import Refused
from kvarve.reference.server.generate import GenerateRequest
from kvarve.reference.server.openapi import Generated, Json, Ok, reads, streams
from kvarve.storage.urls import shown

HEALTH_S = 20.0  # as SGLang
LOOK_S = 0.02


class Probe:
    """Computes a token to see whether the engine does; several that ask at once share one answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: asyncio.Task[bool] | None = None

    async def health(self) -> Ok:
        """200 if a token was computed within 20 s, for this or for another request."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._computes())
        if self._engine.broken or not await asyncio.shield(self._asked):
            why = self._engine.broken or f"no token was computed within {HEALTH_S:.0f} s"
            raise Refused(503, why, headers=RETRY_AFTER)
        return Ok()

    async def _computes(self) -> bool:
        before, end = self._progress(), time.monotonic() + HEALTH_S
        request = Request([0], Sampling(max_tokens=1), read_cache=False, deliver=lambda chunk: None)
        with suppress(Busy):  # every place is taken: then others' tokens have to come
            self._engine.submit(request)
        while self._progress() == before:
            if time.monotonic() > end or self._engine.broken:
                self._engine.abort(request)
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _progress(self) -> tuple[int, int]:
        counts = self._engine.counts
        return counts.output_tokens, counts.computed_tokens


def folder(model: LoadedModel) -> str:
    """The checkpoint's, from which a client on the same machine loads the tokenizer."""
    return str(model.tokenizer.name_or_path)


def describe(engine: Engine, name: str) -> dict[str, Any]:
    """/model_info."""
    config, place = engine.model.model.config, folder(engine.model)
    return {
        "model_path": place,
        "tokenizer_path": place,
        "served_model_name": name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": getattr(config, "model_type", None),
        "architectures": getattr(config, "architectures", None),
    }


def state(engine: Engine, name: str) -> dict[str, Any]:
    """/server_info."""
    cache, model = engine.cache, engine.model
    policies, (running, waiting) = cache.worker.config.policies, engine.load()
    told = describe(engine, name)
    return {
        **{field: told[field] for field in ("model_path", "tokenizer_path", "served_model_name")},
        "dtype": model.identity.dtype,
        "context_length": model.max_tokens,
        "page_size": model.identity.page_tokens,
        "chunked_prefill_size": model.identity.chunk_tokens,
        "tp_size": cache.identity.ranks,
        "dp_size": 1,
        "max_total_num_tokens": cache.scheduler.capacity_tokens(),
        "radix_eviction_policy": policies.eviction,
        "enable_hierarchical_cache": bool(cache.worker.config.host_memory),
        "hicache_write_policy": policies.write_policy,
        **storage_state(engine),
        "internal_states": [{"num_running_reqs": running, "num_waiting_reqs": waiting}],
        "version": __version__,
        "server": "kvarve",
    }


def storage_state(engine: Engine) -> dict[str, Any]:
    """Which storage is attached, in SGLang's names."""
    attached, policies = engine.cache.worker.attached, engine.cache.worker.config.policies
    urls = [] if attached is None else [shown(url) for url in attached.urls]
    return {
        "hicache_storage_backend": ", then ".join(urls) or None,
        "hicache_storage_backend_extra_config": None,
        "hicache_storage_prefetch_policy": policies.prefetch_policy,
        "hicache_write_policy": policies.write_policy,
    }


def add_sglang(
    open_to_all: APIRouter, guarded: APIRouter, engine: Engine, name: str, generate: Callable[[Http], Any]
) -> None:
    """All but the operator's; `guarded` is for those that need the API key."""

    async def model_info() -> Json:
        """The model's folder and name."""
        return describe(engine, name)

    async def server_info() -> Json:
        """Pages, limits, policies, the storage, the load."""
        return state(engine, name)

    said = streams(reads(GenerateRequest, 403, 404))
    for add in (guarded.post, guarded.put):
        add("/generate", response_model=Generated | list[Generated], **said)(generate)
    for path in ("/model_info", "/get_model_info"):
        guarded.get(path)(model_info)
    for path in ("/server_info", "/get_server_info"):
        guarded.get(path)(server_info)
    open_to_all.get("/health_generate")(Probe(engine).health)
