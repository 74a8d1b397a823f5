"""Metadata servers of this machine, each in a folder of its own, ended whatever happens."""

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from hf3fs_metadata_suite import LABEL, K
from processes import PATIENCE_S, state_of, stopped, until

import forks
from kvarve.storage.hf3fs.metadata import Metadata, open_metadata


class Local:
    def __init__(self, tmp_path: Path) -> None:
        self.store, self.state = tmp_path / "store", tmp_path / "state" / "kvarve" / "hf3fs"
        self.store.mkdir()
        self.opened: list[Metadata] = []

    def open(self, slots: int = 64, label: bytes = LABEL, quota: int | None = None) -> Metadata:
        self.opened.append(open_metadata(None, self.store, label, slots * K, quota and quota * K))
        return self.opened[-1]

    @property
    def folder(self) -> Path:
        (folder,) = self.state.iterdir()
        return folder

    def pid(self) -> int:
        """Of the server that runs, or is being started."""
        until(lambda: bool(lock := (self.folder / "lock").read_text()) and runs(int(lock)), "a server")
        return int((self.folder / "lock").read_text())

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        pid = self.pid()
        os.kill(pid, how)
        until(lambda: not runs(pid), "its end")

    def stopped(self) -> AbstractContextManager[None]:
        return stopped(self.pid())

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        """A server by hand, in the same folder."""
        command = [sys.executable, "-m", "kvarve.storage.hf3fs.metadata", str(self.folder), *words]
        return forks.Popen(command, stderr=subprocess.PIPE)

    def close(self) -> None:
        for metadata in self.opened:
            metadata.close()
        end_servers(self.state)


def end_servers(state: Path) -> None:
    """Those that were started for stores whose folders are here."""
    for lock in state.glob("*/lock"):
        if (text := lock.read_text()) and runs(int(text)):
            os.kill(int(text), signal.SIGCONT)
            os.kill(int(text), signal.SIGKILL)


def runs(pid: int) -> bool:
    return state_of(pid) not in "ZX"


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors.decode()
