"""How much memory there is: of the host, within this process's limits, and of a device."""

import os
from pathlib import Path, PurePosixPath

import torch

# By the version of control groups: where they are mounted, and the file of the limit.
_GROUPS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}
_SHARES_HOST = ("cpu", "mps")  # devices that compute in the host's own memory


def on_host(device: str | torch.device) -> bool:
    """Whether a device's memory is host memory."""
    return torch.device(device).type in _SHARES_HOST


def host_bytes(root: Path = Path("/")) -> int:
    """The machine's memory in bytes, or a control group's limit (a container's) if that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root)])


def device_bytes(device: str | torch.device) -> int | None:
    """The total memory in bytes of a device that has its own; None if it is unknown."""
    try:
        return int(torch.cuda.mem_get_info(torch.device(device))[1]) if torch.device(device).type == "cuda" else None
    except (RuntimeError, AssertionError):
        return None


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
