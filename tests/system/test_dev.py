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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.conftest import is_setting
from tests.fixtures import memory_disk
from tests.system.conftest import screenshot, see
from tests.waiting import ended, wait_until

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Dev:
    """A running `eventsql dev`."""

    process: subprocess.Popen[str]
    home: Path
    url: str


@pytest.fixture(scope="module")
def dev() -> Iterator[Dev]:
    root = Path(tempfile.mkdtemp(prefix="eventsql-dev-", dir=memory_disk()))
    root.chmod(0o755)
    home, log = root / "home", root / "dev.log"
    environment = {
        name: value for name, value in os.environ.items() if not is_setting(name) and not name.startswith("DAGSTER_")
    }
    command = [str(Path(sys.executable).with_name("eventsql")), "--home", str(home), "dev", "--orders", "20"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, text=True)
    try:

        def url() -> str | None:
            assert process.poll() is None, log.read_text()
            found = re.search(r"The Dagster UI is at (\S+)", log.read_text())
            return found[1] if found else None

        wait_until(url, "the start", seconds=240)
        yield Dev(process, home, str(url()))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(90)
        process.kill()
        EmbeddedPostgres(home / "postgres").destroy()
        shutil.rmtree(root, ignore_errors=True)


def test_the_asset_graph_shows_topics_and_what_consumes_them(
    dev: Dev, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    browser.get(f"{dev.url}/assets/directory_churn_sums?view=lineage&lineageScope=neighbors&lineageDepth=2")

    def nodes(driver: webdriver.Chrome) -> bool:
        text = driver.find_element(By.TAG_NAME, "body").text
        expected = (
            "file_changes",
            "directory_churn_sums",
            "directory_churn\n",
            "directory_churn_table",
            "PySpark",
            "topic",
        )
        drawn = all(name in text for name in expected)
        return drawn and "Loading" not in text

    see(browser, nodes, "the nodes of the asset graph")
    screenshot(browser, "asset-graph", tmp_path)


def test_other_users_cannot_read_its_password_or_reach_its_ports(dev: Dev) -> None:
    server = EmbeddedPostgres(dev.home / "postgres").status()
    assert server is not None
    addresses = set()
    for process in psutil.Process(dev.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert server.password not in " ".join(process.cmdline())
            addresses |= {each.laddr.ip for each in process.net_connections("inet") if each.status == "LISTEN"}
    assert "127.0.0.1" in addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_it_ends_with_everything_that_it_started(dev: Dev) -> None:
    children = psutil.Process(dev.process.pid).children(recursive=True)
    assert EmbeddedPostgres(dev.home / "postgres").status() is not None
    temporary = set()
    for child in children:
        # Some end in the meantime.
        with contextlib.suppress(psutil.Error):
            if child.cmdline()[1:4] == ["-m", "dagster", "dev"]:
                temporary.add(Path(child.environ()["TMPDIR"]))
    assert [any(each.iterdir()) for each in temporary] == [True]
    dev.process.send_signal(signal.SIGTERM)
    assert dev.process.wait(120) == 130
    assert EmbeddedPostgres(dev.home / "postgres").status() is None
    wait_until(lambda: all(map(ended, children)), "the end of all its processes")
    assert not any(each.exists() for each in temporary)
