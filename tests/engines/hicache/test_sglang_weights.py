"""Whatever changes the weights of a running SGLang: no page of those before is found, and none stored as if it were."""

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang_engines import KINDS, MakeFixtures, long

from kvarve.connectors.engine_settings import HiCacheSettings
from kvarve.connectors.sglang import hicache_storage as connector
from kvarve.connectors.sglang.hicache import Ranks
from kvarve.errors import ConfigError

FULL = KINDS[0]


def write(how: str) -> None:
    """SGLang writes to the weights, as far as it comes without a model."""
    with suppress(AttributeError, TypeError):
        getattr(WeightUpdater, how)(SimpleNamespace())


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The `weight_version` that SGLang tells; what was noticed of updates is forgotten at the end."""
    told = {"now": "default"}
    monkeypatch.setattr(connector, "_weight_version", lambda: told["now"])
    monkeypatch.setattr(connector._updates, "count", 0)
    connector._loaded.cache_clear()
    return told


@pytest.mark.parametrize("how", [connector._WRITES[0], "a weight_version alone", *long(*connector._WRITES[1:])])
def test_after_an_update_of_the_weights_nothing_is_found_or_stored(
    make: MakeFixtures, version: dict[str, str], how: str
) -> None:
    fixtures = make(FULL)
    prompt = fixtures.prompt(4)
    fixtures.engine().produce(prompt)
    engine, before = fixtures.engine(), fixtures.engine()
    assert before.consume(prompt) == len(prompt)
    if how in connector._WRITES:
        write(how)
    else:
        version["now"] = "step 2"
    assert engine.consume(prompt) == 0
    other = fixtures.prompt(4, start=50_000)
    with suppress(AssertionError):  # SGLang's fixture waits for each page to be stored
        engine.produce(other)
    version["now"] = "default"
    assert fixtures.engine().consume(other) == 0


def test_updates_are_counted_by_what_sglang_calls_for_each_kind_of_request() -> None:
    """A name that SGLang changes would go unnoticed."""
    assert {*connector._WRITES} <= {*vars(WeightUpdater)}
    calls = {name for name, it in vars(WeightUpdater).items() if callable(it) and not name.startswith("_")}
    writes = {name for name in calls if "weight" in name}
    others = {"init_weights_update_group", "destroy_weights_update_group", "receive_weights_from_distributed"}
    assert writes == {*connector._WRITES} | others, "these write to nothing that serves"
    spec = find_spec("sglang.srt.managers.scheduler")  # what it imports is not all here
    assert spec is not None and spec.origin is not None
    assert f"def {connector._ATTACH}(" in Path(spec.origin).read_text()


# --- what a storage is attached to


def saved(folder: Path, seed: int, config: str = "config.json", told: str = "{}") -> str:
    folder.mkdir(exist_ok=True)
    save_file({"a": np.random.default_rng(seed).random(200)}, folder / "model.safetensors")
    (folder / config).write_text(told)
    return str(folder)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: dict[str, str]) -> Callable[..., str]:
    """What tells the weights of a server apart that is started with these arguments."""
    model = saved(tmp_path / "model", 1)

    def found(setting: str = "", **more: Any) -> str:
        monkeypatch.setattr(connector, "_server_args", lambda: SimpleNamespace(model_path=model, **more))
        settings = HiCacheSettings.read({"storage": "file:///x?capacity=1GiB", "weights": setting})
        return connector._identity(settings, None, Ranks()).weights

    return found


def test_updated_weights_that_have_no_version_are_not_taken_for_those_of_the_files(
    weights: Callable[..., str], version: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights()
    saved(tmp_path / "model", 2)
    assert weights() == first, "a trainer has overwritten the files since, and memory is what it was"
    write("update_weights_from_tensor")
    with pytest.raises(ConfigError, match='no weight_version says to what: "weights" must be'):
        weights()
    assert weights("step 7") == "step 7"
    version["now"] = "step 8"
    found = weights()
    assert found not in ("", first) and weights() == found
    write("update_weights_from_tensor")
    version["now"] = "step 9"  # SGLang sets it after each piece
    found = weights()
    assert found not in ("", first)
    with monkeypatch.context() as patches:
        patches.setattr(connector, "_RUN", "another server")
        assert weights() != found, "two trainings may count their updates alike"
        assert weights("step 1") == "step 1 version step 9", "a name is the operator's word"
    write("update_weights_from_disk")
    assert weights() not in (found, first), "the version is that of the update before"


def test_a_storage_attached_to_a_server_that_runs_wants_a_name_for_its_weights(
    weights: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been updated before kvarve was there to see it."""

    def attach_hicache_storage_wrapped() -> Any:
        with monkeypatch.context() as patches:
            for name in connector._WRITES:
                patches.setattr(WeightUpdater, name, getattr(WeightUpdater, name))
            return connector._Updates()

    monkeypatch.setattr(connector, "_updates", attach_hicache_storage_wrapped())
    with pytest.raises(ConfigError, match="or may have been"):
        weights()
    assert weights("step 7") == "step 7"


def test_adapters_of_the_start_are_told_apart_by_their_weights(weights: Callable[..., str], tmp_path: Path) -> None:
    """SGLang's hashes have the name and path of these, the same after a restart; of a later one a number of its own."""
    path = saved(tmp_path / "adapter", 2, "adapter_config.json", '{"lora_alpha": 16}')
    assert LoRARef.deterministic_id("a", path) == LoRARef.deterministic_id("a", path)
    assert LoRARef(lora_name="a", lora_path=path).lora_id != LoRARef(lora_name="a", lora_path=path).lora_id
    adapters = [LoRARef(lora_id=LoRARef.deterministic_id("a", path), lora_name="a", lora_path=path)]
    found = [weights(lora_paths=[]), weights(lora_paths=adapters)]
    saved(tmp_path / "adapter", 2, "adapter_config.json", '{"lora_alpha": 32}')
    connector._loaded.cache_clear()  # another server
    found.append(weights(lora_paths=adapters))
    saved(tmp_path / "adapter", 3)
    connector._loaded.cache_clear()
    found.append(weights(lora_paths=adapters))
    assert len({*found}) == 4
    assert weights(lora_paths=None) == found[0]
