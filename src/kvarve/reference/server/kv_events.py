"""KV events over ZeroMQ, in vLLM's encoding: which pages enter and leave each tier, for routers that follow a cache.

The engine's thread hands over what the core tells; a thread here encodes and publishes it, and replays what was
published to those who ask. A receiver that is slow or gone costs the server nothing: ZeroMQ drops what it did not take.
"""

import json
import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from kvarve.core.observe.page_events import Told
from kvarve.errors import ConfigError
from kvarve.pages.keys import KEY_BYTES, unpack
from kvarve.pages.pools import ModelIdentity, PoolSpec, Tier
from kvarve.settings.options import needs
from kvarve.settings.values import Form, read_settings

log = logging.getLogger(__name__)

MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
HASH_BYTES = 8  # of a key, its last ones: vLLM's block hashes are 64-bit numbers unless told otherwise
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay
LOOK_S = 0.05  # between two looks for requests to replay
CLOSE_S = 2.0
MOST_ASKED = 1024  # bytes of a part of what is received: a sequence number, or a topic that is subscribed to
_FLAG = "--kv-events-config"
_TCP = re.compile(r"tcp://(.+):([0-9]{1,5})", re.ASCII)


def _is_endpoint(text: str) -> bool:
    tcp = _TCP.fullmatch(text)
    return (tcp is not None and int(tcp[2]) < 1 << 16) or (text.startswith("ipc://") and len(text) > len("ipc://"))


_WORDS = "an endpoint of ZeroMQ: write tcp://*:5557, tcp://HOST:5557 or ipc:///PATH"
Endpoint = Annotated[str, Form(_WORDS, (str,), holds=lambda text: not text or _is_endpoint(text))]


def _from(least: int) -> Form:
    return Form(f"a whole number from {least} on, below 2^31", (int,), holds=lambda value: least <= value < 1 << 31)


@dataclass(frozen=True)
class KvEventsConfig:
    """vLLM's fields of the flag, and the rank."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: Endpoint = ""  # the server binds a path or a *, and connects to others; "": on loopback
    replay_endpoint: Endpoint | None = None
    buffer_steps: Annotated[int, _from(1)] = 10_000
    hwm: Annotated[int, _from(0)] = 100_000
    max_queue_size: Annotated[int, _from(1)] = 100_000
    topic: str = ""
    data_parallel_rank: Annotated[int, _from(0)] = 0  # of this server, where others run beside it

    @classmethod
    def of_json(cls, text: str) -> "KvEventsConfig":
        """ConfigError for anything that would not publish as asked."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ConfigError(f'{_FLAG} must be JSON, such as {{"enable_kv_cache_events": true}}, not {text[:80]!r}')
        config = read_settings(cls, given, _FLAG)
        if config.on:
            with needs("events", _FLAG):
                import_module("zmq"), import_module("msgpack")
        return config

    @property
    def on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def endpoints(self) -> tuple[str, str | None]:
        """Where this rank publishes, and where it replays."""
        rank, replay = self.data_parallel_rank, self.replay_endpoint
        return _of_rank(self.endpoint or "tcp://127.0.0.1:5557", rank), None if not replay else _of_rank(replay, rank)

    @property
    def binds(self) -> bool:
        """Whether it listens for receivers, else it connects to one."""
        return not self.endpoint or "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")


def _of_rank(endpoint: str, rank: int) -> str:
    """An endpoint of a rank: the rank is added to rank 0's port, as in vLLM, and put behind a path."""
    tcp = _TCP.fullmatch(endpoint)
    if not rank or (tcp is not None and tcp[2] == "0"):
        return endpoint
    return f"tcp://{tcp[1]}:{int(tcp[2]) + rank}" if tcp is not None else f"{endpoint}_dp{rank}"


