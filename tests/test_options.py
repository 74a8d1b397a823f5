"""An operator's settings come from flags, the environment, a file and the defaults; mistakes are refused."""

import ast
import inspect
import os
from itertools import pairwise
from pathlib import Path

import pytest

from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.options import FILE_BYTES, ConfigFile, call, root_app
from kvarve.server.settings import Settings

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
        "host_memory = '1GiB'\nstorage = ['/a', '/b']\nverify_host = false\nhost_share = 0.5\n"
        "threads = 2\nwrite_policy = 'write_back'\nready_file = '/x'\n"
    )
    by_file = told("--config", file)
    words = "--host-memory 1GiB --storage /a --storage /b --no-verify-host --host-share 0.5 --threads 2"
    by_flag = told(*words.split(), "--write-policy", "write_back", "--ready-file=/x")
    for name, value in {
        "HOST_MEMORY": "1GiB",
        "STORAGE": "/a /b",
        "VERIFY_HOST": "false",
        "HOST_SHARE": "0.5",
        "THREADS": "2",
        "WRITE_POLICY": "write_back",
        "READY_FILE": "/x",
    }.items():
        monkeypatch.setenv(f"KVARVE_SERVE_{name}", value)
    assert by_file == by_flag == told()
    assert by_file.cache.storages == ("/a", "/b") and by_file.host_memory == 1 << 30
    assert by_file.policies.host_share == 0.5 and not by_file.policies.verify_host and by_file.ready_file == Path("/x")


def test_of_a_flag_that_is_repeated_the_last_counts_unless_it_takes_several() -> None:
    settings = told("--port", 1, "--storage", "/a", "--port", 2, "--storage", "/b")
    assert (settings.port, settings.storage) == (2, ("/a", "/b"))


def test_a_size_in_a_file_may_be_a_number_of_bytes(file: Path) -> None:
    file.write_text("host_memory = 4096")
    assert told("--config", file).host_memory == 4096


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
    for kind in (Settings, Policies):
        (definition,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) != "policies":
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(field)
    call(app, ["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for said in ("port to listen on, 0 for any free one", "eviction order: lru, lfu", "[default: 256MiB]"):
        assert said in shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prt = 1", "unknown setting 'prt': did you mean port?"),
        ("config = 'other.toml'", "unknown setting 'config'"),
        ("no-verify-host = true", "unknown setting 'no-verify-host'"),
        ("[serve]\nport = 1", "'serve' is a table: give settings without a heading"),
        ("port = {a = 1}", "'port' is a table"),
        ("port = 1.5", "port: '1.5' is not a whole number"),
        ("port = true", "port: 'True' is not a whole number"),
        ("port = 'http'", "port: 'http' is not a whole number"),
        ("port = [1, 2]", "port: expected one value"),
        ("host_memory = 'lots'", "host_memory: 'lots' is not a size"),
        ("host_share = 'much'", "host_share: 'much' is not a number"),
        ("verify_host = 'maybe'", "verify_host: 'maybe' is neither true nor false"),
        ("write_policy = 'later'", "unknown write policy 'later'"),
        ("port = ", "not TOML"),
        ("port = 1\nport = 2", "not TOML"),
        ("\x00", "not TOML"),
        ("#" * (FILE_BYTES + 1), "at most 64 KiB"),
        ("#" * 10_000_000, "at most 64 KiB"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_cannot_be_is_one_clear_line(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        told("--config", file)
    assert says in str(refusal.value) and len(str(refusal.value)) < 300
    if "policy" not in says:
        assert str(file) in str(refusal.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(file: Path) -> None:
    for path in (file, file.parent):
        with pytest.raises(ConfigError, match="no such config file"):
            told("--config", path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        told("--config", file)


def test_a_mistake_names_where_it_stands_and_repeats_no_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARVE_SERVE_PORT", "http")
    with pytest.raises(ConfigError, match=r"\$KVARVE_SERVE_PORT: 'http' is not a whole number"):
        told()
    monkeypatch.delenv("KVARVE_SERVE_PORT")
    file.write_text("api_key = ['secret']")
    for words in (["--api-kye=secret"], ["--config", file]):
        with pytest.raises(ConfigError) as refusal:
            told(*words)
        assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("text", ["1.5", "0x10", "1_000", "1e3", "", " 1", "9" * 40])
def test_a_number_is_written_as_one(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a whole number"):
        told(f"--port={text}")
