"""Reading one partition of a log in blocks: first the window of ids that the range begins in, then the rest."""

from __future__ import annotations

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.storage.log_form import FORMS, form_now
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.reading import MAX_OFFSET, WINDOW, LogReader

SEQUENCE = "eventsql.orders_block_eql_id_seq"
BOUNDS = (0, 1, WINDOW - 300, WINDOW - 150, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 150, 4 * WINDOW, MAX_OFFSET)


def prepare(platform: EventSQL) -> None:
    """Blocks that begin in a window and end in the next one, a gap of more than a window, and events behind it."""
    platform.registry.register_topic(Topic("orders", 2, storage="blocks"))
    for newest in (WINDOW - 600, WINDOW - 200, WINDOW + 500, 4 * WINDOW - 100):
        with platform.database.connection() as connection:
            connection.execute(f"SELECT setval('{SEQUENCE}', %s)", [newest])
            connection.execute("SELECT eventsql.make_segments('orders', %s, 2)", [WINDOW])
        platform.publisher.publish_all(Publication("orders", b"%d" % number, key=str(number)) for number in range(300))


pytestmark = pytest.mark.prepared.with_args(prepare)


def read(session: psycopg.Connection, **values: int | None) -> list[int]:
    form_now(session, "eventsql", "orders")
    return [event.id for event in LogReader("eventsql").read(session, "orders", **values)]  # type: ignore[arg-type]


def of_partition(platform: EventSQL, partition: int) -> list[int]:
    return [event.id for event in platform.reader.read("orders") if event.partition == partition]


@pytest.mark.parametrize("partition", [0, 1])
@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_each_range_has_the_events_that_a_read_of_all_partitions_finds(
    platform: EventSQL, session: psycopg.Connection, limit: int, partition: int
) -> None:
    own = of_partition(platform, partition)
    assert len([each for each in own if each < WINDOW]) > 100 < len([each for each in own if each > 3 * WINDOW])
    for after in BOUNDS:
        for upto in BOUNDS:
            wanted = [each for each in own if after < each <= upto][:limit]
            assert read(session, partition=partition, after=after, upto=upto, limit=limit) == wanted, (after, upto)


def test_more_blocks_than_the_first_look_reads(platform: EventSQL, session: psycopg.Connection) -> None:
    for _ in range(140):
        platform.publisher.publish_all([Publication("orders", b"", key="a")] * 10)
    for partition in (0, 1):
        own = of_partition(platform, partition)
        assert read(session, partition=partition, after=4 * WINDOW, limit=5_000) == [e for e in own if e > 4 * WINDOW]


def test_a_batch_does_not_end_where_its_window_ends(platform: EventSQL, session: psycopg.Connection) -> None:
    own = of_partition(platform, 0)
    assert read(session, partition=0, limit=len(own)) == own
    assert read(session, partition=0, after=WINDOW - 10, limit=200) == [e for e in own if e > WINDOW - 10][:200]


def test_segments_that_retention_dropped_are_passed(platform: EventSQL, session: psycopg.Connection) -> None:
    session.execute("DELETE FROM eventsql.orders_block WHERE eql_id < %s", [3 * WINDOW])
    own = of_partition(platform, 0)
    assert own
    assert read(session, partition=0, after=0, limit=1_000) == own


@pytest.mark.parametrize(
    "lost", ["SELECT setval('{}', 1)", "ALTER SEQUENCE {} RESTART", "ALTER SEQUENCE {} OWNED BY NONE"]
)
def test_a_sequence_that_is_not_the_logs_any_more_hides_nothing(
    platform: EventSQL, session: psycopg.Connection, lost: str
) -> None:
    """As after the restore of a dump without sequences."""
    own = of_partition(platform, 0)
    session.execute(lost.format(SEQUENCE).encode())
    assert read(session, partition=0, limit=10_000) == own


def test_a_sequence_that_was_set_back_into_a_window_does_not_end_a_range(
    platform: EventSQL, session: psycopg.Connection
) -> None:
    """A claim whose read gives fewer events than it asks for is over."""
    own = of_partition(platform, 0)
    session.execute(f"SELECT setval('{SEQUENCE}', %s)", [WINDOW - 1])
    assert read(session, partition=0, upto=own[-1], limit=10_000) == own


def test_a_role_that_may_only_read_the_log_reads_a_partition(platform: EventSQL, session: psycopg.Connection) -> None:
    """A right on the log's sequence is not needed."""
    own = of_partition(platform, 0)
    with pytest.raises(ZeroDivisionError), session.transaction():
        session.execute("CREATE ROLE looker")
        session.execute("GRANT USAGE ON SCHEMA eventsql TO looker")
        session.execute("GRANT SELECT ON eventsql.topic, eventsql.orders_block TO looker")
        session.execute("SET LOCAL ROLE looker")
        assert read(session, partition=0, limit=10_000) == own
        # The role belongs to the server, and goes with the transaction.
        raise ZeroDivisionError


def test_the_driver_remembers_the_statements_that_read() -> None:
    """The driver parses a statement of more than 4,096 bytes at each execution: 60 µs of the 220 that a read takes."""
    queries, topic = LogQueries("read", "a schema"), "a_topic_of_a_service"
    window = queries.in_window("read_window", topic, begin=10**15, behind=10**15 + WINDOW)
    for statement in (window, queries("read", topic=topic, form=FORMS["blocks"])):
        assert len(statement.as_string()) <= 4_096
