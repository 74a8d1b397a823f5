"""Memory of a device that goes from pool to pool by addresses: every byte is where its pool reads it."""

import gc
import random
import sys
from array import array
from pathlib import Path

import pytest
from pages import noise, raw

import forks
from kvarve.cache import worker
from kvarve.cache.config import CacheConfig, cut_memory, divide
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.worker import CacheWorker, _device_arenas
from kvarve.core.copies.effects import Hurry
from kvarve.core.policies import Policies
from kvarve.core.slots.extents import Cut, Extents
from kvarve.errors import ConfigError
from kvarve.memory.arenas import DeviceArena
from kvarve.memory.device_memory import DeviceMemory, driver_of
from kvarve.memory.machine import on_host
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec, Tier
from pretend_gpu import PretendDriver

GRANULE = 1 << 16
CHAIN = PoolSpec(
    "attention",
    tuple(BufferSpec(f"layers.{n}.{kind}", (16, 2, 48), "bfloat16") for n in range(2) for kind in "kv"),
    None,
)
WINDOW = PoolSpec("window", (BufferSpec("layers.2.k", (16, 2, 48), "bfloat16"),), 3)
STATE = PoolSpec(
    "state", (BufferSpec("layers.3.conv", (3, 77), "float32"), BufferSpec("layers.3.s", (4, 31, 33), "float32")), 1
)
POOLS = (CHAIN, WINDOW, STATE)


def a_cut(budget: int = 200 << 20, granule: int = GRANULE, pools: tuple[PoolSpec, ...] = POOLS) -> Cut:
    found = cut_memory(budget, pools, 16, 64, records=False, granule=granule)
    assert found is not None
    return found


def of_extent(cut: Cut, pool: int, extent: int) -> range:
    """The slots of a pool in one extent."""
    return range(extent * cut.per[pool], (extent + 1) * cut.per[pool])


def drivers() -> list[object]:
    """The one that stands for a GPU's, and the GPU's where there is one."""
    return ["pretend", pytest.param("cuda", marks=pytest.mark.skipif(driver_of("cuda") is None, reason="no GPU"))]


@pytest.mark.parametrize("states", [0, 100])
@pytest.mark.parametrize("gib", [2, 5, 38])
def test_no_prompt_is_too_long_because_extents_are_large(gib: int, states: int) -> None:
    """Heads of 80 elements: 128 pages of 20 KiB fill granules of 2 MiB, so a part of 64 layers has 640 MiB."""
    shape = tuple(BufferSpec(f"layers.{n}.k", (128, 80), "bfloat16") for n in range(64))
    pools = PoolSpec("attention", shape, None), PoolSpec("window", shape, 8)
    once, shared = (
        divide(gib << 30, pools, 128, 256, Policies(states=states), records=False, what="device", granule=granule)
        for granule in (0, 1 << 21)
    )
    assert not isinstance(once, Cut)
    assert (shared.most(0) if isinstance(shared, Cut) else shared[0]) >= 7 / 8 * once[0]
    assert isinstance(shared, Cut) == (gib >= 5), "of three extents two are not enough for pages"


