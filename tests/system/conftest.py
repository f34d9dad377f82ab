"""What the tests of the whole system share: a browser, and waiting until a person would see something in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.support.wait import WebDriverWait

from tests.conftest import Administrator

if TYPE_CHECKING:
    from tests.system.operated_system import System

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = os.environ.get("EVENTSQL_SCREENSHOTS")
"""A directory for the screenshots, `docs/images` for those of the documents; a temporary one by default."""

# fmt: off
HEADLESS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1600,1000", "--hide-scrollbars",
)
# fmt: on


@pytest.fixture(scope="module")
def system(administrator: Administrator) -> Iterator[System]:
    # Airflow's tests use this file too, where Dagster is not installed.
    from tests.system.operated_system import operating

    with operating(administrator) as started:
        yield started


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if binary is None and not os.environ.get("CI"):
        pytest.skip("no Chromium is installed here: `make browser` installs it where it can")
    options = webdriver.ChromeOptions()
    options.binary_location = binary or BROWSERS[0]
    for argument in HEADLESS:
        options.add_argument(argument)
    driver = shutil.which("chromedriver")
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver) if driver else None)
    try:
        yield chrome
    finally:
        chrome.quit()


def see(browser: webdriver.Chrome, condition: Callable[[webdriver.Chrome], object], what: str) -> None:
    """Wait until a person sees it."""
    WebDriverWait(browser, 120, ignored_exceptions=[WebDriverException]).until(condition, what)


def screenshot(browser: webdriver.Chrome, name: str, directory: Path) -> None:
    target = Path(SCREENSHOTS) if SCREENSHOTS else directory
    target.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(target / f"{name}.png"))
    assert (target / f"{name}.png").stat().st_size > 10_000
