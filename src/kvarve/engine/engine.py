"""The reference engine: one thread that computes prompts on a fixed grid of chunks and answers several at once.

A turn is: take in what has ended and who has come or gone, start who is ready, one chunk for one prompt, one token
for every answer. Prompts take turns too, so a long one delays nobody by more than a chunk. Requests are computed one
by one, so an answer does not depend on who else is being served.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvarve.core.lease import Lease, Phase
from kvarve.engine.model import Detokenizer, LoadedModel, forward
from kvarve.engine.prefill import keep, resumed
from kvarve.engine.requests import Finish, Piece, Request, Sampling, Usage
from kvarve.engine.state import Workspace
from kvarve.errors import Busy, ConfigError
from kvarve.metrics import Histogram
from kvarve.model import MEMORY_TIERS, Tier
from kvarve.runtime import PrefixCache

log = logging.getLogger(__name__)

POLL_S = 0.005  # between two looks at whether backups have been written
IDLE_S = 0.2  # how long a turn without work sleeps at most; whatever happens wakes it


@dataclass
class EngineCounts:
    """What the engine has done so far, in tokens and seconds."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_device: int = 0
    cached_host: int = 0
    cached_storage: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)


class _Running:
    """A request with a place: its lease, its private state, and what it has said."""

    def __init__(self, request: Request, lease: Lease, workspace: Workspace, model: LoadedModel) -> None:
        self.request, self.lease, self.workspace = request, lease, workspace
        self.prompt = torch.tensor(list(request.prompt), device=workspace.device)[None]
        self.words = Detokenizer(model.tokenizer)
        self.text = ""  # not yet delivered: it could be the beginning of a stop text
        self.tokens: list[int] = []
        self.logits: Tensor | None = None  # after the last token computed
        seed = request.sampling.seed
        self.random = torch.Generator().manual_seed(seed) if seed is not None else None

    @property
    def prefilling(self) -> bool:
        return self.workspace.tokens < self.prompt.shape[1]


