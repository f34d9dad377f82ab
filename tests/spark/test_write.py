"""Writing events with Spark, in batches and as streams: each once, all or none."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StructField, StructType, _parse_datatype_string

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    ClaimLostError,
    ClaimNotFoundError,
    ConfigurationError,
    DatabaseBusyError,
    DatabaseError,
    EventSQLError,
    InvalidNameError,
    InvalidPublicationError,
    PartitionOutOfRangeError,
    RedefinitionError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.publishing.block_format import MOST_BYTES, MOST_EVENTS, EncodedBlock, encode_blocks
from eventsql_orchestration.publishing.staged_blocks import ORPHANED_AFTER_HOURS
from eventsql_orchestration.spark import FORMAT, eventsql_error, range_options
from eventsql_orchestration.spark.commit_log import CommitLog, Portion
from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.encoder import BATCH_BYTES, Encoder
from eventsql_orchestration.spark.options import Source, WriteOptions
from eventsql_orchestration.spark.source import EventSQLDataSource
from eventsql_orchestration.spark.staging import Attempt, Share, WriteTarget, stage
from eventsql_orchestration.spark.writer import BatchWriter, StreamWriter
from eventsql_orchestration.topics.partitioner import default_partition, partition_of_key
from tests.forms import check_order
from tests.spark.streams import run_to_end
from tests.waiting import wait_until

Read = Callable[..., DataFrame]
Write = Callable[..., None]

IN_A_STREAM = "spark.sql.streaming.internal.stateStore.partitions"
"""A setting that Spark gives the session of each streaming query."""

FARE = "value binary, key string"


def prepare(platform: EventSQL) -> None:
    for topic in (Topic("orders", partitions=4), Topic("fares", partitions=3), Topic("plain")):
        platform.registry.register_topic(topic)


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture
def source(dsn: str) -> Source:
    return Source(dsn, "eventsql", "the database")


def numbers(spark: SparkSession, count: int, *, tasks: int = 2) -> DataFrame:
    """`count` events whose value is their number, in order over the tasks."""
    return spark.range(0, count, 1, tasks).selectExpr("cast(id AS string) AS value", "concat('key-', id % 7) AS key")


def values_in(platform: EventSQL, topic: str) -> list[str]:
    """The values of a topic's events in their order, once all are transferred."""
    platform.transfer.run_once()
    return [event.value.decode() for event in platform.reader.read(topic)]


def staged_in(platform: EventSQL) -> int:
    with platform.database.connection() as connection:
        row = connection.execute("SELECT count(*) FROM eventsql.spark_staged_event").fetchone()
    assert row is not None
    return int(row[0])


def publications_in(platform: EventSQL) -> list[tuple[str, int, int]]:
    with platform.database.connection() as connection:
        rows = connection.execute(
            "SELECT eql_writer, eql_batch, eql_events FROM eventsql.spark_publication ORDER BY 1, 2"
        ).fetchall()
    return [(str(writer), int(batch), int(events)) for writer, batch, events in rows]


def in_numbers(values: list[str]) -> list[int]:
    return sorted(int(value) for value in values)


# What is written


def test_events_are_written_as_the_columns_say(spark: SparkSession, platform: EventSQL, write: Write) -> None:
    rows = spark.sql("""
        SELECT * FROM VALUES
            ('orders', 'ké', X'00FF', CAST(NULL AS int), map('source', 'wéb', 'a"', '\\\\')),
            ('orders', CAST(NULL AS string), X'01', 2, map()),
            ('plain', 'k', X'', CAST(NULL AS int), CAST(NULL AS map<string, string>)),
            ('fares', 'k', X'03', 1, map('run', 'overridden'))
        AS rows (topic, key, value, partition, headers)
    """)
    write(rows.coalesce(1), headers=json.dumps({"runId": "7"}), **{"header.run": "ours"})
    platform.transfer.run_once()
    ours = {"runId": "7", "run": "ours"}
    assert [(event.partition, event.key, event.value, event.metadata) for event in platform.reader.read("orders")] == [
        (partition_of_key("ké", 4), "ké", b"\x00\xff", {"source": "wéb", 'a"': "\\", **ours}),
        (2, None, b"\x01", ours),
    ]
    assert [(e.partition, e.key, e.value, e.metadata) for e in platform.reader.read("plain")] == [(-1, "k", b"", ours)]
    assert [(e.partition, e.metadata) for e in platform.reader.read("fares")] == [(1, ours)]


def test_a_topic_is_copied_by_reading_and_writing_it(platform: EventSQL, read: Read, write: Write) -> None:
    platform.publisher.publish_all(
        Publication("orders", b"%d" % n, key=f"k{n}", metadata={"n": str(n)}) for n in range(20)
    )
    platform.transfer.run_once()
    write(read("orders", includeHeaders=True, numPartitions=1).drop("partition"), topic="fares")
    platform.transfer.run_once()
    events, copied = platform.reader.read("orders"), platform.reader.read("fares")
    check_order(copied, [event.value.decode() for event in events], staged=True)
    contents = {event.value: (event.key, event.metadata) for event in events}
    assert {event.value: (event.key, event.metadata) for event in copied} == contents


def test_events_of_a_partition_keep_the_order_of_their_rows(
    spark: SparkSession, platform: EventSQL, write: Write
) -> None:
    # More than one Arrow batch for each task, so that positions go on from batch to batch.
    write(numbers(spark, 25_000), topic="orders")
    platform.transfer.run_once()
    check_order(platform.reader.read("orders"), [str(number) for number in range(25_000)], staged=True)
    assert staged_in(platform) == 0


