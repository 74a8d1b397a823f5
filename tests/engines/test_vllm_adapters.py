"""Adapters behind vLLM's connector: pages are of the weights that were loaded, whatever their files say by now.

vLLM knows an adapter by its name and path: what it has cached itself is of any weights that these ever had.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import written
from engine_process import VllmProcess, prompt

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]

LONG, OTHER = prompt(1000, 1), prompt(900, 3)
HIT = 896
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


class Adapted:
    """An engine, and one adapter of it."""

    def __init__(self, engine: VllmProcess, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def named(self, inplace: bool = False) -> dict[str, Any]:
        return {"lora_name": "a", "lora_int_id": 1, "lora_path": str(self.folder), "load_inplace": inplace}

    def ask(self, tokens: list[int] = LONG, reset: bool = True, read: bool = True, **more: Any) -> dict[str, Any]:
        """An answer, with nothing cached by vLLM itself."""
        if reset:
            self.engine.call("reset")
        return self.engine.ask(tokens, read=read, adapter=self.named(**more))

    def right(self, found: dict[str, Any], **more: Any) -> bool:
        """Whether an answer is that of the weights that are loaded."""
        cold = self.ask(read=False, **more)
        return bool(found["tokens"] == cold["tokens"] and found["logprobs"] == cold["logprobs"])


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    url = f"file://{tmp_path_factory.mktemp('adapters')}/pages?capacity=256MiB"
    extra = {"host_memory": "64MiB", "storage": url, "storage_wait": "all"}
    return {"extra": extra, "more": {"num_gpu_blocks_override": 100, "max_model_len": 1536} | LORA}


@pytest.fixture(scope="module")
def engine(start: Any, settings: dict[str, Any]) -> Iterator[VllmProcess]:
    engine = start("gemma3", "connector", **settings)
    yield engine
    engine.close()


@pytest.fixture
def adapted(engine: VllmProcess, tmp_path: Path) -> Adapted:
    adapted = Adapted(engine, written(tmp_path / "adapter", 1))
    for number in engine.call("loaded"):
        engine.call("unload", number=number)
    return adapted


def others(folder: Path) -> list[dict[str, Any]]:
    """As many other adapters as there is room for."""
    return [
        {"lora_name": name, "lora_int_id": number, "lora_path": str(written(folder / name, number))}
        for number, name in ((2, "b"), (3, "c"))
    ]


def test_an_adapter_loaded_anew_in_place_reads_no_page_of_the_weights_before(adapted: Adapted) -> None:
    first = adapted.ask()
    written(adapted.folder, 2)
    again = adapted.ask()
    assert again["logprobs"] == first["logprobs"], "it has not been loaded"
    adapted.engine.call("load", adapter=adapted.named(inplace=True))
    found = adapted.ask()
    assert found["cached"] == 0 and found["logprobs"] != first["logprobs"] and adapted.right(found)
    found = adapted.ask()
    assert found["cached"] == HIT and adapted.right(found)
    written(adapted.folder, 1)
    adapted.engine.call("load", adapter=adapted.named(inplace=True))
    assert adapted.ask() == first | {"cached": HIT}, "the first weights are known again"


@pytest.mark.parametrize("what", ["scale", "evicted", "removed"])
def test_other_weights_under_the_same_name_and_path_share_no_page(adapted: Adapted, tmp_path: Path, what: str) -> None:
    """An adapter that others have pushed out is loaded again when a request comes, and nothing tells."""
    first = adapted.ask()
    if what == "evicted":
        for other in others(tmp_path):
            adapted.engine.ask(OTHER, adapter=other)
    else:
        adapted.engine.call("unload", number=1)
    written(adapted.folder, 1 if what == "scale" else 2, alpha=32 if what == "scale" else 16)
    found = adapted.ask()
    assert found["cached"] == 0 and found["logprobs"] != first["logprobs"] and adapted.right(found)
    assert adapted.ask() == found | {"cached": HIT}


def test_a_request_that_wants_its_adapter_loaded_anew_has_it_loaded_once(adapted: Adapted) -> None:
    """By vLLM it would be loaded in each step, with the files of that time."""
    adapted.engine.call("reset")
    adapted.engine.call("overwrite", prompt=LONG, adapter=adapted.named(inplace=True), seed=2)
    adapted.ask(reset=False)
    found = adapted.ask(inplace=True)
    assert adapted.right(found, inplace=True)
    assert adapted.ask(inplace=True) == found | {"cached": HIT}
    written(adapted.folder, 1)
    adapted.engine.call("load", adapter=adapted.named(inplace=True))
    assert adapted.right(adapted.ask())


def test_adapters_of_requests_that_wait_push_out_none_of_a_request_that_runs(adapted: Adapted, tmp_path: Path) -> None:
    """Its files are gone by then, as a trainer's."""
    first = adapted.engine.call("ask", prompts=[OTHER], adapter=adapted.named(), tokens=40)
    more = others(tmp_path)
    adapted.engine.ask(LONG, adapter=more[0])
    adapted.engine.call("reset")
    asked = [(OTHER, adapted.named()), *((LONG, each) for each in more)]
    found = adapted.engine.call("at_once", asked=asked, tokens=40)
    assert found[0]["logprobs"] == first[0]["logprobs"]
    assert [each["cached"] for each in found[1:]] == [HIT, 0]


def test_a_page_in_whose_midst_an_adapter_had_other_weights_is_not_kept(adapted: Adapted) -> None:
    """They are what they were when it is full."""
    adapted.engine.call("reset")
    answer = adapted.engine.call("load_there_and_back", prompt=LONG[:640], adapter=adapted.named(), tokens=200)
    longer = LONG[:640] + answer[:150]
    adapted.ask(longer, reset=False)
    found = adapted.ask(longer)
    assert found["cached"] == 640
    cold = adapted.ask(longer, read=False)
    assert found["logprobs"] == cold["logprobs"]


def test_pages_of_an_adapter_are_found_after_a_restart_by_its_weights(
    start: Any, settings: dict[str, Any], adapted: Adapted
) -> None:
    """And by the scale of its config, which is in none of its tensors."""
    first = adapted.ask()
    written(adapted.folder, 1, alpha=32)
    second = start("gemma3", "connector", **settings)
    there = Adapted(second, adapted.folder)
    found = there.ask()
    assert found["cached"] == 0 and found["logprobs"] != first["logprobs"] and there.right(found)
    written(adapted.folder, 1)
    second.call("load", adapter=there.named(inplace=True))
    assert there.ask() == first | {"cached": HIT}, "from storage"
    adapted.engine.call("forget")
    assert adapted.ask() == first | {"cached": HIT}
    second.close()


@pytest.mark.parametrize("how", ["load", "late load", "unload", "late call", "late keep"])
def test_pages_that_were_loaded_for_a_request_that_has_not_run_go_with_the_weights(adapted: Adapted, how: str) -> None:
    """They are its whole prompt: it runs for the first time after the weights have changed. (At the end: pages of an
    engine whose model has changed are found by no other.)"""
    first = adapted.ask()
    adapted.engine.call("reset")
    if "load" in how:
        written(adapted.folder, 2)
    found = adapted.engine.call("change_before_the_first_step", prompt=LONG, adapter=adapted.named(), how=how)
    assert found["cached"] == 0 and found["logprobs"] != first["logprobs"] and adapted.right(found)
    assert adapted.ask() == found | {"cached": HIT}
    if "load" not in how:
        adapted.engine.call("change", how="call")
