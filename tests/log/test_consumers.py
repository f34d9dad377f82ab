"""Consumers hand events over in order, in batches as asked for, each partition to one consumption at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    PartitionOutOfRangeError,
    TopicNotFoundError,
    ValidationError,
)

if TYPE_CHECKING:
    from tests.log.conftest import Said, Sessions, Spawn, Until


@pytest.fixture(autouse=True)
def _topics_and_consumers(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("payments"))
    platform.registry.register_consumer(Consumer("orders", "mailer", partitioned=True))
    platform.registry.register_consumer(Consumer("orders", "auditor"))
    platform.registry.register_consumer(Consumer("payments", "mailer"))


@pytest.fixture
def effects(platform: EventSQL) -> Callable[[str], list[int]]:
    """The ids of the events whose effects a consumer committed, in the order in which it did."""
    with platform.database.connection() as connection:
        connection.execute(
            "CREATE TABLE effects (id bigserial PRIMARY KEY, consumer text, partition int, key text, event_id bigint, "
            "value bytea)"
        )

    def committed(consumer: str) -> list[int]:
        with platform.database.connection() as connection:
            rows = connection.execute("SELECT event_id FROM effects WHERE consumer = %s ORDER BY id", (consumer,))
            return [event_id for (event_id,) in rows]

    return committed


def fill(platform: EventSQL, count: int, topic: str = "orders") -> list[int]:
    """Publish and transfer events; gives their offsets."""
    before = platform.reader.end(topic)
    partitioned = topic == "orders"
    platform.publisher.publish_all(
        Publication(topic, b"%d" % number, partition=number % 3 if partitioned else None) for number in range(count)
    )
    platform.transfer.run_once()
    return [event.id for event in platform.reader.read(topic, after=before)]


class Seen:
    """A handler that keeps what it is handed."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []
        self._lock = threading.Lock()

    def __call__(self, events: Sequence[Event], connection: Connection) -> None:
        with self._lock:
            self.batches.append(list(events))

    def one(self, event: Event, connection: Connection) -> None:
        self([event], connection)

    @property
    def ids(self) -> list[int]:
        return [event.id for batch in self.batches for event in batch]


def offsets(platform: EventSQL, topic: str = "orders", consumer: str = "mailer") -> list[int]:
    return [state.last_event_id for state in platform.registry.consumer(topic, consumer)]


# One pass


def test_a_pass_hands_over_what_is_there_and_commits_its_offset(platform: EventSQL) -> None:
    ids = fill(platform, 5, "payments")
    seen = Seen()
    assert platform.consumers.consume_once("payments", "mailer", seen) == 5
    assert [event.value for event in seen.batches[0]] == [b"0", b"1", b"2", b"3", b"4"]
    assert offsets(platform, "payments") == [ids[-1]]
    assert platform.consumers.consume_once("payments", "mailer", seen) == 0


def test_a_pass_over_a_partitioned_consumer_takes_its_partitions_in_turn(platform: EventSQL) -> None:
    fill(platform, 9)
    seen = Seen()
    assert platform.consumers.consume_once("orders", "mailer", seen) == 9
    assert [sorted({event.partition for event in batch}) for batch in seen.batches] == [[0], [1], [2]]
    assert [batch == sorted(batch, key=lambda event: event.id) for batch in seen.batches] == [True] * 3


def test_a_pass_may_be_over_one_partition(platform: EventSQL) -> None:
    fill(platform, 9)
    seen = Seen()
    assert platform.consumers.consume_once("orders", "mailer", seen, partition=1) == 3
    assert {event.partition for event in seen.batches[0]} == {1}


def test_a_consumer_that_is_not_partitioned_reads_the_whole_topic_in_its_order(platform: EventSQL) -> None:
    ids = fill(platform, 9)
    seen = Seen()
    platform.consumers.consume_once("orders", "auditor", seen)
    assert seen.ids == ids


def test_consumers_of_one_topic_do_not_know_of_each_other(platform: EventSQL) -> None:
    fill(platform, 3)
    assert platform.consumers.consume_once("orders", "auditor", Seen()) == 3
    assert platform.consumers.consume_once("orders", "mailer", Seen()) == 3