def test_keys_choose_the_partition_that_the_publisher_chooses(
    spark: SparkSession, platform: EventSQL, write: Write
) -> None:
    keys = [f"{random.random()}-é" for _ in range(200)]
    write(spark.createDataFrame([(key, b"spark") for key in keys], "key string, value binary"), topic="orders")
    platform.publisher.publish_all(Publication("orders", b"python", key=key) for key in keys)
    platform.transfer.run_once()
    of_key: dict[str | None, set[int]] = {}
    for event in platform.reader.read("orders"):
        of_key.setdefault(event.key, set()).add(event.partition)
    assert set(of_key) == set(keys)
    assert all(len(partitions) == 1 for partitions in of_key.values())


def test_events_without_a_key_are_spread(platform: EventSQL, source: Source) -> None:
    attempt = stage(
        [WriteTarget(source, Encoder({"orders": 4}, "orders", {}))], [pa.record_batch({"value": [b""] * 400})]
    )
    assert attempt.shares == (Share(None, {"orders": 400}, {"orders": 4}),)
    with Publications(source) as publications:
        publications.publish("writer", 0, [attempt])
    platform.transfer.run_once()
    counts = Counter(event.partition for event in platform.reader.read("orders"))
    assert set(counts) == {0, 1, 2, 3}
    assert all(count > 40 for count in counts.values())


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["orders", "plain"]),
            st.binary(max_size=40),
            st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
            st.dictionaries(st.text("ab", max_size=2), st.text('cé"', max_size=3), max_size=2),
        ),
        max_size=20,
    ),
    skipped=st.integers(0, 3),
)
def test_a_block_is_encoded_as_the_publisher_encodes_events(
    rows: list[tuple[str, bytes, str | None, dict[str, str]]], skipped: int
) -> None:
    partitions = {"orders": 4, "plain": -1}
    columns = {
        "topic": pa.array([topic for topic, *_ in rows], pa.string()),
        "value": pa.array([value for _, value, *_ in rows], pa.binary()),
        # A partition is given where the publisher would draw one.
        "partition": pa.array(
            [1 if key is None and topic == "orders" else None for topic, _, key, _ in rows], pa.int32()
        ),
        "key": pa.array([key for _, _, key, _ in rows], pa.string()),
        "headers": pa.array([list(headers.items()) for *_, headers in rows], pa.map_(pa.string(), pa.string())),
    }
    encoder = Encoder(partitions, None, {"run": "7"})
    given: dict[str, tuple[list[Publication], list[int]]] = {}
    for topic, value, key, headers in rows[skipped:]:
        event = Publication(topic, value, key=key, metadata={**headers, "run": "7"})
        events, numbers = given.setdefault(topic, ([], []))
        events.append(event)
        numbers.append(1 if key is None and topic == "orders" else default_partition(event, partitions[topic]))
    found = {
        topic: sorted(encoder.blocks(topic, own), key=lambda block: block.partition)
        for topic, own in encoder.by_topic(pa.record_batch(columns).slice(skipped))
    }
    assert found == {
        topic: sorted(encode_blocks(*events), key=lambda block: block.partition) for topic, events in given.items()
    }


