"""One kernel for many buffers: the bytes of a gather, in any layout, and no byte beside them."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from pages import NAMESPACE
from torch import Tensor

from kvarve.memory import _kernel_copies
from kvarve.memory._kernel_copies import by_kernel
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.engine_arena import EngineArena, pool_of, strips_of
from kvarve.memory.page_copies import FAR, NEAR, ByGather, DeviceCopies, NearArena, Way
from kvarve.pages.blocks import NULL_BLOCK, handle_of
from kvarve.pages.pools import BufferSpec, PoolSpec

pytestmark = pytest.mark.skipif(_kernel_copies.triton is None, reason="no Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, PAGES = 13, 4
# Sides of vLLM's caches: layers, blocks, N tokens of a block, heads, content of a head (keys and values).
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def noise(shape: tuple[int, ...], rng: random.Random) -> Tensor:
    return torch.frombuffer(bytearray(rng.randbytes(torch.Size(shape).numel())), dtype=torch.uint8).view(shape)


class World:
    """Pools of several kinds on the device, each between bytes that no copy may touch, and their host arenas."""

    def __init__(self, rng: random.Random, *make: Callable[["World"], NearArena]) -> None:
        self.rng, self.guarded = rng, list[Tensor]()
        self.near = [each(self) for each in make]
        self.far = [HostArena(arena.pool, PAGES + 3, NAMESPACE, device=DEVICE) for arena in self.near]

    def memory(self, *shape: int) -> Tensor:
        """Random bytes, between other random bytes."""
        whole = noise((torch.Size(shape).numel() + 128,), self.rng).to(DEVICE)
        self.guarded.append(whole)
        return whole[64:-64].view(shape)

    def everything(self) -> list[bytes]:
        return [*(whole.cpu().numpy().tobytes() for whole in self.guarded), *(bytes(far.memory) for far in self.far)]

    def restore(self, were: list[bytes]) -> None:
        for whole, was in zip(self.guarded, were, strict=False):
            whole.copy_(torch.frombuffer(bytearray(was), dtype=torch.uint8))
        for far, was in zip(self.far, were[len(self.guarded) :], strict=True):
            far.memory[:] = was


def engine(layout: str, together: int, rng: random.Random) -> Callable[[World], NearArena]:
    sides = {"L": 3, "B": BLOCKS, "N": rng.choice([2, 4]), "H": 2, "C": rng.choice([3, 8, 16])}

    def make(world: World) -> NearArena:
        whole = world.memory(*(sides[side] for side in layout)).permute([layout.index(side) for side in "LBNHC"])
        tensors = {f"layer {at}": layer for at, layer in enumerate(whole)}
        nbytes = sides["N"] * sides["H"] * sides["C"]
        return EngineArena(pool_of(layout, [nbytes] * 3, None, together), tensors, BLOCKS, together)

    return make


def strips(world: World) -> NearArena:
    """A block has four pages, each of which is two strips of it, of 6 and of 16 bytes."""
    cells = strips_of([[(6 * cell, 6 * cell + 6), (48 + 16 * cell, 64 + 16 * cell)] for cell in range(4)], 48 * 16)
    assert cells is not None
    tensors = {f"layer {at}": world.memory(BLOCKS, 48 * 16) for at in range(2)}
    return EngineArena(pool_of("strips", [0, 0], None, strips=cells), tensors, BLOCKS, strips=cells)


def states(world: World) -> NearArena:
    """A page's buffers of one byte, of no whole words, of exactly one chunk and of a little more."""
    sizes = [1, 70, _kernel_copies.CHUNK_BYTES, _kernel_copies.CHUNK_BYTES + 16]
    pool = PoolSpec("states", tuple(BufferSpec(f"layers.{at}.x", (n,), "uint8") for at, n in enumerate(sizes)), 1)
    arena = DeviceArena(pool, BLOCKS, DEVICE)
    arena._pieces = [world.memory(BLOCKS, nbytes) for nbytes in sizes]
    return arena


def pages(world: World, count: int) -> dict[int, tuple[list[tuple[int, int]], list[bytes]]]:
    """Of each pool so many, anywhere at both ends; of the engine's blocks some stand for nothing."""
    found = {}
    for pool, near in enumerate(world.near):
        if isinstance(near, DeviceArena):
            places = world.rng.sample(range(BLOCKS), count)
        elif near.pool.name == "strips":
            places = world.rng.sample(range(4, 4 * BLOCKS), count)
        else:
            blocks = iter(world.rng.sample(range(1, BLOCKS), count * near.columns))
            drawn = [[next(blocks) for _ in range(near.columns)] for _ in range(count)]
            for page in drawn[:1] if near.columns > 1 else []:
                page[0] = NULL_BLOCK
            places = [handle_of(page) for page in drawn]
        slots = [*zip(places, world.rng.sample(range(PAGES + 3), count), strict=True)]
        found[pool] = slots, [world.rng.randbytes(32) for _ in slots]
    return found


