"""Drives requests through engines of its own and compares every logit with the uncached run."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import Any

from kvarve.cache.config import CacheConfig, room_for, spacing
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.scheduler import Prompt
from kvarve.cache.worker import check
from kvarve.core.lease import Lease
from kvarve.core.policies import Policies
from kvarve.core.slots.extents import Cut
from kvarve.memory.machine import on_host
from kvarve.pages.keys import KEY_BYTES, object_name
from kvarve.pages.pools import PoolSpec, Tier
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.rank_processes import Ranks
from kvarve.reference.verify.proof_plan import Plan
from kvarve.reference.verify.report import TIERS, Path, ProofReport
from kvarve.reference.verify.watched import (
    Answer,
    Question,
    Uncached,
    WatchedEngine,
    differences,
    largest,
    watched,
)
from kvarve.storage import open_storage
from kvarve.storage.altered import AlteredStorage
from kvarve.transfer.compression import compressing

STORAGE_S = 30.0  # a storage that takes longer never answers


class Prover:
    """`salt` keeps this run's pages apart from all others in the user's storage; `written`: the names of its pages.

    `tick(path)` is called after each request. Of several `ranks` each runs the same proof: what a path does may depend
    on nothing that one rank alone knows.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: Plan,
        storage: str,
        salt: str,
        report: ProofReport,
        tick: Callable[[Path], None],
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.plan, self.storage, self.salt = model, plan, storage, salt
        self.report, self.tick, self._ranks = report, tick, ranks
        self.rank, self.ranks = (0, 1) if ranks is None else (ranks.rank, ranks.ranks)
        self.uncached = Uncached(model, plan.decode)
        self.at_chunks = f"ends,branches,chunks,every:{plan.chunk}"
        self.log = BufferingHandler(1 << 20)  # for the path that failed, rather than for the progress bar
        self.log.setLevel(logging.WARNING)
        self.written: set[str] = set()
        self.row = Path("", "")

    # --- rows

    @contextmanager
    def path(self, name: str, says: str) -> Iterator[Path]:
        """A row of the report; any exception inside is a finding of it."""
        self.row = row = Path(name, says)
        self.report.paths.append(row)
        self.log.flush()
        self.tick(row)
        start = time.perf_counter()
        try:
            yield row
        except Exception as e:  # noqa: BLE001  any failure of a broken cache is a finding
            row.troubles.append(f"{type(e).__name__}: {e}")
        row.seconds = time.perf_counter() - start
        if row.troubles:
            lines = dict.fromkeys(record.getMessage() for record in self.log.buffer)
            row.troubles += [f"the log says: {line}" for line in lines]

    # --- engines

    def config(self, device: int = 0, host: int = 0, **settings: object) -> CacheConfig:
        """Memory for `device` and `host` tokens; 0: enough for any path."""
        layout, chunk = self.model.layout, self.plan.chunk
        shape = (layout.pools, layout.page_tokens, chunk)
        most = sum(self.plan.lengths()) + 4 * self.plan.longest
        near = room_for(device or most, *shape, records=False, per_snapshot=chunk)
        if not (device or on_host(self.model.model.device)):
            near *= 2  # a GPU's extents are large, and not all are full
            slots = check(self.model.identity, CacheConfig(near), str(self.model.model.device))
            if not isinstance(slots[Tier.DEVICE], Cut):
                apart = spacing(*shape)  # of snapshots, where pools do not share
                near = max(near, room_for(most * apart // chunk, *shape, records=False, per_snapshot=apart))
        return CacheConfig(
            near,
            room_for(host or most, *shape, records=True, per_snapshot=chunk),
            policies=Policies(
                storage_deadline_s=STORAGE_S,
                **{"storage_wait": "all"} | settings,  # type: ignore[arg-type]
            ),
        )

    @contextmanager
    def store(self) -> Iterator[AlteredStorage]:
        """The storage, reopened, in an AlteredStorage."""
        identity = self.model.identity
        label, description = identity.fingerprint(), str(identity)
        store = AlteredStorage(open_storage(self.storage, label=label, description=description, around=compressing))
        try:
            yield store
        finally:
            self.written |= store.written
            store.close()

    def clear(self) -> None:
        """Delete the proof's pages from the storage."""
        with self.store() as store:
            store.delete(sorted(self.written))

    @contextmanager
    def engine(
        self,
        store: AlteredStorage | None = None,
        device: int = 0,
        host: int = 0,
        model: LoadedModel | None = None,
        deterministic: bool = True,
        exact: bool = False,
        **settings: object,
    ) -> Iterator[WatchedEngine]:
        """An engine over a cache of its own, empty, with or without a storage; sizes in tokens."""
        model, where = model or self.model, str(self.model.model.device)
        among: dict[str, Any] = {}
        if self._ranks is not None:
            among = {"rank": self.rank, "agreement": self._ranks.again()}
        config = self.config(device, host, **settings)
        cache = PrefixCache(model.identity, config, device=where, storage=store, **among)
        # With one chunk a turn, prefill and decoding overlap for as long as possible.
        turns = {"turn_tokens": self.plan.chunk, "deterministic": deterministic, "exact": exact}
        try:
            with watched(model, cache, self._ranks, **turns) as engine:
                yield engine
        finally:
            if store is not None:
                store.restore()

    @contextmanager
    def proof(
        self, name: str, says: str, *, stored: bool = True, **settings: Any
    ) -> Iterator[tuple[Path, WatchedEngine, AlteredStorage]]:
        """A row of the report, with an engine and a storage of its own; without one unless `stored`."""
        with (
            self.path(name, says) as row,
            self.store() as store,
            self.engine(store if stored else None, **settings) as engine,
        ):
            yield row, engine, store

    # --- what is stored

    def prompt(self, engine: WatchedEngine, prompt: Sequence[int], salt: str) -> Prompt:
        return engine.cache.scheduler.prompt(prompt, f"{self.salt} {salt}")

    def name(self, prompt: Prompt, at: int, pool: PoolSpec) -> str:
        """The object that a prompt's page lies in, or this rank's part of it."""
        part = 0 if pool.replicated else self.rank
        return object_name(prompt.root, key_of(prompt, at), pool.name, part, self.ranks)

    def write(self, engine: WatchedEngine, store: AlteredStorage, name: str, data: bytes, pool: PoolSpec) -> None:
        """Store an object in place of the one there, while no rank reads it."""
        engine.meet()
        if not (pool.replicated and self.rank):
            store.write({name: data})
        engine.meet()

    # --- requests

    def question(self, prompt: Sequence[int], salt: str = "", read: bool = True, leaves: int | None = None) -> Question:
        return Question(prompt, self.plan.decode, f"{self.salt} {salt}", read, leaves)

    def run(
        self,
        engine: WatchedEngine,
        prompt: Sequence[int],
        salt: str = "",
        read: bool = True,
        leaves: int | None = None,
        before: Callable[[Lease], None] | None = None,
    ) -> Answer:
        """One request alone; `before` is called when its pages are on the device and not yet read."""
        engine.before = before
        engine.meet()
        try:
            (answer,) = engine.answers([self.question(prompt, salt, read, leaves)])
        finally:
            engine.before = None
        if (answer.usage.queued_s or 0.0) >= 0.9 * STORAGE_S:
            self.row.troubles.append(
                f"{named(prompt)} waited for storage until the deadline, {answer.usage.queued_s:.1f} s"
            )
        return answer

    def check(
        self,
        answer: Answer,
        resumed: int | None = None,
        tier: Tier | None = None,
        about: str = "",
        uncached: Uncached | None = None,
    ) -> Answer:
        """Compare a request's logits with the uncached run; it has to resume after `resumed` tokens, from `tier`.

        A hit's pages that a resume does not read, as in a model of states alone, come from nowhere and count as the
        device's.
        """
        row, prompt, found, tiers = self.row, answer.prompt, answer.found, answer.usage.tiers
        name, expected = named(prompt, about), (uncached or self.uncached)(prompt)
        wrong = differences(found, expected)
        row.compared += len(found.logits)
        row.differ += len(wrong)
        if wrong:
            row.troubles.append(
                f"{name}, resumed after {sum(tiers)}: logits differ at {len(wrong)} of {len(found.logits)} "
                f"positions, first after {wrong[0]} tokens, by {largest(found, expected, wrong):.3g} at most"
            )
        due = resumed
        if resumed is not None and tier is not Tier.DEVICE:
            due = self.model.layout.read_before(resumed)
        if resumed is not None and sum(tiers) != resumed:
            row.troubles.append(f"{name} resumed after {sum(tiers)} tokens instead of {resumed}")
        elif tier is not None and tiers[tier] != due:
            sources = ", ".join(f"{tokens} {name}" for name, tokens in zip(TIERS, tiers, strict=True) if tokens)
            row.troubles.append(f"{name} was to resume from the {tier.name.lower()}, and had {sources or 'nothing'}")
        self.count(answer)
        return answer

    def count(self, answer: Answer) -> None:
        """Count a finished request by the tokens of its prompt that each tier had."""
        row = self.row
        row.requests += 1
        row.prompt_tokens += len(answer.prompt)
        for name, tokens in zip(TIERS, answer.usage.tiers, strict=True):
            row.resumed[name] += tokens
        self.tick(row)


def named(prompt: Sequence[int], about: str = "") -> str:
    return f"a prompt of {len(prompt)} tokens" + (f" ({about})" if about else "")


def key_of(prompt: Prompt, at: int) -> bytes:
    return prompt.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
