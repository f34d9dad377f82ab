"""The transfer as a schedule: hand-over between runs, limits, and an end when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.dagster import EventSQLResource, build_transfer_schedule, transfer
from eventsql_orchestration.dagster.tags import MOVING_TAG
from tests.dagster.conftest import await_

ROOT = Path(__file__).parents[2]


LIMIT = 120.0
"""Seconds after which a run ends by itself: none does while its test goes on."""


def job(dsn: str, *, limit_seconds: float = LIMIT, schema: str = "eventsql") -> dg.JobDefinition:
    schedule = build_transfer_schedule(limit_seconds=limit_seconds, polling_delay=0.05, look_around=0.05)
    resource = EventSQLResource(dsn=dsn, db_schema=schema)
    return dg.Definitions(schedules=[schedule], resources={"eventsql": resource}).resolve_job_def("transfer")


def run(instance: dg.DagsterInstance, dsn: str, **options: Any) -> dg.ExecuteInProcessResult:
    return job(dsn, **options).execute_in_process(instance=instance, raise_on_error=False)


def relieve(instance: dg.DagsterInstance, dsn: str, run_id: str) -> None:
    """End a run as a newer one does that moves events of the same database."""
    relieved = instance.get_run_by_id(run_id)
    assert relieved is not None
    instance.create_run_for_job(
        job(dsn), status=dg.DagsterRunStatus.STARTED, tags={MOVING_TAG: relieved.tags[MOVING_TAG]}
    )


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each run has begun to look for a newer run."""
    counted: Counter[str] = Counter()
    look = transfer._newer_run

    def counting(context: dg.OpExecutionContext, label: str) -> str | None:
        counted[context.run.run_id] += 1
        return look(context, label)

    monkeypatch.setattr(transfer, "_newer_run", counting)
    return counted


def await_look(looks: Counter[str], run_id: str) -> None:
    """Wait for a whole look that begins from now on."""
    before = looks[run_id]
    await_(lambda: looks[run_id] >= before + 2, "a look for a newer run")


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
        running = pool.submit(run, shared_instance, dsn)
        await_(lambda: platform.reader.count("rides") == 20, "the first events")
        platform.publisher.publish_all(Publication("orders", b"") for _ in range(30))
        await_(lambda: platform.reader.count("orders") == 30, "further events")
        assert not running.done()
        relieve(shared_instance, dsn, *moving(shared_instance))
        result = running.result()
    assert result.success
    assert moved(result) == {"events": 50, "events of rides": 20, "events of orders": 30}


def test_a_run_ends_at_its_limit_when_nobody_relieves_it(shared_instance: dg.DagsterInstance, dsn: str) -> None:
    assert run(shared_instance, dsn, limit_seconds=0.5).success


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
        older = pool.submit(run, shared_instance, dsn)
        await_(lambda: platform.reader.count("rides") > 0, "events that the first run moves")
        newer = pool.submit(run, shared_instance, dsn)
        await_(older.done, "the first run's end")
        assert not newer.done()
        at_hand_over = platform.reader.count("rides")
        await_(lambda: platform.reader.count("rides") > at_hand_over, "events that the second run moves")
        stop.set()
        publishing.join()
        await_(lambda: platform.reader.count("rides") == published, "the last events")
        relieve(shared_instance, dsn, *moving(shared_instance))
        results = [older.result(), newer.result()]

    assert all(result.success for result in results)
    events = platform.reader.read("rides")
    assert [event.value for event in events] == [b"%d" % i for i in range(published)]
    assert sum(moved(result)["events"] for result in results) == published


def test_a_run_that_is_created_and_does_not_move_yet_relieves_nobody(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str, looks: Counter[str]
) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, shared_instance, dsn)
        await_(lambda: len(moving(shared_instance)) == 1, "the first run")
        (run_id,) = moving(shared_instance)
        shared_instance.create_run_for_job(job(dsn), status=dg.DagsterRunStatus.STARTED)
        await_look(looks, run_id)
        assert not running.done()
        platform.publisher.publish(Publication("rides", b""))
        await_(lambda: platform.reader.count("rides") == 1, "the event")
        relieve(shared_instance, dsn, run_id)
        assert running.result().success


def test_runs_of_another_database_do_not_relieve_one_another(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str, looks: Counter[str]
) -> None:
    """Code locations of two databases on one instance may call their job the same."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, shared_instance, dsn)
        await_(lambda: len(moving(shared_instance)) == 1, "the first run")
        other = pool.submit(run, shared_instance, dsn, schema="other")
        await_(lambda: len(moving(shared_instance)) == 2, "the run of the other schema")
        ids = moving(shared_instance)
        for run_id in ids:
            await_look(looks, run_id)
        assert not running.done()
        assert not other.done()
        for run_id in ids:
            relieve(shared_instance, dsn, run_id)
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
        process.send_signal(signal.SIGTERM)
        process.wait(30)
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

    monkeypatch.setattr("eventsql_orchestration.publishing.transfer.Transfer.run", broken)
    result = run(shared_instance, dsn, limit_seconds=LIMIT)
    assert not result.success
