"""Housekeeping deletes this package's own old history, and no other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.dagster import EventSQLResource, build_housekeeping_schedule, build_transfer_schedule
from eventsql_orchestration.dagster.housekeeping import delete_runs, purge_ticks
from eventsql_orchestration.dagster.tags import HOUSEKEEPING_CONSUMER, HOUSEKEEPING_INTERNAL, HOUSEKEEPING_TAG
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.log import segments
from eventsql_orchestration.model import Retention


@dg.op
def nothing() -> None: ...


@dg.op
def fail() -> None:
    raise RuntimeError("no")


@dg.job
def idle() -> None:
    nothing()


@dg.job
def failing() -> None:
    fail()


def execute(instance: dg.DagsterInstance, kind: str | None, job: dg.JobDefinition = idle) -> str:
    tags = {} if kind is None else {HOUSEKEEPING_TAG: kind}
    return job.execute_in_process(instance=instance, tags=tags, raise_on_error=False).run_id


def ids(instance: dg.DagsterInstance) -> set[str]:
    return {run.run_id for run in instance.get_runs()}


def test_finished_runs_of_a_kind_are_deleted_with_their_events(instance: dg.DagsterInstance) -> None:
    own = [execute(instance, HOUSEKEEPING_INTERNAL), execute(instance, HOUSEKEEPING_INTERNAL, failing)]
    others = {execute(instance, HOUSEKEEPING_CONSUMER), execute(instance, None)}
    running = instance.create_run_for_job(
        idle, tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL}, status=dg.DagsterRunStatus.STARTED
    )

    assert delete_runs(instance, HOUSEKEEPING_INTERNAL, before=datetime.now(UTC) + timedelta(seconds=1)) == 2
    assert ids(instance) == {*others, running.run_id}
    assert not list(instance.all_logs(own[0]))


def test_young_runs_are_kept(instance: dg.DagsterInstance) -> None:
    execute(instance, HOUSEKEEPING_INTERNAL)
    assert delete_runs(instance, HOUSEKEEPING_INTERNAL, before=datetime.now(UTC) - timedelta(hours=1)) == 0
    assert len(ids(instance)) == 1


def test_more_runs_than_a_page_are_deleted(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventsql_orchestration.dagster.housekeeping.PAGE", 2)
    for _ in range(5):
        execute(instance, HOUSEKEEPING_INTERNAL)
    assert delete_runs(instance, HOUSEKEEPING_INTERNAL, before=datetime.now(UTC) + timedelta(seconds=1)) == 5


def test_the_job_keeps_what_it_was_told_to_keep(instance: dg.DagsterInstance, dsn: str) -> None:
    schedule = build_housekeeping_schedule(keep_hours=0.0, keep_consumer_hours=1.0)
    location = dg.Definitions(
        schedules=[schedule, build_transfer_schedule()], resources={"eventsql": EventSQLResource(dsn=dsn)}
    )
    execute(instance, HOUSEKEEPING_INTERNAL)
    kept = {execute(instance, HOUSEKEEPING_CONSUMER), execute(instance, None)}
    result = location.resolve_job_def("housekeeping").execute_in_process(instance=instance)
    assert ids(instance) == {*kept, result.run_id}


def test_ticks_can_be_purged_where_there_are_none(shared_instance: dg.DagsterInstance) -> None:
    purge_ticks(shared_instance, {"transfer"}, before=datetime.now(UTC))


def test_keeping_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValidationError):
        build_housekeeping_schedule(keep_hours=-1.0)


def test_the_job_keeps_topics_to_their_retention(
    instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    location = dg.Definitions(
        schedules=[build_housekeeping_schedule()], resources={"eventsql": EventSQLResource(dsn=dsn)}
    )
    with EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", retention=Retention(events=5)))
        for _ in range(4):
            platform.publisher.publish_all(Publication("orders", b"") for _ in range(5))
            platform.transfer.run_once()
            assert location.resolve_job_def("housekeeping").execute_in_process(instance=instance).success
        assert platform.reader.count("orders") == 5
