"""Each event once, whatever dies: processes that are killed at every step of a commit, servers that go away.

A commit is stopped by a lock of the test's on the table that its next step writes to, and not by code in the way.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.publishing.staged_blocks import LEAST_BY_BLOCKS
from eventsql_orchestration.spark import FORMAT, eventsql_error
from tests.spark import committer
from tests.spark.committer import WRITER
from tests.spark.processes import driver, register_topics, values_in
from tests.waiting import wait_until

EVENTS = LEAST_BY_BLOCKS

FEW = 500
"""Events that are copied into the buffer one by one."""

WAITING = "FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE datname = current_database() AND NOT granted"
"""The sessions that wait for a lock. A session that has just got its lock is not among them, though it still sleeps."""


class Locks:
    """Connections that hold tables, and see the processes that wait for them."""

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
                row = connection.execute(f"SELECT count(*) {WAITING}").fetchone()
                return row is not None and row[0] >= count

            wait_until(waiting, f"{count} wait for a lock")

    def terminate_waiting(self) -> None:
        """End the session that waits, as a server that goes away does."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(f"SELECT pg_terminate_backend(pid) {WAITING}")

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


def at_events(locks: Locks, start: Callable[[], None]) -> None:
    """After the record, before the events."""
    locks.hold("event_buffer")
    start()
    locks.await_waiting()


def at_check(locks: Locks, start: Callable[[], None]) -> None:
    """After the events: the last moment at which nothing is committed."""
    at_events(locks, start)
    locks.hold("topic", "ACCESS EXCLUSIVE")
    locks.release("event_buffer")
    locks.await_waiting()


def after_commit(locks: Locks, start: Callable[[], None]) -> None:
    """After the commit, before the writer hears of it: at the sweep."""
    at_check(locks, start)
    thread = locks.hold_next("spark_staged_event")
    locks.release("topic")
    thread.join()
    locks.await_waiting()


Stop = Callable[[Locks, Callable[[], None]], None]


pytestmark = pytest.mark.prepared.with_args(register_topics)


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
    ("stop", "events", "published"),
    [
        pytest.param(at_record, EVENTS, 0, id="at-record", marks=pytest.mark.nightly),
        pytest.param(at_events, EVENTS, 0, id="at-events", marks=pytest.mark.nightly),
        pytest.param(at_check, EVENTS, 0, id="at-check"),
        pytest.param(at_check, FEW, 0, id="at-check-few", marks=pytest.mark.nightly),
        pytest.param(after_commit, EVENTS, EVENTS, id="after-commit"),
    ],
)
def test_a_publication_whose_process_is_killed_is_made_once_by_the_next(
    platform: EventSQL, dsn: str, stop: Stop, events: int, published: int
) -> None:
    with (
        subprocess.Popen([sys.executable, "-m", committer.__name__], stdin=subprocess.PIPE, text=True) as process,
        locks(dsn) as held,
    ):

        def start() -> None:
            assert process.stdin is not None
            process.stdin.write(f"{dsn}\n{events}\n")
            process.stdin.flush()

        try:
            stop(held, start)
            assert stop is after_commit or counted(platform, "spark_staged_event") > 0
        finally:
            process.kill()
    assert len(values_in(platform, "orders")) == published
    assert committer.publish(dsn, events) is (published == 0)
    assert values_in(platform, "orders") == list(range(events))
    assert counted(platform, "spark_publication") == 1


@pytest.mark.nightly
def test_a_batch_whose_driver_is_killed_while_its_python_lives_on_is_published_once(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    with driver(tmp_path, {"spark.master": "local[1]"}) as first, locks(dsn) as held:
        at_check(held, lambda: first.start("batch", dsn=dsn, topic="orders", events=EVENTS, options=WRITER))
        # Its Python may come to the end of the commit.
        first.kill_without_workers()
    write(spark, dsn)
    assert values_in(platform, "orders") == list(range(EVENTS))
    assert counted(platform, "spark_publication") == 1


@pytest.mark.nightly
def test_a_stream_that_ends_before_or_after_its_commit_replays_the_batch_and_publishes_it_once(
    spark: SparkSession, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(EVENTS))
    platform.transfer.run_once()
    checkpoint = str(tmp_path / "checkpoint")
    queries: list[StreamingQuery] = []

    def start() -> None:
        rows = spark.readStream.format(FORMAT).options(dsn=dsn, subscribe="orders", startingOffsets="earliest").load()
        query = (
            rows.selectExpr("key", "value")
            .writeStream.format(FORMAT)
            .options(dsn=dsn, topic="fares", checkpointLocation=checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        queries.append(query)

    with locks(dsn) as held:
        at_events(held, start)
        held.terminate_waiting()
    with pytest.raises(StreamingQueryException):
        queries.pop().awaitTermination(200)
    assert values_in(platform, "fares") == []
    with driver(tmp_path, {"spark.master": "local[1]"}) as killed, locks(dsn) as held:
        stream = {"dsn": dsn, "source": "orders", "topic": "fares", "checkpoint": checkpoint, "options": {}}
        after_commit(held, lambda: killed.start("stream", **stream))
        killed.kill()
    assert len(values_in(platform, "fares")) == EVENTS
    platform.publisher.publish_all(Publication("orders", b"%d" % number) for number in range(EVENTS, EVENTS + 10))
    platform.transfer.run_once()
    start()
    try:
        assert queries[0].awaitTermination(200)
    finally:
        queries[0].stop()
    assert values_in(platform, "fares") == list(range(EVENTS + 10))
    assert counted(platform, "spark_publication") == 2


def attempt_of(write: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    """A thread that writes, and its error."""
    failures: list[Exception] = []

    def attempt() -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    return threading.Thread(target=attempt), failures


@pytest.mark.parametrize("stop", [at_record, at_events, at_check])
def test_a_server_that_goes_away_in_the_commit_publishes_nothing(platform: EventSQL, dsn: str, stop: Stop) -> None:
    writing, failures = attempt_of(lambda: committer.publish(dsn, EVENTS))
    with locks(dsn) as held:
        stop(held, writing.start)
        held.terminate_waiting()
    writing.join()
    (failure,) = failures
    assert isinstance(failure, DatabaseUnavailableError), failure
    assert values_in(platform, "orders") == []
    assert counted(platform, "spark_publication") == counted(platform, "spark_staged_event") == 0
    assert committer.publish(dsn, EVENTS)
    assert values_in(platform, "orders") == list(range(EVENTS))


def test_a_server_that_goes_away_in_the_commit_is_named_by_spark(
    spark: SparkSession, platform: EventSQL, dsn: str
) -> None:
    writing, failures = attempt_of(lambda: write(spark, dsn))
    with locks(dsn) as held:
        at_check(held, writing.start)
        held.terminate_waiting()
    # Spark aborts the write, which may have to wait for the same tables.
    writing.join()
    (failure,) = failures
    assert isinstance(eventsql_error(failure), DatabaseUnavailableError), failure
    assert values_in(platform, "orders") == []
    write(spark, dsn)
    assert values_in(platform, "orders") == list(range(EVENTS))


@pytest.mark.nightly
def test_a_server_that_goes_away_while_events_are_staged_is_named_and_publishes_nothing(
    spark: SparkSession, platform: EventSQL, dsn: str
) -> None:
    writing, failures = attempt_of(lambda: write(spark, dsn))
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
    # A task that waited still when the query failed may have staged its block, which belongs to nobody then.
    assert values_in(platform, "orders") == []
