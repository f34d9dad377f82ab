"""A look for events takes one step in an index for each partition, whatever its share of the events and of segments."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from psycopg import sql

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.segments import segment_name

SEGMENTS = 10
SEGMENT = 10_000
EVENTS = SEGMENTS * SEGMENT - SEGMENT // 2
OFFSET = EVENTS - SEGMENT // 4
"""In the last segment with events."""


@pytest.fixture(scope="module")
def filled(server: EmbeddedPostgres) -> Iterator[EventSQL]:
    """A log of many segments, whose partitions are of very different sizes, and many consumers beside the topic's."""
    with EventSQL(server.create_database("consumer_plans"), transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 10))
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
        platform.registry.register_consumer(Consumer("orders", "auditor"))
        with platform.database.connection() as connection:
            for (table,) in connection.execute(
                "SELECT inhrelid::regclass::text FROM pg_inherits "
                "WHERE inhparent = 'eventsql.orders_event'::regclass AND inhrelid::regclass::text LIKE '%segment%'"
            ).fetchall():
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.SQL(table)))
            for number in range(SEGMENTS):
                connection.execute(
                    sql.SQL("CREATE TABLE {} PARTITION OF eventsql.orders_event FOR VALUES FROM ({}) TO ({})").format(
                        sql.Identifier("eventsql", segment_name("orders", number * SEGMENT)),
                        number * SEGMENT,
                        (number + 1) * SEGMENT,
                    )
                )
            connection.execute(
                """
                INSERT INTO eventsql.orders_event (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata)
                SELECT CASE WHEN n %% 100 = 0 THEN 3 WHEN n %% 10 = 0 THEN 5 ELSE n %% 3 END, n::text, 'x', now(), '{}'
                FROM generate_series(1, %s) n
                """,
                (EVENTS,),
            )
            connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s", (OFFSET,))
            connection.execute(
                "INSERT INTO eventsql.consumer (eql_topic, eql_name, eql_partition, eql_consumed_events) "
                "SELECT 'topic ' || n / 10, 'mailer', n %% 10, 0 FROM generate_series(1, 5000) n",
                (),
            )
            connection.execute("VACUUM ANALYZE")
        yield platform
    server.drop_database("consumer_plans")


def plan(connection: Connection, statement: str, mode: str, **values: object) -> str:
    """What the server does for a look, planned for its values or for any."""
    names: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    composed = LogQueries("consumers", "eventsql")(statement, topic="orders").as_string()
    text = re.sub(r"%\((\w+)\)s", numbered, composed)
    with connection.transaction(force_rollback=True):
        connection.execute(sql.SQL("SET LOCAL plan_cache_mode TO {}").format(sql.SQL(mode)))
        connection.execute(b"PREPARE look AS " + text.encode())
        try:
            literals = sql.SQL(", ").join(sql.Literal(values[name]) for name in names)
            lines = connection.execute(
                sql.SQL("EXPLAIN (ANALYZE, BUFFERS) EXECUTE look({})").format(literals)
            ).fetchall()
        finally:
            connection.execute("DEALLOCATE look")
    return "\n".join(line for (line,) in lines)


def read_blocks(found: str) -> int:
    """The blocks that the whole statement read, without planning it."""
    counts = re.search(r"Buffers: shared(?: hit=(\d+))?(?: read=(\d+))?", found)
    assert counts is not None, found
    return sum(int(count or 0) for count in counts.groups())


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_look_takes_one_step_for_each_partition_and_leaves_old_segments_alone(filled: EventSQL, mode: str) -> None:
    with filled.database.connection() as connection:
        found = plan(
            connection, "ready", mode,
            topic="orders", consumer="mailer", partitions=list(range(10)), least=[1] * 10,
        )  # fmt: skip
    assert found.count("_eql_partition_eql_id_idx") >= SEGMENTS, found
    assert "_pkey on" not in found.replace("consumer_pkey on", ""), found
    assert "Seq Scan" not in found
    assert "Sort Method" not in found
    assert found.count("never executed") == SEGMENTS - 1, found
    assert read_blocks(found) < 100


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_look_for_a_whole_topic_takes_one_step_and_leaves_old_segments_alone(filled: EventSQL, mode: str) -> None:
    with filled.database.connection() as connection:
        found = plan(connection, "ready_topic", mode, topic="orders", consumer="auditor", partitions=[-1], least=[1])
    assert "Seq Scan" not in found
    assert "Sort" not in found
    assert found.count("never executed") == SEGMENTS - 1, found
    assert read_blocks(found) < 30


def test_a_look_finds_the_partitions_that_have_events(filled: EventSQL) -> None:
    found = filled.shards[0].consumers._ready("orders", "mailer", dict.fromkeys(range(10), 1), partitioned=True)
    assert found.keys() == {0, 1, 2, 3, 5}
    rare = (EVENTS - OFFSET) // 100
    assert filled.shards[0].consumers._ready("orders", "mailer", {3: rare}, partitioned=True).keys() == {0, 1, 2, 3, 5}
    assert filled.shards[0].consumers._ready("orders", "mailer", {3: rare + 2}, partitioned=True).keys() == {0, 1, 2, 5}
