"""Each event once, whatever dies: drivers that are killed at every step of a commit, servers that go away.

A commit is stopped by a lock of the test's on the table that its next step writes to, and not by code in the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.spark import FORMAT, eventsql_error
from tests.spark.processes import Driver, driver, wait_until

EVENTS = 500

WRITER = {"writerId": "nightly", "batchId": "7"}


class Locks:
    """Connections that hold tables, and see who waits for them."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._held: dict[str, psycopg.Connection] = {}

    def hold(self, table: str, mode: str = "SHARE") -> None:
        """Let nobody write to a table."""
        connection = self._held[table] = psycopg.connect(self._dsn)
        name = sql.Identifier("eventsql", table)
        connection.execute(sql.SQL("LOCK TABLE {} IN {} MODE").format(name, sql.SQL(mode)))

    def hold_next(self, table: str) -> threading.Thread:
        """Ask for a table behind those who wait for it; the thread ends when it is held, by name `next`."""
        waiting = psycopg.connect(self._dsn)
        self._held["next"] = waiting
        statement = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier("eventsql", table))
        thread = threading.Thread(target=lambda: waiting.execute(statement))
        thread.start()
        self.await_waiting(2)
        return thread

    def release(self, table: str) -> None:
        connection = self._held.pop(table)
        connection.rollback()
        connection.close()

    def await_waiting(self, count: int = 1) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:

            def waiting() -> bool:
                row = connection.execute(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
                ).fetchone()
                return row is not None and row[0] >= count

            wait_until(waiting, f"{count} wait for a lock")

    def terminate_waiting(self) -> None:
        """End the session that waits, as a server that goes away does."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )

    def close(self) -> None:
        for table in list(self._held):
            self.release(table)


@contextmanager
def locks(dsn: str) -> Iterator[Locks]:
    held = Locks(dsn)
    try:
        yield held
    finally:
        held.close()


def at_record(locks: Locks, start: Callable[[], None]) -> None:
    """Before the commit's first step: the publication is recorded."""
    locks.hold("spark_publication")
    start()
    locks.await_waiting()


def at_copy(locks: Locks, start: Callable[[], None]) -> None:
    """After the record, before the events."""
    locks.hold("event_buffer")
    start()
    locks.await_waiting()


def at_delete(locks: Locks, start: Callable[[], None]) -> None:
    """After the events, before the blocks are deleted and all of it is committed."""
    at_copy(locks, start)
    locks.hold("spark_staged_event")
    locks.release("event_buffer")
    locks.await_waiting()


def after_commit(locks: Locks, start: Callable[[], None]) -> None:
    """After the commit, before Spark hears of it: at the sweep."""
    at_delete(locks, start)
    thread = locks.hold_next("spark_staged_event")
    locks.release("spark_staged_event")
    thread.join()
    locks.await_waiting()


Stop = Callable[[Locks, Callable[[], None]], None]


@pytest.fixture(autouse=True)
def topics(platform: EventSQL) -> None:
    for topic in (Topic("orders", partitions=4), Topic("fares", partitions=3)):
        platform.registry.register_topic(topic)


def values_in(platform: EventSQL, topic: str) -> list[int]:
    platform.transfer.run_once()
    return sorted(int(event.value) for event in platform.reader.read(topic))


def counted(platform: EventSQL, table: str) -> int:
    with platform.database.connection() as connection:
        row = connection.execute(
            sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("eventsql", table))
        ).fetchone()
    assert row is not None
    return int(row[0])


def write(spark: SparkSession, dsn: str) -> None:
    # Which makes the session this thread's own: in a thread without one, Spark finds no data source of Python's.
    rows = spark.createDataFrame([(str(number),) for number in range(EVENTS)], "value string")
    rows.write.format(FORMAT).options(dsn=dsn, topic="orders", **WRITER).mode("append").save()


