"""KV events as a router gets them: ZeroMQ, vLLM's encoding, and a mirror that ends up with what the server has."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq
from servers import CHUNK, PAGE, settings
from talk import LONG_S, complete

from kvarve.errors import ConfigError
from kvarve.pages.boundaries import members
from kvarve.pages.pools import Tier
from kvarve.reference.server.kv_events import KvEventsConfig
from kvarve.reference.server.serve import Server, check_settings

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
END = (1 << 64) - 1


class Router:
    """Follows a server as routers do: subscribes, and asks for what it has missed."""

    def __init__(self, server: Server, context: Any, subscribed: Any, replay: str) -> None:
        self.server, self._context, self._subscribed, self._replay = server, context, subscribed, replay
        self.number = 0  # of the next batch
        self.events: list[dict[str, Any]] = []
        self.pages: dict[tuple[str, int], set[int]] = {}
        self.live = 0  # batches that came without asking

    def listen(self) -> None:
        """Take what comes within a moment, and what was missed."""
        while self._subscribed.poll(20):
            topic, number, payload = self._subscribed.recv_multipart()
            assert topic == b"kv@test" and len(number) == 8
            if int.from_bytes(number, "big") == self.number:
                self.live += 1
                self._take(payload)
        self.catch_up()

    def catch_up(self) -> None:
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(self._replay)
            socket.send_multipart((b"", self.number.to_bytes(8, "big")))
            while True:
                assert socket.poll(LONG_S * 1000), "no answer to a replay"
                empty, topic, number, payload = socket.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big") == END:
                    assert (topic, payload) == (b"", b"")
                    return
                assert topic == b"kv@test" and int.from_bytes(number, "big") == self.number
                self._take(payload)

    def _take(self, payload: bytes) -> None:
        stamp, events, rank = msgpack.unpackb(payload)
        assert abs(time.time() - stamp) < 3600 and rank == 3
        self.number += 1
        for event in events:
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                assert event == {"type": "AllBlocksCleared"}
                self.pages.clear()
                continue
            here = self.pages.setdefault((event["medium"], event["group_idx"]), set())
            if event["type"] == "BlockRemoved":
                assert set(event) == {"type", "block_hashes", "medium", "group_idx"}
                here.difference_update(event["block_hashes"])
            else:
                assert event["type"] == "BlockStored" and (event["lora_id"], event["lora_name"]) == (None, None)
                assert event["block_size"] == PAGE
                assert len(event["token_ids"]) == PAGE * len(event["block_hashes"])
                here.update(event["block_hashes"])

    def agrees(self) -> None:
        """Listen until the mirror is what the server has; its backups have ended by then."""
        self.server.engine.settle()
        end = time.monotonic() + LONG_S
        self.listen()
        while self.known() != (there := self.server.engine.ask(self._there, LONG_S)):
            assert time.monotonic() < end, (self.known(), there)
            self.listen()

    def known(self) -> dict[tuple[str, int], set[int]]:
        return {place: pages for place, pages in self.pages.items() if pages and place[0] != "STORAGE"}

    def _there(self) -> dict[tuple[str, int], set[int]]:
        cache = self.server.engine.cache
        slot_pools, pools = cache.scheduler.core.slot_pools, len(cache.identity.pools)
        found: dict[tuple[str, int], set[int]] = {}
        for run in cache.scheduler.core.tree.runs():
            for place, here in enumerate(run.here):
                keys = [run.key(run.first + local) for local in members(here)]
                if keys:
                    at = MEDIA[slot_pools.tier(place)], place % pools
                    found.setdefault(at, set()).update(int.from_bytes(key[-8:], "big") for key in keys)
        return found


@pytest.fixture
def router(checkpoint: Path, tmp_path: Path) -> Iterator[Router]:
    replay = f"ipc://{tmp_path}/replay"
    with zmq.Context() as context, context.socket(zmq.SUB) as subscribed:
        subscribed.subscribe(b"kv@")
        port = subscribed.bind_to_random_port("tcp://127.0.0.1")
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{port - 3}",  # rank 3 connects to the port behind it
            "replay_endpoint": replay,
            "topic": "kv@test",
            "data_parallel_rank": 3,
        }
        given = settings(checkpoint, tmp_path / "pages", kv_events_config=json.dumps(config))
        with Server(given) as server:
            yield Router(server, context, subscribed, replay + "_dp3")


@pytest.fixture
def asked(router: Router) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.server.url, timeout=60) as client:
        yield client


def test_a_router_that_hears_all_knows_the_pages_of_each_tier_and_pool(
    router: Router, asked: httpx.Client, song: str
) -> None:
    while not router.number:
        router.listen()
    assert router.events == [{"type": "AllBlocksCleared"}] and router.pages == {}
    complete(asked, song * 6, max_tokens=2)
    complete(asked, song * 3 + "elsewhere " + song * 2, max_tokens=2)
    router.agrees()
    groups = range(len(router.server.engine.cache.identity.pools))
    assert {place for place, pages in router.pages.items() if pages} == {
        (medium, group) for medium in MEDIA.values() for group in groups
    }
    assert asked.post("/flush_cache", params={"tiers": "device"}).status_code == 200
    router.agrees()
    assert not any(router.pages["GPU", group] for group in groups) and all(router.pages["CPU", at] for at in groups)
    complete(asked, song * 6, max_tokens=2)
    router.agrees()
    assert all(router.pages["GPU", group] for group in groups)
    assert asked.post("/flush_cache").status_code == 200
    router.agrees()
    assert router.known() == {} and all(router.pages["STORAGE", group] for group in groups)
    assert router.live, "some came without asking"


def test_a_stranger_who_sends_the_replay_socket_megabytes_is_cut_off(router: Router) -> None:
    with router._context.socket(zmq.DEALER) as stranger, stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ended:
        stranger.linger = 0
        stranger.connect(router._replay)
        stranger.send_multipart((b"", bytes(8 << 20)))
        assert ended.poll(LONG_S * 1000), "it was read to the end"
    router.catch_up()


def test_the_tokens_of_a_page_are_those_of_the_prompt_though_its_name_has_its_whole_chunk(
    router: Router, asked: httpx.Client, ids: list[int]
) -> None:
    assert PAGE < CHUNK
    prompt = (ids * 6)[: 3 * CHUNK + PAGE + 1]
    complete(asked, prompt, max_tokens=1)
    router.agrees()
    pools = router.server.engine.cache.identity.pools
    (attention,) = [at for at, pool in enumerate(pools) if pool.lookback is None]
    for medium in ("GPU", "CPU", "STORAGE"):
        stored = [
            event
            for event in router.events
            if event["type"] == "BlockStored" and (event["medium"], event["group_idx"]) == (medium, attention)
        ]
        said: dict[int | None, tuple[int, list[int]]] = {}  # by its parent
        for event in stored:
            parent = event["parent_block_hash"]
            for at, page in enumerate(event["block_hashes"]):
                said[parent] = page, event["token_ids"][at * PAGE : (at + 1) * PAGE]
                parent = page
            assert event["kv_cache_spec_kind"] == "full_attention"
        tokens, parent = list[int](), None
        while parent in said:
            parent, page_tokens = said[parent]
            tokens += page_tokens
        assert tokens == prompt[: len(tokens)] and len(tokens) == 3 * CHUNK, medium


def test_what_cannot_be_known_any_more_is_cleared_and_told_anew(
    router: Router, asked: httpx.Client, song: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(asked, song * 3, max_tokens=2)
    router.agrees()
    router.server.engine.admin.detach()  # what the next storage has is not known
    router.agrees()
    cleared = [event["type"] for event in router.events].count("AllBlocksCleared")
    assert cleared == 2 and {medium for (medium, _), pages in router.pages.items() if pages} == {"GPU", "CPU"}
    with monkeypatch.context() as patch:
        patch.setattr(router.server.kv_events, "room", lambda: False)  # as if the queue were full
        complete(asked, "other " + song * 3, max_tokens=2)
    complete(asked, song, max_tokens=1)
    router.agrees()
    assert [event["type"] for event in router.events].count("AllBlocksCleared") == 3


def test_a_server_that_is_not_asked_publishes_nothing_and_keeps_nothing_for_it(server: Server) -> None:
    assert server.kv_events is None and server.engine.cache.scheduler.core.page_events is None
    assert all(run.heads == b"" for run in server.engine.ask(lambda: [*_runs(server)], LONG_S))


def _runs(server: Server) -> Iterator[Any]:
    return server.engine.cache.scheduler.core.tree.runs()


def test_endpoints_are_vllms_but_for_loopback_unless_one_is_given() -> None:
    on = {"enable_kv_cache_events": True}
    unset = KvEventsConfig.of_json(json.dumps(on))
    assert unset.on and unset.binds and unset.endpoints() == ("tcp://127.0.0.1:5557", None)
    assert not KvEventsConfig.of_json("{}").on
    assert not KvEventsConfig.of_json(json.dumps(on | {"publisher": "null"})).on
    both = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6000", "data_parallel_rank": 2}
    given = KvEventsConfig.of_json(json.dumps(on | both))
    assert given.binds and given.endpoints() == ("tcp://*:5559", "tcp://*:6002")
    assert not KvEventsConfig.of_json(json.dumps(on | {"endpoint": "tcp://router:5557"})).binds


def test_a_config_that_cannot_work_is_one_clear_error(checkpoint: Path) -> None:
    for given in (
        *("", "[]", "[" * 10_000, '{"enable_kv_cache_events": 1}', '{"endpoints": "tcp://*:1"}'),
        *('{"endpoint": "http://h:1"}', '{"endpoint": "tcp://*"}', '{"endpoint": "tcp://*:99999"}'),
        *('{"replay_endpoint": "inproc://x"}', '{"publisher": "kafka"}', '{"buffer_steps": 0}', '{"hwm": true}'),
    ):
        with pytest.raises(ConfigError, match="--kv-events-config") as e:
            check_settings(settings(checkpoint, kv_events_config=given))
        assert "\n" not in str(e.value) and len(str(e.value)) < 300


def test_a_port_that_is_taken_is_told_before_anything_is_served(checkpoint: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        config = {"enable_kv_cache_events": True, "replay_endpoint": f"tcp://127.0.0.1:{port}", "endpoint": "ipc://@x"}
        with pytest.raises(ConfigError, match=f"--kv-events-config: tcp://127.0.0.1:{port}: Address already in use"):
            Server(settings(checkpoint, kv_events_config=json.dumps(config)))
