"""One of two ranks that SGLang's tree runs on, in a process of its own: `linker_rank.py RANK FOLDER`. No test here.

Both make the same calls, as their schedulers do; each writes what it saw to `FOLDER/seen-RANK.json`.
"""

import datetime
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import sglang_on_cpu

sglang_on_cpu.prepare()

import torch.distributed  # noqa: E402
from linker_bed import Engine, Failed, prompt  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang_engines import KINDS, LATENTS, LAYOUTS, Fixtures  # noqa: E402
from sglang_witness import Witness  # noqa: E402


def scenes(rank: int, group: Any, url: str) -> dict[str, Any]:
    def made(kind: str, page: int = 16, **extra: Any) -> Engine:
        return Engine(kind, page, core="rust", group=group, weights="of two ranks", **extra)

    seen: dict[str, Any] = {}
    engine, asked = made("FULL+SWA+MAMBA", storage=url), prompt(4, 16)
    engine.serve(asked)
    engine.forget()
    seen["restored"] = engine.serve(asked)
    engine.drain()
    engine.forget()
    if rank:
        engine.drop_host_unheld()
    seen["one has lost all"] = engine.match(req := engine.begin(asked)[0], asked).host_hit_length
    engine.end(req)
    seen["it came from storage"] = engine.run(*engine.wait(asked, 4), asked)
    engine.forget()
    if rank:
        for record in engine.linker.worker.records("kv", engine.page_keys(asked)[0]):
            record[-1] ^= 1
    try:
        engine.serve(asked)
    except Failed as e:
        seen["damaged on one"] = str(e)
    other = prompt(4, 16, 2)
    engine.serve(other)
    engine.forget()
    seen["went on"] = engine.serve(other)
    engine.audit()
    engine.drain()
    engine.close()

    engine = made("FULL+SWA+MAMBA", storage=url)
    req = engine.arrive(asked)
    engine.wait_for_storage(req)
    seen["after a restart"] = engine.run(req, engine.match(req, asked), asked)
    engine.audit()
    engine.close()

    engine = made("FULL")
    engine.serve(asked)
    engine.forget()
    engine.drain()
    if rank:
        engine.drop_host_unheld()
    engine.flush()
    engine.serve(asked[:32])
    engine.forget()
    seen["one has less"] = engine.serve(asked)
    engine.audit()
    engine.close()

    for kind, page in (("DSA", 64), ("V4", 256)):
        engine, asked = made(kind, page, storage=url), prompt(3, page)
        engine.serve(asked)
        engine.drain()
        seen[f"bytes of {kind} written"] = engine.linker.worker.flows()["host-to-storage"].bytes.sum
        engine.close()
        engine = made(kind, page, storage=url)
        seen[f"pages of {kind}"] = engine.run(*engine.wait(asked, 3), asked)
        engine.close()
    return seen


def hicache(group: Any, folder: Path, rank: int) -> dict[str, Any]:
    """The storage backend of a HiCache, on two ranks: each restores as many pages as both have.

    They are its own; of latents there is one copy.
    """
    Witness.forget()
    type(get_parallel()).override = lambda *_, **__: nullcontext()  # by which the fixtures make this rank 0 of 1
    fixtures = Fixtures(KINDS[0], folder / "hicache", LAYOUTS[0])
    asked, ps = fixtures.prompt(4), fixtures.cfg.page_size
    fixtures.engine(group=group).produce(asked)
    seen = {"HiCache after a restart": fixtures.engine(group=group).consume(asked) // ps}
    engine = fixtures.engine(group=group)
    if rank:
        engine.lose("kv", asked, 2)
    seen["HiCache of which one has less"] = engine.consume(asked) // ps
    fixtures.end()
    seen["wrong"] = len(Witness.wrong)

    Witness.forget()
    fixtures = Fixtures(LATENTS[1], folder / "hicache", LAYOUTS[0])
    fixtures.engine(group=group).produce(fixtures.prompt(3))
    stored: list[Any] = [None, None]
    torch.distributed.all_gather_object(stored, Witness.saved, group)
    Witness.saved.update(stored[0])
    seen["latents that each HiCache stored"] = [len(each) for each in stored]
    seen["latents of a HiCache"] = fixtures.engine(group=group).consume(fixtures.prompt(3)) // fixtures.cfg.page_size
    fixtures.end()
    return seen | {"wrong latents": len(Witness.wrong)}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    sizes = {
        f"{which}_{what}": value
        for which in ("tp", "attn_tp", "moe_tp")
        for what, value in (("rank", rank), ("size", 2))
    }
    with get_parallel().override(**sizes, pp_rank=0, pp_size=1):
        seen = scenes(rank, torch.distributed.group.WORLD, f"file://{folder}/pages?capacity=64MiB")
        seen |= hicache(torch.distributed.group.WORLD, folder, rank)
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
