"""Every path from a prompt to an answer, each compared with the run without a cache.

A path also says where each request has to resume, by its own arithmetic (`deepest`), as a cache that never hits would
pass otherwise.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext

from kvarve.pages.pools import MEMORY_TIERS, PoolSpec, Tier
from kvarve.reference.engine.requests import TokenUsage
from kvarve.reference.verify.proof_plan import TURNS
from kvarve.reference.verify.prover import Prover
from kvarve.reference.verify.watched import Answer, WatchedEngine, differences

Have = dict[str, set[int]]  # positions by pool
PagePosition = tuple[str, int]  # a page by its pool and position


def deepest(pools: Sequence[PoolSpec], have: Have, grid: int, limit: int) -> int:
    """The deepest boundary, in pages, up to a limit and on the grid, for which every pool has what it needs.

    It tries them one by one, and shares no code with the cache.
    """
    for boundary in range(limit // grid * grid, 0, -grid):
        needs = ((pool, boundary if pool.lookback is None else min(pool.lookback, boundary)) for pool in pools)
        if all(set(range(boundary - pages, boundary)) <= have[pool.name] for pool, pages in needs):
            return boundary
    return 0


def alone(prover: Prover) -> None:
    """Transformers alone against kvarve without a cache."""
    plan = prover.plan
    with prover.path("transformers", "transformers' own cache, nothing of kvarve") as row:
        for tokens in (plan.longest, plan.whole):
            prompt = plan.prompt(tokens)
            found, cache = prover.uncached.by_transformers(prompt)
            if differences(found, prover.uncached(prompt)) and cache.get_seq_length() < tokens:
                row.notes.append(
                    f"transformers' own cache of this model loses count of its tokens and gives a prompt of {tokens} "
                    f"tokens in chunks the wrong mask; so only its first {plan.chunk} tokens were compared"
                )
                prompt = prompt[: plan.chunk]
                found, _ = prover.uncached.by_transformers(prompt)
            prover.check(Answer(prompt, found, TokenUsage.of(len(prompt), 0, None)))


def tiers(prover: Prover) -> None:
    """Prompts of every kind of length: computed, then resumed from the device, the host and storage."""
    plan, salt = prover.plan, "tiers"
    prompts = [plan.prompt(tokens, number) for number, tokens in enumerate(plan.lengths())]

    def again(engine: WatchedEngine, tier: Tier, empty: Sequence[Tier] = ()) -> None:
        for prompt in prompts:
            if empty:
                engine.empty(empty)
            prover.check(prover.run(engine, prompt, salt), plan.full(len(prompt)), tier)

    with prover.store() as store, prover.engine(store) as engine:
        with prover.path("cold", "the cache is on and knows nothing yet"):
            for prompt in prompts:
                prover.check(prover.run(engine, prompt, salt), 0)
        with prover.path("device", "the same prompts again"):
            again(engine, Tier.DEVICE)
        with prover.path("salt", "the same prompts with another salt, and without reading the cache"):
            for prompt in prompts[-2:]:
                prover.check(prover.run(engine, prompt, "another"), 0)
                prover.check(prover.run(engine, prompt, salt, read=False), 0)
        with prover.path("host", "the device is emptied before each request"):
            engine.written()
            again(engine, Tier.HOST, [Tier.DEVICE])
        with prover.path("storage", "device and host are emptied before each request"):
            again(engine, Tier.STORAGE, MEMORY_TIERS)
    with prover.proof("restart", "a new cache on the old storage") as (_, engine, _):
        again(engine, Tier.STORAGE)
        again(engine, Tier.DEVICE)


def mixed(prover: Prover) -> None:
    """A prompt whose beginning is on the device, more of it in the host, and the rest in storage."""
    plan, chunk, whole = prover.plan, prover.plan.chunk, prover.plan.whole
    prompt = plan.prompt(whole + 1)
    says = "one prompt from device, host and storage together"
    with prover.proof("mixed", says, keep_states=prover.at_chunks) as (row, engine, _):
        prover.check(prover.run(engine, prompt, "mixed"), 0)
        engine.empty()
        if plan.chunks > 2:
            prover.check(prover.run(engine, prompt[: whole - chunk + 1], "mixed"), whole - chunk, Tier.STORAGE)
            engine.empty([Tier.DEVICE])
        if plan.chunks > 1:
            prover.check(prover.run(engine, prompt[: chunk + 1], "mixed"), chunk)
        answer = prover.check(prover.run(engine, prompt, "mixed"), whole)
        if sum(tokens > 0 for tokens in answer.usage.tiers) < min(plan.chunks, len(Tier)):
            row.troubles.append(f"tokens from device, host and storage: {answer.usage.tiers}, which is not mixed")


def partial(prover: Prover) -> None:
    """Storage that has, or delivers, only some of a prompt's pages: every boundary, every page of every pool."""
    plan, layout = prover.plan, prover.model.layout
    prompt = plan.prompt(plan.whole + 1)
    pages, grid, limit = len(prompt) // plan.page, plan.chunk // plan.page, (len(prompt) - 1) // plan.page
    says = "storage has, or delivers, only some pages"
    with prover.proof("partial", says, keep_states=prover.at_chunks) as (row, engine, store):
        prover.check(prover.run(engine, prompt, "partial"), 0)
        engine.written()
        keys = prover.prompt(engine, prompt, "partial")
        names = {(pool.name, at): prover.name(keys, at, pool) for pool in layout.pools for at in range(pages)}
        there = dict(zip(names, store.exists([*names.values()]), strict=True))
        stored = [page for page, here in there.items() if here]

        def reachable(present: Iterable[PagePosition]) -> int:
            have = {pool.name: {at for name, at in present if name == pool.name} for pool in layout.pools}
            return deepest(layout.pools, have, grid, limit) * plan.page

        def case(number: int, about: str, boundary: int, tier: Tier | None, **trouble: Iterable[str]) -> None:
            engine.empty()
            if number % prover.ranks == prover.rank:  # what one rank misses, none may resume from
                for what, some in trouble.items():
                    setattr(store, what, frozenset(some))
            prover.check(prover.run(engine, prompt, "partial"), boundary, tier, about)
            store.restore()
            engine.written()

        if reachable(stored) != plan.whole:
            row.troubles.append("not all pages that the prompt could resume from were stored")
        for number, (about, *gone) in enumerate(_cases(prover, stored, pages, grid)):
            hidden, lost = ({names[page] for page in some} for some in gone)
            boundary = reachable([page for page in stored if names[page] not in hidden | lost])
            case(number, about, boundary, Tier.STORAGE, hidden=hidden, lost=lost)
        for number, call in enumerate(("exists", "get")):
            case(number, f"storage fails in {call}", 0, None, broken=[call])


