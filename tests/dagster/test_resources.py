"""The resources."""

from collections.abc import Sequence
from typing import Any

import dagster as dg
import psycopg
import pytest
import yaml  # type: ignore[import-untyped]
from dagster._core.snap import JobSnap
from dagster._core.snap.snap_to_yaml import default_values_yaml_from_type_snap
from pydantic import ValidationError as PydanticValidationError

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.dagster import (
    EventSQLIOManager,
    EventSQLResource,
    RunLimits,
    TopicResource,
    build_register_job,
    consumer_asset,
    topic_key,
)
from eventsql_orchestration.dagster.resources import MASKED
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseError,
    InvalidNameError,
    TopicNotFoundError,
    ValidationError,
)
from tests.dagster.conftest import NOWHERE, sql, use


def connections(platform: EventSQL) -> int:
    """The number of sessions of the database, without this one."""
    others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return len(sql(platform, others))


def test_the_platform_of_a_run_is_one_object_and_is_closed_when_the_run_ends(platform: EventSQL, dsn: str) -> None:
    seen: list[EventSQL] = []

    def look(eventsql: EventSQLResource) -> None:
        seen.extend([eventsql.platform, eventsql.platform])
        seen[0].registry.topics()
        assert connections(platform) == 1

    use(EventSQLResource(dsn=dsn), look)
    assert seen[0] is seen[1]
    assert connections(platform) == 0


def test_a_run_that_does_not_use_the_platform_does_not_connect() -> None:
    use(EventSQLResource(dsn=NOWHERE))


