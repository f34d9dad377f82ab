"""Logs in blocks: what a range of them holds is what the same events in rows hold, whatever the blocks are like."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import NOT_PARTITIONED, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, migrations
from eventsql_orchestration.database.binary import microseconds
from eventsql_orchestration.errors import BrokenBlockError, RedefinitionError, ValidationError
from eventsql_orchestration.model import OffsetRange, Storage
from eventsql_orchestration.publishing import block_format, copy_format
from eventsql_orchestration.publishing.block_format import encode_blocks
from eventsql_orchestration.storage import copy_out, log_form, log_table, reading, segments
from eventsql_orchestration.storage.appending import LogAppender
from eventsql_orchestration.storage.compacting import LogCompactor
from eventsql_orchestration.storage.log_form import MOST_IDS
from eventsql_orchestration.storage.metrics import LogMetrics, Place
from eventsql_orchestration.storage.ranges import LogRanges
from eventsql_orchestration.storage.reading import MAX_OFFSET, LogReader
from tests.fixtures import Sessions
from tests.refusals import check_refused

SCHEMA = "eventsql"
NOON = datetime(2024, 3, 1, 12, tzinfo=UTC)
PARTITIONS = 3

appender, reader, ranges = LogAppender(SCHEMA), LogReader(SCHEMA), LogRanges(SCHEMA)
compactor = LogCompactor(SCHEMA, "blocks")


def publication(number: int, partition: int, rng: random.Random) -> Publication:
    run = {"dagster_run_id": rng.choice("ab"), "dagster_asset_key": "x"} if rng.random() < 0.3 else {}
    key = rng.choice([None, "", "k", "ä" * 9])
    return Publication("blocks", b"%d" % number * rng.choice([0, 1, 40]), key=key, metadata=run, partition=partition)


def fill(platform: EventSQL, session: Connection, rng: random.Random, blocks: int, *, start: int) -> int:
    """Append the same events with the same ids after `start` to the topics `blocks` and `rows`; gives their number."""
    for name in ("blocks", "rows"):
        platform.registry.register_topic(Topic(name, PARTITIONS, storage="blocks" if name == "blocks" else "rows"))
        if start > 0:
            sequence = f"eventsql.{log_form.stored_table(session, SCHEMA, name)}_eql_id_seq"
            session.execute("SELECT setval(%s, %s)", [sequence, start])
    written = 0
    for hour in range(blocks):
        partition, events = rng.randrange(PARTITIONS), rng.choice([1, 1, 2, 7, 30])
        own = [publication(written + each, partition, rng) for each in range(events)]
        now = microseconds(NOON + timedelta(hours=hour))
        for name in ("blocks", "rows"):
            with session.transaction():
                segments.ensure_ahead(session, SCHEMA, name)
                if name == "blocks":
                    (block,) = encode_blocks(own, [partition] * events)
                    first = appender.draw(session, name, events, after=0)
                    encoded = block.row(first, now - 5, now)
                else:
                    prefix = copy_format.log_prefix(now - 5, now)
                    encoded = b"".join(prefix + copy_format.encode(each, partition) for each in own)
                appender.append(session, name, [copy_format.HEADER, encoded, copy_format.TRAILER])
        written += events
    return written


@pytest.fixture
def both(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Both:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 50)
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 2)
    seed, compacted, start = request.param
    rng = random.Random(seed)
    both = Both(session, rng, start, start + fill(platform, session, rng, blocks=30, start=start))
    if compacted:
        # Blocks of three partitions with gaps, beside others that stay.
        for after in range(start + rng.randrange(20), both.end, 70):
            of = rng.sample(range(PARTITIONS), rng.randrange(1, PARTITIONS + 1))
            with session.transaction():
                merged = compactor.merge(session, after=after, upto=after + rng.randrange(1, 70), partitions=of)
            assert merged.events == merged.kept
        assert session.execute("SELECT count(*) > 0 FROM eventsql.blocks_block WHERE eql_span > 0").fetchone() == (
            True,
        )
    assert log_table.broken_blocks(session, SCHEMA, "blocks") == []
    return both


@dataclass
class Both:
    """The topics `blocks` and `rows` with the same events, and random ranges of them."""

    session: Connection
    rng: random.Random
    start: int
    end: int

    def same(self, ask: Callable[..., object], *given: object, **named: object) -> None:
        answers = [ask(self.session, topic, *given, **named) for topic in ("blocks", "rows")]
        assert answers[0] == answers[1]

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Partitions with the offsets after and up to which something is asked."""
        for _ in range(40):
            after = self.start + self.rng.randrange(-1, self.end - self.start + 3)
            upto = self.rng.choice([MAX_OFFSET, after + self.rng.randrange(-2, 60)])
            yield self.rng.randrange(-1, PARTITIONS + 1), after, upto


