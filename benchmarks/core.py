"""What does the core cost before every token? Match, open and close, insert, evict and a conversation's turn.

    .venv/bin/python benchmarks/core.py [--quick] [--json FILE] [--pages 64,16] [--sglang-python PYTHON]

Times are of the calling thread's CPU as well as of the wall, since the machine may be shared. `match` is `lookup`, with
the packing of the prompt's tokens left out (an engine packs a prompt once); `insert` takes device slots for the new
pages of a prompt and adds them to the tree; `open_close` finds, names, pins and unpins a prompt's pages;
`turn` is a request's whole life in the core; its `shared` pools have memory by extents. In `runs_256` another prompt
branches off after every 256 tokens, so that each 256 tokens of the path are a run of their own.

`restore` is the way of a prompt from storage: `open` names its pages and asks for them; `asked` has the answer and
sends the fetches; `fetched` has all pages in the host; `claim` sends the load; `loaded` has them on the device.
`step` is what 256 running requests cost when nothing has happened. `restore_page_N_over_sglang` is the sum of a restore
over SGLang's own match of as many tokens that are on its device, by the faster of its two cores in the same run; left
out where there is no SGLang (`--sglang-python`, or .venv-sglang, which `make test-engines` sets up).
"""

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import arguments, machine, show, watched, write_json
from kvarve.core.copies.effects import Copy, Ended, Probe
from kvarve.core.core import Core
from kvarve.core.core_config import CoreConfig, Slots
from kvarve.core.lease import Ask, Lease, Prompt
from kvarve.core.slots.extents import Cut
from kvarve.pages.boundaries import ones
from kvarve.pages.keys import pack, root_key
from kvarve.pages.pools import BufferSpec, PoolSpec, Tier
from linker import SGLANG, asked

ROOT = root_key(b"bench")
LOOKBACKS = (None, 2, 1, 16)  # attention, a window, a state, a long window


