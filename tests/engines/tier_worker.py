"""vLLM's tiering on a CPU, with a tier of kvarve's that is watched. Imported by vLLM, by its name.

vLLM moves chunks between device and host on GPUs only, so here is a worker that copies them on a CPU; everything else
is vLLM's own.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from prints import Prints
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvarve.connectors.vllm.chunks import GROUP_BYTES
from kvarve.connectors.vllm.tier import KvarveTier

TIERS: "list[WatchedTier]" = []


@contextmanager
def same_names() -> Iterator[None]:
    """vLLM empties its host memory, as nothing else can do, and what is stored is found all the same."""
    with mock.patch.object(KvarveTier, "_forget", lambda _: None):
        yield


class CpuWorker(OffloadingWorker):
    """Copies chunks between device blocks and the host's rows, on the spot."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._groups = caches.group_data_refs
        self._page_bytes = [tensor.page_size_bytes for tensor in caches.tensors]
        self._device = [tensor.tensor for tensor in caches.tensors]
        self._host = [region.create_next_worker_view(size * blocks_per_chunk) for size in self._page_bytes]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, device: Any, host: Any, *, to_host: bool) -> bool:
        blocks, chunks = iter(device.block_ids.tolist()), iter(host.block_ids.tolist())
        copied = 0
        for refs, count, first in zip(self._groups, device.group_sizes, device.block_indices, strict=True):
            part = first % self._per_chunk  # of its chunk, where the first block stands
            chunk = next(chunks) if count else -1
            for _ in range(count):
                if part == self._per_chunk:
                    part, chunk = 0, next(chunks)
                block = next(blocks)
                for ref in refs:
                    at, size = part * self._page_bytes[ref.tensor_idx], ref.page_size_bytes
                    page = self._device[ref.tensor_idx][block, :size]
                    place = self._host[ref.tensor_idx][chunk, at : at + size]
                    target, source = (place, page) if to_host else (page, place)
                    target.copy_(source)
                    copied += size
                part += 1
        self._done.append(TransferResult(job_id, True, copied, 0.0))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering, with that worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class WatchedTier(KvarveTier):
    """The tier, which takes a fingerprint of each chunk that it is to store, and compares those that it has loaded."""

    prints: Prints  # set when the engine stands

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.loading: dict[int, list[tuple[bytes, int]]] = {}
        TIERS.append(self)

    def submit_store(self, job_metadata: Any) -> None:
        self.prints.note(map(self._print, zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)))
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self.loading[job_metadata.job_id] = [*zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)]
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Any:
        results = [*super().get_finished_jobs()]
        for result in results:
            chunks = self.loading.pop(result.job_id, [])
            good = {*(key for key, _ in chunks)} if result.success else {*(result.successful_keys or ())}
            self.prints.check(self._print(chunk) for chunk in chunks if chunk[0] in good)
        return results

    def _print(self, chunk: tuple[bytes, int]) -> tuple[int, bytes, str]:
        key, row = chunk
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        return group, bytes(key), hashlib.sha256(self._primary_kv_view.obj[row]).hexdigest()
