"""Small cores and small prompts, written by hand for a test or drawn from a seed.

A drawn setting is plain data (`draw`), so that a failing life can be saved to a readable file; `configure` makes a
CoreConfig of it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from kvarve.core.core_config import CoreConfig, Slots
from kvarve.core.policies import BEST_EFFORT, WAIT_COMPLETE, Patience, Policies
from kvarve.core.slots.extents import Cut
from kvarve.core.slots.orders import ORDERS
from kvarve.pages.keys import pack
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier

PAGE_TOKENS = 2
EVERY_PAGE = f"ends,branches,every:{PAGE_TOKENS}"  # where windows and states are kept
COPY_BYTES = (  # a page has 64
    {"store_bytes": 0, "backup_bytes": 0},
    {"store_bytes": 200, "backup_bytes": 200},
    {"store_bytes": 1000, "backup_bytes": 0},
)
PATIENCES = (BEST_EFFORT, WAIT_COMPLETE, Patience(3), Patience(1, 100), Patience(2, each=True))


def pool(name: str, lookback: int | None, in_place: bool = False, replicated: bool = False) -> PoolSpec:
    return PoolSpec(name, (BufferSpec("x", (4,), "float32"),), lookback, in_place, replicated)


ATTENTION, INDEX, WINDOW, STATE = pool("attention", None), pool("index", None), pool("window", 3), pool("state", 1)


def config(
    *pools: PoolSpec,
    device: int | Sequence[int] | None = 64,
    host: int | Sequence[int] = 0,
    grid: int = 1,
    cut: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    **rest: Any,
) -> CoreConfig:
    """A small core: slots of each pool, or one number for all; by default no host tier, and no windows and states kept
    just because there is room. `cut`: of tiers that the pools
    share, how many extents they have, of each pool the slots in one and its least, perhaps its most. `rest` names
    policies too."""
    policies = {each.name: rest.pop(each.name) for each in fields(Policies) if each.name in rest}
    policies.setdefault("keep_states", "ends,branches")
    slots: Slots = {}
    if device is not None:
        slots[Tier.DEVICE] = (device,) * len(pools) if isinstance(device, int) else tuple(device)
    if host:
        slots[Tier.HOST] = (host,) * len(pools) if isinstance(host, int) else tuple(host)
    for tier in slots:
        if tier.name.lower() in cut:
            count, per, least, *most = cut[tier.name.lower()]
            slots[tier] = Cut(count, tuple(per), tuple(least), bounds=tuple(most[0]) if most else ())
    return CoreConfig(
        pools, slots, page_tokens=PAGE_TOKENS, chunk_tokens=PAGE_TOKENS * grid, policies=Policies(**policies), **rest
    )


def prompt(pages: int, seed: int = 0, extra: int = 1) -> list[int]:
    """Tokens that fill `pages` pages and begin another; prompts of one seed are prefixes of each other."""
    return [1000 * seed + at for at in range(pages * PAGE_TOKENS + extra)]


def fork(pages: int, word: int, more: int = 6) -> list[int]:
    """A prompt that shares `pages` pages with `prompt` and continues with other tokens."""
    return prompt(pages, extra=0) + [10**6 + word] * more


def words(text: str) -> bytes:
    """The packed tokens of a drawn prompt, which has one digit per token."""
    return pack([int(digit) for digit in text])


# --- from a seed


def draw(dice: random.Random) -> dict[str, Any]:
    """Draw the settings of a core, as plain data."""
    drawn = _draw(dice)
    if {"attention", "index"} <= {each["name"] for each in drawn["pools"]} or not all(drawn["device"]):
        drawn["cut"].pop("device", None)  # a device is shared with one chain at most
    if not drawn["host"] or not all(drawn["host"]):
        drawn["cut"].pop("host", None)
    return drawn


def _draw(dice: random.Random) -> dict[str, Any]:
    names = dice.sample(["attention", "index", "window", "state"], dice.randint(1, 4))
    lookbacks: dict[str, list[int | None]] = {
        "attention": [None],
        "index": [None],
        "window": [2, 3, 3, 5],
        "state": [1],
    }
    return {
        "pools": [
            {
                "name": name,
                "lookback": dice.choice(lookbacks[name]),
                "in_place": name == "state" and dice.random() < 0.8,
                "replicated": dice.random() < 0.25,
            }
            for name in names
        ],
        "device": [_room(dice, 3, 24) for _ in names],
        "host": [_room(dice, 4, 40) for _ in names] if dice.random() < 0.9 else [],
        "cut": {tier: _cut(dice, names) for tier in ("device", "host") if dice.random() < 0.4},
        "grid": dice.choice([1, 1, 2, 3]),
        "storage": dice.random() < 0.85,
        "write_policy": dice.choice(["through", "through:{}", "back"]).format(dice.randint(1, 3)),
        "eviction": dice.choice([*ORDERS]),
        "keep_states": _states(dice),
        "load_at_least": dice.choice([0, 0, 3, 9]),
        "fetch_at_least": dice.choice([0, 0, 3, 9]),
        "load_deadline_s": dice.choice([1.0, 4.0, 30.0]),
        "storage_deadline_s": dice.choice([1.0, 30.0]),
        "batch_pages": dice.choice([1, 2, 3, 64]),
        "backup_pages": dice.choice([2, 7, 50]),
        "salt_share": dice.choice([0.1, 0.5, 1.0, 1.0]),
        "host_share": dice.choice([0.01, 0.2, 0.5, 0.8, 1.0]),
        "offload_pays_at": dice.choice([0.0, 0.0, 0.1, 0.5, 2.0]),
        "offload_horizon_bytes": dice.choice([0, 64, 400, 2000]),  # a page has 64
        **dice.choice(COPY_BYTES),
        **_steps(random.Random(dice.getstate()[1][0])),  # dice of its own: a seed's life is the one that it was
    }


def _states(dice: random.Random) -> str:
    kept = [name for name, share in (("ends", 0.9), ("branches", 0.8)) if dice.random() < share]
    kept += dice.choice([[], [], ["every:4"], ["every:6"]])
    kept += ["chunks"] if dice.random() < 0.5 else []
    dice.choice(range(4))  # a seed's life is the one that it was
    return ",".join(kept) or "none"


def _steps(dice: random.Random) -> dict[str, Any]:
    return {
        "step_share": dice.choice([1 / 24, 1.0]),
        "step_tokens": dice.choice([1, 2, 3]) * PAGE_TOKENS,
        "prefill_tokens": dice.choice([0, 0, 3, 4]) * PAGE_TOKENS,
    }


def _cut(dice: random.Random, names: Sequence[str]) -> list[Any]:
    least = [dice.randint(0, 2) for _ in names]
    drawn = [sum(least) + dice.randint(1, 8), [dice.choice([1, 1, 2, 3, 5]) for _ in names], least]
    if dice.random() < 0.3:
        chains = ("attention", "index")
        most = zip(names, least, strict=True)
        drawn.append([None if name in chains else few + dice.randint(1, 3) for name, few in most])
    return drawn


def draw_engine(dice: random.Random) -> dict[str, Any]:
    """Draw a core over an engine's blocks: how many there are, and how many make up a page of each pool."""
    core = draw(dice)
    while not any(core["host"]):
        core = draw(dice)
    pieces = [dice.choice([1, 1, 2, 3]) for _ in core["pools"]]
    return {"outside": core | {"device": None}, "blocks": dice.choice([24, 120, 400]), "pieces": pieces}


def _room(dice: random.Random, least: int, most: int) -> int:
    return dice.choice([0, 1, 2]) if dice.random() < 0.06 else dice.randint(least, most)


def configure(plain: Mapping[str, Any]) -> CoreConfig:
    rest = dict(plain)
    pools = [pool(**each) for each in rest.pop("pools")]
    return config(*pools, device=rest.pop("device"), **rest)


def draw_prompt(dice: random.Random) -> str:
    """Draw a prompt that is likely to share a prefix with others: few token values, few branch points."""
    text = "0" * dice.choice([0, 4, 8, 8, 13, 20])
    text += dice.choice("01") * dice.choice([0, 1, 4, 6])
    return text + "".join(dice.choice("01") for _ in range(dice.choice([0, 0, 1, 3])))
