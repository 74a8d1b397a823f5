"""What the servers of the tests are set to."""

from pathlib import Path

from kvarve.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.server.serve import Settings

PAGE, CHUNK = 16, 64


def settings(checkpoint: Path, storage: Path | None = None, **more: object) -> Settings:
    url = f"file://{storage}?capacity=64MiB" if storage else None
    cache = CacheConfig(
        device_memory=8 << 20, host_memory=16 << 20, storage=url, policies=Policies(prefetch_policy="wait_complete")
    )
    shape = {"page_tokens": PAGE, "chunk_tokens": CHUNK, "served_model_name": "singer", "port": 0, "cache": cache}
    return Settings(model=str(checkpoint), **(shape | more))  # type: ignore[arg-type]
