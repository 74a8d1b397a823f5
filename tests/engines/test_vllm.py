"""kvarve in vLLM, behind either seam: what it restores is what it saved, and what the engine then computes is what it
computes alone.

One request at a time, in steps of one block, so that the engine computes the same pieces wherever it resumes: tokens
and logprobs then have to be equal bit for bit to those of an engine without kvarve. Engines have few blocks, storages
hold little, and everything is evicted and preempted in a storm of requests. `make test-engines` runs this.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import VllmProcess, prompt
from tiny_models import MODELS

pytestmark = pytest.mark.timeout(1200)

LONG, TAIL, OTHER, THIRD = prompt(1000, 1), prompt(300, 2), prompt(900, 3), prompt(900, 4)
HEADS = [prompt(900, seed) for seed in (31, 32, 33)]
# Prompts that share beginnings and end just before a block does, so that all need another block while they answer.
STORM = [(HEADS[at % 3][: 250 + 61 * (at % 5)] + prompt(900, 100 + at))[: 384 * (1 + at % 3) - 8] for at in range(12)]
DEADLINE_S = 5.0  # of calls that never answer, and long enough for a busy machine to answer the others
SEAMS = ("connector", "tiering")
# States and windows behind the connector, and groups of two kinds in the tier.
SHORT = [("qwen3_5", "connector"), ("gemma3", "connector"), ("gemma3", "tiering")]
PLACES = [
    pytest.param((model, seam), id=f"{model}-{seam}", marks=[] if (model, seam) in SHORT else pytest.mark.long)
    for model in MODELS
    for seam in SEAMS
]
Start = Callable[..., VllmProcess]


def long(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return bool(found["tokens"] == expected["tokens"] and found["logprobs"] == expected["logprobs"])


def extra(seam: str, model: str, folder: Path) -> dict[str, Any]:
    url = f"file://{folder}/pages?capacity={MODELS[model].storage[SEAMS.index(seam)]}"
    if seam == "connector":
        return {
            "host_memory": "24MiB",
            "storage": url,
            "storage_deadline_s": DEADLINE_S,
            "storage_wait": "all",
        }
    tier = {"type": "WatchedTier", "module_path": "tier_worker", "storage": url, "deadline_s": DEADLINE_S}
    return {"cpu_bytes_to_use": 24 << 20, "secondary_tiers": [tier]}


def sound(engine: VllmProcess, restored: bool = True) -> dict[str, Any]:
    """Every page that was restored has the bytes that were saved, and nothing is left behind."""
    about = engine.about()
    assert about["wrong"] == [], "a restored page has other bytes than the one that was saved"
    assert not restored or about["restored"], "nothing was restored"
    assert about["left"] == 0
    return about


class Alone:
    """The engine without kvarve: what it answers."""

    def __init__(self, engine: VllmProcess) -> None:
        self.cold = engine.ask(LONG)
        self.device = engine.ask(LONG)
        self.longer = engine.ask(LONG + TAIL)
        engine.call("reset")
        self.shorter = engine.ask(LONG[:700])
        engine.call("reset")
        self.other, self.third = engine.ask(OTHER), engine.ask(THIRD)
        self.singly = [engine.call("ask", prompts=[each], tokens=2)[0] for each in STORM]
        self.storm = self.apart(engine.call("storm", seed=5, prompts=STORM, tokens=60, aborts=3))

    def apart(self, told: dict[str, Any]) -> float:
        """How far the first logprobs of requests together are from those of the same requests one by one."""
        logprobs = [
            abs(output["logprobs"][0] - self.singly[int(name)]["logprobs"][0])
            for name, output in told["outputs"].items()
            if output["tokens"][0] == self.singly[int(name)]["tokens"][0]
        ]
        assert len(logprobs) >= len(told["outputs"]) // 2
        return max(logprobs)


KNOWN: dict[str, Alone] = {}  # by model


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A model and a seam."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(start: Start, place: tuple[str, str]) -> Alone:
    model, _ = place
    if model not in KNOWN:
        engine = start(model)
        KNOWN[model] = Alone(engine)
        engine.close()
    return KNOWN[model]


@pytest.fixture(scope="module")
def begin(start: Start, place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start an engine; all are on one storage."""
    model, seam = place
    settings = extra(seam, model, tmp_path_factory.mktemp("storage"))
    return lambda: start(model, seam, extra=settings, events=seam == "connector")


@pytest.fixture(scope="module")
def first(begin: Start) -> Iterator[VllmProcess]:
    engine = begin()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def second(begin: Start, first: VllmProcess) -> Iterator[VllmProcess]:
    engine = begin()
    yield engine
    engine.close()


@pytest.fixture
def stored(second: VllmProcess, alone: Alone) -> VllmProcess:
    """The second engine, with the prompt in storage and nowhere else."""
    second.ask(LONG)
    second.call("forget")
    return second


