"""Processes that compute one model together: how they start, meet and end.

The model has a process group of torch, the cache a star of sockets of its own (`kvarve.ranks`). Rank 0 is the process
that was started; it starts the others of its node, which end with it in any case.
"""

import ctypes
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvarve.errors import ConfigError, KvarveError
from kvarve.pages.pools import ModelIdentity
from kvarve.ranks.group import ALL, Group
from kvarve.ranks.star import START_S, GroupEnded, Listener, Star, alike, connect, shown
from kvarve.reference.engine.identity import without_threads
from kvarve.reference.engine.shards import BY_GROUPS, SHARDING
from kvarve.system.orphans import temporary_folder

DEADLINE_S = 30.0  # for a rank that the others wait for
LEAVE_S = 40.0  # for all ranks to finish their backups at the end, where a GPU computes
END_S = 10.0  # for the other ranks' processes to end by themselves
FAILED_S = 2.0  # the same after a failure, to say what they know of it; and for a device to make its last sums
WATCH_S = 0.1  # between two looks of a watch
_DIES_WITH_PARENT = 1  # prctl
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which the first process of a node handles for all
Data = TypeVar("Data")


@dataclass(frozen=True)
class Place:
    """A process's place among the ranks, and where they meet: a folder of this node, and (host, port) of rank 0 if
    there are several nodes. The cache's own sockets are at the next port."""

    rank: int
    ranks: int
    folder: Path
    host: tuple[str, int] | None = None
    on_node: int = 0  # among those of its node
    here: bool = True  # on rank 0's node
    deadline_s: float = DEADLINE_S
    processes: Mapping[int, int] = field(default_factory=dict)  # that this one started: their ranks, by sentinel

    @property
    def _model(self) -> str:
        return f"file://{self.folder}/model" if self.host is None else f"tcp://{shown(self.host)}"

    def listen(self) -> Listener:
        """Rank 0's socket, which has to be there before the others start."""
        return Listener([self.folder / "cache", *([] if self.host is None else [(self.host[0], self.host[1] + 1)])])

    def meet(self, settings: str, listener: Listener | None = None) -> Star:
        """GroupEnded unless all ranks come, with equal `settings`."""
        if listener is not None:
            return listener.accept(self.ranks, alike(settings), self.deadline_s, processes=self.processes)
        assert self.here or self.host is not None
        address = self.folder / "cache" if self.here or self.host is None else (self.host[0], self.host[1] + 1)
        return connect(address, self.rank, self.ranks, alike(settings), self.deadline_s, processes=self.processes)


