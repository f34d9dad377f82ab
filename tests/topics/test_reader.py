"""Any range of a topic can be read, as often as wanted, without moving any offset."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import PartitionOutOfRangeError, TopicNotFoundError, ValidationError
from eventsql_orchestration.model import FIRST_TIME, LAST_TIME
from tests.forms import stored


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3)).register_topic(Topic("empty", 3))
    for number in range(1, 13):
        # One by one: together, a log in blocks would have them partition by partition.
        platform.publisher.publish(Publication("orders", b"%d" % number, partition=number % 3))
        platform.transfer.run_once()


pytestmark = pytest.mark.prepared.with_args(prepare)


def test_a_range_excludes_its_beginning_and_includes_its_end(platform: EventSQL) -> None:
    assert [event.id for event in platform.reader.read("orders", after=3, upto=7)] == [4, 5, 6, 7]
    assert [event.value for event in platform.reader.read("orders", after=3, upto=7)] == [b"4", b"5", b"6", b"7"]


def test_without_bounds_the_whole_log_is_read_in_order(platform: EventSQL) -> None:
    assert [event.id for event in platform.reader.read("orders")] == list(range(1, 13))


@pytest.mark.parametrize(("partition", "ids"), [(0, [3, 6, 9, 12]), (1, [1, 4, 7, 10]), (2, [2, 5, 8, 11])])
def test_one_partition_is_read_alone(platform: EventSQL, partition: int, ids: list[int]) -> None:
    assert [event.id for event in platform.reader.read("orders", partition=partition)] == ids
    assert [event.id for event in platform.reader.read("orders", after=3, upto=9, partition=partition)] == [
        event_id for event_id in ids if 3 < event_id <= 9
    ]
    assert platform.reader.count("orders", partition=partition) == 4
    assert platform.reader.end("orders", partition) == ids[-1]


def test_a_limit_takes_the_first(platform: EventSQL) -> None:
    assert [event.id for event in platform.reader.read("orders", after=2, limit=3)] == [3, 4, 5]
    assert platform.reader.read("orders", limit=0) == []
    with pytest.raises(ValidationError):
        platform.reader.read("orders", limit=-1)


@pytest.mark.parametrize("batch", [1, 5, 12, 100])
def test_a_stream_gives_the_range_in_lists_up_to_the_end(platform: EventSQL, batch: int) -> None:
    lists = list(platform.reader.stream("orders", after=1, upto=11, batch=batch))
    assert [event.id for events in lists for event in events] == list(range(2, 12))
    assert max(map(len, lists)) <= batch


def test_a_stream_goes_on_with_what_came_meanwhile(platform: EventSQL) -> None:
    stream = platform.reader.stream("orders", batch=12)
    assert len(next(stream)) == 12
    platform.publisher.publish(Publication("orders", b"13", partition=0))
    platform.transfer.run_once()
    assert [event.id for event in next(stream)] == [13]
    assert next(stream, None) is None


def test_a_batch_of_zero_events_is_refused(platform: EventSQL) -> None:
    with pytest.raises(ValidationError):
        next(platform.reader.stream("orders", batch=0))


def test_an_empty_log_has_no_end(platform: EventSQL) -> None:
    assert platform.reader.end("empty") == platform.reader.end("empty", 1) == 0
    assert platform.reader.count("empty") == 0
    assert platform.reader.read("empty") == []
    assert list(platform.reader.stream("empty")) == []
    assert platform.reader.seconds_behind("empty", after=0) == 0.0


def test_seconds_behind_are_those_since_the_first_event_was_published(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute(
            f"UPDATE eventsql.{stored('orders')} SET eql_buffered_at = now() - make_interval(mins => 13 - eql_id::int)"
        )
    assert platform.reader.seconds_behind("orders", after=0) == pytest.approx(720, abs=30)
    assert platform.reader.seconds_behind("orders", after=3, partition=0) == pytest.approx(420, abs=30)
    assert platform.reader.seconds_behind("orders", after=12) == 0.0


def test_a_clock_that_went_back_is_not_a_negative_lag(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute(f"UPDATE eventsql.{stored('orders')} SET eql_buffered_at = now() + interval '1 hour'")
    assert platform.reader.seconds_behind("orders", after=0) == 0.0


@pytest.mark.parametrize(
    ("stored_time", "read"),
    [
        ("infinity", LAST_TIME),
        ("9999-12-31Z", LAST_TIME),
        ("9999-12-30Z", datetime(9999, 12, 30, tzinfo=UTC)),
        ("0001-01-03 00:00:01Z", datetime(1, 1, 3, 0, 0, 1, tzinfo=UTC)),
        ("0001-01-01Z", FIRST_TIME),
        ("-infinity", FIRST_TIME),
    ],
)
def test_a_time_that_python_lacks_in_some_zone_is_read_as_the_nearest(
    platform: EventSQL, stored_time: str, read: datetime
) -> None:
    """As a program may write it that inserts events with times of its own."""
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_created_at) "
            "VALUES ('orders', 0, '', '{}', %s)",
            [stored_time],
        )
    platform.transfer.run_once()
    (event,) = platform.reader.read("orders", after=12)
    assert event.buffered_at == read


def test_a_missing_topic_or_partition_is_named(platform: EventSQL) -> None:
    with pytest.raises(TopicNotFoundError, match="nowhere"):
        platform.reader.read("nowhere")
    with pytest.raises(TopicNotFoundError, match="nowhere"):
        platform.reader.end("nowhere")
    with pytest.raises(PartitionOutOfRangeError, match="partitions 0 to 2"):
        platform.reader.read("orders", partition=3)
    with pytest.raises(PartitionOutOfRangeError):
        platform.reader.count("orders", partition=-1)


def test_a_repartitioned_topic_has_its_former_partitions_and_no_others(platform: EventSQL) -> None:
    platform.repartitioner.repartition("orders", 2)
    assert [event.id for event in platform.reader.read("orders", partition=2)] == [2, 5, 8, 11]
    with pytest.raises(PartitionOutOfRangeError):
        platform.reader.read("orders", partition=3)


def test_offsets_of_any_size_are_possible(platform: EventSQL) -> None:
    assert platform.reader.read("orders", after=2**62) == []
    assert len(platform.reader.read("orders", upto=2**63 - 1)) == 12