def test_a_prompt_is_answered_as_without_kvarve_cold_and_from_the_device_and_the_host(
    first: VllmProcess, alone: Alone
) -> None:
    cold, device = first.ask(LONG), first.ask(LONG)
    assert (cold["cached"], device["cached"]) == (0, alone.device["cached"])
    assert same(cold, alone.cold) and same(device, alone.device)
    first.call("reset")
    found = first.ask(LONG)
    assert found["cached"] == alone.device["cached"] > 0
    assert same(found, alone.device)
    metrics = first.call("metrics")
    assert metrics["vllm:prompt_tokens_cached_by_source host"] == found["cached"]
    sound(first, restored=first.seam == "connector")
    if (
        first.seam == "connector"
    ):  # vLLM's own host memory has its gauge, and the tier's events are in test_vllm_tier_types.py
        usage = [value for name, value in metrics.items() if name.startswith("vllm:kvarve_host_usage ")]
        assert 0 < sum(usage) < 0.5, "a group that owns few slots fills them, and not the host"
        events = first.call("stored_events")
        assert len({event["group"] for event in events}) > 1 and all(event["kind"] for event in events)


def test_a_longer_prompt_resumes_from_the_stored_one_and_a_shorter_one_where_windows_were_full(
    first: VllmProcess, alone: Alone, place: tuple[str, str]
) -> None:
    """A 700-token prefix of a stored 1,000-token prompt hits 640 of a model with windows: the connector saves every
    full window page. States are kept only where the engine hands them over, and vLLM's tiering offers few windows."""
    first.call("forget")
    longer = first.ask(LONG + TAIL)
    assert longer["cached"] == alone.device["cached"] and same(longer, alone.longer)
    first.call("forget")
    shorter = first.ask(LONG[:700])
    assert shorter["cached"] == 640 or place not in (("gemma3", "connector"), ("gpt_oss", "connector"))
    assert same(shorter, alone.shorter)
    sound(first)


def test_a_second_engine_finds_what_the_first_one_stored(second: VllmProcess, alone: Alone) -> None:
    found = second.ask(LONG)
    assert found["cached"] == alone.device["cached"]
    assert same(found, alone.device)
    if second.seam == "connector":
        assert second.call("metrics")["vllm:prompt_tokens_cached_by_source disk"] == found["cached"]
    sound(second)


def test_two_engines_at_once_store_and_find_each_others_pages(
    first: VllmProcess, second: VllmProcess, alone: Alone
) -> None:
    engines = (first, second)
    for prompts in ((OTHER, THIRD), (THIRD, OTHER)):
        for engine in engines:
            engine.call("forget")  # after what it stores is stored
        for engine, asked in zip(engines, prompts, strict=True):
            engine.send("ask", prompts=[asked])
        found = [answer for engine in engines for answer in engine.answer()]
        expected = (alone.other, alone.third) if prompts[0] is OTHER else (alone.third, alone.other)
        assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert all(answer["cached"] > 0 for answer in found), [
        [answer["cached"] for answer in found],
        *(engine.about()["stats"] for engine in engines),
    ]
    sound(first)
    sound(second)


def test_a_page_damaged_in_the_host_is_computed_again(second: VllmProcess, alone: Alone) -> None:
    """The load fails as a whole, the engine asks again at once, and gets less."""
    if second.seam != "connector":
        pytest.skip("vLLM's own host memory has no checks")
    second.ask(LONG)
    second.call("reset")
    assert second.call("spoil_host") > 0
    failed = second.about()["stats"]["failed_loads"]
    assert same(second.ask(LONG), alone.cold)
    about = sound(second)
    assert second.call("metrics")["vllm:kvarve_failed_loads"] > 0
    assert about["stats"]["bad_host"] > 0 and about["stats"]["failed_loads"] == failed + 1


@pytest.mark.parametrize("how", ["corrupt", *long("short", "missing")])
def test_pages_damaged_in_storage_are_computed_again_and_stored_anew(
    stored: VllmProcess, alone: Alone, how: str
) -> None:
    noted = "bad_storage" if stored.seam == "connector" else "load: corrupt"
    assert stored.call("spoil_storage", how=how) > 0
    before = stored.about()["stats"].get(noted, 0)
    found = stored.ask(LONG)
    assert same(found, alone.cold)
    assert found["cached"] == 0
    assert (sound(stored)["stats"].get(noted, 0) > before) == (how != "missing")
    stored.call("forget")
    assert stored.ask(LONG)["cached"] == alone.device["cached"]
    if stored.seam == "tiering":
        metrics = stored.call("metrics")
        assert all(
            metrics[f"vllm:kvarve_tier_chunks {what}"] > 0 for what in ("load done", "load corrupt", "store done")
        )
        assert metrics["vllm:kvarve_tier_up"] == 1