def _cases(
    prover: Prover, stored: list[PagePosition], pages: int, grid: int
) -> Iterator[tuple[str, set[PagePosition], set[PagePosition]]]:
    """Cases: a description, pages that storage does not have, and pages that it does not deliver."""
    rng, quick, everything = random.Random(prover.plan.seed), prover.plan.quick, set(stored)
    for boundary in range(pages + 1):
        if not quick or boundary % grid in (0, grid - 1):
            yield f"only the first {boundary} pages", {page for page in stored if page[1] >= boundary}, set()
    chains = {pool.name for pool in prover.model.layout.pools if pool.lookback is None}
    for line in range(grid, pages + 1, grid):
        # Each pool alone could resume, and all together cannot: a hit is a set of pages, not a length.
        cut = {(pool, at) for pool, at in stored if (at >= line if pool in chains else at < line)}
        yield f"the first {line} pages of the chains, the rest of the other pools", cut, set()
    for page in stored:
        if not quick or page[1] in (0, pages - 1) or rng.random() < 0.3:
            yield f"{page[0]} page {page[1]} is lost", set(), {page}
    for _ in range(4 if quick else 16):
        chance = rng.choice([0.1, 0.3])
        hidden, lost = ({page for page in sorted(everything) if rng.random() < chance} for _ in range(2))
        yield "pages are missing and lost at random", hidden, lost


