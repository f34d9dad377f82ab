"""Statements that tests/log/test_plans_at_scale.py does not watch find their rows through indexes, by any plan."""

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
from tests.plans import plans

EVENTS = 100_000

VALUES: dict[str, Any] = {
    "topic": "orders",
    "consumer": "mailer",
    "partition": 3,
    "after": EVENTS - 10_000,
    "upto": EVENTS - 5_000,
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
}


@pytest.fixture(scope="module")
def filled(server: EmbeddedPostgres) -> Iterator[EventSQL]:
    """A log of many events in partitions of very different sizes, many consumers and claims."""
    with EventSQL(server.create_database("plans"), transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 10, storage="rows"))
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
                "INSERT INTO eventsql.consumer (eql_topic, eql_name, eql_partition, eql_consumed_events) "
                "SELECT 'topic ' || n / 10, 'mailer', n % 10, 0 FROM generate_series(1, 5000) n"
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


def of(connection: Connection, statement: str, **changes: Any) -> list[str]:
    """The plans of a statement of the log."""
    found = plans(connection, statement_of(statement, "orders"), {**VALUES, **changes})
    # The segments ahead have no page to read.
    return [re.sub(r"Seq Scan on \w+_segment_(5|10)000000\b", "Nothing", plan) for plan in found]


def test_the_extent_of_a_range_is_found_by_ids(filled: EventSQL) -> None:
    with filled.database.connection() as connection:
        for plan in of(connection, "extent"):
            assert re.search(r"Index (Only )?Scan (Backward )?using orders_\w+_segment_0_pkey", plan), plan
            assert "Seq Scan" not in plan
            assert "Sort" not in plan


@pytest.mark.parametrize("partition", [0, 5, 3, 9], ids=["large", "fair", "sparse", "empty"])
def test_the_extent_of_a_range_of_a_partition_steps_over_few_events_of_others(filled: EventSQL, partition: int) -> None:
    with filled.database.connection() as connection:
        # Never prepared: its plan is always that for its values.
        plan = of(connection, "extent_partition", partition=partition)[0]
    assert "Seq Scan" not in plan, plan
    by_partition, by_id = "segment_0_eql_partition_eql_id_idx", "segment_0_pkey"
    assert re.search(f"{by_partition}|{by_id}" if partition in (0, 5) else by_partition, plan), plan


@pytest.mark.parametrize(
    "statement",
    ["lock_consumer", "await_consumer", "consumer_exists", "advance", "record_failure", "lease", "end_lease"],
)
def test_a_consumer_partition_is_found_by_its_key(filled: EventSQL, statement: str) -> None:
    with filled.database.connection() as connection:
        for plan in of(connection, statement):
            assert "consumer_pkey" in plan, plan
            assert "Seq Scan" not in plan


@pytest.mark.parametrize("statement", ["live_claim", "release_live_claim"])
def test_a_live_claim_is_found_among_all_that_ever_were(filled: EventSQL, statement: str) -> None:
    with filled.database.connection() as connection:
        for plan in of(connection, statement):
            assert "consumer_claim_live" in plan, plan


@pytest.mark.parametrize("statement", ["claim", "finish_claim", "own_claim", "renew_lease"])
def test_a_claim_is_found_by_its_number(filled: EventSQL, statement: str) -> None:
    with filled.database.connection() as connection:
        for plan in of(connection, statement):
            # Live claims are no more than there are partitions: their index does as well.
            assert re.search("consumer_claim_(pkey|live)", plan), plan
            assert "Seq Scan" not in plan
