"""A model, its cache, its engine and an HTTP server as one unit that starts completely or not at all."""

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch
import uvicorn
from starlette.types import ASGIApp

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.worker import check, check_room
from kvarve.core.slots.extents import Cut
from kvarve.errors import Broken, ConfigError, StorageError
from kvarve.metrics import parse_compat
from kvarve.pages.field_checks import require
from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec
from kvarve.pages.sizes import format_size
from kvarve.ranks.group import ALL
from kvarve.records.seals import seal_of
from kvarve.reference.engine.batch import together
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.families import describe_model, page_of, reads, takes
from kvarve.reference.engine.model import (
    LoadedModel,
    check_device,
    check_model,
    choose_device,
    in_fp8,
    keeping_answers,
    load_model,
    quiet_libraries,
    read_config,
    read_template,
    with_chat_template,
    with_context,
)
from kvarve.reference.engine.rank_processes import Place, Ranks, check_ranks, device_of, started, threads_of
from kvarve.reference.server.app import create_app
from kvarve.reference.server.connections import KEEP_ALIVE_S, SEND_BYTES, Connections, raise_descriptors
from kvarve.reference.server.kv_events import KvEvents, KvEventsConfig
from kvarve.reference.server.logs import OncePerSecond
from kvarve.reference.server.middleware import Edge
from kvarve.reference.server.serve_settings import PAGE_TOKENS, Settings, check_key
from kvarve.reference.server.spans import Traces, check_endpoint
from kvarve.reference.server.starting import Starting, tell_systemd
from kvarve.reference.server.trace_out import TraceOut
from kvarve.reports import aligned, check_file
from kvarve.storage import StorageUsage, check_storage
from kvarve.storage.urls import shown
from kvarve.system.heap import bound_heaps, spare_from_collection
from kvarve.transfer.compression import compressing

log = logging.getLogger(__name__)

BACKLOG = 128
SLOW_WEIGHTS_BYTES = 1 << 30  # they take seconds to read; the shapes of a model take one or two
MOST_THREADS = 1024  # of torch, which aborts the process if it cannot start more
START_S = 0.01  # between two looks whether uvicorn listens
BROKEN_S = 0.5  # between two looks whether the ranks have ended
LEAVE_S = 5.0  # how long clients may take to read the end of their answers at shutdown