def content(session: Connection, topic: str, **wanted: Any) -> list[object]:
    return [
        (each.id, each.partition, each.key, each.value, each.buffered_at, each.created_at, each.metadata)
        for each in reader.read(session, topic, **wanted)
    ]


def waiting(session: Connection, topic: str, **wanted: Any) -> tuple[object, ...]:
    """All but the seconds, which pass."""
    return reader.waiting(session, topic, **wanted)[:2]


def is_behind(session: Connection, topic: str, **wanted: Any) -> bool:
    return reader.seconds_behind(session, topic, **wanted) is not None


def left(session: Connection, topic: str, *places: Place) -> dict[Place, object]:
    """All but the seconds, which pass."""
    logs = LogMetrics(SCHEMA)
    ends = logs.ends(session, topic, {partition for partition, _ in places})
    found = logs.waiting(session, topic, places, ends)
    return {place: (each.events, each.total, each.furthest, each.first) for place, each in found.items()}


def in_sql(session: Connection, topic: str, after: int, upto: int) -> list[object]:
    columns = "eql_id, eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata::text"
    view = sql.SQL(f"SELECT {columns} FROM {{}} WHERE eql_id > %s AND eql_id <= %s ORDER BY eql_id")
    shown = session.execute(view.format(log_table.identifier(SCHEMA, topic)), (after, upto)).fetchall()
    function = f"SELECT {columns} FROM eventsql.events(%s, %s, %s)"
    assert shown == session.execute(function, (topic, after, upto)).fetchall()
    return list(shown)


def copied(
    session: Connection, topic: str, offsets: tuple[int, int, int], columns: list[str], rows: list[str]
) -> object:
    table = log_form.stored_table(session, SCHEMA, topic)
    query = copy_out.range_query(SCHEMA, table, OffsetRange("topic", *offsets), columns, rows=rows)
    # Without values, so that nothing in the query is a placeholder.
    return session.execute(query.encode()).fetchall()


SEEDS = pytest.mark.parametrize(
    "both",
    [
        (0, False, 0),
        (1, True, 0),
        (2, True, 2**63 - 1_000),
        *(pytest.param(both, marks=pytest.mark.nightly) for both in ((1, False, 0), (0, True, 0), (2, True, 0))),
    ],
    indirect=True,
)
"""Each with a random log, compacted or not, from the first id on or with the largest ids."""


@SEEDS
def test_events_of_a_range_are_read_and_counted_alike_in_both_forms(both: Both) -> None:
    both.same(reader.bounds)
    both.same(content)
    for partition, after, upto in both.ranges():
        n = both.rng.choice([1, 2, 3, 8, 31, 90])
        bounds = {"partition": partition, "after": after, "upto": upto}
        both.same(content, **bounds)
        both.same(content, **bounds, limit=n)
        both.same(reader.count, **bounds)
        both.same(reader.count, **bounds, most=n)
        both.same(reader.extent, **bounds)
        both.same(waiting, **bounds, limit=n)
        both.same(reader.nth, n, **bounds)
        both.same(reader.nth_before, n, partition=partition, offset=after)
        both.same(reader.end, partition)
        both.same(reader.before_time, NOON + timedelta(minutes=both.rng.randrange(-60, 32 * 60)))
        both.same(is_behind, partition=partition, after=after)
    both.same(left, *((partition, after) for partition, after, _ in both.ranges()))
    both.same(LogMetrics(SCHEMA).ends, range(-1, PARTITIONS + 1))