def test_a_batch_has_no_more_events_than_asked_for(platform: EventSQL) -> None:
    fill(platform, 7, "payments")
    seen = Seen()
    while platform.consumers.consume_once("payments", "mailer", seen, max_events=3):
        pass
    assert [len(batch) for batch in seen.batches] == [3, 3, 1]


def test_the_state_of_a_consumer_says_what_it_has_consumed(platform: EventSQL) -> None:
    ids = fill(platform, 4, "payments")
    before = platform.registry.consumer("payments", "mailer")[0]
    assert (before.consumed_events, before.last_consumption_at) == (0, None)
    platform.consumers.consume_once("payments", "mailer", Seen(), max_events=3)
    platform.consumers.consume_once("payments", "mailer", Seen())
    after = platform.registry.consumer("payments", "mailer")[0]
    assert (after.consumed_events, after.last_event_id) == (4, ids[-1])
    assert after.last_consumption_at is not None
    with platform.database.connection() as connection:
        row = connection.execute(
            "SELECT eql_first_event_id FROM eventsql.consumer WHERE eql_topic = 'payments'"
        ).fetchone()
    assert row == (ids[0],)


def test_what_is_not_there_is_named(platform: EventSQL) -> None:
    with pytest.raises(TopicNotFoundError):
        platform.consumers.consume_once("nowhere", "mailer", Seen())
    with pytest.raises(ConsumerNotFoundError):
        platform.consumers.consume_once("orders", "nobody", Seen())
    with pytest.raises(PartitionOutOfRangeError):
        platform.consumers.consume_once("orders", "mailer", Seen(), partition=3)
    with pytest.raises(ConsumerNotFoundError):
        platform.consumers.start("orders", "nobody", Seen().one)


@pytest.mark.parametrize(
    "options",
    [
        {"min_events": 0},
        {"min_events": 5, "max_events": 4},
        {"polling_delay": 0.0},
        {"max_polling_delay": -1.0},
    ],
    ids=str,
)
def test_a_batch_consumer_that_cannot_work_is_refused(platform: EventSQL, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        platform.consumers.start_batch("orders", "mailer", Seen(), **options)


# Effects and offset are one transaction


def write(events: Sequence[Event], connection: Connection, consumer: str = "mailer") -> None:
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO effects (consumer, event_id) VALUES (%s, %s)", [(consumer, event.id) for event in events]
        )


def test_effects_commit_with_the_offset(
    platform: EventSQL, effects: Callable[[str], list[int]], sessions: Sessions
) -> None:
    ids = fill(platform, 3, "payments")
    watching = sessions()
    watching.autocommit = True

    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        assert effects("mailer") == []
        assert (
            watching.execute(
                "SELECT 1 FROM eventsql.consumer WHERE eql_topic = 'payments' AND eql_last_event_id > 0"
            ).fetchall()
            == []
        )

    platform.consumers.consume_once("payments", "mailer", handle)
    assert effects("mailer") == ids


