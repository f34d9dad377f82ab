"""The transfer as a schedule: ticks that move events and keep the transfer going, without runs."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.dagster import EventSQLResource, build_transfer_schedule, transfer
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseError, DatabaseUnavailableError
from eventsql_orchestration.publishing.transfer import Transfer
from tests.dagster.conftest import NOWHERE, ONE, Workbench, registering, sql
from tests.dagster.processes import run_process
from tests.forms import stored
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.prepared.with_args(registering(Topic("rides"), Topic("orders")))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks have enough time for a busy machine: without it, a tick leaves events, and shards that are down, out."""
    monkeypatch.setattr(transfer, "TICK_SECONDS", PATIENCE)
    monkeypatch.setattr(transfer, "ALL_SHARDS_SECONDS", PATIENCE)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    ending = list(transfer.BACKGROUND.values())
    transfer.BACKGROUND.clear()
    for each in ending:
        each.until.set()
    for each in ending:
        each.thread.join(PATIENCE)


def tick(instance: dg.DagsterInstance, dsn: str, **options: Any) -> str:
    """Evaluate the schedule as the daemon does; gives the reason why there is no run."""
    schedule = build_transfer_schedule(polling_delay=0.05, **options)
    resources = {"eventsql": EventSQLResource(dsn=dsn)}
    with dg.build_schedule_context(instance=instance, resources=resources) as context:
        evaluated = schedule.evaluate_tick(context)
    assert not evaluated.run_requests
    assert evaluated.skip_message is not None
    return evaluated.skip_message


def publish(platform: EventSQL, topic: str, count: int) -> None:
    """Publish in a transaction, so that the events go into the buffer and not straight into the log."""
    with platform.database.transaction() as connection:
        publications = (Publication(topic, b"%d" % number) for number in range(count))
        platform.publisher.publish_all(publications, connection=connection)


def run(instance: dg.DagsterInstance, dsn: str, *, limit_seconds: float) -> dg.ExecuteInProcessResult:
    schedule = build_transfer_schedule(limit_seconds=limit_seconds, polling_delay=0.05)
    resource = EventSQLResource(dsn=dsn)
    job = dg.Definitions(schedules=[schedule], resources={"eventsql": resource}).resolve_job_def("transfer")
    return job.execute_in_process(instance=instance, raise_on_error=False)


def moved(result: dg.ExecuteInProcessResult) -> dict[str, int]:
    (output,) = [event for event in result.all_events if event.event_type == dg.DagsterEventType.STEP_OUTPUT]
    return {name: int(str(value.value)) for name, value in output.step_output_data.metadata.items()}


# Ticks


def test_the_schedule_ticks_every_minute_and_needs_no_run(instance: dg.DagsterInstance, dsn: str) -> None:
    schedule = build_transfer_schedule()
    assert schedule.cron_schedule == "* * * * *"
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING
    assert tick(instance, dsn) == "no events were in the buffer since the last tick"
    assert not instance.get_runs()


