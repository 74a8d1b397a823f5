"""An operator's settings come from flags, the environment, a file and the defaults; mistakes are refused."""

import ast
import inspect
import os
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from cyclopts import App

from kvarve import errors
from kvarve.cli import main
from kvarve.cli.main import PLANNED, SIMULATED
from kvarve.cli.main import app as real
from kvarve.connectors.sglang import objects
from kvarve.core import core_config as core_settings
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.planner import SimulationConfig
from kvarve.reference.server.serve_settings import ADVANCED, GROUPS, Settings
from kvarve.settings import commands
from kvarve.settings.options import FILE_BYTES, ConfigFile, call, needs, root_app

app = root_app("kvarve", "", "kvarve 0")


@app.command
def storage() -> None:
    """A command with the name of a setting."""


@app.command
def serve(*, settings: Settings = Settings(), config: ConfigFile = None) -> Settings:
    """Returns its settings."""
    return settings


def told(*words: object) -> Settings:
    settings: Settings = call(app, ["serve", *map(str, words)])
    return settings


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KVARVE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvarve.toml"


def test_a_flag_goes_before_the_environment_the_environment_before_the_file_and_that_before_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told() == Settings()
    file.write_text("port = 1\nmax_running = 1\nmax_waiting = 1\n")
    monkeypatch.setenv("KVARVE_SERVE_PORT", "2")
    monkeypatch.setenv("KVARVE_SERVE_MAX_RUNNING", "2")
    settings = told("--config", file, "--port", 3)
    assert (settings.port, settings.max_running, settings.max_waiting) == (3, 2, 1)
    assert settings.turn_tokens == Settings().turn_tokens


def test_every_kind_of_value_comes_from_each_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        f"host_memory = {1 << 30}\nstorage = ['/a', '/b']\nverify_host = false\nhost_share = 0.5\n"
        "threads = 2\nwrite_policy = 'back'\nready_file = '/x'\n"
    )
    by_file = told("--config", file)
    words = (
        "--host-memory 4MiB --storage /a --host-memory 1GiB --storage /b --no-verify-host --host-share 0.5 --threads 2"
    )
    by_flag = told(*words.split(), "--write-policy", "back", "--ready-file=/x")
    for name, value in {
        "HOST_MEMORY": "1GiB",
        "STORAGE": "/a /b",
        "VERIFY_HOST": "false",
        "HOST_SHARE": "0.5",
        "THREADS": "2",
        "WRITE_POLICY": "back",
        "READY_FILE": "/x",
    }.items():
        monkeypatch.setenv(f"KVARVE_SERVE_{name}", value)
    assert by_file == by_flag == told()
    assert by_file.cache.storages == ("/a", "/b") and by_file.host_memory == 1 << 30
    assert by_file.policies.host_share == 0.5 and not by_file.policies.verify_host and by_file.ready_file == Path("/x")


def test_keys_come_from_variables_without_the_command_and_stay_out_of_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVARVE_API_KEY", "secret-1")
    monkeypatch.setenv("KVARVE_ADMIN_KEY", "secret-2")
    assert (told().api_key, told().admin_key) == ("secret-1", "secret-2")
    assert told("--api-key", "mine").api_key == "mine"
    call(app, ["serve", "--help"])
    text = capsys.readouterr().out
    assert "KVARVE_API_KEY" in text and "secret" not in text and "KVARVE_SERVE" not in text