def core(pools: int, page: int, slots: int, shared: bool = False, storage: bool = False) -> Core:
    """`shared`: the pools share the memory of all slots by extents, of eight pages or one state. With a `storage` there
    is a host, too."""
    rows = tuple(PoolSpec(f"pool{i}", (BufferSpec("x", (1,), "uint8"),), LOOKBACKS[i]) for i in range(pools))
    per = tuple(1 if row.lookback == 1 else 8 for row in rows)
    device = Cut(slots * pools // 8, per, (2,) * pools) if shared else (slots,) * pools
    tiers: Slots = {Tier.DEVICE: device} | ({Tier.HOST: device} if storage else {})
    return Core(CoreConfig(rows, tiers, page_tokens=page, chunk_tokens=page, storage=storage))


def tokens(rng: random.Random, count: int) -> bytes:
    return pack([rng.randrange(1, 150_000) for _ in range(count)])


def begin(cache: Core, prompt: bytes, read: bool = True) -> Lease:
    """A request that is claimed at once; nothing has to be copied, so it is ready."""
    lease = cache.open(Prompt(ROOT, prompt), 0.0, Ask(reads=read))
    assert cache.claim(lease, 0.0)
    return lease


def keep(cache: Core, lease: Lease) -> None:
    """Take slots for all of a prompt's new pages and publish them: as alloc and insert do elsewhere."""
    pages = lease.pages
    cache.growth.grow(lease, pages)
    cache.growth.publish(lease, pages)


def request(cache: Core, prompt: bytes, read: bool = True) -> int:
    """A request's whole life; returns the pages that it resumed from."""
    lease = begin(cache, prompt, read)
    keep(cache, lease)
    cache.close(lease)
    return lease.boundary


def fill(cache: Core, rng: random.Random, total: int) -> int:
    """64 system prompts of 1,024 tokens, each with users of 1,024 more, until the tree holds `total` tokens."""
    systems = [tokens(rng, 1024) for _ in range(64)]
    held = 0
    while held < total:
        held += 2048 - request(cache, rng.choice(systems) + tokens(rng, 1024)) * cache.config.page_tokens
    return held


Times = dict[str, tuple[list[float], list[float]]]  # by case, in microseconds: wall and CPU


def noted(times: Times, case: str, work: Callable[[], object]) -> None:
    """Do it, and add how long it took to the times of its case."""
    wall, cpu = times.setdefault(case, ([], []))
    c, w = time.thread_time(), time.perf_counter()
    work()
    wall.append((time.perf_counter() - w) * 1e6)
    cpu.append((time.thread_time() - c) * 1e6)


def timed(work: Callable[[], object], times: int) -> dict[str, float]:
    noted_times: Times = {}
    for _ in range(times):
        noted(noted_times, "", work)
    return summary(*noted_times[""])


def summary(wall: list[float], cpu: list[float]) -> dict[str, float]:
    wall, cpu = sorted(wall), sorted(cpu)
    return {
        "p50_us": round(wall[len(wall) // 2], 1),
        "p99_us": round(wall[int(len(wall) * 0.99)], 1),
        "cpu_us": round(cpu[len(cpu) // 2], 1),
    }


def match_rows(page: int, pools: int, tree: int, quick: bool) -> list[dict[str, Any]]:
    rng = random.Random(7)
    cache = core(pools, page, (tree + 400_000) // page)
    held = fill(cache, rng, tree)
    rows = []
    for length in (1024, 10_240) if quick else (1024, 10_240, 102_400):
        one, chain = tokens(rng, length), tokens(rng, length)
        request(cache, one)
        for end in range(256, length + 1, 256):
            # Another prompt leaves at each end, so that every 256 tokens are a run of their own.
            request(cache, chain[: end * 4])
            request(cache, chain[: end * 4] + tokens(rng, page))
        for case, prompt in (("one_run", one), ("runs_256", chain), ("miss", tokens(rng, length))):
            row = {
                "bench": "match",
                "page": page,
                "pools": pools,
                "tree_tokens": held,
                "prompt_tokens": length,
                "case": case,
            }
            asked = prompt + tokens(rng, 1)
            rows.append(row | timed(lambda asked=asked: cache.lookup(ROOT, asked), 100 if length > 20_000 else 300))
            times = 40 if length > 20_000 else 100
            strangers = [bytes(bytearray(asked)) for _ in range(times)]  # equal, but not the same object

            def life(strangers: list[bytes] = strangers) -> None:
                cache.close(begin(cache, strangers.pop()))

            rows.append(row | {"bench": "open_close"} | timed(life, times))
    return rows


def insert_rows(page: int, pools: int, tree: int, quick: bool) -> list[dict[str, Any]]:
    """Of two requests that computed the same, the first one's pages are fresh, the other's are freed.

    Half of a prompt of 2,048 tokens is shared with others; prompts of other lengths are all new.
    """
    rng = random.Random(11)
    lengths = {1024: 100, 10_240: 20} if quick else {1024: 200, 10_240: 40, 102_400: 8}
    cache = core(pools, page, (2 * tree + sum(length * count for length, count in lengths.items())) // page)
    systems = [tokens(rng, 1024) for _ in range(64)]
    batches = {2048: [rng.choice(systems) + tokens(rng, 1024) for _ in range(tree // 1024)]}
    batches |= {length: [tokens(rng, length) for _ in range(count)] for length, count in lengths.items()}
    base = {"page": page, "pools": pools, "tree_tokens": tree}
    rows = []
    for length, prompts in batches.items():
        times: Times = {}
        for prompt in prompts:
            for lease, case in [(begin(cache, prompt), "fresh"), (begin(cache, prompt), "duplicate")]:
                noted(times, case, partial(keep, cache, lease))
                cache.close(lease)
        for case, (wall, cpu) in times.items():
            rows.append({"bench": "insert", **base, "prompt_tokens": length, "case": case} | summary(wall, cpu))
    calls = max(1, tree // 2 // 2048)
    places = [cache.slot_pools.place(Tier.DEVICE, pool) for pool in range(pools)]

    def evict() -> None:
        for place in places:
            cache.evictions.evict(place, 2048 // page)

    rows.append({"bench": "evict", **base, "prompt_tokens": 2048, "case": "2048_a_call"} | timed(evict, calls))
    return rows


def turn_rows(page: int, pools: int, quick: bool, shared: bool = False) -> list[dict[str, Any]]:
    """Conversations that grow by 512 tokens a turn, in half the memory that they need."""
    rng = random.Random(3)
    count, turns, step = (40, 6, 512) if quick else (160, 12, 512)
    room = count * turns * step // 2
    cache = core(pools, page, room // page, shared)
    systems = [tokens(rng, 1024) for _ in range(8)]
    talks = [systems[i % 8] + tokens(rng, 64) for i in range(count)]
    case = "shared" if shared else "fresh"
    times: Times = {}
    for _ in range(turns):
        order = list(range(count))
        rng.shuffle(order)
        for i in order:
            talks[i] += tokens(rng, step)
            noted(times, case, partial(request, cache, talks[i]))
    return [
        {
            "bench": "turn",
            "page": page,
            "pools": pools,
            "tree_tokens": room,
            "prompt_tokens": step,
            "case": case,
        }
        | summary(*times[case])
    ]


def end(cache: Core, times: Times, case: str) -> None:
    """All that was sent so far ends well."""
    sent = [each for each in cache.take() if isinstance(each, Copy | Probe)]
    noted(times, case, lambda: cache.step([Ended(each.op, ones(len(each.pages))) for each in sent], 0.0))


def restore(cache: Core, prompt: bytes, times: Times) -> Lease:
    """Bring a prompt that only the storage has to the device."""
    cache.flush((Tier.DEVICE, Tier.HOST))
    opened: list[Lease] = []
    noted(times, "open", lambda: opened.append(cache.open(Prompt(ROOT, prompt), 0.0)))
    end(cache, times, "asked")
    end(cache, times, "fetched")
    noted(times, "claim", lambda: cache.claim(opened[0], 0.0))
    end(cache, times, "loaded")
    assert cache.claim(opened[0], 0.0)
    return opened[0]


def restore_rows(page: int, pools: int, quick: bool) -> list[dict[str, Any]]:
    rng = random.Random(17)
    rows = []
    for length in (10_240,) if quick else (10_240, 102_400):
        cache, prompt = core(pools, page, 2 * length // page, storage=True), tokens(rng, length + 1)
        request(cache, prompt)
        while not cache.idle():
            end(cache, {}, "stored")
        times: Times = {}
        for _ in range(3 if quick else 20):
            lease = restore(cache, prompt, times)
            assert lease.boundary == length // page
            cache.close(lease)
        base = {"bench": "restore", "page": page, "pools": pools, "tree_tokens": length, "prompt_tokens": length}
        rows += [base | {"case": case} | summary(*columns) for case, columns in times.items()]
        whole = [[sum(run) for run in zip(*columns, strict=True)] for columns in zip(*times.values(), strict=True)]
        rows.append(base | {"case": "in sum"} | summary(*whole))
    return rows


def step_rows(page: int, pools: int) -> list[dict[str, Any]]:
    """A step with 256 running requests, and nothing new."""
    rng = random.Random(19)
    cache = core(pools, page, 2 * 256 * 2048 // page, storage=True)
    for _ in range(256):
        lease = cache.open(Prompt(ROOT, tokens(rng, 1024)), 0.0)
        while not cache.claim(lease, 0.0):
            end(cache, {}, "asked")
        keep(cache, lease)
    while not cache.idle():
        end(cache, {}, "stored")
    base = {"bench": "step", "page": page, "pools": pools, "tree_tokens": 256 * 1024, "prompt_tokens": 1024}
    return [base | {"case": "256_running"} | timed(lambda: cache.step([], 1.0), 200)]


def ten_times(page: int, tree: int) -> dict[str, float]:
    """The cost of a match and an eviction in a tree, over their cost in one of a tenth: measured in turns, since the
    speed of a shared machine varies."""
    rng = random.Random(13)
    trees = [core(1, page, (held + 20_000) // page) for held in (tree // 10, tree)]
    prompt = tokens(rng, 10_240)
    for cache, held in zip(trees, (tree // 10, tree), strict=True):
        fill(cache, rng, held)
        request(cache, prompt)
    works: dict[str, list[Callable[[], object]]] = {
        "match_10x_tree": [lambda cache=cache: cache.lookup(ROOT, prompt) for cache in trees],
        "evict_10x_tree": [lambda cache=cache: cache.evictions.evict(0, 2048 // page) for cache in trees],
    }
    ratios = {}
    for name, (small, large) in works.items():
        times = 300 if name == "match_10x_tree" else tree // 20 // 2048
        pairs = [(timed(small, 1)["cpu_us"], timed(large, 1)["cpu_us"]) for _ in range(times)]
        low, high = ([*sorted(column)][times // 2] for column in zip(*pairs, strict=True))
        ratios[name] = high / low
    return ratios


def bytes_per_token(page: int) -> float:
    """Memory of a tree of 256-token runs with one pool, per token: what Python allocated for it."""
    gc.collect()
    rng = random.Random(5)
    cache = core(1, page, 300_000 // page)
    stem = tokens(rng, 256)
    prompts = [stem + tokens(rng, 256) for _ in range(1000)]
    request(cache, stem)
    tracemalloc.start()
    for prompt in prompts:
        request(cache, prompt)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / (256 * len(prompts))


def main() -> None:
    parser = arguments("What the core costs before every token.")
    parser.add_argument("--sglang-python", type=Path, default=SGLANG, metavar="PYTHON", help="of SGLang's environment")
    parser.add_argument("--pages", default="64,16", help="page sizes (default %(default)s)")
    args = parser.parse_args()
    tree = 100_000 if args.quick else 1_000_000
    rows: list[dict[str, Any]] = []
    cases = [(int(page), pools) for page in args.pages.split(",") for pools in (1, 4)]
    for page, pools in watched(cases, "core", len(cases)):
        rows += match_rows(page, pools, tree, args.quick)
        rows += insert_rows(page, pools, tree, args.quick)
        rows += turn_rows(page, pools, args.quick)
        rows += turn_rows(page, pools, args.quick, shared=True) if pools > 1 else []
        rows += restore_rows(page, pools, args.quick)
        rows += step_rows(page, pools)
    page = cases[0][0]

    def cost(among: list[dict[str, Any]], **want: object) -> float:
        return float(next(row["cpu_us"] for row in among if all(row[name] == value for name, value in want.items())))

    run = {"bench": "match", "page": page, "prompt_tokens": 10_240, "case": "one_run"}
    ratios = {
        **ten_times(page, tree),
        "four_pools_over_one": cost(rows, **run, pools=4) / cost(rows, **run, pools=1),
        "bytes_per_token": bytes_per_token(page),
    }
    longest = {"pools": 4, "prompt_tokens": 10_240 if args.quick else 102_400, "case": "in sum"}
    for size in sorted({page for page, _ in cases}):
        ratios[f"restore_page_{size}_ms"] = cost(rows, bench="restore", page=size, **longest) / 1000
        if args.sglang_python.exists():
            match = {"do": "match", "tokens": longest["prompt_tokens"], "page": size, "rounds": 20}
            peer_ms = min(asked(args.sglang_python, match).values())
            ratios[f"restore_page_{size}_over_sglang"] = ratios[f"restore_page_{size}_ms"] / peer_ms
        ratios[f"step_page_{size}_ms"] = cost(rows, bench="step", page=size, pools=4) / 1000
    show("The core, microseconds a call", rows)
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    write_json(args.json, {"machine": machine(), "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
