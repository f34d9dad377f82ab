"""`eventsql dev` as its user sees it: the Dagster UI in a browser, and nothing left behind when it ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from eventsql_orchestration.dagster.instance import STORAGE_VARIABLE, storage_url
from eventsql_orchestration.database.embedded import EmbeddedPostgres

REPOSITORY = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = os.environ.get("EVENTSQL_SCREENSHOTS")
"""A directory for the screenshots, `docs/images` for those of the documents; a temporary one by default."""

# fmt: off
HEADLESS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1600,1000", "--hide-scrollbars",
)
# fmt: on


@dataclass
class Dev:
    """A running `eventsql dev`."""

    process: subprocess.Popen[str]
    home: Path
    url: str


def wait_for(condition: Callable[[], object], what: str, *, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout:.0f} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def dev() -> Iterator[Dev]:
    root = Path(tempfile.mkdtemp(prefix="eventsql-dev-"))
    root.chmod(0o755)
    home, log = root / "home", root / "dev.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTSQL_", "DAGSTER_"))}
    command = [str(Path(sys.executable).with_name("eventsql")), "--home", str(home), "dev", "--orders", "20"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, text=True)
    try:

        def url() -> str | None:
            assert process.poll() is None, log.read_text()
            found = re.search(r"The Dagster UI is at (\S+)", log.read_text())
            return found[1] if found else None

        wait_for(url, "the start", timeout=240)
        yield Dev(process, home, str(url()))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(90)
        process.kill()
        EmbeddedPostgres(home / "postgres").destroy()
        shutil.rmtree(root, ignore_errors=True)


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


@pytest.mark.timeout(600)
def test_the_asset_graph_shows_topics_and_what_consumes_them(
    dev: Dev, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    browser.get(f"{dev.url}/locations/__repository__@definitions.py/asset-groups/churn/lineage")

    def nodes(driver: webdriver.Chrome) -> bool:
        text = driver.find_element(By.TAG_NAME, "body").text
        drawn = all(name in text for name in ("file_changes", "directory_churn", "directory_churn_table", "PySpark"))
        return drawn and "Loading" not in text

    see(browser, nodes, "the nodes of the asset graph")
    screenshot(browser, "asset-graph", tmp_path)


def lags(dev: Dev) -> list[int]:
    """The lags of consumer order_status that were observed, in events."""
    server = EmbeddedPostgres(dev.home / "postgres").status()
    assert server is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORAGE_VARIABLE, storage_url(server.dsn))
        with dg.DagsterInstance.from_config(str(dev.home / "dagster")) as instance:
            observed = instance.fetch_observations(dg.AssetKey("order_status"), limit=100).records
    metadata = [record.asset_observation.metadata for record in observed if record.asset_observation]
    return [int(str(entry["lag events"].value)) for entry in metadata]


@pytest.mark.timeout(600)
def test_a_consumers_lag_is_plotted(dev: Dev, browser: webdriver.Chrome, tmp_path: Path) -> None:
    # The simulation's events wait until the transfer's first run and the sensors' first ticks have come by.
    wait_for(lambda: len(lags(dev)) >= 3 and max(lags(dev)) > 0, "three observations of a lag", timeout=240)
    browser.get(f"{dev.url}/assets/order_status?view=overview")

    def plotted(driver: webdriver.Chrome) -> bool:
        plots = driver.find_elements(By.XPATH, "//button[normalize-space(.)='Plots']")
        if not plots:
            return False
        plots[0].click()
        try:
            title = WebDriverWait(driver, 15).until(
                lambda page: page.find_element(By.XPATH, "//*[normalize-space(text())='lag events']")
            )
        except TimeoutException:
            driver.refresh()
            return False
        driver.execute_script("arguments[0].scrollIntoView({block: 'start'})", title)
        # The plot beside its title, and whether anything was drawn on it.
        return bool(
            driver.execute_script(
                """
                const charts = [...document.querySelectorAll('canvas')].filter(canvas =>
                    arguments[0].compareDocumentPosition(canvas) & Node.DOCUMENT_POSITION_FOLLOWING);
                if (!charts.length || !charts[0].width) return false;
                const {width, height} = charts[0];
                return charts[0].getContext('2d').getImageData(0, 0, width, height).data.some(value => value > 0);
                """,
                title,
            )
        )

    see(browser, plotted, "the plot of lag events")
    screenshot(browser, "consumer-lag", tmp_path)


@pytest.mark.timeout(300)
def test_nobody_else_reads_its_password_or_reaches_its_ports(dev: Dev) -> None:
    server = EmbeddedPostgres(dev.home / "postgres").status()
    assert server is not None
    addresses = set()
    for process in psutil.Process(dev.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert server.password not in " ".join(process.cmdline())
            addresses |= {each.laddr.ip for each in process.net_connections("inet") if each.status == "LISTEN"}
    assert "127.0.0.1" in addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.timeout(300)
def test_it_ends_with_everything_that_it_started(dev: Dev) -> None:
    children = psutil.Process(dev.process.pid).children(recursive=True)
    assert EmbeddedPostgres(dev.home / "postgres").status() is not None
    dev.process.send_signal(signal.SIGTERM)
    assert dev.process.wait(120) == 130
    assert EmbeddedPostgres(dev.home / "postgres").status() is None

    def left() -> list[psutil.Process]:
        return [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    wait_for(lambda: not left(), "the end of all its processes", timeout=30)