class Server:
    """Serves from construction to `stop`. Raises a KvarveError if it cannot start, and has changed nothing then.

    Cheap checks come first: settings, the checkpoint's form, the port, the weights, memory and storage; only then is
    storage opened.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks | None = None,
        starting: Starting | None = None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`ranks`: of a model that several processes compute, of which this is rank 0. `starting`: hears its phases.
        `loaded` is called when all is loaded, before the first request."""
        settings = self.settings = _settled(settings)
        starting = starting or Starting()
        _check_memory(settings)
        self.edge = edge = Edge(settings)
        with ExitStack() as undo:
            self.trace_out: TraceOut | None = None
            if settings.trace_out is not None:
                self.trace_out = TraceOut(settings.trace_out, settings.page_tokens)
                undo.callback(self.trace_out.close)
            listener = undo.enter_context(bind(settings.host, settings.port))
            self.url = _url(listener, settings.tls_cert is not None)
            starting.begins("loading weights", _weights(settings))
            model = _model(settings, ranks)
            starting.begins("dividing memory", _memory(settings))
            self.slots = check(model.identity, settings.cache, settings.device)
            _listen(listener, self.url)
            if not settings.deterministic:
                starting.begins("trying batches", "what this model computes in a batch as it does alone")
                together(model.model, model.layout)
            if settings.cache.storages:
                starting.begins("opening storage", ", then ".join(map(shown, settings.cache.storages)))
            self.engine = _engine(settings, model, ranks)
            undo.callback(self.engine.cache.shutdown, store=False)  # nothing is; other ranks take no turns yet
            config = KvEventsConfig.of_json(settings.kv_events_config or "{}")
            self.kv_events = KvEvents(config, model.identity) if config.on else None
            if self.kv_events is not None:
                undo.callback(self.kv_events.close)
                self.engine.cache.tell(self.kv_events)
            self.traces: Traces | None = None
            if settings.otlp_traces_endpoint is not None:
                self.traces = Traces(settings.otlp_traces_endpoint, settings.served_model_name or model.name)
                undo.callback(self.traces.close)
            self.connections = edge.connections()
            address = listener.getsockname()[0]
            app = create_app(self.engine, settings, edge, self.connections, address, self.traces, self.trace_out)
            self._http = _http(app, self.connections, edge)
            self._thread = threading.Thread(target=self._serve, args=(listener,), name="kvarve http", daemon=True)
            if ranks is not None:
                ranks.assemble()
            loaded()
            undo.pop_all()
        self.engine.start()
        self._thread.start()
        while not self._http.started and self._thread.is_alive():
            self._thread.join(START_S)
        if not self._http.started:
            self.stop()
            raise ConfigError(f"cannot serve on {self.url}")
        if settings.ready_file is not None:
            try:
                _announce(settings.ready_file, self.url)
            except OSError as e:
                self.stop()
                raise ConfigError(f"--ready-file: {settings.ready_file} cannot be written: {e.strerror}") from None
        starting.ready(self.url)

    def stop(self) -> None:
        """Refuse new requests, end running ones, finish the backups and close the storage. Idempotent."""
        if self.settings.ready_file is not None:
            with suppress(OSError):
                self.settings.ready_file.unlink()
        self._http.should_exit = True
        self.engine.shutdown()
        self._thread.join(LEAVE_S)
        self._http.force_exit = True  # drop clients that have not read their answer or finished their request
        self._thread.join(LEAVE_S)
        for each in (self.traces, self.kv_events, self.trace_out):
            if each is not None:
                each.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def describe(self) -> str:
        """The server's configuration as text for the operator."""
        settings, model, cache = self.settings, self.engine.model, self.engine.cache
        weights = format_size(sum(tensor.nbytes for tensor in model.model.parameters()))
        kept = "" if model.layout.scales is None else ", keys and values in FP8"
        each = f" on each of {settings.tp} ranks" if settings.tp > 1 else ""
        lines = [
            ("model", f"{model.name}, {model.identity.architecture.split()[0]}, {model.identity.dtype}"),
            ("", f"{weights} of weights{each}, context {model.max_tokens} tokens, {settings.device}"),
            ("pages", f"{settings.page_tokens} tokens{kept}, prompts computed {settings.chunk_tokens} at a time"),
        ]
        for number, pool in enumerate(model.layout.pools):
            counts = {
                tier: f"up to {slots.most(number)}" if isinstance(slots, Cut) else slots[number]
                for tier, slots in self.slots.items()
            }
            slots = ", ".join(f"{count} on the {tier.name.lower()}" for tier, count in counts.items())
            size = format_size(pool.payload_bytes)
            lines.append((f"pool {pool.name}", f"reads {reads(pool.lookback)}, {size} a page; slots: {slots}"))
        room = takes(model.layout.bytes_per_token, model.layout.bytes_per_snapshot)
        held = "" if cache.up else ", down: served without it until it answers"
        with suppress(StorageError):  # it may be slow to answer
            if cache.up and (usage := cache.worker.usage()) is not None:
                held = _held(usage)
        lines += [
            ("hits", f"prompts of {model.layout.shortest_hit} tokens and more; {room}"),
            ("answers", self._answers()),
            ("storage", f"{', then '.join(map(shown, settings.cache.storages)) or 'none'}{held}"),
            *([("admin", f"{self.url}/admin/storage, with the admin key")] if settings.admin_key is not None else []),
            ("connections", f"{self.connections.most} at most"),
            ("page", f"{self.url}/, what this server does, live"),
            ("url", self.url),
        ]
        return aligned(lines, "  ")

    def _answers(self) -> str:
        settings, engine = self.settings, self.engine
        how = "in batches" if engine.together.answers else "one by one"
        how += " and kept" if settings.hits == "rounded" else "; kept as they are computed again by prefill, when idle"
        room = engine.cache.scheduler.capacity_tokens()
        own = engine.model.layout.bytes_in_use
        beside = f", and {format_size(own)} beside it for each" if own else ""
        most = f"{settings.max_running} side by side"
        return f"computed {how}; {most}, as far as {room} tokens of device memory go{beside}"

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            self._http.run(sockets=[listener])


def _settled(settings: Settings) -> Settings:
    """With the device, and the page that the model needs if none is given. ConfigError: they cannot work."""
    settings = replace(settings, device=choose_device(settings.device))
    check_settings(settings)
    page = settings.page_tokens or page_of(read_config(settings.model), settings.model, PAGE_TOKENS)
    check_model(
        settings.model,
        dtype=settings.dtype,
        page_tokens=page,
        chunk_tokens=settings.chunk_tokens,
        context_length=settings.context_length,
    )
    return replace(settings, page_tokens=page)