class Ranks:
    """This process's part in a model that several compute: the model's sums, and the cache's group."""

    def __init__(self, place: Place, star: Star, device: str = "cpu", *, watched: bool | None = None) -> None:
        """`watched`: see `computing`; by default where a GPU computes."""
        self.rank, self.ranks = place.rank, place.ranks
        self._star, self._device = star, torch.device(device)
        self.group = Group(star)
        if place.host is None:  # else the way to the other nodes is the operator's to choose
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self._device.type == "cuda":  # else nccl aborts the process, often before the watch can name a rank
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        try:
            dist.init_process_group(
                # Digests and what ranks tell each other are on the CPU, whatever computes.
                "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=place._model,
                rank=place.rank,
                world_size=place.ranks,
                timeout=timedelta(seconds=place.deadline_s),
            )
        except (RuntimeError, ValueError) as e:
            raise GroupEnded(self.group.fail(f"the model's ranks do not meet: {e}")) from e
        self._computes = False  # together with all ranks; changed with `_lock` held
        self._begun = 0  # blocks of `computing` and sums, so far
        self._summed = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._summing = False  # a sum is being begun
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None
        if watched or (watched is None and self._device.type == "cuda"):
            self._watch = threading.Thread(target=self._look_for_the_gone, name="kvarve watches ranks", daemon=True)
            self._watch.start()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around what all ranks compute together. On a GPU it has been computed when the block ends.

        A device that waits for a rank that is gone or stopped waits for ever, and no memory of it can be given back. A
        watch ends the process then, and names that rank: at once if it is gone, after the deadline if it is stopped. If
        the block fails, the group ends and a sum is left, it does so after `FAILED_S`.
        """
        if self._watch is None:
            yield
            return
        with self._lock:
            self._computes = True
            self._begun += 1
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        finally:
            self._computes_no_more()

    def _computes_no_more(self) -> None:
        """From here on the calling thread finds by itself which rank is gone, if the watch does not end the process."""
        with self._lock:
            self._computes = False

    def _look_for_the_gone(self) -> None:
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)  # of this thread; else asking its event would make memory on the first
        looks, ended = 0, None
        seen: tuple[int, Group | None] = 0, None
        while not self._closing.is_set():
            gone = self._star.gone(WATCH_S)
            with self._lock:
                if gone and self._computes:
                    self._exit(partial(self.group.fail, "it waits for one that is gone", stuck=True, gone=gone))
                if ended is None and self.group.ended:
                    ended = self.group
                left = None if self._computes else ended  # of which a sum may be left that is never made
                # Counted in looks: a group that is paused as a whole (a debugger, a frozen container) is not late.
                same, seen = seen == (self._begun, left), (self._begun, left)
                looks = looks + 1 if (self._computes or left) and same and self._waits() else 0
                if left and looks * WATCH_S > FAILED_S:
                    self._exit(partial(left.fail, ""))
                if looks * WATCH_S > self._star.deadline_s:
                    why = f"no sum came in {self._star.deadline_s:g} s, though all ranks answer"
                    self._exit(partial(self.group.fail, f"{why}: a device hangs, or is slow", stuck=True))
            if gone:
                self._closing.wait(WATCH_S)  # the thread that computes hears of it in its next turn

    def _waits(self) -> bool:
        """Whether a sum has been begun and not been made. Between two sums kernels may be compiled, for minutes."""
        if self._summed is None:
            return self._computes
        if self._summing:
            return True
        with suppress(RuntimeError):  # the device has failed, which whoever uses it next is told
            return not self._summed.query()  # type: ignore[no-untyped-call]
        return False

    def _exit(self, verdict: Callable[[], str]) -> NoReturn:
        """End the process in any case, as its other threads cannot."""
        try:
            at_last = threading.Timer(self._star.deadline_s * ALL, os._exit, (2,))  # if stderr is read by no process
            at_last.daemon = True
            at_last.start()
            print(f"kvarve: rank {self.rank} ends: {verdict()}", file=sys.stderr, flush=True)
        finally:
            os._exit(2)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """The group ends with the block; any trouble inside reaches the other ranks."""
        try:
            yield
            if self._watch is not None:  # none ends while another one still computes
                with suppress(GroupEnded):  # of a rank that fails at its end; this one has done its part
                    self.group.assemble(LEAVE_S)
        except BaseException as e:
            self.group.fail(f"{type(e).__name__}: {e}")
            raise
        finally:
            self.close()

    def close(self) -> None:
        self._summing = failed = self.group.ended  # what is closed may wait for ranks that do not come
        if not failed:
            self._end_watch()
        self.group.close()
        with suppress(RuntimeError, AssertionError):
            dist.destroy_process_group()
        self._end_watch()

    def _end_watch(self) -> None:
        self._closing.set()
        if self._watch is not None:
            self._watch.join()

    def again(self) -> Group:
        """A group for another cache, when the last one is not used any more."""
        exchanges = self.group.exchanges
        self.group = Group(self._star)
        self.group.exchanges = exchanges
        return self.group

    def assemble(self) -> None:
        """Wait for all ranks, which read their weights or open their storage each in its own time. GroupEnded if one
        does not come, or has computed more or less so far: its sums would be added up with later ones of the others."""
        self.group.assemble(START_S)
        if len({*(begun := self.of_all(self._begun))}) > 1:
            told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(begun))
            raise GroupEnded(self.group.fail(f"the ranks have not computed alike (what each has begun: {told})"))

    def meet(self) -> None:
        """Wait for all ranks, while none computes. GroupEnded if one does not come in time."""
        with self._in_time():
            dist.barrier()

    def of_first(self, data: Data) -> Data:
        """What rank 0 has given. GroupEnded if not all ranks come in time."""
        found: list[Any] = [data]
        with self._in_time():
            dist.broadcast_object_list(found)
        first: Data = found[0]
        return first

    def of_all(self, data: Data) -> list[Data]:
        """What each rank has given. GroupEnded if not all come in time."""
        found: list[Any] = [None] * self.ranks
        with self._in_time():
            dist.all_gather_object(found, data)
        return found

    def add_up(self, tensor: Tensor) -> None:
        """Add a tensor up over all ranks, in place. GroupEnded if one does not take part in time."""
        with self._in_time():
            try:
                # The call waits for the others where it is the first, or the device's queue is full.
                self._summing = True
                self._begun += 1
                dist.all_reduce(tensor)
                if self._summed is not None:
                    self._summed.record(torch.cuda.current_stream(self._device))
            finally:
                self._summing = False

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            self._computes_no_more()
            raise GroupEnded(self.group.fail(f"what all ranks do together failed: {e}", stuck=True)) from e

    def identity(self, mine: ModelIdentity, weights: str = "") -> ModelIdentity:
        """The identity of the whole model, from that of each rank's part. GroupEnded if the ranks differ in more than
        their weights, such as in their processors.

        `weights`: those of the whole model, where pages are stored for any number of ranks. Its threads then do not
        count, since they go with the ranks."""
        whole = replace(mine, weights=weights, ranks=self.ranks, sharding=SHARDING)
        found = self.of_all((hashlib.sha256(mine.weights.encode()).digest(), whole.fingerprint()))
        for rank, (_, fingerprint) in enumerate(found):
            if fingerprint != found[0][1]:
                raise GroupEnded(
                    f"rank {rank} computes otherwise than rank 0 (another version, processor, library or setting), so "
                    f"they would round differently: run all ranks alike"
                )
        if weights:
            return replace(whole, sharding=BY_GROUPS, numerics=without_threads(mine.numerics))
        return replace(whole, weights=hashlib.sha256(b"".join(part for part, _ in found)).hexdigest()[:32])


def device_of(device: str, place: Place) -> str:
    """Where a rank computes: `cuda` is one device for each rank of a node."""
    if device != "cuda":
        return device
    torch.cuda.set_device(place.on_node)  # where nccl computes
    return f"cuda:{place.on_node}"


def threads_of(ranks: int) -> int:
    """torch's threads of each of a machine's ranks."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def check_ranks(ranks: int, nodes: int = 1, node: int = 0, address: str | None = None, device: str = "cpu") -> None:
    """ConfigError for numbers that cannot work."""
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(f"every node must have as many ranks, at least one, got {ranks} ranks on {nodes} nodes")
    if not 0 <= node < nodes:
        raise ConfigError(f"the node rank must be from 0 to {nodes - 1}, got {node}")
    if nodes > 1:
        host_and_port(address)
    if device == "cuda" and ranks // nodes > (devices := torch.cuda.device_count()):
        raise ConfigError(
            f"{ranks // nodes} ranks on this machine need a GPU each, and it has {devices}: give fewer ranks, or "
            f"--device cuda:0 for all on one"
        )


