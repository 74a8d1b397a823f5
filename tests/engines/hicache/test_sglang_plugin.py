"""What KVARVE=1 before SGLang's command stands for: SGLang's own parser and resolution, with kvarve's step in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from linker_bed import MakeEngine, prompt
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.server_args import prepare_server_args

from kvarve.connectors import engine_defaults
from kvarve.connectors.sglang import linker, sglang_plugin
from kvarve.connectors.sglang.linker import KvarveLinker, KvarveOrNone
from kvarve.errors import ConfigError

LINKER = ["--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend"]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in engine_defaults.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVARVE", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_defaults, "free_bytes", lambda: 4 << 30)
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    sglang_plugin.load()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plug-in logs; SGLang sets all handlers anew as it reads a command."""
    found: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(sglang_plugin.log, level, lambda text, *more: found.append(text % more))
    return found


def resolved(folder: Path, *words: str) -> Any:
    """The settings of a server with these words in its command."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    args = prepare_server_args(["--model-path", str(folder), "--device", "cpu", *words])
    args.resolve_once()
    return resolving_view(args)


def test_with_one_word_a_server_has_the_linker_a_quarter_of_the_free_memory_and_a_store_of_its_user(
    tmp_path: Path, make_engine: MakeEngine, said: list[str]
) -> None:
    found = resolved(tmp_path)
    assert found.enable_unified_cache_external_linker and found.unified_cache_external_linker_backend == "dynamic"
    config = found.unified_cache_external_linker_config
    extra = config.pop("linker_extra_config")
    assert config == {"linker": KvarveOrNone.__name__, "linker_module_path": KvarveLinker.__module__}
    assert extra["host_memory"] == 1 << 30 and extra["storage"].startswith("file://?capacity=")
    assert "KVARVE=1: the server has 1 GiB of host memory" in said[0]
    engine = make_engine("FULL", 16, linker=config["linker"], **extra | {"host_memory": "8MiB"})
    assert isinstance(engine.linker, KvarveLinker)
    engine.serve(tokens := prompt(4, 16))
    engine.forget()
    assert engine.serve(tokens) == (0, 4, 0)


def test_a_password_of_the_storage_is_in_no_setting_that_sglang_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine, said: list[str]
) -> None:
    monkeypatch.setenv("KVARVE_STORAGE", "redis://user:SECRET@127.0.0.1:1/0")
    config = resolved(tmp_path).unified_cache_external_linker_config
    assert "SECRET" not in str(config) and "***@127.0.0.1" in said[0] and "SECRET" not in said[0]
    monkeypatch.setenv("KVARVE_STORAGE", f"file://{tmp_path}/there?capacity=1MiB")
    engine = make_engine("FULL", 16, linker=config["linker"], host_memory="8MiB")
    assert engine.linker.settings.storage == (f"file://{tmp_path}/there?capacity=1MiB",)


def test_replicas_share_the_memory_and_variables_say_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four = resolved(tmp_path, "--tp-size", "4", "--attn-dp-size", "4")
    assert four.unified_cache_external_linker_config["linker_extra_config"]["host_memory"] == 1 << 28
    monkeypatch.setenv("KVARVE_HOST_MEMORY", "2GiB")
    monkeypatch.setenv("KVARVE_STORAGE", "none")
    extra = resolved(tmp_path).unified_cache_external_linker_config["linker_extra_config"]
    assert extra == {"host_memory": "2GiB", "storage": None}


@pytest.mark.parametrize(
    "words",
    [
        ["--enable-hierarchical-cache"],
        ["--disable-radix-cache"],
        ["--enable-lmcache"],
        ["--pp-size", "2"],
        [*LINKER, "mooncake"],
    ],
    ids=" ".join,
)
def test_a_command_that_says_otherwise_is_left_alone_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    found = resolved(tmp_path, *words)
    option = " ".join(words[:1] if words[0] in LINKER else words)
    assert said == [f"KVARVE=1 changes nothing, as this server has {option}"]
    assert found.unified_cache_external_linker_config is None
    monkeypatch.delenv("KVARVE")
    resolved(tmp_path, *words)
    assert len(said) == 1


def test_kvarve_that_a_command_names_has_the_memory_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVARVE")
    named = {"linker": "KvarveLinker", "linker_module_path": sglang_plugin.MODULE}
    command = [*LINKER, "dynamic", "--unified-cache-external-linker-config"]
    found = resolved(tmp_path, *command, json.dumps(named)).unified_cache_external_linker_config
    assert found == named | {"linker_extra_config": {"host_memory": 1 << 30}}
    given = named | {"linker_extra_config": {"host_memory": "8MiB", "storage": "memory://a?capacity=1MiB"}}
    assert resolved(tmp_path, *command, json.dumps(given)).unified_cache_external_linker_config == given


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("KVARVE_HOST_MEMROY", "2GiB", "did you mean KVARVE_HOST_MEMORY"),
        ("KVARVE_HOST_MEMORY", "plenty", "KVARVE=1: 'host_memory': 'plenty' cannot be read as a size"),
        ("KVARVE_STORAGE", "flie:///x", "flie"),
        ("KVARVE_PORT", "web", "KVARVE_PORT must be a port from 1 to 65535, got 'web'"),
        ("KVARVE", "perhaps", r"\$KVARVE must be 1 or 0, got 'perhaps'"),
    ],
)
def test_a_wrong_variable_ends_the_command_before_a_model_is_loaded(
    name: str, value: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=error):
        resolved(tmp_path)


def test_an_older_sglang_starts_without_kvarve_and_says_so_if_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolution_hooks, "_OVERRIDABLE_HOOKS", frozenset())
    sglang_plugin.load()
    assert "run kvarve doctor" in caplog.text
    caplog.clear()
    monkeypatch.setenv("KVARVE", "0")
    sglang_plugin.load()
    assert not caplog.text


def test_a_model_whose_pools_are_unknown_is_served_without_kvarve(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linker, "_KNOWN", ())
    engine = make_engine("FULL+SWA", 16, linker="KvarveOrNone")
    assert "KVARVE=1 changes nothing, as kvarve cannot serve this model: pool must be one of" in caplog.text
    assert type(engine.linker) is KvarveOrNone
    for pages in (4, 4, 6):
        engine.serve(tokens := prompt(pages, 16))
        engine.forget()
    assert engine.serve(tokens) == (0, 0, 6)
