"""Compaction: small blocks become larger ones, and nobody who reads, erases or drops events beside it notices."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration import Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseError, RegistryError
from eventsql_orchestration.maintenance import compaction
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.storage import compacting, copy_out, exchanging, log_form, log_table, reading, segments
from eventsql_orchestration.storage.erasing import try_change
from eventsql_orchestration.storage.exchanging import Exchange
from eventsql_orchestration.storage.segment_drops import try_retain
from eventsql_orchestration.threads import in_thread
from tests.fixtures import Sessions, Terminate, Until, UntilBlocked
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

SCHEMA = "eventsql"
PARTITIONS = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "WINDOW_IDS", 30)
    monkeypatch.setattr(compaction, "RETRY_SECONDS", 0.0)


def publish_singly(platform: EventSQL, events: int, *, first: int = 0, partitions: int = PARTITIONS) -> None:
    """Publish and transfer events one by one: each becomes a block."""
    for each in range(first, first + events):
        partition = each * 7 % partitions if partitions > 0 else None
        platform.publisher.publish(Publication("orders", b"%d" % each, key=f"k{each % 5}", partition=partition))
        platform.transfer.run_once()


def content(events: list[Event]) -> list[tuple[object, ...]]:
    return [(e.id, e.partition, e.key, e.value, e.buffered_at, e.created_at, e.metadata) for e in events]


def blocks(session: Connection) -> int:
    row = session.execute("SELECT count(*) FROM eventsql.orders_block").fetchone()
    assert row is not None
    return int(row[0])


def prepare(platform: EventSQL, partitions: int) -> None:
    platform.registry.register_topic(Topic("orders", partitions, storage="blocks"))
    publish_singly(platform, 100, partitions=partitions)


@pytest.fixture(
    params=[
        pytest.param(None, marks=pytest.mark.prepared.with_args(prepare, PARTITIONS), id="partitioned"),
        pytest.param(None, marks=pytest.mark.prepared.with_args(prepare, -1), id="whole"),
    ]
)
def single(platform: EventSQL) -> EventSQL:
    """A platform whose topic `orders` has a block for each of 100 events."""
    return platform


def test_a_compacted_log_has_the_same_events_in_fewer_blocks(single: EventSQL, session: Connection) -> None:
    before = content(single.reader.read("orders"))
    plan = single.compactor.plan("orders")
    assert (plan.blocks, plan.events, plan.into, blocks(session)) == (90, 90, None, 100)
    done = single.compactor.execute("orders")
    assert (done.blocks, done.events) == (90, 90)
    assert done.into is not None
    assert blocks(session) == 10 + done.into < 20
    assert content(single.reader.read("orders")) == before
    assert log_table.broken_blocks(session, SCHEMA, "orders") == []
    again = single.compactor.execute("orders")
    assert (again.blocks, again.into) == (0, 0)


def test_a_compacted_block_has_no_more_ids_than_a_window(single: EventSQL, session: Connection) -> None:
    for _ in range(20):
        single.publisher.publish_all([Publication("orders", b"", key="k")] * 7)
        single.transfer.run_once()
    before = content(single.reader.read("orders"))
    assert single.compactor.execute("orders").blocks > 100
    longer = "SELECT eql_id FROM eventsql.orders_block WHERE coalesce(eql_span, eql_events) > 30"
    assert session.execute(longer).fetchall() == []
    assert content(single.reader.read("orders")) == before


def test_events_between_which_one_id_is_missing_keep_their_ids(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    publish_singly(platform, 5, partitions=-1)
    session.execute("SELECT nextval('eventsql.orders_block_eql_id_seq')")
    publish_singly(platform, 30, first=5, partitions=-1)
    before = content(platform.reader.read("orders"))
    done = platform.compactor.execute("orders")
    assert (done.blocks, done.into, done.unmerged) == (29, 1, ())
    assert content(platform.reader.read("orders")) == before


def test_a_log_whose_ids_come_to_their_end_is_compacted(single: EventSQL, session: Connection) -> None:
    session.execute("SELECT setval('eventsql.orders_block_eql_id_seq', %s)", [2**63 - 80])
    session.execute("SELECT eventsql.make_segments('orders', 100, 1)")
    publish_singly(single, 70, partitions=single.registry.topic("orders").partitions)
    before = content(single.reader.read("orders"))
    assert single.compactor.execute("orders").blocks > 90
    assert content(single.reader.read("orders")) == before


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_readers_of_any_batch_size_see_each_event_once_and_in_order_while_it_is_compacted(
    single: EventSQL, limit: int
) -> None:
    whole = content(single.reader.read("orders"))
    found: list[Event] = []
    compacted = None
    while batch := single.reader.read("orders", after=found[-1].id if found else 0, limit=limit):
        found += batch
        if compacted is None and len(found) > 20:
            compacted = single.compactor.execute("orders")
    assert compacted is not None
    assert compacted.blocks == 90
    assert content(found) == whole


def test_a_batch_does_not_end_where_ids_are_missing(single: EventSQL, session: Connection) -> None:
    session.execute("SELECT setval('eventsql.orders_block_eql_id_seq', 150)")
    publish_singly(single, 50, partitions=single.registry.topic("orders").partitions)
    single.compactor.execute("orders")
    whole = [event.id for event in single.reader.read("orders")]
    reader = reading.LogReader(SCHEMA)
    for after in (85, 95, 99):
        events, more = reader.read_batch(
            session, "orders", partition=NOT_PARTITIONED, after=after, upto=reading.MAX_OFFSET, limit=20
        )
        assert ([event.id for event in events], more) == (whole[after : after + 20], True)


def test_a_range_within_the_gaps_of_many_blocks_has_its_events(
    single: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 2)
    whole = [event.id for event in single.reader.read("orders")]
    single.compactor.execute("orders")
    for after in range(100):
        for upto in (after + 1, after + 4):
            found = [event.id for event in single.reader.read("orders", after=after, upto=upto, limit=3)]
            assert found == [each for each in whole if after < each <= upto][:3]


def test_a_snapshot_that_is_open_meanwhile_has_each_event_once(
    single: EventSQL, session: Connection, sessions: Sessions
) -> None:
    reader = sessions()
    count = "SELECT count(*), count(DISTINCT eql_id) FROM eventsql.orders_event"
    with reader.transaction():
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert reader.execute(count).fetchone() == (100, 100)
        single.compactor.execute("orders")
        assert reader.execute(count).fetchone() == (100, 100)
    assert session.execute(count).fetchone() == (100, 100)


def test_an_interrupted_window_stays_as_it_was(
    single: EventSQL, session: Connection, sessions: Sessions, terminate: Terminate
) -> None:
    before = content(single.reader.read("orders"))
    compactor = compacting.LogCompactor(SCHEMA, "orders")
    killed = sessions()
    with pytest.raises(psycopg.OperationalError), killed.transaction():
        window = compactor.window(killed, after=0, upto=60)
        assert window.upto is not None
        compactor.merge(killed, after=0, upto=window.upto, partitions=window.partitions)
        terminate(killed)
        killed.execute("SELECT 1")
    assert blocks(session) == 100
    single.compactor.execute("orders")
    assert content(single.reader.read("orders")) == before


def test_a_session_that_ends_with_one_topic_keeps_no_other_from_its_compaction(
    single: EventSQL, session: Connection, sessions: Sessions, until: Until
) -> None:
    single.registry.register_topic(Topic("invoices", storage="blocks"))
    for _ in range(40):
        single.publisher.publish(Publication("invoices", b""))
        single.transfer.run_once()
    sessions().execute("SELECT FROM eventsql.invoices_block WHERE eql_id = 5 FOR UPDATE")
    ended = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with ThreadPoolExecutor(1) as executor:
        compacted = executor.submit(single.shards[0].compactor.run_once)
        until(lambda: session.execute(ended).rowcount == 1)
        assert [(each.topic, each.blocks) for each in compacted.result()] == [("orders", 90)]


@pytest.mark.parametrize("keep_away", [try_change, try_retain], ids=["erasure", "retention"])
def test_it_waits_for_an_erasure_and_for_a_retention(
    single: EventSQL, sessions: Sessions, keep_away: Callable[[Connection, str, str], bool]
) -> None:
    with sessions() as other, other.transaction():
        assert keep_away(other, SCHEMA, "orders")
        with pytest.raises(DatabaseBusyError):
            single.compactor.execute("orders")
    assert single.compactor.execute("orders").blocks > 0


def test_erased_events_stay_erased(single: EventSQL) -> None:
    single.eraser.execute("orders", ["k1"])
    single.compactor.execute("orders")
    single.eraser.execute("orders", ["k2"])
    found = single.reader.read("orders")
    assert {event.key for event in found if event.erased} == {"k1", "k2"}
    assert sum(event.erased for event in found) == 40
    assert {event.value for event in found if event.erased} == {None}


def test_no_block_lies_on_both_sides_of_a_repartitioning(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", PARTITIONS, storage="blocks"))
    publish_singly(platform, 45)
    platform.repartitioner.repartition("orders", 2)
    publish_singly(platform, 45, first=45, partitions=2)
    platform.compactor.execute("orders")
    border = session.execute("SELECT max(eql_after) FROM eventsql.topic_layout").fetchone()
    straddling = "SELECT FROM eventsql.orders_block WHERE eql_id > %s AND eql_id - coalesce(eql_span, eql_events) < %s"
    assert border is not None
    assert session.execute(straddling, (border[0], border[0])).fetchall() == []
    assert blocks(session) < 45
    values = sorted(int(event.value) for event in platform.reader.read("orders"))
    assert values == list(range(90))


def test_a_range_that_a_task_of_spark_reads_holds_the_same_before_and_after(
    single: EventSQL, session: Connection
) -> None:
    def read() -> list[object]:
        found: list[object] = []
        for partition in range(-1, PARTITIONS):
            for after in range(0, 100, 17):
                offsets = OffsetRange("orders", partition, after, after + 17)
                query = copy_out.range_query(SCHEMA, "orders_block", offsets, ["offset", "value", "key"])
                found.append(sorted(session.execute(query.encode()).fetchall()))
        return found

    before = read()
    single.compactor.execute("orders")
    assert read() == before


def test_consuming_in_sql_finds_the_same_before_and_after(single: EventSQL, session: Connection) -> None:
    ranges = ((0, 1000, 7), (1, 1000, 1), (13, 61, 100), (29, 30, 1), (55, 1000, 20), (88, 95, 3))

    def find() -> list[object]:
        found: list[object] = []
        for partition in range(-1, PARTITIONS):
            for after, upto, most in ranges:
                waiting = "SELECT * FROM eventsql.partition_waiting('orders', %s::smallint, %s, %s, %s)"
                events = "SELECT id, value FROM eventsql.partition_events('orders', %s::smallint, %s, %s)"
                found.append(session.execute(waiting, (partition, after, upto, most)).fetchall())
                found.append(session.execute(events, (partition, after, upto)).fetchall())
        return found

    before = find()
    single.compactor.execute("orders")
    assert find() == before


def test_a_broken_block_keeps_its_partition_in_its_window_and_nothing_else(
    platform: EventSQL, session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    platform.registry.register_topic(Topic("orders", PARTITIONS, storage="blocks"))
    publish_singly(platform, 100)
    session.execute("ALTER TABLE eventsql.orders_block DROP CONSTRAINT eql_whole_values")
    session.execute("UPDATE eventsql.orders_block SET eql_values = '{a,b}' WHERE eql_id = 5")
    partition = 4 * 7 % PARTITIONS
    before = content(platform.reader.read("orders", after=5))
    done = platform.compactor.execute("orders")
    (left,) = done.unmerged
    assert left == compaction.Unmerged(partition, 0, 30)
    assert done.blocks == done.events == 90 - 10
    assert f"partition {partition}" in caplog.text
    kept = session.execute(
        "SELECT array_agg(eql_id ORDER BY eql_id) FROM eventsql.orders_block WHERE eql_id <= 30 AND eql_events = 1"
    )
    ids = [each for each in range(1, 31) if (each - 1) * 7 % PARTITIONS == partition]
    assert kept.fetchone() == (ids,)
    assert content(platform.reader.read("orders", after=5)) == before


def test_a_largest_block_that_cannot_be_read_keeps_its_partition_in_its_window_and_nothing_else(
    platform: EventSQL, session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    platform.registry.register_topic(Topic("orders", 2, storage="blocks", compression="none"))
    for each in range(100):
        value = os.urandom(9_000 if each == 0 else 3_000)
        platform.publisher.publish(Publication("orders", value, partition=each % 2))
        platform.transfer.run_once()
    (toast,) = one(session, "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = %s", table_of(session))
    session.execute("SET allow_system_table_mods TO on")
    # As after a write that the disk lost. A TOAST table cannot be changed otherwise.
    changed = "UPDATE pg_class SET relkind = %s WHERE oid = %s::regclass"
    session.execute(changed, ["r", toast])
    session.execute(f"DELETE FROM {toast} WHERE chunk_id = (SELECT min(chunk_id) FROM {toast}) AND chunk_seq = 1")
    session.execute(changed, ["t", toast])

    done = platform.compactor.execute("orders")
    assert done.unmerged == (compaction.Unmerged(0, 0, 30),)
    assert done.blocks == 90 - 15
    assert "partition 0" in caplog.text


@pytest.mark.parametrize("fields", [{"value": b"\0" * 200_000}, {"value": b"", "metadata": {"note": "x" * 200_000}}])
def test_full_blocks_are_left_alone_however_small_they_are_on_the_disk(
    platform: EventSQL, fields: dict[str, Any]
) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="pglz"))
    platform.publisher.publish_all([Publication("orders", **fields)] * 60)
    platform.transfer.run_once()
    assert (platform.compactor.plan("orders").blocks, platform.compactor.execute("orders").blocks) == (0, 0)


def test_a_block_that_is_larger_than_a_window_keeps_no_others_from_their_merge(
    platform: EventSQL, session: Connection
) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="none"))
    publish_singly(platform, 62, partitions=-1)
    session.execute(
        "UPDATE eventsql.orders_block SET eql_values = ARRAY[decode(repeat('00', 33554432), 'hex')] WHERE eql_id = 31"
    )
    assert platform.compactor.plan("orders").blocks == 60


def test_small_blocks_are_merged_however_well_they_are_compressed(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="pglz"))
    for _ in range(60):
        platform.publisher.publish(Publication("orders", b"\0" * 10_000))
        platform.transfer.run_once()
    assert platform.compactor.execute("orders").into == 1
    assert blocks(session) == 31


@pytest.mark.usefixtures("single")
def test_a_merge_outlasts_the_limit_of_a_statement(direct_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merge, limits = compacting.LogCompactor.merge, set[str]()

    def look(self: compacting.LogCompactor, connection: Connection, **window: Any) -> compacting.Merged:
        limits.update(*connection.execute("SHOW statement_timeout").fetchall())
        return merge(self, connection, **window)

    monkeypatch.setattr(compacting.LogCompactor, "merge", look)
    options = {"options": "-c statement_timeout=60s"}
    dsn = make_url(direct_dsn).update_query_dict(options).render_as_string(False)
    with EventSQL(dsn, transfer=False) as limited:
        assert limited.compactor.execute("orders").blocks == 90
    assert limits == {"0"}


def test_a_change_of_the_form_between_two_windows_is_noticed(platform: EventSQL, session: Connection) -> None:
    platform.registry.register_topic(Topic("orders", PARTITIONS, storage="blocks"))
    publish_singly(platform, 5)
    log_form.learn(session, SCHEMA, "orders", "both, new blocks")
    assert compacting.LogCompactor(SCHEMA, "orders").newest(session) == 5


def test_a_topic_that_is_made_anew_is_compacted_from_its_beginning(single: EventSQL, session: Connection) -> None:
    compactor = single.shards[0].compactor
    assert sum(each.blocks for each in compactor.run_once()) == 90
    topic = single.registry.topic("orders")
    single.registry.unregister_topic("orders", force=True)
    single.registry.register_topic(topic)
    publish_singly(single, 61, partitions=topic.partitions)
    assert sum(each.blocks for each in compactor.run_once()) == 60
    assert blocks(session) < 10


def test_processes_that_each_have_little_time_compact_the_whole_log_after_one_another(
    single: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's housekeeping is a process each time, and begins at the start of the log."""
    monkeypatch.setattr(compaction, "RUN_SECONDS", -1.0)
    runs = [compaction.Compactor(single.database, single.shards[0].registry).run_once() for _ in range(4)]
    # The last window is not full yet.
    assert [sum(each.blocks for each in done) for done in runs] == [30, 30, 30, 0]


