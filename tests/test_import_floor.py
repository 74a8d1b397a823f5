"""Imports go down only. A module that is on no floor yet fails here, so that it has to be placed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvarve"

FLOORS = (
    {"model", "keys", "boundaries", "errors", "sizes", "handles", "histograms", "routing", "__init__"},  # words
    {"core"},
    {"background", "regions", "leftovers"},  # threads, memory, and what was left in places of all
    {"memory", "transfer", "storage", "ranks"},  # data movement
    {"config", "messages", "changes", "ticket"},  # settings, and messages between scheduler and worker
    {"scheduler", "worker"},
    {"prefix_cache", "admin", "metrics", "options", "commands", "reports", "familiar"},  # the pair, and the engine
    {"engine", "simulate"},
    # applications
    {"cli", "__main__", "storage_cli", "server", "served", "bench", "demo", "demo_report", "demo_vllm", "verify"}
    | {"integrations"},
)
WORDS, CORE, HANDS = FLOORS[0], FLOORS[1], FLOORS[3]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# Modules of one floor that do not know each other, except as told here: only the lanes know arenas and storages.
STRANGERS = (HANDS, {"scheduler", "worker"})
MAY_USE = {"transfer": {"memory", "storage"}}

# A scheduler may live where no tensor is: it and what it imports know no memory, lane or storage, and read no clock.
DECIDES = {"scheduler", "changes", "messages", "ticket", "config", "ranks"}
HOW_RANKS_TALK = {SOURCE / "ranks" / name for name in ("group.py", "star.py")}  # a scheduler is given their agreement

NOT_PURE = {"time", "threading", "socket", "logging", "random", "os", "torch", "asyncio", "subprocess", "secrets"}
NUMPY_ONLY_IN = {"keys"}

FILES = sorted(SOURCE.rglob("*.py"))


def top(path: Path) -> str:
    """The first folder below kvarve, or the module's own name."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, by its full name, wherever in the file it does so."""
    package = ("kvarve", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, node.module) if node.module else above)
            yield module
            # `from kvarve import boundaries` imports kvarve.boundaries; a plain name of a module adds nothing.
            yield from (f"{module}.{alias.name}" for alias in node.names if module == "kvarve")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            assert isinstance(name, ast.Constant), f"{path}: line {node.lineno} imports a computed name"
            yield str(name.value)


def inside(path: Path) -> set[str]:
    """The parts of kvarve that a file imports."""
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("kvarve.")}
    # A name such as `__version__` comes from kvarve itself.
    return {"__init__" if part.startswith("__") else part for part in parts}


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_there_is_something_to_check() -> None:
    assert {top(path) for path in FILES} >= {"model", "keys", "boundaries", "errors", "core", "storage", "testing"}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_module_stands_on_a_floor(path: Path) -> None:
    assert top(path) in FLOOR_OF or top(path) == "testing", f"{named(path)}: place {top(path)!r} on a floor"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_go_down_only(path: Path) -> None:
    own = top(path)
    if own == "testing":
        return
    for other in inside(path):
        assert other != "testing", f"{named(path)}: the product imports nothing of kvarve.testing"
        assert FLOOR_OF[other] <= FLOOR_OF[own], f"{named(path)}: {other} stands above {own}"
        if other != own and any(own in floor and other in floor for floor in STRANGERS):
            assert other in MAY_USE.get(own, set()), f"{named(path)}: {own} may not know {other}"


