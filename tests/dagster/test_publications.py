"""The record of a publication is deleted when nothing can repeat the publication any more, and not before."""

from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.dagster import EventSQLResource, build_housekeeping_schedule, publish_events
from eventsql_orchestration.dagster.housekeeping.prune import delete_publications
from eventsql_orchestration.errors import DatabaseError, DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.orchestration import publication
from eventsql_orchestration.orchestration.owners import airflow_run
from eventsql_orchestration.spark.commit_protocol import Publications
from tests.dagster.conftest import registering, sql

LATER = timedelta(days=30)

pytestmark = pytest.mark.prepared.with_args(registering(Topic("fares")))


@dg.job
def executed_again() -> None: ...


def publish(instance: dg.DagsterInstance, eventsql: EventSQLResource) -> str:
    """A run whose asset publishes; gives its id."""

    @dg.asset
    def fares(context: dg.AssetExecutionContext) -> None:
        publish_events(context, [{"value": b"12"}], eventsql=eventsql, topic="fares")

    return dg.materialize([fares], instance=instance).run_id


def record(platform: EventSQL, *publications: tuple[str, int, datetime]) -> None:
    columns = "eql_writer, eql_batch, eql_created_at, eql_events"
    for row in publications:
        sql(platform, f"INSERT INTO eventsql.spark_publication ({columns}) VALUES (%s, %s, %s, 1)", *row)


def left(platform: EventSQL) -> list[tuple[str, int]]:
    return sql(platform, "SELECT eql_writer, eql_batch FROM eventsql.spark_publication ORDER BY eql_writer, eql_batch")


@pytest.mark.parametrize("seconds", [publication.FIND_SECONDS, 0.0], ids=["a moment", "for long"])
def test_a_database_that_is_away_after_a_publication_does_not_hide_that_it_was_published(
    instance: dg.DagsterInstance,
    eventsql: EventSQLResource,
    platform: EventSQL,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    stage_and_publish, find = publication._Write.stage_and_publish, publication._Record.find

    def away(*_: object) -> None:
        monkeypatch.setattr(publication._Record, "find", find)
        raise DatabaseUnavailableError("gone")

    def publish_and_go(self: publication._Write, value: object) -> bool:
        monkeypatch.setattr(publication._Record, "find", away)
        return stage_and_publish(self, value)

    monkeypatch.setattr(publication._Write, "stage_and_publish", publish_and_go)
    monkeypatch.setattr(publication, "FIND_SECONDS", seconds)
    if seconds:
        publish(instance, eventsql)
    else:
        with pytest.raises(EventSQLError, match="nothing twice"):
            publish(instance, eventsql)
    assert len(left(platform)) == 1


def test_a_publication_that_fails_leaves_no_staged_event(
    instance: dg.DagsterInstance, eventsql: EventSQLResource, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def staged() -> int:
        return int(sql(platform, "SELECT count(*) FROM eventsql.spark_staged_event")[0][0])

    def fail(*_: object) -> bool:
        assert staged() == 1
        raise DatabaseError("no")

    monkeypatch.setattr(Publications, "publish", fail)
    with pytest.raises(DatabaseError):
        publish(instance, eventsql)
    assert staged() == 0


def test_the_record_of_a_run_is_kept_while_the_run_can_be_executed_again(
    instance: dg.DagsterInstance, eventsql: EventSQLResource, platform: EventSQL
) -> None:
    run_id = publish(instance, eventsql)
    again = instance.create_run_for_job(
        executed_again, parent_run_id=run_id, root_run_id=run_id, tags={"dagster/root_run_id": run_id}
    )
    later = datetime.now(UTC) + timedelta(seconds=1)
    assert delete_publications(platform.shards[0], instance, before=later) == 0
    instance.delete_run(run_id)
    assert delete_publications(platform.shards[0], instance, before=later) == 0, "its re-execution can be, too"
    instance.delete_run(again.run_id)
    assert delete_publications(platform.shards[0], instance, before=later - timedelta(hours=1)) == 0, "it is young"
    assert delete_publications(platform.shards[0], instance, before=later) == 1
    assert left(platform) == []


def test_the_record_of_a_claim_is_deleted_when_it_is_old(instance: dg.DagsterInstance, platform: EventSQL) -> None:
    now = datetime.now(UTC)
    old, young = '["sums", null, null, "fares", "claim 7"]', '["sums", null, null, "fares", "claim 8"]'
    record(platform, (old, 0, now - 2 * LATER), (young, 0, now))
    assert delete_publications(platform.shards[0], instance, before=now - LATER) == 1
    assert left(platform) == [(young, 0)]


def test_the_records_of_others_stay_whatever_their_age(instance: dg.DagsterInstance, platform: EventSQL) -> None:
    now = datetime.now(UTC)
    task = f'["publish", null, null, "fares", "run {airflow_run("dag", "scheduled")}"]'
    writers = ["a stream", "[not a list", "[1, 2]", task]
    record(platform, *((writer, batch, now - 2 * LATER) for writer in writers for batch in range(3)))
    assert delete_publications(platform.shards[0], instance, before=now - LATER) == 0
    assert len(left(platform)) == 12


def test_more_writers_than_a_page_are_deleted(instance: dg.DagsterInstance, platform: EventSQL) -> None:
    old = datetime.now(UTC) - 2 * LATER
    record(platform, *((f'["a", null, null, "fares", "run {n}"]', 0, old) for n in range(5)))
    assert delete_publications(platform.shards[0], instance, before=datetime.now(UTC) - LATER, page=2) == 5


def test_housekeeping_deletes_records_after_the_runs(
    instance: dg.DagsterInstance, platform: EventSQL, dsn: str
) -> None:
    record(platform, ('["a", null, null, "fares", "run gone"]', 0, datetime.now(UTC) - 2 * LATER))
    location = dg.Definitions(
        schedules=[build_housekeeping_schedule()], resources={"eventsql": EventSQLResource(dsn=dsn)}
    )
    assert location.resolve_job_def("housekeeping").execute_in_process(instance=instance).success
    assert left(platform) == []
