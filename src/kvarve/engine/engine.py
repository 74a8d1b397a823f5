"""The reference engine: one thread that computes prompts on a fixed grid of chunks and answers many at once.

A turn is: take in what has ended and who has come or gone, start who is ready, one token for every answer in a single
forward, then a chunk each for as many prompts as a budget of tokens allows. Prompts take turns, so a long one delays
nobody by more than a chunk. How many run is up to memory: where there is no room for one more page, who came last gives
way, and later goes on from what is kept of it. A deterministic engine computes answers one by one and keeps only what
prompts have computed, so that an answer depends, to the last bit, on its prompt alone.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from kvarve.core.lease import Lease, Phase
from kvarve.engine.batch import Batch, batches
from kvarve.engine.job import Job, find_stop, held_back
from kvarve.engine.model import LoadedModel, forward
from kvarve.engine.paging import PagedWorkspace
from kvarve.engine.requests import Finish, Likelihood, Piece, Request, Sampling, Usage, check_prompt, check_tokens
from kvarve.engine.sampling import choose, likelihood
from kvarve.engine.scheduler import Line, within
from kvarve.errors import Busy, ConfigError
from kvarve.metrics import Histogram
from kvarve.model import MEMORY_TIERS, Tier
from kvarve.runtime import PrefixCache

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.005  # between two looks at whether backups have been written
IDLE_S = 0.2  # how long a turn without work sleeps at most; whatever happens wakes it
TURN_TOKENS = 512  # of answers and prompts together
CLAIMED_AHEAD = 4  # so many requests hold pages on the device before they run
STALL_S = 60.0  # how long a request waits for room that a copy holds which does not end


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
    preempted: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)


class Engine:
    """Serves requests from any thread on one of its own. `start` it, `submit`, and `shutdown` at the end."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PrefixCache,
        *,
        max_running: int = 64,
        max_waiting: int = 256,
        turn_tokens: int = TURN_TOKENS,
        deterministic: bool = False,
    ) -> None:
        """`turn_tokens`: what a turn computes at most, answers first, but at least one chunk of a prompt that waits."""
        if max_running < 1 or max_waiting < 1:
            raise ConfigError("an engine needs at least one place for running and one for waiting requests")
        if turn_tokens < 1:
            raise ConfigError(f"a turn computes at least one token, not {turn_tokens}")
        self.model, self.cache, self.deterministic = model, cache, deterministic
        self.counts = EngineCounts()
        self._turn_tokens = turn_tokens
        self.batches = not deterministic and batches(model.model, model.layout)
        self._batch: Batch | None = None  # the last one, for as long as the same requests answer
        self._crowded = False  # there was no room for all: nobody begins before somebody has ended
        self._first: Job | None = None  # who found no room though nobody runs: nobody is claimed before it has begun
        self._began = 0
        self._max_running, self._max_waiting = max_running, max_waiting
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: Line[Job] = Line()
        self._running: deque[Job] = deque()  # whose turn it is to be prefilled stands first
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

    def check(self, prompt: Sequence[int], *samplings: Sampling) -> None:
        """ConfigError if this model can never answer such a request, or one of several with the same prompt."""
        vocabulary = self.model.model.get_input_embeddings().num_embeddings
        check_prompt(prompt, vocabulary)
        room = self.cache.room_tokens()
        for sampling in samplings:
            check_tokens(sampling, vocabulary)
            if len(prompt) + sampling.max_tokens > self.model.max_tokens:
                raise ConfigError(
                    f"the prompt's {len(prompt)} tokens and max_tokens {sampling.max_tokens} together are more than "
                    f"the {self.model.max_tokens} that {self.model.name} can attend to"
                )
            if len(prompt) + sampling.max_tokens - 1 > room:
                raise ConfigError(
                    f"the prompt's {len(prompt)} tokens and max_tokens {sampling.max_tokens} together are more than "
                    f"the {room} for which there is device memory"
                )

    def places_left(self) -> int:
        """How many more requests `submit` would take now."""
        return self._max_running + self._max_waiting - self._pending

    def submit(self, request: Request, *more: Request) -> Request:
        """Queue a request, or several: all of them or none. Returns the first.

        ConfigError if one can never be served, Busy if too many wait or the engine has stopped.
        """
        requests, places = (request, *more), self._max_running + self._max_waiting
        for prompt in {id(one.prompt): one.prompt for one in requests}.values():  # several answers share one prompt
            self.check(prompt, *(one.sampling for one in requests if one.prompt is prompt))
        for one in requests:
            one.check()
        if len(requests) > places:
            raise ConfigError(f"{len(requests)} requests at once are more than the {places} for which there are places")
        with self._lock:
            if self._stopping.is_set() or self._ended:
                raise Busy(self.broken or "the engine is shutting down")
            if self._pending + len(requests) > places:
                raise Busy(f"{self._pending} requests are being served or wait already: try again later")
            self._pending += len(requests)
            for one in requests:
                self._calls.put(lambda one=one: self._enqueue(one))  # type: ignore[misc]
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
            pages, idle = self.ask(lambda: (self.cache.evict(tiers), self.cache.core.idle()), timeout_s)
            gone += int(pages)
            if idle or time.monotonic() >= end:  # write-back copies pages down before they go
                return gone

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until every backup has been written; False if that takes longer."""
        end = time.monotonic() + timeout_s
        while not self.ask(self.cache.core.idle, max(timeout_s, 1.0)):
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

    def ask(self, what: Callable[[], T], timeout_s: float) -> T:
        """Have the engine's thread do something and wait for its answer. Busy: it was not done, and will not be."""
        answer: Future[T] = Future()

        def call() -> None:
            if not answer.set_running_or_notify_cancel():
                return
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
            if not answer.cancel():  # it is being done at this moment
                return answer.result()
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
        for job in [*self._running, *self._waiting]:
            self._end(job, finish, error)

    def _take_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    def _turn(self) -> bool:
        """One turn; False if there was nothing to compute."""
        self.cache.step()  # first: it clears the alarm that a call rings, so a call after it is never slept through
        self._take_calls()
        self._admit()
        answers = self._seated([job for job in self._running if not job.prefilling])
        together = [job for job in answers if not job.alone] if self.batches else []
        if len(together) > 1:
            self._tokens(together)
        else:
            together, self._batch = [], None
        for job in answers:
            if job not in together:
                self._guarded(job, self._token)
        prompts = [(job, self._next_line(job) - job.state.tokens) for job in self._running if job.prefilling]
        chunks = [*within(self._turn_tokens - len(answers), prompts)]
        for job in chunks:
            self._guarded(job, self._chunk)
        return bool(answers or chunks)

    def _guarded(self, job: Job, compute: Callable[[Job], None]) -> None:
        try:
            compute(job)
        except Exception as e:  # one request's trouble (memory, a broken kernel) is not the others'
            log.exception("request %d", job.request.number)
            self._end(job, Finish.ERROR, f"{type(e).__name__}: {e}")

    # --- beginning

    def _enqueue(self, request: Request) -> None:
        if self._ended:
            finish = Finish.ERROR if self.broken else Finish.ABORT
            self._finish(request, Piece("", (), finish, Usage(len(request.prompt), 0, 0, 0, 0), self.broken))
            return
        try:
            lease = self._open(request, request.prompt)
        except Exception as e:  # a bug of ours ends the engine below; who is in no list yet is told here
            usage = Usage(len(request.prompt), 0, 0, 0, 0)
            self._finish(request, Piece("", (), Finish.ERROR, usage, f"{type(e).__name__}: {e}"))
            raise
        self._waiting.join(Job(request, lease, self.model))

    def _open(self, request: Request, tokens: Sequence[int]) -> Lease:
        return self.cache.open(tokens, request.salt, request.read_cache, request.priority)

    def _admit(self) -> None:
        """Let waiting requests begin, as far as there is room; who still waits for storage is passed by.

        A request takes its pages to the device when it is claimed, so few are claimed before they can begin, and those
        behind them find what the ones before have computed.
        """
        if self._crowded and self._running:
            return
        self._crowded = False
        if self._first is not None and not self._begin(self._first):
            return
        claimed = [job for job in self._waiting if job.lease.claimed]
        held = False  # somebody further ahead in line has pages and will begin soon
        fetching = sum(not job.lease.on_device for job in claimed)
        ahead = len(claimed) - fetching
        for job in self._waiting.order(self._in_memory) if claimed or len(self._running) < self._max_running else ():
            lease = job.lease
            if not lease.claimed:
                if ahead >= min(CLAIMED_AHEAD, self._max_running - len(self._running)):
                    continue
                if lease.phase is not Phase.QUEUED and fetching >= self._max_running:
                    continue
                if self._is_being_computed(job):
                    continue
                self.cache.claim(lease)
                ahead += lease.on_device
                fetching += not lease.on_device
            if not lease.ready or len(self._running) >= self._max_running:
                held = held or lease.on_device
                continue
            if not self._begin(job, held):
                return  # nobody goes before it
            ahead -= 1

    def _in_memory(self, job: Job) -> int:
        """How many pages a waiting request would find."""
        if not job.request.read_cache:
            return 0
        return max(job.lease.promised, self.cache.core.lookup(job.lease.root, job.lease.tokens).memory)

    def _is_being_computed(self, job: Job) -> bool:
        """Whether somebody else computes more of a waiting request's prefix than it would find now.

        It ends when that one has come so far, or goes away; so nobody waits for ever.
        """
        core, found = self.cache.core, self._in_memory(job)
        others = [other for other in self._running if other.prefilling]
        others += [other for other in self._waiting if other.lease.claimed]
        for other in others:
            parting = core.parting(other.lease, job.lease)
            if parting > found and (not other.lease.ready or core.mark(other.lease, parting)):
                return True
        return False

    def _begin(self, job: Job, held: bool = False) -> bool:
        """Let a request whose pages are on the device run; False if there is no room for its prompt now. `held`:
        somebody before it in line holds pages and will begin soon."""
        if not self._room(job, held):
            return False
        self._first = None
        try:
            most = len(job.request.prompt) + job.request.sampling.max_tokens
            job.workspace = PagedWorkspace.resumed(self.cache, job.lease, self.model.layout, most)
        except Exception as e:  # no memory for its state, say
            log.exception("request %d", job.request.number)
            self._end(job, Finish.ERROR, f"{type(e).__name__}: {e}")
            return True
        if not job.began:
            job.found = job.lease.from_tiers()
        self._began += 1
        job.began, job.stalled_s = self._began, None
        self._waiting.go(job)
        self._running.append(job)
        return True

    # --- room

    def _room(self, job: Job, held: bool) -> bool:
        """Take room for the prompt of a request that is about to begin; False if there is none now."""
        pages = job.goal // self.model.layout.page_tokens + 1
        if self.cache.seat(job.lease, pages):
            return True
        if self._running or held:  # they will make room; until then it lets go of what it holds itself
            self._crowded = True
            self._renew(job)
            return False
        # Nobody else will make room: those behind it give back what they hold, and take nothing before it has begun.
        self._first = job
        for other in self._waiting:
            if other is not job and (other.lease.on_device or other.lease.holds):
                self._renew(other)
        if self.cache.seat(job.lease, pages):
            return True
        now = time.monotonic()
        job.stalled_s = now if job.stalled_s is None else job.stalled_s
        if now - job.stalled_s > STALL_S:
            self._end(job, Finish.ERROR, "a copy that does not end holds the device memory that this request needs")
        return False

    def _renew(self, job: Job) -> None:
        """Begin to wait again. What has been said is part of the prompt then, unless every bit counts, or the model's
        code wants every token as it was: then it is said to it again, token by token."""
        self.cache.close(job.lease)
        if self.batches:
            job.goal = job.length
        job.leased = job.goal
        job.lease = self._open(job.request, job.sequence(0, job.goal))

    def _seated(self, answers: list[Job]) -> list[Job]:
        """Those who have room for one more token, after others have given way."""
        for job in sorted(answers, key=lambda job: job.began):
            if job.workspace is not None:
                self._seat(job)
        return [job for job in answers if job.workspace is not None and job.state.seated(job.state.tokens + 1)]

    def _seat(self, job: Job) -> None:
        page, state = self.model.layout.page_tokens, job.state
        while not state.seated(state.tokens + 1):
            if self.cache.seat(job.lease, state.tokens // page + 1):
                state.take_seats(self.cache, job.lease, state.tokens // page)
                job.stalled_s = None
                return
            job.stalled_s = time.monotonic() if job.stalled_s is None else job.stalled_s
            if self.cache.core.backups.leaving() and time.monotonic() - job.stalled_s < STALL_S:
                return  # room is on its way
            if self._give_way() is job:
                return

    def _give_way(self) -> Job:
        """Who began last, or is about to, gives its room back and waits."""
        self._crowded = True
        for job in self._waiting:
            if job.lease.on_device:
                self._renew(job)
                return job
        job = max(self._running, key=lambda job: job.began)
        self._preempt(job)
        return job

    def _preempt(self, job: Job) -> None:
        self._running.remove(job)
        job.workspace = self._batch = None
        self.counts.preempted += 1
        self._renew(job)
        self._waiting.rejoin(job)

    # --- computing

    def _next_line(self, job: Job) -> int:
        """Where the next chunk of a prompt ends."""
        chunk = self.model.layout.chunk_tokens
        return min(job.goal, (job.state.tokens // chunk + 1) * chunk)

    def _chunk(self, job: Job) -> None:
        """Compute up to the next line of the grid, and keep the pages if the chunk was a whole one."""
        state, start, stop = job.state, job.state.tokens, self._next_line(job)
        ids = torch.tensor([job.sequence(start, stop)], device=state.device)
        logits = forward(self.model.model, state, ids)
        self.counts.computed_tokens += stop - start
        self._running.remove(job)
        self._running.append(job)
        state.keep(self.cache, job.lease)
        if stop == job.length:
            if not job.tokens:
                self.counts.ttft_s.observe(time.monotonic() - job.request.submitted_s)
            self._say(job, logits)

    def _token(self, job: Job) -> None:
        """Compute one token that was said, and say the next."""
        at = job.state.tokens
        logits = forward(self.model.model, job.state, torch.tensor([job.sequence(at, at + 1)], device=job.state.device))
        self._computed(job, logits)

    def _tokens(self, jobs: list[Job]) -> None:
        """The same for many at once."""
        states = tuple(job.state for job in jobs)
        if self._batch is None or self._batch.workspaces != states:
            self._batch = None  # or its tensors would be there twice
            self._batch = Batch(states)
        ids = [job.sequence(job.state.tokens, job.state.tokens + 1)[0] for job in jobs]
        try:
            logits = self._batch.forward(self.model.model, ids)
        except Exception:  # whose trouble it is shows when each is computed alone, from what is kept of it
            log.exception("a batch of %d requests", len(jobs))
            for job in sorted(jobs, key=lambda job: job.began, reverse=True):
                job.alone = True
                self._preempt(job)
            return
        for job, row in zip(jobs, logits, strict=True):
            self._guarded(job, lambda job, row=row: self._computed(job, row))  # type: ignore[misc]

    def _computed(self, job: Job, logits: Tensor) -> None:
        state = job.state
        if not self.deterministic and state.tokens % self.model.layout.chunk_tokens == 0:
            self.cache.extend(job.lease, job.sequence(job.leased, state.tokens))
            job.leased = state.tokens
            state.keep(self.cache, job.lease)
        if state.tokens == job.length:  # else it says again what it had said before it gave way
            self._say(job, logits)

    def _say(self, job: Job, logits: Tensor) -> None:
        """Choose the next token and deliver what is certain of the text."""
        sampling = job.request.sampling
        if job.request.watch is not None:
            job.request.watch(logits)
        token = choose(logits, sampling, job.random, job.heard, job.tokens, job.ends)
        asked = sampling.logprobs
        likely = () if asked is None else (likelihood(logits, token, asked, job.characters),)
        job.tokens.append(token)
        self.counts.output_tokens += 1
        if token in job.ends:
            self._end(job, Finish.STOP, last=(token,), likely=likely)
            return
        text = job.words.push(token)
        job.text += text
        job.characters += len(text)
        if (cut := find_stop(job.text, job.stops)) is not None:
            job.text = job.text[:cut]
            self._end(job, Finish.STOP, last=(token,), likely=likely, flush=False)
        elif len(job.tokens) >= sampling.max_tokens:
            self._end(job, Finish.LENGTH, last=(token,), likely=likely)
        else:
            held = held_back(job.text, job.stops)
            text, job.text = job.text[: len(job.text) - held], job.text[len(job.text) - held :]
            self._give(job.request, Piece(text, (token,), likelihoods=likely))

    def _end(
        self,
        job: Job,
        finish: Finish,
        error: str = "",
        last: tuple[int, ...] = (),
        likely: tuple[Likelihood, ...] = (),
        flush: bool = True,
    ) -> None:
        if flush:
            job.text += job.words.flush()
            if (cut := find_stop(job.text, job.stops)) is not None:
                job.text = job.text[:cut]
        if job.workspace is None or job not in self._running:
            self._waiting.leave(job)
        else:
            self._running.remove(job)
            self._crowded = False
        job.workspace = None
        if self._first is job:
            self._first = None
        if not self._running:
            self._batch = None
        page = self.model.layout.page_tokens
        usage = Usage(len(job.request.prompt), len(job.tokens), *(n * page for n in job.found))
        self._close(job.lease)
        if job.began:
            self.counts.prompt_tokens += usage.prompt
            self.counts.cached_device += usage.device
            self.counts.cached_host += usage.host
            self.counts.cached_storage += usage.storage
        self._finish(job.request, Piece(job.text, last, finish, usage, error, likely))

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
        for job in [job for job in (*self._running, *self._waiting) if job.request is request]:
            self._end(job, Finish.ABORT)