@SEEDS
def test_the_batches_of_a_range_are_together_its_events(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    for partition, after, upto in islice(both.ranges(), 15):
        limit = both.rng.choice([1, 3, 31, 90])
        monkeypatch.setattr(reading, "BATCH_BYTES", both.rng.choice([1, 100, 1_000]))
        monkeypatch.setattr(reading, "_FIRST_BLOCKS", both.rng.choice([1, 64]))
        for topic in ("blocks", "rows"):
            events, more = list[Event](), True
            while more:
                place = events[-1].id if events else after
                batch, more = reader.read_batch(
                    both.session, topic, partition=partition, after=place, upto=upto, limit=limit
                )
                # Whoever is told that there may be more goes on after the last event.
                assert batch or not more
                assert len(batch) <= limit
                events += batch
            assert events == reader.read(both.session, topic, partition=partition, after=after, upto=upto)


def test_a_value_counts_with_the_bytes_that_it_has_when_it_is_read(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server compresses these values to 12 KiB each."""
    platform.registry.register_topic(Topic("orders", 1, storage="blocks"))
    for _ in range(3):
        platform.publisher.publish(Publication("orders", b"v" * 3_000_000))
        platform.transfer.run_once()
    monkeypatch.setattr(reading, "BATCH_BYTES", 5_000_000)
    for partition in (0, NOT_PARTITIONED):
        events, more = reader.read_batch(session, "orders", partition=partition, after=0, upto=MAX_OFFSET, limit=100)
        assert (len(events), more) == (2, True)


def test_events_are_found_by_their_ids_though_the_events_between_them_end_batches(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.registry.register_topic(Topic("orders", 1, storage="blocks"))
    for _ in range(6):
        platform.publisher.publish_all([Publication("orders", b"v" * 1_000)] * 10)
        platform.transfer.run_once()
    monkeypatch.setattr(reading, "BATCH_BYTES", 15_000)
    ids = list(range(1, 60, 9))
    for partition in (0, NOT_PARTITIONED):
        assert [event.id for event in reader.read_ids(session, "orders", ids, partition=partition)] == ids


def test_compressed_blocks_count_as_they_are_read_before_a_batch_goes_on(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server compresses the 400,000 bytes of each block to 5 KiB."""
    platform.registry.register_topic(Topic("orders", 1, storage="blocks", compression="pglz"))
    for _ in range(8):
        platform.publisher.publish_all([Publication("orders", b"v" * 40_000)] * 10)
        platform.transfer.run_once()
    monkeypatch.setattr(reading, "BATCH_BYTES", 1_000_000)
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 2)
    for partition in (0, NOT_PARTITIONED):
        events, more = reader.read_batch(session, "orders", partition=partition, after=0, upto=80, limit=1_000)
        assert (len(events), more) == (30, True)
        rest, more = reader.read_batch(session, "orders", partition=partition, after=30, upto=80, limit=1_000)
        assert (rest[0].id, len(rest), more) == (31, 30, True)
        rest, more = reader.read_batch(session, "orders", partition=partition, after=60, upto=80, limit=1_000)
        assert (rest[0].id, len(rest), more) == (61, 20, False)
    # The blocks of the first look are enough.
    monkeypatch.setattr(reading, "BATCH_BYTES", 700_000)
    for partition in (0, NOT_PARTITIONED):
        events, more = reader.read_batch(session, "orders", partition=partition, after=0, upto=80, limit=1_000)
        assert (len(events), more) == (20, True)


@SEEDS
def test_ranges_of_offsets_hold_the_same_in_both_forms(both: Both) -> None:
    rng = both.rng
    for partition, after, upto in both.ranges():
        n = rng.choice([1, 2, 3, 8, 31, 90])
        cuts = [both.start + rng.randrange(both.end - both.start + 5) for _ in range(4)]
        parts = list(pairwise(sorted({both.start, both.end, *cuts})))
        both.same(ranges.firsts, partition, parts)
        both.same(ranges.samples, partition, parts, sample=n)
        both.same(ranges.contents, parts)
        both.same(ranges.occupied, [(partition, low, high) for low, high in parts])
        span = {"after": after, "upto": min(upto, both.end + 7)}
        both.same(ranges.first, **span)
        both.same(ranges.ends_of_events, **span, events=n)
        both.same(ranges.ends_of_periods, **span, seconds=7200)
        both.same(ranges.publishers, partition=partition, **span)
        published = NOON + timedelta(hours=rng.randrange(30)) - timedelta(microseconds=5)
        both.same(ranges.publication, after=after, at=published, asset="x", run_partition=None, events=5)


@SEEDS
def test_sql_and_copies_give_the_same_events_in_both_forms(both: Both) -> None:
    for partition, after, upto in both.ranges():
        both.same(in_sql, after, upto)
        columns = both.rng.sample(
            ["key", "value", "partition", "offset", "timestamp", "headers"], both.rng.randrange(1, 7)
        )
        rows: list[str] = both.rng.choice([[], ["eql_key = 'k'"], ["eql_value = ''"]])
        # The blocks of a whole topic may lie between each other.
        both.same(copied, (max(partition, 0), max(after, 0), max(upto, after, 0)), columns, rows)


def test_a_publication_of_many_events_is_a_block_for_each_partition(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 3, storage="blocks"))
    platform.publisher.publish_all([Publication("orders", b"%d" % each, partition=each % 3) for each in range(90)])
    assert session.execute("SELECT eql_partition, eql_events FROM eventsql.orders_block ORDER BY 1").fetchall() == [
        (0, 30), (1, 30), (2, 30),
    ]  # fmt: skip
    for partition in range(3):
        values = [event.value for event in platform.reader.read("orders", partition=partition)]
        assert values == [b"%d" % each for each in range(partition, 90, 3)]