def test_a_topic_in_rows_is_refused(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="rows"))
    with pytest.raises(RegistryError) as refused:
        platform.compactor.plan("orders")
    assert refused.type is RegistryError, "and not that there is no such topic"


# Giving space back


@pytest.fixture
def spacious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are rewritten for any space."""
    monkeypatch.setattr(compaction, "SPARE_BYTES", -1)
    monkeypatch.setattr(compaction, "SPARE_SHARE", 0.0)


def one(session: Connection, query: LiteralString, value: object) -> tuple[Any, ...]:
    row = session.execute(query, [value]).fetchone()
    assert row is not None
    return row


def table_of(session: Connection) -> int:
    """The table of the first segment."""
    first = (segments.segments(session, SCHEMA, "orders") or [])[0]
    (table,) = one(session, "SELECT %s::regclass::oid", sql.Identifier(SCHEMA, first.table).as_string(session))
    return int(table)


def size(session: Connection) -> int:
    """The bytes of the first segment."""
    (size,) = one(session, "SELECT pg_total_relation_size(%s)", table_of(session))
    return int(size)


@pytest.mark.usefixtures("spacious")
def test_a_rewritten_segment_is_smaller_and_has_the_same_events(single: EventSQL, session: Connection) -> None:
    before, was = content(single.reader.read("orders")), size(session)
    done = single.compactor.execute("orders")
    assert done.freed is not None
    assert size(session) == was - done.freed < was
    assert content(single.reader.read("orders")) == before
    assert log_table.broken_blocks(session, SCHEMA, "orders") == []
    kept = one(
        session,
        "SELECT array_agg(attname) FROM pg_attribute WHERE attrelid = %s AND attstattarget = 0",
        table_of(session),
    )
    assert {"eql_keys", "eql_values"} <= set(kept[0])
    # The log was rolled, so that its newest blocks are merged too.
    assert done.blocks > 90
    publish_singly(single, 10, first=100, partitions=single.registry.topic("orders").partitions)
    assert len(single.reader.read("orders")) == 110
    assert single.reader.read("orders")[-1].id > segments.SEGMENT_EVENTS
    second = single.compactor.execute("orders")
    assert content(single.reader.read("orders"))[:100] == before
    assert second.unmerged == ()


def test_a_run_whose_time_is_over_copies_one_segment(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
    monkeypatch.setattr(compaction, "RUN_SECONDS", -1.0)
    monkeypatch.setattr(compaction._Log, "give_back", lambda *_: 1)
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    for _ in range(4):
        platform.publisher.publish_all(Publication("orders", b"value") for _ in range(10))
        platform.transfer.run_once()
    compactor = compaction.Compactor(platform.database, platform.shards[0].registry)
    assert [[each.freed for each in compactor.run_once()] for _ in range(4)] == [[1], [1], [1], [1]]


def test_a_segment_that_an_erasure_has_made_larger_is_rewritten_by_the_same_process(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (compaction, "SPARE_BYTES", 40_000), (compaction, "SPARE_SHARE", 0.0),
        (segments, "SEGMENT_EVENTS", 60), (log_room, "ROOM_CHECK", 1),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="none"))
    for each in range(70):
        platform.publisher.publish(Publication("orders", os.urandom(3_000), key=f"k{each % 2}"))
        platform.transfer.run_once()
    compactor = platform.shards[0].compactor
    while sum(each.freed or 0 for each in compactor.run_once()):
        pass
    platform.eraser.execute("orders", ["k1"])
    assert sum(each.freed or 0 for each in compactor.run_once()) > 0


@pytest.mark.usefixtures("spacious")
def test_another_segment_that_is_vacuumed_keeps_no_segment_from_its_rewriting(
    platform: EventSQL, session: Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 60)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
    monkeypatch.setattr(exchanging, "WAIT_SECONDS", 0.05)
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    publish_singly(platform, 70, partitions=-1)
    vacuuming, ahead = sessions(), (segments.segments(session, SCHEMA, "orders") or [])[-1]
    vacuuming.execute(f"LOCK TABLE eventsql.{ahead.table} IN SHARE UPDATE EXCLUSIVE MODE".encode())
    was = table_of(session)
    platform.compactor.execute("orders")
    assert table_of(session) != was


@pytest.mark.usefixtures("spacious")
def test_a_session_that_vacuums_or_analyzes_a_segment_keeps_it_as_it_is_and_nobody_waits_for_it(
    single: EventSQL, sessions: Sessions, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "VACUUM_WAIT_SECONDS", 0.05)
    was, analyzing = table_of(session), sessions()
    for segment in segments.segments(session, SCHEMA, "orders") or ():
        analyzing.execute(f"LOCK TABLE eventsql.{segment.table} IN SHARE UPDATE EXCLUSIVE MODE".encode())
    with ThreadPoolExecutor() as threads:
        try:
            done = threads.submit(single.compactor.execute, "orders").result(PATIENCE)
        finally:
            analyzing.rollback()
    assert (done.blocks > 0, done.freed, table_of(session)) == (True, 0, was)
    assert (single.compactor.execute("orders").freed or 0) > 0


@pytest.mark.usefixtures("spacious")
def test_a_transaction_that_reads_the_log_keeps_its_segment(
    single: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(exchanging, "EXCHANGE_SECONDS", 0.0)
    before = content(single.reader.read("orders"))
    reader = sessions()
    reader.execute("SELECT count(*) FROM eventsql.orders_event")
    done = single.compactor.execute("orders")
    assert (done.blocks > 90, done.freed) == (True, 0)
    reader.rollback()
    assert (single.compactor.execute("orders").freed or 0) > 0
    assert content(single.reader.read("orders")) == before


@pytest.mark.usefixtures("spacious")
def test_a_snapshot_older_than_events_keeps_their_segment(platform: EventSQL, sessions: Sessions) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    publish_singly(platform, 50, partitions=-1)
    old = sessions()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("SELECT pg_current_snapshot()")
    publish_singly(platform, 50, first=50, partitions=-1)
    assert platform.compactor.execute("orders").freed == 0
    assert old.execute("SELECT count(*) FROM eventsql.orders_event").fetchone() == (50,)
    old.rollback()
    assert (platform.compactor.execute("orders").freed or 0) > 0


@pytest.mark.usefixtures("spacious")
def test_a_snapshot_older_than_the_rewriting_sees_each_event(
    single: EventSQL, sessions: Sessions, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(single.reader.read("orders"))
    done = single.compactor.execute("orders")
    assert done.into is not None
    old, vacuum = sessions(), Exchange.vacuum
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def vacuumed(self: Exchange, connection: Connection) -> bool:
        done = vacuum(self, connection)
        old.execute("SELECT pg_current_snapshot()")
        return done

    monkeypatch.setattr(Exchange, "vacuum", vacuumed)
    monkeypatch.setattr(compaction, "SPARE_BYTES", -(1 << 30))
    was = table_of(session)
    single.shards[0].compactor._packed.clear()
    single.compactor.execute("orders")
    assert table_of(session) != was
    assert old.execute("SELECT count(*) FROM eventsql.orders_event").fetchone() == (len(before),)


@pytest.mark.usefixtures("spacious")
def test_a_rewriting_that_fails_leaves_the_segment_as_it_was(
    single: EventSQL, session: Connection, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, replace = content(single.reader.read("orders")), Exchange.replace

    def die(self: Exchange, connection: Connection, *args: Any, **names: Any) -> None:
        replace(self, connection, *args, **names)
        terminate(connection)
        connection.execute("SELECT")

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "replace", die)
        with pytest.raises(DatabaseError):
            single.compactor.execute("orders")
    assert content(single.reader.read("orders")) == before
    tables = session.execute(
        "SELECT count(*) FROM pg_class WHERE relname LIKE 'orders%rewrite%' AND relkind = 'r'"
    ).fetchone()
    assert tables == (0,)
    assert (single.compactor.execute("orders").freed or 0) > 0
    assert content(single.reader.read("orders")) == before


@pytest.mark.usefixtures("spacious")
def test_a_segment_that_a_view_of_others_reads_is_not_rewritten(single: EventSQL, session: Connection) -> None:
    (name,) = one(session, "SELECT %s::regclass::text", table_of(session))
    session.execute(f"CREATE VIEW eventsql.mine AS SELECT eql_id FROM {name}")
    was = table_of(session)
    assert single.compactor.execute("orders").freed == 0
    assert table_of(session) == was


@pytest.mark.usefixtures("spacious")
def test_a_segment_that_vacuum_did_not_reach_is_not_rewritten(
    single: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exchange, "vacuum", lambda *_: False)
    was = table_of(session)
    assert single.compactor.execute("orders").freed == 0
    assert table_of(session) == was


@pytest.mark.usefixtures("spacious")
def test_a_segment_with_a_block_that_cannot_be_copied_stays_and_its_blocks_are_merged(
    single: EventSQL, session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    (name,) = one(session, "SELECT %s::regclass::text", table_of(session))
    session.execute(f"ALTER TABLE {name} ADD CONSTRAINT none CHECK (eql_id <> 100) NOT VALID")
    before, was = content(single.reader.read("orders")), table_of(session)
    done = single.compactor.execute("orders")
    assert done.freed == 0
    assert "cannot be copied" in caplog.text
    assert table_of(session) == was
    assert content(single.reader.read("orders")) == before


@pytest.mark.usefixtures("spacious")
def test_a_segment_is_copied_after_a_transaction_that_has_drawn_its_last_ids(
    single: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(compaction, "LOCK_SECONDS", 60)
    (first, *_), was, writer = segments.segments(session, SCHEMA, "orders") or [], table_of(session), sessions()
    writer.execute("SELECT FROM eventsql.event_buffer_lock FOR UPDATE")
    writer.execute("SELECT setval('eventsql.orders_block_eql_id_seq', %s)", [first.end - 1])
    with ThreadPoolExecutor(1) as executor:
        compacted = executor.submit(single.compactor.execute, "orders")
        until_blocked()
        assert table_of(session) == was
        writer.commit()
        assert (compacted.result().freed or 0) > 0


@pytest.mark.usefixtures("spacious")
def test_the_end_of_a_segment_waits_for_the_writer_and_gives_no_id_out_again(
    single: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(compaction, "LOCK_SECONDS", 60)
    (first, *_), writer = segments.segments(session, SCHEMA, "orders") or [], sessions()
    writer.execute("SELECT FROM eventsql.event_buffer_lock FOR UPDATE")
    with ThreadPoolExecutor(1) as executor:
        compacted = executor.submit(single.compactor.execute, "orders")
        until_blocked()
        writer.execute("SELECT setval('eventsql.orders_block_eql_id_seq', %s)", [first.end + 5])
        writer.commit()
        compacted.result()
    assert segments.newest_id(session, SCHEMA, "orders") == first.end + 5


@pytest.mark.usefixtures("spacious")
def test_a_change_of_others_during_the_copy_waits_for_it(
    single: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite, other, waits = compacting.LogCompactor.rewrite, sessions(), []

    def changed(self: compacting.LogCompactor, *args: Any) -> Any:
        copied = rewrite(self, *args)
        with pytest.raises(psycopg.errors.LockNotAvailable), other.transaction():
            other.execute("SET LOCAL lock_timeout TO '50ms'")
            other.execute("UPDATE eventsql.orders_block SET eql_keys = NULL")
        waits.append(True)
        return copied

    monkeypatch.setattr(compacting.LogCompactor, "rewrite", changed)
    before = content(single.reader.read("orders"))
    assert (single.compactor.execute("orders").freed or 0) > 0
    assert waits
    assert content(single.reader.read("orders")) == before


@pytest.mark.usefixtures("spacious")
def test_a_change_that_waits_for_the_segment_does_not_stop_the_copy_for_ever(
    single: EventSQL, session: Connection, sessions: Sessions, until_blocked: UntilBlocked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The change waits for the one session of the compaction, and the other session waits behind the change."""
    monkeypatch.setattr(exchanging, "WAIT_SECONDS", 0.05)
    (name,) = one(session, "SELECT %s::regclass::text", table_of(session))
    copy, other, changes = Exchange.copy, sessions(), list[Future[object]]()

    def copied(self: Exchange, *args: Any, **named: Any) -> Any:
        if not changes:
            changes.append(executor.submit(other.execute, f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE"))
            until_blocked()
        return copy(self, *args, **named)

    monkeypatch.setattr(Exchange, "copy", copied)
    before = content(single.reader.read("orders"))
    with ThreadPoolExecutor() as executor:
        done = single.compactor.execute("orders")
        changes[0].result()
    assert (done.blocks > 90, done.freed) == (True, 0)
    other.rollback()
    assert (single.compactor.execute("orders").freed or 0) > 0
    assert content(single.reader.read("orders")) == before


def test_ctrl_c_at_any_moment_of_the_copy_of_a_segment_lets_its_transactions_end(dsn: str, session: Connection) -> None:
    session.execute("CREATE TABLE eventsql.number AS SELECT 1 AS value")
    exchange = Exchange(SCHEMA, "numbers", "number")

    def copy(connection: Connection, source: Connection) -> None:
        with connection.transaction(force_rollback=True):
            exchange.copy(connection, source, "copied", order=sql.SQL("value"), check=sql.SQL("(value > 0)"))

    def moment(after: int) -> bool:
        with psycopg.connect(dsn) as connection, psycopg.connect(dsn, autocommit=True) as source:
            try:
                return interrupted(after, partial(copy, connection, source), module="contextlib.py", events={"call"})
            finally:
                connection.rollback()

    for after in count():
        # In a thread, in case that a transaction never ends.
        if not in_thread("copy", partial(moment, after)).result(PATIENCE):
            break
    assert after > 10


@pytest.mark.usefixtures("spacious")
def test_a_rewritten_segment_has_the_options_and_indexes_of_the_one_before(
    single: EventSQL, session: Connection
) -> None:
    (name,) = one(session, "SELECT %s::regclass::text", table_of(session))
    session.execute(f"ALTER TABLE {name} SET (autovacuum_vacuum_threshold = 77, toast.autovacuum_enabled = off)")
    described = (
        "SELECT c.reloptions, t.reloptions, c.relowner, (SELECT count(*) FROM pg_index WHERE indrelid = c.oid), "
        "(SELECT count(*) FROM pg_inherits i JOIN pg_index x ON x.indexrelid = i.inhrelid WHERE x.indrelid = c.oid), "
        "(SELECT array_agg((attname, attstorage, attnotnull, atthasdef, attislocal) ORDER BY attnum)::text "
        "FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0), "
        "(SELECT array_agg((conname, contype, conislocal) ORDER BY conname)::text "
        "FROM pg_constraint WHERE conrelid = c.oid AND contype = 'c') "
        "FROM pg_class c JOIN pg_class t ON t.oid = c.reltoastrelid WHERE c.oid = %s"
    )
    was, table = one(session, described, table_of(session)), table_of(session)
    single.compactor.execute("orders")
    assert table_of(session) != table
    assert one(session, described, table_of(session)) == was
