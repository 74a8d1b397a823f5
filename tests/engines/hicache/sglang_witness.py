"""kvarve's backend as SGLang loads it, with a witness beside it: what is restored has the bytes that were saved.

The witness reads the host pools by SGLang's own `get_data_page`, not by the code that is tested. No test stands here.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from kvarve.connectors.sglang import hicache_storage as connector
from kvarve.storage import Breaker, open_storage
from kvarve.testing import FaultyStorage

Page = tuple[str, str]  # pool and key


class Witness(connector.HiCacheKvarve):
    """Notes every page that is stored and checks every page that is loaded."""

    saved: ClassVar[defaultdict[Page, set[str]]] = defaultdict(set)  # of all engines of a test
    restored: ClassVar[list[Page]] = []
    wrong: ClassVar[list[Page]] = []
    made: ClassVar[list["Witness"]] = []

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config, kwargs)
        Witness.made.append(self)

    @classmethod
    def forget(cls) -> None:
        for each in (cls.saved, cls.restored, cls.wrong, cls.made):
            each.clear()

    def _seen(self, pool: str, keys: Iterable[str], indices: torch.Tensor) -> list[tuple[Page, str]]:
        host = self.mem_pool_host if pool == "kv" else self.registered_pools[pool]
        starts = indices.tolist()[:: getattr(host, "page_size", 1) or 1]
        digests = [
            hashlib.sha256(host.get_data_page(at, flat=True).contiguous().view(torch.uint8).numpy()).hexdigest()
            for at in starts
        ]
        return [((pool, key), digest) for key, digest in zip(keys, digests, strict=True)]

    def _note(self, pool: str, keys: list[str], indices: torch.Tensor) -> None:
        for page, digest in self._seen(pool, keys, indices):
            Witness.saved[page].add(digest)

    def _check(self, pool: str, keys: list[str], indices: torch.Tensor, loaded: list[bool]) -> None:
        for (page, digest), done in zip(self._seen(pool, keys, indices), loaded, strict=True):
            if done:
                Witness.restored.append(page)
                if digest not in Witness.saved[page]:
                    Witness.wrong.append(page)

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        self._note("kv", keys, host_indices)
        return super().batch_set_v1(keys, host_indices, extra_info)

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        loaded = super().batch_get_v1(keys, host_indices, extra_info)
        self._check("kv", keys, host_indices, loaded)
        return loaded

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        for each in transfers:
            self._note(str(each.name), each.keys, each.host_indices)
        return super().batch_set_v2(transfers, extra_info)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        loaded = super().batch_get_v2(transfers, extra_info)
        for each in transfers:
            self._check(str(each.name), each.keys, each.host_indices, loaded[each.name])
        return loaded

    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        for key, page in zip(keys, values, strict=True):
            Witness.saved["kv", key].add(hashlib.sha256(page.contiguous().view(torch.uint8).numpy()).hexdigest())
        return super().batch_set(keys, values, target_locations, target_sizes)

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        pages = super().batch_get(keys, target_locations, target_sizes)
        for key, page in zip(keys, pages, strict=True):
            if page is not None:
                Witness.restored.append(("kv", key))
                if hashlib.sha256(page.view(torch.uint8).numpy()).hexdigest() not in Witness.saved["kv", key]:
                    Witness.wrong.append(("kv", key))
        return pages


class Sick:
    """Puts a FaultyStorage under every backend that is made from now on."""

    def __init__(self) -> None:
        self.storages: list[FaultyStorage] = []

    def open(self, setting: Any, *, label: bytes, description: str, deadline_s: float, seal: Any) -> Breaker:
        files = open_storage(setting, label=label, description=description)
        self.storages.append(FaultyStorage(files, seed=len(self.storages)))
        return Breaker(self.storages[-1], deadline_s=deadline_s, probe_first_s=0.001, probe_most_s=0.01)

    def heal(self) -> None:
        for storage in self.storages:
            storage.rules = []
            storage.release()
