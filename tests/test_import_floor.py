"""Imports go down only. A module that is on no floor yet fails here, so that it has to be placed."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "kvarve"

FLOORS = (
    {"model", "keys", "boundaries", "errors", "sizes", "handles", "histograms", "__init__"},  # words
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
HOW_RANKS_TALK = {"ranks/group.py", "ranks/star.py"}  # a scheduler is given their agreement

NOT_PURE = {"time", "threading", "socket", "logging", "random", "os", "torch", "asyncio", "subprocess", "secrets"}
NUMPY_IN = {"keys.py": {"numpy"}}

# Ways to import in source that ruff has formatted: a statement is alone on its lines.
IMPORT = re.compile(
    r"^ *from (?P<dots>\.*)(?P<module>[\w.]*) import (?P<names>\([^)]*\)|[\w, ]+)"
    r"|^ *import (?P<plain>[\w., ]+?) *(?:#.*)?$|(?<!def )\b(?:import_module|__import__)\((?P<called>[^)]*)\)",
    re.MULTILINE,
)


def imported(name: str, text: str) -> Iterator[str]:
    """Every module that a file imports, by its full name, wherever in the file it does so."""
    package = ("kvarve", *Path(name).parent.parts)
    for found in IMPORT.finditer(text):
        if found["plain"]:
            yield from (each.split()[0] for each in found["plain"].split(","))
        elif found["called"] is not None:
            assert found["called"][:1] in "\"'", f"{name} imports a computed name: {found[0]}"
            yield found["called"][1:-1]
        else:
            above = package[: len(package) - len(found["dots"]) + 1] if found["dots"] else ()
            module = ".".join((*above, found["module"]) if found["module"] else above)
            yield module
            # `from kvarve import boundaries` imports kvarve.boundaries; a plain name of a module adds nothing.
            yield from (f"{module}.{each}" for each in re.findall(r"\w+", found["names"]) if module == "kvarve")


@cache
def modules() -> dict[str, set[str]]:
    """What each module imports."""
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    return {name: {*imported(name, text)} for name, text in sorted(texts.items())}


def top(name: str) -> str:
    """The first folder below kvarve, or the module's own name."""
    return name.partition("/")[0].removesuffix(".py")


def inside(names: set[str]) -> set[str]:
    """The parts of kvarve among these; a name such as `__version__` comes from kvarve itself."""
    parts = {name.split(".")[1] for name in names if name.startswith("kvarve.")}
    return {"__init__" if part.startswith("__") else part for part in parts}


def breaches(wrong: Callable[[str, set[str], set[str]], object]) -> dict[str, object]:
    """What is wrong with which module, by its name, what it imports, and the roots of that."""
    found = {name: wrong(name, all_, {each.split(".")[0] for each in all_}) for name, all_ in modules().items()}
    return {name: each for name, each in found.items() if each}


def test_every_module_stands_on_a_floor() -> None:
    assert {*map(top, modules())} >= {"model", "keys", "boundaries", "errors", "core", "storage", "testing"}
    assert {*map(top, modules())} - {"testing"} <= FLOOR_OF.keys()


def test_imports_go_down_only() -> None:
    def wrong(name: str, names: set[str], _: set[str]) -> object:
        own = top(name)
        strangers = {other for floor in STRANGERS if own in floor for other in floor - {own} - MAY_USE.get(own, set())}
        return own != "testing" and {
            other for other in inside(names) if other in strangers or FLOOR_OF.get(other, 99) > FLOOR_OF[own]
        }

    assert not breaches(wrong), "imported from above, from kvarve.testing, or by a stranger"


def test_words_and_core_are_pure() -> None:
    def wrong(name: str, _: set[str], roots: set[str]) -> object:
        return top(name) in WORDS | CORE and roots & (NOT_PURE | {"numpy"} - NUMPY_IN.get(name, set()))

    assert not breaches(wrong)


def test_what_decides_knows_no_tensor_thread_or_file() -> None:
    def wrong(name: str, names: set[str], roots: set[str]) -> object:
        if top(name) not in DECIDES or name in HOW_RANKS_TALK:
            return None
        # How large records are is part of the settings; arenas are not.
        memory = {each for each in names if each.startswith("kvarve.memory")}
        moves = inside(names) & {"transfer", "storage", "worker"}
        return roots & NOT_PURE - {"logging"} | moves | memory - {"kvarve.memory.record"}

    assert not breaches(wrong)


# The packages of each install, besides the standard library; an extra includes the one before it.
INSTALLS = {
    "base": {"torch", "numpy", "xxhash", "cyclopts", "rich"},
    "engine": {"transformers", "tokenizers", "safetensors", "jinja2", "prometheus_client"},
    "server": {"fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "httpx"},
    "demo": {"matplotlib"},
}
# What a module of `integrations` finds in the engine that loads it, by how the module's name begins.
ENGINES = {"vllm": {"vllm"}, "sglang": {"sglang"}, "checkpoint": {"huggingface_hub"}}
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


# What a module imports where it is asked to, and refuses clearly without.
OPTIONAL = {
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


def test_a_module_imports_what_its_install_brings() -> None:
    def wrong(name: str, _: set[str], roots: set[str]) -> object:
        own, sizes = INSTALL_OF.get(name) or INSTALL_OF.get(top(name), "base"), [*INSTALLS]
        brought = set().union(*(INSTALLS[each] for each in sizes[: sizes.index(own) + 1]))
        engine = ENGINES.get(Path(name).stem.split("_")[0], set()) if top(name) == "integrations" else set()
        return top(name) != "testing" and roots - brought - engine - OPTIONAL - {"kvarve"} - sys.stdlib_module_names

    assert not breaches(wrong)


def test_the_checker_sees_every_way_to_import() -> None:
    text = (
        "from kvarve import model\nfrom . import cache\nfrom ..engine import (\n    state,\n)\n"
        "def lazily():\n    import torch, kvarve.server.app as app\n    importlib.import_module('kvarve.testing')\n"
    )
    found = {*imported("core/some.py", text)}
    assert inside(found) == {"model", "core", "engine", "server", "testing"} and "torch" in found
