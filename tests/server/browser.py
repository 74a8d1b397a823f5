"""A real Chromium, as a viewer of the live page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service


def require_chromium() -> None:
    """Skip where no Chromium is; where it has to be (KVARVE_TEST_BROWSER=1, as in CI), that is a failure."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing and os.environ.get("KVARVE_TEST_BROWSER") == "1":
        pytest.fail(f"the page cannot be seen here: there is no {' and no '.join(missing)}")
    if missing:
        pytest.skip(f"the page cannot be seen here: there is no {' and no '.join(missing)}")


@contextmanager
def chromium(*, width: int = 1280, height: int = 1800) -> Iterator[webdriver.Chrome]:
    """A browser with a new profile, whose console and network are recorded, and that finds no host but this one."""
    require_chromium()
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--window-size={width},{height}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        browser.set_page_load_timeout(60)
        yield browser
    finally:
        browser.quit()
