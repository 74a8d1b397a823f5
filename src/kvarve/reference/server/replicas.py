"""Replicas: servers in processes of their own, started again when they end, and drained before they are restarted.

One thread keeps them; one more for each asks its `/health`, which an event loop answers that computes nothing. The
front (`server.front`) asks which of them may be sent requests.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvarve.errors import ConfigError, KvarveError
from kvarve.reference.server.kv_events import KvEventsConfig
from kvarve.reference.server.logs import begin_log
from kvarve.reference.server.serve_settings import Settings
from kvarve.reference.server.stopped import ENGINE

log = logging.getLogger(__name__)

START_S = 900.0  # for a replica to read its weights
LOOK_S = 0.1  # between two looks at the processes
STOP_S = 60.0  # for a replica to end its requests and backups
DRAIN_S = 600.0  # for the requests of a replica that is to be restarted
CALM_S = 60.0  # a replica that has lived so long is started again at once
WAITS_S = (0.0, 1.0, 5.0, 30.0)  # before a replica is started again that keeps ending
HEALTH_S = 1.0  # between two questions for a replica's health
SLOW_S = 5.0  # a replica that has not answered for so long gets new requests only if no other answers
HUNG_S = 60.0  # then it is killed. A library has kept all threads of a process that was well waiting for 22 s
KILLED_S = 5.0  # for a process that was killed to end; one that a driver holds takes longer
_DIES_WITH_PARENT = 1  # prctl


class _Health:
    """Of one process that serves, as it says. `unanswered` counts looks, so that no time counts in which the front did
    not run either."""

    def __init__(self) -> None:
        self.unanswered = 0  # looks since it last answered
        self.stopped = False  # its engine has


class Replica:
    """One server. `busy`: requests whose answers the front has not had all of; `work`: the bytes of their prompts."""

    def __init__(self, number: int, settings: Settings, folder: Path, start_s: float = START_S) -> None:
        """`start_s`: for it to serve."""
        # These two belong to the front's event loop, all else to the thread that keeps the replicas.
        self.number, self.url = number, ""
        self.up = False  # it serves
        self.draining = False  # it gets no new requests
        self.busy = self.work = 0
        self.told = 1  # how often it had been started when the front last told it the changes of its storage
        self.starts = 0
        self.restart_from, self.drain_by_s = 0, inf  # of the last restart: how often it had been started, and patience
        self._ready = folder / f"ready-{number}"
        if settings.kv_events_config is not None:  # each publishes on ports of its own
            events = KvEventsConfig.of_json(settings.kv_events_config).of_rank(number).json()
            settings = replace(settings, kv_events_config=events)
        own = replace(settings, dp=1, host="127.0.0.1", port=0, ready_file=self._ready)
        # Of the front alone: a replica sees no TLS, answers no page, and is ended when its requests have.
        self._settings = replace(own, tls_cert=None, tls_key=None, cors_origin=(), allowed_host=(), drain_s=0.0)
        self._process: BaseProcess | None = None
        self._start_s = start_s
        self._started_s, self._ended_s = 0.0, -inf
        self._stop_by_s, self._killed = inf, False  # it was told to end; or need not be told
        self._health = _Health()
        self._failures = 0  # in a row

    @property
    def able(self) -> bool:
        """Whether it may be sent requests."""
        return self.up and not self.draining

    @property
    def slow(self) -> bool:
        """Whether it hangs, or computes so much that it answers nothing for a while."""
        return self._health.unanswered * LOOK_S > SLOW_S

    def start(self) -> None:
        self._ready.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # whatever cleans temporary files
        self._ready.unlink(missing_ok=True)
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(
            target=_serve, args=(self.number, self._settings, os.getpid()), name=f"kvarve replica {self.number}"
        )
        try:
            process.start()
        except OSError as e:  # no memory, or too many processes
            self._failures, self._ended_s = self._failures + 1, time.monotonic()
            log.error("replica %d cannot be started: %s; tried again", self.number, e)
            return
        self._process, self._health = process, _Health()
        self._started_s, self._stop_by_s, self._killed = time.monotonic(), inf, False
        self.starts += 1

    def look(self) -> bool:
        """See what has become of the process; True if it has just ended."""
        if self._process is None:
            return False
        self._health.unanswered += self.up
        if why := self._overdue():
            log.error("replica %d %s: killed", self.number, why)
            self._kill()
        elif self.up and self._health.stopped:
            log.error("replica %d: its engine has stopped, see its error above: it is started again", self.number)
            self.stop()
        if not self._process.is_alive():
            asked, now_s = self._stop_by_s < inf, time.monotonic()
            well = asked and not self._health.stopped
            self._failures = 0 if well or now_s - self._started_s > CALM_S else self._failures + 1
            self._process, self.up, self._ended_s = None, False, now_s
            if not asked and not self._killed:
                log.error("replica %d has ended by itself: it is started again", self.number)
            return True
        if not self.up and self._stop_by_s == inf and not self._killed:  # else its file may still be there
            with suppress(OSError):
                if url := self._ready.read_text().strip():
                    self.url, self.up = url, True
        return False

    def _overdue(self) -> str:
        """What it has not done within its time; "" if it has."""
        now_s = time.monotonic()
        if self._killed:
            return ""
        if self._stop_by_s < inf:
            return f"has not ended after {STOP_S:.0f} s" if now_s > self._stop_by_s else ""
        if not self.up:
            late = now_s > self._started_s + self._start_s
            return f"does not serve after {self._start_s:.0f} s" if late else ""
        return f"has not answered for {HUNG_S:.0f} s" if self._health.unanswered * LOOK_S > HUNG_S else ""

    def _kill(self) -> None:
        assert self._process is not None
        self.up, self._killed = False, True
        self._process.kill()
        self._process.join(KILLED_S)

    def ask(self) -> None:
        """Ask the server for its health, and wait for the answer: on a thread of its own."""
        health = self._health  # of this process, whatever process is there when it answers
        if not self.up:
            return
        try:
            with closing(HTTPConnection(self.url.removeprefix("http://"), timeout=HUNG_S)) as link:
                link.request("GET", "/health")
                health.stopped = link.getresponse().headers[ENGINE] is not None
        except (TimeoutError, ConnectionRefusedError):
            return
        except (OSError, HTTPException):
            pass  # it has closed the connection, as it has too many; or the front has no descriptor for one
        health.unanswered = 0

    def due(self) -> bool:
        """Whether it has ended, and is to be started again now."""
        wait_s = WAITS_S[min(self._failures, len(WAITS_S) - 1)]
        return self._process is None and time.monotonic() >= self._ended_s + wait_s

    def stop(self) -> None:
        """Have it end its requests and its backups."""
        self.up = False
        if self._process is not None and self._stop_by_s == inf and not self._killed:  # a second signal ends it at once
            self._stop_by_s = time.monotonic() + STOP_S
            self._process.terminate()

    @property
    def over(self) -> bool:
        return self._process is None

    def state(self) -> dict[str, Any]:
        return {
            "replica": self.number,
            "pid": None if self._process is None else self._process.pid,
            "up": self.up,
            "draining": self.draining,
            "busy": self.busy,
            "starts": self.starts,
        }


class Replicas:
    """All replicas, kept by a thread from `start` to `stop`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.all = [Replica(number, settings, folder) for number in range(settings.dp)]
        self.ended: list[int] = []  # numbers of those that have ended since the front last looked
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kvarve replicas", daemon=True)
        self._failed = ""

    def start(self) -> None:
        """Returns when all serve. ConfigError if one does not."""
        self._thread.start()
        for each in self.all:
            name = f"kvarve health of replica {each.number}"
            threading.Thread(target=self._ask, args=(each,), name=name, daemon=True).start()
        end = time.monotonic() + START_S
        while not all(each.up for each in self.all):
            if self._failed or time.monotonic() > end:
                self.stop()
                raise ConfigError(self._failed or f"not all replicas serve after {START_S:.0f} s")
            time.sleep(LOOK_S)

    def restart(self, number: int) -> None:
        """Drain a replica and start it anew; it gets no new requests from now on."""
        each = self.all[number]
        each.restart_from, each.drain_by_s, each.draining = each.starts, time.monotonic() + DRAIN_S, True

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _ask(self, each: Replica) -> None:
        while not self._stopping.wait(HEALTH_S):
            each.ask()

    def _keep(self) -> None:
        while not self._stopping.wait(LOOK_S):
            for each in self.all:
                try:
                    self._keep_one(each)
                except Exception:  # this thread ends only with the server, and the replicas with this thread
                    log.exception("replica %d", each.number)
        for each in self.all:
            each.stop()
        while not all(each.over for each in self.all):
            for each in self.all:
                each.look()
            time.sleep(LOOK_S)

    def _keep_one(self, each: Replica) -> None:
        if each.look():
            self.ended.append(each.number)
            if not each.url:
                self._failed = f"replica {each.number} could not start, see its error above"
        if each.due() and not self._failed:
            each.start()
        if each.up and each.draining and each.starts > each.restart_from:
            each.draining = False  # the new process serves
        elif each.up and each.draining and (not each.busy or time.monotonic() > each.drain_by_s):
            each.stop()


def _serve(number: int, settings: Settings, parent: int) -> None:
    """A replica's life. It ends with the process that started it; Ctrl-C in a terminal is that one's to handle."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)
    os.setpgrp()
    if settings.device == "cuda":  # each replica has devices of its own
        known = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        mine = range(number * settings.tp, (number + 1) * settings.tp)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            known[at] if at < len(known) and known[at] else str(at) for at in mine
        )
    from kvarve.reference.server.serve import run  # which starts replicas

    begin_log(settings.log_level)
    try:
        run(settings, lambda text: None)
    except KvarveError as e:
        print(f"kvarve: {e}", file=sys.stderr)
        sys.exit(2)
