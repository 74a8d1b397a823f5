"""Settings of the tests' servers."""

from pathlib import Path

from kvarve.core.policies import Policies
from kvarve.server.serve import Settings

PAGE, CHUNK = 16, 64


def settings(checkpoint: Path, storage: Path | tuple[str, ...] = (), **more: object) -> Settings:
    shape = {
        "page_tokens": PAGE,
        "chunk_tokens": CHUNK,
        "served_model_name": "singer",
        "port": 0,
        "device_memory": 8 << 20,
        "host_memory": 16 << 20,
        "storage": (f"file://{storage}?capacity=64MiB",) if isinstance(storage, Path) else storage,
        "policies": Policies(prefetch_policy="wait_complete"),
    }
    return Settings(model=str(checkpoint), **(shape | more))  # type: ignore[arg-type]