class Engine:
    """Serves requests from any thread on one of its own. `start` it, `submit`, and `shutdown` at the end."""

    def __init__(self, model: LoadedModel, cache: PrefixCache, *, max_running: int = 8, max_waiting: int = 256) -> None:
        if max_running < 1 or max_waiting < 1:
            raise ConfigError("an engine needs at least one place for running and one for waiting requests")
        self.model, self.cache = model, cache
        self.counts = EngineCounts()
        self._max_running, self._max_waiting = max_running, max_waiting
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[tuple[Request, Lease]] = deque()
        self._running: deque[_Running] = deque()  # whose turn it is to be prefilled stands first
        self._stopping = threading.Event()
        self._pending = 0  # submitted and not finished, whatever their state
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="kvarve engine", daemon=True)
        self._ended = False  # the thread takes no calls any more
        self.broken = ""  # why the engine cannot serve any more

    # --- from any thread

    def start(self) -> "Engine":
        self._thread.start()
        return self

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """ConfigError if this model can never answer such a request."""
        vocabulary = self.model.model.get_input_embeddings().num_embeddings
        if not prompt:
            raise ConfigError("the prompt is empty")
        if max(prompt) >= vocabulary or min(prompt) < 0:
            raise ConfigError(f"the prompt has a token id outside the model's vocabulary of {vocabulary}")
        if len(prompt) + sampling.max_tokens > self.model.max_tokens:
            raise ConfigError(
                f"the prompt's {len(prompt)} tokens and max_tokens {sampling.max_tokens} together are more than the "
                f"{self.model.max_tokens} that {self.model.name} can attend to"
            )

    def submit(self, request: Request) -> Request:
        """Queue a request. ConfigError if it can never be served, Busy if too many wait or the engine has stopped."""
        self.check(request.prompt, request.sampling)
        with self._lock:
            if self._stopping.is_set() or self._ended:
                raise Busy(self.broken or "the engine is shutting down")
            if self._pending >= self._max_running + self._max_waiting:
                raise Busy(f"{self._pending} requests are being served or wait already: try again later")
            self._pending += 1
            self._calls.put(lambda: self._enqueue(request))
        self.cache.wake()
        return request

    def abort(self, request: Request) -> None:
        """Nobody waits for this request any more; its last piece says so."""
        with self._lock:
            self._calls.put(lambda: self._abort(request))
        self.cache.wake()

    def flush(self, tiers: Sequence[Tier] = MEMORY_TIERS, timeout_s: float = 60.0) -> int:
        """Empty memory tiers of what no request holds, after the backups under way; storage stays.

        Returns how many pages went. Answers go on meanwhile; after `timeout_s` it goes ahead without the backups.
        """
        end = time.monotonic() + timeout_s
        gone = 0
        while True:
            self.settle(end - time.monotonic())
            pages, idle = self._ask(lambda: (self.cache.evict(tiers), self.cache.core.idle()), timeout_s)
            gone += int(pages)
            if idle or time.monotonic() >= end:  # write-back copies pages down before they go
                return gone

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until every backup has been written; False if that takes longer."""
        end = time.monotonic() + timeout_s
        while not self._ask(self.cache.core.idle, max(timeout_s, 1.0)):
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_S)
        return True

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop taking requests, end those that run, finish the backups and leave the storage whole."""
        with self._lock:
            self._stopping.set()
        self.cache.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():  # the cache is that thread's; what is in storage is whole at any time
            log.warning("the engine is still computing after %.0f s: left behind", timeout_s)
            return
        self.cache.shutdown(timeout_s)

    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return len(self._running), len(self._waiting)

    def _ask(self, what: Callable[[], Any], timeout_s: float) -> Any:
        """Have the engine's thread do something and wait for its answer."""
        answer: Future[Any] = Future()

        def call() -> None:
            try:
                answer.set_result(what())
            except Exception as e:  # noqa: BLE001  it belongs to the caller, who gets it from the future
                answer.set_exception(e)

        with self._lock:
            if self._ended:
                raise Busy(self.broken or "the engine has stopped")
            self._calls.put(call)
        self.cache.wake()
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise Busy(f"the engine did not get round to it within {timeout_s:.0f} s") from None

    # --- on the engine's thread

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._turn():
                    self.cache.wait(IDLE_S)
        except Exception as e:  # a bug of ours: say so to everybody who waits, rather than let them hang
            log.exception("the engine has stopped")
            with self._lock:
                self.broken = f"the engine has stopped: {type(e).__name__}: {e}"
        with self._lock:
            self._ended = True  # nothing is put on the list of calls any more
        finish, error = (Finish.ERROR, self.broken) if self.broken else (Finish.ABORT, "")
        self._take_calls()
        for run in [*self._running]:
            self._end(run, finish, error)
        for request, lease in [*self._waiting]:
            self._turn_away(request, lease, finish, error)

    def _take_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    def _turn(self) -> bool:
        """One turn; False if there was nothing to compute."""
        self.cache.step()  # first: it clears the alarm that a call rings, so a call after it is never slept through
        self._take_calls()
        self._admit()
        if not self._running:
            return False
        prompts = [run for run in self._running if run.prefilling]
        answers = [run for run in self._running if not run.prefilling]
        for run in [*prompts[:1], *answers]:
            try:
                self._chunk(run) if run.prefilling else self._token(run)
            except Exception as e:  # one request's trouble (memory, a broken kernel) is not the others'
                log.exception("request %d", run.request.number)
                self._end(run, Finish.ERROR, f"{type(e).__name__}: {e}")
        return True

    def _enqueue(self, request: Request) -> None:
        if self._ended:
            finish = Finish.ERROR if self.broken else Finish.ABORT
            self._finish(request, Piece("", (), finish, Usage(len(request.prompt), 0, 0, 0, 0), self.broken))
            return
        try:
            lease = self.cache.open(request.prompt, request.salt, request.read_cache)
        except Exception as e:  # a bug of ours ends the engine below; who is in no list yet is told here
            usage = Usage(len(request.prompt), 0, 0, 0, 0)
            self._finish(request, Piece("", (), Finish.ERROR, usage, f"{type(e).__name__}: {e}"))
            raise
        self._waiting.append((request, lease))

    def _admit(self) -> None:
        """Give free places to waiting requests, first come first served; who still waits for storage is passed by.

        A request takes its pages to the device when it is claimed, so no more are claimed than there are places, and
        those behind them find what the ones before have computed.
        """
        claimed = [lease for _, lease in self._waiting if lease.claimed]
        fetching = sum(not lease.on_device for lease in claimed)
        places = self._max_running - len(self._running) - (len(claimed) - fetching)
        for request, lease in [*self._waiting]:
            if not lease.claimed:
                if places <= 0 or (lease.phase is not Phase.QUEUED and fetching >= self._max_running):
                    continue
                self.cache.claim(lease)
                places -= lease.on_device
                fetching += not lease.on_device
            if not lease.ready or len(self._running) >= self._max_running:
                continue
            self._waiting.remove((request, lease))
            try:
                self._running.append(self._resume(request, lease))
            except Exception as e:  # no memory for its state, say
                log.exception("request %d", request.number)
                self._turn_away(request, lease, Finish.ERROR, f"{type(e).__name__}: {e}", queued=False)

    def _resume(self, request: Request, lease: Lease) -> _Running:
        """Copy the pages that the lease found into a state of the request's own."""
        room = len(request.prompt) + request.sampling.max_tokens
        workspace = resumed(self.cache, lease, self.model.layout, room, self.model.model.device)
        return _Running(request, lease, workspace, self.model)

    def _chunk(self, run: _Running) -> None:
        """Compute up to the next line of the grid, and keep the pages if the chunk was a whole one."""
        chunk = self.model.layout.chunk_tokens
        start, whole = run.workspace.tokens, run.prompt.shape[1]
        stop = min(whole, (start // chunk + 1) * chunk)
        run.logits = forward(self.model.model, run.workspace, run.prompt[:, start:stop])
        self.counts.computed_tokens += stop - start
        self._running.remove(run)
        self._running.append(run)
        keep(self.cache, run.lease, run.workspace)
        if stop == whole:
            self.counts.ttft_s.observe(time.monotonic() - run.request.submitted_s)
            self._say(run)

    def _token(self, run: _Running) -> None:
        """Compute the token that was said last, and say the next."""
        last = torch.tensor([[run.tokens[-1]]], device=run.workspace.device)
        run.logits = forward(self.model.model, run.workspace, last)
        self._say(run)

    def _say(self, run: _Running) -> None:
        """Choose the next token and deliver what is certain of the text."""
        assert run.logits is not None
        sampling = run.request.sampling
        token = choose(run.logits, sampling, run.random)
        run.tokens.append(token)
        self.counts.output_tokens += 1
        if token in self.model.eos_ids and not sampling.ignore_eos:
            self._end(run, Finish.STOP, last=(token,))
            return
        run.text += run.words.push(token)
        if (cut := _find_stop(run.text, sampling.stop)) is not None:
            run.text = run.text[:cut]
            self._end(run, Finish.STOP, last=(token,), flush=False)
        elif len(run.tokens) >= sampling.max_tokens:
            self._end(run, Finish.LENGTH, last=(token,))
        else:
            held = _held_back(run.text, sampling.stop)
            text, run.text = run.text[: len(run.text) - held], run.text[len(run.text) - held :]
            self._give(run.request, Piece(text, (token,)))

    def _end(
        self, run: _Running, finish: Finish, error: str = "", last: tuple[int, ...] = (), flush: bool = True
    ) -> None:
        if flush:
            run.text += run.words.flush()
            if (cut := _find_stop(run.text, run.request.sampling.stop)) is not None:
                run.text = run.text[:cut]
        self._running.remove(run)
        page = self.model.layout.page_tokens
        usage = Usage(len(run.request.prompt), len(run.tokens), *(n * page for n in run.lease.from_tiers()))
        self._close(run.lease)
        self.counts.prompt_tokens += usage.prompt
        self.counts.cached_device += usage.device
        self.counts.cached_host += usage.host
        self.counts.cached_storage += usage.storage
        self._finish(run.request, Piece(run.text, last, finish, usage, error))

    def _turn_away(self, request: Request, lease: Lease, finish: Finish, error: str = "", queued: bool = True) -> None:
        if queued:
            self._waiting.remove((request, lease))
        self._close(lease)
        self._finish(request, Piece("", (), finish, Usage(len(request.prompt), 0, 0, 0, 0), error))

    def _close(self, lease: Lease) -> None:
        if not self.broken:  # else the cache is in an unknown state, and everybody still gets a last piece
            self.cache.close(lease)

    def _finish(self, request: Request, piece: Piece) -> None:
        self.counts.finished += 1
        self.counts.failed += piece.finish is Finish.ERROR
        self.counts.aborted += piece.finish is Finish.ABORT
        with self._lock:
            self._pending -= 1
        self._give(request, piece)

    def _give(self, request: Request, piece: Piece) -> None:
        try:
            request.give(piece)
        except Exception:  # whoever listens is gone or broken (a closed event loop, say): that is no trouble of ours
            log.exception("request %d: nobody takes its answer", request.number)

    def _abort(self, request: Request) -> None:
        for run in [run for run in self._running if run.request is request]:
            self._end(run, Finish.ABORT)
        for waiting, lease in [entry for entry in self._waiting if entry[0] is request]:
            self._turn_away(waiting, lease, Finish.ABORT)


def choose(logits: Tensor, sampling: Sampling, random: torch.Generator | None) -> int:
    """The next token from logits [vocabulary]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.double().cpu()
    # The best token at 0, so that no temperature however small makes an infinity of the others.
    chances = torch.softmax((logits - logits.max()) / sampling.temperature, -1)
    if sampling.top_p < 1:
        ordered, index = chances.sort(descending=True)
        # A token stays if those before it do not reach top_p yet; so at least one does.
        ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0
        chances = torch.zeros_like(chances).scatter_(0, index, ordered)
    return int(torch.multinomial(chances, 1, generator=random))


def _find_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the first stop text begins, if there is one."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end could be the beginning of a stop text."""
    longest = 0
    for stop in stops:
        for length in range(1, min(len(stop), len(text) + 1)):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
    return longest
