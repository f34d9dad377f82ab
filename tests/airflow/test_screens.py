"""Airflow's UI in a browser, as a user of `eventsql dev --dags` sees it: assets, a run, a trace, a connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from eventsql_orchestration.airflow.api import AirflowApi
from tests.airflow.test_dev import DAGS, home, running
from tests.system.conftest import browser, screenshot, see
from tests.waiting import wait_until

__all__ = ["browser", "home"]


@pytest.fixture
def served(home: Path) -> Iterator[AirflowApi]:
    """An Airflow that has consumed the events of a DAG."""
    with running(home, DAGS, "--orders", "5", "--port", "18080") as process:
        url = home / "airflow" / "airflow.url"

        def consumed() -> bool:
            assert process.poll() is None, home.with_name("stderr").read_text()
            if not url.exists():
                return False
            runs = AirflowApi(url.read_text()).pages("/dags/billing/dagRuns", "dag_runs", state="success")
            return any(runs)

        wait_until(consumed, "a run has consumed", seconds=400)
        yield AirflowApi(url.read_text())


def text(driver: webdriver.Chrome) -> str:
    return driver.find_element("tag name", "body").text


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_person_sees_the_assets_a_run_and_where_its_events_come_from(
    served: AirflowApi, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    assets = {each["name"]: each["id"] for each in served.pages("/assets", "assets")}
    browser.get(f"{served.url}/assets/{assets['rides/billing']}")
    see(browser, lambda page: page.find_elements("css selector", ".react-flow__node"), "the graph of assets")
    see(browser, lambda page: "Triggered Dag Run" in text(page), "the event of a claim, and its run")
    screenshot(browser, "airflow-asset-graph", tmp_path)

    browser.get(details(served, "simulation", "publish"))
    follow(browser, "EventSQL trace")
    see(browser, lambda page: "task publish" in text(page), "the trace of the published event")

    browser.get(details(served, "billing", "bill"))
    see(browser, lambda page: "Extra Links" in text(page), "the run of the claim")
    screenshot(browser, "airflow-run", tmp_path)
    follow(browser, "EventSQL trace")
    see(browser, lambda page: "as consumer billing" in text(page), "the ranges that the run has read")
    screenshot(browser, "airflow-trace", tmp_path)

    browser.get(f"{served.url}/connections")
    press(browser, "Add Connection")
    see(browser, lambda page: page.find_elements("css selector", "input[role=combobox]"), "the form of a connection")
    browser.find_element("css selector", "input[role=combobox]").send_keys("eventsql", Keys.ENTER)
    see(browser, lambda page: page.find_elements("name", "schema"), "the fields of the type")
    for name, value in {"connection_id": "shop", "host": "127.0.0.1", "port": "5433", "schema": "events"}.items():
        browser.find_element("name", name).send_keys(value)
    press(browser, "Extra Fields")
    see(browser, lambda page: "The schema of the platform's tables." in text(page), "the fields of this provider")
    assert browser.find_element("name", "element_db_schema").get_attribute("value") == "eventsql"
    assert browser.find_element("name", "element_shards").get_attribute("type") == "password"
    browser.find_element("name", "element_parameters").send_keys("sslmode=require")
    screenshot(browser, "airflow-connection", tmp_path)
    press(browser, "Save")
    see(browser, lambda page: "shop" in text(page) and "5433" in text(page), "the stored connection")


def press(driver: webdriver.Chrome, button: str) -> None:
    """Click the button of this text."""
    path = f"//button[normalize-space()='{button}']"
    see(driver, lambda page: page.find_element("xpath", path).is_enabled(), button)
    target = driver.find_element("xpath", path)
    driver.execute_script("arguments[0].scrollIntoView()", target)
    target.click()


def details(api: AirflowApi, dag: str, task: str) -> str:
    """The page of a task in a run that succeeded."""
    run = next(api.pages(f"/dags/{dag}/dagRuns", "dag_runs", state="success"))
    return f"{api.url}/dags/{dag}/runs/{run['dag_run_id']}/tasks/{task}/details"


def follow(driver: webdriver.Chrome, link: str) -> None:
    """Open the page of a link, which would open in a tab of its own."""
    see(driver, lambda page: page.find_elements("link text", link), link)
    target = driver.find_element("link text", link).get_attribute("href")
    assert target is not None
    driver.get(target)
