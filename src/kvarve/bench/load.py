"""Sends requests and notes when what came back, on one event loop in a process that does nothing else.

In a closed loop each of N clients sends its next request when its last one is answered. At a rate conversations begin
at their times, however many are under way: times count from when a request was due, not from when this process got to
send it, so that a stall of the server shows in every request that it held up (no coordinated omission). How late
requests were sent is noted as well: if that is much, the figures measure this process.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from kvarve.bench.bench_command import Target
from kvarve.bench.workloads import Conversation, Turn
from kvarve.errors import KvarveError

TIMEOUT_S = 600.0  # without a byte of an answer
MOST_ERROR = 300  # characters of a server's complaint
TIERS = ("device", "host", "storage")
EVENT, DONE = b"data: ", b"[DONE]"


@dataclass
class Record:
    """One request: times in seconds of one clock, and what the server says of its tokens."""

    due_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    """the first event with text"""
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """between two events with text"""
    prompt: int = 0
    completion: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """tokens of the prompt by tier; under "cached" where the server does not say which"""
    text: str = ""
    transfer: Any = None
    """`kv_transfer_params`, if the request asked for a ticket"""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s


@dataclass
class Round:
    """What came of all requests, in the order of the conversations."""

    name: str
    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0


def check(records: Iterable[Record]) -> None:
    """KvarveError for the first of requests that failed."""
    if failed := next((record for record in records if record.error), None):
        raise KvarveError(f"the server does not answer: {failed.error}")


class Client:
    """Asks one server. KvarveError: it cannot be reached, or refuses what is no request of the load."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, admin_key: str | None = None):
        self._keys = api_key, admin_key or api_key
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits)
        self._url, self.model = url, model

    async def close(self) -> None:
        await self._http.aclose()

    async def find_model(self) -> None:
        """Ask for the model's name, if none was given."""
        if self.model is None:
            try:
                self.model = str((await self._call("GET", "/v1/models")).json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise KvarveError(f"{self._url}/v1/models names no model: is this an OpenAI API?") from None

    async def ask(self, turn: Turn, record: Record, **more: Any) -> None:
        """Send a request now, and fill its record in; an error is noted there. `more`: fields of the request."""
        chat = isinstance(turn.prompt, list) and isinstance(turn.prompt[0], dict)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if chat else "prompt": turn.prompt,
            "max_tokens": turn.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body | more).encode()
        record.sent_s = time.perf_counter()
        try:
            async with self._http.stream("POST", path, content=content, headers=self._headers(0)) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")[:MOST_ERROR]
                    record.error = f"HTTP {response.status_code}: {text}"
                else:
                    await self._read(response, record)
        except httpx.HTTPError as e:
            record.error = f"{type(e).__name__}: {e}"
        except (ValueError, LookupError, TypeError) as e:
            record.error = f"not an event of OpenAI's: {e}"
        record.end_s = time.perf_counter()

    async def _read(self, response: httpx.Response, record: Record) -> None:
        rest, last = b"", 0.0
        async for data in response.aiter_bytes():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(EVENT) or line[len(EVENT) :].strip() == DONE:
                    continue
                event = json.loads(line[len(EVENT) :])
                if "error" in event:
                    record.error = str(event["error"])[:MOST_ERROR]
                    return
                if usage := event.get("usage"):
                    _note(record, usage)
                record.transfer = event.get("kv_transfer_params", record.transfer)
                for choice in event["choices"]:
                    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                    if not text:
                        continue
                    record.text += text
                    if last:
                        record.gaps_s.append(now - last)
                    else:
                        record.first_s = now
                    last = now
        record.first_s = record.first_s or time.perf_counter()  # no text at all: all of it was its end
        if not record.prompt:
            record.error = "the server sent no usage"

    async def flush(self, tiers: str) -> None:
        """Empty these tiers; a server of another make all that it can."""
        answer = await self._http.post("/flush_cache", params={"tiers": tiers}, headers=self._headers(1))
        if answer.status_code == httpx.codes.NOT_FOUND:
            answer = await self._http.post("/reset_prefix_cache", headers=self._headers(1))
        if answer.status_code != httpx.codes.OK:
            why = answer.text[:MOST_ERROR]
            raise KvarveError(f"the cache is not flushed (HTTP {answer.status_code}: {why}): see --flush, --admin-key")

    async def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name and labels."""
        lines = [line for line in (await self._call("GET", "/metrics")).text.splitlines() if line[:1] not in ("", "#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def _call(self, method: str, path: str) -> httpx.Response:
        answer = await self._http.request(method, path, headers=self._headers(0))
        if answer.status_code != httpx.codes.OK:
            raise KvarveError(f"{self._url}{path}: HTTP {answer.status_code}: {answer.text[:MOST_ERROR]}")
        return answer

    def _headers(self, key: int) -> dict[str, str]:
        """`key`: 0 the API's, 1 the operator's."""
        found = self._keys[key]
        return {"content-type": "application/json"} | ({} if found is None else {"authorization": f"Bearer {found}"})


@asynccontextmanager
async def connected(url: str, options: Target) -> AsyncIterator[Client]:
    """A client that knows its model. KvarveError: the server does not answer."""
    client = Client(url, options.model if options.server else None, options.api_key, options.admin_key)
    try:
        await client.find_model()
        yield client
    except httpx.HTTPError as e:
        raise KvarveError(f"{url}: {type(e).__name__}: {e}") from None
    finally:
        await client.close()


def arrivals(conversations: Sequence[Conversation], rate: float | None, seed: int) -> list[float] | None:
    """When each conversation begins, in seconds; None: when a client is free."""
    if rate is not None:
        gaps = np.random.default_rng([seed, 4]).exponential(1 / rate, len(conversations))
        return [float(each) for each in np.cumsum(gaps) - gaps[0]]
    times = [each.at_s for each in conversations if each.at_s is not None]
    return times if len(times) == len(conversations) else None


async def send_all(
    client: Client,
    conversations: Sequence[Conversation],
    clients: int,
    begins_s: Sequence[float] | None,
    tick: Callable[[Record], None] = lambda record: None,
    **more: Any,
) -> list[Record]:
    """All requests, by `clients` at once or at their times; `more`: fields of each."""
    records: list[list[Record]] = [[] for _ in conversations]
    start = time.perf_counter()

    async def converse(number: int, due_s: float) -> None:
        for turn in conversations[number].turns:
            record = Record(due_s)
            records[number].append(record)
            await client.ask(turn, record, **more)
            tick(record)
            due_s = record.end_s  # a conversation's next turn is due when its last one is answered

    async def one_client(numbers: "asyncio.Queue[int]") -> None:
        while not numbers.empty():
            await converse(numbers.get_nowait(), time.perf_counter())

    async def at_its_time(number: int, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        await converse(number, due_s)

    if begins_s is None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        for number in range(len(conversations)):
            queue.put_nowait(number)
        tasks = [one_client(queue) for _ in range(min(clients, len(conversations)))]
    else:
        tasks = [at_its_time(number, start + begin) for number, begin in enumerate(begins_s)]
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(task)
    return [record for each in records for record in each]


def _note(record: Record, usage: dict[str, Any]) -> None:
    record.prompt, record.completion = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    tiers = (usage.get("kvarve") or {}).get("cached_tokens")
    if tiers is None:
        tiers = {"cached": int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)}
    record.cached = {str(tier): int(count) for tier, count in tiers.items()}


def digest(records: Sequence[Record]) -> str:
    """Of all answers, in order."""
    return hashlib.sha256(json.dumps([record.text for record in records]).encode()).hexdigest()