def _check_memory(settings: Settings) -> None:
    """ConfigError for memory that is too small for a model whose weights take longer to read than its shapes do. With
    ranks it is known once each has its part."""
    if sum(_weight_files(settings)) < SLOW_WEIGHTS_BYTES or settings.tp > 1 or settings.hits == "rounded":
        return
    shape = settings.page_tokens, settings.chunk_tokens
    found = describe_model(settings.model, settings.dtype, *shape, settings.kv_cache_dtype)
    pools = (PoolSpec(e.name, (BufferSpec("bytes", (e.page_bytes,), "uint8"),), e.lookback) for e in found.pools)
    unread = ModelIdentity(found.name, "any", found.dtype, found.page_tokens, found.chunk_tokens, tuple(pools))
    check(unread, settings.cache, settings.device)


def _weight_files(settings: Settings) -> list[int]:
    return [file.stat().st_size for file in Path(settings.model).glob("*.safetensors")]


def _weights(settings: Settings) -> str:
    """Which they are, and of a folder how many bytes in how many files."""
    sizes = _weight_files(settings)
    return f"{settings.model}, {format_size(sum(sizes))} in {len(sizes)} files" if sizes else settings.model


def _memory(settings: Settings) -> str:
    return f"{format_size(settings.device_memory)} of {settings.device}, {format_size(settings.host_memory)} of host"