def test_a_tick_moves_the_waiting_events_and_says_so(
    platform: EventSQL, instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(platform, "rides", 1_200)
    publish(platform, "orders", 3)
    monkeypatch.setattr(transfer.BackgroundTransfer, "_run", lambda _: None)
    assert tick(instance, dsn) == "moved 1,203 events since the last tick: 1,200 of rides, 3 of orders"
    assert platform.reader.count("rides") == 1_200


def test_events_move_between_two_ticks_and_the_next_tick_says_so(
    platform: EventSQL, instance: dg.DagsterInstance, dsn: str
) -> None:
    tick(instance, dsn)
    publish(platform, "rides", 10)
    wait_until(lambda: platform.reader.count("rides") == 10, "the events without a tick")

    said: list[str] = []

    def has_the_count() -> bool:
        said.append(tick(instance, dsn))
        return "10 of rides" in said[-1]

    wait_until(has_the_count, "a tick that has the count")
    assert said[-1] == "moved 10 events since the last tick: 10 of rides"
    assert tick(instance, dsn) == "no events were in the buffer since the last tick"


def test_ticks_prolong_one_transfer_and_a_tick_after_its_end_begins_another(platform: EventSQL, dsn: str) -> None:
    eventsql = EventSQLResource(dsn=dsn)
    first = transfer.in_background(eventsql, 0.05, seconds=600)
    assert transfer.in_background(eventsql, 0.05, seconds=0) is first
    wait_until(lambda: not first.thread.is_alive(), "the end of a transfer that no tick prolonged")

    publish(platform, "rides", 1)
    assert platform.buffered() == {"rides": 1}
    second = transfer.in_background(eventsql, 0.05, seconds=600)
    assert second is not first
    wait_until(lambda: platform.buffered() == {}, "the event")


def test_a_tick_begins_another_transfer_if_a_shard_has_dropped_out_of_the_first(
    shards: dict[str, Workbench], monkeypatch: pytest.MonkeyPatch
) -> None:
    eventsql, transfer_on, calls = shards[ONE].eventsql, Transfer.run, itertools.count()

    def breaks_once(*arguments: Any, **named: Any) -> None:
        if next(calls) == 0:
            raise RuntimeError("the transfer of one shard is broken")
        transfer_on(*arguments, **named)

    monkeypatch.setattr(Transfer, "run", breaks_once)
    first = transfer.in_background(eventsql, 0.05, seconds=600)
    wait_until(lambda: transfer.in_background(eventsql, 0.05, seconds=600) is not first, "another transfer")
    wait_until(lambda: not first.thread.is_alive(), "the end of the first")
    for shard in shards.values():
        shard.platform.registry.register_topic(Topic("rides"))
        publish(shard.platform, "rides", 1)
    wait_until(lambda: not any(shard.platform.buffered() for shard in shards.values()), "the events of both shards")


def test_each_database_and_each_schema_has_a_transfer_of_its_own(dsn: str) -> None:
    one = transfer.in_background(EventSQLResource(dsn=dsn), 0.05)
    other = transfer.in_background(EventSQLResource(dsn=dsn, db_schema="other"), 0.05)
    assert one is not other


def test_two_transfers_at_once_keep_the_order(platform: EventSQL, instance: dg.DagsterInstance, dsn: str) -> None:
    """Ticks move events beside the background, and beside the transfers of other processes."""
    stop = threading.Event()
    published = 0

    def publish_on() -> None:
        nonlocal published
        while not stop.is_set():
            platform.publisher.publish(Publication("rides", b"%d" % published))
            published += 1

    publishing = threading.Thread(target=publish_on)
    publishing.start()
    try:
        for _ in range(20):
            tick(instance, dsn)
        wait_until(lambda: platform.reader.count("rides") > 100, "events in the log")
    finally:
        stop.set()
        publishing.join()
    wait_until(lambda: platform.buffered() == {}, "the last events")
    assert [event.value for event in platform.reader.read("rides")] == [b"%d" % number for number in range(published)]


@pytest.fixture
def broken(platform: EventSQL) -> None:
    """Two topics with an event each, one of which cannot be moved."""
    publish(platform, "rides", 1)
    publish(platform, "orders", 1)
    sql(platform, f"ALTER TABLE eventsql.{stored('rides')} ADD CONSTRAINT none CHECK (false) NOT VALID")


@pytest.mark.usefixtures("broken")
def test_a_topic_that_cannot_be_moved_fails_the_tick_and_the_others_move(
    platform: EventSQL, instance: dg.DagsterInstance, dsn: str
) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - Dagster wraps it
        tick(instance, dsn)
    assert isinstance(raised.value.__cause__ or raised.value, DatabaseError)
    wait_until(lambda: platform.buffered() == {"rides": 1}, "the event of the other topic")


@pytest.mark.usefixtures("broken")
def test_a_topic_that_cannot_be_moved_fails_the_tick_although_another_transfer_holds_it_at_first(
    platform: EventSQL, instance: dg.DagsterInstance, dsn: str, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.BackgroundTransfer, "_run", lambda _: None)
    session.execute("BEGIN")
    with ThreadPoolExecutor() as pool:
        session.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'rides' FOR UPDATE")
        ticking = pool.submit(tick, instance, dsn)
        wait_until(lambda: platform.buffered() == {"rides": 1}, "the event of the other topic")
        session.execute("ROLLBACK")
        error = ticking.exception()
    assert error is not None
    assert isinstance(error.__cause__ or error, DatabaseError)


def test_a_tick_without_its_database_fails_and_the_next_one_moves_on(
    platform: EventSQL, instance: dg.DagsterInstance, dsn: str
) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - Dagster wraps it
        tick(instance, NOWHERE)
    assert isinstance(raised.value.__cause__ or raised.value, DatabaseUnavailableError)
    publish(platform, "rides", 1)
    tick(instance, dsn)
    wait_until(lambda: platform.buffered() == {}, "the event")


def test_a_tick_on_a_database_that_is_not_migrated_skips_and_names_the_remedy(
    instance: dg.DagsterInstance, dsn: str
) -> None:
    resources = {"eventsql": EventSQLResource(dsn=dsn, db_schema="other")}
    with dg.build_schedule_context(instance=instance, resources=resources) as context:
        assert "eventsql migrate" in str(build_transfer_schedule().evaluate_tick(context).skip_message)


def test_a_shard_that_is_down_does_not_stop_the_others(
    shards: dict[str, Workbench], instance: dg.DagsterInstance
) -> None:
    up = shards[ONE].platform
    up.registry.register_topic(Topic("rides"))
    publish(up, "rides", 1)
    said = tick(instance, f"{up.database.dsn} {NOWHERE}")
    assert said.endswith("is down")
    wait_until(lambda: up.buffered() == {}, "the event of the shard that is up")


# Runs


def test_a_run_moves_events_for_its_time_and_says_how_many(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str
) -> None:
    publish(platform, "rides", 20)
    publish(platform, "orders", 30)
    result = run(shared_instance, dsn, limit_seconds=0.5)
    assert result.success
    assert moved(result) == {"events": 50, "events of rides": 20, "events of orders": 30}
    log = [entry.user_message for entry in shared_instance.all_logs(result.run_id)]
    assert "moved 50 events since the run began: 30 of orders, 20 of rides" in log


def test_a_run_that_is_terminated_ends_at_once(
    platform: EventSQL, shared_instance: dg.DagsterInstance, dsn: str
) -> None:
    with run_process(shared_instance.root_directory, dsn, "location", "transfer") as process:
        platform.publisher.publish(Publication("rides", b""))
        wait_until(lambda: platform.reader.count("rides") == 1, "the event")
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
    (run_,) = shared_instance.get_runs()
    assert run_.status in (dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE)


def test_a_transfer_that_breaks_fails_its_run(
    shared_instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the transfer is broken")

    monkeypatch.setattr("eventsql_orchestration.publishing.transfer.Transfer.run", broken)
    assert not run(shared_instance, dsn, limit_seconds=120.0).success
