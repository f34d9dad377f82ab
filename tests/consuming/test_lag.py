"""Lag is the number of events not consumed, the seconds since the oldest of them was published, and the cause."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Event, EventFilter, EventSQL, Publication, Topic
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.lag import ConsumerLag, LagCause, cause_of
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import TopicNotFoundError
from eventsql_orchestration.model import Storage
from eventsql_orchestration.storage import metrics as storage_metrics
from eventsql_orchestration.storage.compacting import LogCompactor
from tests.forms import stored

if TYPE_CHECKING:
    from tests.fixtures import SaidBy


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("payments"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True), max_attempts=2)
    platform.registry.register_consumer(Consumer("orders", "auditor"))


pytestmark = pytest.mark.prepared.with_args(prepare)


def publish(platform: EventSQL, *counts: int) -> None:
    """Publish so many events in each partition."""
    platform.publisher.publish_all(
        Publication("orders", b"", partition=partition) for partition, count in enumerate(counts) for _ in range(count)
    )


def age(platform: EventSQL, table: str, column: str, seconds: int) -> None:
    with platform.database.connection() as connection:
        connection.execute(
            f"UPDATE eventsql.{table} SET {column} = now() - make_interval(secs => %s)".encode(), (seconds,)
        )


def lag_of(platform: EventSQL, consumer: str, partition: int = NOT_PARTITIONED) -> ConsumerLag:
    (lag,) = [lag for lag in platform.lag("orders") if (lag.consumer, lag.partition) == (consumer, partition)]
    return lag


def nothing(_events: Sequence[Event], _connection: Connection) -> None:
    pass


@pytest.mark.parametrize("storage", ["blocks", "rows"])
@pytest.mark.parametrize(("time", "years"), [("infinity", 0), ("-infinity", 2_000)])
def test_a_program_may_publish_an_event_with_an_infinite_time(
    platform: EventSQL, storage: Storage, time: str, years: int
) -> None:
    platform.registry.register_topic(Topic("odd", storage=storage)).register_consumer(Consumer("odd", "mailer"))
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_created_at) "
            "VALUES ('odd', -1, '', '{}', %s::timestamptz)",
            [time],
        )
    for moved in (False, True):
        if moved:
            platform.transfer.run_once()
        (lag,) = platform.lag("odd")
        assert lag.buffered == (not moved)
        assert lag.events == 1
        assert years <= round(lag.seconds / timedelta(days=366).total_seconds()) < years + 30


def test_every_consumer_partition_is_listed_in_order(platform: EventSQL) -> None:
    platform.registry.register_consumer(Consumer("payments", "a"))
    assert [(lag.topic, lag.consumer, lag.partition) for lag in platform.lag()] == [
        ("orders", "auditor", NOT_PARTITIONED),
        ("orders", "mailer", 0),
        ("orders", "mailer", 1),
        ("orders", "mailer", 2),
        ("payments", "a", NOT_PARTITIONED),
    ]
    assert [lag.consumer for lag in platform.lag("payments")] == ["a"]
    with pytest.raises(TopicNotFoundError):
        platform.lag("nowhere")


def test_without_events_there_is_no_lag(platform: EventSQL) -> None:
    assert lag_of(platform, "auditor") == ConsumerLag(
        "orders", "auditor", NOT_PARTITIONED, 0, 0.0, 0, 0, 0, LagCause.NONE, ""
    )


def test_events_are_counted_per_partition_not_by_their_ids(platform: EventSQL) -> None:
    publish(platform, 5, 2, 0)
    platform.transfer.run_once()
    assert [lag_of(platform, "mailer", partition).events for partition in range(3)] == [5, 2, 0]
    assert lag_of(platform, "auditor").events == 7
    platform.consumers.consume_once("orders", "mailer", nothing, partition=0, max_events=3)
    lag = lag_of(platform, "mailer", 0)
    assert (lag.events, lag.last_event_id, lag.end) == (2, 3, 5)
    assert lag_of(platform, "mailer", 1).end == 7


def test_events_in_the_buffer_count_and_are_told_apart(platform: EventSQL) -> None:
    publish(platform, 2, 0, 0)
    platform.transfer.run_once()
    publish(platform, 3, 1, 0)
    assert (lag_of(platform, "mailer", 0).events, lag_of(platform, "mailer", 0).buffered) == (5, 3)
    assert (lag_of(platform, "mailer", 1).events, lag_of(platform, "mailer", 1).buffered) == (1, 1)
    assert (lag_of(platform, "auditor").events, lag_of(platform, "auditor").buffered) == (6, 4)


def test_seconds_are_those_of_the_oldest_event_wherever_it_lies(platform: EventSQL) -> None:
    publish(platform, 1, 1, 0)
    platform.transfer.run_once()
    age(platform, stored("orders"), "eql_buffered_at", 100)
    assert lag_of(platform, "mailer", 0).seconds == pytest.approx(100, abs=30)
    assert lag_of(platform, "mailer", 2).seconds == 0.0
    platform.consumers.consume_once("orders", "mailer", nothing, partition=0)
    assert lag_of(platform, "mailer", 0).seconds == 0.0
    publish(platform, 1, 1, 0)
    age(platform, "event_buffer", "eql_created_at", 500)
    # An event whose transaction committed late may be older than all that was moved.
    assert lag_of(platform, "mailer", 0).seconds == pytest.approx(500, abs=30)
    assert lag_of(platform, "mailer", 1).seconds == pytest.approx(500, abs=30)


def test_the_cause_is_the_transfer_when_all_that_waits_lies_in_the_buffer(platform: EventSQL) -> None:
    publish(platform, 1, 0, 0)
    assert lag_of(platform, "mailer", 0).cause == LagCause.TRANSFER
    assert "eventsql transfer" in lag_of(platform, "mailer", 0).detail
    platform.transfer.run_once()
    assert lag_of(platform, "mailer", 0).cause == LagCause.WAITING


def test_the_cause_is_a_pause(platform: EventSQL) -> None:
    publish(platform, 1, 0, 0)
    platform.registry.pause("orders", "mailer")
    assert lag_of(platform, "mailer", 0).cause == LagCause.PAUSED
    assert lag_of(platform, "mailer", 1).cause == LagCause.NONE
    assert lag_of(platform, "auditor").cause == LagCause.TRANSFER


def test_the_cause_is_an_event_that_is_retried_and_then_blocks(platform: EventSQL) -> None:
    publish(platform, 1, 0, 0)
    platform.transfer.run_once()

    def fail(events: Sequence[Event], connection: Connection) -> None:
        raise ValueError("no such customer")

    for cause in (LagCause.RETRYING, LagCause.BLOCKED):
        platform.consumers.consume_once("orders", "mailer", fail, partition=0)
        lag = lag_of(platform, "mailer", 0)
        assert lag.cause == cause
        assert "event 1 failed" in lag.detail
        assert "no such customer" in lag.detail
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now()")


def test_a_range_that_is_tried_after_its_last_attempt_counts_all_of_them(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders_dlt"))
    publish(platform, 1, 0, 0)
    platform.transfer.run_once()
    told = []
    for _ in range(3):
        claim = platform.claims.claim("orders", "mailer", 0, owner="run 7", max_wait=0.0)
        assert isinstance(claim, Claim)
        platform.claims.fail(claim, ValueError("no such customer"))
        told.append(lag_of(platform, "mailer", 0).detail.partition(": ")[0])
        with platform.database.connection() as connection:
            connection.execute("UPDATE eventsql.consumer SET eql_retry_at = now()")
    assert told == ["event 1 failed 1 of 2 times", "event 1 failed 2 of 2 times", "event 1 failed 3 times"]


def test_the_cause_is_a_lease_and_names_its_owner_until_it_expires(platform: EventSQL) -> None:
    publish(platform, 1, 0, 0)
    platform.transfer.run_once()
    assert isinstance(platform.claims.claim("orders", "mailer", 0, owner="run 7"), Claim)
    assert (lag_of(platform, "mailer", 0).cause, lag_of(platform, "mailer", 0).detail) == (LagCause.LEASED, "by run 7")
    age(platform, "consumer", "eql_lease_expires_at", 10)
    assert lag_of(platform, "mailer", 0).cause == LagCause.WAITING


def test_a_lease_ends_by_the_databases_clock(platform: EventSQL) -> None:
    publish(platform, 1, 0, 0)
    platform.transfer.run_once()
    assert isinstance(platform.claims.claim("orders", "mailer", 0, owner="run 7"), Claim)
    age(platform, "consumer", "eql_lease_expires_at", 3_600)
    ended = platform.registry.consumer("orders", "mailer")[0]
    held = replace(ended, read_at=ended.read_at - timedelta(hours=2))
    assert [cause_of(each, 1, 0)[0] for each in (held, ended)] == [LagCause.LEASED, LagCause.WAITING]


def test_the_number_of_statements_is_the_same_for_one_partition_and_for_many(
    platform: EventSQL, said_by: SaidBy
) -> None:
    counted = []
    for topic, partitions in (("one", 1), ("many", 50)):
        platform.registry.register_topic(Topic(topic, partitions))
        platform.registry.register_consumer(Consumer(topic, "mailer", partitioned=True))
        platform.registry.register_consumer(Consumer(topic, "auditor"))
        for moved in (True, False):
            platform.publisher.publish_all(Publication(topic, b"", partition=each) for each in range(partitions))
            if moved:
                platform.transfer.run_once()
        platform.lag(topic)
        said = said_by(platform.database)
        assert [lag.events for lag in platform.lag(topic)] == [2 * partitions] + [2] * partitions
        counted.append(len([each for each in said.statements() if each != ";"]))
    assert counted[0] == counted[1]


def test_events_are_counted_only_if_a_consumer_has_events_left(platform: EventSQL, said_by: SaidBy) -> None:
    counted = []
    for events in (0, 1):
        publish(platform, events, 0, 0)
        platform.transfer.run_once()
        platform.lag("orders")
        said = said_by(platform.database)
        platform.lag("orders")
        counted.append(len([each for each in said.statements() if each != ";"]))
    assert counted[1] == counted[0] + 1


def mixed(platform: EventSQL, rng: random.Random) -> None:
    """Logs in rows, in blocks with gaps and in both forms, of topics with consumers of all kinds somewhere in them."""
    registry = platform.registry

    def publish(topic: str, partitions: int, rounds: int) -> None:
        for _ in range(rounds):
            platform.publisher.publish_all(
                Publication(topic, b"", partition=rng.randrange(partitions)) for _ in range(rng.randrange(1, 4))
            )
            platform.transfer.run_once()

    logs: tuple[tuple[str, Storage, str], ...] = (
        ("rows", "rows", "rows_event"), ("blocks", "blocks", "blocks_block"), ("changed", "blocks", "changed_block"),
    )  # fmt: skip
    for topic, storage, table in logs:
        registry.register_topic(Topic(topic, 3, storage=storage))
        for name in ("mailer", "paused", "mailer__backfill_b1_0_10"):
            registry.register_consumer(Consumer(topic, name, partitioned=True))
        registry.register_consumer(Consumer(topic, "picky", partitioned=True), filter=EventFilter(keys=frozenset("a")))
        registry.register_consumer(Consumer(topic, "auditor"))
        registry.register_consumer(Consumer(topic, "follower"))
        registry.pause(topic, "paused")
        publish(topic, 3, 15)
        with platform.database.connection() as connection:
            connection.execute(
                f"UPDATE eventsql.{table} SET eql_buffered_at = now() - make_interval(days => 30, hours => "
                "-eql_id::int)".encode()
            )
    with platform.database.transaction() as connection:
        LogCompactor("eventsql", "blocks").merge(connection, after=2, upto=24, partitions=[0, 2])
        gaps = connection.execute("SELECT count(*) FROM eventsql.blocks_block WHERE eql_span IS NOT NULL").fetchone()
    assert gaps == (2,)
    registry.set_storage("changed", "rows")
    for topic in ("rows", "blocks", "changed"):
        platform.repartitioner.repartition(topic, 5)
        publish(topic, 5, 5)
    with platform.database.connection() as connection:
        places = connection.execute("SELECT ctid, eql_topic FROM eventsql.consumer").fetchall()
        for place, topic in places:
            offset = rng.randrange(platform.reader.end(topic) + 2)
            connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s WHERE ctid = %s", (offset, place))
    for topic in ("rows", "blocks"):
        platform.publisher.publish_all(Publication(topic, b"", partition=each) for each in (0, 0, 3))
    age(platform, "event_buffer", "eql_created_at", 3 * 86_400)


def read_one_by_one(platform: EventSQL, state: ConsumerState) -> tuple[int, float, int, int]:
    """Events, seconds, end and buffered events of a consumer partition, each by a statement for the partition alone."""
    whole = state.partition == NOT_PARTITIONED
    reader, topic, partition = platform.reader, state.topic, None if whole else state.partition
    with platform.database.connection() as connection:
        rows = connection.execute(Queries("log", "eventsql")("buffered"), {"topics": [topic]}).fetchall()
    own = [(count, seconds) for _, number, count, seconds in rows if whole or number == partition]
    buffered = sum(count for count, _ in own)
    waits = [seconds for _, seconds in own]
    waits.append(reader.seconds_behind(topic, after=state.last_event_id, partition=partition))
    events = reader.count(topic, after=state.last_event_id, partition=partition) + buffered
    return events, max(waits), reader.end(topic, partition), buffered


@pytest.mark.parametrize("counted", [storage_metrics.COUNTED, 3], ids=["at once", "long backlogs on their own"])
def test_all_partitions_together_have_the_lag_that_each_has_alone(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    mixed(platform, random.Random(7))
    monkeypatch.setattr(storage_metrics, "COUNTED", counted)
    states, lags = platform.registry.consumers(), platform.lag()
    assert {lag.cause for lag in lags} >= {LagCause.NONE, LagCause.PAUSED, LagCause.WAITING, LagCause.HELD_BACK}
    for state, lag in zip(states, lags, strict=True):
        events, seconds, end, buffered = read_one_by_one(platform, state)
        assert (lag.topic, lag.consumer, lag.partition) == (state.topic, state.name, state.partition)
        assert (lag.events, lag.end, lag.buffered) == (events, end, buffered), lag
        assert lag.last_event_id == state.last_event_id
        assert lag.seconds == pytest.approx(seconds, abs=1_200), lag
        if lag.cause is not LagCause.HELD_BACK:
            assert (lag.cause, lag.detail) == cause_of(state, events - buffered, buffered)
