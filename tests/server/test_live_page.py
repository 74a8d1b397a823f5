"""What an operator sees in Chromium on the live page of a real server.

`KVARVE_PICTURES=docs` (`make pictures`) has the first test write the picture of the documentation.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from browser import chromium
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from servers import settings
from talk import COMPLETIONS, complete

from kvarve.reference.server.serve import Server

T = TypeVar("T")
LONG_S = 120.0
ID = "x-request-id"
SECRET = "a word of mine"
NAME = '<script>document.title = "broken"</script><b>singer'  # a hostile name of a model


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Chrome) -> Chrome:
    """A page that asks nothing, without the troubles of those before it, whose servers are gone."""
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    return browser


def see(page: Chrome, what: Callable[[], T]) -> T:
    """Look until something is seen."""
    end = time.monotonic() + LONG_S
    while True:
        try:
            if found := what():
                return found
        except StaleElementReferenceException:  # it was made anew while it was looked at
            pass
        assert time.monotonic() < end, page.find_element(By.TAG_NAME, "body").text


def all_of(page: Chrome, selector: str) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, selector)


def text(page: Chrome, selector: str) -> str:
    found = all_of(page, selector)
    return found[0].text if found else ""


def row(page: Chrome, id: str) -> list[str]:
    """The cells of a request that has ended."""
    return [cell.text for cell in all_of(page, f'#requests tr[data-request="{id}"] td')]


def filled(page: Chrome, tier: str) -> float:
    """The pixels of a tier's bar that are filled."""
    return sum(part.size["width"] for part in all_of(page, f'.tier[data-tier="{tier}"] .bar span'))


def troubles(page: Chrome) -> list[str]:
    """Errors and warnings of the console since the last call."""
    return [each["message"] for each in page.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]


def asked(page: Chrome) -> set[str]:
    """The URLs that pages have asked for since the last call."""
    found = set()
    for entry in page.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.add(str(message["params"]["request"]["url"]))
    return found


def opened(page: Chrome, url: str) -> None:
    page.get(url)
    see(page, lambda: text(page, "#state").startswith("serving"))


def ask(client: httpx.Client, prompt: Any, id: str, **more: Any) -> dict[str, Any]:
    answer = client.post(COMPLETIONS, json={"prompt": prompt, "temperature": 0, **more}, headers={ID: id})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("own_server", [{"storage": ("memory://live-page?capacity=16MiB",)}], indirect=True)
def test_a_viewer_sees_tiers_fill_hits_and_why(
    page: Chrome, own_server: Server, own_client: httpx.Client, song: str, tmp_path: Path
) -> None:
    opened(page, own_server.url)
    assert filled(page, "device") == filled(page, "host") == 0 and "nothing has been resumed" in text(page, "#hottest")
    for number in range(6):  # conversations that begin alike
        turns = f"{song * 4}{SECRET} {number} "
        for turn in range(3):
            turns += song
            ask(own_client, turns, f"chat-{number}-{turn}", cache_salt="a salt of mine", max_tokens=8)
    cold = ask(own_client, f"another: {song * 4}", "cold")["usage"]
    warm = ask(own_client, f"another: {song * 4}", "warm")["usage"]
    assert own_server.engine.settle()
    see(page, lambda: row(page, "warm") and row(page, "cold"))
    see(page, lambda: filled(page, "device") > 0 and filled(page, "host") > 0 and filled(page, "storage") > 0)
    full = see(page, lambda: filled(page, "device"))
    shown, before = see(page, lambda: (row(page, "warm"), row(page, "cold")))
    device = shown[5]
    assert before[5] == "0" and cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert device == str(warm["kvarve"]["cached_tokens"]["device"]) != "0"
    assert shown[2] == "length" and shown[1] == COMPLETIONS

    see(page, lambda: page.find_element(By.CSS_SELECTOR, '#requests tr[data-request="warm"] button').click() or True)
    why = see(page, lambda: text(page, "#requests .why"))
    assert f"{device} hit_device: cached: its page was on the device" in why
    strip = "#requests .why .strip span"
    parts = see(page, lambda: {part.get_attribute("class"): part.size["width"] for part in all_of(page, strip)})
    tokens = warm["kvarve"]["reasons"]
    assert parts["r-hit_device"] > parts["r-below_grid"] > 0 and len(parts) == len(tokens)
    hottest = see(page, lambda: [each.text for each in all_of(page, "#hottest tr") if " device" in each.text])
    assert any(each.endswith("device") for each in hottest)
    see(page, lambda: text(page, '[data-figure="prompts cached"]').strip("%–").isdigit())
    see(page, lambda: all_of(page, "#hits rect.device") and all_of(page, "#hits rect.computed"))
    see(page, lambda: "ms" in text(page, '[data-figure="TTFT, median"]'))
    see(page, lambda: "host-to-storage" in text(page, "#lanes"))
    page.execute_script("scrollTo(0, 0)")
    page.save_screenshot(str(Path(os.environ.get("KVARVE_PICTURES", tmp_path)) / "live.png"))

    own_client.post("/flush_cache", params={"tiers": "device"})
    see(page, lambda: filled(page, "device") < full)
    seen = page.page_source
    assert SECRET not in seen and "a salt of mine" not in seen and song[:5] not in seen
    assert troubles(page) == []
    urls = asked(page)
    assert f"{own_server.url}/live/data" in urls and all(url.startswith(f"{own_server.url}/") for url in urls), urls