@pytest.mark.parametrize(
    ("stop", "kill", "published"),
    [
        # The last moment at which nothing is committed. Earlier ones: where servers go away, below.
        (at_delete, Driver.kill, 0),
        # Its Python lives on, and may come to the end of the commit.
        (at_delete, Driver.kill_without_workers, None),
        (after_commit, Driver.kill, EVENTS),
    ],
    ids=["at-delete", "at-delete-workers-live-on", "after-commit"],
)
def test_a_batch_whose_driver_is_killed_in_the_commit_is_published_once_by_the_next(
    *,
    spark: SparkSession,
    platform: EventSQL,
    dsn: str,
    tmp_path: Path,
    stop: Stop,
    kill: Callable[[Driver], None],
    published: int | None,
) -> None:
    with driver(tmp_path, {"spark.master": "local[1]"}) as first, locks(dsn) as held:
        stop(held, lambda: first.start("batch", dsn=dsn, topic="orders", events=EVENTS, options=WRITER))
        assert stop is after_commit or counted(platform, "spark_staged_event") > 0
        kill(first)
    if published is not None:
        assert len(values_in(platform, "orders")) == published
    write(spark, dsn)
    assert values_in(platform, "orders") == list(range(EVENTS))
    assert counted(platform, "spark_publication") == 1


@pytest.mark.parametrize("stop", [at_copy, after_commit])
def test_a_stream_whose_driver_is_killed_in_the_commit_replays_the_batch_and_publishes_it_once(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path, stop: Stop
) -> None:
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(EVENTS))
    platform.transfer.run_once()
    checkpoint = str(tmp_path / "checkpoint")
    with driver(tmp_path, {"spark.master": "local[1]"}) as first, locks(dsn) as held:
        stop(
            held,
            lambda: first.start("stream", dsn=dsn, source="orders", topic="fares", checkpoint=checkpoint, options={}),
        )
        first.kill()
    assert len(values_in(platform, "fares")) == (EVENTS if stop is after_commit else 0)
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(EVENTS, EVENTS + 10))
    platform.transfer.run_once()
    rows = spark.readStream.format(FORMAT).options(dsn=dsn, subscribe="orders", startingOffsets="earliest").load()
    query = (
        rows.selectExpr("key", "value")
        .writeStream.format(FORMAT)
        .options(dsn=dsn, topic="fares", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(200)
    finally:
        query.stop()
    assert values_in(platform, "fares") == list(range(EVENTS + 10))
    assert counted(platform, "spark_publication") == 2


def writer_of(spark: SparkSession, dsn: str) -> tuple[threading.Thread, list[Exception]]:
    """A thread that writes, and what it fails of."""
    failures: list[Exception] = []

    def attempt() -> None:
        try:
            write(spark, dsn)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    return threading.Thread(target=attempt), failures


@pytest.mark.parametrize("stop", [at_record, at_copy, at_delete])
def test_a_server_that_goes_away_in_the_commit_publishes_nothing_and_is_named(
    spark: SparkSession, platform: EventSQL, dsn: str, stop: Stop
) -> None:
    writing, failures = writer_of(spark, dsn)
    with locks(dsn) as held:
        stop(held, writing.start)
        held.terminate_waiting()
    # Spark aborts the write, which may have to wait for the same tables.
    writing.join()
    (failure,) = failures
    error = eventsql_error(failure)
    assert isinstance(error, DatabaseUnavailableError), failure
    assert values_in(platform, "orders") == []
    assert counted(platform, "spark_publication") == 0
    write(spark, dsn)
    assert values_in(platform, "orders") == list(range(EVENTS))


def test_a_server_that_goes_away_while_events_are_staged_is_named_and_publishes_nothing(
    spark: SparkSession, platform: EventSQL, dsn: str
) -> None:
    writing, failures = writer_of(spark, dsn)
    with locks(dsn) as held:
        held.hold("spark_staged_event")
        writing.start()
        held.await_waiting()
        # Each of the tasks' attempts finds it gone.
        while writing.is_alive():
            held.terminate_waiting()
            writing.join(0.1)
    (failure,) = failures
    assert isinstance(eventsql_error(failure), DatabaseUnavailableError), failure
    assert values_in(platform, "orders") == []
    assert counted(platform, "spark_staged_event") == 0
