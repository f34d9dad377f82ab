"""A topic that EventSQL's Java library unregisters and registers anew has nothing of its former life."""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.cli.topic_output import description
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import tables
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.legacy_writer_trigger import stranded
from eventsql_orchestration.topics.leftovers import Lacking, Leftovers
from tests.fixtures import Until
from tests.java.sides import Side, Written

pytestmark = pytest.mark.in_rows

KEYS = [str(number) for number in range(40)]


def kept_of(platform: EventSQL, topic: str) -> dict[str, int]:
    """How many rows of each table name a topic, where there are any."""
    found = {}
    with platform.database.connection() as connection:
        named = connection.execute(
            "SELECT table_name, column_name FROM information_schema.columns "
            "WHERE table_schema = 'eventsql' AND table_name = ANY (%s) "
            "AND column_name = CASE WHEN table_name = 'topic' THEN 'eql_name' ELSE 'eql_topic' END",
            [list(tables.NAMES)],
        ).fetchall()
        for table, name in named:
            row = connection.execute(f"SELECT count(*) FROM eventsql.{table} WHERE {name} = %s", [topic]).fetchone()
            found[table] = 0 if row is None else int(row[0])
    return {table: count for table, count in found.items() if count}


def consumed(platform: EventSQL, consumer: str) -> list[Event]:
    seen: list[Event] = []
    while platform.consumers.consume_once("orders", consumer, lambda batch, _: seen.extend(batch)):
        pass
    return seen


def live_through(java: Side, platform: EventSQL) -> Claim:
    """A life of `orders`: repartitioned, consumed, claimed and redriven; gives a claim that nobody ended."""
    platform.registry.register_topic(Topic("orders", 2)).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "sums", partitioned=True), max_attempts=1)
    platform.publisher.publish_all(Publication("orders", b"before", key=key) for key in KEYS)
    platform.transfer.run_once()
    assert platform.repartitioner.repartition("orders", 6) is not None

    def fail(events: object, connection: object) -> None:
        raise ValueError("not today")

    platform.consumers.consume_once("orders", "sums", fail)
    platform.transfer.run_once()
    assert platform.dead_letters.redrive("orders") > 0
    claim = platform.claims.claim("orders", "sums", 0, owner="me")
    assert isinstance(claim, Claim)
    with platform.database.connection() as connection:
        connection.execute("INSERT INTO eventsql.shard_fence VALUES (2, 'orders', 40)")
    return claim


def test_topics_and_consumers_that_java_unregisters_leave_nothing(java: Side, platform: EventSQL) -> None:
    claim = live_through(java, platform)
    java.unregister_consumer("orders", "sums")
    assert kept_of(platform, "orders").keys().isdisjoint({"consumer", "consumer_claim"})
    java.unregister_topic("orders")
    java.unregister_topic("orders_dlt")
    assert kept_of(platform, "orders") == {}
    assert kept_of(platform, "orders_dlt") == {}
    with pytest.raises(ClaimLostError):
        platform.claims.get(claim.id)


def test_a_consumer_of_a_topic_that_java_registers_anew_sees_every_event(
    java: Side, platform: EventSQL, until: Until
) -> None:
    live_through(java, platform)
    java.unregister_consumer("orders", "sums")
    java.unregister_topic("orders")
    java.register_topic("orders", 6)
    platform.registry.forget("orders")
    platform.registry.register_consumer(Consumer("orders", "sums", partitioned=True))
    java.publish("orders", [Written(key, b"after") for key in KEYS])
    until(lambda: platform.reader.count("orders") == len(KEYS))
    assert len(platform.registry.consumer("orders", "sums")) == 6
    assert sorted(event.key or "" for event in consumed(platform, "sums")) == sorted(KEYS)
    assert description(platform, "orders").layouts == []


def test_a_topic_that_java_redefines_while_it_is_empty_loses_its_layouts(
    java: Side, platform: EventSQL, until: Until
) -> None:
    """That library looks at events and consumers, and changes the number of partitions alone."""
    platform.registry.register_topic(Topic("orders", 2))
    assert platform.repartitioner.repartition("orders", 4) is not None
    publisher = platform.registry.topic("orders")
    java.register_topic("orders", 6)
    assert platform.shards[0].layouts.of("orders") == []
    platform.registry.register_consumer(Consumer("orders", "sums", partitioned=True))
    # One that knows the former definition finds out.
    assert publisher.partitions == 4
    platform.publisher.publish_all(Publication("orders", b"", key=key) for key in KEYS)
    platform.transfer.run_once()
    assert sorted(event.key or "" for event in consumed(platform, "sums")) == sorted(KEYS)


