"""The hot statements of the log find their rows through its indexes, whichever plan PostgreSQL settles on.

The tables are uneven on purpose: a topic that floods the buffer beside one with a single event, and partitions of very
different sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from psycopg import sql

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.storage.log_queries import LogQueries
from tests.conftest import generic_plan

EVENTS = 100_000
FLOOD = 60_000

VALUES: dict[str, Any] = {
    "topic": "orders",
    "consumer": "mailer",
    "partition": 3,
    "after": EVENTS - 10_000,
    "upto": EVENTS - 5_000,
    "limit": 1_000,
    "low_water": FLOOD // 2,
    "newest": 2**63 - 1,
    "marked": ["flood", "orders"],
    "low_waters": [FLOOD // 2, FLOOD // 2],
    "wanted": None,
    "first": 1,
    "consumed": 1_000,
    "transaction": None,
    "event": 1,
    "attempts": 1,
    "failure": "ValueError: no",
    "backoff": 1.0,
    "claim": 7,
    "epoch": 1,
    "owner": "me",
    "lease": 60.0,
    "state": "committed",
    "events": 1_000,
    "topics": ["orders"],
    "partitions": [10],
    "layout": 1,
    "layouts": [1],
}


@pytest.fixture(scope="module")
def filled(server: EmbeddedPostgres) -> Iterator[EventSQL]:
    """A log of many events, a buffer that one topic floods, many topics and consumers."""
    with EventSQL(server.create_database("plans"), transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 10)).register_topic(Topic("flood")).register_topic(
            Topic("rare")
        )
        platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
        with platform.database.connection() as connection:
            connection.execute(
                """
                INSERT INTO eventsql.orders_event (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata)
                SELECT CASE WHEN n %% 100 = 0 THEN 3 WHEN n %% 10 = 0 THEN 5 ELSE n %% 3 END, n::text,
                       convert_to(repeat('x', 100), 'UTF8'),
                       now(), '{}'
                FROM generate_series(1, %s) n
                """,
                (EVENTS,),
            )
            connection.execute(
                """
                INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata)
                SELECT CASE WHEN n %% 1000 = 0 THEN 'orders' ELSE 'flood' END, -1, 'x', '{}'
                FROM generate_series(1, %s) n
                """,
                (FLOOD,),
            )
            connection.execute(
                "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
                "VALUES ('rare', -1, 'x', '{}')"
            )
            connection.execute(
                "INSERT INTO eventsql.consumer (eql_topic, eql_name, eql_partition, eql_consumed_events) "
                "SELECT 'topic ' || n / 10, 'mailer', n % 10, 0 FROM generate_series(1, 5000) n"
            )
            connection.execute(
                "INSERT INTO eventsql.topic (eql_name, eql_partitions) "
                "SELECT 'topic_' || n, 10 FROM generate_series(1, 2000) n"
            )
            connection.execute(
                "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
                "eql_events, eql_epoch, eql_owner, eql_state) "
                "SELECT 'orders', 'mailer', n % 10, n, n + 1, 1, n, 'me', 'committed' FROM generate_series(1, 5000) n"
            )
            connection.execute("VACUUM ANALYZE")
        yield platform
    server.drop_database("plans")


def statement_of(name: str, topic: str) -> sql.SQL:
    """A statement of the buffer's and consumers' own, or of the log's."""
    for of_log in (LogQueries("read", "eventsql"), LogQueries("append", "eventsql")):
        with suppress(KeyError):
            return of_log(name, topic=topic)
    return Queries("log", "eventsql")(name)


def plans(connection: Connection, statement: str, topic: str = "orders", **changes: Any) -> list[str]:
    """The plan for these values, and the one for any values that a prepared statement may change to."""
    composed = statement_of(statement, topic)
    names: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", numbered, composed.as_string()).replace("%%", "%")
    values = {**VALUES, **changes}
    custom = connection.execute(b"EXPLAIN " + composed.as_bytes(), {name: values[name] for name in names}).fetchall()
    both = "\n".join(line for (line,) in custom), generic_plan(connection, text, [values[name] for name in names])
    # The segments ahead have no page to read.
    return [re.sub(r"Seq Scan on \w+_segment_(5|10)000000\b", "Nothing", plan) for plan in both]


@pytest.mark.parametrize("statement", ["read", "count", "waiting", "oldest", "end", "extent"])
def test_reading_a_log_goes_by_its_ids(filled: EventSQL, statement: str) -> None:
    with filled.database.connection() as connection:
        for plan in plans(connection, statement):
            assert re.search(r"Index (Only )?Scan (Backward )?using orders_\w+_segment_0_pkey", plan), plan
            assert "Seq Scan" not in plan
            assert "Sort" not in plan


