"""What kvarve's connector costs and brings in vLLM. Engines run in processes of their own, by vLLM's Python; nothing of
vLLM is imported here.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import watched

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MIB = 1 << 20
ANSWER_TOKENS, VOCABULARY = 32, 512  # the smallest of the vocabularies
TALKING = 4  # requests at once
# By model: blocks of the engine's own cache, which hold some eight prompts.
FAMILIES = {"gemma3": 250, "qwen3_5": 80, "gpt_oss": 250, "qwen3_next": 80}
SIDES = {"connector": "kvarve's connector", "tiering": "vLLM's tiering"}


@dataclass(frozen=True)
class Size:
    prompt_tokens: int = 2000
    pairs: int = 10  # of cold prompts, with and without the connector
    hits: int = 5  # prompts that are computed, and then come from the host and from storage
    talks: int = 200
    compared: tuple[str, ...] = ("gemma3", "qwen3_5")  # with conversations
    shaped: tuple[str, ...] = ("gemma3", "gpt_oss", "qwen3_5", "qwen3_next")  # with one prompt
    host_bytes: tuple[int, ...] = (32 * MIB, 128 * MIB)


QUICK = Size(
    prompt_tokens=800, pairs=1, hits=1, talks=8, compared=("gemma3",), shaped=("gemma3",), host_bytes=(24 * MIB,)
)


def python_of(given: Path | None) -> Path | None:
    """The Python that has vLLM, or nothing if there is none where it is looked for."""
    if given is not None:
        if not given.exists():
            raise SystemExit(f"--vllm-python: there is no {given}")
        return given
    usual = ROOT / ".venv-vllm" / "bin" / "python"
    found = Path(os.environ.get("KVARVE_VLLM_PYTHON", usual))
    if not found.exists():
        print(f"Left out: what needs vLLM, for there is no {found}; make test-engines sets it up.")
        return None
    return found


class Engine:
    """A vLLM engine in another process. `call` asks it."""

    def __init__(self, python: Path, folder: Path, **settings: Any) -> None:
        self._log = folder / f"{settings['model']}-{settings['side']}.log"
        more = [str(ROOT / "src"), str(ROOT / "tests" / "engines"), os.environ.get("PYTHONPATH", "")]
        settings = {"models": str(folder / "models")} | settings
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-P", str(HERE / "vllm_engine.py"), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, more))},
                text=True,
            )
        self._read()

    def call(self, name: str, **more: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps({"do": name} | more), file=self._process.stdin, flush=True)
        return self._read()["answer"]

    def end(self) -> None:
        """Whether or not it has answered."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the vLLM engine has ended:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)


@contextmanager
def started(python: Path, folder: Path, model: str, side: str, **settings: Any) -> Iterator[Engine]:
    # The model computes on every core: whatever runs beside it takes from it.
    engine = Engine(python, folder, model=model, side=side, threads=len(os.sched_getaffinity(0)), **settings)
    try:
        yield engine
        engine.call("end")
    finally:
        engine.end()


def prompt(dice: random.Random, tokens: int) -> list[int]:
    return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]


# --- one request at a time


