"""A batch that goes through the buffer to a log in blocks: a row for each block, which keeps its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import psycopg
import pytest

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import RedefinitionError, StuckEventError
from eventsql_orchestration.model import BLOCKS, ROWS
from eventsql_orchestration.publishing import batch_sizes, batches, log_writer
from eventsql_orchestration.publishing.batches import LEAST_IN_BLOCK
from eventsql_orchestration.storage.appending import BufferedBatch, LogAppender, TopicState
from tests.fixtures import Sessions

MANY = 200


def prepare(platform: EventSQL) -> None:
    for topic in (Topic("orders", 4, storage=BLOCKS), Topic("plain", storage=BLOCKS), Topic("old", 4, storage=ROWS)):
        platform.registry.register_topic(topic)


pytestmark = pytest.mark.prepared.with_args(prepare)


def numbered(first: int, count: int = MANY, *, topic: str = "orders", keys: int = 9) -> list[Publication]:
    return [Publication(topic, b"%d" % each, key=f"key-{each % keys}") for each in range(first, first + count)]


def publish(platform: EventSQL, sessions: Sessions, publications: Iterable[Publication]) -> None:
    """Publish in a transaction of a service, as an outbox does."""
    with sessions() as session, session.transaction():
        platform.publisher.publish_all(publications, connection=session)


def rows(platform: EventSQL, topic: str = "orders") -> list[tuple[int, int | None]]:
    """The partition and the number of events of each row of the buffer."""
    with platform.database.connection() as connection:
        return connection.execute(
            "SELECT eql_partition, eql_events FROM eventsql.event_buffer WHERE eql_topic = %s ORDER BY eql_id", [topic]
        ).fetchall()


def check(platform: EventSQL, expected: Iterable[int], *, topic: str = "orders") -> list[Event]:
    """Assert that a log has these numbers once each, and those of each key in their order."""
    events, places = platform.reader.read(topic), {number: place for place, number in enumerate(expected)}
    assert Counter(int(event.value) for event in events) == Counter(places.keys())
    for key in {event.key for event in events}:
        own = [places[int(event.value)] for event in events if event.key == key]
        assert own == sorted(own), key
    return events


# One row for a block


def test_a_batch_of_a_transaction_is_a_row_for_each_partition(platform: EventSQL, sessions: Sessions) -> None:
    given = [Publication("orders", b"%d" % each, key=f"k{each % 9}", metadata={"n": str(each)}) for each in range(MANY)]
    publish(platform, sessions, given)
    partitions = {platform.publisher.partition_of(each) for each in given}
    waiting = rows(platform)
    assert len(waiting) == len(partitions)
    assert {partition for partition, _ in waiting} == {-3}
    assert platform.buffered() == {"orders": MANY}
    assert platform.transfer.run_once() == {"orders": MANY}
    for event in check(platform, range(MANY)):
        own = given[int(event.value)]
        assert (event.key, event.metadata) == (own.key, own.metadata)
        assert event.partition == platform.publisher.partition_of(own)
        assert event.buffered_at <= event.created_at
    assert rows(platform) == []


def test_events_without_keys_and_metadata_have_none(platform: EventSQL, sessions: Sessions) -> None:
    publish(platform, sessions, [Publication("plain", b"") for _ in range(MANY)])
    assert rows(platform, "plain") == [(-3, MANY)]
    platform.transfer.run_once()
    events = platform.reader.read("plain")
    assert {(event.partition, event.key, event.value, tuple(event.metadata)) for event in events} == {
        (-1, None, b"", ())
    }
    assert len(events) == MANY


def test_few_events_for_a_partition_are_single_rows(platform: EventSQL, sessions: Sessions) -> None:
    publish(platform, sessions, numbered(0, LEAST_IN_BLOCK - 1, topic="plain"))
    publish(platform, sessions, numbered(100, LEAST_IN_BLOCK, topic="plain"))
    assert rows(platform, "plain") == [(-1, None)] * (LEAST_IN_BLOCK - 1) + [(-3, LEAST_IN_BLOCK)]
    platform.transfer.run_once()
    check(platform, [*range(LEAST_IN_BLOCK - 1), *range(100, 100 + LEAST_IN_BLOCK)], topic="plain")


def test_a_batch_of_several_topics_is_in_blocks_where_their_logs_are(platform: EventSQL, sessions: Sessions) -> None:
    both = [each for pair in zip(numbered(0), numbered(0, topic="old"), strict=True) for each in pair]
    publish(platform, sessions, both)
    assert {partition for partition, _ in rows(platform)} == {-3}
    assert len(rows(platform, "old")) == MANY
    assert platform.transfer.run_once() == {"orders": MANY, "old": MANY}
    check(platform, range(MANY))
    check(platform, range(MANY), topic="old")


def test_a_stream_is_cut_into_parts(platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "STRAIGHT_MOST", 60)
    publish(platform, sessions, iter(numbered(0, topic="plain")))
    assert [events for _, events in rows(platform, "plain")] == [61, 61, 61, 17]
    platform.transfer.run_once()
    check(platform, range(MANY), topic="plain")


def test_a_transaction_that_fails_leaves_no_block(platform: EventSQL, sessions: Sessions) -> None:
    def broken() -> Iterable[Publication]:
        yield from numbered(0)
        raise LookupError

    with sessions() as session, pytest.raises(LookupError), session.transaction():
        platform.publisher.publish_all(broken(), connection=session)
    with sessions() as session, session.transaction(force_rollback=True):
        platform.publisher.publish_all(numbered(0), connection=session)
    assert rows(platform) == []


def test_a_topic_that_was_redefined_gets_no_block_by_its_old_definition(
    platform: EventSQL, sessions: Sessions, dsn: str
) -> None:
    with EventSQL(dsn, transfer=False) as other, sessions() as session:
        other.publisher.partition_of(numbered(0)[0])
        platform.repartitioner.repartition("orders", 7)
        with pytest.raises(RedefinitionError), session.transaction():
            other.publisher.publish_all(numbered(0), connection=session)
    assert rows(platform) == []


# Its place


@pytest.mark.parametrize(("limit", "seconds"), [*((limit, 3_600.0) for limit in (1, 2, 3, 7, 10_000)), (10_000, -1.0)])
def test_any_batch_of_the_transfer_keeps_the_order(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, limit: int, seconds: float
) -> None:
    monkeypatch.setattr(batch_sizes, "BATCH_SECONDS", seconds)
    for first in range(0, 5 * MANY, MANY):
        publish(platform, sessions, numbered(first, MANY - 3, keys=2))
        for number in range(first + MANY - 3, first + MANY):
            platform.publisher.publish(numbered(number, 1, keys=2)[0])
    platform.shards[0].transfer._writer._sizes._fixed = limit
    platform.transfer.run_once()
    check(platform, range(5 * MANY))


def test_a_batch_that_takes_long_ends_behind_its_blocks(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sizes, "BATCH_SECONDS", -1.0)
    publish(platform, sessions, numbered(0, topic="plain"))
    platform.publisher.publish(numbered(MANY, 1, topic="plain")[0])
    moved: dict[str, int] = {}
    assert platform.shards[0].transfer._round(None, {}, None, moved).again
    assert moved == {"plain": MANY}
    assert platform.transfer.run_once() == {"plain": 1}


@pytest.mark.parametrize("blocks_first", [True, False])
def test_a_sequence_that_is_set_back_in_the_middle_of_a_batch_gives_no_id_twice(
    platform: EventSQL, sessions: Sessions, session: Connection, *, monkeypatch: pytest.MonkeyPatch, blocks_first: bool
) -> None:
    if blocks_first:
        publish(platform, sessions, numbered(1, topic="plain"))
    platform.publisher.publish(numbered(0, 1, topic="plain")[0])
    if not blocks_first:
        publish(platform, sessions, numbered(1, topic="plain"))
    look, looks = LogAppender.first_row, list[object]()

    def set_back(*given: Any, **named: Any) -> tuple[int, int] | None:
        looks.append(given)
        if len(looks) == 2:
            session.execute("SELECT setval(pg_get_serial_sequence('eventsql.plain_block', 'eql_id'), 1, false)")
        return look(*given, **named)

    monkeypatch.setattr(LogAppender, "first_row", set_back)
    assert platform.transfer.run_once() == {"plain": MANY + 1}
    assert len({event.id for event in platform.reader.read("plain")}) == MANY + 1


@pytest.mark.parametrize("seen", ["event", "block", "nothing"])
@pytest.mark.parametrize("at", ["batch", "first_row"])
def test_a_row_that_is_committed_while_the_buffer_is_moved_passes_no_earlier_row_of_its_publisher(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, seen: str, at: str
) -> None:
    """Two transactions have drawn ids: one publishes an event and then a block, the other a block and then an event."""
    with sessions() as one, sessions() as two:
        platform.publisher.publish(numbered(0, 1, keys=1)[0], connection=one)
        platform.publisher.publish_all(numbered(100, 50, keys=1), connection=two)
        platform.publisher.publish_all(numbered(1, 50, keys=1), connection=one)
        platform.publisher.publish(numbered(150, 1, keys=1)[0], connection=two)
        if seen != "nothing":
            last = numbered(900, 1 if seen == "event" else 50, keys=3)
            publish(platform, sessions, last)
        look = getattr(LogAppender, at)

        def committed(*given: Any, **named: Any) -> BufferedBatch:
            found: BufferedBatch = look(*given, **named)
            one.commit()
            two.commit()
            return found

        monkeypatch.setattr(LogAppender, at, committed)
        platform.transfer.run_once()
        one.commit()
        two.commit()
        platform.transfer.run_once()
    values = [int(event.value) for event in platform.reader.read("orders", partition=0)]
    values += [
        int(event.value) for partition in (1, 2, 3) for event in platform.reader.read("orders", partition=partition)
    ]
    assert [each for each in values if each < 100] == list(range(51))
    assert [each for each in values if 100 <= each < 900] == list(range(100, 151))


def test_one_run_moves_an_event_that_stands_behind_a_block_which_is_committed_at_that_moment(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sessions() as other:
        platform.publisher.publish_all(numbered(1, 50, keys=1), connection=other)
        platform.publisher.publish(numbered(0, 1, keys=1)[0])
        look = LogAppender.batch

        def committed(*given: Any, **named: Any) -> BufferedBatch:
            found = look(*given, **named)
            other.commit()
            return found

        monkeypatch.setattr(LogAppender, "batch", committed)
        assert platform.transfer.run_once() == {"orders": 51}
    assert rows(platform) == []


def test_a_publisher_that_appends_to_the_log_moves_blocks_before(platform: EventSQL, sessions: Sessions) -> None:
    platform.publisher.publish(numbered(0, 1)[0])
    publish(platform, sessions, numbered(1))
    platform.publisher.publish(numbered(MANY + 1, 1)[0])
    platform.publisher.publish_all(numbered(MANY + 2))
    assert rows(platform) == []
    check(platform, range(2 * MANY + 2))


def test_a_block_that_is_committed_during_an_append_does_not_keep_events_behind_the_publishers_batch(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sessions() as other:
        # Its block comes before the event in the buffer, and is committed once the publisher has found the event alone.
        platform.publisher.publish_all(numbered(900, 50, keys=1), connection=other)
        platform.publisher.publish(numbered(0, 1, keys=1)[0])
        look = LogAppender.state

        def committed(*given: Any, **named: Any) -> TopicState:
            found = look(*given, **named)
            assert found.buffered == 1
            other.commit()
            return found

        monkeypatch.setattr(LogAppender, "state", committed)
        platform.publisher.publish_all(numbered(1, 60, keys=1))
    platform.transfer.run_once()
    values = [int(event.value) for event in platform.reader.read("orders")]
    assert [each for each in values if each < 900] == list(range(61))


def test_a_publisher_leaves_many_events_of_blocks_to_the_transfer(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "MOST_BUFFERED", MANY - 1)
    publish(platform, sessions, numbered(0))
    platform.publisher.publish_all(numbered(MANY))
    assert platform.reader.read("orders") == []
    platform.transfer.run_once()
    check(platform, range(2 * MANY))


def test_blocks_that_wait_during_a_repartitioning_enter_the_log_before_it(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(platform, sessions, numbered(0))
    platform.publisher.publish(numbered(MANY, 1)[0])
    # The last look before publishers have to wait finds nothing.
    monkeypatch.setattr(type(platform.shards[0].transfer), "run_once", lambda *_, **__: {})
    platform.repartitioner.repartition("orders", 7)
    assert rows(platform) == []
    publish(platform, sessions, numbered(MANY + 1))
    monkeypatch.undo()
    platform.transfer.run_once()
    check(platform, range(2 * MANY + 1))


def test_blocks_enter_a_log_that_was_altered_to_rows(platform: EventSQL, sessions: Sessions) -> None:
    publish(platform, sessions, numbered(0))
    assert platform.registry.set_storage("orders", ROWS)
    platform.transfer.run_once()
    check(platform, range(MANY))


# What goes wrong


@pytest.mark.parametrize(
    "damage",
    [
        "eql_events = eql_events + 1", "eql_values = eql_values[2:]", "eql_keys = eql_keys[2:]",
        "eql_values = NULL", "eql_block_partition = 9", "eql_block_partition = -1", "eql_events = NULL",
        "eql_events = -eql_events", "eql_events = 0, eql_values = '{}'", "eql_values = ARRAY[eql_values]",
        "eql_values[3] = NULL", "eql_partition = -2",
    ],
)  # fmt: skip
def test_a_damaged_block_stops_its_topic_and_loses_nothing(platform: EventSQL, sessions: Sessions, damage: str) -> None:
    platform.publisher.publish(numbered(0, 1, keys=1)[0])
    publish(platform, sessions, numbered(1, keys=1))
    platform.publisher.publish(numbered(MANY + 1, 1, keys=1)[0])
    with sessions() as session:
        sound = session.execute(
            "SELECT eql_events, eql_values, eql_keys, eql_block_partition FROM eventsql.event_buffer "
            "WHERE eql_partition = -3"
        ).fetchone()
        assert sound is not None
        session.execute(f"UPDATE eventsql.event_buffer SET {damage} WHERE eql_partition = -3")
        session.commit()
        for _ in range(2):
            with pytest.raises(StuckEventError):
                platform.transfer.run_once()
        check(platform, [0])
        session.execute(
            "UPDATE eventsql.event_buffer SET eql_events=%s, eql_values=%s, eql_keys=%s, eql_block_partition=%s, "
            "eql_partition=-3 WHERE eql_partition < -1", sound,
        )  # fmt: skip
        session.commit()
    platform.transfer.run_once()
    check(platform, range(MANY + 2))


@pytest.mark.parametrize(
    "damage",
    [
        "eql_events = eql_events + 1", "eql_values = eql_values[2:]", "eql_keys = eql_keys[2:]",
        "eql_event_metadata = ARRAY['{}'::json]", "eql_block_partition = 9",
    ],
)  # fmt: skip
def test_a_damaged_block_enters_no_log_that_was_altered_to_rows(
    platform: EventSQL, sessions: Sessions, session: Connection, damage: str
) -> None:
    publish(platform, sessions, numbered(0))
    assert platform.registry.set_storage("orders", ROWS)
    session.execute(f"UPDATE eventsql.event_buffer SET {damage}".encode())
    with pytest.raises(StuckEventError):
        platform.transfer.run_once()
    check(platform, range(0))


def test_a_row_that_is_neither_event_nor_block_stops_its_topic(platform: EventSQL, sessions: Sessions) -> None:
    with sessions() as session:
        session.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
            "VALUES ('orders', -4, '', '{}')"
        )
        session.commit()
    with pytest.raises(StuckEventError):
        platform.transfer.run_once()


def test_a_program_that_knows_no_blocks_cannot_take_one_out_of_the_buffer(
    platform: EventSQL, sessions: Sessions
) -> None:
    publish(platform, sessions, numbered(0))
    with sessions() as session, pytest.raises(psycopg.errors.CheckViolation):
        session.execute("DELETE FROM eventsql.event_buffer WHERE eql_topic = 'orders'")
    platform.transfer.run_once()
    check(platform, range(MANY))


def test_a_topic_goes_with_the_blocks_of_its_buffer(platform: EventSQL, sessions: Sessions) -> None:
    publish(platform, sessions, numbered(0))
    platform.registry.unregister_topic("orders", force=True)
    assert rows(platform) == []


# Around it


def test_the_events_of_blocks_count_as_waiting_in_their_partitions(platform: EventSQL, sessions: Sessions) -> None:
    platform.registry.register_consumer(Consumer("orders", "billing", partitioned=True))
    given = numbered(0)
    publish(platform, sessions, given)
    platform.publisher.publish(numbered(MANY, 1)[0])
    expected = Counter(platform.publisher.partition_of(each) for each in [*given, *numbered(MANY, 1)])
    lags = {lag.partition: lag.buffered for lag in platform.lag("orders")}
    assert {partition: count for partition, count in lags.items() if count} == dict(expected)


def test_an_erasure_finds_the_events_of_blocks(platform: EventSQL, sessions: Sessions) -> None:
    publish(platform, sessions, numbered(0))
    platform.publisher.publish(Publication("orders", b"single", key="key-3"))
    own = sum(each.key == "key-3" for each in numbered(0)) + 1
    assert platform.eraser.plan("orders", ["key-3"]).buffered == own
    assert platform.eraser.execute("orders", ["key-3"]).buffered == own
    assert platform.eraser.plan("orders", ["key-3"]).buffered == 0
    platform.transfer.run_once()
    events = platform.reader.read("orders")
    assert len(events) == MANY + 1
    for event in events:
        assert event.erased == (event.key == "key-3")
        assert (event.value is None) == event.erased
