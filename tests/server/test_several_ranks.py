"""A server whose model several processes compute: one of them dies or stops, and all change at once or none does."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from servers import SHAPE

import forks
import gpu_nodes

PATIENCE_S = 300.0
DEADLINE_S = 20.0
ADMIN = {"Authorization": "Bearer the-admin"}
PROMPT = "a long story about several ranks, " * 30
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
OTHERS: dict[int, list[int]] = {}  # by process: those of the other ranks, where it has not started them


@contextmanager
def serving(
    folder: Path, ranks: int, *words: str, gpu: bool = False
) -> Iterator[tuple["subprocess.Popen[bytes]", httpx.Client]]:
    """`gpu`: two ranks compute on one."""
    ready, log = folder / "ready", folder / "log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvarve", "serve", "--tp", str(ranks), "--port", "0", "--ready-file", str(ready)]
    command += ["--storage-wait", "all", "--admin-key", "the-admin", *SHAPE, *words]
    command += ["--rank-deadline-s", str(DEADLINE_S)]
    environments = [gpu_nodes.environment(node) for node in range(2)] if gpu else [None]
    if gpu:
        command += ["--device", "cuda", "--nnodes", "2", "--dist-init-addr", gpu_nodes.address(), "--node-rank"]
    with log.open("w") as output:
        process, *of_others = [
            forks.Popen([*command, str(node)] if gpu else command, env=each, stdout=output, stderr=output)
            for node, each in enumerate(environments)
        ]
    OTHERS[process.pid] = [each.pid for each in of_others]
    try:
        end = time.monotonic() + PATIENCE_S
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        with httpx.Client(base_url=ready.read_text().strip(), timeout=PATIENCE_S) as client:
            yield process, client
    finally:
        for each in (process, *of_others):
            each.kill()
            each.wait()


def others(process: "subprocess.Popen[bytes]") -> list[int]:
    """The processes of the other ranks, the first of them first."""
    if OTHERS[process.pid]:
        return OTHERS[process.pid]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ask(client: httpx.Client, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0} | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["kvarve"]["cached_tokens"]
    return found


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=ON_GPU)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.long)])
def test_without_one_rank_all_end_and_say_which_and_a_restart_serves_from_storage(
    how: str, gpu: bool, tmp_path: Path
) -> None:
    storage = ("--storage", f"file://{tmp_path}/store?capacity=64MiB")
    with serving(tmp_path, 2, *storage, gpu=gpu) as (process, client):
        cold = ask(client)
        assert not any(cached(cold).values())
        assert client.post("/flush_cache", headers=ADMIN).status_code == 200  # after the backups
        (other,) = others(process)
        os.kill(other, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        began = time.monotonic()
        with suppress(httpx.TransportError):  # it may have ended before it could answer
            assert client.post("/v1/completions", json={"prompt": "another one", "max_tokens": 4}).status_code >= 500
        ended = process.wait(PATIENCE_S)
        took_s = time.monotonic() - began
        said = (tmp_path / "log").read_text()
        assert ended == 2, said
        assert re.search(r"rank 1: it is (dead|late)" if how == "killed" else "rank 1: it is late", said), said
        # A rank of this node ends with rank 0; one of another node that was stopped has to be ended there.
        gone = not Path(f"/proc/{other}").exists() or "Z" in Path(f"/proc/{other}/stat").read_text().split()[2]
        assert gone or (gpu and how == "stopped")
        assert took_s < DEADLINE_S + 40, "what the processes take to end, on a slow machine"
    with serving(tmp_path, 2, *storage, gpu=gpu) as (_, client):
        warm = ask(client)
    assert cached(warm)["storage"] > 0 and warm["choices"] == cold["choices"]


DETACHED = {"attached": False, "url": None}
POLICIES = {
    "write_policy": ["through", "through:2", "back"],
    "storage_wait": ["none", "2s+0.25s/Ki", "all"],
}


class Operator:
    """Changes the storage of a server, and knows what each change has to come to. `answers`: by kind and status."""

    def __init__(self, client: httpx.Client, folder: Path, seed: int) -> None:
        self._client, self._dice = client, random.Random(seed)
        self.urls = [f"file://{folder}/{name}?capacity=64MiB" for name in ("one", "other")]
        (folder / "no-folder").touch()
        self._impossible = f"file://{folder}/no-folder/store?capacity=64MiB"
        self.answers: Counter[tuple[str, int]] = Counter()
        self.now = self._state()

    def change(self) -> None:
        """The server says why if it refuses, and then is as it was."""
        match kind := self._dice.choice(["attach", "attach", "detach", "flush", "at once", "misspelt", "impossible"]):
            case "attach":
                self.attach(self._dice.choice(self.urls), **self._some_policies())
            case "detach":
                self._made(kind, self._client.delete("/admin/storage", headers=ADMIN), self.now | DETACHED)
            case "flush":
                flush = self._client.post("/flush_cache", params={"timeout": "20"}, headers=ADMIN)
                self._made(kind, flush, self.now)
            case "misspelt":
                policy = self._dice.choice([*POLICIES])
                put = self._put(self.urls[0], **{policy: "write_thru"})
                self._refused(kind, put, 400, "must be .*got 'write_thru'")
            case "impossible":
                self._refused(kind, self._put(self._impossible), 500, "no-folder")
            case "at once":  # the second is refused if the first one is still under way
                with ThreadPoolExecutor(2) as both:
                    answers = [*both.map(self._put, self.urls)]
                refused = {each.json()["error"]["code"] for each in answers if each.status_code != 200}
                assert refused <= {"change_under_way", "busy"}
                self.now |= {name: self._state()[name] for name in DETACHED}
        assert self._state() == self.now, kind

    def attach(self, url: str, **more: object) -> None:
        policies = {name: each for name, each in more.items() if name in self.now}
        self._made("attach", self._put(url, **more), self.now | {"attached": True, "url": url} | policies)

    def _some_policies(self) -> dict[str, str]:
        """Both, one or none: those that are not given stay."""
        return {name: self._dice.choice(known) for name, known in POLICIES.items() if self._dice.random() < 0.7}

    def _put(self, url: str, **more: object) -> httpx.Response:
        return self._client.put("/admin/storage", json={"url": url} | more, headers=ADMIN)

    def _made(self, kind: str, answer: httpx.Response, now: dict[str, Any]) -> None:
        self.answers[kind, answer.status_code] += 1
        if answer.status_code != 200:  # a slow machine may not get round to it in time, or only later
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy"), answer.text
            now = now if self._state() == now else self.now
        self.now = now

    def _refused(self, kind: str, answer: httpx.Response, status: int, why: str) -> None:
        self.answers[kind, answer.status_code] += 1
        assert answer.status_code == status and re.search(why, answer.text), answer.text

    def _state(self) -> dict[str, Any]:
        told = self._client.get("/admin/storage", headers=ADMIN).json()
        return {name: told.get(name) for name in ("attached", "url", *POLICIES)}


@pytest.mark.long
@pytest.mark.parametrize("changes", [30, pytest.param(500, marks=pytest.mark.timeout(3600))])
def test_changes_of_the_storage_under_traffic_are_made_on_all_ranks_or_none(changes: int, tmp_path: Path) -> None:
    over, failed = threading.Event(), list[str]()
    with serving(tmp_path, 4, "--offload-pays-at", "0") as (process, client):
        expected = {number: ask(client, f"{number} {PROMPT}", skip_reading_prefix_cache=True) for number in range(4)}

        def ask_on(number: int) -> tuple[int, int]:
            """How many answers, and how many of them from storage."""
            count = stored = 0
            while not over.is_set():
                answer = client.post(
                    "/v1/completions", json={"prompt": f"{number} {PROMPT}", "max_tokens": 4, "temperature": 0}
                )
                if answer.status_code != 200 or answer.json()["choices"] != expected[number]["choices"]:
                    failed.append(answer.text)
                    continue
                count, stored = count + 1, stored + (cached(answer.json())["storage"] > 0)
            return count, stored

        operator = Operator(client, tmp_path, seed=20)
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(ask_on, number) for number in range(4)]
            try:
                for _ in range(changes):
                    operator.change()
            finally:
                over.set()
            counts = [each.result() for each in asked]
        print(operator.answers, counts)
        assert not failed
        assert all(count for count, _ in counts)
        for kind in ("attach", "detach", "flush"):
            tries = sum(count for (each, _), count in operator.answers.items() if each == kind)
            assert operator.answers[kind, 200] >= tries / 2 > 0, kind
        assert operator.answers["misspelt", 400] and operator.answers["impossible", 500]
        # All ranks have made the last change: they report, and compare what they have decided, in each of these turns.
        operator.attach(operator.urls[0], write_policy="through", storage_wait="all", back_up=True)
        assert client.post("/flush_cache", headers=ADMIN).status_code == 200
        for number, answer in expected.items():
            warm = ask(client, f"{number} {PROMPT}")
            assert cached(warm)["storage"] > 0 and warm["choices"] == answer["choices"]
        assert client.get("/health").status_code == 200 and process.poll() is None
        for pid in (*others(process), process.pid):  # as a terminal or a service manager does
            os.kill(pid, signal.SIGTERM)
        ended, said = process.wait(PATIENCE_S), (tmp_path / "log").read_text()
        assert ended == 0, said
        assert "the ranks end" not in said and "differ" not in said, said


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    """Two machines on one network, as words to put in front of a command: network namespaces."""
    names = [f"kvarve-{os.getpid()}-{side}" for side in "ab"]
    words = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add kv0 netns {names[0]} type veth peer name kv0 netns {names[1]}",
        *(f"ip -n {name} addr add 10.77.0.{number}/24 dev kv0" for number, name in enumerate(names, 1)),
        *(f"ip -n {name} link set {device} up" for name in names for device in ("lo", "kv0")),
    ]
    try:
        for line in words:
            done = forks.run(line.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network can be made here: {line}: {done.stderr}")
        yield [["ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=kv0"] for name in names]
    finally:
        for name in names:
            forks.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ip") is None, reason="networks are made by iproute2")
def test_ranks_of_two_machines_are_one_server(nodes: list[list[str]], tmp_path: Path) -> None:
    ready, started = tmp_path / "ready", list["subprocess.Popen[bytes]"]()
    try:
        for number, node in enumerate(nodes):
            words = ["serve", "--tp", "2", "--nnodes", "2", "--node-rank", str(number), "--port", "8000", *SHAPE]
            words += ["--dist-init-addr", "10.77.0.1:29500"]
            words += ["--ready-file", str(ready)] if not number else []
            with (tmp_path / f"log-{number}").open("w") as log:
                command = [*node, sys.executable, "-m", "kvarve", *words]
                started.append(forks.Popen(command, stdout=log, stderr=log))
        end = time.monotonic() + PATIENCE_S
        while not ready.exists():
            assert all(each.poll() is None for each in started) and time.monotonic() < end
            time.sleep(0.05)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "temperature": 0})
        asks = "import httpx, sys; print(httpx.post(sys.argv[1], content=sys.argv[2], timeout=300).text)"
        ask = [*nodes[0], sys.executable, "-c", asks, "http://127.0.0.1:8000/v1/completions", body]
        cold, warm = (json.loads(forks.run(ask, capture_output=True, check=True).stdout) for _ in range(2))
        assert not any(cached(cold).values())
        assert cached(warm)["device"] > 0 and warm["choices"] == cold["choices"]
        started[1].send_signal(signal.SIGTERM)
        again = json.loads(forks.run(ask, capture_output=True, check=True).stdout)
        assert again["choices"] == cold["choices"]
        started[0].send_signal(signal.SIGINT)
        said = (tmp_path / "log-1").read_text()
        assert [each.wait(PATIENCE_S) for each in started] == [0, 0], said
        assert "computes on until rank 0 ends" in said
    finally:
        for each in started:
            each.kill()
            each.wait()
