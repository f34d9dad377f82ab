"""A real daemon over two shards: ticks, the queue, runs in their own processes, and a killed run."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from dagster._core.test_utils import create_run_for_test
from dagster._daemon.monitoring import concurrency, execute_concurrency_slots_iteration

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster import write_instance
from eventsql_orchestration.dagster.launcher.worker import Worker
from eventsql_orchestration.dagster.local.instance import STORAGE_SCHEMA, STORAGE_VARIABLE, storage_url
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG
from eventsql_orchestration.database.urls import parse_dsn
from eventsql_orchestration.errors import ConfigurationError, DatabaseUnavailableError
from tests.dagster import location
from tests.dagster.conftest import NOWHERE, Workbench, sql
from tests.dagster.processes import ROOT, Machine
from tests.waiting import wait_until


def test_an_instance_keeps_its_storage_beside_the_events(home: Path, platform: EventSQL) -> None:
    assert home.name == "dagster"
    tables = sql(platform, "SELECT tablename FROM pg_tables WHERE schemaname = %s", STORAGE_SCHEMA)
    assert {("runs",), ("event_logs",), ("job_ticks",)} <= set(tables)


def test_an_instance_can_be_written_again_and_holds_no_password(home: Path, tmp_path: Path, dsn: str) -> None:
    file = home / "dagster.yaml"
    written = file.read_text()
    # Dagster repeats the file in the command lines of its processes.
    assert str(parse_dsn(dsn).password) not in written
    assert write_instance(tmp_path, dsn) == home
    assert file.read_text() == written
    config = yaml.safe_load(written)
    assert config["telemetry"] == {"enabled": False}
    (limit,) = config["concurrency"]["runs"]["tag_concurrency_limits"]
    assert limit["key"] == BACKFILL_OF_TAG
    assert 0 < limit["limit"] < config["concurrency"]["runs"]["max_concurrent_runs"]


def test_a_run_whose_process_was_killed_gives_its_place_in_a_pool_back(
    stored: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `granularity: op`, the process of a step takes the place, and gives it back at its end."""
    killed, waiting = (create_run_for_test(stored, status=dg.DagsterRunStatus.STARTED) for _ in range(2))
    storage: Any = stored.event_log_storage
    storage.set_concurrency_slots("one", 1)
    assert storage.claim_concurrency_slot("one", killed.run_id, "step").is_claimed
    assert not storage.claim_concurrency_slot("one", waiting.run_id, "step").is_claimed

    stored.report_run_failed(killed)
    monkeypatch.setattr(concurrency, "get_current_datetime", lambda: datetime.now(UTC) + timedelta(days=1))
    context: Any = SimpleNamespace(instance=stored)
    list(execute_concurrency_slots_iteration(context, logging.getLogger(__name__)))
    assert storage.claim_concurrency_slot("one", waiting.run_id, "step").is_claimed


def test_the_storage_has_its_own_schema_whatever_options_the_url_has() -> None:
    url = storage_url("postgresql://user:p%40ss@host/events?sslmode=require&options=-cwork_mem%3D64MB")
    assert url.startswith("postgresql+psycopg2://user:p%40ss@host/events?")
    assert "sslmode=require" in url
    assert f"options=-cwork_mem%3D64MB+-csearch_path%3D{STORAGE_SCHEMA}" in url


def test_an_instance_on_a_missing_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORAGE_VARIABLE, "of another instance")
    with pytest.raises(DatabaseUnavailableError):
        write_instance(tmp_path, NOWHERE)
    with pytest.raises(ConfigurationError):
        write_instance(tmp_path, "sqlite:///x")


@pytest.mark.nightly
def test_a_killed_run_holds_up_no_other_shard_and_is_followed_by_another_so_that_each_event_takes_effect_once(
    shards: dict[str, Workbench], platform: EventSQL, home: Path
) -> None:
    one, other = shards.values()
    location.slow.register(one.eventsql.platform)
    ids = [bench.publish("orders", events) for bench, events in ((one, 100), (other, 20))]
    # Consumer `slow` takes half a second over each batch.
    environment = {"EVENTSQL_DSN": one.eventsql.dsn, "EVENTSQL_TEST_DELAY": "0.5"}
    with (
        Machine(home, location="location", stops=False, **environment) as machine,
        dg.DagsterInstance.from_config(str(home)) as instance,
    ):

        def consuming(shard: str) -> list[dg.DagsterRun]:
            tags = {"eventsql/consumer": "slow", "eventsql/shard": shard}
            return list(instance.get_runs(dg.RunsFilter(tags=tags)))

        wait_until(lambda: len(one.effects()) >= location.SLOW_BATCH, "the first batch of the first run")
        (run,) = consuming("shard-1")
        worker = Worker.of(run.run_id, run.tags)
        assert worker is not None, "the launcher forked it"
        os.kill(worker.pid, signal.SIGKILL)

        for bench, published in zip((one, other), ids, strict=True):
            wait_until(lambda bench=bench, end=published[-1]: bench.offset(location.slow) == end, "the end of a log")  # type: ignore[misc]
        runs = consuming("shard-1")
        assert len(consuming("shard-2")) == 1

        assert [one.effects(), other.effects()] == ids
        assert len(runs) == 2
        (killed,) = [run for run in runs if run.run_id == worker.run]
        assert killed.status is dg.DagsterRunStatus.FAILURE, "it was reported as dead"
        assert {run.tags["dagster/run_key"] for run in runs} == {
            f"eventsql-claim-{run.tags['.dagster/eventsql_claim']}-{run.tags['.dagster/eventsql_claimed_at']}-shard-1"
            for run in runs
        }
        assert all(run.tags["eventsql/topic"] == "orders" for run in runs)

        now = time.time()
        location_job = ["-m", "tests.dagster.location", "-j", "housekeeping"]
        launch = [sys.executable, "-m", "dagster", "job", "launch", *location_job]
        subprocess.run(launch, cwd=ROOT, env=machine.environment, check=True, capture_output=True)
        ended = dg.RunsFilter(job_name="housekeeping", statuses=[dg.DagsterRunStatus.SUCCESS])
        wait_until(lambda: instance.get_runs(ended), "housekeeping by the daemon")
    assert ticks(platform, "consume_slow", before=now) == []
    assert ticks(platform, "somebody_elses", before=now), "another location purges these"


def ticks(platform: EventSQL, sensor: str, *, before: float) -> list[tuple[object, str]]:
    """Times and statuses of a sensor's ticks from before a time. Ticks that failed are kept longer."""
    return sql(
        platform,
        f"SELECT timestamp, status FROM {STORAGE_SCHEMA}.job_ticks WHERE tick_body::json ->> 'job_name' = %s "
        "AND timestamp AT TIME ZONE 'UTC' < to_timestamp(%s) AND status <> 'FAILURE' ORDER BY id",
        sensor, before,
    )  # fmt: skip
