"""What an operator sees in Chromium on the live page of a real server."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from browser import chromium
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from servers import settings
from talk import COMPLETIONS, complete

from kvarve.reference.server.serve import Server

T = TypeVar("T")
LONG_S = 120.0
ID = "x-request-id"
SECRET = "a word of mine"
AXE = (Path(__file__).parent / "axe-core-4.14.1.min.js").read_text()  # of npm, MPL-2.0
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
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


@contextmanager
def screen(page: Chrome, width: int, *, dark: bool) -> Iterator[None]:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def barriers(page: Chrome) -> list[str]:
    """What axe-core finds that keeps people from reading or using the page, contrast included."""
    if not page.execute_script("return 'axe' in window"):
        page.execute_script(AXE)
    run = "axe.run({runOnly: arguments[0], resultTypes: ['violations']}).then(arguments[1])"
    found = page.execute_async_script(run, RULES)["violations"]
    return [f"{each['id']}: {each['help']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize("own_server", [{"storage": ("memory://live-page?capacity=16MiB",)}], indirect=True)
def test_a_viewer_sees_the_first_hit_then_tiers_fill_and_why_and_nothing_is_hard_to_read(
    page: Chrome, own_server: Server, own_client: httpx.Client, song: str
) -> None:
    opened(page, own_server.url)
    assert filled(page, "device") == filled(page, "host") == 0 and "nothing has been resumed" in text(page, "#hottest")
    assert all_of(page, "#trouble")[0].is_displayed() is False and text(page, '[data-figure="hit rate"]') == "–"
    curl = text(page, "#curl")
    assert curl.startswith(f"curl {own_server.url}/v1/completions") and '"singer"' in curl
    assert all_of(page, "#copy-curl")[0].get_attribute("data-copy") == page.execute_script(
        "return document.getElementById('curl').textContent"
    )
    cold = ask(own_client, f"another: {song * 4}", "cold", max_tokens=8)["usage"]
    see(page, lambda: "Send the same again" in text(page, "#first-says"))
    warm = ask(own_client, f"another: {song * 4}", "warm", max_tokens=8)["usage"]
    device = warm["kvarve"]["cached_tokens"]["device"]
    see(page, lambda: f"That was a hit: {device} of {warm['prompt_tokens']}" in text(page, "#first-says"))
    assert re.search(r"\(computed, it took .+\)\.$", text(page, "#first-says"))
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0 < device

    for number in range(6):  # conversations that begin alike
        turns = f"{song * 4}{SECRET} {number} "
        for turn in range(2):
            turns += song
            ask(own_client, turns, f"chat-{number}-{turn}", cache_salt="a salt of mine", max_tokens=8)
    refused = own_client.post(COMPLETIONS, json={"prompt": song, "max_tokens": -1}, headers={ID: "refused"})
    assert refused.status_code == 400 and own_server.engine.settle()
    see(page, lambda: filled(page, "device") > 0 and filled(page, "host") > 0 and filled(page, "storage") > 0)
    see(page, lambda: not all_of(page, "#first")[0].is_displayed())  # there is traffic
    full = see(page, lambda: filled(page, "device"))
    counts = own_server.engine.counts
    hits = sum(tokens for reason, tokens in counts.reasons.items() if reason.value.startswith("hit_"))
    rate = f"{100 * hits / counts.prompt_tokens:.0f}%"
    see(page, lambda: text(page, '[data-figure="hit rate"]') == rate)
    assert text(page, "#hits .legend").startswith(f"device {rate}")
    saved, how = text(page, '[data-figure="saved time"]'), text(page, "#saved-note")
    assert saved.startswith("≈ ") and how.startswith("of prefill: ") and how.endswith("computed a second")
    assert re.search(r"\d ", text(page, '[data-figure="TTFT p50"]')) and text(page, '[data-figure="requests/s"]') > "0"
    assert re.fullmatch(r"\d+% .+\.", text(page, "#advice")) and "below_grid" in text(page, "#whys")
    assert "host to storage" in text(page, "#lanes")
    assert len(all_of(page, ".chart canvas")) == 4
    facts = text(page, "#facts").split("\n")
    assert facts[facts.index("grid") + 1] == "64 tokens" and facts[facts.index("storage") + 1] == "memory"

    assert len(all_of(page, "#requests tr[data-request]")) == 10
    page.find_element(By.CSS_SELECTOR, '#kinds [value="failed"] + span').click()
    see(page, lambda: [each.get_attribute("data-request") for each in all_of(page, "#requests tr")] == ["refused"])
    see(page, lambda: row(page, "refused")[2:3] == ["400\ninvalid_value"])
    page.find_element(By.CSS_SELECTOR, '#kinds [value="all"] + span').click()
    page.find_element(By.ID, "more").click()  # the pointer is in the list from now on
    see(page, lambda: "held still" in text(page, "#held"))
    ask(own_client, song, "a-later-one")
    see(page, lambda: text(page, "#held") == "held still, 1 newer")
    page.find_element(By.CSS_SELECTOR, '#requests tr[data-request="warm"] button[data-why]').click()
    why = see(page, lambda: text(page, "#requests .why"))
    assert f"{device} hit_device: cached: its page was on the device" in why and not row(page, "a-later-one")
    shown = row(page, "warm")
    assert shown[2:4] == ["length", "completions"] and shown[6] == f"{100 * device / warm['prompt_tokens']:.0f}%"
    strip = "#requests .why .strip span"
    parts = {part.get_attribute("class"): part.size["width"] for part in all_of(page, strip)}
    assert parts["r-hit_device"] > parts["r-below_grid"] > 0 and len(parts) == len(warm["kvarve"]["reasons"])
    assert barriers(page) == []
    with screen(page, 390, dark=True):
        assert barriers(page) == []
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        assert max(cell.size["height"] for cell in all_of(page, "#hottest td")) < 60
    page.execute_script("document.activeElement.blur()")
    page.find_element(By.ID, "find").send_keys("chat-3", Keys.TAB)  # the pointer leaves, to the filter
    page.find_element(By.TAG_NAME, "h1").click()
    see(page, lambda: text(page, "#held") == "" and len(all_of(page, "#requests tr[data-request]")) == 2)

    own_client.post("/flush_cache", params={"tiers": "device"})
    see(page, lambda: filled(page, "device") < full)
    see(page, lambda: "of the device flushed" in text(page, "#marks"))
    chart = page.find_element(By.ID, "chart-ttft")
    chart.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    see(page, lambda: re.fullmatch(r"\d\d:\d\d:\d\d", text(page, "#chart-ttft time")))
    page.find_element(By.CSS_SELECTOR, '#window [value="60"] + span').click()
    urls: set[str] = set()
    see(page, lambda: urls.update(asked(page)) or f"{own_server.url}/live/data?hour=true" in urls)
    see(page, lambda: "host" in text(page, "#hottest"))
    seen = page.page_source
    assert SECRET not in seen and "a salt of mine" not in seen and song[:5] not in seen
    assert troubles(page) == []
    urls |= asked(page)
    assert all(url.startswith(f"{own_server.url}/") for url in urls), urls


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
    see(page, lambda: "<img/src" in text(page, "#requests"))
    assert not all_of(page, "#requests img") and not all_of(page, "#model *")
    assert troubles(page) == []


@pytest.mark.long
def test_a_page_that_loses_its_server_says_so_and_recovers(page: Chrome, checkpoint: Path, song: str) -> None:
    with Server(settings(checkpoint)) as server:
        opened(page, server.url)
        port = int(server.url.rpartition(":")[2])
    see(page, lambda: text(page, "#state").startswith("no answer from the server for"))
    assert page.find_element(By.ID, "main").is_displayed(), "what was seen last stays"
    page.find_element(By.ID, "seen").click()
    assert page.find_element(By.ID, "first").is_displayed() is False
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
    for width in (320, 390, 800, 1100):
        with screen(page, width, dark=True):
            assert page.find_element(By.TAG_NAME, "body").value_of_css_property("background-color") != light
            assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), width
            assert barriers(page) == []