def test_effects_of_an_interrupted_batch_are_rolled_back_and_it_is_handed_over_again(
    platform: EventSQL, effects: Callable[[str], list[int]]
) -> None:
    ids = fill(platform, 3, "payments")

    def interrupted(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        platform.consumers.consume_once("payments", "mailer", interrupted)
    assert (effects("mailer"), offsets(platform, "payments")) == ([], [0])
    platform.consumers.consume_once("payments", "mailer", write)
    assert effects("mailer") == ids


def test_a_batch_whose_offset_moves_under_it_is_rolled_back(
    platform: EventSQL, effects: Callable[[str], list[int]]
) -> None:
    fill(platform, 3, "payments")

    def handle(events: Sequence[Event], connection: Connection) -> None:
        write(events, connection)
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 2 WHERE eql_topic = 'payments'")

    with pytest.raises(ClaimLostError, match="not at offset 0 any more"):
        platform.consumers.consume_once("payments", "mailer", handle)
    assert (effects("mailer"), offsets(platform, "payments")) == ([], [0])


def test_a_handler_may_publish_in_its_transaction(platform: EventSQL) -> None:
    fill(platform, 3)

    def forward(events: Sequence[Event], connection: Connection) -> None:
        platform.publisher.publish_all((event.as_publication("payments") for event in events), connection=connection)

    platform.consumers.consume_once("orders", "auditor", forward)
    assert platform.transfer.run_once() == {"payments": 3}


# One consumption at a time


def test_a_partition_that_another_transaction_holds_is_left_to_it(platform: EventSQL, sessions: Sessions) -> None:
    fill(platform, 9)
    holder = sessions()
    holder.execute(
        "SELECT FROM eventsql.consumer "
        "WHERE eql_topic = 'orders' AND eql_name = 'mailer' AND eql_partition = 1 FOR UPDATE"
    )
    seen = Seen()
    assert platform.consumers.consume_once("orders", "mailer", seen) == 6
    assert {event.partition for batch in seen.batches for event in batch} == {0, 2}
    holder.rollback()
    assert platform.consumers.consume_once("orders", "mailer", seen) == 3


def test_a_partition_is_consumed_by_one_process_at_a_time(
    platform: EventSQL, effects: Callable[[str], list[int]], spawn: Spawn
) -> None:
    ids = fill(platform, 30)
    other = spawn("hold", "orders", "mailer", 1, 0)
    assert other.line() == "in mid-batch after 10 events"
    seen = Seen()
    assert platform.consumers.consume_once("orders", "mailer", seen) == 20
    assert {event.partition for batch in seen.batches for event in batch} == {0, 2}
    assert platform.consumers.consume_once("orders", "mailer", seen, partition=1) == 0
    other.tell("go on")
    assert other.line() == "ended"
    assert other.end() == 0
    assert effects("mailer") == ids[1::3]
    assert platform.consumers.consume_once("orders", "mailer", seen) == 0


def test_a_process_that_is_killed_in_mid_batch_loses_and_repeats_nothing(
    platform: EventSQL, effects: Callable[[str], list[int]], spawn: Spawn, until: Until
) -> None:
    ids = fill(platform, 105, "payments")
    doomed = spawn("hold", "payments", "mailer", -1, 4)
    assert doomed.line() == "in mid-batch after 10 events"
    doomed.kill()
    # The fifth batch of ten was written, and died with its transaction.
    assert effects("mailer") == ids[:40]
    until(lambda: platform.consumers.consume_once("payments", "mailer", write, max_events=10))
    while platform.consumers.consume_once("payments", "mailer", write, max_events=10):
        pass
    assert effects("mailer") == ids
    assert platform.registry.consumer("payments", "mailer")[0].consumed_events == 105


# Pause and resume


def test_a_paused_consumer_consumes_nothing_until_it_is_resumed(platform: EventSQL) -> None:
    fill(platform, 3)
    platform.registry.pause("orders", "mailer")
    assert platform.consumers.consume_once("orders", "mailer", Seen()) == 0
    assert platform.consumers.consume_once("orders", "auditor", Seen()) == 3
    platform.registry.resume("orders", "mailer")
    assert platform.consumers.consume_once("orders", "mailer", Seen()) == 3


# Threads


def test_a_consumer_of_single_events_gets_each_in_its_order(platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.consumers.start("payments", "mailer", seen.one, polling_delay=0.01):
        ids = fill(platform, 10, "payments")
        until(lambda: len(seen.batches) == 10)
        ids += fill(platform, 5, "payments")
        until(lambda: len(seen.batches) == 15)
    assert seen.ids == ids


def test_partitions_are_consumed_each_in_its_order(platform: EventSQL, until: Until) -> None:
    ids = fill(platform, 90)
    seen = Seen()
    with platform.consumers.start_batch("orders", "mailer", seen, max_events=7, polling_delay=0.01):
        until(lambda: len(seen.ids) == 90)
    assert sorted(seen.ids) == ids
    for partition in range(3):
        of_partition = [e.id for batch in seen.batches for e in batch if e.partition == partition]
        assert of_partition == sorted(of_partition)


def test_more_partitions_than_threads_take_turns(platform: EventSQL, until: Until) -> None:
    platform.registry.register_topic(Topic("wide", 12))
    platform.registry.register_consumer(Consumer("wide", "mailer", partitioned=True))
    seen = Seen()
    with platform.consumers.start_batch("wide", "mailer", seen, polling_delay=0.01) as consumption:
        assert len(consumption._threads) < 12
        for _ in range(2):
            platform.publisher.publish_all(Publication("wide", b"", partition=number) for number in range(12))
            platform.transfer.run_once()
        until(lambda: len(seen.ids) == 24)


def test_a_batch_waits_for_its_least_number_of_events(platform: EventSQL, until: Until) -> None:
    seen = Seen()
    with platform.consumers.start_batch(
        "payments", "mailer", seen, min_events=3, max_events=4, polling_delay=0.005, max_polling_delay=1e6
    ):
        ids = fill(platform, 2, "payments")
        # What comes now is the third: were two handed over alone, the first batch would show it.
        ids += fill(platform, 4, "payments")
        until(lambda: len(seen.ids) >= 4)
        ids += fill(platform, 1, "payments")
        until(lambda: len(seen.ids) == 7)
    assert seen.ids == ids
    assert all(3 <= len(batch) <= 4 for batch in seen.batches)


def test_fewer_than_the_least_number_are_handed_over_when_they_have_waited_long_enough(platform: EventSQL) -> None:
    fill(platform, 2, "payments")
    seen = Seen()
    partition = platform.consumers._keys("payments", "mailer")[0]
    from eventsql_orchestration.log.consumer import _Plan

    plan = _Plan(seen, each=False, min_events=3, max_events=10, polling_delay=1.0, max_polling_delay=60.0)
    assert platform.consumers.consume_partition(partition, plan) is None
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.payments_event SET eql_created_at = now() - interval '61 s'")
    progress = platform.consumers.consume_partition(partition, plan)
    assert progress is not None
    assert (progress.consumed, len(seen.ids)) == (2, 2)


def test_stopping_finishes_the_batch_under_way(platform: EventSQL, effects: Callable[[str], list[int]]) -> None:
    ids = fill(platform, 20, "payments")
    inside, go_on = threading.Event(), threading.Event()

    def handle(events: Sequence[Event], connection: Connection) -> None:
        inside.set()
        go_on.wait(60)
        write(events, connection)

    consumption = platform.consumers.start_batch("payments", "mailer", handle, max_events=10, polling_delay=0.01)
    assert inside.wait(60)
    assert not consumption.stop(timeout=0.01)
    go_on.set()
    assert consumption.stop()
    assert effects("mailer") == ids[:10]
    assert offsets(platform, "payments") == [ids[9]]


def test_closing_the_platform_stops_its_consumers(dsn: str, platform: EventSQL) -> None:
    with EventSQL(dsn, transfer=False) as other:
        consumption = other.consumers.start_batch("payments", "mailer", Seen(), polling_delay=0.01)
        assert all(thread.is_alive() for thread in consumption._threads)
    assert not any(thread.is_alive() for thread in consumption._threads)


def test_consumers_of_many_processes_share_the_partitions_and_repeat_nothing(
    platform: EventSQL, effects: Callable[[str], list[int]], spawn: Spawn, until: Until
) -> None:
    workers = [spawn("consume", "mailer") for _ in range(3)]
    ids = fill(platform, 600)
    until(lambda: len(effects("mailer")) >= 600)
    for worker in workers:
        worker.tell("end")
        assert worker.end() == 0
    assert sorted(effects("mailer")) == ids
    with platform.database.connection() as connection:
        rows = connection.execute(
            "SELECT partition, array_agg(event_id ORDER BY id) FROM effects GROUP BY 1"
        ).fetchall()
    assert all(event_ids == sorted(event_ids) for _, event_ids in rows)


# What it asks of the server


def test_an_idle_pass_is_two_statements_and_a_batch_takes_five_whatever_its_size(
    platform: EventSQL, said_by: Callable[[Database], Said]
) -> None:
    from eventsql_orchestration.log.consumer import _Plan

    partition = platform.consumers._keys("payments", "mailer")[0]
    plan = _Plan(Seen(), each=False, min_events=1, max_events=1_000, polling_delay=1.0, max_polling_delay=1.0)
    said = said_by(platform.database)
    platform.consumers.consume_partition(partition, plan)
    assert said.verbs() == [";", "BEGIN", "SELECT", "SELECT", "COMMIT"]
    for count in (1, 900):
        fill(platform, count, "payments")
        said.statements()
        platform.consumers.consume_partition(partition, plan)
        assert said.verbs() == [
            *(";", "BEGIN", "SELECT", "SELECT"),
            *("SAVEPOINT", "RELEASE"),
            *("UPDATE", "COMMIT"),
        ]
