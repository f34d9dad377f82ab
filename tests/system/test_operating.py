"""What an operator sees in the Dagster UI, with a daemon: red checks, lag, alerts, a backfill's progress."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.system import operated_location as location
from tests.system.conftest import screenshot, see
from tests.system.operated_system import BACKFILL, WINDOWS, System, publish
from tests.waiting import wait_until


def shown(driver: webdriver.Chrome) -> str:
    return driver.find_element(By.TAG_NAME, "body").text


@pytest.mark.nightly
def test_a_dead_letter_turns_the_check_delivered_red(system: System, browser: webdriver.Chrome, tmp_path: Path) -> None:
    wait_until(lambda: system.alerted("check delivered of order_status is red"), "an alert")
    browser.get(f"{system.dagster.url}/assets/order_status?view=checks&checkDetail=delivered")

    def red(driver: webdriver.Chrome) -> bool:
        text = shown(driver)
        return "Failed" in text and "eventsql dlt redrive ride_orders --consumer order_status" in text

    see(browser, red, "the failed check with what to do next")
    screenshot(browser, "delivered-check", tmp_path)


def plotted(driver: webdriver.Chrome) -> bool:
    """Whether the page of an asset shows its plot of `Lag events`, with something drawn on it."""
    plots = driver.find_elements("xpath", "//button[normalize-space(.)='Plots']")
    if not plots:
        return False
    plots[0].click()
    try:
        title = WebDriverWait(driver, 15).until(
            lambda page: page.find_element("xpath", "//*[normalize-space(text())='Lag events']")
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


@pytest.mark.nightly
def test_a_consumer_that_falls_behind_is_plotted_turns_red_and_green_again(
    system: System, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    system.platform.registry.pause("ride_orders", "order_status")
    for behind in (8, 40):
        already = sum(lag.events for lag in system.platform.lag("ride_orders"))
        publish(system.platform, "ride_orders", [b"accepted"] * (behind - already))
        wait_until(partial(system.was_behind, behind), f"the sight of {behind} events")
    wait_until(lambda: system.alerted("check lag of order_status is red"), "an alert")
    browser.get(f"{system.dagster.url}/assets/order_status?view=checks&checkDetail=lag")
    see(browser, lambda driver: "it is paused" in shown(driver) and "Failed" in shown(driver), "the check lag, red")
    screenshot(browser, "lag-check", tmp_path)
    browser.get(f"{system.dagster.url}/assets/order_status?view=overview")
    see(browser, plotted, "the plot of lag events")
    screenshot(browser, "lag-plot", tmp_path)

    system.platform.registry.resume("ride_orders", "order_status")
    wait_until(lambda: system.alerted("check lag of order_status is green again"), "the end of the alert")
    assert system.lags()[0] <= location.MAX_LAG
    assert not system.alerted("check delivered of order_status is green again")


@pytest.mark.nightly
def test_a_backfills_progress_is_that_of_its_partitions(
    system: System, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    def half_way() -> bool:
        assert system.backfill.poll() is None, system.backfill.communicate()
        return sorted(system.windows().values()) == ["FAILURE", "STARTED", "STARTED", "SUCCESS"]

    def states(driver: webdriver.Chrome) -> bool:
        text = shown(driver)
        counted = ("Materialized (1)", "Failed (1)", "Materializing (2)", "Missing (2)")
        return all(state in text for state in counted) and f"{BACKFILL}:50-60" in text

    wait_until(half_way, "the middle of the backfill")
    browser.get(f"{system.dagster.url}/assets/fare_totals_backfill?view=partitions")
    see(browser, states, "the state of every window")
    screenshot(browser, "backfill-progress", tmp_path)

    system.gate.touch()
    output, _ = system.backfill.communicate(timeout=120)
    assert system.backfill.returncode == 1, output
    assert sorted(system.windows().values()) == ["FAILURE", *["SUCCESS"] * (WINDOWS - 1)]


@pytest.mark.nightly
def test_one_run_at_a_time_starts_a_spark_session_wherever_it_is_launched(system: System) -> None:
    first = system.materialize("session")
    wait_until(lambda: system.status(first) == "STARTED", "the first session")
    second = system.materialize("other_session")
    # The queue has looked at the second when one that came after it has been through.
    after = system.materialize("without_session")
    wait_until(lambda: system.status(after) == "SUCCESS", "a run without a session")
    assert (system.status(first), system.status(second)) == ("STARTED", "QUEUED")
    system.session.touch()
    wait_until(lambda: system.status(second) == "SUCCESS", "the second session")
