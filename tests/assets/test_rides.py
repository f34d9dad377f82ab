"""The Spark assets of the reference location, run by run: what the tables hold is what plain Python counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from assets.rides import fares, utilisation, verification
from assets.rides.commands import RIDE_COMMANDS
from assets.rides.order import RIDE_ORDERS
from assets.rides.service import RideSimulation
from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster import EventSQLResource
from eventsql_orchestration.dagster.io.spark_progress import SPARK_ROWS, SPARK_TASKS
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.spark.java import ensure_java


@pytest.fixture
def location(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.Definitions]:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    ensure_java(tmp_path)
    shared = SparkSession.getActiveSession()
    import definitions

    yield definitions.defs
    started = SparkSession.getActiveSession()
    if started is not None and shared is None:
        started.stop()


def test_tables_of_fares_and_of_drivers_hold_what_the_log_says_after_runs_over_two_ranges(
    location: dg.Definitions, platform: EventSQL, dsn: str
) -> None:
    with dg.instance_for_test() as instance:

        def run(job: str) -> dg.ExecuteInProcessResult:
            platform.transfer.run_once()
            result = location.resolve_job_def(job).execute_in_process(instance=instance)
            assert result.success
            return result

        run("register")
        simulation = RideSimulation(platform, seed=7, commands=Queue(platform, RIDE_COMMANDS, ordered=True))
        for _ in range(2):
            simulation.run(15)
            assert run("work_ride_charges").get_asset_materialization_events()
            result = run("consume_with_spark")
            for name in ("zone_fares_sums", "driver_utilisation_sums"):
                (materialized,) = [
                    event for event in result.get_asset_materialization_events() if event.asset_key == dg.AssetKey(name)
                ]
                metadata = materialized.materialization.metadata
                assert {SPARK_TASKS, SPARK_ROWS} <= metadata.keys()
            run("consume_sums")
    assert platform.reader.count(RIDE_ORDERS.name) > 60
    resource = EventSQLResource(dsn=dsn)
    try:
        for check in (fares.zone_fares_table_matches_log, utilisation.driver_utilisation_table_matches_log):
            checked = check(eventsql=resource)
            assert isinstance(checked, dg.AssetCheckResult)
            assert checked.passed, checked.metadata
            assert checked.metadata["rows"].value
        charged = verification.ride_charges_match_log(platform)
        assert charged.passed, charged.figures
        rides = int(charged.figures["accepted rides"])
        assert rides > 10
        figures = [charged.figures[name] for name in ("answers", "answers missing", "charges")]
        assert figures == [2 * rides, 0, rides]
    finally:
        resource.platform.close()