@pytest.mark.parametrize("how", ["stall", *long("dead")])
def test_a_storage_that_fails_or_hangs_costs_its_hits_only(stored: VllmProcess, alone: Alone, how: str) -> None:
    stored.call("trouble", how=how)
    assert same(stored.ask(LONG), alone.cold)
    assert same(stored.ask(OTHER), alone.other), "another one while it is down"
    stored.call("recover")
    stored.call("forget")
    assert same(stored.ask(LONG), alone.device)
    sound(stored)


def test_a_request_that_is_aborted_while_its_pages_are_read_hurts_no_other(stored: VllmProcess, alone: Alone) -> None:
    stored.call("abort_a_load", prompt=LONG)
    stored.call("recover")
    assert same(stored.ask(LONG), alone.device)
    stored.call("forget")
    found = stored.ask(LONG)
    assert found["cached"] == alone.device["cached"] and same(found, alone.device)
    sound(stored)


def test_a_cache_is_reset_and_an_engine_pauses_whatever_its_storage_does(first: VllmProcess) -> None:
    """vLLM raises if it is to forget blocks that are in use, and pauses by that."""
    if first.seam != "connector":
        pytest.skip("vLLM's own host memory waits for the tier's jobs, whose deadline bounds that")
    assert first.call("reset_while_saves_are_under_way", prompt=prompt(900, 5), late=20)
    assert first.call("pause_while_stores_hang", prompt=prompt(900, 6), most=400) < 100
    first.call("recover")
    sound(first, restored=False)


@pytest.mark.parametrize("how", ["call", *long("pause", "sleep", "model")])
def test_no_page_is_found_of_the_weights_before(
    first: VllmProcess, second: VllmProcess, alone: Alone, how: str
) -> None:
    """Neither by the engine nor by another one on its storage, to which its weights now are a stranger's."""
    first.call("forget")
    first.ask(LONG)
    assert same(first.ask(LONG), alone.device)
    first.call("change", how=how)
    changed = first.ask(LONG)
    assert changed["cached"] == 0 and not same(changed, alone.device)
    assert same(changed, first.ask(LONG, read=False))
    for place in ("reset", "forget"):
        first.call(place)
        found = first.ask(LONG)
        assert found["cached"] == alone.device["cached"] and same(found, changed), place
    second.call("forget")
    assert same(second.ask(LONG), alone.device)
    first.call("change", how=how)
    back = first.ask(LONG)
    assert back["cached"] == 0 and same(back, alone.cold)
    sound(first)


def test_nothing_is_kept_of_a_request_in_the_midst_of_which_the_weights_change(
    first: VllmProcess, second: VllmProcess, alone: Alone
) -> None:
    """Its pages are of both. What vLLM itself has cached of it is in the way until vLLM forgets that."""
    first.call("change_in_the_midst", prompt=OTHER)
    first.ask(OTHER)
    first.call("reset", everywhere=first.seam == "tiering")
    expected = first.ask(OTHER, read=False)
    first.call("forget")
    assert same(first.ask(OTHER), expected)
    second.call("forget")
    assert same(second.ask(OTHER), alone.other)
    first.call("change", how="call")


def test_a_storm_of_requests_in_two_engines_at_once(first: VllmProcess, second: VllmProcess, alone: Alone) -> None:
    """Requests share prefixes, are aborted and preempted, and their pages are evicted everywhere while they are loaded:
    the blocks are too few, and one storage, of both engines, is too small.

    Under pressure the engine's own cache changes the pieces in which prompts are computed, and so the last bits. The
    first token's logprob may differ by twice as much with kvarve, as these pieces differ from storm to storm."""
    engines = (first, second)
    evicted = sum(engine.call("evicted") for engine in engines)
    for seed, engine in enumerate(engines):
        engine.send("storm", seed=5 + seed, prompts=STORM, tokens=60, aborts=3)
    told = [engine.answer() for engine in engines]
    for each, engine in zip(told, engines, strict=True):
        assert len(each["outputs"]) + len(each["aborted"]) == len(STORM)
        assert each["drained"] and each["used_blocks"] == 0
        sound(engine)
    evicted = sum(engine.call("evicted") for engine in engines) - evicted
    preempted, worst = sum(each["preempted"] for each in told), max(map(alone.apart, told))
    print(first.seam, "preempted", preempted, "evicted", evicted, "apart", worst, "alone", alone.storm)
    assert preempted, "the blocks were enough for all"
    assert evicted, "the storage was large enough for all"
    assert worst <= max(2 * alone.storm, 1e-5)


@pytest.mark.long
def test_pages_survive_a_restart_while_another_engine_runs_on(
    begin: Start, first: VllmProcess, second: VllmProcess, alone: Alone
) -> None:
    second.call("forget")
    second.ask(LONG)
    first.close()
    engine = begin()
    found = engine.ask(LONG)
    assert found["cached"] == alone.device["cached"] and same(found, alone.device)
    sound(engine)
