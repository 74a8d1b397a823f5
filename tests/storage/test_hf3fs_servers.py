"""The demo's storage round on a mount of type fuse.hf3fs that two servers share, one of which is killed in mid-put."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import pytest
from hf3fs_mounts import Bindfs
from hf3fs_server import end_servers
from processes import stop, until

from kvarve import demo
from kvarve.commands import Demo
from kvarve.demo_report import Round
from kvarve.errors import KvarveError
from kvarve.storage.hf3fs.metadata.entries import RESERVED

SIZE = demo.Size(conversations=1, tasks=1, turns=2, answer_tokens=8)


class Servers:
    """`kvarve serve` processes by name, all on one store whose metadata is a server of this machine."""

    def __init__(self, folder: Path, state: Path, mount: Bindfs) -> None:
        self.storage = f"hf3fs://{mount.mount}/kvarve?capacity=1GiB"
        self._folder, self._state, self._running = folder, state, dict[str, ExitStack]()
        self._opening = demo.conversations(SIZE)
        self._tasks = [demo.recall_task(7, tokens=SIZE.tokens, facts=SIZE.facts, questions=SIZE.turns)]

    def start(self, name: str) -> demo.Client:
        (self._folder / name).mkdir(exist_ok=True)
        stack, options = ExitStack(), Demo(storage=self.storage)
        client = stack.enter_context(demo.server(options, self._folder / name, self._folder / f"{name}.log"))
        self._running[name] = stack
        return client

    def pid(self, name: str) -> int:
        for words in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if str(self._folder / name / "ready").encode() in words.read_bytes().split(b"\0"):
                    return int(words.parent.name)
        raise AssertionError("it runs")

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        with pytest.raises(KvarveError, match="exit code -9"):
            self._running.pop(name).close()

    def reserved(self) -> list[str]:
        """The names of objects that are being written, as the metadata keeps them."""
        (journal,) = (self._state / "kvarve" / "hf3fs").glob("*/slots.db")
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
            return [name for (name,) in database.execute("SELECT name FROM slots WHERE state = ?", (RESERVED,))]

    def round(self, name: str, client: demo.Client) -> dict[str, object]:
        """A round of the demo: `cold` or `storage`."""
        result = Round(name)
        demo.run_round(result, client, SIZE, self._opening, self._tasks, lambda _: None)
        return result.row()

    def close(self) -> None:
        for name in [*self._running]:
            with suppress(AssertionError):
                self.signal(name, signal.SIGCONT)
            self._running.pop(name).close()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mount = Bindfs(tmp_path / "3fs")
    servers = Servers(tmp_path, state, mount)
    try:
        yield servers
    finally:
        servers.close()
        end_servers(state / "kvarve" / "hf3fs")
        mount.close()


def test_what_one_server_stored_on_a_mount_the_other_serves_also_when_the_first_is_killed_in_mid_put(
    servers: Servers, tmp_path: Path
) -> None:
    one, two = servers.start("one"), servers.start("two")
    cold = servers.round("cold", one)
    one.flush("device,host")  # all of it is in storage now

    def is_warm(client: demo.Client) -> bool:
        row = servers.round("storage", client)
        assert row["outputs_sha256"] == cold["outputs_sha256"], "the answers are those of the cold round"
        assert row["cached_by_tier"]["storage"] >= 0.9 * row["prompt_tokens"]  # type: ignore[index, operator]
        return True

    assert is_warm(two)

    asked = []

    def ask_for_ever() -> None:
        while True:
            asked.append([{"role": "user", "content": f"Story {len(asked)}: {'and then it rained ' * 200}"}])
            one.chat(asked[-1], 1, True)

    def stands_in_a_put() -> bool:
        """Stop it where something is reserved; go on if that has been committed until it stood still."""
        if not servers.reserved():
            return False
        stop(servers.pid("one"))
        if not servers.reserved():
            servers.signal("one", signal.SIGCONT)
            return False
        return True

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_for_ever)
        until(stands_in_a_put, "a put")
        half = servers.reserved()
        servers.kill("one")
        with pytest.raises((httpx.HTTPError, KvarveError)):
            asking.result(60)
    assert half

    assert is_warm(two)
    for messages in asked[-2:]:
        text = two.chat(messages, 4, True).text
        two.flush("device,host")
        assert two.chat(messages, 4, True).text == text == two.chat(messages, 4, False).text
    assert is_warm(servers.start("one"))
    for name in ("one", "two"):
        assert "not on 3FS" not in (tmp_path / f"{name}.log").read_text()