def test_every_setting_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    told_apart = [kind for kind in vars(commands).values() if isinstance(kind, type) and is_dataclass(kind)]
    assert len(told_apart) > 8
    for kind in (Settings, Policies, SimulationConfig, *told_apart):
        (definition,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in pairwise([*definition.body, ast.Pass()]):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) != "policies":
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(field)
    call(app, ["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for said in ("Port to listen on; 0 takes any free one", "[choices: lru | lfu", "[default: 256MiB]"):
        assert said in shown


def commands_of(tool: App) -> Iterator[App]:
    yield tool
    for name in tool:
        if not name.startswith("-"):
            yield from commands_of(tool[name])


def test_each_command_shows_an_example_and_each_option_of_the_server_stands_in_one_group() -> None:
    commands = [*commands_of(real)]
    assert len(commands) > 20
    for command in commands:
        assert "example" in (command.help_epilogue or ""), command.name
    named = " ".join(GROUPS.values()).split()
    options = {each.names[0][2:] for each in real["serve"].assemble_argument_collection() if each.names[0][:2] == "--"}
    few = ADVANCED.split()
    assert len(named) == len(set(named)) <= 45
    assert sorted([*named, *few]) == sorted(options), "neither more nor less"
    for groups, command in ((SIMULATED, "simulate"), (PLANNED, "plan")):
        grouped = " ".join(groups.values()).split()
        known = {each.names[0][2:] for each in real[command].assemble_argument_collection()} - {""}
        assert len(grouped) == len(set(grouped)) and {*grouped} <= known


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prt = 1", "unknown setting 'prt': did you mean port?"),
        ("no-verify-host = true", "unknown setting 'no-verify-host'"),
        ("port = {a = 1}", "'port' is a table"),
        ("port = 1.5", "port must be a whole number"),
        ("port = '8000'", "port must be a whole number, without quotes"),
        ("host_memory = 'lots'", "host_memory: 'lots' cannot be read as a size"),
        ("device_memory = 1.5", "device_memory must be a size such as '10GiB', or a whole number of bytes"),
        ("host_share = 'much'", "host_share must be a number"),
        ("verify_host = 'maybe'", "verify_host must be true or false"),
        ("deterministic = 'true'", "deterministic must be true or false, without quotes"),
        ("page_tokens = '16'\npage_tokns = 2", "page_tokens must be a whole number"),
        ("write_policy = 'later'", "write_policy must be through, through:N"),
        ("port = ", "must be TOML"),
        ("\x00", "must be TOML"),
        ("#" * (FILE_BYTES + 1), "at most 64 KiB"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_cannot_be_is_one_clear_line(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        told("--config", file)
    assert "mean config" not in str(refusal.value)
    assert says in str(refusal.value) and len(str(refusal.value)) < 300
    if "policy" not in says:
        assert str(file) in str(refusal.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(file: Path) -> None:
    fifo = file.parent / "fifo"
    os.mkfifo(fifo)
    for path in (file, file.parent, fifo, ""):
        with pytest.raises(ConfigError, match=f"--config must be a file, got '{path}'"):
            told("--config", path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="must be TOML"):
        told("--config", file)


def test_a_mistake_names_where_it_stands_and_repeats_no_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARVE_SERVE_PORT", "http")
    with pytest.raises(ConfigError, match=r"\$KVARVE_SERVE_PORT: 'http' is not a whole number"):
        told()
    monkeypatch.delenv("KVARVE_SERVE_PORT")
    file.write_text("api_key = ['secret']")
    for words in (["--api-kye=secret"], ["--config", file], ["--api-key", "-secret"]):
        with pytest.raises(ConfigError) as refusal:
            told(*words)
        assert "secret" not in str(refusal.value)


def test_a_number_is_written_as_one_and_a_hyphen_begins_an_option() -> None:
    for text in ("1.5", "0x10", "1_000", "1e3", "", " 1", "9" * 40):
        with pytest.raises(ConfigError, match="is too large" if len(text) > 30 else "is not a whole number"):
            told(f"--port={text}")
    with pytest.raises(ConfigError, match=r"--device-memory: expected one argument; .* is given as --device-memory=-"):
        told("--device-memory", "-1GiB")


def test_a_switch_reads_the_same_words_as_a_flag_and_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in (("yes", True), ("0", False), ("TRUE", True)):
        monkeypatch.setenv("KVARVE_SERVE_DETERMINISTIC", text)
        assert told().deterministic is value
        monkeypatch.delenv("KVARVE_SERVE_DETERMINISTIC")
        assert told(f"--deterministic={text}").deterministic is value
    with pytest.raises(ConfigError):
        told("--deterministic=maybe")


def test_a_variable_of_no_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVARVE_DEMO_QUIK", "KVARVE_TEST_MOONCAKE", "KVARVE_SERVER", "SERVE_PORT"):
        monkeypatch.setenv(name, "7")
    assert told() == Settings(), "those of other commands and of none"
    for name, meant in (("NO_DETERMINISTIC", "DETERMINISTIC"), ("PROT", "PORT"), ("HOST_MEMORY_", "HOST_MEMORY")):
        monkeypatch.setenv(f"KVARVE_SERVE_{name}", "true")
        with pytest.raises(ConfigError, match=f"^.KVARVE_SERVE_{name} .*did you mean KVARVE_SERVE_{meant}"):
            told()
        monkeypatch.delenv(f"KVARVE_SERVE_{name}")


def test_no_variable_is_read_by_a_command_without_a_config_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing which a shell has exported agrees to a deletion."""
    tool = root_app("kvarve", "", "kvarve 0")

    @tool.command
    def drop(url: str, /, *, yes: bool = False) -> tuple[str, bool]:
        return url, yes

    for name in ("YES", "URL", "NO_YES"):
        monkeypatch.setenv(f"KVARVE_DROP_{name}", "true")
    assert call(tool, ["drop", "x"]) == ("x", False)
    with pytest.raises(ConfigError, match="URL is required"):
        call(tool, ["drop"])


def test_a_group_of_commands_is_named_as_it_is_called() -> None:
    for words, says in (
        (["storage", "bogus"], r"unknown command 'bogus'; known: attach.*\(see kvarve storage --help\)"),
        (["storage"], r"which command\? known: attach.*\(see kvarve storage --help\)"),
        (["storage", "--frob"], r"unknown option '--frob'.*\(see kvarve storage --help\)"),
        ([], r"which command\? known: serve.*\(see kvarve --help\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            call(real, words)


def test_without_assertions_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compiled = dict(vars(errors))
    source = compile(inspect.getsource(errors.require_assertions), errors.__file__, "exec", optimize=1)
    exec(source, compiled)
    for module in (main, core_settings, objects):
        monkeypatch.setattr(module, "require_assertions", compiled["require_assertions"])
    said = "kvarve needs its assertions: leave out -O and PYTHONOPTIMIZE"
    assert main.main(["serve"]) == 2 and capsys.readouterr().err == f"kvarve: {said}\n"
    for make in (lambda: core_settings.CoreConfig((), {}), lambda: objects.Objects(None, deadline_s=1)):
        with pytest.raises(ConfigError, match=said):
            make()


def test_a_command_whose_extra_is_missing_says_which_one() -> None:
    said = "models needs what is not installed: install kvarve with the extra 'engine' .see the README."
    with pytest.raises(ConfigError, match=said), needs("engine", "models"):
        raise ModuleNotFoundError(name="transformers.models")
    with pytest.raises(ModuleNotFoundError), needs("engine", "models"):
        raise ModuleNotFoundError("one of ours", name="kvarve.reference.engine.engines")
    with pytest.raises(ConfigError, match=r"needs zmq, which fails to load \(no libzmq\)"), needs("events", "events"):
        raise ImportError("no libzmq", name="zmq")


@pytest.mark.parametrize(
    "theirs, spins", [({}, main.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_of_torch_that_wait_sleep_soon_unless_the_operator_says_how_long_they_spin(
    theirs: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what main sets is undone
        monkeypatch.delenv(name)
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    main.main(["--version"])
    assert os.environ.get("GOMP_SPINCOUNT") == spins
