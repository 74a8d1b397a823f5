"""A real Mooncake master and real owners of memory, in processes of their own and a network of their own.

Mooncake's data listeners bind every interface, so its tests live in a network namespace with nothing but loopback. This
process enters it for the time of a test; processes and threads started meanwhile stay in it.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import until

MIB = 1 << 20
# Below the ports that connections get (from 32768) and beside those that the library takes (12300 to 17000): the usual
# one of a master may be a connection's own just when it wants to listen.
MASTER, METRICS = "127.0.0.1:5051", "127.0.0.1:9003"
LABEL = b"\x01" * 32

# Before the library is loaded: its timeouts are shorter here than for users.
os.environ |= {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1", "MC_TCP_STATUS_TIMEOUT_SEC": "1"}

_CLONE_NEWNET, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x40000000, 0x8913, 0x8914, 1
_OWN_NETWORK = Path("/proc/thread-self/ns/net")

OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2]), flush=True)
sys.stdin.read()
store.close()
"""


def _libc(call: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, call)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


@cache
def _network() -> int:
    """The one namespace of this test run: the library's threads live on in the network in which they were begun."""
    before = os.open(_OWN_NETWORK, os.O_RDONLY)
    _libc("unshare", _CLONE_NEWNET)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
            name, flags = struct.unpack_from("16sH", fcntl.ioctl(some, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0)))
            fcntl.ioctl(some, _SIOCSIFFLAGS, struct.pack("16sH22x", name, flags | _IFF_UP))
        return os.open(_OWN_NETWORK, os.O_RDONLY)
    finally:
        _libc("setns", before, _CLONE_NEWNET)
        os.close(before)


@contextmanager
def own_network() -> Iterator[None]:
    """This thread, and all that it starts, in the namespace."""
    network, before = _network(), os.open(_OWN_NETWORK, os.O_RDONLY)
    _libc("setns", network, _CLONE_NEWNET)
    try:
        yield
    finally:
        _libc("setns", before, _CLONE_NEWNET)
        os.close(before)


def require_mooncake() -> None:
    """Skip where Mooncake cannot run; where it has to (KVARVE_TEST_MOONCAKE=1, as in CI), that is a failure."""
    problem = ""
    try:
        if find_spec("mooncake") is None:
            problem = "the Mooncake client is not installed"
        else:
            import mooncake.store  # noqa: F401

            _network()
    except (ImportError, OSError) as error:
        problem = str(error)
    if problem and os.environ.get("KVARVE_TEST_MOONCAKE") == "1":
        pytest.fail(f"Mooncake cannot be tested here: {problem}")
    if problem:
        pytest.skip(f"Mooncake cannot be tested here: {problem}")


class Cluster:
    """A master with no owner yet; `close` ends all processes that it started, in any state."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self._flags = folder, flags
        self._processes: list[subprocess.Popen[str]] = []
        try:
            self.start_master()
        except BaseException:
            self.close()
            raise

    def start_master(self) -> None:
        """It knows no object."""
        program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
        host, _, port = MASTER.partition(":")
        metrics_host, _, metrics_port = METRICS.partition(":")
        words = [f"--rpc_address={host}", f"--rpc_port={port}", "--logtostderr=1", *self._flags]
        words += [f"--metrics_host={metrics_host}", f"--metrics_port={metrics_port}", "--rpc_thread_num=2"]
        with (self.folder / "master.log").open("a") as log:
            master = subprocess.Popen([program, *words], stdout=log, stderr=log, text=True)
        self._processes.append(master)
        until(lambda: listens() or master.poll() is not None, "a master that listens")
        assert master.poll() is None, (self.folder / "master.log").read_text()[-2000:]
        self.master = master

    def owner(self, size_bytes: int = 64 * MIB) -> subprocess.Popen[str]:
        """A process that lends the store this much memory."""
        with (self.folder / "owner.log").open("a") as log:
            words = [sys.executable, "-c", OWNER, str(size_bytes), MASTER]
            owner = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self._processes.append(owner)
        assert owner.stdout is not None
        code = owner.stdout.readline().strip()
        assert code == "0", f"an owner could not be set up: {code}"
        return owner

    def close(self) -> None:
        for process in reversed(self._processes):
            kill(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def listens(place: str = MASTER) -> bool:
    host, _, port = place.partition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """Freeze the process, with its connections open."""
    process.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{process.pid}/task")  # each thread answers calls until it is frozen
    until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in state.iterdir()))
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
