"""What is mounted where, as the kernel says (proc_pid_mountinfo(5))."""

import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    device: str  # major:minor
    place: str
    kind: str
    source: str


def mounts() -> list[Mount]:
    """All mounts that this process sees. OSError: the kernel does not say. Names are bytes of any kind, of which it
    escapes only what would end a word or a line."""
    found = []
    for line in MOUNTS.read_bytes().split(b"\n"):
        words = line.split(b" ")
        if b"-" in words[6:]:
            kind, source = words[words.index(b"-", 6) + 1 :][:2]
            found.append(Mount(*map(_name, (words[2], words[4], kind, source))))
    return found


def mount_of(path: Path) -> Mount | None:
    """The mount that a path lies on, as far as names tell: no link is followed."""
    found = [mount for mount in reversed(mounts()) if path.is_relative_to(mount.place)]  # the last is on top
    return max(found, key=lambda mount: len(mount.place), default=None)


def _name(word: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), word))