def test_a_segment_that_was_detached_in_a_former_life_is_dropped(java: Side, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    table = segments.segment_name("orders", 0)
    with psycopg.connect(platform.database.dsn, autocommit=True) as connection:
        # As retention leaves it that is killed before it drops the table.
        connection.execute(f"COMMENT ON TABLE eventsql.{table} IS '{tables.DROPPED}'")
        connection.execute(f"ALTER TABLE eventsql.orders_event DETACH PARTITION eventsql.{table}")
        java.unregister_topic("orders")
        assert connection.execute("SELECT to_regclass(%s)", [f"eventsql.{table}"]).fetchone() != (None,)
        platform.retention.run_once()
        assert connection.execute("SELECT to_regclass(%s)", [f"eventsql.{table}"]).fetchone() == (None,)


def test_leftovers_that_came_past_the_database_s_own_clearing_are_found_and_cleared(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    leftovers = Leftovers(platform.database)
    with platform.database.connection() as connection:
        for statement in (
            "INSERT INTO eventsql.topic_layout VALUES ('orders', 1, 2, 0), ('orders', 2, 4, 70), ('gone', 2, 4, 70)",
            (
                "INSERT INTO eventsql.consumer (eql_topic, eql_name, eql_partition, eql_consumed_events, eql_until) "
                "VALUES ('orders', 'sums', 0, 0, 70), ('orders', 'sums', 1, 0, 70), ('gone', 'sums', 0, 0, NULL)"
            ),
            (
                "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
                "eql_events, eql_epoch, eql_owner) SELECT 'orders', 'former', n, 0, 1, 1, 1, 'me' "
                "FROM generate_series(1, 2500) n"
            ),
            "INSERT INTO eventsql.redriven_dead_letter VALUES ('gone_dlt', 1)",
            "INSERT INTO eventsql.shard_fence VALUES (2, 'gone', 70)",
            "INSERT INTO eventsql.event_buffer_lock VALUES ('gone')",
        ):
            connection.execute(statement)
    assert {(each.table, each.topic) for each in leftovers.find()} == {
        ("consumer", "gone"), ("topic_layout", "gone"), ("topic_layout", "orders"), ("consumer_claim", "orders"),
        ("redriven_dead_letter", "gone_dlt"), ("shard_fence", "gone"), ("event_buffer_lock", "gone"),
    }  # fmt: skip
    platform.retention.run_once()
    assert leftovers.find() == []
    assert kept_of(platform, "gone") == kept_of(platform, "gone_dlt") == {}
    assert platform.shards[0].layouts.unsettled("orders") == {}


def test_layouts_of_a_topic_that_is_repartitioned_are_no_leftovers(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2))
    platform.registry.register_consumer(Consumer("orders", "sums", partitioned=True))
    platform.publisher.publish_all(Publication("orders", b"", key=key) for key in KEYS)
    for partitions in (6, 3):
        platform.repartitioner.repartition("orders", partitions)
    leftovers = Leftovers(platform.database)
    assert leftovers.find() == []
    assert leftovers.lacking("orders") == []
    platform.retention.run_once()
    assert [each.partitions for each in platform.shards[0].layouts.of("orders")] == [2, 6, 3]


def test_a_consumer_that_lacks_partitions_gets_them_when_it_is_registered_again(platform: EventSQL) -> None:
    consumer = Consumer("orders", "sums", partitioned=True)
    platform.registry.register_topic(Topic("orders", 4)).register_consumer(consumer)
    platform.publisher.publish_all(Publication("orders", b"", key=key) for key in KEYS)
    platform.transfer.run_once()
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.consumer WHERE eql_partition > 1")
    assert len(consumed(platform, "sums")) < len(KEYS)
    assert Leftovers(platform.database).lacking("orders") == [Lacking("sums", 2, 4)]
    platform.registry.register_consumer(consumer)
    assert Leftovers(platform.database).lacking("orders") == []
    consumed(platform, "sums")
    assert sum(state.consumed_events for state in platform.registry.consumer("orders", "sums")) == len(KEYS)


def test_events_for_a_partition_that_a_topic_does_not_have_are_found(
    java: Side, platform: EventSQL, until: Until
) -> None:
    """A publisher of that library keeps the partitions of its start, also when the topic is registered anew."""
    java.register_topic("orders", 6)
    java.publish("orders", [Written("k", b"")])
    until(lambda: platform.reader.count("orders") == 1)
    java.unregister_topic("orders")
    java.register_topic("orders", 2)
    platform.registry.register_topic(Topic("orders", 2))
    java.publish("orders", [Written(key, b"") for key in KEYS])
    until(lambda: platform.reader.count("orders") == len(KEYS))
    found = {each.partition: each.events for each in stranded(platform.database, "orders")}
    events = Counter(event.partition for event in platform.reader.read("orders") if event.partition > 1)
    assert found == dict(events)
    assert found
