"""The pages of SGLang's host pools as bytes: in each layout, what is saved from one slot is restored to another."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvarve.connectors.sglang.hicache import NOTHING, Asked, HostPages, Pages, Ranks
from kvarve.connectors.sglang.objects import Objects
from kvarve.errors import ConfigError
from kvarve.transfer.storage_connection import open_guarded

LAYERS, TOKENS, PAGES, WIDTH = 3, 4, 8, 5
LABEL = b"\x01" * 32
KEYS = [f"{i:064x}" for i in range(6)]


class Heads:
    """Keys and values, as SGLang's pools of heads lie: "page_first" in two pieces a page, or layer by layer."""

    def __init__(self, layout: str = "page_first", dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout, self.page_size, self.dtype, self.head_num = layout, TOKENS, dtype, 1
        shape = (2, PAGES * TOKENS, LAYERS, WIDTH) if layout == "page_first" else (2, LAYERS, PAGES * TOKENS, WIDTH)
        self.buffer = torch.randn(shape).to(dtype)

    def _page(self, index: int) -> Tensor:
        tokens = slice(index, index + TOKENS)
        return self.buffer[:, tokens] if self.layout == "page_first" else self.buffer[:, :, tokens]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        self._page(index).copy_(data_page.reshape(self._page(index).shape))

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]] | None:
        first = indices.tolist()[::TOKENS]
        if self.layout == "page_first":
            parts = [self.buffer[part, at : at + TOKENS] for at in first for part in range(2)]
        else:
            parts = [self.buffer[p, la, at : at + TOKENS] for at in first for la in range(LAYERS) for p in range(2)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


class State:
    """A recurrent state of two parts with types of their own, one slot a page."""

    layout, page_size = "page_first", 1

    def __init__(self, side_state: bool = False) -> None:
        self.side_state = side_state
        self.parts = [torch.randn(PAGES * TOKENS, 7), torch.randn(PAGES * TOKENS, 11).to(torch.bfloat16)]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return torch.cat([part[index].view(torch.uint8) for part in self.parts])

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        for part, raw in zip(self.parts, data_page.split([28, 22]), strict=True):
            part[index] = raw.clone().view(part.dtype)

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]] | None:
        if self.side_state:
            raise NotImplementedError
        parts = [part[at] for at in indices.tolist() for part in self.parts]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


class Logical(Heads):
    """An anchor without bytes of its own."""

    def __init__(self) -> None:
        super().__init__()

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]] | None:
        return None


class Closed(Heads):
    """Gives its pages in neither way."""

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        raise ValueError("no flat pages here")

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]] | None:
        raise ValueError


def token_indices(pool: Heads | State, slots: Sequence[int]) -> list[int]:
    return [slot * TOKENS + token for slot in slots for token in range(pool.page_size)]


Open = Callable[..., Pages]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[Objects] = []

    def make(label: bytes = LABEL, ranks: Ranks = Ranks()) -> Pages:  # noqa: B008  frozen
        url = f"file://{tmp_path}/pages?capacity=64MiB"
        made.append(Objects(lambda: open_guarded(url, label=label, description="", deadline_s=60), deadline_s=60))
        return Pages(made[-1], label, ranks)

    yield make
    for objects in made:
        objects.close()