def host_and_port(address: str | None) -> tuple[str, int]:
    host, _, port = (address or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError("several nodes need --dist-init-addr HOST:PORT, of node 0; the next port is used as well")
    return host, int(port)


Work = Callable[..., object]


@contextmanager
def started(
    work: Work,
    options: Any,
    ranks: int,
    *,
    nodes: int = 1,
    node: int = 0,
    address: str | None = None,
    deadline_s: float = DEADLINE_S,
) -> Iterator[tuple[Place, Listener | None]]:
    """Start `work(options, place)` in a process for each other rank of this node; gives this process's place.

    All of them have ended when the block has: by themselves, or killed after some seconds.
    """
    check_ranks(ranks, nodes, node, address)
    per_node = ranks // nodes
    host = host_and_port(address) if nodes > 1 else None
    with temporary_folder("kvarve-ranks-") as folder:
        first = Place(node * per_node, ranks, folder, host, 0, node == 0, deadline_s)
        listener = None if node else first.listen()
        spawn = multiprocessing.get_context("spawn")
        others: list[BaseProcess] = []
        patience_s = FAILED_S
        try:
            with _signals_held():
                for on_node in range(1, per_node):
                    place = replace(first, rank=first.rank + on_node, on_node=on_node)
                    arguments = (work, options, place, os.getpid())
                    other = spawn.Process(target=_work, args=arguments, name=f"kvarve rank {place.rank}")
                    other.start()
                    others.append(other)
            processes = {each.sentinel: first.rank + on_node for on_node, each in enumerate(others, 1)}
            yield replace(first, processes=processes), listener
            patience_s = END_S
        except KeyboardInterrupt:
            patience_s = 0.0
            raise
        finally:
            if listener is not None:
                listener.close()
            end = time.monotonic() + patience_s
            try:
                for each in others:
                    each.join(max(0.0, end - time.monotonic()))
            finally:
                for each in others:
                    each.kill()
                for each in others:
                    each.join()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes that are started within are not ended by signals before they ignore them. Those that come meanwhile
    are this process's afterwards."""
    resource_tracker.ensure_running()  # which lets signals through again when it has been started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(work: Work, options: Any, place: Place, parent: int) -> None:
    """A process's life: it ends with the one that started it, whose signals to handle are those that all of a terminal
    or a service get."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        work(options, place)
    except KvarveError as e:  # told to rank 0, which says so
        print(f"kvarve: rank {place.rank}: {e}", file=sys.stderr)
        sys.exit(1)
