"""The wheel, installed with each extra into a venv of its own outside the checkout, brings what its commands need.

One venv, from the base install to the largest extra: each test adds one extra and runs its command, so a command that
needs a package of a later extra fails. Versions are those of this venv, and hashes those of requirements.lock.
"""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory

import httpx
import pytest

import kvarve

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
LONG_S = 240.0
# Not the checkout's source; compiled files are kept for the next command; one thread, as in all tests.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"


def run(*words: object, cwd: Path, code: int = 0) -> str:
    argv = [str(word) for word in words]
    done = subprocess.run(argv, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
    return str(done.stderr if code else done.stdout)


def uv(*words: object, cwd: Path) -> str:
    """For tests that need the package index."""
    return run(sys.executable, ROOT / "tools" / "uv.py", *words, cwd=cwd)


class CleanVenv:
    """A venv with only the packages given to `install`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"

    @cached_property
    def wheel(self) -> Path:
        """Built when it is first asked for."""
        folder = self.folder
        uv("build", "--quiet", "--out-dir", folder / "dist", ROOT, cwd=folder)
        (wheel,) = (folder / "dist").glob("*.whl")
        return wheel

    def packages(self, python: Path) -> set[str]:
        """Every package and its version, except kvarve itself."""
        lines = run(UV, "pip", "freeze", "--python", python, cwd=self.folder).splitlines()
        return {line for line in lines if not line.startswith(("-e ", "kvarve "))}

    def install(self, extra: str) -> None:
        what, ours = f"kvarve{extra} @ {self.wheel.as_uri()}", self.packages(Path(sys.executable))
        torch = {line for line in ours if line.startswith("torch==")}
        (self.folder / "pins.txt").write_text("".join(f"{line}\n" for line in ours - torch))
        pins = ("--constraints", ROOT / "requirements.lock", "--constraints", self.folder / "pins.txt")
        run(
            UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable, self.folder / "venv", cwd=self.folder
        )
        uv(
            "pip",
            "install",
            "--quiet",
            "--python",
            self.bin / "python",
            *pins,
            *(torch if extra else ()),
            what,
            cwd=self.folder,
        )
        assert self.packages(self.bin / "python") <= ours

    def run(self, command: str, *words: object, code: int = 0) -> str:
        return run(self.bin / command, *words, cwd=self.folder, code=code)

    def python(self, code: str, *words: object) -> str:
        return self.run("python", "-c", code, *words)


@pytest.fixture(scope="module")
def venv() -> Iterator[CleanVenv]:
    with TemporaryDirectory(prefix="kvarve-wheel-") as folder:
        yield CleanVenv(Path(folder).resolve())


EXTRA_OF = {"models": "engine", "verify": "engine", "serve": "server", "demo": "demo"}


def test_the_wheel_has_every_file_of_the_source_and_its_base_install_works_without_torch(venv: CleanVenv) -> None:
    with zipfile.ZipFile(venv.wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = (path for path in (ROOT / "src" / "kvarve").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert shipped == {path.relative_to(ROOT / "src").as_posix() for path in paths}
    venv.install("")
    trace = ROOT / "docs" / "small-trace.jsonl"
    needs = "needs what is not installed: install kvarve with the extra {} (see the README)"
    assert venv.run("python", ROOT / "tests" / "without_torch.py", venv.folder / "pages", trace).splitlines() == [
        "hit: 2",
        "stored: True",
        "saved: True",
        *(f"2 kvarve: {name} {needs.format(repr(extra))}" for name, extra in EXTRA_OF.items()),
        "PrefixCache needs torch, which is not installed: install kvarve with the extra 'worker' (see the README)",
    ]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_environment_gets_no_other_version_of_anything(engine: str, venv: CleanVenv, tmp_path: Path) -> None:
    lock = (ROOT / "tests" / "engines" / f"{engine}.lock").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([^ ;]+)", lock, re.MULTILINE)) | {"torch": "2.9.0"}
    for name in ("cyclopts", "docstring-parser", "rich-rst"):  # which no engine has, so they are in the lock for kvarve
        del pins[name]
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name, version in pins.items():  # what pip asks of a package that is installed
        about = packages / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "venv" / "bin" / "python")
    report = json.loads(run(*pip, "install", "--quiet", "--dry-run", "--report", "-", venv.wheel, cwd=tmp_path))
    changed = {each["metadata"]["name"].lower().replace("_", "-") for each in report["install"]}
    assert {"kvarve", "cyclopts"} <= changed and changed.isdisjoint(pins)


@pytest.mark.long
def test_the_worker_extra_keeps_pages_in_files(venv: CleanVenv) -> None:
    venv.install("[worker]")
    assert venv.run("kvarve", "--version").strip() == f"kvarve {kvarve.__version__}"
    assert Path(venv.python("import kvarve; print(kvarve.__file__)").strip()).is_relative_to(venv.folder)
    for hit in (0, 2):  # a prompt of two pages, in two processes
        assert venv.run("python", ROOT / "tests" / "toy_engine.py", venv.folder / "pages") == f"{hit} pages\n"


@pytest.mark.long
def test_the_engine_extra_proves_a_model(venv: CleanVenv) -> None:
    venv.install("[engine]")
    words = "verify --model builtin:tiny-hybrid --quick"
    assert "every bit equal" in venv.run("kvarve", *words.split())


@pytest.mark.long
def test_the_server_extra_serves_a_completion(venv: CleanVenv) -> None:
    venv.install("[server]")
    ready, log = venv.folder / "ready", venv.folder / "log"
    words = "serve --model builtin:tiny-hybrid --port 0 --threads 1 --device-memory 64MiB --host-memory 64MiB"
    argv = [venv.bin / "kvarve", *words.split(), "--ready-file", ready]
    with log.open("w") as file:
        server = subprocess.Popen(argv, cwd=venv.folder, env=ENVIRONMENT, stdout=file, stderr=file)
    try:
        while not ready.exists():
            with suppress(subprocess.TimeoutExpired):
                server.wait(0.1)
            assert server.poll() is None, log.read_text()
        body = {"model": "builtin:tiny-hybrid", "prompt": "one two three", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{ready.read_text().strip()}/v1/completions", json=body, timeout=LONG_S).json()
        assert answer["usage"]["completion_tokens"] == 3, answer
        server.send_signal(signal.SIGTERM)
        assert server.wait(LONG_S) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_the_demo_extra_plots(venv: CleanVenv) -> None:
    venv.install("[demo]")
    assert "--out" in venv.run("kvarve", "demo", "--help")
    venv.python("import kvarve.bench.demo\nfrom matplotlib import pyplot\npyplot.subplots()[0].savefig('demo.png')")
    assert (venv.folder / "demo.png").stat().st_size > 0


def test_uv_gets_the_index_that_pip_is_configured_with() -> None:
    told = (
        ":env:.index-url='https://wins.example/simple'\nglobal.index-url='https://user:pass@one.example/simple'\n"
        "global.extra-index-url='\\nhttps://two.example/simple\\nhttps://three.example/simple'\n"
        "global.timeout='9'\ninstall.find-links='/wheels /more'\n"
    )
    found = run_path(str(ROOT / "tools" / "uv.py"))["uv_variables"](told)
    assert found["UV_DEFAULT_INDEX"] == "https://wins.example/simple"
    assert found["UV_INDEX"] == "https://two.example/simple https://three.example/simple"
    assert found["UV_FIND_LINKS"] == "/wheels,/more"
