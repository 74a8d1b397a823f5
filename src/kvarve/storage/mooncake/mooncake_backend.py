"""What a mooncake URL may say: mooncake://MASTER[:50051]?protocol=rdma&segment=64GiB, and see docs/mooncake.md."""

from collections.abc import Callable

from kvarve.storage.base import Storage, check_settings
from kvarve.storage.mooncake.client import load
from kvarve.storage.mooncake.mooncake_settings import PARAMETERS, read_settings
from kvarve.storage.mooncake.mooncake_storage import MooncakeStorage
from kvarve.storage.urls import Backend, StorageUrl


class MooncakeBackend(Backend):
    example = "mooncake://10.0.0.1:50051?protocol=tcp&segment=4GiB"
    parameters = PARAMETERS
    shared = True
    managed_by = "its master: see mooncake_master's own metrics and tools"

    @classmethod
    def prepare(cls, url: StorageUrl, label: bytes, description: str) -> Callable[[], Storage]:
        check_settings(1, label)
        settings = read_settings(url.text, url.place, url.path, url.parameters)
        load()  # else a missing library would be noticed late if the master is not up yet
        return lambda: MooncakeStorage(settings, label, description)
