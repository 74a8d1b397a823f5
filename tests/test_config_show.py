"""`kvarve config show`: what `kvarve serve` would have, where it comes from, and no key. And completion in shells."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvarve.cli.main import main
from kvarve.reference.server import serve  # noqa: F401 - takes seconds, which are no test's

Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KVARVE_"):
            monkeypatch.delenv(name)


def shown(capsys: Out, *words: object) -> dict[str, dict[str, Any]]:
    assert main(["config", "show", "--json", "-", *map(str, words)]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    found: dict[str, dict[str, Any]] = json.loads(out)
    return found


def test_each_setting_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    file = tmp_path / "kvarve.toml"
    file.write_text("port = 1\nmax_running = 1\nhost_memory = '1GiB'\neviction = 'lfu'\n")
    monkeypatch.setenv("KVARVE_SERVE_PORT", "2")
    monkeypatch.setenv("KVARVE_SERVE_MAX_RUNNING", "2")
    monkeypatch.setenv("KVARVE_SERVE_VERIFY_HOST", "false")
    found = shown(capsys, "--config", file, "--port", 3, "--model-path", "/m")
    for name, value, source in (
        ("port", 3, "flag"),
        ("model", "/m", "flag"),  # --model-path is SGLang's name of it
        ("max_running", 2, "$KVARVE_SERVE_MAX_RUNNING"),
        ("verify_host", False, "$KVARVE_SERVE_VERIFY_HOST"),
        ("host_memory", 1 << 30, str(file)),
        ("eviction", "lfu", str(file)),
        ("turn_tokens", 512, "default"),
    ):
        assert found[name] == {"value": value, "from": source}
    assert "json" not in found and "config" not in found


def test_a_person_reads_sizes_in_units_and_what_was_changed_alone(capsys: Out) -> None:
    assert main(["config", "show", "--changed", "--device-memory", "1500000000", "--hicache-ratio", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [["--device-memory", "1.4GiB", "flag"], ["--host-memory", "2.8GiB", "flag"]]
    assert shown(capsys, "--changed", "--port", 9) == {"port": {"value": 9, "from": "flag"}}


def test_no_key_and_no_password_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setenv("KVARVE_ADMIN_KEY", "hush-1")
    words = ["--api-key", "hush-2", "--storage", "redis://me:hush-3@there:6379"]
    found = shown(capsys, *words)
    assert found["admin_key"] == {"value": "***", "from": "$KVARVE_ADMIN_KEY"}
    assert found["api_key"] == {"value": "***", "from": "flag"} and "there:6379" in found["storage"]["value"][0]
    assert main(["config", "show", *words]) == 0
    table = capsys.readouterr().out
    assert "***" in table and "hush" not in table + json.dumps(found)


def test_what_serve_would_refuse_is_shown_and_refused_all_at_once(capsys: Out) -> None:
    words = ["--changed", "--port", "99999", "--drain-at-least-s", "99", "--storage", "relative/path"]
    assert main(["config", "show", *words]) == 2
    table, error = capsys.readouterr()
    assert "--port              99999" in table
    for said in ("port must be at least 0 and at most 65535", "drain_at_least_s must be", "must be an absolute path"):
        assert said in error


@pytest.mark.long
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_knows_commands_and_options(shell: str, capsys: Out, tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    options = ("device-memory", "api-keys", "storage-wait")
    assert all(option in script for option in options) and all(name in script for name in ("serve", "detach", "keys"))
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")], check=False).returncode == 0
    if shell == "bash":
        ask = 'COMP_WORDS=(kvarve serve --devi); COMP_CWORD=2; _kvarve; printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
        assert "--device-memory" in done.stdout.split()
