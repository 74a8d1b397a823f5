"""One rank of a tiny model that several compute: its answers without a cache and through one, compared bit for bit."""

from pathlib import Path
from typing import Any

import torch

from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.core.policies import Policies
from kvarve.pages.pools import Tier
from kvarve.ranks.star import Listener
from kvarve.reference.engine.model import load_model
from kvarve.reference.engine.rank_processes import Place, Ranks, device_of
from kvarve.reference.verify.watched import Answer, Question, Uncached, WatchedEngine, differences, largest, watched
from tests.sim.models import tiny_grid

PROMPT, DECODE = 150, 4  # tokens


def compare(options: dict[str, Any], place: Place, listener: Listener | None = None) -> dict[str, Any]:
    """By family, of which `folder` has checkpoints: by round, from where a prompt resumed and how many logits differ;
    and which pools are replicated. `device`: the CPU unless given."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    device = device_of(options.get("device", "cpu"), place)
    ranks = Ranks(place, place.meet("compare", listener), device)
    with ranks.ended():
        for family in options["families"]:
            found[family] = _compare(family, ranks, Path(options["folder"]) / family, device)
    return found


def _compare(family: str, ranks: Ranks, folder: Path, device: str) -> dict[str, Any]:
    page, chunk = tiny_grid(family)
    model = load_model(str(folder), page_tokens=page, chunk_tokens=chunk, device=device, ranks=ranks)
    prompt = [int(token) for token in torch.randint(0, 256, (PROMPT,), generator=torch.Generator().manual_seed(5))]
    uncached, rounds = Uncached(model, DECODE), {}
    for restart in (False, True):
        policies = Policies(storage_wait="all")
        config = CacheConfig(4 << 20, 8 << 20, f"file://{folder}-{ranks.ranks}?capacity=64MiB", policies)
        cache = PrefixCache(model.identity, config, device=device, rank=ranks.rank, agreement=ranks.again())
        with watched(model, cache, ranks, deterministic=True) as engine:
            for name in ("storage",) if restart else ("cold", "device", "host"):
                if name == "host":
                    engine.empty([Tier.DEVICE])
                answer = _answer(engine, prompt)
                rounds[name] = [*answer.usage.tiers, len(differences(answer.found, uncached(prompt)))]
            engine.written()
    return {
        "rounds": rounds,
        "replicated": {pool.name: pool.replicated for pool in model.layout.pools},
        "identity": model.identity.fingerprint().hex(),
    }


def _answer(engine: WatchedEngine, prompt: list[int]) -> Answer:
    (answer,) = engine.answers([Question(prompt, DECODE)])
    return answer


def read_of_others(options: dict[str, Any], place: Place, listener: Listener | None = None) -> dict[str, Any]:
    """By family and kind of hits: where some prompts resume, each in an empty memory over what the storage has, and how
    far the logits then are from those without a cache."""
    torch.set_num_threads(1)
    ranks, found = Ranks(place, place.meet("read", listener)), dict[str, Any]()
    with ranks.ended():
        for family, hits in options["cases"]:
            page, chunk = tiny_grid(family)
            folder = Path(options["folder"]) / family
            model = load_model(
                str(folder), page_tokens=page, chunk_tokens=chunk, ranks=ranks, rounded=hits == "rounded"
            )
            config = CacheConfig(
                4 << 20, 8 << 20, f"file://{folder}-{hits}?capacity=64MiB", Policies(storage_wait="all")
            )
            cache = PrefixCache(model.identity, config, rank=ranks.rank, agreement=ranks.again())
            uncached, told = Uncached(model, DECODE), []
            with watched(model, cache, ranks, deterministic=True) as engine:
                for seed in options["seeds"]:
                    # The last line of the grid below its end is that of a chunk, the only ends that this request has.
                    length, dice = 2 * chunk + 5, torch.Generator().manual_seed(seed)
                    tokens = torch.randint(0, 256, (length,), generator=dice).tolist()
                    answer, expected = _answer(engine, tokens), uncached(tokens)
                    scale = float(expected.logits[length].abs().max())
                    told.append([*answer.usage.tiers, largest(answer.found, expected, [length]) / scale])
                engine.written()
            ranks.meet()
            found[f"{family} {hits}"] = told
    return found
