"""A real daemon on a real instance: ticks, the queue, runs in processes of their own, and one of these killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster import SPARK_TAG, write_instance
from eventsql_orchestration.dagster.instance import STORAGE_SCHEMA, STORAGE_VARIABLE, storage_url
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG
from eventsql_orchestration.database.database import parse_dsn
from eventsql_orchestration.errors import ConfigurationError, DatabaseUnavailableError
from tests.dagster import location
from tests.dagster.conftest import Workbench, await_

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STORAGE_VARIABLE, "of another instance")
    return write_instance(tmp_path, dsn)


def test_an_instance_keeps_its_storage_beside_the_events(home: Path, platform: EventSQL) -> None:
    assert home.name == "dagster"
    with platform.database.connection() as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (STORAGE_SCHEMA,))
        tables = {row[0] for row in found}
    assert {"runs", "event_logs", "job_ticks"} <= tables


def test_an_instance_can_be_written_again_and_holds_no_password(home: Path, tmp_path: Path, dsn: str) -> None:
    file = home / "dagster.yaml"
    written = file.read_text()
    # Dagster repeats the file in the command lines of its processes.
    assert str(parse_dsn(dsn).password) not in written
    assert write_instance(tmp_path, dsn) == home
    assert file.read_text() == written
    config = yaml.safe_load(written)
    assert config["telemetry"] == {"enabled": False}
    limits = config["run_coordinator"]["config"]["tag_concurrency_limits"]
    assert limits[0] == {"key": SPARK_TAG, "limit": 1}
    assert limits[1]["key"] == BACKFILL_OF_TAG
    assert 0 < limits[1]["limit"] < config["run_coordinator"]["config"]["max_concurrent_runs"]


def test_the_storage_has_its_own_schema_whatever_options_the_url_has() -> None:
    url = storage_url("postgresql://user:p%40ss@host/events?sslmode=require&options=-cwork_mem%3D64MB")
    assert url.startswith("postgresql+psycopg2://user:p%40ss@host/events?")
    assert "sslmode=require" in url
    assert f"options=-cwork_mem%3D64MB+-csearch_path%3D{STORAGE_SCHEMA}" in url


def test_an_instance_on_a_database_that_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORAGE_VARIABLE, "of another instance")
    with pytest.raises(DatabaseUnavailableError):
        write_instance(tmp_path, "postgresql://nobody@127.0.0.1:1/nowhere")
    with pytest.raises(ConfigurationError):
        write_instance(tmp_path, "sqlite:///x")


@pytest.fixture
def environment(home: Path, dsn: str) -> dict[str, str]:
    """What Dagster's processes need to know; consumer `slow` takes half a second over each batch."""
    return {**os.environ, "DAGSTER_HOME": str(home), "EVENTSQL_DSN": dsn, "EVENTSQL_TEST_DELAY": "0.5"}


@pytest.fixture
def daemon(home: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon on the tests' location."""
    log = home / "daemon.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("dagster-daemon")), "run", "-m", "tests.dagster.location"],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text())
        raise
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def process_of(instance: dg.DagsterInstance, run_id: str) -> int | None:
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        if found := re.search(r"Executing steps in process \(pid: (\d+)\)", entry.message or entry.user_message):
            return int(found[1])
    return None


@pytest.mark.timeout(600)
def test_a_killed_run_is_followed_by_another_and_each_event_takes_effect_once(
    bench: Workbench, home: Path, daemon: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    location.slow.register(bench.platform)
    location.ledger.register(bench.platform)
    ids = bench.publish("orders", 60)
    with dg.DagsterInstance.from_config(str(home)) as instance:

        def consuming() -> list[dg.DagsterRun]:
            return list(instance.get_runs(dg.RunsFilter(tags={"eventsql/consumer": "slow"})))

        def slow_effects() -> int:
            (state,) = bench.platform.registry.consumer("orders", "slow")
            return state.consumed_events

        await_(lambda: slow_effects() >= location.SLOW_BATCH, "the first batch of the first run")
        (run,) = consuming()
        pid = process_of(instance, run.run_id)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

        await_(lambda: bench.offset(location.slow) == ids[-1], "the end of the log")
        await_(lambda: sum(bench.offset(location.ledger, p) > 0 for p in (0, 1)) == 2, "the other consumer")
        await_(lambda: len(bench.effects()) == 2 * len(ids), "every effect")
        runs = consuming()

    # Both consumers write the one table, each event once for each of them.
    assert sorted(bench.effects()) == sorted([*ids, *ids])
    assert len(runs) == 2
    assert {run.tags["dagster/run_key"] for run in runs} == {
        f"eventsql-claim-{run.tags['eventsql/claim']}-{run.tags['eventsql/claimed_at']}" for run in runs
    }
    assert all(run.tags["eventsql/topic"] == "orders" for run in runs)

    now = time.time()
    command = [sys.executable, "-m", "dagster", "job", "execute", "-m", "tests.dagster.location", "-j", "housekeeping"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert not ticks(bench.platform, "consume_slow", before=now)
    assert ticks(bench.platform, "somebody_elses", before=now), "they are somebody else's to purge"


def ticks(platform: EventSQL, sensor: str, *, before: float) -> int:
    """How many ticks of a sensor there are from before a time."""
    with platform.database.connection() as connection:
        row = connection.execute(
            f"SELECT count(*) FROM {STORAGE_SCHEMA}.job_ticks WHERE tick_body::json ->> 'job_name' = %s "
            "AND timestamp AT TIME ZONE 'UTC' < to_timestamp(%s)",
            (sensor, before),
        ).fetchone()
        assert row is not None
        return int(row[0])