@pytest.mark.parametrize("path", [path for path in FILES if top(path) in WORDS | CORE], ids=named)
def test_words_and_core_are_pure(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & NOT_PURE, f"{named(path)} is pure, and {roots & NOT_PURE} is not"
    assert "numpy" not in roots or top(path) in NUMPY_ONLY_IN


@pytest.mark.parametrize(
    "path", [path for path in FILES if top(path) in DECIDES and path not in HOW_RANKS_TALK], ids=named
)
def test_what_decides_knows_no_tensor_thread_or_file(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not (impure := roots & NOT_PURE - {"logging"}), f"{named(path)} decides, and {impure} acts"
    assert not inside(path) & {"transfer", "storage", "worker"}, f"{named(path)} moves no bytes"
    # How large records are and how they lie is part of the settings; arenas are not.
    memory = {name for name in imported(path) if name.startswith("kvarve.memory")}
    assert memory <= {"kvarve.memory.record", "kvarve.memory.layouts"}


# The packages of each install, besides the standard library; an extra includes the one before it.
INSTALLS = {
    "base": {"torch", "numpy", "xxhash", "cyclopts", "rich"},
    "engine": {"transformers", "tokenizers", "safetensors", "jinja2", "prometheus_client"},
    "server": {"fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "httpx"},
    "demo": {"matplotlib"},
}
# What a module loaded by an engine finds there.
ENGINES = {
    "integrations/vllm.py": {"vllm"},
    "integrations/vllm_adapters.py": {"vllm"},
    "integrations/vllm_around.py": {"vllm"},
    "integrations/vllm_engine.py": {"vllm"},
    "integrations/vllm_groups.py": {"vllm"},
    "integrations/vllm_metrics.py": {"vllm"},
    "integrations/vllm_tier.py": {"vllm"},
    "integrations/sglang.py": {"sglang"},
    "integrations/checkpoint.py": {"huggingface_hub"},
}
INSTALL_OF = {
    "engine": "engine",
    "metrics": "engine",
    "integrations": "engine",
    "verify": "engine",
    "server": "server",
    "bench": "server",
    "bench/settings.py": "base",
    "bench/command.py": "base",
    "bench/picture.py": "demo",
    "demo": "demo",
    "demo_report": "demo",
    "demo_vllm": "engine",
    "simulate/sweep.py": "demo",
    "server/settings.py": "base",
    "server/keyfile.py": "base",
    "server/keys_cli.py": "base",
    "server/config_cli.py": "base",
}


@pytest.mark.parametrize("path", [path for path in FILES if top(path) != "testing"], ids=named)
def test_a_module_imports_what_its_install_brings(path: Path) -> None:
    names = [*INSTALLS]
    own = INSTALL_OF.get(named(path)) or INSTALL_OF.get(top(path), "base")
    brought = set().union(*(INSTALLS[name] for name in names[: names.index(own) + 1]))
    roots = (
        {name.split(".")[0] for name in imported(path)}
        - {
            "kvarve",
            "cuda",
            "mooncake",
            "redis",
            "cryptography",
            "zstandard",
            "lz4",
            "hf3fs_fuse",
            "opentelemetry",
            "zmq",
            "msgpack",
        }
        - sys.stdlib_module_names
    )
    roots -= ENGINES.get(named(path), set())
    assert roots <= brought, f"{named(path)} is of the {own} install, which lacks {roots - brought}"


BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    ("command", "extra"), [("models", "engine"), ("verify", "engine"), ("serve", "server"), ("demo", "demo")]
)
def test_a_command_whose_extra_is_missing_says_which_one(command: str, extra: str) -> None:
    code = BARE.format(absent=INSTALLS[extra]) + f"from kvarve.cli import main; sys.exit(main([{command!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = f"kvarve: {command} needs what is not installed: install kvarve with the extra '{extra}' (see the README)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_the_base_install_runs_the_cache_with_a_file_storage_and_looks_into_its_folder(tmp_path: Path) -> None:
    absent = INSTALLS["engine"] | INSTALLS["server"] | INSTALLS["demo"]
    code = BARE.format(absent=absent - {"jinja2"}) + (  # torch itself brings jinja2
        "from kvarve.config import CacheConfig\nfrom kvarve.model import BufferSpec, ModelIdentity, PoolSpec\n"
        "from kvarve.prefix_cache import PrefixCache\nfrom kvarve.cli import main\n"
        "pools = (PoolSpec('kv', (BufferSpec('k', (64, 8), 'float32'),), None),)\n"
        f"url = 'file://{tmp_path}/pages?capacity=64MiB'\n"
        "identity = ModelIdentity('test', 'weights', 'float32', 64, 256, pools)\n"
        "PrefixCache(identity, CacheConfig(1 << 20, 1 << 20, url)).shutdown()\n"
        f"sys.exit(main(['storage', 'stat', '{tmp_path}/pages']) or main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "simulate" in done.stdout


def test_the_checker_sees_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "core").mkdir()
    file = tmp_path / "core" / "some.py"
    file.write_text(
        "from kvarve import model\nfrom . import cache\nfrom ..engine import state\n"
        "def lazily():\n    import kvarve.server.app\n    import importlib\n"
        "    importlib.import_module('kvarve.testing')\n"
    )
    assert inside(file) == {"model", "core", "engine", "server", "testing"}
