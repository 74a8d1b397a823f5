"""What KVARVE=1 before an engine's command stands for, and what `kvarve doctor` says of it."""

import contextlib
from pathlib import Path

import pytest

from kvarve.cli import doctor
from kvarve.connectors import engine_defaults
from kvarve.connectors.engine_interfaces import engines, signatures
from kvarve.connectors.engine_settings import ConnectorSettings
from kvarve.errors import ConfigError
from kvarve.storage import open_storage

GIB = 1 << 30


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("KVARVE", *engine_defaults.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_defaults, "free_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(doctor, "TRIED", 2)
    return tmp_path


def test_without_more_words_an_engine_has_a_quarter_of_the_free_memory_and_a_store_of_its_user(state: Path) -> None:
    found = engine_defaults.settings({"KVARVE": "1"})
    assert found["host_memory"] == GIB
    assert found["storage"].startswith("file://?capacity=") and str(state / "kvarve") in engine_defaults.said(found)
    assert ConnectorSettings.read(found, "here").host_memory == GIB
    assert engine_defaults.settings({}, engines=4)["host_memory"] == GIB // 4


def test_a_stores_capacity_stays_while_it_fills(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each start would give the store less room than the one before."""

    class Disk:
        free = 100 << 20

    monkeypatch.setattr(engine_defaults.shutil, "disk_usage", lambda _: Disk)
    before = engine_defaults.default_storage()
    (state / "kvarve").mkdir()
    (state / "kvarve" / "slab").write_bytes(bytes(8 << 20))
    Disk.free -= 8 << 20
    assert engine_defaults.default_storage() == before == f"file://?capacity={16 << 20}"


def test_a_server_that_joins_others_gives_their_store_the_capacity_that_it_has(state: Path) -> None:
    """Else it could not open it, as the room on the disk is never the same."""
    url = f"file://{state / 'kvarve'}?capacity=33MiB"
    with contextlib.closing(open_storage(url, label=b"any", description="any")):
        assert engine_defaults.default_storage() == f"file://?capacity={33 << 20}"
    assert engine_defaults.default_storage() != f"file://?capacity={33 << 20}"


def test_a_folder_that_cannot_be_used_is_one_error_and_matters_to_none_who_names_a_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(ConfigError, match=r"\$KVARVE_STORAGE must be a URL or none, as .* cannot be used: .*denied"):
        engine_defaults.settings({})
    assert engine_defaults.settings({"KVARVE_STORAGE": "none"})["storage"] is None


def test_variables_change_what_they_name(state: Path) -> None:
    (state / "kvarve.toml").write_text(
        'host_memory = "3GiB"\nwrite_policy = "back"\nstorage = "file:///a?capacity=1GiB"'
    )
    given = {"KVARVE_CONFIG": str(state / "kvarve.toml"), "KVARVE_HOST_MEMORY": "2GiB"}
    found = ConnectorSettings.read(engine_defaults.settings(given), "here")
    assert (found.host_memory, found.policies.write_policy) == (2 * GIB, "back")
    assert found.storage == ("file:///a?capacity=1GiB",)
    several = engine_defaults.settings(given | {"KVARVE_STORAGE": "file:///b?capacity=1GiB mooncake://10.0.0.1"})
    assert several["storage"] == ["file:///b?capacity=1GiB", "mooncake://10.0.0.1"]
    assert engine_defaults.settings({"KVARVE_STORAGE": "none"})["storage"] is None


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"KVARVE": "perhaps"}, r"\$KVARVE must be 1 or 0, got 'perhaps'"),
        ({"KVARVE": "1", "KVARVE_HOST_MEMROY": "1GiB"}, "did you mean KVARVE_HOST_MEMORY"),
        ({"KVARVE": "1", "KVARVE_CONFIG": "/nowhere"}, r"\$KVARVE_CONFIG must be a file, got '/nowhere'"),
    ],
    ids=str,
)
def test_a_wrong_variable_is_one_error(
    variables: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=error):
        assert not engine_defaults.asked() or engine_defaults.settings(variables)
    assert doctor.main() == 1
    assert "variables fault" in capsys.readouterr().out


def test_variables_of_other_commands_are_none_of_the_connectors() -> None:
    theirs = (
        "KVARVE_SERVE_HOST_MEMORY",
        "KVARVE_SERVE_STORAGE",
        "KVARVE_API_KEY",
        "KVARVE_ADMIN_KEY",
        "KVARVE_SERVE_PORT",
    )
    engine_defaults.check_names(dict.fromkeys(theirs, "1"))


def test_doctor_tries_the_store_and_leaves_nothing_in_it(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert f"store     good    {state / 'kvarve'}: writes" in out and "neither vLLM nor SGLang is here" in out
    assert not [*(state / "kvarve").iterdir()]


def test_an_engine_whose_hooks_are_others_is_a_fault_and_one_that_was_not_run_a_warning(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("class Base:\n    def ask(self, request, *, early=False): ...\n")
    vllm = engines()["vllm"]
    same = type(vllm)("vllm", ("1.2",), ("1.3",), {"base.py Base.ask": ("(self, request, *, early=)",)})
    assert doctor._interface(same, "1.2.3", tmp_path).grade == "good"
    assert doctor._interface(same, "1.20.0", tmp_path).grade == "warning"
    other = type(vllm)("vllm", ("1.2",), ("1.3",), {"base.py Base.ask": ("(self)",), "base.py Base.tell": ("(self)",)})
    found = doctor._interface(other, "1.2.3", tmp_path)
    assert (found.grade, "and 1 more" in found.told) == ("fault", True)


@pytest.mark.parametrize(("engine", "runs", "reads"), [("vllm", "0.32", ("0.33",)), ("sglang", "0.5.23", ())])
def test_every_hook_is_known_by_its_signature_in_the_version_that_runs_and_the_newest_one(
    engine: str, runs: str, reads: tuple[str, ...]
) -> None:
    found = engines()[engine]
    assert (found.runs, found.reads) == ((runs,), reads)
    assert all(len(known) == 1 for known in found.hooks.values()), "a hook differs between versions"
    assert len(found.hooks) > 60 and not signatures(Path("/nowhere"), found.hooks)