def _model(settings: Settings, ranks: Ranks | None) -> LoadedModel:
    threads = settings.threads or (None if ranks is None else threads_of(settings.tp // settings.nnodes))
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        page_tokens=settings.page_tokens,
        chunk_tokens=settings.chunk_tokens,
        ranks=ranks,
        rounded=settings.hits == "rounded",
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    model = with_chat_template(with_context(model, settings.context_length), settings.chat_template)
    return keeping_answers(model) if settings.hits == "rounded" else model


def _engine(settings: Settings, model: LoadedModel, ranks: Ranks | None) -> Engine:
    among: dict[str, Any] = {} if ranks is None else {"rank": ranks.rank, "agreement": ranks.group}
    chunk = model.layout.chunk_tokens
    cache = PrefixCache(model.identity, settings.cache, device=settings.device, prefill_tokens=chunk, **among)
    return Engine(
        model,
        cache,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        turn_tokens=settings.turn_tokens,
        deterministic=settings.deterministic,
        exact=settings.hits == "exact",
    )


def follow(settings: Settings, place: Place, joined: Callable[[], None] = lambda: None) -> None:
    """Any rank but the first: compute what rank 0 says until it stops. `joined` is called when all ranks have come.
    Broken if the ranks end otherwise."""
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s %(levelname)s rank {place.rank} %(name)s: %(message)s"
    )
    bound_heaps()
    quiet_libraries()
    settings = replace(settings, device=device_of(settings.device, place))
    star = place.meet(settings.alike)
    joined()
    ranks = Ranks(place, star, settings.device)
    with ranks.ended():
        model = _model(settings, ranks)
        if not settings.deterministic:  # as rank 0, since all compute together
            together(model.model, model.layout)
        engine = _engine(settings, model, ranks)
        ranks.assemble()
        spare_from_collection()
        if why := engine.follow():
            raise Broken(why)


def _http(app: ASGIApp, connections: Connections, edge: Edge) -> uvicorn.Server:
    async def every_second() -> None:
        connections.close_stalled()

    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connections.protocol),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_notify=0,  # it looks once a second
        callback_notify=every_second,
        # asyncio accepts this many in each turn of its loop, and closes the excess some four turns later.
        backlog=max(1, min(BACKLOG, connections.most // 8)),
    )
    server = uvicorn.Server(config)
    edge.drain.running = server.server_state.tasks
    return server


def run(settings: Settings, say: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM, then shut down in order; a second signal exits at once with code 130."""
    bound_heaps()
    raise_descriptors()
    quiet_libraries()
    logging.getLogger("uvicorn.error").addFilter(_not_cancelled)  # connections that are dropped at shutdown
    for handler in logging.getLogger().handlers:
        handler.addFilter(OncePerSecond())
    tell = tell_systemd()
    starting = Starting(tell)
    serving, stop, gently, hung_up, following = (threading.Event() for _ in range(5))

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not serving.is_set():
            raise KeyboardInterrupt
        if stop.is_set():
            os._exit(130)
        if following.is_set():  # a thread says so: this one may be saying something now
            words = "kvarve computes on until rank 0 ends: stop that (Ctrl-C again: all ranks end at once)"
            threading.Thread(target=say, args=(words,)).start()
        if number == signal.SIGTERM and settings.drain_s:
            gently.set()
        stop.set()

    def ending(edge: Edge) -> None:
        if gently.is_set():
            tell("STOPPING=1\nSTATUS=draining")
            log.info("draining for at most %g s", settings.drain_s)
            say(f"kvarve drains: new requests get 503, running ones have {settings.drain_s:g} s (Ctrl-C: at once)")
            if left := edge.drain.drain(settings.drain_s, settings.drain_at_least_s):
                log.warning("%d requests have not ended within %g s: they are ended now", left, settings.drain_s)
        tell("STOPPING=1\nSTATUS=stopping: finishing backups")
        log.info("stopping: ending requests, finishing backups")
        say("kvarve stops: ending requests, finishing backups (Ctrl-C again: at once)")

    def reloading(edge: Edge) -> None:
        """SIGHUP has the keys and the certificate read again."""
        if edge.reloads:
            signal.signal(signal.SIGHUP, lambda number, frame: edge.reload())
            if hung_up.is_set():
                edge.reload()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    if settings.api_keys is not None or settings.tls_cert is not None:  # else it ends the process, as it always does
        signal.signal(signal.SIGHUP, lambda number, frame: hung_up.set())
    with ExitStack() as ends:
        ranks = None
        if settings.tp != 1:
            settings = _settled(settings)
            among = started(
                follow,
                settings,
                settings.tp,
                nodes=settings.nnodes,
                node=settings.node_rank,
                address=settings.dist_init_addr,
                deadline_s=settings.rank_deadline_s / ALL,
            )
            place, listener = ends.enter_context(among)
            if place.rank:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nothing here is read again
                say(f"kvarve computes ranks of {settings.tp} for {settings.dist_init_addr}")
                following.set()

                def joined() -> None:
                    serving.set()
                    tell(f"READY=1\nSTATUS=computing ranks of {settings.tp} for {settings.dist_init_addr}")

                follow(settings, place, joined)
                return
            settings = replace(settings, device=device_of(settings.device, place))
            ranks = Ranks(place, place.meet(settings.alike, listener), settings.device)
            ends.enter_context(ranks.ended())

        def loaded() -> None:
            spare_from_collection()
            serving.set()  # before the first answer says that it is ready: a signal after it ends this in order

        server = ends.enter_context(Server(settings, ranks, starting, loaded))
        reloading(server.edge)
        say(f"kvarve serves\n{server.describe()}\nready: Ctrl-C stops it")
        while not stop.wait(BROKEN_S if ranks is not None else None):
            if server.engine.broken:  # the ranks cannot go on without each other, so neither can this process
                raise Broken(server.engine.broken)
        ending(server.edge)
        if ranks is not None and server.engine.broken:
            raise Broken(server.engine.broken)


def _not_cancelled(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def check_settings(settings: Settings) -> None:
    """ConfigError for settings that are wrong before anything is read, bound or loaded: all of them at once."""
    wrong = list[str]()
    groups = _check_numbers, _check_names, _check_access, _check_places, _check_together
    for each in chain.from_iterable(group(settings) for group in groups):
        try:
            each()
        except (ConfigError, StorageError) as e:
            wrong.append(str(e))
    if wrong:
        raise ConfigError("; ".join(dict.fromkeys(wrong)))


Checks = Iterator[Callable[[], object]]


def _check_numbers(settings: Settings) -> Checks:
    limits = {"page_tokens": (0, inf)} | dict.fromkeys(
        ("chunk_tokens", "max_running", "max_waiting", "turn_tokens"), (1, inf)
    )
    limits |= dict.fromkeys(("max_body_bytes", "context_length", "max_connections"), (1, inf))
    for name, (least, most) in (limits | {"threads": (1, MOST_THREADS), "port": (0, 65535)}).items():
        value, end = getattr(settings, name), f" and at most {most}" if most < inf else ""
        holds = value is None or least <= value <= most
        yield partial(require, holds, name, f"at least {least}{end}", value)
    deadline_s, drain_s = settings.rank_deadline_s, settings.drain_s
    yield partial(require, deadline_s > 0, "rank_deadline_s", "above 0", deadline_s)
    yield partial(require, 0 <= drain_s < inf, "drain_s", "at least 0 and finite", drain_s)
    first_s, words = settings.drain_at_least_s, f"from 0 to drain_s, which is {drain_s:g}"
    yield partial(require, 0 <= first_s <= drain_s or drain_s < 0, "drain_at_least_s", words, first_s)
    known = "exact", "rounded"
    yield partial(require, settings.hits in known, "hits", f"one of {', '.join(known)}", settings.hits)
    yield partial(in_fp8, settings.kv_cache_dtype)


def _check_names(settings: Settings) -> Checks:
    names = ("model", settings.model), ("served_model_name", settings.served_model_name)
    for what, text in (*names, *(("storage", shown(url)) for url in settings.storage)):
        holds = (text or "").encode(errors="replace").decode() == (text or "")  # else no answer, metric or log has it
        yield partial(require, holds, what, "UTF-8", text)
    yield partial(require, settings.served_model_name != "", "served_model_name", "a text", "")
    yield partial(parse_compat, settings.metrics_compat or "")


def _check_access(settings: Settings) -> Checks:
    for name, key in (("API", settings.api_key), ("admin", settings.admin_key)):
        if key is not None:
            yield partial(check_key, name, key)
    yield partial(_check_apart, settings)
    yield partial(Edge, settings)


def _check_apart(settings: Settings) -> None:
    if settings.admin_key is not None and settings.admin_key == settings.api_key:
        raise ConfigError("the admin key must not be the API key: every client could change the storage")


def _check_places(settings: Settings) -> Checks:
    yield lambda: settings.cache
    if settings.storage:
        yield partial(check_storage, settings.storage, label=b"any", description="any", around=compressing)
    yield partial(seal_of, settings.storage_key)
    if settings.otlp_traces_endpoint is not None:
        yield partial(check_endpoint, settings.otlp_traces_endpoint)
    if settings.kv_events_config is not None:
        yield partial(KvEventsConfig.of_json, settings.kv_events_config)
    yield partial(check_file, "--ready-file", settings.ready_file)
    yield partial(read_template, settings.chat_template)


def _check_together(settings: Settings) -> Checks:
    if settings.tp != 1 or settings.nnodes != 1 or settings.node_rank:
        ranks = settings.tp, settings.nnodes, settings.node_rank
        yield partial(check_ranks, *ranks, settings.dist_init_addr, settings.device)
    yield partial(_check_exact, settings)
    yield partial(_check_device, settings)


def _check_device(settings: Settings) -> None:
    device = choose_device(settings.device)
    check_device(device)
    check_room(settings.cache, device)


def _check_exact(settings: Settings) -> None:
    if settings.deterministic and settings.hits == "rounded":
        raise ConfigError("deterministic needs exact hits: with rounded ones an answer depends on what was cached")


def _held(usage: StorageUsage) -> str:
    """What a storage holds, as far as it tells."""
    told = [
        "only read" if usage.read_only else None,
        f"{usage.objects} objects" if usage.objects is not None else None,
        format_size(usage.bytes) if usage.bytes is not None else None,
    ]
    return "".join(f", {text}" for text in told if text)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address that does not listen yet, so no client waits for a model that may never load."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"cannot listen on {host!r}: {getattr(e, 'strerror', None) or e}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # accepted sockets inherit it
        listener.bind(address)
    except OSError as e:
        listener.close()
        other = "--host" if e.errno == errno.EADDRNOTAVAIL else "--port, or 0"
        raise ConfigError(f"cannot listen on {host} port {port}: {e.strerror}; give another {other}") from None
    return listener


def _listen(listener: socket.socket, url: str) -> None:
    try:
        listener.listen(BACKLOG)
    except OSError as e:  # another process bound the address too and was the first to listen
        raise ConfigError(f"cannot listen on {url}: {e.strerror}; give another --port, or 0") from None


def _url(listener: socket.socket, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(path: Path, url: str) -> None:
    """Write the URL atomically: a reader that sees the file finds it complete."""
    unfinished = path.with_name(path.name + "~")
    try:
        unfinished.write_text(url + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
