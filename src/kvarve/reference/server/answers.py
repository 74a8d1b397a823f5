"""The answers to one request on the event loop, from its submission to the last byte of the response."""

import asyncio
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from kvarve.core.observe.reasons import Reason
from kvarve.errors import Busy
from kvarve.pages.ticket import Ticket
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.requests import Finish, OutputChunk, Request
from kvarve.reference.server.api import Refused
from kvarve.reference.server.forms import Choice, Form, ResponseUsage, event
from kvarve.reference.server.keyfile import Key
from kvarve.reference.server.prepare import ClientGone, Prepared

RETRY_AFTER = {"Retry-After": "1"}

T = TypeVar("T")


class Answer:
    """The answers to one request on the event loop: chunks arrive in order, and the client may disconnect."""

    def __init__(self, engine: Engine, receive: Receive, key: Key | None) -> None:
        """To be made after the body has been read; from then on it watches for a disconnect. `key`: whose salt it
        gets."""
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._chunks: asyncio.Queue[tuple[int, OutputChunk] | None] = asyncio.Queue()  # None: the client has gone
        self._arrived_s = time.monotonic()
        self._first_s: float | None = None
        self._requests: list[Request] = []
        self.prepared: Prepared | None = None
        self._key = key
        self.choices: list[Choice] = []
        self.ticket: Ticket | None = None  # of a prompt that was to be handed over
        self.open: set[int] = set()  # indices of answers that run or wait
        self.left = False  # the client disconnected before submission; read by any thread
        self._watch = self._loop.create_task(self._listen(receive))

    @property
    def count(self) -> int:
        return len(self._requests)

    @property
    def seconds(self) -> float:
        """Since its request arrived."""
        return time.monotonic() - self._arrived_s

    @property
    def first_seconds(self) -> float | None:
        """From its request's arrival to the first token."""
        return None if self._first_s is None else self._first_s - self._arrived_s

    @property
    def queued_s(self) -> float | None:
        """Until the first of its answers was admitted, of those that have ended."""
        return min((one.usage.queued_s for one in self.choices if one.usage and one.usage.queued_s), default=None)

    @property
    def salt(self) -> str | None:
        """That of its prompts, once they have been submitted."""
        return self._requests[0].salt if self.choices else None

    @property
    def prompt_tokens(self) -> int:
        """Each prompt is counted once."""
        return 0 if self.prepared is None else sum(len(prompt) for prompt in self.prepared.prompts)

    async def when(self, work: "Future[T]") -> T:
        """The result of work on a lane, which ends with `submit`. ClientGone: the client left first. Then queued work
        is cancelled, and a request that running work still submits is aborted."""
        done = asyncio.wrap_future(work)
        either: set[asyncio.Future[Any]] = {done, self._watch}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not done.done():
                self.left = True
                done.cancel()
                work.add_done_callback(lambda _: self._give_up())
        if self.left:
            raise ClientGone
        return done.result()

    def submit(self, prepared: Prepared) -> None:
        """Submit to the engine; runs on a lane's thread."""
        request, self.prepared = prepared.request, prepared
        salt = request.salt if self._key is None else self._key.salted(request.salt)
        within_s, ticket = request.hand_over.hand_over_s, request.hand_over.opened()
        each, requests = len(prepared.samplings) // len(prepared.prompts), list[Request]()
        for index, sampling in enumerate(prepared.samplings):
            one = Request(
                prepared.prompts[index // each],
                sampling,
                salt=salt,
                priority=request.cache_priority or 0,
                read_cache=not request.skip_reading_prefix_cache,
                deliver=partial(self._deliver, index),
                hand_over_s=None if index else within_s,  # it has one prompt
                ticket=ticket,
                submitted_s=self._arrived_s,
                sample_of=requests[index // each * each].number if index % each else None,
            )
            requests.append(one)
        self._requests = requests
        self.choices = [Choice() for _ in self._requests]
        try:
            self._engine.submit(*self._requests)
        except Busy as e:
            raise stopped(self._engine) if self._engine.broken else e from None
        self.open = set(range(self.count))

    async def next(self) -> tuple[int, OutputChunk]:
        """The next chunk, and the index of its answer."""
        if (found := await self._chunks.get()) is None:
            raise ClientGone
        assert self.prepared is not None
        index, chunk = found
        if index in self.prepared.mute:
            usage = chunk.usage and replace(chunk.usage, completion=0)
            chunk = replace(chunk, text="", tokens=(), likelihoods=(), usage=usage)
        self.choices[index].add(chunk, self.seconds)
        if chunk.finish is not None:
            assert chunk.usage is not None
            self.open.remove(index)
            self.ticket = self.ticket or chunk.ticket
        return index, chunk

    async def rest(self, chunk: OutputChunk) -> None:
        """Wait for all answers to end, after a first chunk; the error of one is all that is left of them."""
        self.raise_if_failed(chunk)
        while self.open:
            self.raise_if_failed((await self.next())[1])
        self.close()

    def raise_if_failed(self, chunk: OutputChunk) -> None:
        """An incomplete answer becomes an HTTP error."""
        if chunk.finish is Finish.ERROR:
            raise Refused(500, chunk.error)
        if chunk.finish is Finish.ABORT:
            raise Refused(503, "the server is shutting down: try again", headers=RETRY_AFTER)

    def close(self) -> None:
        """Stop watching, and abort all answers that have not ended."""
        self._watch.cancel()
        if not self.left:
            self._give_up()

    def _give_up(self) -> None:
        for index in self.open:
            self._engine.abort(self._requests[index])
        self.open.clear()

    def usage(self) -> ResponseUsage:
        """The usage when all answers have ended. Each prompt is counted once."""
        assert self.prepared is not None
        each = len(self.choices) // len(self.prepared.prompts)
        reasons = Counter[Reason]()
        for first in range(0, len(self.choices), each):
            told = (one.usage for one in self.choices[first : first + each] if one.usage is not None)
            if (usage := next(told, None)) is not None:
                reasons.update(usage.reasons)
        first_s = self.first_seconds
        ttft_ms = None if first_s is None else round(1000 * first_s, 3)
        return ResponseUsage(reasons.total(), self.answered_tokens(), reasons, ttft_ms, round(1000 * self.seconds, 3))

    def answered_tokens(self) -> int:
        return sum(len(one.tokens) for one in self.choices)

    def summary(self) -> str:
        """What came of it, for the log; "" if it was not submitted."""
        usages = [one.usage for one in self.choices if one.usage is not None]
        if not usages:
            return "not answered" if self.choices else ""
        ends = Counter("left" if one.finish is None else one.finish.value for one in self.choices)
        usage = self.usage()
        why = ", ".join(f"{tokens} {reason.value}" for reason, tokens in usage.reasons.items())
        told = f"{usage.prompt} prompt tokens ({why}), {usage.completion} answered"
        return f"{', '.join(f'{count} {end}' for end, count in ends.items())}, {told}"

    def _deliver(self, index: int, chunk: OutputChunk) -> None:
        """Runs on the engine's thread."""
        if self._first_s is None and chunk.tokens:
            self._first_s = time.monotonic()
        with suppress(RuntimeError):  # the loop has closed, so no client is left
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, (index, chunk))

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._chunks.put_nowait(None)


class Stream(Response):
    """Answers as server-sent events, each written as soon as its text is final."""

    def __init__(self, form: Form, answer: Answer, first: tuple[int, OutputChunk]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._form, self._answer, self._first = form, answer, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send)
        except (ClientGone, OSError):
            pass  # the client has disconnected
        finally:
            self._answer.close()

    async def _write(self, send: Send) -> None:
        async def say(data: dict[str, Any] | str) -> None:
            await send({"type": "http.response.body", "body": event(data), "more_body": True})

        form, answer = self._form, self._answer
        for chunk in (chunk for index in range(answer.count) for chunk in form.opening(index)):
            await say(form.counted(chunk, answer.usage))
        index, output = self._first
        while output.finish is not Finish.ERROR:
            for chunk in form.chunks(index, output, answer.choices[index]):
                await say(form.counted(chunk, answer.usage))
            if not answer.open:
                break
            index, output = await answer.next()
        if output.finish is Finish.ERROR:
            answer.close()
            await say(Refused(500, output.error).body())
        else:
            for chunk in form.closing(answer.usage()):
                await say(chunk)
        await say("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def stopped(engine: Engine, status: int = 500) -> Refused:
    """The error of a request that came after the engine had stopped."""
    return Refused(status, engine.broken, headers=RETRY_AFTER)
