"""How much memory the host has for this process, within the limits of its control groups."""

import os
from pathlib import Path, PurePosixPath

# By the version of control groups: where they are mounted, and the file of the limit.
_GROUPS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}


def host_bytes(root: Path = Path("/")) -> int:
    """The machine's memory in bytes, or a control group's limit (a container's) if that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root)])


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The machine's memory in bytes that programs may take now; all that it has, where that is not known."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
        return min(int(lines["MemAvailable"].split()[0]) << 10, host_bytes())
    except (OSError, KeyError, ValueError, IndexError):
        return host_bytes()


def _limits(root: Path) -> list[int]:
    """The limits in bytes of this process's control groups, and of their parents."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            mount, name = _GROUPS.get(controller, ("", ""))
            group = PurePosixPath(path.lstrip("/"))
            found += [
                limit for each in (group, *group.parents) if name and (limit := _read(root / mount / each / name))
            ]
    return found


def _read(path: Path) -> int:
    """A limit in bytes; 0 if there is none."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return int(text) if text.isascii() and text.isdigit() else 0