KINDS = {
    "heads": Heads,
    "heads layer first": lambda: Heads("layer_first"),
    "heads of 8 bits": lambda: Heads(dtype=torch.float8_e4m3fn),
    "state": State,
    "state with a side": lambda: State(side_state=True),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_from_one_slot_is_restored_to_another(opened: Open, kind: str, flat: bool) -> None:
    one, other = KINDS[kind](), KINDS[kind]()
    pages = HostPages(one, flat=flat)
    assert pages.in_pieces == (not flat and kind not in ("state with a side",))
    first, second = opened(), opened()
    first.register("kv", one, flat=flat)
    second.register("kv", other, flat=flat)
    there, here = [5, 0, 3], [1, 2, 7]
    untouched = {slot: other.get_data_page(slot * TOKENS).view(torch.uint8).tolist() for slot in (0, 3, 4, 5, 6)}
    assert first.store("kv", KEYS[:3], token_indices(one, there)) == [True] * 3
    assert second.load("kv", KEYS[:4], token_indices(other, [*here, 6])) == [True] * 3 + [False]
    for was, now in zip(there, here, strict=True):
        saved, restored = one.get_data_page(was * TOKENS), other.get_data_page(now * TOKENS)
        assert torch.equal(saved.view(torch.uint8), restored.view(torch.uint8))
    for slot, page in untouched.items():
        assert other.get_data_page(slot * TOKENS).view(torch.uint8).tolist() == page


def test_the_order_of_a_pages_bytes_is_part_of_its_name(opened: Open) -> None:
    """A layer-first page in pieces alternates keys and values; the same page made flat does not."""
    pool = Heads("layer_first")
    saver = opened()
    saver.register("kv", pool)
    saver.store("kv", KEYS, token_indices(pool, range(6)))
    assert saver.present("kv", KEYS) == [True] * 6
    for other, flat in ((pool, True), (Heads("page_first"), False), (Heads("layer_first", torch.float16), False)):
        reader = opened()
        reader.register("kv", other, flat=flat)
        assert reader.present("kv", KEYS) == [False] * 6


def test_a_pool_without_bytes_marks_its_pages(opened: Open) -> None:
    pages = opened()
    pages.register("kv", Logical())
    assert pages.lookup(KEYS, [Asked("kv", None)]).pages == 0
    assert pages.lookup([], [Asked("kv", None)]) == NOTHING
    assert pages.store("kv", KEYS[:4], range(4 * TOKENS)) == [True] * 4
    assert pages.lookup(KEYS, [Asked("kv", None)]).pages == 4
    assert pages.load("kv", KEYS, range(6 * TOKENS)) == [True] * 4 + [False] * 2
    assert pages.lookup(KEYS, [Asked("kv", None), Asked("indexer", None)]) == NOTHING, "it was never registered"


def test_a_pool_that_gives_its_pages_in_no_way_and_a_batch_that_does_not_fit_are_refused(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    pages = opened()
    with pytest.raises(ConfigError, match=r"no flat pages here.*choose --hicache-mem-layout page_first"):
        pages.register("kv", Closed())
    pages.register("kv", Heads())
    for indices in (None, [], range(TOKENS), range(3 * TOKENS)):
        assert pages.store("kv", KEYS[:2], indices) == [False] * 2
    assert pages.load("swa", KEYS[:2], range(2 * TOKENS)) == [False] * 2
    assert "do not hold 2 pages" in caplog.text


def test_leading_whole_groups_count_and_gate_nothing(opened: Open) -> None:
    pages, pool = opened(), Heads()
    pages.register("kv", pool)
    pages.store("kv", [*KEYS[:4], KEYS[5]], token_indices(pool, range(5)))
    assert pages.whole_groups("kv", KEYS, 2, 10) == 20
    assert pages.whole_groups("kv", KEYS, 3, 10) == 10
    assert pages.whole_groups("kv", KEYS[:4], 2, 10) == 20
    assert pages.whole_groups("kv", KEYS, 0, 10) == 0


# --- ranks


def test_ranks_keep_their_own_pages_and_share_those_that_are_replicated(opened: Open) -> None:
    heads = [opened(ranks=Ranks(rank, 2)) for rank in range(2)]
    latent = [opened(b"\x02" * 32, Ranks(rank, 2, replicated=True)) for rank in range(2)]
    pools, states = [Heads(), Heads()], [State(), State()]
    for pages, pool, state in zip([*heads, *latent], [*pools, *pools], [*states, *states], strict=True):
        pages.register("kv", pool)
        pages.register("mamba", state)
        pages.register("draft", pool)
    for pages in (heads[0], latent[0]):
        for name in ("kv", "mamba", "draft"):
            assert pages.store(name, KEYS[:1], token_indices(pages.pools[name].pages.pool, [0])) == [True]
    assert [heads[1].present(name, KEYS[:1]) for name in ("kv", "mamba", "draft")] == [[False]] * 3
    found = [latent[1].present(name, KEYS[:1]) for name in ("kv", "mamba", "draft")]
    assert found == [[True], [False], [False]], "state and a draft's heads are divided even where KV is not"
