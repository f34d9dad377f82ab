"""Every form of a log passes these tests, which write by `LogAppender`, and read by `LogReader` and `LogRanges`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.binary import microseconds
from eventsql_orchestration.errors import TopicNotFoundError
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.block_format import encode_blocks
from eventsql_orchestration.storage import altering, log_form, log_table, segments
from eventsql_orchestration.storage.appending import LogAppender
from eventsql_orchestration.storage.ranges import LogRanges, Sample
from eventsql_orchestration.storage.reading import MAX_OFFSET, Extent, LogReader, Waiting
from eventsql_orchestration.storage.segment_drops import SegmentDrops

SCHEMA = "eventsql"
TOPIC = "orders"
NOON = datetime(2024, 3, 1, 12, tzinfo=UTC)

appender, reader, ranges = LogAppender(SCHEMA), LogReader(SCHEMA), LogRanges(SCHEMA)


@dataclass
class Log:
    """A log with three partitions, on a session in autocommit mode."""

    platform: EventSQL
    session: Connection

    def append(self, *publications: Publication, at: datetime = NOON) -> None:
        """Append events that were published a second before `at`."""
        now, published = microseconds(at), microseconds(at - timedelta(seconds=1))
        with self.session.transaction():
            segments.ensure_ahead(self.session, SCHEMA, TOPIC)
            rows = self._rows(publications, now, published)
            appender.append(self.session, TOPIC, [copy_format.HEADER, *rows, copy_format.TRAILER])

    def _rows(self, publications: Sequence[Publication], now: int, published: int) -> list[bytes]:
        if self.platform.registry.topic(TOPIC).storage == "rows":
            prefix = copy_format.log_prefix(published, now)
            return [prefix + copy_format.encode(each, each.partition or 0) for each in publications]
        # Of events of one partition in a row: the tests give each event the id of its place.
        rows = []
        for _, events in groupby(publications, lambda each: each.partition):
            for block in encode_blocks(own := list(events), [each.partition or 0 for each in own]):
                first = appender.draw(self.session, TOPIC, block.events, after=0)
                rows.append(block.row(first, published, now))
        return rows

    def fill(self, events: int, *, at: datetime = NOON) -> None:
        """Append so many events, in the partitions 0, 1, 2, 0, …"""
        first = reader.end(self.session, TOPIC)
        numbers = range(first, first + events)
        self.append(*(Publication(TOPIC, b"%d" % each, partition=each % 3) for each in numbers), at=at)

    def drop_first_segment(self) -> None:
        found = segments.segments(self.session, SCHEMA, TOPIC)
        assert found is not None
        assert SegmentDrops(SCHEMA, TOPIC, wait=30).drop(self.session, found[0], newest=found[0].end)


def rows(platform: EventSQL) -> None:
    """The form in which an event is a row."""
    platform.registry.register_topic(Topic(TOPIC, 3, storage="rows"))


def blocks(platform: EventSQL) -> None:
    """The form in which many events are a row."""
    platform.registry.register_topic(Topic(TOPIC, 3, storage="blocks"))


def both(platform: EventSQL) -> None:
    """A log whose form has changed: it is read as one in blocks, and its new events are rows."""
    with pytest.MonkeyPatch.context() as patched:
        # A log without events would have one form again at once.
        patched.setattr(altering, "simplify", lambda *_: False)
        blocks(platform)
        assert platform.registry.set_storage(TOPIC, "rows")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)


@pytest.fixture(
    params=[
        pytest.param(None, marks=pytest.mark.prepared.with_args(form), id=form.__name__)
        for form in (rows, blocks, both)
    ]
)
def log(platform: EventSQL, session: Connection) -> Log:
    return Log(platform, session)


def ids(events: Sequence[Event]) -> list[int]:
    return [event.id for event in events]


# Appending


@pytest.mark.parametrize(("value", "key", "metadata"), [(b"\x00\xff", "ä", {"a": "b"}), (b"", None, {})])
def test_an_appended_event_is_read_as_it_was_published(
    log: Log, value: bytes, key: str | None, metadata: dict[str, str]
) -> None:
    log.append(Publication(TOPIC, value, key=key, metadata=metadata, partition=2), at=NOON)
    (event,) = reader.read(log.session, TOPIC)
    assert (event.topic, event.id, event.partition, event.key) == (TOPIC, 1, 2, key)
    assert (event.value, event.metadata) == (value, metadata)
    assert (event.buffered_at, event.created_at) == (NOON - timedelta(seconds=1), NOON)


def test_events_of_a_transaction_that_rolls_back_are_not_in_the_log(log: Log) -> None:
    with log.session.transaction(force_rollback=True):
        log.fill(3)
        assert reader.count(log.session, TOPIC) == 3
    assert reader.count(log.session, TOPIC) == 0
    log.fill(1)
    assert reader.end(log.session, TOPIC) > 0


def test_buffered_events_are_moved_in_their_order_behind_the_log(log: Log) -> None:
    log.fill(1)
    for number in range(4):
        log.platform.publisher.publish(Publication(TOPIC, b"b%d" % number, partition=number % 2))
    with log.session.transaction():
        batch = appender.batch(log.session, TOPIC, low_water=0, newest=MAX_OFFSET, limit=3, size=MAX_OFFSET)
        assert (batch.rows, batch.partitions, batch.mixed, batch.last_id) == (3, 3, False, 1)
        moved = appender.move(log.session, TOPIC, low_water=0, upto=batch.upto, partitions=3, after=0)
        state = appender.state(log.session, TOPIC, low_water=batch.upto, limit=10, events=5)
    assert moved == 3
    moved_events = reader.read(log.session, TOPIC, after=1)
    assert ids(moved_events) == [2, 3, 4]
    # Events of other partitions may come between in rows, not in blocks.
    for partition, values in ((0, [b"b0", b"b2"]), (1, [b"b1"])):
        assert [event.value for event in moved_events if event.partition == partition] == values
    assert (state.definition, state.buffered, state.last_id, state.drawn) == ([3, 1], 1, 4, None)


def test_buffered_events_are_moved_in_the_order_of_their_ids_if_the_server_uses_no_index(log: Log) -> None:
    for number in range(4):
        log.platform.publisher.publish(Publication(TOPIC, b"b%d" % number, partition=0))
    with log.session.transaction():
        # Now the rows lie in the buffer from the last id to the first.
        log.session.execute("UPDATE eventsql.event_buffer SET eql_id = 100 - eql_id")
        for scan in ("indexscan", "indexonlyscan", "bitmapscan"):
            log.session.execute(f"SET LOCAL enable_{scan} TO off")
        batch = appender.batch(log.session, TOPIC, low_water=0, newest=MAX_OFFSET, limit=3, size=MAX_OFFSET)
        state = appender.state(log.session, TOPIC, low_water=0, limit=3, events=0)
        moved = appender.move(log.session, TOPIC, low_water=0, upto=batch.upto, partitions=3, after=0)
    assert (batch.rows, state.upto, moved) == (3, batch.upto, 3)
    assert [event.value for event in reader.read(log.session, TOPIC)] == [b"b3", b"b2", b"b1"]


@pytest.mark.parametrize("events", [1, 2, 5_000])
def test_ids_are_drawn_with_the_look_at_a_topic_without_buffered_events(log: Log, events: int) -> None:
    log.fill(2)
    with log.session.transaction():
        first = appender.state(log.session, TOPIC, low_water=0, limit=10, events=events)
        second = appender.state(log.session, TOPIC, low_water=0, limit=10, events=0)
    assert (first.buffered, first.last_id, first.drawn) == (0, 2, 3)
    assert (second.last_id, second.drawn) == (2 + events, None)


def test_ids_between_which_another_program_took_some_are_not_used(log: Log) -> None:
    log.fill(2)
    with log.session.transaction(force_rollback=True):
        table = sql.Identifier(SCHEMA, log_form.written_table(log.session, SCHEMA, TOPIC)).as_string()
        # As if another program took every second id.
        row = log.session.execute("SELECT pg_get_serial_sequence(%s, 'eql_id')", [table]).fetchone()
        assert row is not None
        log.session.execute(f"ALTER SEQUENCE {row[0]} INCREMENT BY 2")
        assert appender.state(log.session, TOPIC, low_water=0, limit=10, events=5).drawn is None


def test_a_moved_event_of_a_lost_partition_gets_one_that_the_topic_has(log: Log) -> None:
    log.platform.publisher.publish(Publication(TOPIC, b"v", partition=2))
    with log.session.transaction():
        batch = appender.batch(log.session, TOPIC, low_water=0, newest=MAX_OFFSET, limit=1, size=MAX_OFFSET)
        appender.move(log.session, TOPIC, low_water=0, upto=batch.upto, partitions=1, after=0)
    assert [event.partition for event in reader.read(log.session, TOPIC)] == [0]


def test_a_topic_without_events_in_the_buffer_has_an_empty_batch(log: Log) -> None:
    batch = appender.batch(log.session, TOPIC, low_water=0, newest=MAX_OFFSET, limit=3, size=MAX_OFFSET)
    assert (batch.upto, batch.rows, batch.mixed) == (0, 0, False)


# Reading


def test_a_range_excludes_its_beginning_and_includes_its_end(log: Log) -> None:
    log.fill(12)
    assert ids(reader.read(log.session, TOPIC, after=3, upto=7)) == [4, 5, 6, 7]
    assert ids(reader.read(log.session, TOPIC, after=3, limit=2)) == [4, 5]
    assert ids(reader.read(log.session, TOPIC, partition=1, after=2, upto=8)) == [5, 8]
    assert reader.read(log.session, TOPIC, after=7, upto=3) == []
    assert reader.read(log.session, TOPIC, partition=9) == []


def test_counts_are_those_of_the_events_that_are_read(log: Log) -> None:
    log.fill(12)
    for partition in (-1, 0, 1, 2, 9):
        for after, upto in ((0, MAX_OFFSET), (3, 7), (11, 12), (12, 20), (7, 3)):
            read = ids(reader.read(log.session, TOPIC, partition=partition, after=after, upto=upto))
            bounds = {"partition": partition, "after": after, "upto": upto}
            assert reader.count(log.session, TOPIC, **bounds) == len(read)
            assert reader.count(log.session, TOPIC, **bounds, most=2) == min(len(read), 2)
            assert reader.extent(log.session, TOPIC, **bounds) == Extent(len(read), read[0] if read else None)
            for n in (1, 2, 5):
                assert reader.nth(log.session, TOPIC, n, **bounds) == (read[n - 1] if len(read) >= n else None)


def test_events_are_counted_backwards_from_an_offset(log: Log) -> None:
    log.fill(12)
    assert reader.nth_before(log.session, TOPIC, 1, offset=5) == 5
    assert reader.nth_before(log.session, TOPIC, 5, offset=5) == 1
    assert reader.nth_before(log.session, TOPIC, 6, offset=5) is None
    assert reader.nth_before(log.session, TOPIC, 2, partition=0, offset=9) == 4


def test_the_ends_of_a_log_and_of_its_partitions_are_offsets_of_events(log: Log) -> None:
    assert (reader.end(log.session, TOPIC), reader.end(log.session, TOPIC, 1)) == (0, 0)
    assert reader.bounds(log.session, TOPIC) == (1, 0)
    log.fill(5)
    assert [reader.end(log.session, TOPIC, each) for each in (-1, 0, 1, 2, 9)] == [5, 4, 5, 3, 0]
    assert reader.bounds(log.session, TOPIC) == (1, 5)


def test_waiting_events_are_counted_up_to_a_limit(log: Log) -> None:
    log.fill(12)
    for partition, limit, events, upto in ((-1, 5, 5, 5), (-1, 50, 12, 12), (1, 2, 2, 5), (1, 9, 4, 11)):
        waiting = reader.waiting(log.session, TOPIC, partition=partition, after=0, upto=99, limit=limit)
        assert (waiting.events, waiting.upto) == (events, upto)
        assert waiting.seconds is not None
    none = reader.waiting(log.session, TOPIC, partition=9, after=0, upto=99, limit=5)
    assert none == Waiting(0, None, None)


def test_the_age_of_a_backlog_is_that_of_its_first_event(log: Log) -> None:
    log.fill(3, at=NOON)
    log.fill(3, at=NOON + timedelta(days=10))
    old, new = (reader.seconds_behind(log.session, TOPIC, after=after) for after in (0, 3))
    assert old is not None
    assert new is not None
    assert timedelta(days=9.9) < timedelta(seconds=old - new) < timedelta(days=10.1)
    assert reader.seconds_behind(log.session, TOPIC, after=6) is None
    assert reader.seconds_behind(log.session, TOPIC, partition=0, after=4) is None


def test_a_time_is_found_by_the_order_of_offsets(log: Log) -> None:
    for hour in range(5):
        log.fill(7, at=NOON + timedelta(hours=hour))
    for hour in range(5):
        at = NOON + timedelta(hours=hour)
        assert reader.before_time(log.session, TOPIC, at) == 7 * hour
        assert reader.before_time(log.session, TOPIC, at + timedelta(minutes=1)) == 7 * (hour + 1)
    assert reader.before_time(log.session, TOPIC, NOON - timedelta(days=1)) == 0


# Ranges


def test_ranges_with_events_are_told_from_empty_ones(log: Log) -> None:
    log.fill(12)
    parts = [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert ranges.firsts(log.session, TOPIC, -1, parts) == [1, 5, 9, None]
    assert ranges.firsts(log.session, TOPIC, 1, parts) == [2, 5, 11, None]
    assert ranges.samples(log.session, TOPIC, -1, parts, sample=3) == [
        Sample(1, 4, 3, 3), Sample(5, 8, 3, 7), Sample(9, 12, 3, 11),
    ]  # fmt: skip
    assert ranges.occupied(log.session, TOPIC, [(-1, 0, 1), (-1, 12, 20), (-1, 11, 20)]) == {0, 2}
    assert ranges.occupied(log.session, TOPIC, [(0, 0, 1), (1, 0, 1), (2, 0, 12)]) == {0, 2}
    assert ranges.first(log.session, TOPIC, after=4, upto=8) == 5
    assert ranges.first(log.session, TOPIC, after=12, upto=18) is None


def test_a_range_is_cut_into_windows_of_events_and_of_time(log: Log) -> None:
    log.fill(5, at=NOON)
    log.fill(5, at=NOON + timedelta(hours=1))
    assert ranges.ends_of_events(log.session, TOPIC, after=1, upto=10, events=4) == [5, 9, 10]
    assert ranges.ends_of_periods(log.session, TOPIC, after=0, upto=10, seconds=3600) == [5, 10]
    assert [each[:3] for each in ranges.contents(log.session, TOPIC, [(0, 5), (5, 7)])] == [
        (5, 0, 2), (5, 1, 2), (5, 2, 1), (7, 0, 1), (7, 2, 1),
    ]  # fmt: skip


def test_the_publishers_of_a_range_are_those_that_its_events_name(log: Log) -> None:
    run = {"dagster_run_id": "r", "dagster_asset_key": "a", "dagster_partition": "p"}
    log.append(Publication(TOPIC, b"1"), *[Publication(TOPIC, b"2", metadata=run, partition=1)] * 2)
    found = ranges.publishers(log.session, TOPIC, partition=-1, after=0, upto=3)
    assert [each[:6] for each in found] == [(None, None, None, 1, 1, 1), ("r", "a", "p", 2, 2, 3)]
    found = ranges.publishers(log.session, TOPIC, partition=1, after=0, upto=2)
    assert [each[:6] for each in found] == [("r", "a", "p", 1, 2, 2)]
    published = NOON - timedelta(seconds=1)
    for partition, expected in (("p", (2, 2, 3, "r")), ("q", (0, None, None, None))):
        found_again = ranges.publication(
            log.session, TOPIC, after=0, at=published, asset="a", run_partition=partition, events=5
        )
        assert found_again == expected


# Segments


def test_a_log_is_read_over_the_borders_of_its_segments(log: Log) -> None:
    log.fill(10)
    log.fill(10)
    assert len(segments.segments(log.session, SCHEMA, TOPIC) or ()) > segments.SEGMENTS_AHEAD
    assert ids(reader.read(log.session, TOPIC, after=8, upto=12)) == [9, 10, 11, 12]
    assert reader.count(log.session, TOPIC) == 20
    assert segments.newest_id(log.session, SCHEMA, TOPIC) == 20


def test_a_dropped_segment_takes_its_events_along_and_keeps_the_ids(log: Log) -> None:
    log.fill(10)
    log.fill(5)
    log.drop_first_segment()
    assert reader.bounds(log.session, TOPIC) == (10, 15)
    assert reader.before_time(log.session, TOPIC, NOON - timedelta(days=1)) == 9
    log.fill(1)
    assert reader.end(log.session, TOPIC) == 16


# The log as a whole


def test_a_log_says_whether_it_holds_events(log: Log) -> None:
    assert not log_table.holds_events(log.session, SCHEMA, TOPIC)
    log.fill(1)
    assert log_table.holds_events(log.session, SCHEMA, TOPIC)


def test_the_log_of_a_deleted_topic_is_missing(log: Log) -> None:
    log.platform.registry.unregister_topic(TOPIC)
    with pytest.raises(TopicNotFoundError), log.platform.database.connection() as connection:
        reader.end(connection, TOPIC)


def test_a_role_without_the_right_to_read_a_log_is_refused(log: Log) -> None:
    log_table.check_readable(log.session, SCHEMA, TOPIC)
    log.session.execute("CREATE ROLE nobody_of_storage; GRANT USAGE ON SCHEMA eventsql TO nobody_of_storage")
    try:
        with log.session.transaction(force_rollback=True):
            log.session.execute("SET LOCAL ROLE nobody_of_storage")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                log_table.check_readable(log.session, SCHEMA, TOPIC)
    finally:
        log.session.execute("DROP OWNED BY nobody_of_storage; DROP ROLE nobody_of_storage")
