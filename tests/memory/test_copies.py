"""Copies between device and host change only their target slots, whatever the method."""

import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from pages import MOVERS, NAMESPACE, a_pool, filled, in_record, raw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.page_copies import FAR, GATHERED_BYTES, ByGather, DeviceCopies, Slots, Way
from kvarve.pages.pools import DTYPE_BYTES, BufferSpec, PoolSpec

WAYS = MOVERS | {"by gather, two at once": partial(ByGather, most_bytes=280)}


def save(copies: DeviceCopies, slots: Slots, keys: list[bytes]) -> None:
    copies.save({0: (slots, keys)}, copies.ready())


def load(copies: DeviceCopies, slots: Slots) -> None:
    copies.load({0: slots}, copies.ready())


def partly_adjacent(rng: random.Random, slots: int) -> list[int]:
    """Five slots, of which three follow each other, before or behind the others."""
    first = rng.randrange(slots - 2)
    run = [*range(first, first + 3)]
    others = rng.sample([slot for slot in range(slots) if slot not in run], 2)
    return rng.choice([run + others, others + run])


@pytest.mark.parametrize("mover", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_pages_come_back_bit_for_bit_and_their_neighbours_are_not_touched(dtype: str, mover: Way) -> None:
    pool, rng = a_pool(dtype, "uint8"), random.Random(dtype)
    device, host, back = filled(pool, 9), HostArena(pool, 11, NAMESPACE), DeviceArena(pool, 10)
    pieces = host.pieces(torch.device("cpu"))
    for piece in pieces:
        piece.fill_(0xAA)
    for tensor in back.buffers.values():
        tensor.view(torch.uint8).fill_(1)
    before = {name: tensor.clone() for name, tensor in device.buffers.items()}

    there, here, home = partly_adjacent(rng, 9), partly_adjacent(rng, 11), partly_adjacent(rng, 10)
    keys = [bytes([i]) * 32 for i in range(5)]
    save(DeviceCopies([device], [host], mover), list(zip(there, here, strict=True)), keys)
    for slot in range(11):
        if slot in here:
            assert host.intact(slot, keys[here.index(slot)])
            assert in_record(host, slot) == [
                raw(before[buffer.name][there[here.index(slot)]]).tobytes() for buffer in pool.buffers
            ]
        else:
            assert all((piece[slot] == 0xAA).all() for piece in pieces)
    load(DeviceCopies([back], [host], mover), list(zip(here, home, strict=True)))
    for name, tensor in back.buffers.items():
        for slot in range(10):
            expected = before[name][there[home.index(slot)]] if slot in home else None
            assert raw(tensor[slot]).tobytes() == (
                raw(expected).tobytes() if expected is not None else b"\1" * raw(tensor[slot]).size
            )
    for name, tensor in device.buffers.items():
        assert raw(tensor).tobytes() == raw(before[name]).tobytes(), "the source was changed"


def test_a_load_of_several_pools_goes_by_layer_and_tells_of_each() -> None:
    """The first layer of all pools is on the device when the copy of the second begins."""
    attention = PoolSpec("attention", tuple(BufferSpec(f"layers.{n}.keys", (2,), "int32") for n in (1, 10)), None)
    state = PoolSpec("state", tuple(BufferSpec(f"layers.{n}.conv.0", (3,), "int16") for n in (0, 2, 10)), 1, True)
    source = [filled(attention, 2), filled(state, 2)]
    host = [HostArena(attention, 2, NAMESPACE), HostArena(state, 2, NAMESPACE)]
    down = DeviceCopies(source, host)
    down.save({0: ([(0, 0)], [bytes(32)]), 1: ([(1, 1)], [bytes(32)])}, down.ready())
    target = [DeviceArena(attention, 2), DeviceArena(state, 2)]
    for tensor in (tensor for arena in target for tensor in arena.buffers.values()):
        tensor.fill_(-1)
    up, seen = DeviceCopies(target, host), dict[int, set[str]]()

    def copied(layer: int, _: object) -> None:
        came = {name: tensor for arena in target for name, tensor in arena.buffers.items() if (tensor != -1).any()}
        seen[layer] = {*came}

    up.load({0: [(0, 1)], 1: [(1, 0)]}, up.ready(), copied)
    assert [*seen] == up.layers == [0, 1, 2, 10]
    assert all(seen[layer] == {*_names(source, layer)} for layer in seen)


def _names(arenas: list[DeviceArena], upto: int) -> list[str]:
    return [buffer.name for arena in arenas for buffer in arena.pool.buffers if buffer.layer <= upto]


def test_a_copy_of_no_page_of_a_pool_is_no_trouble() -> None:
    pool = a_pool("float32")
    copies = DeviceCopies([filled(pool, 1)], [HostArena(pool, 1, NAMESPACE)])
    told: list[int] = []
    copies.load({0: []}, copies.ready(), lambda layer, _: told.append(layer))
    assert told == copies.layers


class Temporaries(TorchDispatchMode):
    """The most bytes that results of torch's operations have held at once, beside the tensors that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._held = 0, list[weakref.ref[Tensor]]()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self._held.append(weakref.ref(result))
        held = (ref() for ref in self._held)
        self.most = max(self.most, sum(each.nbytes for each in held if each is not None))
        return result


@pytest.mark.long
def test_a_gather_of_many_pages_takes_little_memory_beside_them() -> None:
    pool = PoolSpec("kv", (BufferSpec("layers.0.keys", (1 << 20,), "uint8"),), None)
    device, back, host = DeviceArena(pool, 24), DeviceArena(pool, 24), HostArena(pool, 24, NAMESPACE)
    device.buffers["layers.0.keys"].copy_(torch.arange(24)[:, None])
    down, up = DeviceCopies([device], [host], ByGather), DeviceCopies([back], [host], ByGather)
    with Temporaries() as temporaries:
        save(down, [(slot, 23 - slot) for slot in range(24)], [bytes(32)] * 24)
        load(up, [(23 - slot, slot) for slot in range(24)])
    assert GATHERED_BYTES <= temporaries.most < GATHERED_BYTES + (1 << 20)
    assert torch.equal(back.buffers["layers.0.keys"], device.buffers["layers.0.keys"])


@pytest.mark.parametrize(("most_bytes", "rows"), [(160, [5, 5, 2]), (90, [2] * 6), (1, [1] * 12)])
def test_a_gather_takes_as_many_rows_at_once_as_it_may_and_at_least_one(
    most_bytes: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, at = torch.arange(48).view(12, 4), torch.zeros(12, 4, dtype=torch.int64), torch.arange(12)
    taken, select = list[int](), Tensor.index_select

    def counted(self: Tensor, dim: int, some: Tensor) -> Tensor:
        taken.append(len(some))
        return select(self, dim, some)

    monkeypatch.setattr(Tensor, "index_select", counted)
    mover = ByGather([(0, 0, (source.view(torch.uint8), target.view(torch.uint8)))], most_bytes)
    mover.move(FAR, slice(None), mover.rows({0: [(at.flip(0).tolist(), at.tolist())]}))
    assert taken == rows and torch.equal(target, source.flip(0))


class CountedEvent(torch.cpu.Event):
    awaited = 0

    def synchronize(self) -> None:
        CountedEvent.awaited += 1


def test_a_gather_of_several_pools_is_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [PoolSpec(name, (BufferSpec("layers.0.keys", (4,), "int32"),), None) for name in ("one", "other")]
    device, host = [filled(pool, 2) for pool in pools], [HostArena(pool, 2, NAMESPACE) for pool in pools]
    monkeypatch.setattr(torch.cpu, "Event", CountedEvent)
    monkeypatch.setattr(CountedEvent, "awaited", 0)
    copies, keys = DeviceCopies(device, host, ByGather), [b"0" * 32, b"1" * 32]
    copies.save({pool: ([(0, 1), (1, 0)], keys) for pool in (0, 1)}, copies.ready())
    assert CountedEvent.awaited == 1
    assert all(arena.intact(1 - slot, keys[slot]) for arena in host for slot in (0, 1))


@pytest.mark.parametrize("mover", MOVERS.values(), ids=MOVERS)
def test_without_host_memory_nothing_is_copied_and_all_is_awaited(mover: Way) -> None:
    copies = DeviceCopies([filled(a_pool("uint8"), 1)], [], mover)
    assert copies.layers == []
    copies.finish()


class Failing(ByGather):
    """A copy that has been sent in part when it fails, as where a GPU has no memory left for a gather."""

    def move(self, to: int, buffers: slice, rows: Any) -> None:
        super().move(to, buffers, rows)
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_copy_that_fails_ends_when_what_was_sent_of_it_is_done(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are used by others then, who know nothing of its stream."""
    pool = a_pool("uint8")
    copies = DeviceCopies([filled(pool, 1)], [HostArena(pool, 1, NAMESPACE)], Failing)
    monkeypatch.setattr(torch.cpu, "Event", CountedEvent)
    monkeypatch.setattr(CountedEvent, "awaited", 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        save(copies, [(0, 0)], [bytes(32)]) if way == "save" else load(copies, [(0, 0)])
    assert CountedEvent.awaited == 1


@pytest.mark.parametrize("mover", MOVERS.values(), ids=MOVERS)
def test_memory_that_was_made_for_inference_is_copied_by_a_thread_that_is_not_told_so(mover: Way) -> None:
    """As where an engine is set up in torch.inference_mode(): torch lets no one else write such a tensor."""
    pool = a_pool("uint8")
    with torch.inference_mode():
        device, back, host = filled(pool, 1), DeviceArena(pool, 1), HostArena(pool, 1, NAMESPACE)
        down, up = DeviceCopies([device], [host], mover), DeviceCopies([back], [host], mover)
    save(down, [(0, 0)], [bytes(32)])
    load(up, [(0, 0)])
    assert all(torch.equal(back.buffers[name], tensor) for name, tensor in device.buffers.items())
