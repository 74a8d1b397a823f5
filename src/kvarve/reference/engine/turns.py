"""What the engine's own thread does in a turn. What other threads may call is in `engine.py`.

A turn: take in ended copies, new and aborted requests, admit requests (`request_scheduler.py`), decode one token for
each answer, in as few forwards as their lengths allow, then prefill as many prompts as a budget of tokens allows: whole
chunks alone, the tails after them together. Prompts take turns, so a long one delays no answer by more than a chunk. An
engine that is `exact` keeps only pages from prefill, and computes answers again while nothing else is to be done
(`answers_again.py`); others keep those from decoding as well. A deterministic one computes every request alone, so that
an answer depends, to the last bit, on its prompt alone.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvarve.cache.prefix_cache import PrefixCache, bugs_as_broken, is_bug
from kvarve.cache.scheduler import Prompt
from kvarve.core.lease import Lease
from kvarve.pages.ticket import Ticket
from kvarve.reference.engine.answers_again import Again, AnswersAgain
from kvarve.reference.engine.batch import Batch, Together, by_length, spare_tokens, together
from kvarve.reference.engine.inputs import Input, decode, encode
from kvarve.reference.engine.job import EngineCounts, Job, find_stop, held_back
from kvarve.reference.engine.model import LoadedModel, forward
from kvarve.reference.engine.paging import GROW_WAIT_S, PagedWorkspace, room_comes
from kvarve.reference.engine.request_scheduler import Scheduler, within
from kvarve.reference.engine.requests import Finish, Likelihood, OutputChunk, Request, Sampling, TokenUsage
from kvarve.reference.engine.sampling import choose_all, likelihood

log = logging.getLogger(__name__)


class Call(NamedTuple):
    """What another thread asks for: `run` does it here, and `order` has the other ranks do the same."""

    order: Input | None
    run: Callable[[], object]
    begins: Callable[[], bool] = lambda: True  # False if it is not asked for any more
    due: Callable[[], bool] = lambda: True  # until then it waits for a later turn


class Turns:
    """Computes accepted requests turn by turn, until each has had its last output."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PrefixCache,
        *,
        max_running: int,
        turn_tokens: int,
        deterministic: bool,
        exact: bool,
    ) -> None:
        self.model, self.cache, self.deterministic = model, cache, deterministic
        self._exact = exact or deterministic
        self._answers = AnswersAgain(model.layout.grid_tokens, cache.scheduler.prompt) if exact else None
        self._again: tuple[Again, Job] | None = None  # the answer that is computed again
        if cache.identity.ranks == 1:
            cache.worker.transfers.layerwise = True  # of several ranks none knows which layers have come on the others
        self.counts = EngineCounts()
        self.turn_tokens = turn_tokens
        self.together = Together() if deterministic else together(model.model, model.layout)
        self._spare = spare_tokens(model.model, model.layout, self.together.apart)
        self._batches: dict[tuple[PagedWorkspace, ...], Batch] = {}  # of the last turn
        self.scheduler: Scheduler[Job] = Scheduler(
            cache,
            cache.scheduler,
            max_running=max_running,
            page_tokens=model.layout.page_tokens,
            chunk_tokens=model.layout.chunk_tokens,
            reopen=self._reopen_lease,
            begin=lambda job: self._guarded(job, self._resume),
            stop=self._stop,
            fail=lambda job, why: self._end(job, Finish.ERROR, why),
            clock=self._now,
        )
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()  # what other threads ask for
        self._not_due: list[Call] = []  # until they are due
        self._taken: list[Call] = []  # for this turn
        self._accepted: dict[int, Request] = {}  # by number, until its last output
        self._jobs: dict[int, Job] = {}  # by number: the accepted requests that the engine's thread has seen
        self._lock = threading.Lock()
        self._last = False  # this turn is the last one
        self._ended = False  # the thread runs no more calls

    def _now(self) -> float:
        """The time of this turn, on all ranks the same."""
        return self.cache.scheduler.now

    def _take_calls(self) -> bytes:
        """Take what was asked for until now; the inputs among it, for the other ranks."""
        calls, self._not_due, inputs = self._not_due, [], list[Input]()
        while not self._calls.empty():
            calls.append(self._calls.get())
        for call in calls:
            if not (self._ended or call.due()):
                self._not_due.append(call)
            elif call.begins():
                self._taken.append(call)
                inputs += () if call.order is None else (call.order,)
        return encode(inputs) if self.cache.identity.ranks > 1 else b""

    def _run_calls(self, said: bytes) -> None:
        """Do what was asked for; on any rank but the first, what rank 0 says."""
        while self._taken:
            self._taken.pop(0).run()
        for order in decode(said) if self.cache.rank else ():
            self._do(order)

    def _do(self, order: Input) -> None:
        """Carry out an input of another rank's."""
        raise NotImplementedError

    def _turn(self) -> bool:
        """One turn; False if there was nothing to compute."""
        # First: it clears the wake-up flag, so a call that sets it later is not slept through.
        self._run_calls(self.cache.step(self._take_calls))
        if self._last:
            return False
        before = self.counts.computed_tokens + self.counts.output_tokens
        self._compute_again()
        self.scheduler.admit()
        answers = self._decodable()
        self._compute(answers, self._group([job for job in answers if self.together.answers and not job.alone]))
        prompts = [job for job in self.scheduler.running if job.prefilling and not self._is_short(job)]
        here = [job for job in prompts if job.workspace is None or not job.workspace.arriving]
        if answers or here:  # else there is nothing to compute while pages are copied but the layers that have come
            prompts = here
        left = self.turn_tokens - len(answers)
        pieces = [*within(left, [(job, self._chunk_end(job) - job.computed) for job in prompts])]
        tails = [job for job in pieces if self._is_tail(job)]
        shapes = [(job.computed, self._chunk_end(job) - job.computed) for job in tails]
        began_s = time.monotonic()
        again = self._again is not None
        self._compute(pieces, [[tails[at] for at in group] for group in self.together.groups(shapes)])
        if pieces and not again:
            self.counts.prefill_compute_s += time.monotonic() - began_s
        if computed := self.counts.computed_tokens + self.counts.output_tokens - before:
            self.counts.turn_tokens.observe(computed)
        return bool(answers or pieces)

    def _guarded(self, job: Job, compute: Callable[..., None], *given: object) -> None:
        if job.workspace is None and compute != self._resume:
            return  # it has ended or was preempted in this very turn
        try:
            compute(job, *given)
        except Exception as e:  # one request's error (memory, a broken kernel) is not the others'
            if is_bug(e):
                raise
            log.exception("request %d", job.request.number)
            self._end(job, Finish.ERROR, f"{type(e).__name__}: {e}")

    # --- answers again

    def _compute_again(self) -> None:
        """Have an answer computed again if there is nothing else to do, and else none."""
        jobs = len(self.scheduler.waiting) + len(self.scheduler.loading) + len(self.scheduler.running)
        if self._again is not None:
            if jobs > 1:  # a request that was preempted, say
                self._end_again(back=True)
        elif not jobs and (again := self._next_again()) is not None:
            lease = self.cache.open(again.prepared, priority=again.priority, again=True)
            try:
                request = Request(again.ids, Sampling(1), again.salt, again.priority, number=0)
                job = Job(request, again.prepared, lease, self.model)
            except Exception:  # no request's error (memory, say): it is left
                log.exception("an answer is not computed again")
                self.cache.close(lease)
                return
            job.queued_s = 0.0  # no request has begun
            self._again = again, job
            self.scheduler.join(job)

    def _next_again(self) -> Again | None:
        """The last answer whose prompt is still in memory, and which is not: of others little would be a hit."""
        while self._answers:
            again = self._answers.take()
            found = self.cache.lookup(again.continued).memory * self.model.layout.page_tokens
            if again.known <= found < again.tokens:
                return again
        return None

    def at_rest(self) -> bool:
        """Whether no answer is to be computed again."""
        return self._again is None and not self._answers

    def _is_again(self, job: Job) -> bool:
        return self._again is not None and self._again[1] is job

    def _end_again(self, back: bool = False) -> None:
        """It has been computed, or has to go `back` and wait; the chunks that were computed stay."""
        assert self._again is not None and self._answers is not None
        (again, job), self._again = self._again, None
        self.scheduler.leave(job)
        job.workspace = None
        self.cache.close(job.lease)
        if back:
            self._answers.put_back(again)

    def _forget_answers(self) -> None:
        """Memory is flushed: nothing is to come back to it by itself."""
        if self._answers is not None:
            self._answers.clear()
            if self._again is not None:
                self._end_again()

    # --- starting and stopping requests

    def _enqueue(self, request: Request, prompt: Prompt) -> None:
        if self._ended:
            return  # `_notify_all` tells it
        if self._again is not None:  # it may be of this very prompt, which then computes it
            self._end_again(back=True)
        answer = 0 if self._answers is None else self._answers.comes(prompt)
        first = None if request.sample_of is None else self._jobs.get(request.sample_of)
        lease = self.cache.open(
            prompt,
            read=request.read_cache,
            priority=request.priority,
            ticket=request.ticket,
            unix_s=request.submitted_unix_s,
            again=first is not None,
        )
        try:
            job = Job(request, prompt, lease, self.model, first)
        except Exception as e:  # one request's error (memory, say) is not the others'
            log.exception("request %d", request.number)
            self.cache.close(lease)
            usage = TokenUsage.of(len(request.prompt), 0, None)
            self._finish(request, OutputChunk("", (), Finish.ERROR, usage, f"{type(e).__name__}: {e}"))
            return
        job.answer = answer
        self._jobs[request.number] = job
        self.scheduler.join(job)

    def _reopen_lease(self, job: Job) -> Lease:
        """A new lease for a request that waits again. The answer so far is prefilled like the prompt, except in an
        engine that computes rows alone: there it is replayed token by token, which gives the same bits."""
        request = job.request
        if self.together.answers:
            job.prefill_until = job.length
        job.leased_tokens = job.prefill_until
        prompt = job.packed
        if job.prefill_until > job.prompt:
            prompt = self.cache.scheduler.prompt(job.sequence(0, job.prefill_until), request.salt)
        return self.cache.open(prompt, read=request.read_cache, priority=request.priority, again=job.lease.counted)

    def _resume(self, job: Job) -> None:
        self.model.require_same()
        tokens = job.prompt + job.max_new_tokens
        with bugs_as_broken(assertions=True):
            job.workspace = PagedWorkspace.resumed(self.cache, job.lease, self.model.layout, tokens)
        if job.queued_s is None:
            if not job.reasons:
                job.explained(self.cache.scheduler.core.explain(job.lease))
                job.counts_prompt = True
            self.counts.began(job, time.monotonic())

    def _stop(self, job: Job) -> None:
        self.counts.preempted += 1
        job.workspace = None

    def _decodable(self) -> list[Job]:
        """The decoding requests with slots for one more token, after younger ones were preempted if need be."""
        answers = [job for job in self.scheduler.running if not job.prefilling]
        found = []
        for job in sorted(answers, key=lambda job: job.admitted_seq):
            if job.workspace is not None and self.scheduler.reserved(job):
                found.append(job)
        for job in found:
            if job.workspace is not None:  # else it was preempted for another
                self._guarded(job, self._take_seats)
        return [job for job in found if job.workspace is not None]

    def _take_seats(self, job: Job) -> None:
        if not job.state.reserved(job.computed + 1):
            with bugs_as_broken(assertions=True):
                job.state.take_seats(self.cache, job.lease, job.computed // self.model.layout.page_tokens)

    # --- computing

    def _chunk_end(self, job: Job) -> int:
        """Where the next chunk of a prompt ends."""
        return self.model.layout.chunk_end(job.computed, job.prefill_until, job.lease.snapshots)

    def _is_tail(self, job: Job) -> bool:
        """Whether its next chunk does not end at a line of the grid, so that none of it will be published."""
        return not job.alone and self._chunk_end(job) % self.model.layout.grid_tokens != 0

    def _is_short(self, job: Job) -> bool:
        """Whether its next chunk should wait a moment for evictions that free slots for its pages."""
        if not room_comes(self.cache, job.lease, self.model.layout, self._chunk_end(job)):
            job.short_s = None
            return False
        now = self._now()
        job.short_s = now if job.short_s is None else job.short_s
        return now - job.short_s < GROW_WAIT_S

    def _keep(self, job: Job) -> None:
        """Publish pages at a line of the grid; ModelError if the model was changed."""
        if job.computed % self.model.layout.grid_tokens == 0:
            self.model.require_same()
            with bugs_as_broken(assertions=True):
                job.state.keep(self.cache, job.lease)

    def _group(self, jobs: list[Job]) -> list[list[Job]]:
        """Requests that are decoded together; a job that is in no group is decoded alone."""
        jobs = sorted(jobs, key=lambda job: (job.computed, job.admitted_seq))
        groups = [jobs] if jobs else []
        if not self.together.apart:
            groups = [[jobs[at] for at in group] for group in by_length([job.computed for job in jobs], self._spare)]
        batches, self._batches = self._batches, {}
        for group in groups:
            states = tuple(job.state for job in group)
            if len(group) > 1 and states in batches:
                self._batches[states] = batches.pop(states)
        batches.clear()  # before new ones are made, or both would take memory
        for group in groups:
            for job in group if len(group) == 1 else ():
                self._guarded(job, lambda job: job.state.own())
        return [group for group in groups if len(group) > 1]

    def _compute(self, jobs: list[Job], groups: list[list[Job]]) -> None:
        """Compute the next chunk of each: of each of these groups in one forward, of the others alone."""
        grouped = {id(job) for group in groups for job in group}
        for group in groups:
            self._compute_together(group)
        for job in jobs:
            if id(job) not in grouped:
                self._guarded(job, self._compute_alone)

    def _chunk(self, job: Job) -> list[int]:
        """The next chunk: tokens of its prompt, or one of its answer."""
        return job.sequence(job.computed, self._chunk_end(job) if job.prefilling else job.computed + 1)

    def _compute_alone(self, job: Job) -> None:
        ids, prefilling = self._chunk(job), job.prefilling
        logits = forward(self.model.model, job.state, torch.tensor([ids], device=job.state.device))
        self._computed(job, len(ids), prefilling)
        self._sample([job], logits[None])

    def _compute_together(self, jobs: list[Job]) -> None:
        """Compute the next chunks of several requests in one forward: all of answers, or all tails of prompts."""
        states, ids, prefilling = tuple(job.state for job in jobs), [*map(self._chunk, jobs)], jobs[0].prefilling
        try:
            batch = self._batches.get(states) or Batch(states, self._spare if self.together.apart else None)
            if not prefilling:
                self._batches[states] = batch
            logits = batch.forward(self.model.model, ids)
        except Exception as e:  # to find the one at fault, each is computed alone, from its cached pages
            if is_bug(e):
                raise
            log.exception("%s of %d requests", "the ends of prompts" if prefilling else "a batch", len(jobs))
            self._batches.pop(states, None)
            for job in sorted(jobs, key=lambda job: job.admitted_seq):
                job.alone = True
                self.scheduler.preempt(job)
            return
        for job, chunk in zip(jobs, ids, strict=True):
            self._guarded(job, self._computed, len(chunk), prefilling)
        self._sample(jobs, logits)

    def _computed(self, job: Job, tokens: int, prefilling: bool) -> None:
        if not prefilling:
            if not self._exact and job.computed % self.model.layout.chunk_tokens == 0:
                self.cache.scheduler.extend(job.lease, job.sequence(job.leased_tokens, job.computed))
                job.leased_tokens = job.computed
                self._keep(job)
            return
        if self._is_again(job):
            self.counts.recomputed_tokens += tokens
        else:
            self.counts.computed_tokens += tokens
        self.scheduler.running.remove(job)
        self.scheduler.running.append(job)
        self._keep(job)

    # --- sampling and output

    def _show(self, job: Job, logits: Tensor) -> None:
        assert job.request.watch is not None
        job.request.watch(job.computed, logits)

    def _sample(self, jobs: list[Job], logits: Tensor) -> None:
        """From logits [jobs, vocabulary] sample a token for each job, and emit it; but not in the middle of a prompt,
        nor while an answer is replayed after a preemption."""
        for job, row in zip(jobs, logits, strict=True):
            if job.request.watch is not None:
                self._guarded(job, self._show, row)
        if self._again is not None and self._again[1].computed == self._again[1].length:  # nothing comes after it
            self._end_again()
        rows = [row for row, job in enumerate(jobs) if job.workspace is not None and job.computed == job.length]
        if not rows:
            return
        if len(rows) < len(jobs):
            jobs, logits = [jobs[row] for row in rows], logits[torch.tensor(rows, device=logits.device)]
        try:
            chosen = choose_all(logits, [job.draw for job in jobs])
        except Exception:  # to find the one at fault, each is sampled alone
            log.exception("sampling for %d requests", len(jobs))
            for job, row in zip(jobs, logits, strict=True):
                self._guarded(job, self._sample_one, row)
            return
        for job, token, row in zip(jobs, chosen, logits, strict=True):
            self._guarded(job, self._emit, token, row)

    def _sample_one(self, job: Job, logits: Tensor) -> None:
        (token,) = choose_all(logits[None], [job.draw])
        self._emit(job, token, logits)

    def _emit(self, job: Job, token: int | None, logits: Tensor) -> None:
        """Append a token, and deliver the text that no later token can change."""
        if token is None:
            raise ValueError("the model's logits are not numbers")
        sampling = job.request.sampling
        asked = sampling.logprobs
        likely = () if asked is None else (likelihood(logits, token, asked, job.characters),)
        ends = token in job.ends
        text = "" if ends else job.detokenizer.push(token)  # before it counts, as it may fail
        job.output_ids.append(token)
        self.cache.scheduler.agreement.note(token.to_bytes(4, "little"))
        self.counts.sampled(job, time.monotonic())
        if ends:
            self._end(job, Finish.STOP, last=(token,), likely=likely, matched=token)
            return
        job.text += text
        job.characters += len(text)
        if (cut := find_stop(job.text, job.stops)) is not None:
            matched = next(stop for stop in job.stops if job.text.startswith(stop, cut))
            job.text = job.text[:cut]
            self._end(job, Finish.STOP, last=(token,), likely=likely, flush=False, matched=matched)
        elif len(job.output_ids) >= sampling.max_tokens:
            self._end(job, Finish.LENGTH, last=(token,), likely=likely)
        else:
            held = held_back(job.text, job.stops)
            text, job.text = job.text[: len(job.text) - held], job.text[len(job.text) - held :]
            if job.request.number in self._accepted:
                usage = self._usage(job) if len(job.output_ids) == 1 else None
                self._deliver(job.request, OutputChunk(text, (token,), usage=usage, likelihoods=likely))

    def _end(
        self,
        job: Job,
        finish: Finish,
        error: str = "",
        last: tuple[int, ...] = (),
        likely: tuple[Likelihood, ...] = (),
        flush: bool = True,
        matched: int | str | None = None,
    ) -> None:
        if self._is_again(job):
            self._end_again()
        if self._jobs.get(job.request.number) is not job:
            return
        if self._answers is not None and finish in (Finish.STOP, Finish.LENGTH):
            request = job.request
            self._answers.ended(request.prompt, job.output_ids, request.salt, request.priority)
        if flush:
            try:
                job.text += job.detokenizer.flush()
                if (cut := find_stop(job.text, job.stops)) is not None:
                    job.text = job.text[:cut]
            except Exception as e:  # the tokenizer failed; the text that was held back is lost
                log.exception("request %d", job.request.number)
                finish, error = Finish.ERROR, error or f"{type(e).__name__}: {e}"
        self.scheduler.leave(job)
        job.workspace = None
        if not self.scheduler.running:
            self._batches.clear()
        usage = self._usage(job)
        ticket = None
        if finish in (Finish.STOP, Finish.LENGTH):
            ticket = self._export(job)
            self.counts.answered(job)
        self.cache.close(job.lease)
        self.counts.ended(job)
        self._finish(job.request, OutputChunk(job.text, last, finish, usage, error, likely, ticket, matched))

    def _usage(self, job: Job) -> TokenUsage:
        return TokenUsage.of(len(job.request.prompt), len(job.output_ids), job.reasons, job.queued_s)

    def _export(self, job: Job) -> Ticket | None:
        if (hand_over_s := job.request.hand_over_s) is None:
            return None
        return self.cache.scheduler.export(job.lease, time.time() + hand_over_s, job.packed)

    def _finish(self, request: Request, output: OutputChunk) -> None:
        """Deliver the last output of a request, if it has had none."""
        with self._lock:
            if self._accepted.pop(request.number, None) is None:
                return
            self._jobs.pop(request.number, None)
            assert output.finish is not None
            self.counts.ends[output.finish] += 1
        log.debug("request %d: %s, %s", request.number, output.finish.value, output.usage)
        self._deliver(request, output)

    def _deliver(self, request: Request, output: OutputChunk) -> None:
        try:
            (request.deliver or request.outputs.put)(output)
        except Exception:  # the listener is gone or broken (a closed event loop, say), which is not our error
            log.exception("request %d: its listener failed", request.number)

    def _abort(self, request: Request) -> None:
        job = self._jobs.get(request.number)
        if job is not None and job.request is request:
            self._end(job, Finish.ABORT)
