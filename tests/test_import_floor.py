"""Folders are floors: each imports from folders below it only. A folder that is on no floor yet fails here."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from kvarve import errors

SOURCE = Path(__file__).parent.parent / "src" / "kvarve"

FLOORS = (
    {"errors"},
    {
        "pages",
        "records",
        "system",
        "reports",
    },  # a page, also as bytes; any process; what is printed
    {"core", "settings"},
    {"memory", "storage"},
    {"transfer", "ranks"},
    {"cache", "metrics"},  # the product: scheduler, worker, and both in one process
    {"__init__"},  # the door: public names of what is below, and the version
    {"reference"},  # an engine, its server, the prover
    {"planner", "connectors", "transformers"},
    {"bench"},
    {"cli", "testing"},
    {"__main__"},
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# Folders of one floor know nothing of each other, and these neither: only lanes know both arenas and storages.
STRANGERS = {("cache/worker.py", "kvarve.cache.scheduler"), ("cache/scheduler.py", "kvarve.cache.worker")}
APART = {"memory": {"core"}, "storage": {"core"}, "settings": {"core"}, "metrics": {"ranks"}}

# A scheduler may live where no tensor is: it and what it imports know no memory, lane or storage, and read no clock.
DECIDES = {f"cache/{each}.py" for each in ("scheduler", "messages", "config")} | {"ranks/agreement.py"}

PURE = ("pages", "core", "errors")
NOT_PURE = {"time", "threading", "socket", "logging", "random", "os", "torch", "asyncio", "subprocess", "secrets"}
NUMPY_IN = {"pages/keys.py": {"numpy"}}

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
            if name == "__init__.py":  # the same names stand in it for type checkers (test_door.py)
                continue
            assert found["called"][:1] in "\"'", f"{name} imports a computed name: {found[0]}"
            yield found["called"][1:-1]
        else:
            above = package[: len(package) - len(found["dots"]) + 1] if found["dots"] else ()
            module = ".".join((*above, found["module"]) if found["module"] else above)
            yield module
            # `from kvarve import pages` imports kvarve.pages; a plain name of a module adds nothing.
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


def test_every_folder_is_a_floor() -> None:
    assert {*map(top, modules())} == FLOOR_OF.keys()


def test_imports_go_down_only() -> None:
    def wrong(name: str, names: set[str], _: set[str]) -> object:
        own = top(name)
        above = {other for other in inside(names) - {own} if FLOOR_OF.get(other, 99) >= FLOOR_OF[own]}
        return above | inside(names) & APART.get(own, set()) | {each for each in names if (name, each) in STRANGERS}

    assert not breaches(wrong), "imported from above, from the same floor, or by a stranger"


def test_nothing_that_is_installed_needs_the_tests() -> None:
    assert not breaches(lambda _, __, roots: "tests" in roots)


def test_no_two_files_have_one_name() -> None:
    names = Counter(Path(name).name for name in modules())
    assert {name for name, count in names.items() if count > 1} <= {"__init__.py", "__main__.py"}


def test_private_modules_are_imported_by_their_neighbours_alone() -> None:
    """In storage, memory and transfer a module begins with an underscore that only its own folder imports."""
    importers: dict[str, set[str]] = {}
    for name, names in modules().items():
        for each in names:
            importers.setdefault(each.removeprefix("kvarve.").replace(".", "/"), set()).add(str(Path(name).parent))
    wrong = {
        name
        for name in map(Path, modules())
        if name.parts[0] in ("storage", "memory", "transfer") and not name.name.startswith("__")
        if name.name.startswith("_")
        is any(  # a folder's subfolders are of it
            not Path(other).is_relative_to(name.parent) for other in importers.get(str(name.with_suffix("")), ())
        )
    }
    assert not wrong


def test_words_and_core_are_pure() -> None:
    def wrong(name: str, _: set[str], roots: set[str]) -> object:
        return top(name) in PURE and roots & (NOT_PURE | {"numpy"} - NUMPY_IN.get(name, set()))

    assert not breaches(wrong)


def test_what_decides_knows_no_tensor_thread_or_file() -> None:
    def wrong(name: str, names: set[str], roots: set[str]) -> object:
        if name not in DECIDES:
            return None
        return roots & NOT_PURE - {"logging"} | inside(names) & {"memory", "transfer", "storage"}

    assert not breaches(wrong)


# The packages of each install, besides the standard library; an extra includes the one before it.
INSTALLS = {
    "base": {"numpy", "xxhash", "cyclopts", "rich"},
    "worker": {"torch"},
    "engine": {"transformers", "tokenizers", "safetensors", "jinja2", "prometheus_client"},
    "server": {"fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "httpx"},
    "demo": {"matplotlib"},
}
INSTALL_OF = {
    "memory": "worker",
    "transfer/transfer_engine.py": "worker",
    "cache/worker.py": "worker",
    "cache/attach.py": "worker",
    "cache/prefix_cache.py": "worker",
    "metrics": "engine",
    "connectors": "engine",
    "connectors/engine_page.py": "server",
    "transformers.py": "engine",
    "reference/engine": "engine",
    "reference/verify": "engine",
    "reference/server": "server",
    "reference/server/serve_settings.py": "base",
    "reference/server/keyfile.py": "base",
    "cli/admin_client.py": "server",
    "bench": "server",
    "bench/bench_command.py": "base",
    "bench/demo.py": "demo",
    "planner/charts.py": "demo",
}
# What a module finds in the engine that loads it.
ENGINES = {
    "connectors/vllm": {"vllm"},
    "connectors/sglang": {"sglang"},
    "connectors/checkpoint.py": {"huggingface_hub"},
    "bench/vllm_engine.py": {"vllm"},
}
# What a module imports where it is asked to, and refuses clearly without.
OPTIONAL = {
    "cuda",
    "mooncake",
    "redis",
    "obstore",
    "cryptography",
    "zstandard",
    "lz4",
    "hf3fs_fuse",
    "opentelemetry",
    "zmq",
    "msgpack",
    "triton",
}


def nearest(name: str, table: dict[str, object]) -> object:
    """What a table has for a module, or for the nearest folder around it."""
    return next((table[each] for each in (name, *map(str, Path(name).parents)) if each in table), None)


def not_brought(name: str, roots: set[str]) -> set[str]:
    """Of packages that a module imports, those which its install does not bring."""
    own, sizes = nearest(name, {**INSTALL_OF}) or "base", [*INSTALLS]
    brought = set().union(*(INSTALLS[each] for each in sizes[: sizes.index(str(own)) + 1]))
    engine = nearest(name, {**ENGINES}) or set()
    assert isinstance(engine, set)
    if top(name) == "testing":  # for those who have pytest
        return set()
    return roots - brought - engine - OPTIONAL - {"kvarve"} - sys.stdlib_module_names


def test_a_module_imports_what_its_install_brings() -> None:
    assert not breaches(lambda name, _, roots: not_brought(name, roots))


def test_what_is_loaded_with_a_module_needs_no_more_than_its_install_brings() -> None:
    found = {}
    for name in modules():
        loaded, rest = {name}, [name]
        while rest:
            new = {each for path in map(at_once, rest) for module in path for each in files_of(module)} - loaded
            loaded, rest = loaded | new, [*new]
        found[name] = not_brought(name, {module.split(".")[0] for path in loaded for module in at_once(path)})
    assert not {name: packages for name, packages in found.items() if packages}


def test_who_asks_for_the_version_loads_nothing_else() -> None:
    assert at_once("__init__.py") <= {"typing", "kvarve.errors", *(f"kvarve.errors.{name}" for name in dir(errors))}


@cache
def at_once(name: str) -> set[str]:
    """What a module imports when it is imported: outside of functions, and not for type checkers alone."""
    return {*imported(name, re.sub(r"(?m)^ .*$", "", (SOURCE / name).read_text()))}


def files_of(module: str) -> set[str]:
    """The files of kvarve that are loaded with a module of its own: it, and the packages around it."""
    parts = module.split(".")[1:] if module.split(".", maxsplit=1)[0] == "kvarve" else []
    paths = ("/".join(parts[:count]) for count in range(len(parts) + 1))
    return {file for path in paths for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in modules()}


def test_the_checker_sees_every_way_to_import() -> None:
    text = (
        "from kvarve import pages\nfrom . import cache\nfrom ..engine import (\n    state,\n)\n"
        "def lazily():\n    import torch, kvarve.storage.base as app\n    importlib.import_module('kvarve.testing')\n"
    )
    found = {*imported("core/some.py", text)}
    assert inside(found) == {"pages", "core", "engine", "storage", "testing"} and "torch" in found