def test_buffered_events_become_blocks_in_the_order_of_their_partition(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    for each in range(5):
        platform.publisher.publish(Publication("orders", b"%d" % each, key="k" if each == 2 else None))
    platform.transfer.run_once()
    assert [event.value for event in platform.reader.read("orders")] == [b"0", b"1", b"2", b"3", b"4"]
    found = session.execute("SELECT eql_events, cardinality(eql_times), eql_metadata FROM eventsql.orders_block")
    assert found.fetchall() == [(5, 5, None)]


def test_a_block_is_bounded_in_events_and_bytes() -> None:
    small = [Publication("t", b"") for _ in range(block_format.MOST_EVENTS + 1)]
    large = [Publication("t", b"x" * (block_format.MOST_BYTES // 2 + 1)) for _ in range(3)]
    huge = [Publication("t", b"1"), Publication("t", b"x" * (2 * block_format.MOST_BYTES)), Publication("t", b"2")]
    for events, sizes in ((small, [block_format.MOST_EVENTS, 1]), (large, [1, 1, 1]), (huge, [1, 1, 1])):
        assert [block.events for block in encode_blocks(events, [0] * len(events))] == sizes


BROKEN = {
    "a wrong number of events": "UPDATE eventsql.orders_block SET eql_events = 4",
    "cut values": "UPDATE eventsql.orders_block SET eql_values = eql_values[1:2]",
    "cut keys": "UPDATE eventsql.orders_block SET eql_keys = eql_keys[1:2]",
    "a missing value": "UPDATE eventsql.orders_block SET eql_values[2] = NULL",
    "another first index": "UPDATE eventsql.orders_block SET eql_keys = '[0:2]={a,b,c}'",
    "no events": "UPDATE eventsql.orders_block SET eql_events = 0, eql_values = '{}', eql_keys = NULL",
    "ids below 1": "UPDATE eventsql.orders_block SET eql_id = 2",
}


def test_the_server_refuses_a_forged_block(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    for each in range(3):
        platform.publisher.publish(Publication("orders", b"v%d" % each, key="k"))
    platform.transfer.run_once()
    check_refused(session, BROKEN.values(), psycopg.errors.CheckViolation)


def test_a_damaged_block_stops_reading_loudly(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    for each in range(3):
        platform.publisher.publish(Publication("orders", b"v%d" % each))
    platform.transfer.run_once()
    session.execute("ALTER TABLE eventsql.orders_block DROP CONSTRAINT eql_whole_values")
    session.execute("UPDATE eventsql.orders_block SET eql_values = eql_values[1:2]")
    assert [(each.offset, each.partition) for each in log_table.broken_blocks(session, SCHEMA, "orders")] == [(3, -1)]
    with pytest.raises(BrokenBlockError) as caught:
        platform.reader.read("orders")
    assert (caught.value.topic, caught.value.partition, caught.value.first) == ("orders", -1, 1)


def test_a_damaged_block_without_a_first_value_is_not_left_out(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    platform.publisher.publish(Publication("orders", b"v" * 3_000_000))
    platform.transfer.run_once()
    session.execute("ALTER TABLE eventsql.orders_block DROP CONSTRAINT eql_whole_values")
    session.execute("ALTER TABLE eventsql.orders_block ALTER COLUMN eql_values SET STORAGE EXTENDED")
    (value,) = session.execute("SELECT eql_values FROM eventsql.orders_block").fetchone() or ()
    session.execute("UPDATE eventsql.orders_block SET eql_values = '{}'")
    session.execute("UPDATE eventsql.orders_block SET eql_values[5:6] = %s", [value * 2])
    with pytest.raises(BrokenBlockError):
        platform.reader.read("orders")


def test_overlapping_blocks_and_foreign_partitions_are_found(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", 2, storage="blocks"))
    platform.publisher.publish_all([Publication("orders", b"v", partition=each % 2) for each in range(60)])
    assert log_table.broken_blocks(session, SCHEMA, "orders") == []
    session.execute("UPDATE eventsql.orders_block SET eql_id = 55 WHERE eql_id = 60")
    session.execute("UPDATE eventsql.orders_block SET eql_partition = 7 WHERE eql_id = 30")
    assert [(each.offset, each.partition) for each in log_table.broken_blocks(session, SCHEMA, "orders")] == [
        (30, 7), (55, 1),
    ]  # fmt: skip


def test_a_program_that_knows_no_blocks_is_refused(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        session.execute("INSERT INTO eventsql.orders_event (eql_partition, eql_value) VALUES (-1, 'x')")


def test_a_topic_made_anew_in_the_other_form_is_read_and_written_in_it(platform: EventSQL) -> None:
    forms: tuple[Storage, ...] = ("blocks", "rows", "blocks")
    for storage in forms:
        platform.registry.register_topic(Topic("orders", storage=storage))
        platform.publisher.publish_all([Publication("orders", storage.encode())] * 60)
        assert [event.value for event in platform.reader.read("orders")] == [storage.encode()] * 60
        assert platform.registry.topic("orders").storage == storage
        platform.registry.unregister_topic("orders", force=True)


def test_a_publisher_with_an_old_definition_publishes_to_the_new_form(
    platform: EventSQL, dsn: str, request: pytest.FixtureRequest
) -> None:
    other = EventSQL(dsn, transfer=False)
    request.addfinalizer(other.close)
    platform.registry.register_topic(Topic("orders", storage="rows"))
    other.publisher.publish_all([Publication("orders", b"old")] * 60)
    platform.registry.unregister_topic("orders", force=True)
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    other.publisher.publish_all([Publication("orders", b"new")] * 60)
    platform.transfer.run_once()
    assert [event.value for event in platform.reader.read("orders")] == [b"new"] * 60


def test_the_form_of_a_topic_stays(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    platform.registry.register_topic(Topic("orders"))
    assert platform.registry.topic("orders").storage == "blocks"
    with pytest.raises(RedefinitionError):
        platform.registry.register_topic(Topic("orders", storage="rows"))


def test_an_unknown_form_and_dead_letters_in_blocks_are_refused() -> None:
    for name, storage in (("orders", "columns"), ("orders_dlt", "blocks")):
        with pytest.raises(ValidationError):
            Topic(name, storage=storage)  # type: ignore[arg-type]  # refused


def test_a_writer_that_is_killed_within_a_block_leaves_nothing(platform: EventSQL, sessions: Sessions) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    writer = sessions()
    (block,) = islice(encode_blocks([Publication("orders", b"x" * 1000)] * 900, [-1] * 900), 1)

    def rows() -> Iterator[bytes]:
        yield copy_format.HEADER + block.row(first, 0, 0)[:500_000]
        sessions().execute("SELECT pg_terminate_backend(%s)", (writer.info.backend_pid,))
        yield b"x" * 400_000

    with pytest.raises(psycopg.Error), writer.transaction():
        first = appender.draw(writer, "orders", 900, after=0)
        appender.append(writer, "orders", rows())
    assert platform.reader.read("orders") == []
    platform.publisher.publish_all([Publication("orders", b"after")] * 60)
    assert [event.id for event in platform.reader.read("orders")] == list(range(901, 961))


def test_an_upgrade_gives_logs_in_blocks_the_columns_of_gaps(platform: EventSQL, session: Connection, dsn: str) -> None:
    platform.registry.register_topic(Topic("orders", 2, storage="blocks"))
    for each in range(8):
        platform.publisher.publish(Publication("orders", b"%d" % each, partition=each % 2))
        platform.transfer.run_once()
    before = platform.reader.read("orders")
    session.execute("DROP VIEW eventsql.orders_event")
    session.execute(
        "ALTER TABLE eventsql.orders_block DROP COLUMN eql_span CASCADE, DROP COLUMN eql_places CASCADE, "
        "DROP COLUMN eql_entered CASCADE"
    )
    session.execute(
        "CREATE VIEW eventsql.orders_event AS SELECT b.eql_id - b.eql_events + e.number AS eql_id, b.eql_partition, "
        "e.key AS eql_key, e.value AS eql_value, coalesce(e.published, b.eql_buffered_at) AS eql_buffered_at, "
        "b.eql_created_at, coalesce(e.metadata, '{}'::json) AS eql_metadata FROM eventsql.orders_block b "
        "CROSS JOIN LATERAL unnest(b.eql_values, b.eql_keys, b.eql_metadata, b.eql_times) "
        "WITH ORDINALITY AS e (value, key, metadata, published, number)"
    )
    session.execute("UPDATE eventsql.schema_version SET version_num = '0029'")
    engine = platform.database.engine.execution_options(isolation_level="READ COMMITTED")
    migrations.upgrade(engine.connect(), SCHEMA, to="0030")
    # What later revisions make is there.
    session.execute(f"UPDATE eventsql.schema_version SET version_num = '{migrations.HEAD}'".encode())
    with EventSQL(dsn, transfer=False) as upgraded:
        upgraded.open()
        compacted = LogCompactor(SCHEMA, "orders").merge(session, after=0, upto=8, partitions=[0, 1])
        assert (compacted.blocks, compacted.into) == (8, 2)
        assert [event.value for event in upgraded.reader.read("orders")] == [event.value for event in before]
    assert log_table.broken_blocks(session, SCHEMA, "orders") == []


WIDE = "UPDATE eventsql.orders_block SET eql_id = 30000, eql_span = {0}, eql_places = '{{1,2,{0}}}'"

GAPPED = {
    "no places": "UPDATE eventsql.orders_block SET eql_span = 9",
    "places before the first": "UPDATE eventsql.orders_block SET eql_span = 9, eql_places = '{0,4,9}'",
    "places behind the last": "UPDATE eventsql.orders_block SET eql_span = 9, eql_places = '{1,4,10}'",
    "too few places": "UPDATE eventsql.orders_block SET eql_span = 9, eql_places = '{1,9}'",
    "too wide": WIDE.format(MOST_IDS + 1),
    "cut times": "UPDATE eventsql.orders_block SET eql_entered = '{2024-01-01}'",
}


def test_the_server_refuses_a_forged_block_with_gaps(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    platform.publisher.publish_all([Publication("orders", b"v")] * 3)
    platform.transfer.run_once()
    session.execute("UPDATE eventsql.orders_block SET eql_id = eql_id + 100")
    check_refused(session, GAPPED.values(), psycopg.errors.CheckViolation)


def test_both_ends_of_the_widest_block_are_read(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    platform.publisher.publish_all([Publication("orders", b"v")] * 3)
    platform.transfer.run_once()
    session.execute(WIDE.format(MOST_IDS).encode())
    first = 30_001 - MOST_IDS
    assert [event.id for event in platform.reader.read("orders")] == [first, first + 1, 30_000]
    for place in (first, 30_000):
        assert [event.id for event in platform.reader.read("orders", after=place - 1, upto=place)] == [place]
        assert copied(session, "orders", (NOT_PARTITIONED, place - 1, place), ["offset"], []) == [(place,)]


def test_places_that_do_not_ascend_stop_reading_loudly(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    platform.publisher.publish_all([Publication("orders", b"v")] * 4)
    platform.transfer.run_once()
    session.execute("UPDATE eventsql.orders_block SET eql_id = 100, eql_span = 9, eql_places = '{1,5,5,9}'")
    assert [each.offset for each in log_table.broken_blocks(session, SCHEMA, "orders")] == [100]
    with pytest.raises(BrokenBlockError):
        platform.reader.read("orders")
