"""A copy that alters a value is found though its result was sealed: pages are compared before and after each copy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvarve.core.copies.effects import Copy, Ended, Page, Verified
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.fingerprints import Fingerprints
from kvarve.memory.page_copies import ByPiece
from kvarve.pages.keys import object_name
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier
from kvarve.records.record import HEADER_BYTES
from kvarve.storage import MemoryStorage
from kvarve.transfer.transfer_engine import TransferEngine

POOL = PoolSpec("attention", (BufferSpec("k", (4, 3), "float32"), BufferSpec("v", (4, 2), "bfloat16")), None)
NAMESPACE, ROOT, LONG_S = b"m" * 32, b"r" * 32, 20.0
D, H, S = Tier.DEVICE, Tier.HOST, Tier.STORAGE
KEYS = [bytes([at]) * 32 for at in range(1, 4)]
NAMES = [object_name(ROOT, key, POOL.name, 0) for key in KEYS]
ALL, BUT_ONE = 0b111, 0b101


class Altering(MemoryStorage):
    """Once `armed`, alters a value of page 1 as it takes it, and seals it again: anyone can, without a storage key."""

    def __init__(self, host: HostArena) -> None:
        super().__init__(1 << 20, NAMESPACE, "test")
        self.host, self.armed = host, False

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        taken = [bytearray(each) for each in data]
        for name, each in zip(names, taken, strict=True):
            if self.armed and name == NAMES[1]:
                each[HEADER_BYTES + 9] ^= 4
                self.host.stamp.seal(memoryview(each), KEYS[1])
        return super().put(names, [memoryview(each) for each in taken])


class Cache:
    """Three pages on the device, and copies that alter page 1 once they are `armed`."""

    def __init__(self, share: float, monkeypatch: pytest.MonkeyPatch, layerwise: bool = False) -> None:
        self.armed, honest = False, ByPiece._copy

        def altering(mover: ByPiece, target: Any, source: Any, to: Sequence[slice], at: Sequence[slice]) -> None:
            honest(mover, target, source, to, at)
            if self.armed:
                target[np.r_[tuple(to)][1], 0] ^= 1

        monkeypatch.setattr(ByPiece, "_copy", altering)
        self.device, self.host = DeviceArena(POOL, 6), HostArena(POOL, 6, NAMESPACE)
        for tensor in self.device.buffers.values():
            tensor.copy_(torch.arange(float(tensor.numel())).view(tensor.shape))
        self.storage, self.ops, self.verified = Altering(self.host), 0, 0
        self.transfers = TransferEngine([self.device], [self.host], hash_sample=share, layerwise=layerwise)
        self.transfers.attach(self.transfers.connect(self.storage))

    def copy(self, source: Tier, target: Tier) -> tuple[int, int]:
        """Which pages are good, and which bad."""
        self.ops += 1
        pages = tuple(Page(0, key, at, at) for at, key in enumerate(KEYS))
        self.transfers.send(Copy(self.ops, source, target, pages, ROOT))
        while True:
            assert self.transfers.ends.wait(LONG_S)
            for event in self.transfers.collect():
                self.verified += isinstance(event, Verified)
                if isinstance(event, Ended):
                    return event.good, event.bad

    @property
    def altered(self) -> dict[tuple[str, str], int]:
        return {edge: count for edge, count in self.transfers.fingerprints.altered.items() if count}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    with caching(1.0, monkeypatch) as cache:
        yield cache


@contextmanager
def caching(share: float, monkeypatch: pytest.MonkeyPatch, layerwise: bool = False) -> Iterator[Cache]:
    cache = Cache(share, monkeypatch, layerwise)
    yield cache
    cache.transfers.close()


def test_an_honest_copy_is_compared_in_all_directions_and_nothing_is_found(cache: Cache) -> None:
    edges = [(D, H), (H, S), (S, H), (H, D)]
    assert [cache.copy(*edge) for edge in edges] == [(ALL, 0)] * 4
    names = [(source.name.lower(), target.name.lower()) for source, target in edges]
    assert cache.transfers.fingerprints.compared == dict.fromkeys(names, 3)
    assert cache.altered == {}


def test_a_page_that_its_backup_altered_does_not_arrive_in_the_host(cache: Cache) -> None:
    cache.armed = True
    assert cache.copy(D, H) == (BUT_ONE, 0)
    assert cache.altered == {("device", "host"): 1}
    assert cache.host.intact(1, KEYS[1]), "its seal tells nothing: it was made from the copy"


def test_a_page_that_its_load_altered_does_not_arrive_on_the_device(cache: Cache) -> None:
    cache.copy(D, H)
    cache.armed = True
    assert cache.copy(H, D) == (BUT_ONE, 0), "the host's page is good: it is loaded again"
    assert cache.altered == {("host", "device"): 1}


def test_a_page_that_storage_altered_and_sealed_is_deleted_there_and_stored_again(cache: Cache) -> None:
    cache.copy(D, H)
    cache.storage.armed = True
    assert cache.copy(H, S) == (BUT_ONE, 0)
    assert cache.altered == {("host", "storage"): 1}
    assert cache.storage.exists(NAMES) == [True, False, True]
    cache.storage.armed = False
    assert cache.copy(H, S) == (ALL, 0) and cache.copy(S, H) == (ALL, 0)


def test_a_page_that_is_altered_on_its_way_into_its_slot_does_not_arrive(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.copy(D, H)
    cache.copy(H, S)
    take = cache.host.take

    def altering(slot: int, key: bytes, parts: Sequence[memoryview]) -> None:
        take(slot, key, parts)
        if slot == 1:
            cache.host.record(slot)[HEADER_BYTES + 9] ^= 4

    monkeypatch.setattr(cache.host, "take", altering)
    assert cache.copy(S, H) == (BUT_ONE, 0)
    assert cache.altered == {("storage", "host"): 1}


def test_what_storage_has_from_others_is_not_compared_since_it_may_differ_by_rounding(cache: Cache) -> None:
    cache.copy(D, H)
    cache.copy(H, S)
    for tensor in cache.device.buffers.values():
        tensor.add_(1)
    cache.copy(D, H)
    compared = cache.transfers.fingerprints.compared["host", "storage"]
    assert cache.copy(H, S) == (ALL, 0) and cache.altered == {}
    assert cache.transfers.fingerprints.compared["host", "storage"] == compared


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_sampled_load_is_not_given_away_before_it_is_compared(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with caching(share, monkeypatch, layerwise=True) as cache:
        cache.copy(D, H)
        cache.copy(H, D)
        assert cache.verified == (share == 0.0)


def test_the_sample_is_a_share_of_all_keys_and_the_same_everywhere() -> None:
    keys = [at.to_bytes(4, "big") * 8 for at in range(0, 1 << 32, 1 << 20)]
    drawn = [key for key in keys if Fingerprints(0.25).samples(key)]
    assert len(drawn) == len(keys) // 4
    assert all(Fingerprints(0.5).samples(key) for key in drawn)
    assert not Fingerprints(0.0).samples(bytes(32)) and Fingerprints(1.0).samples(b"\xff" * 32)
