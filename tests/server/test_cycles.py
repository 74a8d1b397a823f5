"""Two hundred times a storage is attached to a server and detached under traffic; some of it goes wrong on purpose."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from servers import CHUNK, settings
from torch import Tensor

import kvarve.admin
from kvarve.core.audit import audit
from kvarve.core.policies import Policies
from kvarve.engine.requests import Request, Sampling
from kvarve.model import MEMORY_TIERS
from kvarve.server.serve import Server
from kvarve.storage import MemoryStorage, Storage
from kvarve.testing import FaultyStorage, Rule
from plugged import plug_in

CYCLES, SEED = 200, 5
LONG_S = 60.0
KEY = "key"
STORAGE = "/admin/storage"
ODD = "odd://x?capacity=64MiB"
PROMPTS = 12

Answer = tuple[list[int], list[Tensor]]


class Odd:
    """A backend that can be opened in other ways than it should be."""

    def __init__(self) -> None:
        self.raises = False
        self.stores: list[FaultyStorage] = []

    def open(self, label: bytes, description: str) -> Storage:
        store = FaultyStorage(MemoryStorage(64 << 20, label, description), [Rule("flip", probability=0.1)], seed=SEED)
        if self.raises:
            store.close()
            raise RuntimeError("half way")
        self.stores.append(store)
        return store


class Traffic:
    """Clients that send the same prompts over and over, each in its own order, and compare all logits."""

    def __init__(self, server: Server) -> None:
        self.engine = server.engine
        generator = torch.Generator().manual_seed(SEED)
        self.prompts = [torch.randint(256, (2 * CHUNK + 5 + i,), generator=generator).tolist() for i in range(PROMPTS)]
        self.expected = [self.ask(i, read_cache=False, salt="cold") for i in range(PROMPTS)]
        self.answered = threading.Semaphore(0)
        self.tiers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,)) for n in range(2)]

    def ask(self, number: int, read_cache: bool = True, salt: str = "") -> Answer:
        seen: list[Tensor] = []
        request = Request(
            self.prompts[number],
            Sampling(3, ignore_eos=True),
            salt=salt,
            read_cache=read_cache,
            watch=lambda logits: seen.append(logits.clone()),
        )
        _, tokens, last = self.engine.submit(request).result(LONG_S)
        assert not last.error and last.usage is not None, last.error
        if read_cache:
            usage = last.usage
            self.tiers.update({"device": usage.device, "host": usage.host, "storage": usage.storage})
        return tokens, seen

    def _client(self, client: int) -> None:
        rng = random.Random(f"{SEED} {client}")
        while not self._over.is_set():
            number = rng.randrange(PROMPTS)
            try:
                tokens, logits = self.ask(number)
                expected = self.expected[number]
                if tokens != expected[0] or not all(map(torch.equal, logits, expected[1])):
                    self.wrong.append(f"prompt {number}: another answer")
            except Exception as e:  # noqa: BLE001  it is what the test is about
                self.wrong.append(f"prompt {number}: {type(e).__name__}: {e}")
            self.answered.release()

    def go_on(self, answers: int = 1) -> None:
        """Until some more requests have been answered."""
        for _ in range(answers):
            assert self.answered.acquire(timeout=LONG_S), "requests are no longer answered"

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()


@pytest.fixture
def server(checkpoint: Path) -> Iterator[Server]:
    policies = Policies(prefetch_base_s=0.03, prefetch_per_ki_token_s=0.0)
    with Server(settings(checkpoint, policies=policies, admin_key=KEY, deterministic=True)) as server:
        yield server


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvarve")}


def files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.long
def test_storages_come_and_go_two_hundred_times_and_no_request_notices(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}")
    rng, odd, seen = random.Random(SEED), Odd(), Counter[str]()
    plug_in(monkeypatch, "odd", odd.open)
    cache, others = server.engine.cache, ours()
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=LONG_S) as operator, Traffic(server) as traffic:

        def put(url: str) -> int:
            asked = {
                "url": url,
                "back_up": rng.random() < 0.5,
                "write_policy": rng.choice(["write_through", "write_through_selective", "write_back"]),
                "prefetch_policy": rng.choice(["timeout", "best_effort"]),
            }
            return operator.put(STORAGE, json=asked).status_code

        def cycle() -> None:
            kind = rng.choice(["folder", "folder", "folder", "refused", "raises", "dies", "stalls", "damages"])
            seen[kind] += 1
            before = operator.get(STORAGE).json().get("url")
            if kind == "refused":
                url = rng.choice(["nfs://x", "file:///dev/null/x?capacity=64MiB", f"file://{tmp_path}/a?capacity=1KiB"])
                assert put(url) in (400, 500)
            elif kind == "raises":
                odd.raises = True
                assert put(ODD) == 500
                odd.raises = False
            if kind in ("refused", "raises"):
                assert operator.get(STORAGE).json().get("url") == before
                return
            if before is not None and rng.random() < 0.5:
                assert operator.delete(STORAGE).status_code == 200
            if kind == "folder":
                folders = {f"file://{tmp_path}/{name}?capacity=64MiB" for name in ("a", "b")} - {before}
                assert put(rng.choice(sorted(folders))) == 200
                traffic.go_on(rng.randrange(3))
                return
            assert put(ODD) == 200
            store = odd.stores[-1]
            traffic.go_on(rng.randrange(3))
            store.dead = kind == "dies"
            if kind == "stalls":
                store.stall()
            traffic.go_on(1 + rng.randrange(3))
            with monkeypatch.context() as patch:
                if kind == "stalls":  # it is not closed before it goes on, and the test need not wait for that
                    patch.setattr(kvarve.admin, "CLOSED_S", 0.01)
                assert operator.delete(STORAGE).status_code == 200
            store.release()

        cycle()  # so that whatever the server opens once is open
        traffic.go_on(4)
        assert operator.delete(STORAGE).status_code == 200
        assert server.engine.settle(LONG_S)
        let_end(ours() - others)
        descriptors = files()
        for _ in range(CYCLES):
            server.engine.ask(lambda: cache.evict(MEMORY_TIERS), LONG_S)  # or no request would need storage
            cycle()
            assert not traffic.wrong, (seen, traffic.wrong)
        operator.delete(STORAGE)
    assert not traffic.wrong
    assert sum(seen.values()) == CYCLES + 1 and min(seen.values()) > 0
    assert traffic.tiers["storage"] > 0, "no request hit in storage"
    assert server.engine.settle(LONG_S)
    server.engine.flush()
    server.engine.ask(lambda: nothing_is_left(server), LONG_S)
    let_end(ours() - others)
    assert files() <= descriptors
    print(f"{dict(seen)}, tokens from {dict(traffic.tiers)}")


def let_end(threads: set[threading.Thread]) -> None:
    """The threads of detached storages end."""
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive(), thread.name


def nothing_is_left(server: Server) -> None:
    core = server.engine.cache.scheduler.core
    audit(core)
    assert not core.leases and not core.copies.ops and not core.backups.in_flight
    for place, capacity in enumerate(core.slot_pools.capacity):
        assert sorted(core.slot_pools.free[place]) == list(range(capacity)), f"a slot of place {place} has leaked"