@pytest.mark.parametrize("kind", drivers())
def test_pages_keep_every_bit_while_extents_go_from_pool_to_pool(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, seed = "cuda" if kind == "cuda" else "cpu", random.randrange(1 << 30)
    print("seed", seed)
    dice, pretend = random.Random(seed), PretendDriver(granule=GRANULE)
    if kind == "pretend":
        monkeypatch.setattr(worker, "driver_of", lambda _: pretend)
    granule = GRANULE if kind == "pretend" else driver_of("cuda").granule  # type: ignore[union-attr]
    cut = a_cut(20 * a_cut(1 << 40, granule).nbytes, granule)
    arenas, extents = _device_arenas(POOLS, cut, device), Extents(cut)
    known: dict[tuple[int, int], int] = {}  # what each extent's last slot was filled with
    for step in range(40):
        pool = dice.randrange(len(POOLS))
        theirs = [at for each, at in known if each == pool]
        if theirs and dice.random() < 0.4:
            slots = of_extent(cut, pool, dice.choice(theirs))
            extents.give(pool, slots)
            extents.loosen(pool, array("i", slots))
            if extents.pool_of[slots[0] // cut.per[pool]] == pool:  # it is one of its least
                extents.take(pool, slots)
        elif (slots := extents.grow(pool)) is not None:
            extents.take(pool, slots)
        left, joined = extents.moved()
        for at, extent in left:
            arenas[at].release(of_extent(cut, at, extent))
            del known[at, extent]
        for at, extent in joined:
            slots = of_extent(cut, at, extent)
            arenas[at].commit(slots)
            known[at, extent] = step
            for number, buffer in enumerate(POOLS[at].buffers):
                for slot in (slots[0], slots[-1]):
                    arenas[at].buffers[buffer.name][slot] = noise(buffer, 7 * step + number + slot).to(device)
        for (at, extent), when in known.items():
            for number, buffer in enumerate(POOLS[at].buffers):
                for slot in (of_extent(cut, at, extent)[0], of_extent(cut, at, extent)[-1]):
                    found = raw(arenas[at].buffers[buffer.name][slot].cpu())
                    assert found.tobytes() == raw(noise(buffer, 7 * when + number + slot)).tobytes(), (at, slot)
    assert kind == "cuda" or pretend.moves > 40


def test_memory_is_given_back_with_the_last_view_of_it() -> None:
    driver = PretendDriver()
    memory = DeviceMemory(8 * GRANULE, GRANULE, driver)
    arena = DeviceArena(STATE, 30, shared=memory, stride=GRANULE)
    arena.commit(range(3))
    view = arena.buffers["layers.3.s"][1]
    view.fill_(5)
    del arena, memory
    gc.collect()
    assert len(driver.pieces) == 8 and float(view.max()) == 5
    del view
    gc.collect()
    assert not driver.pieces and not driver.reserved and not driver.mapped and driver.waits


def test_less_memory_than_asked_is_refused_as_a_setting_and_none_is_kept() -> None:
    driver = PretendDriver(limit=5 * GRANULE)
    with pytest.raises(ConfigError, match="512 KiB in pieces of 64 KiB: out of memory"):
        DeviceMemory(8 * GRANULE, GRANULE, driver)
    gc.collect()
    assert not driver.pieces


def test_slots_without_memory_end_the_process_that_reads_them() -> None:
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent.parent), str(Path(__file__).parent)]!r}
from test_device_memory import DeviceArena, DeviceMemory, GRANULE, PretendDriver, STATE
arena = DeviceArena(STATE, 30, shared=DeviceMemory(8 * GRANULE, GRANULE, PretendDriver()), stride=GRANULE)
arena.commit(range(3)); arena.release(range(1, 2))
print(float(arena.buffers["layers.3.s"][2].sum()), flush=True)
print(float(arena.buffers["layers.3.s"][1].sum()), flush=True)
"""
    done = forks.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-11, "0.0\n"), done.stderr


def test_a_device_with_virtual_memory_is_shared_and_any_other_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = ModelIdentity("test", "w1", "float32", 16, 64, POOLS)
    assert on_host("cpu") and driver_of("cpu") is None and driver_of("meta") is None
    monkeypatch.setattr(worker, "driver_of", lambda _: PretendDriver())
    assert isinstance(CacheWorker(identity, CacheConfig(64 << 20)).slots[Tier.DEVICE], Cut)
    monkeypatch.setattr(worker, "driver_of", lambda _: None)
    monkeypatch.setattr(worker, "on_host", lambda _: False)
    assert not isinstance(CacheWorker(identity, CacheConfig(64 << 20)).slots[Tier.DEVICE], Cut)


def test_the_device_has_ended_what_it_computes_before_memory_moves_and_copies_come_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, told = PretendDriver(), list[str]()
    monkeypatch.setattr(worker, "driver_of", lambda _: driver)
    identity = ModelIdentity("test", "w1", "float32", 16, 64, POOLS)
    cache = PrefixCache(identity, CacheConfig(64 << 20, 16 << 20))
    try:
        for place, name in ((cache.worker.transfers, "finish"), (driver, "unmap"), (driver, "map")):
            real = getattr(place, name)
            monkeypatch.setattr(place, name, lambda *given, real=real, name=name: (told.append(name), real(*given))[1])
        do = cache.worker.do
        monkeypatch.setattr(cache.worker, "do", lambda orders: (told.append("do"), do(orders))[1])
        extents = cache.scheduler.core.slot_pools.extents[0]
        assert extents is not None
        grown = [extents.grow(2) for _ in range(1 + extents.cut.least[2])]
        monkeypatch.setattr(cache.scheduler, "take", lambda: [Hurry(())])
        cache.step()
        assert told[0] == "map" and told[-1] == "do" and {*told[:-1]} == {"map"}
        told.clear()
        extents.loosen(2, array("i", [slot for slots in grown if slots is not None for slot in slots]))
        extents.grow(0)
        cache.step()
        assert told[:2] == ["finish", "unmap"] and told[-1] == "do"
        assert told[1:-1] == sorted(told[1:-1], reverse=True), "memory is taken before it is given"
    finally:
        monkeypatch.undo()
        cache.shutdown(5)


@pytest.mark.parametrize("fails", ["map", pytest.param("unmap", marks=pytest.mark.long)])
def test_a_driver_that_fails_in_between_is_asked_again_before_anything_is_copied(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, fail, left = PretendDriver(), [False], list[int]()
    monkeypatch.setattr(worker, "driver_of", lambda _: driver)
    cache = PrefixCache(ModelIdentity("test", "w1", "float32", 16, 64, POOLS), CacheConfig(64 << 20))
    real = getattr(driver, fails)

    def failing(*given: object) -> None:
        left.append(1)
        if fail[0] and len(left) > 2:
            fail[0] = False
            raise RuntimeError("the driver fails")
        real(*given)

    monkeypatch.setattr(driver, fails, failing)
    extents = cache.scheduler.core.slot_pools.extents[0]
    assert extents is not None
    grown = [extents.grow(2) for _ in range(3 + extents.cut.least[2])]
    cache.step()
    extents.loosen(2, array("i", [slot for slots in grown if slots is not None for slot in slots]))
    extents.grow(0)
    extents.grow(0)
    fail[0], left[:] = True, []
    with pytest.raises(RuntimeError, match="the driver fails"):
        cache.step()
    cache.step()
    whole = {pool: cache.worker.device[pool] for pool in range(3)}
    for extent, pool in enumerate(extents.pool_of):
        for tensor in whole[pool].buffers.values() if pool >= 0 else ():
            slots = of_extent(extents.cut, pool, extent)
            tensor[slots.start : slots.stop].fill_(1)  # ends the process where no memory is
    assert sum(nbytes for _, nbytes in driver.mapped.values()) <= 64 << 20
    cache.shutdown(5)
    del cache, whole, tensor
    gc.collect()
    assert not driver.pieces and not driver.reserved and not driver.mapped
