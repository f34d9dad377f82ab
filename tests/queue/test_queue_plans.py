"""The statements of a queue find their rows through its indexes, whichever plan PostgreSQL settles on."""

from __future__ import annotations

from uuid import UUID

import pytest

from eventsql_orchestration.database import Database, Queries
from tests.plans import plans

QUERIES = Queries("queue", "eventsql")

VALUES = {
    "queue": "queue 7",
    "max_messages": 10,
    "visibility_timeout": 30.0,
    "id": 7,
    "receipt": UUID(int=7),
}


@pytest.fixture
def filled(database: Database) -> Database:
    """Many queues of many messages, a tenth of them held by receivers."""
    with database.connection() as connection:
        connection.execute(
            """
            INSERT INTO eventsql.queue_message (eql_queue, eql_body, eql_metadata, eql_visible_at)
            SELECT 'queue ' || number %% 50, 'x', '{}',
                   now() + make_interval(secs => CASE WHEN number %% 10 = 0 THEN 30 ELSE -number END)
            FROM generate_series(1, %s) AS number
            """,
            (20_000,),
        )
        connection.execute("VACUUM ANALYZE eventsql.queue_message")
    return database


def test_receiving_reads_the_index_in_its_order_and_only_as_far_as_it_must(filled: Database) -> None:
    with filled.connection() as connection:
        for plan in plans(connection, QUERIES("receive"), VALUES):
            assert "Index Scan using queue_message_visible" in plan
            assert "queue_message_pkey" in plan
            assert "Seq Scan" not in plan
            # What is sorted is the batch, by its ids; the queue itself is read in its order.
            assert plan.count("Sort Key") == 1
            assert "Sort Key: received.eql_id" in plan


@pytest.mark.parametrize("statement", ["acknowledge", "release"])
def test_settling_a_message_touches_its_row_alone(filled: Database, statement: str) -> None:
    with filled.connection() as connection:
        for plan in plans(connection, QUERIES(statement), VALUES):
            assert "Index Scan using queue_message_pkey" in plan


def test_counting_a_queue_reads_its_part_of_the_index(filled: Database) -> None:
    with filled.connection() as connection:
        for plan in plans(connection, QUERIES("depth"), VALUES):
            assert "Index Only Scan using queue_message_visible" in plan
