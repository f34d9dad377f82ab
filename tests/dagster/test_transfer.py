"""The transfer as a schedule: hand-over between runs, limits, and an end when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.dagster import EventSQLResource, build_transfer_schedule
from eventsql_orchestration.dagster.tags import MOVING_TAG
from tests.dagster.conftest import await_

ROOT = Path(__file__).parents[2]


def run(
    instance: dg.DagsterInstance, dsn: str, *, limit_seconds: float, name: str = "transfer"
) -> dg.ExecuteInProcessResult:
    schedule = build_transfer_schedule(name=name, limit_seconds=limit_seconds, polling_delay=0.05)
    location = dg.Definitions(schedules=[schedule], resources={"eventsql": EventSQLResource(dsn=dsn)})
    return location.resolve_job_def(name).execute_in_process(instance=instance, raise_on_error=False)


def moving(instance: dg.DagsterInstance) -> list[str]:
    """The runs that move events, the newest first."""
    return [
        run.run_id
        for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        if MOVING_TAG in run.tags
    ]


def moved(result: dg.ExecuteInProcessResult) -> dict[str, int]:
    (output,) = [event for event in result.all_events if event.event_type == dg.DagsterEventType.STEP_OUTPUT]
    return {name: int(str(value.value)) for name, value in output.step_output_data.metadata.items()}


@pytest.fixture(autouse=True)
def topics(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("rides")).register_topic(Topic("orders"))


def test_the_schedule_starts_a_run_every_minute() -> None:
    schedule = build_transfer_schedule()
    assert schedule.cron_schedule == "* * * * *"
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING


def test_a_run_moves_what_is_published_while_it_runs_and_says_how_much(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str
) -> None:
    platform.publisher.publish_all(Publication("rides", b"") for _ in range(20))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, shared_instance, dsn, limit_seconds=5.0)
        await_(lambda: platform.reader.count("rides") == 20, "the first events")
        platform.publisher.publish_all(Publication("orders", b"") for _ in range(30))
        await_(lambda: platform.reader.count("orders") == 30, "further events")
        assert not running.done()
        result = running.result()
    assert result.success
    assert moved(result) == {"events": 50, "events of rides": 20, "events of orders": 30}


def test_a_run_ends_at_its_limit_when_nobody_relieves_it(shared_instance: dg.DagsterInstance, dsn: str) -> None:
    started = time.monotonic()
    assert run(shared_instance, dsn, limit_seconds=1.0).success
    assert time.monotonic() - started < 20


def test_a_newer_run_takes_over_and_nothing_is_lost_or_out_of_order(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str
) -> None:
    stop = threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        while not stop.is_set():
            platform.publisher.publish(Publication("rides", b"%d" % published))
            published += 1
            time.sleep(0.002)

    publishing = threading.Thread(target=publish)
    publishing.start()
    with ThreadPoolExecutor() as pool:
        older = pool.submit(run, shared_instance, dsn, limit_seconds=120.0)
        await_(lambda: len(moving(shared_instance)) == 1, "the first run")
        time.sleep(1)
        newer = pool.submit(run, shared_instance, dsn, limit_seconds=15.0)
        await_(lambda: len(moving(shared_instance)) == 2, "the second run")
        began = time.monotonic()
        await_(older.done, "the first run's end")
        handed_over = time.monotonic() - began
        assert not newer.done()
        at_hand_over = platform.reader.count("rides")
        await_(lambda: platform.reader.count("rides") > at_hand_over, "events that the second run moves")
        stop.set()
        publishing.join()
        await_(lambda: platform.reader.count("rides") == published, "the last events")
        results = [older.result(), newer.result()]

    assert all(result.success for result in results)
    # It looks around every second; this machine may be busy with other tests.
    assert handed_over < 10
    events = platform.reader.read("rides")
    assert [event.value for event in events] == [b"%d" % i for i in range(published)]
    assert sum(moved(result)["events"] for result in results) == published


def test_a_run_that_is_created_and_does_not_move_yet_relieves_nobody(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str
) -> None:
    schedule = build_transfer_schedule()
    location = dg.Definitions(schedules=[schedule], resources={"eventsql": EventSQLResource(dsn=dsn)})
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, shared_instance, dsn, limit_seconds=6.0)
        await_(lambda: len(moving(shared_instance)) == 1, "the first run")
        shared_instance.create_run_for_job(location.resolve_job_def("transfer"), status=dg.DagsterRunStatus.STARTED)
        time.sleep(3)
        assert not running.done()
        platform.publisher.publish(Publication("rides", b""))
        await_(lambda: platform.reader.count("rides") == 1, "the event")
        running.result()


def test_runs_of_another_database_do_not_relieve_one_another(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str
) -> None:
    """Code locations of two databases on one instance may call their job the same."""

    def elsewhere() -> Future[dg.ExecuteInProcessResult]:
        schedule = build_transfer_schedule(limit_seconds=4.0)
        location = dg.Definitions(
            schedules=[schedule], resources={"eventsql": EventSQLResource(dsn=dsn, db_schema="other")}
        )
        job = location.resolve_job_def("transfer")
        return pool.submit(job.execute_in_process, instance=shared_instance)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, shared_instance, dsn, limit_seconds=8.0)
        await_(lambda: len(moving(shared_instance)) == 1, "the first run")
        other = elsewhere()
        await_(lambda: len(moving(shared_instance)) == 2, "the run of the other schema")
        time.sleep(2)
        assert not running.done()
        assert other.result().success
        assert running.result().success


def test_a_run_that_is_terminated_ends_at_once(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str
) -> None:
    command = [sys.executable, "-m", "dagster", "job", "execute", "-m", "tests.dagster.location", "-j", "transfer"]
    environment = {**os.environ, "DAGSTER_HOME": shared_instance.root_directory, "EVENTSQL_DSN": dsn}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_(lambda: len(moving(shared_instance)) == 1, "the run")
        platform.publisher.publish(Publication("rides", b""))
        await_(lambda: platform.reader.count("rides") == 1, "the event")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert time.monotonic() - started < 15
    finally:
        process.kill()
        process.wait()
    (run_,) = shared_instance.get_runs()
    assert run_.status in (dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE)


def test_a_transfer_that_breaks_fails_its_run(
    shared_instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the transfer is broken")

    monkeypatch.setattr("eventsql_orchestration.log.transfer.Transfer.run", broken)
    result = run(shared_instance, dsn, limit_seconds=30.0)
    assert not result.success