class KvEvents:
    """Publishes one cache's events until `close`. `room` and `put` belong to the engine's thread."""

    def __init__(self, config: KvEventsConfig, identity: ModelIdentity) -> None:
        """ConfigError if an endpoint cannot be bound."""
        self._zmq, self._pack = import_module("zmq"), import_module("msgpack").packb
        self._config, self._page_tokens = config, identity.page_tokens
        self._specs = [_spec(pool, identity.page_tokens) for pool in identity.pools]
        self.published = 0  # batches; the next one's sequence number
        self._queue: queue.SimpleQueue[Sequence[Told] | None] = queue.SimpleQueue()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = self._zmq.Context()
        self._pub, self._replay = self._context.socket(self._zmq.PUB), None
        self._pub.set_hwm(config.hwm)
        endpoint, replay = config.endpoints()
        try:
            if config.binds:
                self._bind(self._pub, endpoint)
            else:
                self._try(self._pub.connect, endpoint)
            if replay is not None:
                self._replay = self._context.socket(self._zmq.ROUTER)
                self._replay.set_hwm(config.buffer_steps + 1)  # what a receiver is sent that does not read
                self._bind(self._replay, replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._publish, name="kvarve kv events", daemon=True)
        self._thread.start()

    def room(self) -> bool:
        """Whether another batch may wait. Only this thread adds any."""
        return self._queue.qsize() < self._config.max_queue_size

    def put(self, told: Sequence[Told]) -> None:
        """Publish what the core has told, as one batch."""
        self._queue.put(told)

    def close(self) -> None:
        """Publish what waits, for a few seconds at most."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    # --- on its thread

    def _publish(self) -> None:
        try:
            while True:
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay.recv_multipart())
                try:
                    told = self._queue.get(timeout=LOOK_S if self._replay is not None else None)
                except queue.Empty:
                    continue
                if told is None:
                    return
                self._send(told)
        except Exception:  # without it answers go on, and receivers see that nothing follows
            log.exception("KV events are not published any more")
        finally:
            self._context.destroy(linger=int(CLOSE_S * 1000 / 2))

    def _send(self, told: Sequence[Told]) -> None:
        batch = [time.time(), [self._event(each) for each in told], self._config.data_parallel_rank]
        payload, number = self._pack(batch), self.published
        self._pub.send_multipart((self._config.topic.encode(), number.to_bytes(8, "big"), payload))
        self._buffer.append((number, payload))
        self.published += 1

    def _event(self, told: Told) -> dict[str, Any]:
        """vLLM leaves out fields with their default value, which here are all that are not named."""
        if told is None:
            return {"type": "AllBlocksCleared"}
        hashes, place = _hashes(told.keys), {"medium": MEDIUM[told.tier]}
        if not told.entered:
            return {"type": "BlockRemoved", "block_hashes": hashes, **place, "group_idx": told.pool}
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": _hashes(told.parent)[0] if told.parent else None,
            "token_ids": unpack(told.tokens),
            "block_size": self._page_tokens,
            "lora_id": None,
            **place,
            "lora_name": None,
            "group_idx": told.pool,
            **self._specs[told.pool],
        }

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Replay from the sequence number that a receiver asks for, as far as it is remembered."""
        if len(frames) != 3 or len(frames[2]) != len(END):
            return
        assert self._replay is not None
        first, topic = int.from_bytes(frames[2], "big"), self._config.topic.encode()
        for number, payload in self._buffer:
            if number >= first:
                self._reply(frames[0], topic, number.to_bytes(8, "big"), payload)
        self._reply(frames[0], b"", END, b"")

    def _reply(self, *frames: bytes) -> None:
        assert self._replay is not None
        self._replay.send_multipart((frames[0], b"", *frames[1:]))  # a ROUTER never waits for a receiver

    def _bind(self, socket: Any, endpoint: str) -> None:
        socket.setsockopt(self._zmq.MAXMSGSIZE, MOST_ASKED)  # who sends more is cut off: it would be kept in memory
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).parent.mkdir(parents=True, exist_ok=True)
        self._try(socket.bind, endpoint)

    def _try(self, call: Any, endpoint: str) -> None:
        try:
            call(endpoint)
        except (self._zmq.ZMQError, OSError) as e:
            raise ConfigError(f"{_FLAG}: {endpoint}: {e}") from None


def _hashes(keys: bytes) -> list[int]:
    ends = range(KEY_BYTES, len(keys) + 1, KEY_BYTES)
    return [int.from_bytes(keys[end - HASH_BYTES : end], "big") for end in ends]


def _spec(pool: PoolSpec, page_tokens: int) -> dict[str, Any]:
    """What kind of group a pool is, by vLLM's names."""
    if pool.lookback is None:
        return {"kv_cache_spec_kind": "full_attention"}
    if pool.in_place:
        return {"kv_cache_spec_kind": "mamba"}
    return {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": pool.lookback * page_tokens}