@pytest.mark.parametrize("partition", [0, 5, 3, 9], ids=["large", "fair", "sparse", "empty"])
@pytest.mark.parametrize(
    "statement",
    ["read_partition", "count_partition", "waiting_partition", "oldest_partition", "end_partition", "extent_partition"],
)
def test_reading_a_partition_steps_over_few_events_of_others(filled: EventSQL, statement: str, partition: int) -> None:
    with filled.database.connection() as connection:
        # Never prepared: its plan is always that for its values.
        plan = plans(connection, statement, partition=partition)[0]
    assert "Seq Scan" not in plan, plan
    # The few events of a sparse partition may be sorted instead of read in order from each segment.
    assert "Sort" not in plan or partition in (3, 9), plan
    by_partition, by_id = "segment_0_eql_partition_eql_id_idx", "segment_0_pkey"
    assert re.search(f"{by_partition}|{by_id}" if partition in (0, 5) else by_partition, plan), plan


def test_looking_for_topics_with_events_takes_one_row_of_the_buffer_for_each(filled: EventSQL) -> None:
    with filled.database.connection() as connection:
        for plan in plans(connection, "look"):
            assert "event_buffer_topic_id" in plan, plan
            assert "Seq Scan on event_buffer b" not in plan
            assert "event_buffer_pkey" not in plan, plan


@pytest.mark.parametrize("topic", ["flood", "orders", "rare"])
def test_the_end_of_a_batch_is_found_in_the_order_of_the_topics_own_index(filled: EventSQL, topic: str) -> None:
    with filled.database.connection() as connection:
        for plan in plans(connection, "batch_end", topic=topic, low_water=0):
            assert "event_buffer_topic_id" in plan, plan
            assert "Seq Scan" not in plan


@pytest.mark.parametrize("topic", ["orders", "rare"])
def test_moving_takes_the_range_of_a_topic_by_its_index(filled: EventSQL, topic: str) -> None:
    with filled.database.connection() as connection:
        # Never prepared: its plan is always that for its values.
        plan = plans(connection, "move", topic=topic, low_water=0, upto=FLOOD)[0]
        assert "event_buffer_topic_id" in plan, plan
        assert "Seq Scan on" not in plan


def test_moving_a_flood_reads_nothing_but_its_range(filled: EventSQL) -> None:
    with filled.database.connection() as connection:
        plan = plans(connection, "move", topic="flood", upto=FLOOD // 2 + 10_000)[0]
        assert re.search(r"Index Scan using event_buffer_(pkey|topic_id)", plan), plan
        assert "Seq Scan on" not in plan


@pytest.mark.parametrize(
    "statement",
    ["lock_consumer", "await_consumer", "consumer_exists", "advance", "record_failure", "lease", "end_lease"],
)
def test_a_consumer_partition_is_found_by_its_key(filled: EventSQL, statement: str) -> None:
    with filled.database.connection() as connection:
        for plan in plans(connection, statement):
            assert "consumer_pkey" in plan, plan
            assert "Seq Scan" not in plan


@pytest.mark.parametrize("statement", ["live_claim", "release_live_claim"])
def test_a_live_claim_is_found_among_all_that_ever_were(filled: EventSQL, statement: str) -> None:
    with filled.database.connection() as connection:
        for plan in plans(connection, statement):
            assert "consumer_claim_live" in plan, plan


@pytest.mark.parametrize("statement", ["claim", "finish_claim", "own_claim", "renew_lease"])
def test_a_claim_is_found_by_its_number(filled: EventSQL, statement: str) -> None:
    with filled.database.connection() as connection:
        for plan in plans(connection, statement):
            # Live claims are no more than there are partitions: their index does as well.
            assert re.search("consumer_claim_(pkey|live)", plan), plan
            assert "Seq Scan" not in plan


@pytest.mark.parametrize(
    ("statement", "partitions"), [("publish", 10), ("redefined_topics", [10]), ("topic_exists", 10)]
)
def test_a_publisher_finds_its_topic_by_its_name(filled: EventSQL, statement: str, partitions: object) -> None:
    with filled.database.connection() as connection:
        for plan in plans(connection, statement, key="k", value=b"x", metadata="{}", partitions=partitions):
            assert "topic_pkey" in plan, plan
            assert "Seq Scan" not in plan


def test_an_idle_transfer_reads_next_to_nothing_of_a_buffer_that_was_emptied(filled: EventSQL) -> None:
    """Rows that were deleted and not removed yet are stepped over once, and not again."""
    with filled.database.connection() as keeping, keeping.transaction():
        keeping.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        keeping.execute("SELECT 1").fetchone()
        filled.transfer.run_once()
        assert filled.shards[0].transfer._writer._connection is not None
        marks = filled.shards[0].transfer._writer._low_water.marks
        assert set(marks) == {"flood", "orders", "rare"}
        row = (
            filled.shards[0]
            .transfer._writer._connection.execute(
                b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + Queries("log", "eventsql")("look").as_bytes(),
                {"marked": list(marks), "low_waters": list(marks.values()), "wanted": None},
            )
            .fetchone()
        )
        assert row is not None
        plan = row[0][0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 100