@pytest.mark.long
@pytest.mark.parametrize("own_server", [{"api_key": "schlüssel 🔑"}], indirect=True)
def test_it_asks_for_the_key_and_refuses_a_wrong_one(page: Chrome, own_server: Server) -> None:
    page.get(own_server.url)
    see(page, lambda: page.find_element(By.ID, "key").is_displayed())
    assert not page.find_element(By.ID, "main").is_displayed() and "singer" not in page.page_source

    def give(key: str) -> None:
        page.find_element(By.ID, "key").send_keys(key)
        page.find_element(By.CSS_SELECTOR, "#ask button").click()

    give("wrong")
    see(page, lambda: text(page, "#wants") == "wrong API key")
    assert page.execute_script("return sessionStorage.length") == 0
    page.execute_script("document.getElementById('key').value = 'schlüssel 🔑'")  # chromedriver types no emoji
    page.find_element(By.CSS_SELECTOR, "#ask button").click()
    see(page, lambda: page.find_element(By.ID, "main").is_displayed())
    assert not page.find_element(By.ID, "ask").is_displayed() and text(page, "#model") == "singer"
    page.refresh()
    see(page, lambda: page.find_element(By.ID, "main").is_displayed())
    page.find_element(By.ID, "forget").click()
    see(page, lambda: page.find_element(By.ID, "ask").is_displayed())
    assert page.execute_script("return sessionStorage.length") == 0
    assert "schlüssel" not in page.page_source and own_server.url in page.current_url


@pytest.mark.long
@pytest.mark.parametrize("own_server", [{"served_model_name": NAME}], indirect=True)
def test_hostile_names_are_text(page: Chrome, own_server: Server, own_client: httpx.Client, song: str) -> None:
    ask(own_client, song, "<img/src=x/onerror=document.title='broken'>", model=NAME)
    opened(page, own_server.url)
    assert text(page, "#model") == NAME and page.title == f"kvarve · {NAME}"
    see(page, lambda: "<img/src=x/onerror=" in text(page, "#requests"))
    assert not all_of(page, "#requests img") and not all_of(page, "#model *")
    assert troubles(page) == []


@pytest.mark.long
def test_a_page_that_loses_its_server_says_so_and_recovers(page: Chrome, checkpoint: Path, song: str) -> None:
    with Server(settings(checkpoint)) as server:
        opened(page, server.url)
        port = int(server.url.rpartition(":")[2])
    see(page, lambda: text(page, "#state").startswith("no answer from the server for"))
    assert page.find_element(By.ID, "main").is_displayed(), "what was seen last stays"
    with Server(settings(checkpoint, port=port)) as server:
        see(page, lambda: text(page, "#state").startswith("serving"))
        with httpx.Client(base_url=server.url, timeout=LONG_S) as client:
            complete(client, song)
        see(page, lambda: len(all_of(page, "#requests tr[data-request]")) == 1)


@pytest.mark.long
def test_an_engine_that_has_stopped_is_the_first_thing_on_the_page(page: Chrome, own_server: Server) -> None:
    def breaks() -> None:
        raise AssertionError("a law of the core")

    opened(page, own_server.url)
    with pytest.raises(AssertionError):
        own_server.engine.ask(breaks, LONG_S)
    see(page, lambda: text(page, "#state") == "the engine has stopped")
    assert "a law of the core" in text(page, "#trouble")


@pytest.mark.long
def test_it_is_read_on_a_narrow_and_dark_screen(page: Chrome, own_server: Server) -> None:
    opened(page, own_server.url)
    light = page.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert page.find_element(By.TAG_NAME, "body").value_of_css_property("background-color") != light
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