def test_rows_of_many_topics_that_a_task_collects_are_written_once_and_in_their_order(
    platform: EventSQL, source: Source
) -> None:
    # All topics together reach the bound on what is collected before one of them does. After that, one does.
    topics = [f"topic_{number}" for number in range(6)]
    rows = [(number, topics[number % 6 if number < 18 else 0]) for number in range(24)]
    for topic in topics:
        platform.registry.register_topic(Topic(topic))
    batches = (
        pa.record_batch({"topic": [topic], "value": [b"%d %s" % (number, bytes(BATCH_BYTES // 4))]})
        for number, topic in rows
    )
    with Publications(source) as publications:
        publications.publish(None, 0, [stage(publications.write_targets(None, {}), batches)])
    platform.transfer.run_once()
    for topic in topics:
        found = [int(event.value[:2]) for event in platform.reader.read(topic) if event.value is not None]
        assert found == [number for number, of in rows if of == topic]


def test_rows_that_are_many_or_large_become_several_blocks() -> None:
    encoder = Encoder({"plain": -1}, "plain", {})
    for rows, size in ((2 * MOST_EVENTS + 1, 1), (9, MOST_BYTES // 2), (3, 2 * MOST_BYTES), (100, BATCH_BYTES // 20)):
        values = [random.randbytes(size) for _ in range(rows)]
        blocks = list(encoder.blocks("plain", pa.record_batch({"value": values})))
        assert sum(block.events for block in blocks) == rows
        for block in blocks:
            assert block.events <= MOST_EVENTS
            assert block.events == 1 or len(block.arrays) < MOST_BYTES * 1.1
        assert [value for block in blocks for value in elements(block)] == values


def elements(block: EncodedBlock) -> list[bytes]:
    """The values of a block without keys and metadata."""
    # No keys, the length of the array, and its header.
    body, found, at = block.arrays[4 + 4 + 20 : -4], [], 0
    while at < len(body):
        (length,) = struct.unpack_from(">i", body, at)
        found.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    return found


# Once


def test_a_batch_is_published_once_however_often_it_is_written(
    spark: SparkSession, platform: EventSQL, write: Write
) -> None:
    for batch in (0, 0, 1):
        write(numbers(spark, 10), topic="orders", writerId="nightly", batchId=batch)
    assert in_numbers(values_in(platform, "orders")) == sorted([*range(10)] * 2)
    assert publications_in(platform) == [("nightly", 0, 10), ("nightly", 1, 10)]
    assert staged_in(platform) == 0


def test_writers_without_a_name_are_different_ones(spark: SparkSession, platform: EventSQL, write: Write) -> None:
    for _ in range(2):
        write(numbers(spark, 10), topic="orders")
    assert len(values_in(platform, "orders")) == 20


def test_events_that_are_not_published_because_their_batch_was_are_warned_of(
    platform: EventSQL, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    for writer, rows in (("writer", 5), ("writer", 5), ("writer", 6), ("writer", 0), ("of none", 0), ("of none", 2)):
        attempt = stage([WriteTarget(source, Encoder({"orders": 4}, "orders", {}))], [events(rows)])
        with Publications(source) as publications:
            publications.publish(writer, 0, [attempt])
    warnings = [record.getMessage() for record in caplog.records if "published before" in record.getMessage()]
    assert [re.findall(r"with (\d+) events, so these (\d+) events", each) for each in warnings] == [
        [("5", "6")], [("5", "0")], [("0", "2")],
    ]  # fmt: skip
    assert len(values_in(platform, "orders")) == 5


def test_a_batch_that_was_published_to_other_topics_is_refused(
    spark: SparkSession, platform: EventSQL, session: Connection, write: Write
) -> None:
    write(numbers(spark, 10), topic="orders", writerId="nightly")
    with pytest.raises(PySparkException) as failure:
        write(numbers(spark, 10), topic="fares", writerId="nightly")
    error = eventsql_error(failure.value)
    assert isinstance(error, ConfigurationError)
    assert "published before to topic orders, and nothing is published to topic fares" in error.message
    assert staged_in(platform) == 0
    # A record from before revision 0072 does not name the topics.
    session.execute("UPDATE eventsql.spark_publication SET eql_topics = NULL")
    write(numbers(spark, 10), topic="fares", writerId="nightly")
    assert values_in(platform, "fares") == []


def test_of_publications_at_the_same_time_one_takes_place(platform: EventSQL, source: Source) -> None:
    attempts = [stage([WriteTarget(source, Encoder({"orders": 4}, "orders", {}))], [events(5)]) for _ in range(8)]

    def publish(attempt: Attempt) -> bool:
        with Publications(source) as publications:
            return publications.publish("writer", 0, [attempt])

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(publish, attempts)) == 1
    assert len(values_in(platform, "orders")) == 5
    assert staged_in(platform) == 0


def test_a_task_that_fails_at_first_leaves_nothing_double(
    spark: SparkSession, platform: EventSQL, write: Write
) -> None:
    def fail_at_first(numbers: Iterable[int]) -> Iterator[tuple[str]]:
        context = TaskContext.get()
        assert context is not None
        for number in numbers:
            if number == 29_000 and context.attemptNumber() == 0:
                raise RuntimeError("this attempt fails when it has staged 10,000 events")
            yield (str(number),)

    rows = spark.sparkContext.parallelize(range(30_000), 2).mapPartitions(fail_at_first)
    write(spark.createDataFrame(rows, "value string"), topic="orders")
    assert in_numbers(values_in(platform, "orders")) == list(range(30_000))
    assert staged_in(platform) == 0


def test_a_query_that_fails_publishes_nothing(spark: SparkSession, platform: EventSQL, write: Write) -> None:
    rows = numbers(spark, 1_000).selectExpr("CASE WHEN value = '999' THEN NULL ELSE value END AS value", "key")
    with pytest.raises(PySparkException) as failure:
        # One task: another may stage its last block after the query failed, which stays until it is swept.
        write(rows.coalesce(1), topic="orders", writerId="nightly")
    error = eventsql_error(failure.value)
    assert isinstance(error, InvalidPublicationError)
    assert error.message == "column 'value' is null: every event needs a value"
    assert values_in(platform, "orders") == []
    assert publications_in(platform) == []
    assert staged_in(platform) == 0


def events(count: int, *, topic: str | None = None) -> pa.RecordBatch:
    columns = {"value": [b"%d" % number for number in range(count)]}
    return pa.record_batch(columns if topic is None else {**columns, "topic": [topic] * count})


def test_attempts_that_no_publication_names_are_swept_after_a_day(platform: EventSQL, source: Source) -> None:
    encoder = Encoder({"orders": 4}, "orders", {})
    old, fresh, published = (stage([WriteTarget(source, encoder)], [events(3)]) for _ in range(3))
    with platform.database.connection() as connection:
        connection.execute(
            "UPDATE eventsql.spark_staged_event SET eql_created_at = eql_created_at - %s WHERE eql_attempt = %s",
            (timedelta(hours=ORPHANED_AFTER_HOURS, minutes=1), old.id),
        )
    with Publications(source) as publications:
        assert publications.publish("writer", 0, [published])
    with platform.database.connection() as connection:
        left = connection.execute("SELECT DISTINCT eql_attempt FROM eventsql.spark_staged_event").fetchall()
    assert left == [(fresh.id,)]


def test_a_publication_that_lacks_staged_events_fails_whole(platform: EventSQL, source: Source) -> None:
    encoder = Encoder({"orders": 4}, "orders", {})
    whole, lost = (
        stage([WriteTarget(source, encoder)], [events(3)]),
        Attempt(uuid.uuid4(), (Share(None, {"orders": 2}),)),
    )
    with Publications(source) as publications:
        with pytest.raises(DatabaseError, match="some of 2 events"):
            publications.publish("writer", 0, [whole, lost])
        assert values_in(platform, "orders") == []
        assert publications_in(platform) == []
        publications.discard([whole])
    assert staged_in(platform) == 0


def test_a_topic_that_is_deleted_meanwhile_stops_the_publication(platform: EventSQL, source: Source) -> None:
    attempt = stage([WriteTarget(source, Encoder({"orders": 4, "fares": 3}, None, {}))], [events(2, topic="fares")])
    platform.registry.unregister_topic("fares", force=True)
    with Publications(source) as publications, pytest.raises(TopicNotFoundError, match="'fares' was deleted"):
        publications.publish("writer", 0, [attempt])
    assert publications_in(platform) == []


def test_a_topic_that_is_redefined_meanwhile_stops_the_publication(platform: EventSQL, source: Source) -> None:
    attempt = stage([WriteTarget(source, Encoder({"fares": 3}, "fares", {}))], [events(200)])
    platform.registry.register_topic(Topic("fares", partitions=7))
    with Publications(source) as publications:
        with pytest.raises(RedefinitionError, match="'fares' was redefined"):
            publications.publish("writer", 0, [attempt])
        publications.discard([attempt])
    assert publications_in(platform) == []
    assert values_in(platform, "fares") == []


def test_a_topic_that_is_repartitioned_there_and_back_meanwhile_stops_the_publication(
    platform: EventSQL, source: Source
) -> None:
    before = platform.registry.topic("fares").partitions
    with Publications(source) as publications:
        attempt = stage(publications.write_targets("fares", {}), [events(200)])
        for partitions in (before + 1, before):
            platform.repartitioner.repartition("fares", partitions)
        with pytest.raises(RedefinitionError, match="'fares' was redefined"):
            publications.publish("writer", 0, [attempt])
    assert values_in(platform, "fares") == []


def test_a_publication_under_way_keeps_its_topics_as_they_are(
    platform: EventSQL, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = stage([WriteTarget(source, Encoder({"fares": 3}, "fares", {}))], [events(200)])
    with Publications(source) as publications:
        check, redefined = CommitLog.check_topics, threading.Event()

        def redefine_after_the_check(log: CommitLog, connection: Connection, portion: Portion) -> None:
            check(log, connection, portion)
            other.start()
            with platform.database.connection() as watching:
                await_a_waiting_lock(watching)
            assert not redefined.is_set()

        def redefine() -> None:
            with EventSQL(source.dsn, transfer=False) as another, suppress(RedefinitionError, DatabaseBusyError):
                another.registry.register_topic(Topic("fares", partitions=7))
                redefined.set()

        other = threading.Thread(target=redefine)
        monkeypatch.setattr(CommitLog, "check_topics", redefine_after_the_check)
        assert publications.publish("writer", 0, [attempt])
        other.join()
    platform.transfer.run_once()
    assert {event.partition for event in platform.reader.read("fares")} == {0, 1, 2}
    assert platform.registry.topic("fares").partitions == 3


def await_a_waiting_lock(connection: Connection) -> None:
    blocked = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    wait_until(lambda: connection.execute(blocked).rowcount, "a session waits for a lock")


# Claims: consume, transform, publish


@pytest.fixture
def claim(platform: EventSQL) -> Claim:
    """A claim of the first 30 of 50 orders."""
    platform.registry.register_consumer(Consumer("orders", "fares"))
    platform.publisher.publish_all(Publication("orders", b"%d" % number, partition=0) for number in range(50))
    platform.transfer.run_once()
    claimed = platform.claims.claim("orders", "fares", -1, owner="a run", max_events=30)
    assert isinstance(claimed, Claim)
    return claimed


def offset_of(platform: EventSQL) -> int:
    (state,) = platform.registry.consumer("orders", "fares")
    return state.last_event_id


def test_the_output_for_a_claim_is_published_together_with_its_offset(
    platform: EventSQL, read: Read, write: Write, claim: Claim
) -> None:
    fares = read("orders", schema="value binary", **range_options(claim.range))
    for _ in range(2):
        write(fares, topic="fares", claim=claim.id)
        assert in_numbers(values_in(platform, "fares")) == list(range(30))
        assert offset_of(platform) == claim.range.upto
    assert platform.claims.get(claim.id)[1] == "committed"
    assert publications_in(platform) == [(f"claim-{claim.id}", 0, 30)]
    assert staged_in(platform) == 0


def test_a_claim_without_anything_to_publish_is_committed(
    spark: SparkSession, platform: EventSQL, write: Write, claim: Claim
) -> None:
    write(spark.createDataFrame([], FARE), topic="fares", claim=claim.id)
    assert values_in(platform, "fares") == []
    assert offset_of(platform) == claim.range.upto


def test_a_claim_that_another_owner_took_over_publishes_nothing(
    spark: SparkSession, platform: EventSQL, dsn: str, source: Source, claim: Claim
) -> None:
    options = {"dsn": dsn, "topic": "fares", "claim": str(claim.id)}
    writer = EventSQLDataSource(options).writer(schema_of(FARE), overwrite=False)
    message = writer.write(iter([events(3)]))
    platform.claims.adopt(claim.id, owner="the run that takes over")
    with pytest.raises(ClaimLostError):
        writer.commit([message])
    writer.abort([message])
    assert values_in(platform, "fares") == []
    assert offset_of(platform) == 0
    assert publications_in(platform) == []
    assert staged_in(platform) == 0


def test_a_claim_whose_offset_another_consumer_moved_publishes_nothing(
    spark: SparkSession, platform: EventSQL, write: Write, claim: Claim
) -> None:
    # As EventSQL's Java library would, which knows no leases.
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 5")
    with pytest.raises(PySparkException) as failure:
        write(numbers(spark, 3), topic="fares", claim=claim.id)
    assert isinstance(eventsql_error(failure.value), ClaimLostError)
    assert values_in(platform, "fares") == []
    assert offset_of(platform) == 5
    assert staged_in(platform) == 0


def test_a_batch_that_was_published_without_the_claim_is_not_taken_for_its(
    platform: EventSQL, source: Source, claim: Claim
) -> None:
    encoder = Encoder({"fares": 3}, "fares", {})
    with Publications(source) as publications:
        publications.publish("nightly", 0, [stage([WriteTarget(source, encoder)], [events(3)])])
        with pytest.raises(ClaimLostError, match="give writerId a new value"):
            again = stage([WriteTarget(source, encoder)], [events(3)])
            publications.publish("nightly", 0, [again], publications.hold(claim.id))
    assert offset_of(platform) == 0
    assert len(values_in(platform, "fares")) == 3


# Bad input


def schema_of(text: str) -> StructType:
    schema = _parse_datatype_string(text)
    assert isinstance(schema, StructType)
    return schema


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("schema", "options", "error", "message"),
    [
        ("key string", {}, ValidationError, "column 'value' is missing"),
        ("value int", {}, ValidationError, "column 'value' must be binary or string, not int"),
        ("value binary, key int", {}, ValidationError, "column 'key' must be string, not int"),
        ("value binary, partition string", {}, ValidationError, "column 'partition' must be int"),
        (
            "value binary, headers map<string,int>",
            {},
            ValidationError,
            r"must be map<string,string>, not map<string,int>",
        ),
        ("value binary, key string, value string", {}, ValidationError, "column 'value' occurs twice"),
        ("value binary, topic int", {"topic": None}, ValidationError, "column 'topic' must be string"),
        ("value binary, fare int", {}, ValidationError, "column 'fare' is not a part of an event"),
        (FARE, {"topic": None}, ConfigurationError, "neither an option nor a column 'topic'"),
        (FARE, {"topic": "nothing"}, TopicNotFoundError, "option topic: topic 'nothing' does not exist"),
        (FARE, {"topic": "No-Topic"}, InvalidNameError, "option topic: "),
        (FARE, {"dsn": None}, ConfigurationError, "option dsn is missing"),
        (FARE, {"writerid": " "}, ValidationError, "option writerId is empty"),
        (FARE, {"writerid": "\x00"}, ValidationError, "option writerId holds a NUL"),
        (FARE, {"writerid": "x" * 2_001}, ValidationError, "option writerId has 2001 bytes; 2000 are allowed"),
        (FARE, {"batchId": "one"}, ValidationError, "option batchId: 'one' is not a whole number"),
        (FARE, {"batchId": "-1"}, ValidationError, "option batchId: -1 is out of range"),
        (FARE, {"batchId": "1"}, ConfigurationError, "option batchId cannot be used here: .* no writerId is given"),
        (FARE, {"claim": "first"}, ValidationError, "option claim: 'first' is not a whole number"),
        (FARE, {"claim": "77"}, ClaimNotFoundError, "claim 77 does not exist"),
        (FARE, {"writer": "me"}, ConfigurationError, "option writer is not known: did you mean writerId"),
        (FARE, {"partition": "2"}, ConfigurationError, "option partition cannot be used here: it is for reads"),
        (FARE, {"aggregates": "*"}, ConfigurationError, "option aggregates cannot be used here: it is for reads"),
        (FARE, {"headers": "{"}, ValidationError, "option headers is not a JSON object"),
        (FARE, {"headers": "[]"}, ValidationError, "option headers is not a JSON object"),
        (FARE, {"headers": '{"a": 1}'}, InvalidPublicationError, "option headers .*'a' must be text"),
        (FARE, {"header.a": "\x00"}, InvalidPublicationError, "option headers .*NUL"),
    ],
)
def test_a_bad_option_or_column_is_named(
    *,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    schema: str,
    options: dict[str, str | None],
    error: type[EventSQLError],
    message: str,
) -> None:
    monkeypatch.delenv("EVENTSQL_DSN", raising=False)
    wanted = {name: value for name, value in ({"dsn": dsn, "topic": "orders"} | options).items() if value is not None}
    with pytest.raises(error, match=message):
        EventSQLDataSource(wanted).writer(schema_of(schema), overwrite=False)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"value": pa.array([b"1", None])}, InvalidPublicationError, "column 'value' is null"),
        ({"topic": pa.array(["orders", None])}, InvalidPublicationError, "column 'topic' is null"),
        (
            {"topic": pa.array(["orders", "nothing"])},
            TopicNotFoundError,
            "column 'topic': topic 'nothing' does not exist",
        ),
        ({"partition": pa.array([3, 4])}, PartitionOutOfRangeError, "column 'partition': partition 4 is out of range"),
        ({"key": pa.array(["a", "b\x00"])}, InvalidPublicationError, "column 'key': a key holds a NUL"),
        (
            {"key": pa.array([b"a", b"\xff"]).view(pa.string())},
            InvalidPublicationError,
            "column 'key': .* not valid UTF-8",
        ),
        ({"topic": pa.array([b"a", b"\xff"]).view(pa.string())}, InvalidPublicationError, "column 'topic': .* UTF-8"),
        ({"key": pa.array(["a", "x" * 70_000])}, InvalidPublicationError, "column 'key': a key has 70000 bytes"),
        (
            {"value": pa.array([b"", bytes(70_000_000)])},
            InvalidPublicationError,
            "column 'value': a value has 70000000 bytes",
        ),
        ({"headers": [{"a": None}, {}]}, InvalidPublicationError, "column 'headers': header 'a' is null"),
        ({"headers": [{"a": "\x00"}, {}]}, InvalidPublicationError, "column 'headers': metadata 'a' holds a NUL"),
        ({"headers": [{"a": "x" * 17_000_000}, {}]}, InvalidPublicationError, "column 'headers': .* 17000001 bytes"),
    ],
)
def test_a_bad_row_names_its_column_and_leaves_nothing(
    platform: EventSQL, source: Source, columns: dict[str, Any], error: type[EventSQLError], message: str
) -> None:
    if isinstance(headers := columns.get("headers"), list):
        text_map = pa.map_(pa.string(), pa.string())
        columns = {"headers": pa.array([list(entries.items()) for entries in headers], text_map)}
    bad = {"value": pa.array([b"1", b"2"]), "topic": pa.array(["orders", "orders"]), **columns}
    with pytest.raises(error, match=message):
        stage(
            [WriteTarget(source, Encoder({"orders": 4}, None, {}))], [events(5, topic="orders"), pa.record_batch(bad)]
        )
    assert staged_in(platform) == 0


def test_only_the_mode_append_is_possible(spark: SparkSession, write: Write) -> None:
    with pytest.raises(PySparkException) as failure:
        write(numbers(spark, 1), topic="orders", mode="overwrite")
    error = eventsql_error(failure.value)
    assert isinstance(error, ConfigurationError)
    assert "mode overwrite is not possible" in error.message
    for mode in ("errorifexists", "ignore"):
        with pytest.raises(PySparkException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
            write(numbers(spark, 1), topic="orders", mode=mode)


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("option", ["batchId", "claim"])
def test_a_stream_s_progress_is_its_checkpoint_s(dsn: str, option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"option {option} cannot be used here"):
        EventSQLDataSource({"dsn": dsn, "topic": "orders", option: "1"}).streamWriter(schema_of(FARE), overwrite=False)


# Streams


FROM_THE_START = {"startingOffsets": "earliest"}


def run(
    spark: SparkSession, dsn: str, checkpoint: Path, reading: Mapping[str, str] = FROM_THE_START, **options: object
) -> None:
    """Copy what is new in `orders` to `fares`, a few events at a time, and end."""
    rows = (
        spark.readStream.format(FORMAT)
        .options(dsn=dsn, subscribe="orders", maxOffsetsPerTrigger="40", **reading)
        .load()
        .selectExpr("key", "value")
    )
    run_to_end(
        rows.writeStream.format(FORMAT)
        .options(dsn=dsn, topic="fares", **{name: str(value) for name, value in options.items()})
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )


def test_a_stream_publishes_each_event_once_also_when_a_batch_is_replayed(
    spark: SparkSession, platform: EventSQL, dsn: str, checkpoint: Path
) -> None:
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(100))
    platform.transfer.run_once()
    run(spark, dsn, checkpoint)
    assert in_numbers(values_in(platform, "fares")) == list(range(100))
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    assert publications_in(platform) == [(query, 0, 40), (query, 1, 40), (query, 2, 20)]
    # As if the driver had died after the publication and before Spark noted it.
    for name in ("2", ".2.crc"):
        (checkpoint / "commits" / name).unlink()
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(100, 110))
    platform.transfer.run_once()
    run(spark, dsn, checkpoint)
    assert in_numbers(values_in(platform, "fares")) == list(range(110))
    assert publications_in(platform)[2:] == [(query, 2, 20), (query, 3, 10)]
    assert staged_in(platform) == 0


@pytest.mark.nightly
def test_a_writer_with_a_name_outlives_its_checkpoint(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(40))
    platform.transfer.run_once()
    for checkpoint in ("first", "second"):
        run(spark, dsn, tmp_path / checkpoint, writerId="copy")
    assert in_numbers(values_in(platform, "fares")) == list(range(40))
    assert publications_in(platform) == [("copy", 0, 40)]


def query_of_tasks(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """Let all tasks be of one streaming query."""
    task_context = Mock()
    task_context.get().getLocalProperty.return_value = query
    monkeypatch.setattr("eventsql_orchestration.spark.writer.TaskContext", task_context)


def writer_of_a_query(options: WriteOptions, monkeypatch: pytest.MonkeyPatch, query: str = "a query") -> StreamWriter:
    """A writer of batches with the column `value`, for tasks of one streaming query."""
    query_of_tasks(monkeypatch, query)
    return StreamWriter(options, StructType([StructField("value", BinaryType())]), overwrite=False)


@pytest.mark.parametrize("same", [True, False], ids=["the same rows", "as many other rows"])
def test_a_batch_of_another_streaming_query_must_have_the_rows_that_were_published(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch, *, same: bool
) -> None:
    """Driven as Spark does: a query's id lives in its checkpoint, so another id means another checkpoint."""
    options = WriteOptions.parse({"dsn": dsn, "topic": "fares", "writerId": "copies"}, streaming=True)

    def commit(query: str, values: list[bytes]) -> None:
        stream = writer_of_a_query(options, monkeypatch, query)
        stream.commit([stream.write(iter([pa.record_batch({"value": [value]})])) for value in values], 0)

    commit("first", [b"1", b"2"])
    commit("first", [b"3", b"4"])
    if same:
        commit("second", [b"2", b"1"])
    else:
        with pytest.raises(ConfigurationError, match="another streaming query"):
            commit("second", [b"3", b"4"])
    assert sorted(values_in(platform, "fares")) == ["1", "2"]
    assert publications_in(platform) == [("copies", 0, 2)]


@pytest.mark.parametrize("options", [{}, {"writerId": "copies"}], ids=["unnamed", "named"])
def test_a_batch_that_its_query_repeats_with_another_number_of_events_is_refused(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    given = WriteOptions.parse({"dsn": dsn, "topic": "fares", **options}, streaming=True)
    stream = writer_of_a_query(given, monkeypatch)

    def commit(*values: bytes) -> None:
        stream.commit([stream.write(iter([pa.record_batch({"value": list(values)})]))], 7)

    commit(b"1", b"2")
    with pytest.raises(ConfigurationError, match="with 2 events, and has 3 now"):
        commit(b"1", b"2", b"3")
    assert sorted(values_in(platform, "fares")) == ["1", "2"]


@pytest.mark.parametrize("options", [{}, {"writerId": "copies"}], ids=["unnamed", "named"])
def test_a_batch_that_its_query_repeats_after_a_later_batch_is_refused(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    """A query repeats its last batch only, maybe with its rows in another order."""
    given = WriteOptions.parse({"dsn": dsn, "topic": "fares", **options}, streaming=True)
    stream = writer_of_a_query(given, monkeypatch)

    def commit(batch: int, *values: bytes) -> None:
        stream.commit([stream.write(iter([pa.record_batch({"value": list(values)})]))], batch)

    commit(7, b"1", b"2")
    commit(8, b"3", b"4")
    if options:
        # A batch write of the same writer is no later batch of the query.
        with Publications(given.source) as publications:
            publications.publish("copies", 9, [])
    commit(8, b"4", b"3")
    with pytest.raises(ConfigurationError):
        commit(7, b"2", b"5")
    if options:
        commit(7, b"1", b"2")
    assert sorted(values_in(platform, "fares")) == ["1", "2", "3", "4"]


def test_a_query_whose_topic_was_changed_goes_on_after_the_batch_that_it_repeats(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(topic: str, batch: int, value: bytes) -> None:
        stream = writer_of_a_query(WriteOptions.parse({"dsn": dsn, "topic": topic}, streaming=True), monkeypatch)
        stream.commit([stream.write(iter([pa.record_batch({"value": [value]})]))], batch)

    commit("fares", 7, b"1")
    commit("plain", 7, b"1")
    commit("plain", 8, b"2")
    assert [values_in(platform, topic) for topic in ("fares", "plain")] == [["1"], ["2"]]


def write_in_task(dsn: str, *values: bytes, **options: str) -> None:
    """Write events as the writer `copies`, to `fares` if no topic is given, as Spark does for a frame of one task."""
    given = WriteOptions.parse({"dsn": dsn, "topic": "fares", "writerId": "copies", **options}, streaming=False)
    writer = BatchWriter(given, StructType([StructField("value", BinaryType())]), overwrite=False)
    writer.commit([writer.write(iter([pa.record_batch({"value": list(values)})]))])


def test_foreach_batch_needs_the_number_of_the_batch(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all batches would be batch 0, and the events of the later ones would be lost."""
    query_of_tasks(monkeypatch, "a query")
    with pytest.raises(ConfigurationError, match="option batchId is missing"):
        write_in_task(dsn, b"1", b"2")
    assert staged_in(platform) == 0, "a task is refused before its work"
    write_in_task(dsn, b"1", b"2", batchId="0")
    assert sorted(values_in(platform, "fares")) == ["1", "2"]


def test_a_task_of_foreach_batch_without_a_number_says_what_is_missing(spark: SparkSession, write: Write) -> None:
    spark.conf.set(IN_A_STREAM, 2)
    try:
        with pytest.raises(PySparkException) as failure:
            write(spark.createDataFrame([("1",)], "value string"), topic="fares", writerId="copy")
    finally:
        spark.conf.unset(IN_A_STREAM)
    assert "batchId" in str(eventsql_error(failure.value))


def test_two_writes_of_foreach_batch_to_different_topics_need_a_writer_each(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query_of_tasks(monkeypatch, "a query")
    write_in_task(dsn, b"1", batchId="0")
    with pytest.raises(ConfigurationError, match="published before to topic fares"):
        write_in_task(dsn, b"2", batchId="0", topic="plain")
    write_in_task(dsn, b"2", batchId="0", topic="plain", writerId="others")
    assert [values_in(platform, topic) for topic in ("fares", "plain")] == [["1"], ["2"]]


def test_a_batch_of_foreach_batch_that_its_query_repeats_after_a_later_batch_is_refused(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was set back may plan other batches, with as many events."""
    query_of_tasks(monkeypatch, "a query")

    def write(batch: int, *values: bytes) -> None:
        write_in_task(dsn, *values, batchId=str(batch))

    write(7, b"1", b"2")
    write(8, b"3", b"4")
    write(8, b"4", b"3")
    write(7, b"1", b"2")
    with pytest.raises(ConfigurationError):
        write(7, b"2", b"5")
    assert sorted(values_in(platform, "fares")) == ["1", "2", "3", "4"]


@pytest.mark.nightly
def test_a_checkpoint_that_was_set_back_is_refused_though_its_batches_have_as_many_events(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    def add(first: int, partition: int) -> None:
        platform.publisher.publish_all(
            Publication("orders", b"%d" % number, partition=partition) for number in range(first, first + 40)
        )
        platform.transfer.run_once()

    for first in (0, 40, 80):
        add(first, 0)
        run(spark, dsn, tmp_path / "checkpoint")
        if not first:
            shutil.copytree(tmp_path / "checkpoint", tmp_path / "backup")
    # A batch has 20 events of each partition now, and 40 of partition 0 were published under its number.
    add(120, 1)
    with pytest.raises(PySparkException) as failure:
        run(spark, dsn, tmp_path / "backup")
    assert isinstance(eventsql_error(failure.value), ConfigurationError)
    run(spark, dsn, tmp_path / "checkpoint")
    assert in_numbers(values_in(platform, "fares")) == list(range(160))


@pytest.mark.nightly
def test_a_consumer_s_stream_without_its_checkpoint_needs_another_writer(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    consuming = {"consumer": "copies"}
    platform.registry.register_consumer(Consumer("orders", "copies"))
    for checkpoint, first in (("first", 0), ("second", 40)):
        platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(first, first + 40))
        platform.transfer.run_once()
        if checkpoint == "first":
            run(spark, dsn, tmp_path / checkpoint, consuming, writerId="copy")
    # It begins where the consumer is: batch 0 has other events, as many as before.
    with pytest.raises(PySparkException) as failure:
        run(spark, dsn, tmp_path / "second", consuming, writerId="copy")
    error = eventsql_error(failure.value)
    assert isinstance(error, ConfigurationError)
    assert "another streaming query" in error.message
    assert staged_in(platform) == 0
    run(spark, dsn, tmp_path / "third", consuming, writerId="another")
    assert in_numbers(values_in(platform, "fares")) == list(range(80))


@pytest.mark.nightly
def test_a_checkpoint_that_plans_other_batches_is_refused_instead_of_losing_events(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(30))
    platform.transfer.run_once()
    run(spark, dsn, tmp_path / "first", writerId="copy")
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(30, 35))
    platform.transfer.run_once()
    # Without its checkpoint the stream's batch 0 has the new events too, and they were published by nobody.
    with pytest.raises(PySparkException) as failure:
        run(spark, dsn, tmp_path / "second", writerId="copy")
    error = eventsql_error(failure.value)
    assert isinstance(error, ConfigurationError)
    assert "was published before with 30 events, and has 35 now" in error.message
    assert publications_in(platform) == [("copy", 0, 30)]
    assert staged_in(platform) == 0
    run(spark, dsn, tmp_path / "first", writerId="copy")
    assert in_numbers(values_in(platform, "fares")) == list(range(35))


def test_a_batch_of_a_stream_that_spark_does_not_name_is_compared_by_its_rows(
    spark: SparkSession, platform: EventSQL, write: Write
) -> None:
    def copy(*values: str) -> None:
        rows = spark.createDataFrame([(value,) for value in values], "value string")
        write(rows, topic="fares", writerId="copy", batchId=0)

    spark.conf.set(IN_A_STREAM, 2)
    try:
        copy("1", "2")
        copy("1", "2")
        with pytest.raises(PySparkException) as failure:
            copy("3", "4")
    finally:
        spark.conf.unset(IN_A_STREAM)
    assert isinstance(eventsql_error(failure.value), ConfigurationError)
    # A batch write outside of streams is repeated by its number alone.
    copy("3", "4")
    assert publications_in(platform) == [("copy", 0, 2)]
    assert in_numbers(values_in(platform, "fares")) == [1, 2]


@pytest.mark.nightly
def test_a_batch_of_foreach_batch_that_has_other_events_is_refused_instead_of_losing_them(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path, write: Write
) -> None:
    def publish(frame: DataFrame, batch: int) -> None:
        write(frame.select("value"), topic="fares", writerId="copy", batchId=batch)

    def copy(checkpoint: str) -> None:
        stream = spark.readStream.format("eventsql").options(dsn=dsn, subscribe="orders", startingOffsets="earliest")
        writer = (
            stream.load().writeStream.foreachBatch(publish).option("checkpointLocation", str(tmp_path / checkpoint))
        )
        run_to_end(writer.trigger(availableNow=True))

    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(30))
    platform.transfer.run_once()
    copy("first")
    assert in_numbers(values_in(platform, "fares")) == list(range(30))
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(30, 35))
    platform.transfer.run_once()
    with pytest.raises(PySparkException) as failure:
        copy("second")
    assert "ConfigurationError" in str(failure.value)
    assert publications_in(platform) == [("copy", 0, 30)]
    copy("first")
    assert in_numbers(values_in(platform, "fares")) == list(range(35))
