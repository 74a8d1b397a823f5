"""The vLLM engine around a connector or a tier: what it does between steps, of which vLLM tells them nothing.

vLLM makes both while it makes its `EngineCore`, whose calls are watched from here: those that empty the prefix cache,
those that may change the weights, and the time in which it has nothing to do. Its workers are asked by vLLM's own
remote calls, in the engine's thread, in order with all that they do.
"""

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, cast

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import KVConnectorOutput

from kvarve.connectors.vllm.weights import weights_now

log = logging.getLogger("vllm.kvarve")

IDLE_S = 0.05  # between two looks at copies beside an idle engine
# Of vLLM's remote calls, those after which the weights are what they were.
READS = {
    *("check_health", "compute_weight_checksums", "get_model_inspection", "get_supported_tasks"),
    *("init_weight_transfer_engine", "list_loras", "profile", "save_sharded_state", "shutdown_weight_transfer_engine"),
}


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Around:
    """`changed` is called when the weights are others than before, or may be; `settle` before vLLM empties its prefix
    cache, for which no block may be in use, with whether it takes those of all requests. In a vLLM without such an
    engine nothing is watched, and nobody answers."""

    def __init__(self, changed: Callable[[], object], settle: Callable[[bool], object] = _nothing) -> None:
        self._changed, self._settle = changed, settle
        self._core = _engine_core()
        self._asleep = False
        self._again = False  # whether to look at the weights again
        self._weights: list[str] | None = None  # as they were last looked at, if nothing may have changed them since
        self._idle: Callable[[], object] = _nothing
        self._due = threading.Event()
        if self._core is None:
            log.warning("kvarve does not see vLLM's engine: it notices new weights only when a cache is reset")
            return
        self._weights = self.ask(weights_now)
        self.watch("collective_rpc", after=self._called)
        self.watch("reset_prefix_cache", before=self._settled, after=self._emptied)
        self.watch("resume_scheduler", before=self._look)

    @property
    def config(self) -> Any:
        """The engine's, whose settings of transfer are those of the outermost connector; None: there is no engine."""
        return getattr(self._core, "vllm_config", None)

    def ask(self, what: Callable[..., Any], *given: Any) -> list[Any] | None:
        """The answers of all workers to `what(worker, *given)`, in the engine's thread; None: there is no engine."""
        if self._core is None:
            return None
        return list(self._core.model_executor.collective_rpc(what, args=given))

    def look_again(self) -> None:
        """For the first request after a reset: a program may change the weights once it has emptied the cache."""
        if self._again:
            self._again = False
            self._look()

    def when_idle(self, call: Callable[[], object]) -> None:
        """Have `call` made by the engine's thread once the engine has nothing to do: each `again` is good for one call.
        An engine in its client's process has no time of its own, and never makes it."""
        if isinstance(self._core, EngineCoreProc):
            self._idle = call
            threading.Thread(target=self._ring, name="kvarve beside an idle engine", daemon=True).start()

    def end_with_parent(self) -> None:
        """Have an engine in a process of its own end when the one that started it is gone, by kill -9 too: nobody can
        ask it any more, and vLLM would leave it, its workers and all that they hold."""
        if isinstance(self._core, EngineCoreProc) and (parent := multiprocessing.parent_process()) is not None:
            call = partial(_outlived, parent)
            threading.Thread(target=call, name="kvarve waits for vLLM's server", daemon=True).start()

    def again(self) -> None:
        self._due.set()

    def _ring(self) -> None:
        core: Any = self._core
        while self._due.wait():
            self._due.clear()
            time.sleep(IDLE_S)
            made = threading.Event()

            def call(_: Any, made: threading.Event = made) -> None:
                made.set()
                self._idle()

            core._idle_state_callbacks.append(call)
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
            made.wait()

    # --- requests that have loads

    def compute(self, requests: set[str]) -> set[str]:
        """Have these requests computed from their first token on, if their loads have ended and they have not run yet;
        those of which that is so."""
        scheduler: Any = getattr(self._core, "scheduler", None)
        waiting = [each for each in getattr(scheduler, "kv_holding_waiting", ()) if each.request_id in requests]
        self.fail({each.request_id for each in waiting} & scheduler.finished_recving_kv_req_ids if waiting else set())
        found = set()
        for request in waiting:
            if scheduler._handle_blocked_waiting_request(request):  # nothing of a load that failed is left
                scheduler.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
                found.add(request.request_id)
        return found

    def fail(self, requests: set[str]) -> None:
        """The loads of these requests, which have ended, count as failed."""
        if requests:
            cast(Any, self._core).scheduler._handle_failed_recving(requests)

    def received(self, requests: set[str], failed: set[str]) -> None:
        """The loads of these requests have ended, outside a step."""
        if requests:
            self.fail(failed)
            cast(Any, self._core).scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=requests))

    # --- calls of the engine

    def watch(self, name: str, before: Callable[..., None] = _nothing, after: Callable[..., None] = _nothing) -> None:
        """Have the engine's call `name` preceded and followed by others, with the same arguments."""
        if self._core is None:
            return
        real = getattr(self._core, name)

        @wraps(real)  # vLLM reads its signature
        def watched(*args: Any, **more: Any) -> Any:
            before(*args, **more)
            try:
                return real(*args, **more)
            finally:
                after(*args, **more)

        setattr(self._core, name, watched)

    def _settled(self, reset_running_requests: bool = False, *_: Any, **__: Any) -> None:
        self._settle(reset_running_requests)

    def _emptied(self, *_: Any, **__: Any) -> None:
        self._look()
        self._again = True

    def _called(self, method: Any = None, *_: Any, **__: Any) -> None:
        """Workers have done what a client asked for, which may be anything: a sum of weights that were packed for the
        processor would not tell, nor is it worth its time between the pieces of one update."""
        if method in ("sleep", "wake_up"):
            self._asleep = method == "sleep"
        if method not in READS:
            self._weights = None
            self._changed()

    def _look(self, *_: Any, **__: Any) -> None:
        """Compare the weights, unless their memory is given away: it is looked at when the engine goes on."""
        core: Any = self._core
        if self._asleep or "weights" in getattr(core.model_executor, "sleeping_tags", ()):
            return
        found = self.ask(weights_now)
        if found != self._weights or "" in (found or [""]):
            self._weights = found
            self._changed()


def _outlived(parent: Any) -> None:
    """End this process, as vLLM would at SIGTERM, once its parent has ended."""
    multiprocessing.connection.wait([parent.sentinel])
    log.warning(
        "process %d, which this engine served, is gone: the engine ends, and with it kvarve's memory", parent.pid
    )
    os.kill(os.getpid(), signal.SIGTERM)


def _engine_core() -> Any:
    """The engine that is being made, if a caller is one."""
    return next((known["self"] for known in callers() if isinstance(known.get("self"), EngineCore)), None)


def callers() -> Iterator[Mapping[str, Any]]:
    """The variables of each function that waits for this one, from the nearest on: vLLM tells less than they know."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