def there_and_back(world: World, way: Way, count: int) -> tuple[list[bytes], list[bytes]]:
    """All memory after a save of some pages, and after a load of them to other places."""
    copies, sent = DeviceCopies(world.near, world.far, way), pages(world, count)
    copies.save(sent, copies.ready())
    saved, other = world.everything(), pages(world, count)
    told = list[int]()
    back = {
        pool: [(here, to) for (_, here), (to, _) in zip(slots, other[pool][0], strict=True)]
        for pool, (slots, _) in sent.items()
    }
    copies.load(back, copies.ready(), lambda layer, _: told.append(layer))
    assert told == copies.layers
    return saved, world.everything()


def same(world: World, count: int = PAGES, programs: int = 3) -> None:
    """The kernel leaves all memory as a gather does, byte for byte, what is beside the pages included."""
    were, dice = world.everything(), world.rng.getstate()
    expected = there_and_back(world, ByGather, count)
    world.restore(were)
    world.rng.setstate(dice)
    assert there_and_back(world, partial(by_kernel, programs=programs), count) == expected
    assert not count or expected[0] != were != expected[1]


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_an_engine_are_copied_in_any_layout(layout: str, together: int, rng: random.Random) -> None:
    same(World(rng, engine(layout, together, rng)))


def test_pages_of_many_pools_are_copied_at_once(rng: random.Random) -> None:
    same(World(rng, states, engine("BLHNC", 2, rng), strips))


@pytest.mark.parametrize("count", [0, 1])
def test_no_page_and_one_page_are_copied(count: int, rng: random.Random) -> None:
    same(World(rng, states, engine("LBNHC", 2, rng), strips), count)


@pytest.mark.parametrize("programs", [1, 7])
def test_any_number_of_programs_copies_all_chunks(programs: int, rng: random.Random) -> None:
    same(World(rng, states), 2, programs)


def test_a_save_is_one_launch_and_a_load_one_for_each_layer(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, launched = World(rng, states, engine("LBNHC", 1, rng)), list[tuple[int, int]]()
    move = _kernel_copies.ByKernel.move

    def counted(mover: _kernel_copies.ByKernel, to: int, buffers: slice, rows: Tensor) -> None:
        launched.append((to, buffers.indices(7)[1] - buffers.indices(7)[0]))
        move(mover, to, buffers, rows)

    copies, sent = DeviceCopies(world.near, world.far, by_kernel), pages(world, 2)
    monkeypatch.setattr(_kernel_copies.ByKernel, "move", counted)
    copies.save(sent, copies.ready())
    copies.load({pool: [(here, at) for at, here in slots] for pool, (slots, _) in sent.items()}, copies.ready())
    assert launched == [(FAR, 7), *((NEAR, count) for count in (2, 2, 2, 1))]


def test_without_triton_a_gather_copies(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernel_copies, "triton", None)
    world = World(rng, states)
    assert isinstance(by_kernel([(0, 0, (world.near[0].pieces()[0], world.far[0].pieces(DEVICE)[0]))]), ByGather)


class NoCompiler:
    """As Triton answers where there is no C compiler, or no folder for what it makes."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        raise RuntimeError("Failed to find C compiler")


def test_where_triton_cannot_compile_a_gather_copies(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_kernel_copies, "_copy", NoCompiler())
    world = World(rng, states)
    assert isinstance(by_kernel([(0, 0, (world.near[0].pieces()[0], world.far[0].pieces(DEVICE)[0]))]), ByGather)
    assert "Failed to find C compiler" in caplog.text


COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvarve.memory import _kernel_copies as it

given = {"table": "*i64", "rows": "*i64", "first": "i32", "last": "i32", "to": "i32"}
constants = {"chunk": it.CHUNK_BYTES, "entry": it._ENTRY, "span": it._SPAN}
source = ASTSource(it._copy, given | dict.fromkeys(constants, "constexpr"), constants)
ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": it.WARPS}).asm["ptx"]
print(*re.findall(r"(?:ld|st)[.]global[.]v2[.]b64", ptx))
"""


@pytest.mark.long
def test_compiled_for_a_gpu_a_thread_copies_16_bytes_at_once(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=variables, capture_output=True, text=True, check=False)
    loads_and_stores = ["ld.global.v2.b64"] * 2 + ["st.global.v2.b64"] * 2  # before the first is stored, two are loaded
    assert done.stdout.split() == loads_and_stores, done.stderr
