"""A publication of many events is a row of the buffer per block, whose events keep their place and enter the log once.

Stages and publishes as tasks and driver of a write do, without Spark.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from psycopg import sql

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.errors import DatabaseError, DatabaseUnavailableError, RegistryError, StuckEventError
from eventsql_orchestration.publishing import staged_blocks
from eventsql_orchestration.publishing.staged_blocks import LEAST_BY_BLOCKS, ORPHANED_AFTER_HOURS
from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.encoder import Encoder
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import Attempt, WriteTarget, stage
from eventsql_orchestration.storage.appending import BufferedBatch, LogAppender
from eventsql_orchestration.topics.partitioner import default_partition
from tests.forms import check_order, in_blocks, stored
from tests.waiting import wait_until

MANY = LEAST_BY_BLOCKS

PublishMany = Callable[..., list[Attempt]]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", partitions=4)).register_topic(Topic("fares"))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def source(dsn: str) -> Source:
    return Source(dsn, "eventsql", "the database")


def staged(source: Source, first: int, *, topics: Sequence[str] = ("orders",), batch: int = MANY) -> Attempt:
    """An attempt of `MANY` events, numbered on from `first`, of the topics in turn."""
    numbers = range(first, first + MANY)
    columns = {
        "value": pa.array([b"%d" % number for number in numbers], pa.binary()),
        "key": pa.array([f"key-{number % 9}" for number in numbers], pa.string()),
        "topic": pa.array([topics[number % len(topics)] for number in numbers], pa.string()),
    }
    whole = pa.record_batch(columns)
    encoder = Encoder({"orders": 4, "fares": -1, "clicks": 4}, None, {"source": "here"})
    return stage([WriteTarget(source, encoder)], (whole.slice(start, batch) for start in range(0, MANY, batch)))


@pytest.fixture
def publish_many(source: Source) -> PublishMany:
    """Publishes `MANY` events as blocks; gives the attempts."""

    def publish(first: int = 0, **staging: Any) -> list[Attempt]:
        attempts = [staged(source, first, **staging)]
        with Publications(source) as publications:
            assert publications.publish(str(uuid.uuid4()), 0, attempts)
        return attempts

    return publish


def rows_of(platform: EventSQL, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    with platform.database.connection() as connection:
        return connection.execute(
            sql.SQL("SELECT {} FROM {} ORDER BY 1").format(sql.SQL(columns), sql.Identifier("eventsql", table))
        ).fetchall()


def values(platform: EventSQL, topic: str = "orders") -> list[int]:
    return [int(event.value) for event in platform.reader.read(topic)]


def check(platform: EventSQL, expected: Iterable[int]) -> None:
    """Assert that the log of orders has these numbers, those of each partition in their order."""
    check_order(platform.reader.read("orders"), [str(number) for number in expected], staged=True)


# Their place


def test_the_events_of_a_block_are_those_that_were_published(platform: EventSQL, publish_many: PublishMany) -> None:
    before = datetime.now(UTC)
    publish_many()
    after = datetime.now(UTC)
    partitions = len({default_partition(Publication("orders", b"", key=f"key-{each}"), 4) for each in range(9)})
    assert len(rows_of(platform, "event_buffer")) == len(rows_of(platform, "spark_staged_event")) == partitions
    assert platform.transfer.run_once() == {"orders": MANY}
    events = platform.reader.read("orders")
    check_order(events, [str(number) for number in range(MANY)], staged=True)
    for event in (events[0], events[-1]):
        expected = Publication("orders", event.value, key=f"key-{int(event.value) % 9}")
        assert (event.key, event.metadata) == (expected.key, {"source": "here"})
        assert event.partition == platform.publisher.partition_of(expected)
        assert before <= event.buffered_at <= after <= event.created_at
    assert rows_of(platform, "event_buffer") == rows_of(platform, "spark_staged_event") == []


def test_a_block_keeps_its_place_among_the_events_of_others(platform: EventSQL, publish_many: PublishMany) -> None:
    expected: list[int] = []
    for first in (0, 2 * MANY):
        for number in (first, first + 1):
            platform.publisher.publish(Publication("orders", b"%d" % number))
        publish_many(first + 2)
        expected += range(first, first + MANY + 2)
    platform.publisher.publish(Publication("orders", b"-1"))
    assert platform.transfer.run_once() == {"orders": len(expected) + 1}
    check(platform, [*expected, -1])


def test_a_publisher_that_appends_to_the_log_does_not_pass_a_block(
    platform: EventSQL, publish_many: PublishMany
) -> None:
    publish_many()
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(MANY, MANY + 100))
    platform.transfer.run_once()
    check(platform, list(range(MANY + 100)))


def test_an_earlier_event_whose_transaction_ends_late_is_not_lost_behind_a_block(
    platform: EventSQL, dsn: str, publish_many: PublishMany
) -> None:
    with psycopg.connect(dsn) as late:
        platform.publisher.publish(Publication("orders", b"-1"), connection=late)
        publish_many()
        assert platform.transfer.run_once() == {"orders": MANY}
        late.commit()
    assert platform.transfer.run_once() == {"orders": 1}
    check(platform, [*range(MANY), -1])


def test_events_of_several_topics_are_in_blocks_of_their_own_and_each_topic_in_order(
    platform: EventSQL, publish_many: PublishMany
) -> None:
    publish_many(topics=("orders", "fares", "orders"), batch=700)
    fares = list(range(1, MANY, 3))
    assert platform.buffered() == {"orders": MANY - len(fares), "fares": len(fares)}
    # Batches of 700 rows have fewer of each topic than a block.
    assert len(rows_of(platform, "event_buffer")) < 2 * MANY / 700
    platform.transfer.run_once()
    assert values(platform, "fares") == fares
    check(platform, [number for number in range(MANY) if number % 3 != 1])


def test_few_events_are_rows_that_any_transfer_moves(platform: EventSQL, source: Source) -> None:
    few = stage([WriteTarget(source, Encoder({"orders": 4}, "orders", {}))], [pa.record_batch({"value": [b"1", b"2"]})])
    with Publications(source) as publications:
        publications.publish("writer", 0, [few])
    assert [value for (value,) in rows_of(platform, "event_buffer", "eql_value")] == [b"1", b"2"]
    assert rows_of(platform, "spark_staged_event") == []


def test_times_of_a_log_without_time_zones_are_readings_of_the_session_s_clock(
    dsn: str, platform: EventSQL, publish_many: PublishMany
) -> None:
    # As EventSQL's Java library makes a log.
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.register_topic(Topic("orders", 4, storage="rows"))
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute(
            "ALTER TABLE eventsql.orders_event "
            "ALTER eql_buffered_at TYPE timestamp, ALTER eql_created_at TYPE timestamp"
        )
        session.execute(
            sql.SQL("ALTER DATABASE {} SET timezone TO 'Asia/Tokyo'").format(sql.Identifier(session.info.dbname))
        )
    with EventSQL(dsn, transfer=False) as there:
        before = datetime.now(UTC)
        publish_many()
        there.publisher.publish(Publication("orders", b"-1"))
        there.transfer.run_once()
        *_, last_of_block, row = there.reader.read("orders")
        assert before <= last_of_block.buffered_at <= row.buffered_at <= last_of_block.created_at <= row.created_at


# Who counts them


def test_the_events_of_a_block_count_as_lag_of_their_partitions(platform: EventSQL, publish_many: PublishMany) -> None:
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    publish_many()
    platform.publisher.publish(Publication("orders", b"", partition=2))
    assert platform.buffered() == {"orders": MANY + 1}
    lags = platform.lag("orders")
    assert {lag.cause for lag in lags} == {LagCause.TRANSFER}
    assert all(lag.seconds > 0 for lag in lags)
    waiting = {lag.partition: lag.buffered for lag in lags}
    platform.transfer.run_once()
    assert waiting == {partition: platform.reader.count("orders", partition=partition) for partition in range(4)}
    assert platform.buffered() == {}


# Who may not touch them


def test_a_transfer_that_knows_nothing_of_blocks_takes_nothing_out_of_the_buffer(
    platform: EventSQL, dsn: str, publish_many: PublishMany
) -> None:
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.register_topic(Topic("orders", 4, storage="rows"))
    platform.publisher.publish(Publication("orders", b"-1"))
    publish_many()
    # As `flushBuffer` of the Java library.
    with psycopg.connect(dsn, options="-c search_path=public") as java:
        ids = [row[0] for row in java.execute("SELECT eql_id FROM eventsql.event_buffer WHERE eql_topic = 'orders'")]
        java.execute(
            "INSERT INTO eventsql.orders_event (eql_partition, eql_key, eql_value, eql_metadata, eql_buffered_at) "
            "SELECT eql_partition, eql_key, eql_value, eql_metadata, eql_created_at FROM eventsql.event_buffer "
            "WHERE eql_id = ANY (%s)",
            [ids],
        )
        with pytest.raises(psycopg.errors.CheckViolation, match="stands for a block of events") as refused:
            java.execute("DELETE FROM eventsql.event_buffer WHERE eql_id = ANY (%s)", [ids])
        assert refused.value.diag.constraint_name == "event_buffer_published_block"
        java.rollback()
    assert platform.transfer.run_once() == {"orders": MANY + 1}
    check(platform, [-1, *range(MANY)])


def test_published_blocks_are_neither_discarded_nor_swept(
    platform: EventSQL, source: Source, publish_many: PublishMany
) -> None:
    attempts = [staged(source, 0)]
    for first in (True, False):
        # The second time as a driver that did not hear of its commit.
        with Publications(source) as publications:
            assert publications.publish("writer", 0, attempts) is first
            publications.discard(attempts)
    with platform.database.connection() as connection:
        connection.execute(
            "UPDATE eventsql.spark_staged_event SET eql_created_at = eql_created_at - make_interval(hours => %s)",
            (ORPHANED_AFTER_HOURS + 1,),
        )
    publish_many(MANY)
    platform.transfer.run_once()
    check(platform, list(range(2 * MANY)))


def test_a_topic_takes_its_blocks_along_and_no_other_s(platform: EventSQL, publish_many: PublishMany) -> None:
    publish_many(topics=("orders", "fares"))
    with pytest.raises(RegistryError, match="it has events"):
        platform.registry.unregister_topic("orders")
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.register_topic(Topic("orders", partitions=4))
    assert platform.buffered() == {"fares": MANY // 2}
    assert platform.transfer.run_once() == {"fares": MANY // 2}
    assert rows_of(platform, "event_buffer") == rows_of(platform, "spark_staged_event") == []


def test_blocks_are_moved_before_a_topic_gets_other_partitions(platform: EventSQL, publish_many: PublishMany) -> None:
    publish_many()
    changed = platform.repartitioner.repartition("orders", 7)
    assert changed is not None
    platform.publisher.publish(Publication("orders", b"-1", partition=6))
    platform.transfer.run_once()
    *of_block, last = platform.reader.read("orders")
    check_order(of_block, [str(number) for number in range(MANY)], staged=True)
    assert {event.partition for event in of_block} <= {0, 1, 2, 3}
    assert of_block[-1].id <= changed.after < last.id


def test_an_event_that_is_committed_while_blocks_are_moved_keeps_its_place_before_them(
    platform: EventSQL, dsn: str, publish_many: PublishMany, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = LogAppender.batch
    with psycopg.connect(dsn) as late:
        platform.publisher.publish(Publication("orders", b"-1"), connection=late)
        publish_many()

        def committed(*given: Any, **named: Any) -> BufferedBatch:
            seen = look(*given, **named)
            late.commit()
            return seen

        monkeypatch.setattr(LogAppender, "batch", committed)
        assert platform.transfer.run_once() == {"orders": MANY + 1}
    check(platform, [-1, *range(MANY)])
    assert rows_of(platform, "event_buffer") == []


# What goes wrong


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE eventsql.spark_staged_event SET eql_values = eql_values[1:2]",
        "UPDATE eventsql.spark_staged_event SET eql_metadata = '{\"events\": 7}'",
        "DELETE FROM eventsql.spark_staged_event",
        "UPDATE eventsql.spark_staged_event SET eql_keys = eql_keys[:2]",
        "UPDATE eventsql.spark_staged_event SET eql_partition = 4",
    ],
    ids=["cut", "other-number", "gone", "cut-keys", "foreign-partition"],
)
def test_a_block_that_is_damaged_stops_its_topic_and_no_other(
    platform: EventSQL, dsn: str, publish_many: PublishMany, damage: str
) -> None:
    publish_many()
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute(damage)
    platform.publisher.publish(Publication("fares", b"1"))
    platform.publisher.publish(Publication("orders", b"-1"))
    with pytest.raises(DatabaseError, match="'orders' stay in the buffer"):
        platform.transfer.run_once()
    assert (values(platform, "fares"), values(platform)) == ([1], [])


@pytest.mark.parametrize(
    ("column", "kind"), [("eql_keys", "text[]"), ("eql_values", "bytea[]"), ("eql_event_metadata", "json[]")]
)
@pytest.mark.parametrize(
    "damaged",
    ["'{{}}'", "ARRAY[{column}]", "('[0:' || (cardinality({column}) - 1) || ']=' || {column}::text)::{kind}"],
    ids=["empty", "two-dimensions", "other-first-index"],
)
def test_arrays_that_a_log_in_blocks_cannot_have_stay_in_the_buffer(
    platform: EventSQL, dsn: str, publish_many: PublishMany, *, column: str, kind: str, damaged: str
) -> None:
    platform.registry.register_topic(Topic("clicks", 4, storage="blocks"))
    publish_many(topics=["clicks"])
    with psycopg.connect(dsn, autocommit=True) as session:
        changed = damaged.format(column=column, kind=kind)
        session.execute(f"UPDATE eventsql.spark_staged_event SET {column} = {changed}")
    with pytest.raises(StuckEventError):
        platform.transfer.run_once()
    assert (platform.reader.count("clicks"), list(platform.buffered())) == (0, ["clicks"])


def test_an_erasure_names_a_block_whose_arrays_are_unequal(platform: EventSQL, publish_many: PublishMany) -> None:
    publish_many()
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.spark_staged_event SET eql_keys = eql_keys[:2]")
    with pytest.raises(DatabaseError, match="2 keys"):
        platform.eraser.plan("orders", ["key-1"])


def test_blocks_are_moved_by_so_many_bytes_at_once(
    platform: EventSQL, publish_many: PublishMany, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    move = LogAppender.move_blocks

    def watched(own: LogAppender, *arguments: Any, **named: Any) -> Any:
        outcome = move(own, *arguments, **named)
        moved.append(outcome.rows)
        return outcome

    monkeypatch.setattr(LogAppender, "move_blocks", watched)
    publish_many()
    blocks = len(rows_of(platform, "spark_staged_event"))
    assert platform.transfer.run_once() == {"orders": MANY}
    monkeypatch.setattr(staged_blocks, "MOST_MOVED", 1)
    publish_many(MANY)
    assert platform.transfer.run_once() == {"orders": MANY}
    assert moved == [blocks, *[1] * blocks]
    check(platform, range(2 * MANY))


def test_the_blocks_before_a_missing_one_are_moved(platform: EventSQL, publish_many: PublishMany) -> None:
    publish_many()
    publish_many(first=MANY)
    with platform.database.connection() as connection:
        row = connection.execute(
            "DELETE FROM eventsql.spark_staged_event WHERE eql_buffer_id = "
            "(SELECT max(eql_buffer_id) FROM eventsql.spark_staged_event) "
            "RETURNING eql_buffer_id, (eql_metadata ->> 'events')::int"
        ).fetchone()
    assert row is not None
    missing, events = row
    with pytest.raises(StuckEventError) as caught:
        platform.transfer.run_once()
    assert caught.value.buffer_id == missing
    assert platform.reader.count("orders") == 2 * MANY - events


def test_a_server_that_goes_away_while_a_block_is_moved_leaves_it_to_the_next_transfer(
    platform: EventSQL, dsn: str, publish_many: PublishMany
) -> None:
    publish_many()
    with (
        EventSQL(dsn, transfer=False) as elsewhere,
        ThreadPoolExecutor(1) as thread,
        psycopg.connect(dsn) as holder,
        psycopg.connect(dsn, autocommit=True) as administrator,
    ):
        holder.execute(f"LOCK TABLE eventsql.{stored('orders')} IN SHARE MODE")
        moved = thread.submit(elsewhere.transfer.run_once)

        def ended() -> bool:
            ended = administrator.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return ended.rowcount > 0

        wait_until(ended, "the transfer waits for the log")
        assert isinstance(moved.exception(), DatabaseUnavailableError)
    assert platform.transfer.run_once() == {"orders": MANY}
    check(platform, list(range(MANY)))


def test_a_block_that_cannot_be_moved_is_named_and_what_was_published_before_is_moved(
    platform: EventSQL, publish_many: PublishMany
) -> None:
    platform.publisher.publish_all(Publication("fares", b"%d" % number) for number in range(10))
    publish_many(topics=["fares"])
    with platform.database.connection() as connection:
        connection.execute(
            """
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF (SELECT {events} > 10 FROM added) THEN
                    RAISE EXCEPTION 'too much' USING ERRCODE = '57014';
                END IF;
                RETURN NULL;
            END
            $$;
            CREATE TRIGGER refuse AFTER INSERT ON eventsql.{log}
                REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION refuse();
            """.replace("{log}", stored("fares"))
            .replace("{events}", "sum(eql_events)" if in_blocks() else "count(*)")
            .encode()
        )
        ((first, size),) = connection.execute(
            "SELECT eql_buffer_id, pg_column_size(eql_values) FROM eventsql.spark_staged_event ORDER BY 1 LIMIT 1"
        ).fetchall()
        with pytest.raises(StuckEventError) as caught:
            platform.transfer.run_once()
        assert (caught.value.topic, caught.value.buffer_id, caught.value.size) == ("fares", first, size)
        assert platform.reader.count("fares") == 10
        connection.execute(f"DROP TRIGGER refuse ON eventsql.{stored('fares')}".encode())
    assert platform.transfer.run_once() == {"fares": MANY}
