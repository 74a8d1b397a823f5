"""The pictures of docs/live.md: a server under load, whose page Chromium shows light, dark and on a phone.

PYTHONPATH=tests/server .venv/bin/python tools/pictures.py docs --minutes 6
PYTHONPATH=tests/server .venv/bin/python tools/pictures.py docs --minutes 3 --vllm .venv-vllm/bin/python
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from browser import chromium
from selenium.webdriver import Chrome

from kvarve.reference.server.serve import Server, Settings

KEY, API_KEY, USERS = "the operator's key", "the clients' key", 4
WORDS = ("river", "stone", "bridge", "lamp", "town", "ship", "home", "under", "every", "when", "old", "runs")
SIZES = {"live": (1400, 900, False), "live-dark": (1400, 900, True), "live-phone": (390, 844, False)}
VLLM = {"live-vllm": (1400, 1500, False)}
PORT = 9477  # of the page beside vLLM
ENGINES = Path(__file__).parents[1] / "tests" / "engines"
TROUBLE = {"live-trouble": (1400, 375, False)}  # its storage's folder has been removed


def words(count: int, seed: object) -> str:
    return " ".join(random.Random(str(seed)).choices(WORDS, k=count))


def talk(url: str, user: int, stop: threading.Event) -> None:
    """Conversations that begin with one of three texts, each turn a little longer; now and then something new."""
    dice = random.Random(user)
    with httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {API_KEY}"}) as client:
        while not stop.is_set():
            prompt = words(dice.choice((300, 520, 800)), f"text {dice.randrange(3)}")
            for _ in range(dice.randrange(1, 5)):
                prompt += f" {words(60, dice.random())}"
                body = {"prompt": prompt, "max_tokens": dice.randrange(8, 40), "cache_salt": f"tenant {user % 3}"}
                with suppress(httpx.HTTPError):
                    client.post("/v1/completions", json=body)
                if stop.wait(dice.expovariate(1.2)):
                    return


def shown(browser: Chrome, url: str, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        width, height, dark = (SIZES | TROUBLE | VLLM).get(name) or SIZES[f"live{name.removeprefix('idle')}"]
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(f"{url}/live/icon.svg")  # it asks for nothing yet
        if name not in VLLM:
            browser.execute_script("sessionStorage.setItem('kvarve.key', arguments[0])", KEY)
        browser.get(url)
        time.sleep(4)
        browser.save_screenshot(str(folder / f"{name}.png"))


def beside_vllm(python: Path, folder: Path, minutes: float) -> None:
    """The page beside a vLLM of two workers that has been talked with for so long."""
    with TemporaryDirectory() as made, chromium(width=1400, height=900) as browser:
        subprocess.run([python, ENGINES / "tiny_models.py", "gemma3", made], check=True)
        given = {"model": f"{made}/gemma3", "storage": f"file://{made}/pages?capacity=48MiB", "ranks": 2}
        command = [python, "-W", "ignore", ENGINES / "vllm_page.py", json.dumps(given | {"talk_s": 60 * minutes})]
        path = os.pathsep.join(str(ENGINES.parents[at] / name) for at, name in ((1, "src"), (1, "tests")))
        environment = os.environ | {"KVARVE_PORT": str(PORT), "PYTHONPATH": path}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as engine:
            assert engine.stdin is not None and engine.stdout is not None
            end, url = time.monotonic() + 600, f"http://127.0.0.1:{PORT}"
            while not _answers(url):
                assert engine.poll() is None and time.monotonic() < end, "vLLM has not started"
                time.sleep(1)
            time.sleep(54 * minutes)
            shown(browser, url, folder, [*VLLM])
            engine.stdout.read(1)
            engine.stdin.close()


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/live/data").is_success
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--idle", action="store_true", help="take idle.png, idle-dark.png and idle-phone.png too")
    parser.add_argument("--vllm", type=Path, help="take live-vllm.png instead, with vLLM of this Python")
    given = parser.parse_args()
    if given.vllm:
        beside_vllm(given.vllm, given.folder, given.minutes)
        return
    stop = threading.Event()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(TemporaryDirectory()))
        storage = f"file://{folder}/pages?capacity=48MiB"
        memory = {"device_memory": 6 << 20, "host_memory": 10 << 20}
        settings = Settings(port=0, threads=1, storage=(storage,), api_key=API_KEY, admin_key=KEY, **memory)  # type: ignore[arg-type]
        server = ends.enter_context(Server(settings))
        browser = ends.enter_context(chromium(width=1400, height=900))
        if given.idle:
            shown(browser, server.url, given.folder, ("idle", "idle-dark", "idle-phone"))
        ends.callback(stop.set)
        for user in range(USERS):
            threading.Thread(target=talk, args=(server.url, user, stop), daemon=True).start()
        with httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
            time.sleep(60 * given.minutes * 0.3)
            client.post("/flush_cache", params={"tiers": "device"}).raise_for_status()
            time.sleep(60 * given.minutes * 0.25)
            client.delete("/admin/storage").raise_for_status()
            time.sleep(60 * given.minutes * 0.15)
            client.put("/admin/storage", json={"url": storage}).raise_for_status()
            time.sleep(60 * given.minutes * 0.3)
        shown(browser, server.url, given.folder, [*SIZES])
        shutil.rmtree(folder / "pages", ignore_errors=True)
        time.sleep(10)
        shown(browser, server.url, given.folder, [*TROUBLE])


if __name__ == "__main__":
    main()