def branches(prover: Prover) -> None:
    """Prompts that share a prefix and differ from before, at and after a page or chunk boundary."""
    plan, chunk = prover.plan, prover.plan.chunk
    parts = [plan.whole - 1, plan.whole]
    if not plan.quick:
        parts += [plan.whole + 1, (plan.chunks - 1) * chunk + plan.page]
    says = "prompts that share a beginning, or only what comes after it"
    with prover.proof("branches", says) as (_, engine, _):
        for number, common in enumerate(parts):
            for tail in range(3):
                rest = plan.prompt(max(1, chunk // 2 - tail), 100 + 10 * number + tail)
                rest[0] = tail  # so that no two tails share a first token
                prompt = plan.prompt(common) + rest
                # The first finds nothing; the second leaves a snapshot where they differ, if the model needs one.
                prover.check(
                    prover.run(engine, prompt, f"branch {number}"),
                    (0, None, common // chunk * chunk)[tail],
                    None,
                    f"parts after {common}",
                )
        one, other = (plan.prompt(chunk, 150 + i) for i in range(2))
        alike = plan.prompt(plan.whole - chunk + 1, 160)
        prover.check(prover.run(engine, one + alike, "alike"), 0)
        prover.check(prover.run(engine, other + alike[:1], "alike"), 0)
        engine.empty()
        prover.check(prover.run(engine, other + alike, "alike"), chunk, None, "goes on as another")


def conversation(prover: Prover) -> None:
    """Each turn's prompt contains the answer of the turn before."""
    plan, chunk = prover.plan, prover.plan.chunk
    says = "the next turn's prompt holds the last one's answer"
    with prover.proof("conversation", says, stored=False) as (_, engine, _):
        history, known = plan.prompt(max(1, plan.longest - chunk - plan.decode), 200), 0
        for turn in range(TURNS):
            answer = prover.check(prover.run(engine, history), known, Tier.DEVICE, f"turn {turn + 1}")
            known = len(history) // chunk * chunk
            history = [*history, *answer.found.tokens, *plan.prompt(max(1, chunk // 2 - 1), 201 + turn)]
            if len(history) + plan.decode > plan.longest + TURNS * plan.decode:
                break


def eviction(prover: Prover) -> None:
    """Conversations that take turns in less memory than they need, with and without a storage."""
    plan, chunk = prover.plan, prover.plan.chunk
    count = 6 if plan.quick and plan.chunks > 1 else 8  # fewer states than these would all stay on the host
    with prover.path("eviction", "tiers too small for the conversations, by each write policy") as row:
        one = plan.longest + plan.decode  # the engine needs device memory for a whole request
        for policy, device, host in (("through", one, 2 * plan.whole), ("back", one, chunk)):
            stored = policy == "through"
            with (
                prover.store() if stored else nullcontext() as store,
                prover.engine(store, device, host, write_policy=policy) as engine,
            ):
                histories = [plan.prompt(plan.whole + 1 - plan.decode, 300 + i) for i in range(count)]
                for turn in range(2):
                    for i, history in enumerate(histories):
                        # Pages in storage are found again; write-back promises nothing.
                        known = turn * ((plan.whole + 1 - plan.decode) // chunk * chunk) if stored else None
                        answer = prover.check(prover.run(engine, history, policy), known, None, policy)
                        if stored:
                            engine.written()
                        rest = [*answer.found.tokens, *plan.prompt(max(1, chunk // 2 - 1), 320 + i)]
                        histories[i] = [*history, *rest][: plan.longest]
                engine.written()
                stats = engine.stats()
                for tier in ("device",) if stored else ("device", "host"):
                    if not sum(gone for name, gone in stats.items() if name.startswith(f"evicted.{tier}.")):
                        row.troubles.append(f"no page was evicted from the {tier} under {policy}: this proved nothing")


def abort(prover: Prover) -> None:
    """Aborted requests: after each chunk, before they begin, and while their pages are copied."""
    plan, chunk = prover.plan, prover.plan.chunk
    prompt = plan.prompt(plan.whole + 1)
    says = "aborted in the middle, then asked again"
    with prover.proof("abort", says, keep_states=prover.at_chunks) as (_, engine, _):
        for done in range(1, plan.chunks + 1):
            left = prover.run(engine, prompt, f"abort {done}", leaves=done * chunk)
            prover.check(left, 0, None, f"aborted after {done} chunks")
            prover.check(prover.run(engine, prompt, f"abort {done}"), done * chunk, Tier.DEVICE, "asked again")
        for emptied in ([], [Tier.DEVICE], MEMORY_TIERS):
            if emptied:
                engine.empty(emptied)
            prover.check(prover.run(engine, prompt, "abort 1", leaves=0), None, None, "aborted at once")
            prover.check(prover.run(engine, prompt, "abort 1"), plan.whole, None, "aborted while it waited")


def interleaved(prover: Prover) -> None:
    """Many requests at once in random order, in little memory, some of them aborted."""
    plan, rng = prover.plan, random.Random(prover.plan.seed)
    count, at_once = (8, 3) if plan.quick else (24, 5)
    stems = [
        plan.prompt(plan.longest),
        plan.prompt(plan.whole + 1, 400),
        plan.prompt(plan.chunk + 1, 401),
    ]
    questions = []
    for _ in range(count):
        prompt, salt, leaves = rng.choice(stems), rng.choice(["one", "two"]), rng.random() < 0.2
        ends = [*range(plan.chunk, len(prompt), plan.chunk), len(prompt)]
        questions.append(prover.question(prompt, salt, leaves=rng.choice([0, *ends]) if leaves else None))
    device, host, says = 2 * plan.longest, 3 * plan.longest, "many requests at once, some aborted"
    with prover.proof("interleaved", says, device=device, host=host) as (row, engine, _):
        for answer in engine.answers(questions, at_once, lambda: engine.evict([rng.choice(MEMORY_TIERS)])):
            prover.check(answer)
        if not sum(row.resumed.values()):
            row.troubles.append("no request found anything: this proved nothing")


PATHS: tuple[Callable[[Prover], None], ...] = (
    alone,
    tiers,
    mixed,
    partial,
    branches,
    conversation,
    eviction,
    abort,
    interleaved,
)
