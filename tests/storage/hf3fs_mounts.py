"""Mounts of type fuse.hf3fs that are served by bindfs, a process of its own killed and stopped at will."""

import os
import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from processes import stopped, until

from kvarve.system.mounts import mounts


def require(tools: str, *programs: str) -> None:
    """Skip where these programs cannot run; where they have to (KVARVE_TEST_HF3FS=1, as in CI), that is a failure."""
    missing = [program for program in programs if shutil.which(program) is None]
    problem = f"there is no {' and no '.join(missing)}" if missing else ""
    problem = problem or ("" if os.geteuid() == 0 and Path("/dev/fuse").exists() else "nothing can be mounted")
    if problem and os.environ.get("KVARVE_TEST_HF3FS") == "1":
        pytest.fail(f"{tools} cannot be tested here: {problem}")
    if problem:
        pytest.skip(f"{tools} cannot be tested here: {problem}")


def is_mounted(place: Path) -> bool:
    return any(mount.place == str(place) for mount in mounts())


class Bindfs:
    """`source` seen at `mount`, through a process."""

    def __init__(self, folder: Path) -> None:
        require("a mount of 3FS", "bindfs")
        self.source, self.mount = folder / "behind", folder / "mount"
        for place in (self.source, self.mount):
            place.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        words = ["bindfs", "-f", "-o", "fsname=hf3fs.test,subtype=hf3fs", str(self.source), str(self.mount)]
        self.process = subprocess.Popen(words)
        until(lambda: is_mounted(self.mount) or self.process.poll() is not None, "a mount")
        assert self.process.poll() is None, "bindfs mounts nothing here"

    def kill(self) -> None:
        """What is asked of the mount from now on, and is under way, is ENOTCONN."""
        self.process.kill()
        self.process.wait()

    def again(self) -> None:
        """Mount it anew, after `kill`."""
        self._unmount()
        self.start()

    def stopped(self) -> AbstractContextManager[None]:
        """What is asked of the mount hangs."""
        return stopped(self.process.pid)

    def close(self) -> None:
        self.kill()
        self._unmount()

    def _unmount(self) -> None:
        if is_mounted(self.mount):
            subprocess.run(["umount", "-l", str(self.mount)], check=True)