def cost(python: Path, folder: Path, size: Size, workers: int = 1) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Single prompts: cold, in turns in engines with and without the connector; from host and storage."""
    dice, model = random.Random(11), "hybrid_100m"
    storage = f"file://{folder / 'pages'}?capacity=2GiB"
    step = {"max_num_batched_tokens": 2048, "tensor_parallel_size": workers}
    off: list[dict[str, float]] = []
    on: list[dict[str, float]] = []
    cold: list[float] = []
    hits: dict[str, list[dict[str, float]]] = {"host": [], "storage": []}
    with (
        started(python, folder, model, "plain", engine=step) as plain,
        started(python, folder, model, "connector", engine=step, storage=storage, host_bytes=1 << 30) as ours,
    ):

        def ask(engine: Engine, given: Sequence[int]) -> dict[str, float]:
            found = engine.call("ask", prompt=given, tokens=ANSWER_TOKENS)
            return {**found, "drained_s": engine.call("drain")}

        for number in watched(range(size.pairs + 1), "cold pair", size.pairs + 1):
            given = prompt(dice, size.prompt_tokens)
            pair = [(plain, off), (ours, on)]
            for engine, into in pair if number % 2 else pair[::-1]:
                found = ask(engine, given)
                assert found["cached"] == 0
                if number:  # the first only warms up
                    into.append(found)
        for _ in watched(range(size.hits), "hit", size.hits):
            given = prompt(dice, size.prompt_tokens)
            cold.append(ask(ours, given)["first_s"])
            for place, empty in (("host", "reset"), ("storage", "forget")):
                ours.call(empty)
                hits[place].append(ask(ours, given))
                assert hits[place][-1]["cached"] > size.prompt_tokens / 2, f"nothing came from {place}"
    rows: list[dict[str, object]] = [
        {
            "what": what,
            "first token s": median(each["first_s"] for each in found),
            "last token s": median(each["last_s"] for each in found),
            "copies after s": median(each["drained_s"] for each in found),
            "cached tokens": int(found[0]["cached"]),
        }
        for what, found in {
            "cold, without the connector": off,
            "cold, with it": on,
            "from the host": hits["host"],
            "from storage": hits["storage"],
        }.items()
    ]
    return rows, {
        "external_hit_ttft": median(each["first_s"] / before for each, before in zip(hits["host"], cold, strict=True)),
        "cold_on_over_off": median(mine["last_s"] / theirs["last_s"] for mine, theirs in zip(on, off, strict=True)),
    }


# --- what is kept


def shapes(engine: Engine) -> dict[str, object]:
    """Of a prompt of 1,000 tokens that the device has forgotten: how many tokens of it, of a longer one and of a
    shorter one come back."""
    given = prompt(random.Random(5), 1300)
    engine.call("ask", prompt=given[:1000], tokens=4)
    found: dict[str, object] = {}
    for what, tokens in {"the same": 1000, "300 longer": 1300, "300 shorter": 700}.items():
        engine.call("reset")
        found[what] = engine.call("ask", prompt=given[:tokens], tokens=4)["cached"]
        if what == "300 longer":  # it is stored by now, and must not serve the shorter one
            engine.call("reset", everywhere=True)
            engine.call("ask", prompt=given[:1000], tokens=4)
    engine.call("reset", everywhere=True)
    return found


def talks(count: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Conversations: the messages of each, of which the first begins with one of ten system prompts; and batches of
    conversations whose next messages are asked at once. Some 32 are under way at any time."""
    dice = random.Random(23)
    systems = [prompt(dice, dice.randrange(300, 900)) for _ in range(10)]
    messages = []
    for _ in range(count):
        turns = [prompt(dice, dice.randrange(40, 300)) for _ in range(dice.randrange(1, 5))]
        messages.append([dice.choice(systems) + turns[0], *turns[1:]])
    waiting, batches = [*range(count)][::-1], []
    left = {talk: len(turns) for talk, turns in enumerate(messages)}
    under_way: list[int] = []
    while waiting or under_way:
        while waiting and len(under_way) < 32:
            under_way.append(waiting.pop())
        batch = dice.sample(under_way, min(TALKING, len(under_way)))
        for talk in batch:
            left[talk] -= 1
        under_way = [talk for talk in under_way if left[talk]]
        batches.append(batch)
    return messages, batches


def kept(
    python: Path, folder: Path, size: Size
) -> tuple[list[dict[str, object]], list[dict[str, object]], dict[str, float]]:
    """Two tables, of single prompts and of conversations, and the ratio: of the models and sizes of host memory, the
    lowest."""
    runs = [(model, host, side) for model in size.shaped for host in size.host_bytes for side in SIDES]
    runs = [run for run in runs if run[0] in size.compared or run[1] == size.host_bytes[-1]]
    messages, batches = talks(size.talks)
    single: list[dict[str, object]] = []
    many: list[dict[str, object]] = []
    found: dict[tuple[str, int, str], int] = {}
    for model, host, side in watched(runs, "engine", len(runs)):
        more = {"num_gpu_blocks_override": FAMILIES[model], "max_num_batched_tokens": 1024}
        with started(python, folder, model, side, engine=more, host_bytes=host) as engine:
            if host == size.host_bytes[-1]:
                single.append({"model": model, "kept by": SIDES[side]} | shapes(engine))
            if model in size.compared:
                told = engine.call("play", messages=messages, batches=batches, answer=16)
                found[model, host, side] = told["cached"]
                device = int(told["sources"].get("device", 0))
                many.append(
                    {
                        "model": model,
                        "host MiB": host // MIB,
                        "kept by": SIDES[side],
                        "prompt tokens": told["asked"],
                        "hit tokens": told["cached"],
                        "of the device": device,
                        "of the host": told["cached"] - device,
                        "hit rate": told["cached"] / told["asked"],
                        "seconds": told["seconds"],
                    }
                )
    over = [
        found[model, host, "connector"] / max(1, found[model, host, "tiering"])
        for model in size.compared
        for host in size.host_bytes
    ]
    return single, many, {"hit_tokens_over_tiering": min(over)}