def test_the_url_may_come_from_the_environment(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN"), db_schema=dg.EnvVar("EVENTSQL_TEST_SCHEMA"))
    monkeypatch.setenv("EVENTSQL_TEST_DSN", dsn)
    monkeypatch.setenv("EVENTSQL_TEST_SCHEMA", "eventsql")
    topics: list[list[Topic]] = []
    use(resource, lambda eventsql: topics.append(eventsql.platform.registry.topics()))
    assert topics == [[]]


def test_a_schema_that_is_not_an_identifier_is_refused_by_its_name() -> None:
    with pytest.raises(PydanticValidationError, match="db_schema"):
        EventSQLResource(dsn="postgresql://localhost/x", db_schema="No Schema")


@pytest.mark.parametrize("dsn", ["mysql://user:secret@host/x", "secret", "postgresql://user:secret@host:port/x"])
def test_loading_a_location_refuses_an_invalid_url_and_the_error_has_no_password(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="dsn of EventSQLResource") as caught:
        EventSQLResource(dsn=dsn)
    assert "secret" not in str(caught.value)


def test_a_url_of_the_environment_is_refused_when_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    # The URL is not checked when the location is loaded: that process may not have the variables that its runs have.
    resource = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN"))
    with pytest.raises(dg.DagsterInvalidConfigError, match="EVENTSQL_TEST_DSN"):
        use(resource)
    monkeypatch.setenv("EVENTSQL_TEST_DSN", "mysql://user:secret@host/x")
    with pytest.raises(dg.DagsterError) as caught:
        use(resource)
    cause = caught.value.__cause__
    assert isinstance(cause, ConfigurationError)
    assert str(cause).startswith("dsn of EventSQLResource: the database must be PostgreSQL")
    assert "secret" not in str(cause)


def test_secrets_of_the_environment_are_not_in_the_configuration_that_dagster_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVENTSQL_TEST_DSN", "postgresql://user:secret@host/x")
    eventsql = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN"))
    for resource in (eventsql, TopicResource(eventsql=eventsql, topic="rides"), EventSQLIOManager(eventsql=eventsql)):
        assert "secret" not in repr(resource)
        assert "secret" not in str(
            dg.Definitions(resources={"r": resource}).get_repository_def().get_top_level_resources()
        )


def test_a_bounded_platform_ends_statements_that_take_too_long(dsn: str) -> None:
    with (
        EventSQLResource(dsn=dsn).bounded(0.3) as platform,
        pytest.raises((DatabaseError, psycopg.Error), match="statement timeout"),
        platform.database.connection() as connection,
    ):
        connection.execute("SELECT pg_sleep(20)")


def test_a_bounded_platform_does_not_migrate(dsn: str, database: Any) -> None:
    with EventSQLResource(dsn=dsn, db_schema="empty").bounded(5.0) as platform, pytest.raises(DatabaseError):
        platform.registry.topics()
    with database.connection() as connection:
        row = connection.execute("SELECT to_regnamespace('empty')").fetchone()
    assert row == (None,)


def test_a_topic_registers_itself_and_its_dead_letters(eventsql: EventSQLResource, platform: EventSQL) -> None:
    topic = TopicResource(eventsql=eventsql, topic="rides", partitions=4, dead_letters=True)
    assert topic.register() == Topic("rides", 4)
    assert topic.register() == Topic("rides", 4)
    assert [each.name for each in platform.registry.topics()] == ["rides", "rides_dlt"]


def test_a_topic_publishes_reads_and_knows_its_lag(eventsql: EventSQLResource, platform: EventSQL) -> None:
    topic = TopicResource(eventsql=eventsql, topic="rides", partitions=2)
    topic.register()
    platform.registry.register_consumer(Consumer("rides", "c"))
    topic.publish(b"one", key="k", metadata={"source": "web"})
    topic.publish(Publication("rides", b"two", partition=1))
    assert topic.publish_all(Publication("rides", b"%d" % i) for i in range(3)) == 3
    platform.transfer.run_once()

    assert {event.value for event in topic.read()} == {b"one", b"two", b"0", b"1", b"2"}
    two = next(event.id for event in topic.read() if event.value == b"two")
    assert [event.value for event in topic.read(after=two - 1, upto=two, partition=1)] == [b"two"]
    assert {event.value: dict(event.metadata) for event in topic.read()}[b"one"] == {"source": "web"}
    assert [lag.events for lag in topic.lag()] == [5]


def test_an_event_of_an_asset_names_its_run_asset_and_partition(eventsql: EventSQLResource, platform: EventSQL) -> None:
    days = dg.StaticPartitionsDefinition(["monday", "tuesday"])

    @dg.asset(partitions_def=days, key=topic_key("rides"))
    def rides(context: dg.AssetExecutionContext, topic: TopicResource) -> None:
        topic.publish(b"one", metadata={"source": "web"}, context=context)
        topic.publish_all([Publication("rides", b"two")], context=context)

    topic = TopicResource(eventsql=eventsql, topic="rides")
    topic.register()
    result = dg.materialize([rides], partition_key="monday", resources={"topic": topic, "eventsql": eventsql})
    platform.transfer.run_once()
    origin = {"dagster_run_id": result.run_id, "dagster_asset_key": "topic/rides", "dagster_partition": "monday"}
    assert [dict(event.metadata) for event in platform.reader.read("rides")] == [{"source": "web", **origin}, origin]


def test_an_event_of_an_op_names_its_run(eventsql: EventSQLResource, platform: EventSQL) -> None:
    topic = TopicResource(eventsql=eventsql, topic="rides")
    topic.register()

    @dg.op
    def ride(context: dg.OpExecutionContext, topic: TopicResource) -> None:
        topic.publish(b"one", context=context)

    @dg.job(resource_defs={"topic": topic, "eventsql": eventsql})
    def job() -> None:
        ride()

    result = job.execute_in_process()
    platform.transfer.run_once()
    assert [dict(event.metadata) for event in platform.reader.read("rides")] == [{"dagster_run_id": result.run_id}]


def test_a_topic_takes_no_publication_of_another_topic(eventsql: EventSQLResource) -> None:
    topic = TopicResource(eventsql=eventsql, topic="rides")
    with pytest.raises(ValidationError, match="for topic 'orders' was given to topic 'rides'"):
        topic.publish(Publication("orders", b""))
    with pytest.raises(ValidationError, match="its own key"):
        topic.publish(Publication("rides", b""), key="k")


@pytest.mark.parametrize(("value", "kind"), [("text", r"str \(encode"), (7, "int"), (None, "NoneType")])
def test_a_value_that_is_not_an_event_is_refused_and_the_error_names_its_type(
    eventsql: EventSQLResource, value: Any, kind: str
) -> None:
    topic = TopicResource(eventsql=eventsql, topic="rides")
    topic.register()
    with pytest.raises(ValidationError, match=f"not {kind}"):
        topic.publish(value)
    with pytest.raises(ValidationError, match=f"not {kind}"):
        topic.publish_all([Publication("rides", b""), value])
    topic.platform.transfer.run_once()
    assert topic.read() == []


def test_an_event_published_through_a_connection_commits_with_it(
    eventsql: EventSQLResource, platform: EventSQL
) -> None:
    topic = TopicResource(eventsql=eventsql, topic="rides")
    topic.register()
    for value, committed in ((b"lost", False), (b"kept", True)):
        with platform.database.connection() as connection, connection.transaction(force_rollback=not committed):
            topic.publish(value, connection=connection)
            topic.publish_all([Publication("rides", value)], connection=connection)
    platform.transfer.run_once()
    assert [event.value for event in topic.read()] == [b"kept", b"kept"]


def test_a_consumer_that_publishes_through_its_connection_publishes_nothing_when_it_fails(
    eventsql: EventSQLResource, platform: EventSQL, instance: dg.DagsterInstance
) -> None:
    failures = [ValueError("the first time")]

    @consumer_asset(topic=Topic("rides"), consumer="answers", max_attempts=1, limits=RunLimits(drain_seconds=0.0))
    def answers(
        context: dg.AssetExecutionContext, events: Sequence[Event], connection: Connection, answered: TopicResource
    ) -> None:
        for event in events:
            answered.publish(event.value * 2, connection=connection, context=context)
        if failures:
            raise failures.pop()

    answered = TopicResource(eventsql=eventsql, topic="answered")
    answered.register()
    answers.register(platform)
    platform.publisher.publish(Publication("rides", b"x"))
    platform.transfer.run_once()
    location = dg.Definitions(
        assets=[answers.asset], jobs=[answers.job], resources={"eventsql": eventsql, "answered": answered}
    )
    runs = []
    for _ in range(2):
        job = location.resolve_job_def(answers.job.name)
        runs.append(job.execute_in_process(instance=instance, raise_on_error=False).run_id)
        platform.registry.resume("rides", "answers")
    platform.transfer.run_once()
    (event,) = answered.read()
    assert (event.value, event.metadata["dagster_run_id"]) == (b"xx", runs[1])


def test_a_topic_that_is_not_registered_takes_no_events(eventsql: EventSQLResource) -> None:
    with pytest.raises(TopicNotFoundError):
        TopicResource(eventsql=eventsql, topic="rides").publish(b"")


def test_a_topic_is_checked_when_the_location_is_loaded(eventsql: EventSQLResource) -> None:
    with pytest.raises((PydanticValidationError, InvalidNameError), match="No Topic"):
        TopicResource(eventsql=eventsql, topic="No Topic")
    with pytest.raises((PydanticValidationError, ValidationError), match="partitions"):
        TopicResource(eventsql=eventsql, topic="rides", partitions=0)


@pytest.mark.parametrize("from_environment", [True, False])
def test_a_run_that_is_launched_with_the_config_of_the_launchpad_has_the_configured_database(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch, from_environment: bool
) -> None:
    monkeypatch.setenv("EVENTSQL_TEST_DSN", dsn)
    register = build_register_job([], topics=[Topic("rides")])
    resource = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN") if from_environment else dsn)
    job = dg.Definitions(jobs=[register], resources={"eventsql": resource}).resolve_job_def("register")
    snapshot = JobSnap.from_job_def(job)
    schema = snapshot.config_schema_snapshot
    root = schema.get_config_snap(snapshot.mode_def_snaps[0].root_config_key or "")
    shown = default_values_yaml_from_type_snap(schema, root)

    assert dsn not in shown
    assert job.execute_in_process(run_config=yaml.safe_load(shown)).success
    assert platform.registry.topics() == [Topic("rides")]


def test_a_run_of_the_launchpad_without_the_variable_of_the_database_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EVENTSQL_TEST_DSN", raising=False)
    resource = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN"))
    with pytest.raises(ConfigurationError, match="variable EVENTSQL_TEST_DSN, which names the database, is not set"):
        resource._with_updated_values({"dsn": MASKED})
