"""One event as a statement for other drivers; docs/examples/outbox_service.py is a service with each of them."""

from __future__ import annotations

import asyncio
import importlib
import json
import runpy
from pathlib import Path
from typing import Any, LiteralString, get_type_hints

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import PartitionOutOfRangeError, ShardError, TopicNotFoundError, ValidationError
from eventsql_orchestration.publishing.handed_out import Statement
from tests.shards.conftest import Databases, databases

__all__ = ["databases"]

# Only the development environment has them.
httpx: Any = importlib.import_module("httpx")
asyncpg: Any = importlib.import_module("asyncpg")

SERVICE = Path(__file__).parents[2] / "docs" / "examples" / "outbox_service.py"
DRIVERS = ["psycopg", "sqlalchemy_connection", "sqlalchemy_session", "asyncpg", "psycopg2"]
ODD = Publication("rides", b"\x00\xff'%s:x$1", key="k'%(key)s :key $1", metadata={"a": "é'%s :b $2"})


@pytest.fixture
def rides(platform: EventSQL) -> EventSQL:
    platform.registry.register_topic(Topic("rides", partitions=8))
    return platform


def test_a_service_commits_its_row_and_its_event_together_with_each_driver(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    app = runpy.run_path(str(SERVICE))["app"]

    async def order() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://service")
        async with app.router.lifespan_context(app), client as service:
            for number, driver in enumerate(DRIVERS):
                assert (await service.post(f"/{driver}/{number}", params={"item": "tea"})).status_code == 200
                # The order's number is taken: neither it nor its event is there twice.
                assert (await service.post(f"/{driver}/{number}", params={"item": "rice"})).status_code == 500

    asyncio.run(order())
    platform.transfer.run_once()
    events = platform.reader.read("order_placed")
    values = [b'{"order": %d, "item": "tea"}' % number for number in range(5)]
    assert sorted(event.value or b"" for event in events) == values
    # A round of the transfer keeps the order within each partition.
    in_partitions = sorted(events, key=lambda event: event.partition)
    assert in_partitions == sorted(events, key=lambda event: (event.partition, event.value or b""))
    topic = platform.registry.topic("order_placed")
    for event in events:
        same = Publication("order_placed", event.value, key=event.key)
        assert event.partition == platform.publisher.partition_of(same, topic)


def as_published(platform: EventSQL) -> Any:
    platform.transfer.run_once()
    return [(each.partition, each.key, each.value, dict(each.metadata)) for each in platform.reader.read("rides")]


def test_a_statement_publishes_what_publish_does(rides: EventSQL, dsn: str) -> None:
    rides.publisher.publish(ODD)
    sql, parameters = rides.publisher.statement(ODD)
    with psycopg.connect(dsn) as connection:
        connection.execute(sql, parameters)
    once, again = as_published(rides)
    assert once == again


def test_a_drivers_own_encoder_of_json_does_not_change_the_metadata(rides: EventSQL, dsn: str) -> None:
    async def publish() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.set_type_codec("json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        sql, parameters = rides.publisher.statement(ODD, paramstyle="numeric_dollar")
        await connection.execute(sql, *parameters)
        await connection.close()

    asyncio.run(publish())
    assert [metadata for *_, metadata in as_published(rides)] == [ODD.metadata]


@pytest.mark.parametrize("isolation", list(psycopg.IsolationLevel))
def test_a_statement_for_a_topic_that_was_redefined_since_publishes_nothing(
    rides: EventSQL, dsn: str, isolation: psycopg.IsolationLevel
) -> None:
    statement = rides.publisher.statement(ODD)
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = isolation
        rides.repartitioner.repartition("rides", 3)
        with pytest.raises(psycopg.errors.InvalidTextRepresentation, match="0 events were published"):
            connection.execute(*statement)
    assert as_published(rides) == []


def test_each_style_has_the_same_statement(rides: EventSQL) -> None:
    pyformat, named, numbered = [
        rides.publisher.statement(ODD, paramstyle=style) for style in ("pyformat", "named", "numeric_dollar")
    ]
    assert pyformat.parameters == named.parameters
    assert numbered.parameters == tuple(named.parameters.values())
    assert "%" not in named.sql + numbered.sql
    for number, name in enumerate(named.parameters, 1):
        assert named.sql.count(f":{name} ") == pyformat.sql.count(f"%({name})s")
        assert numbered.sql.count(f"${number}:") == pyformat.sql.count(f"%({name})s")


def test_the_sql_has_the_type_that_psycopg_demands() -> None:
    assert get_type_hints(Statement)["sql"] is LiteralString


def test_bad_input_is_refused_before_there_is_a_statement(rides: EventSQL) -> None:
    with pytest.raises(TopicNotFoundError):
        rides.publisher.statement(Publication("nowhere", b"1"))
    with pytest.raises(PartitionOutOfRangeError):
        rides.publisher.statement(Publication("rides", b"1", partition=8))
    with pytest.raises(ValidationError):
        rides.publisher.statement(ODD, paramstyle="qmark")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        rides.publisher.statement("rides")  # type: ignore[arg-type]


def test_over_several_shards_the_shard_of_the_key_makes_the_statement(databases: Databases) -> None:
    one, two = databases(2)
    with EventSQL(one, two, transfer=False) as platform:
        platform.registry.register_topic(Topic("rides", partitions=8))
        with pytest.raises(ShardError, match="shard_of"):
            platform.publisher.statement(ODD)
        shard = platform.shard_of(str(ODD.key))
        with psycopg.connect(shard.database.dsn) as connection:
            connection.execute(*shard.publisher.statement(ODD))
        (other,) = [each for each in platform.shards if each is not shard]
        with pytest.raises(ShardError):
            other.publisher.statement(ODD)
        assert platform.transfer.run_once() == {"rides": 1}
