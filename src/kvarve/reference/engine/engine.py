"""The reference engine: one thread that computes prompts on a fixed grid of chunks and answers many at once.

This file has what other threads may call, and how the engine's thread begins and ends; its turns are in `turns.py`.

An error in a request (its model, its text, its listener) ends that request. An error in the cache ends the engine, as
no page can be trusted then. Either way every accepted request gets one last chunk of output.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvarve.cache.attach import ASK_S, Admin
from kvarve.cache.prefix_cache import PrefixCache, bugs_as_broken
from kvarve.cache.scheduler import Prompt
from kvarve.errors import Broken, Busy, ConfigError, KvarveError, TooLong
from kvarve.pages.field_checks import require
from kvarve.pages.pools import MEMORY_TIERS, Tier
from kvarve.pages.ticket import HandOverError
from kvarve.reference.engine.inputs import Aborted, Attach, Cleared, Detach, Evict, Input, Stop, Submitted, seeded
from kvarve.reference.engine.model import LoadedModel
from kvarve.reference.engine.request_scheduler import FROM_STORAGE
from kvarve.reference.engine.requests import (
    Finish,
    OutputChunk,
    Request,
    Sampling,
    TokenUsage,
    check_prompt,
    check_tokens,
)
from kvarve.reference.engine.turns import Call, Turns
from kvarve.system.background import BackgroundCall

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_S = 0.2  # how long a turn without work sleeps at most; a call or a finished copy wakes it
TURN_S = 1.0  # that the engine's thread has for a call at least: it may be computing
TURN_TOKENS = 512  # answers and prompts together


class Engine(Turns):
    """Serves requests from any thread on its own thread. `start` it, `submit`, and `shutdown` at the end."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PrefixCache,
        *,
        max_running: int = 64,
        max_waiting: int = 4096,
        turn_tokens: int = TURN_TOKENS,
        deterministic: bool = False,
        exact: bool = False,
    ) -> None:
        """`turn_tokens`: computed by a turn at most, answers first, but at least one chunk of a prompt in prefill.
        `exact`: no page that decoding computed is kept; answers are computed again by prefill (see `Turns`)."""
        among = {"max_running": max_running, "turn_tokens": turn_tokens}
        for name, value in (among | {"max_waiting": max_waiting}).items():
            require(value >= 1, name, "at least 1", value)
        super().__init__(model, cache, **among, deterministic=deterministic, exact=exact)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvarve engine", daemon=True)
        self.broken = ""  # why the engine cannot serve any more
        self.admin = Admin(
            cache,
            self.ask,
            lambda: self.ask(cache.scheduler.core.cleared, ASK_S, Cleared()),
            lambda order: self._tell(Detach() if order is None else Attach(*order)),
        )
        self._changing = threading.Lock()  # of ranks that are told to: one change after the other
        self._left_s = 0.0  # for the backups, once the last turn is over

    # --- from any thread

    def start(self) -> "Engine":
        self._thread.start()
        return self

    def check(self, prompt: Sequence[int], *samplings: Sampling) -> None:
        """ConfigError if this model can never answer a prompt with one of these samplings."""
        self._checked(prompt, samplings)

    def _checked(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> NDArray[np.int64]:
        """The prompt's ids [tokens], if it can be answered with each of these samplings."""
        vocabulary = self.model.model.get_input_embeddings().num_embeddings
        ids, capacity = check_prompt(prompt, vocabulary), self.cache.scheduler.capacity_tokens()
        for sampling in samplings:
            check_tokens(sampling, vocabulary)
            if len(ids) + sampling.max_tokens > self.model.max_tokens:
                raise TooLong(
                    f"with max_tokens {sampling.max_tokens} the prompt is too long: its {len(ids)} tokens cannot fit, "
                    f"as this model's maximum context length is {self.model.max_tokens} tokens"
                )
            if len(ids) + sampling.max_tokens - 1 > capacity:  # the last token is never computed
                raise TooLong(
                    f"with max_tokens {sampling.max_tokens} the prompt is too long: its {len(ids)} tokens cannot fit, "
                    f"as there is device memory for {capacity}"
                )
        return ids

    def capacity_left(self) -> int:
        """How many more requests `submit` would take now."""
        return self._max_running + self._max_waiting - self._pending

    def submit(self, request: Request, *more: Request) -> Request:
        """Queue a request, or several: all of them or none. Returns the first.

        A long prompt is checked and hashed here, on the caller's thread, once for requests that share it.
        ConfigError if one can never be served, Busy if too many wait or the engine has stopped. The samples of a prompt
        are submitted with the request that they name, after it.
        """
        requests, limit = (request, *more), self._max_running + self._max_waiting
        checked: dict[int, NDArray[np.int64]] = {}
        known: dict[tuple[int, str], Prompt] = {}
        asked = dict[int, Request]()
        for one in requests:
            one.check()
            if one.sample_of is not None:
                first = asked.get(one.sample_of)
                if first is None or first.prompt is not one.prompt or first.salt != one.salt:
                    raise ConfigError(f"request {one.sample_of} must have its sample's prompt, and come before it")
            asked[one.number] = one
            same = id(one.prompt)
            if same not in checked:
                ways = [each.sampling for each in requests if each.prompt is one.prompt]
                checked[same] = self._checked(one.prompt, ways)
            if (same, one.salt) not in known:
                known[same, one.salt] = self.cache.scheduler.prompt(checked[same], one.salt)
            if one.ticket is not None:
                self.cache.scheduler.check_ticket(one.ticket, known[same, one.salt])
            if (one.ticket is not None or one.hand_over_s is not None) and self.cache.worker.attached is None:
                raise HandOverError("a hand-over needs a storage that both servers share: attach one")
        require(len(requests) <= limit, "requests at once", f"at most {limit}", len(requests))
        with self._lock:
            if self._stopping.is_set() or self._ended:
                raise Busy(self.broken or "the engine is shutting down")
            if self._pending + len(requests) > limit:
                raise Busy(f"{self._pending} requests are being served or wait already: try again later")
            numbers = {one.number for one in requests}
            if len(numbers) < len(requests) or numbers & self._accepted.keys():
                raise ConfigError("a request cannot be served twice at once: make another one")
            for one in requests:
                self._accepted[one.number] = one
                prompt = known[id(one.prompt), one.salt]
                order = Submitted.of(seeded(one)) if self.cache.identity.ranks > 1 else None
                self._calls.put(Call(order, partial(self._enqueue, one, prompt)))
        self.cache.worker.wake()
        return request

    @property
    def _pending(self) -> int:
        """Submitted and not finished, whatever their state."""
        return len(self._accepted)

    def abort(self, request: Request) -> None:
        """End a request; its last output has Finish.ABORT."""
        with self._lock:
            self._calls.put(Call(Aborted(request.number), partial(self._abort, request)))
        self.cache.worker.wake()

    def flush(self, tiers: Sequence[Tier] = MEMORY_TIERS, timeout_s: float = 60.0) -> int:
        """Evict all unpinned pages from memory tiers, after the backups under way; storage stays.

        Returns how many pages were evicted. Answers go on meanwhile; after `timeout_s` it does not wait for backups.
        """
        return _result(self.begin_flush(tiers, timeout_s), timeout_s + TURN_S)

    def begin_flush(self, tiers: Sequence[Tier], timeout_s: float) -> "Future[int]":
        """A flush that is under way: how many pages it has evicted. It can be cancelled until it evicts the first."""
        what, gone = Evict(tuple(sorted({*map(int, tiers)}))), 0

        def evict() -> int:
            nonlocal gone
            gone += self.flush_memory(what.of())
            return gone

        # Again, under write-back: a page is copied down before it is evicted.
        return self._later(evict, what, self._once_idle(timeout_s))

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until all backups are written; False if there are dirty pages after that."""
        core = self.cache.scheduler.core
        settled = self._later(lambda: core.idle() and not core.dirty(), None, self._once_idle(timeout_s))
        return _result(settled, timeout_s + TURN_S)

    def _once_idle(self, timeout_s: float) -> Callable[[], bool]:
        """Whether the backups under way have been written, or `timeout_s` is over."""
        core, end = self.cache.scheduler.core, time.monotonic() + timeout_s
        return lambda: core.idle() or time.monotonic() >= end

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Refuse new requests, abort all, finish the backups (none if broken) and close the storage, in `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._lock:
            if not self._stopping.is_set():
                self._calls.put(Call(stop := Stop(timeout_s), partial(self._do, stop)))
            self._stopping.set()
        self.cache.worker.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():  # only that thread may use the cache; the storage is consistent at any time
            log.warning("the engine is still computing after %.0f s: its thread is abandoned", timeout_s)
            self._notify_all()
            return
        self._close_up()  # here too, for an engine that was never started
        alone = self.cache.identity.ranks == 1
        left_s = max(0.0, end - time.monotonic()) if alone else timeout_s  # on all ranks the same
        self.cache.shutdown(left_s, store=not self.broken)

    def ends(self, within_s: float) -> bool:
        """Wait until `shutdown` is called; False after `within_s`."""
        return self._stopping.wait(within_s)

    def follow(self) -> str:
        """On any rank but the first: serve what rank 0 says, on this thread, until it stops. Why, if not in order."""
        self._serve()
        self.cache.shutdown(self._left_s, store=not self.broken)
        return self.broken

    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        running = min(len(self.scheduler.running), self._pending)  # an answer that is computed again is no request
        return running, self._pending - running

    def waiting(self) -> dict[str, int]:
        """How many requests wait, by what for. From any thread, so it may be some that have just gone on."""
        counts = dict.fromkeys(("storage_queue", "storage", "fetched"), 0)
        for job in [*self.scheduler.waiting]:
            lease = job.lease
            if self._is_again(job):
                continue
            if lease.phase in FROM_STORAGE:
                counts["storage" if lease.begun else "storage_queue"] += 1
            elif any(lease.fetched):
                counts["fetched"] += 1
        counts["load"] = sum(not self._is_again(job) for job in [*self.scheduler.loading])
        return counts | {"admission": max(0, self.load()[1] - sum(counts.values()))}

    def ask(self, what: Callable[[], T], timeout_s: float, order: Input | None = None) -> T:
        """Call `what` on the engine's thread and wait for its result. Busy if it was not called, and will not be.

        If it changes the cache, `order` has the other ranks do the same in the same turn.
        """
        return _result(self._later(what, order), timeout_s)

    def _later(self, what: Callable[[], T], order: Input | None, due: Callable[[], bool] = lambda: True) -> "Future[T]":
        """The result of `what`, called on the engine's thread once it is `due`, and again if it then is no longer."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                if self._ended:
                    raise Busy(self.broken or "the engine has stopped")
                with bugs_as_broken():
                    found, again = what(), not due()
            except Exception as e:  # the caller gets it from the future
                answer.set_exception(e)
                if isinstance(e, AssertionError | Broken):  # the cache is broken, so the engine ends too
                    raise
                return
            if again:
                self._not_due.append(call)
            else:
                answer.set_result(found)

        call = Call(order, run, lambda: answer.running() or answer.set_running_or_notify_cancel(), due)
        with self._lock:
            if self._ended:
                raise Busy(self.broken or "the engine has stopped")
            self._calls.put(call)
        self.cache.worker.wake()
        return answer

    def _tell(self, order: Input) -> None:
        """Have the other ranks do something that this one does by itself."""
        if self.cache.identity.ranks > 1 and not self.cache.rank:
            self._calls.put(Call(order, lambda: None))
            self.cache.worker.wake()

    # --- on the engine's thread

    def flush_memory(self, tiers: Sequence[Tier]) -> int:
        """Evict all unpinned pages; how many. What would bring pages back by itself is forgotten."""
        self._forget_answers()
        return self.cache.scheduler.core.flush(tiers)

    def _serve(self) -> None:
        try:
            while not self._last:
                if not self._turn() and not self._last and not any(call.due() for call in self._not_due):
                    self.cache.wait(IDLE_S)
        except BaseException as e:  # noqa: BLE001  every waiting caller is told, rather than left to hang
            self._break(e)
        self._close_up()

    def _do(self, order: Input) -> None:
        match order:
            case Submitted():
                request = order.request()
                self._accepted[request.number] = request
                self._enqueue(request, self.cache.scheduler.prompt(request.prompt, request.salt))
            case Aborted(number) if number in self._accepted:
                self._abort(self._accepted[number])
            case Evict():
                self.flush_memory(order.of())
            case Cleared():
                self.cache.scheduler.core.cleared()
            case Stop(left_s):
                self._last, self._left_s = True, left_s
            case Attach() | Detach():  # it takes long, and asks the engine's thread in the end
                BackgroundCall("kvarve changes its storage", partial(self._change, order))

    def _change(self, order: Attach | Detach) -> None:
        with self._changing:
            try:
                if isinstance(order, Detach):
                    self.admin.detach()
                else:
                    self.admin.attach(order.urls, wait=order.wait, write=order.write, back_up=order.back_up)
            except KvarveError as e:
                log.warning("rank %d: the storage is not changed: %s", self.cache.rank, e)

    def _break(self, why: BaseException) -> None:
        log.critical("the engine has stopped", exc_info=why)
        text = str(why) if isinstance(why, Broken) else f"{type(why).__name__}: {why}"
        what = self.cache.scheduler.agreement.fail(text)
        with self._lock:
            self.broken = self.broken or f"the engine has stopped: {what}"

    def _close_up(self) -> None:
        """End the thread, or an engine that had none: every remaining request gets its last output."""
        with self._lock:
            self._ended = True  # no call is added to the queue from now on
        self._take_calls()
        while self._taken:
            try:
                self._taken.pop(0).run()
            except Exception as e:  # noqa: BLE001  one failing call must not keep other requests from their last output
                self._break(e)
        try:
            if self._again is not None and not self.broken:
                self._end_again()
            for job in [*self._jobs.values()] if not self.broken else ():
                self._end(job, Finish.ABORT)
        except Exception as e:  # noqa: BLE001  the engine is broken then, and `_notify_all` tells every request
            self._break(e)
        self._notify_all()

    def _notify_all(self) -> None:
        finish, error = (Finish.ERROR, self.broken) if self.broken else (Finish.ABORT, "")
        for request in [*self._accepted.values()]:
            job = self._jobs.get(request.number)
            usage = TokenUsage.of(len(request.prompt), 0 if job is None else job.output_tokens, None)
            self._finish(request, OutputChunk("", (), finish, usage, error))


def _result(answer: "Future[T]", timeout_s: float) -> T:
    """The result of a call; Busy if it was not made in time, and will not be."""
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        if not answer.cancel():  # it is being made at this moment
            return answer.result()
        raise Busy(f"the engine did not get round to it within {timeout_s:g} s") from None
