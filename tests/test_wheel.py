"""The wheel, installed with each extra into a venv of its own outside the checkout, brings what its commands need.

One venv, from the base install to the largest extra: each test adds one extra and runs its command, so a command that
needs a package of a later extra fails. Versions are those of this venv, and hashes those of requirements.lock.
"""

import os
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
        (torch,) = (line for line in ours if line.startswith("torch"))
        (self.folder / "pins.txt").write_text("".join(f"{line}\n" for line in ours - {torch}))
        pins = ("--constraints", ROOT / "requirements.lock", "--constraints", self.folder / "pins.txt")
        run(
            UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable, self.folder / "venv", cwd=self.folder
        )
        uv("pip", "install", "--quiet", "--python", self.bin / "python", *pins, torch, what, cwd=self.folder)
        assert self.packages(self.bin / "python") <= ours

    def run(self, command: str, *words: object, code: int = 0) -> str:
        return run(self.bin / command, *words, cwd=self.folder, code=code)

    def python(self, code: str, *words: object) -> str:
        return self.run("python", "-c", code, *words)


@pytest.fixture(scope="module")
def venv() -> Iterator[CleanVenv]:
    with TemporaryDirectory(prefix="kvarve-wheel-") as folder:
        yield CleanVenv(Path(folder).resolve())


# A prompt of two chunks leaves its pages in a folder, and the next cache that opens the folder brings them back.
ROUND_TRIP = """
import sys
from kvarve.cache.config import CacheConfig
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec
from kvarve.cache.prefix_cache import PrefixCache
pools = (PoolSpec("kv", (BufferSpec("k", (64, 8), "float32"),), None),)
identity = ModelIdentity("test", "weights", "float32", 64, 64, pools)
tokens = range(130)
def opened():
    cache = PrefixCache(identity, CacheConfig(1 << 20, 1 << 20, f"file://{sys.argv[1]}?capacity=64MiB"))
    lease = cache.open(tokens)
    while not cache.claim(lease):
        cache.step()
        cache.wait(0.05)
    return cache, lease
cache, lease = opened()
for position, slot in cache.grow(lease, 2)["kv"].items():
    cache.worker.arena("kv")["k"][slot] = position + 0.5
cache.publish(lease, 2)
cache.close(lease)
cache.shutdown()
cache, lease = opened()
print(lease.boundary, *(float(cache.worker.arena("kv")["k"][slot].mean()) for slot in cache.pages(lease)["kv"][1]))
cache.close(lease)
cache.shutdown()
"""


def test_the_wheel_has_every_file_of_the_source_and_the_base_install_keeps_pages_in_files(venv: CleanVenv) -> None:
    with zipfile.ZipFile(venv.wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = (path for path in (ROOT / "src" / "kvarve").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert shipped == {path.relative_to(ROOT / "src").as_posix() for path in paths}
    venv.install("")
    assert venv.python(ROUND_TRIP, venv.folder / "pages").split() == ["2", "0.5", "1.5"]


@pytest.mark.long
def test_the_base_install_says_which_extra_a_command_needs(venv: CleanVenv) -> None:
    venv.install("")
    assert venv.run("kvarve", "--version").strip() == f"kvarve {kvarve.__version__}"
    assert Path(venv.python("import kvarve; print(kvarve.__file__)").strip()).is_relative_to(venv.folder)
    venv.python(ROUND_TRIP, venv.folder / "stored")
    assert "stored" in venv.run("kvarve", "storage", "stat", venv.folder / "stored")
    for command, extra in (("models", "engine"), ("verify", "engine"), ("serve", "server"), ("demo", "demo")):
        missing = f"{command} needs what is not installed: install kvarve with the extra '{extra}' (see the README)"
        assert venv.run("kvarve", command, code=2) == f"kvarve: {missing}\n"


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
    venv.python(
        "import kvarve.reference.demo.demo\nfrom matplotlib import pyplot\npyplot.subplots()[0].savefig('demo.png')"
    )
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
