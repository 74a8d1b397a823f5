"""The short form with the newest releases that go together, also of those that pyproject.toml does not allow yet.

    python tools/newest.py [PYTEST'S ARGUMENTS]

A table says which versions are newer than the lock, and which are outside of the range in pyproject.toml; then the
tests say what broke. They run in .venv-newest. torch stays as it is: a new one is many gigabytes, and tried by TORCH.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-newest" / "bin" / "python"
UV = [sys.executable, str(ROOT / "tools" / "uv.py")]


def requirements() -> dict[str, Requirement]:
    """What kvarve and its extras need directly, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(each for some in project["optional-dependencies"].values() for each in some)]
    found = {canonicalize_name(each.name): each for each in map(Requirement, lines)}
    return {
        name: each
        for name, each in found.items()
        if name not in ("kvarve", "torch") and (each.marker is None or each.marker.evaluate())
    }


def locked() -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==([^\s;\\]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def installed() -> dict[str, str]:
    said = subprocess.run(
        [*UV, "pip", "freeze", "--python", str(PYTHON)], capture_output=True, text=True, check=True
    ).stdout
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", said, re.MULTILINE)}


def main(arguments: list[str]) -> int:
    needed = requirements()
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    install = [*UV, "pip", "install", "--quiet", "--python", str(PYTHON)]
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(PYTHON.parent.parent)], check=True)
    subprocess.run([*install, f"torch=={torch}"], check=True)
    subprocess.run([*install, "--upgrade", f"torch=={torch}", "pip", *needed], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    before, now = locked(), installed()
    for name, each in sorted(needed.items()):
        outside = "" if each.specifier.contains(now[name], prereleases=True) else f"  outside of {each.specifier}"
        if outside or before.get(name) != now[name]:
            print(f"{name:32} {before.get(name, '-'):>12} -> {now[name]}{outside}", flush=True)
    tests = ["-m", "pytest", "--numprocesses", "3", "--dist", "loadfile", *arguments]
    return subprocess.run([str(PYTHON), *tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
