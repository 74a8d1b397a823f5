"""A file of API keys: what it may say, how it is made, and that a running server follows it."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvarve.cli.main import main
from kvarve.errors import ConfigError
from kvarve.reference.server.keyfile import (
    ADMIN_KEY,
    FILE_BYTES,
    LOOK_S,
    MOST_KEYS,
    Key,
    Keyring,
    digest,
    new_key,
    read_keys,
)

GOOD = digest(b"good")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_line_says_all_of_a_key_and_is_read_back_as_it_was(file: Path) -> None:
    secret, key = new_key("team-a", salt='så "här" 🐟', admin=True)
    other = new_key("b")[1]
    file.write_text(f"{key.line}\n{other.line}\n")
    assert read_keys(file) == (key, other)
    assert key.sha256 == digest(secret.encode()) and secret not in file.read_text()
    assert other == Key("b", other.sha256)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = 1", 'it must be a = { sha256 = "..." }'),
        ("'a b' = {}", "a name must have 1 to 64 letters"),
        ("api-key = {}", "the key that --api-key gives"),
        ("a = {}", "sha256 must have 64 hex digits"),
        (f"a = {{ sha256 = '{GOOD.upper()}' }}", "sha256 must have 64 hex digits"),
        (f"a = {{ sha256 = '{GOOD}', slat = 'x' }}", "did you mean salt?"),
        (f"a = {{ sha256 = '{GOOD}', key = 'plain-secret' }}", "unknown field 'key'"),
        (f"a = {{ sha256 = '{GOOD}', salt = '' }}", "salt must be a text"),
        (f"a = {{ sha256 = '{GOOD}', salt = 5 }}", "salt must be a text"),
        (f"a = {{ sha256 = '{GOOD}', admin = 'yes' }}", "admin must be true or false"),
        (f"a = {{ sha256 = '{GOOD}' }}\nb = {{ sha256 = '{GOOD}' }}", "a and b are the same key"),
        (f"a = {{ sha256 = '{GOOD}' }}\na = {{ sha256 = '{GOOD}' }}", "must be TOML"),
        ("a = {", "must be TOML"),
        ("[" * 100_000, "must be TOML"),
        ("\n".join(f"k{i} = {{ sha256 = '{i:064x}' }}" for i in range(MOST_KEYS + 1)), f"at most {MOST_KEYS}"),
        ("#" * (FILE_BYTES + 1), "must have at most 1 MiB"),
    ],
    ids=range(16),
)
def test_a_wrong_file_is_one_line_that_repeats_no_key(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read_keys(file)
    told = str(refusal.value)
    assert says in told and str(file) in told and "\n" not in told
    assert "plain-secret" not in told and GOOD not in told


def test_a_file_that_is_not_there_or_is_no_text_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(file)


def test_a_pipe_is_refused_and_not_read(file: Path) -> None:
    os.mkfifo(file)  # as kvarve serve --api-keys <(decrypt keys)
    with pytest.raises(ConfigError, match="must be a file"):
        read_keys(file)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_changed_file_counts_within_a_second_and_a_broken_one_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file.write_text(f"a = {{ sha256 = '{digest(b'one')}' }}\n")
    ring = Keyring(file, admin_key="boss", clock=clock)

    def names() -> list[str]:
        found = [ring.find(key, admin=False) for key in (b"one", b"two")]
        return [key.name for key in found if key]

    def change(text: str) -> None:
        replaced = file.with_name("new")
        replaced.write_text(text)
        replaced.replace(file)

    assert names() == ["a"]
    change(f"b = {{ sha256 = '{digest(b'two')}' }}\n")
    assert names() == ["a"], "the file is looked at once a second"
    clock.now += LOOK_S
    assert names() == ["b"]
    change("b = {")
    clock.now += LOOK_S
    assert names() == ["b"]
    assert "the API keys stay as they are" in caplog.text
    file.unlink()
    clock.now += LOOK_S
    assert names() == ["b"]
    change(f"a = {{ sha256 = '{digest(b'one')}' }}\n")
    ring.reload()  # as on SIGHUP
    assert names() == ["a"]
    boss = ring.find(b"boss", admin=True)
    assert boss is not None and boss.name == ADMIN_KEY and ring.find(b"boss", admin=False) is None


def test_a_key_is_not_given_by_a_flag_and_by_the_file(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"a = {{ sha256 = '{digest(b'boss')}' }}\n")
    with pytest.raises(ConfigError, match="a must differ from --admin-key"):
        Keyring(file, admin_key="boss")
    file.write_text(f"a = {{ sha256 = '{digest(b'one')}' }}\n")
    ring = Keyring(file, admin_key="boss")
    file.write_text(f"a = {{ sha256 = '{digest(b'boss')}' }}\n")
    ring.reload()
    assert "the API keys stay as they are" in caplog.text
    assert ring.find(b"one", admin=False) is not None and ring.find(b"boss", admin=False) is None


def test_a_key_of_the_file_operates_only_if_it_says_so(file: Path) -> None:
    (plain, a), (chief, b) = new_key("a"), new_key("b", admin=True)
    file.write_text(f"{a.line}\n{b.line}\n")
    ring = Keyring(file)
    assert ring.find(plain.encode(), admin=True) is None and ring.find(plain.encode(), admin=False) == a
    assert ring.find(chief.encode(), admin=True) == ring.find(chief.encode(), admin=False) == b
    assert ring.find(a.sha256.encode(), admin=False) is None, "the digest in the file is no key"


def test_the_command_shows_a_new_key_once_and_writes_its_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in ("keys", *words)])
        return code, *capsys.readouterr()

    file.write_text("# ours")  # without an end of its line
    code, out, error = run("new", "team-a", "--salt", "x", "--file", file)
    assert (code, error) == (0, "")
    secret = out.split()[1]
    assert secret not in file.read_text()
    assert Keyring(file).find(secret.encode(), admin=False) == Key("team-a", digest(secret.encode()), salt="x")
    before = file.read_bytes()
    for words, says in (
        (("new", "team-a", "--file", file), "the key's name must be new, and team-a is there"),
        (("new", "a b"), "a name must have 1 to 64 letters"),
        (("new", "b", "--salt="), "salt must be a text"),
        (("new", "b", "--file", file / "x"), "Not a directory"),
    ):
        code, out, error = run(*words)
        assert (code, out) == (2, "") and says in error and error.count("\n") == 1
    assert file.read_bytes() == before
    code, out, _ = run("new", "b")
    told: dict[str, Any] = tomllib.loads(out.split("line")[1])
    assert code == 0 and set(told) == {"b"}
    code, out, _ = run("ls", file, "--json", "-")
    assert [key["name"] for key in json.loads(out)["keys"]] == ["team-a"]
    code, out, _ = run("ls", file)
    assert "team-a" in out and "1 key" in out
