"""Several real servers on one store behind the real sglang-router, started as docs/several-servers.md says."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from servers import CHUNK, serving
from talk import LONG_S, metrics

pytestmark = pytest.mark.long
PAGE = Path(__file__).parents[2] / "docs" / "several-servers.md"
KEY = "the-key"
WHOLE = 3 * CHUNK  # of a story, in tokens
# Of a test, which is not to wait for what an operator can wait for.
SOON = ("--health-check-interval-secs", "1", "--health-success-threshold", "1", "--cb-timeout-duration-secs", "1")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def router_words() -> list[str]:
    """The router's command, as the page has it."""
    (command,) = re.findall(r"^ +(python -m sglang_router(?:.*\\\n)*.*)$", PAGE.read_text(), re.MULTILINE)
    return str(command).replace("\\\n", " ").split()


@contextmanager
def routing(folder: Path, *urls: str) -> Iterator[httpx.Client]:
    """The page's router in front of these servers."""
    words = router_words()
    first = words.index("--worker-urls") + 1
    last = next(at for at in range(first, len(words)) if words[at].startswith("--"))
    words[first:last] = urls
    port = free_port()
    for name, value in (("--host", "127.0.0.1"), ("--port", port), ("--prometheus-port", free_port())):
        words[words.index(name) + 1] = value
    words += [*SOON, "--api-key", KEY]
    with (
        (folder / "router").open("w") as log,
        subprocess.Popen([sys.executable, *words[1:]], stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as client,
    ):
        client.headers["Authorization"] = f"Bearer {KEY}"
        try:
            yield client
        finally:
            process.kill()


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 4 * LONG_S
    while not holds():
        assert time.monotonic() < end, f"it does not come: {what}"
        time.sleep(0.05)


def serve_all(router: httpx.Client, count: int) -> bool:
    try:
        return router.get("/readiness").json().get("healthy_workers") == count  # type: ignore[no-any-return]
    except httpx.ConnectError:
        return False


def story(number: int) -> str:
    return f"{number}: " + "a long story about it, " * 10  # a token is a byte


def ask(router: httpx.Client, prompt: str) -> dict[str, int]:
    """Where the tokens of a prompt were found."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    answer = router.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, int] = answer.json()["meta_info"]["cached_tokens_details"]
    return found


def stays(found: dict[str, int]) -> bool:
    """Whether the server that was asked is the one that has computed this before."""
    return found["device"] >= WHOLE and not found["storage"]


def served(server: httpx.Client) -> float:
    return sum(value for name, value in metrics(server).items() if name.startswith("kvarve_requests_total.done"))


def ask_until_all_serve(router: httpx.Client, first: int, *servers: httpx.Client) -> range:
    """Ask for stories, eight at once, until each server has told some; the numbers of the stories."""
    before, last = [*map(served, servers)], first

    def all_serve() -> bool:
        nonlocal last
        with ThreadPoolExecutor(8) as clients:
            last += len([*clients.map(lambda number: ask(router, story(number)), range(last, last + 8))])
        return all(now > then for now, then in zip(map(served, servers), before, strict=True))

    until(all_serve, "each server has answered")
    return range(first, last)


def under_traffic(router: httpx.Client, numbers: range, change: Callable[[], object]) -> list[dict[str, int]]:
    """Where prompts were found that were asked for all the time while something changed."""
    over, found = threading.Event(), list[dict[str, int]]()

    def ask_on(number: int) -> None:
        while not over.is_set():
            found.append(ask(router, story(number)))

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask_on, number) for number in numbers[:4]]
        try:
            change()
            seen = len(found)
            until(lambda: len(found) > seen + 16 or any(each.done() for each in asking), "more answers")
        finally:
            over.set()
        for each in asking:
            each.result()
    return found


def test_a_prompt_finds_its_server_and_its_pages_after_the_end_of_that_and_after_its_restart(
    checkpoint: Path, tmp_path: Path
) -> None:
    words = ["--model", checkpoint, "--storage", f"file://{tmp_path}/pages?capacity=64MiB", "--api-key", KEY]
    for name in ("steady", "killed", "again"):
        (tmp_path / name).mkdir()
    with (
        serving(tmp_path / "steady", *words) as (_, steady),
        serving(tmp_path / "killed", *words) as (process, server),
        routing(tmp_path, str(steady.base_url), str(server.base_url)) as router,
    ):
        until(lambda: serve_all(router, 2), "the router knows both")
        told = ask_until_all_serve(router, 0, steady, server)
        assert all(stays(ask(router, story(number) + "and so on")) for number in told)
        assert server.post("/flush_cache", headers=router.headers).status_code == 200  # so all that it has is stored

        def kill() -> None:
            process.send_signal(signal.SIGKILL)
            process.wait()

        found = under_traffic(router, told, kill) + [ask(router, story(number)) for number in told]
        assert all(sum(each.values()) >= WHOLE for each in found) and any(each["storage"] for each in found)
        until(lambda: serve_all(router, 1), "the router has seen the end")
        with serving(tmp_path / "again", *words, "--port", server.base_url.port) as (_, again):
            under_traffic(router, told, lambda: until(lambda: serve_all(router, 2), "the router knows both again"))
            more = ask_until_all_serve(router, told.stop, steady, again)
            assert all(stays(ask(router, story(number) + "and so on")) for number in more)
