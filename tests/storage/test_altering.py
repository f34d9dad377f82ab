"""Changes of a log's form: rows and blocks in one log, while events are published, moved and consumed."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from itertools import pairwise

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import Consumer, Event, EventSQL, Retention, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.roles import Roles
from eventsql_orchestration.errors import DatabaseBusyError, RegistryError, ValidationError
from eventsql_orchestration.maintenance import retention
from eventsql_orchestration.model import Publication, Storage
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.storage import compacting, exchanging, log_form, segment_drops, segments, sequences
from eventsql_orchestration.storage.erasing import try_change
from eventsql_orchestration.storage.log_form import FORMS
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.log_table import broken_blocks
from tests.waiting import PATIENCE

OTHER: dict[Storage, Storage] = {"rows": "blocks", "blocks": "rows"}


def prepare(platform: EventSQL, storage: Storage) -> None:
    """Make a topic of three partitions, in segments of 100 ids."""
    platform.registry.register_topic(Topic("orders", 3, storage=storage))


pytestmark = pytest.mark.parametrize(
    "storage", [pytest.param(form, marks=pytest.mark.prepared.with_args(prepare, form)) for form in OTHER]
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 100)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)


def publish(platform: EventSQL, first: int, events: int) -> None:
    """Publish events with the values `first`, `first + 1`, …, with keys, and move them into the log."""
    numbers = range(first, first + events)
    platform.publisher.publish_all(Publication("orders", b"%d" % each, key=str(each % 7)) for each in numbers)
    platform.transfer.run_once()


def stage(platform: EventSQL, first: int, events: int) -> None:
    """Put events into the buffer."""
    for number in range(first, first + events):
        platform.publisher.publish(Publication("orders", b"%d" % number, key=str(number % 7)))


def check_whole(events: list[Event], published: int) -> None:
    """Assert that these are the events 0, 1, … `published` - 1, each once, those of a key in order."""
    assert sorted(int(event.value) for event in events) == list(range(published))
    by_key: dict[str | None, list[int]] = {}
    for event in events:
        by_key.setdefault(event.key, []).append(int(event.value))
    for values in by_key.values():
        assert values == sorted(values)


def forms(platform: EventSQL, session: Connection) -> list[bool]:
    """Whether each segment with events is in blocks, in order."""
    return [
        segment.in_blocks
        for segment in segments.segments(session, "eventsql", "orders") or ()
        if session.execute(f"SELECT EXISTS (SELECT FROM eventsql.{segment.table})").fetchone() == (True,)
    ]


def test_events_before_and_after_a_change_are_one_log(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    publish(platform, 0, 40)
    assert platform.registry.set_storage("orders", OTHER[storage])
    assert not platform.registry.set_storage("orders", OTHER[storage])
    assert platform.registry.topic("orders").storage == OTHER[storage]
    publish(platform, 40, 30)
    stage(platform, 70, 10)
    platform.transfer.run_once()
    platform.registry.set_storage("orders", storage)
    publish(platform, 80, 30)

    events = list(platform.reader.read("orders"))
    check_whole(events, 110)
    assert all(one.id < next_.id for one, next_ in pairwise(events))
    own = storage == "blocks"
    assert forms(platform, session) == [own, not own, own]
    assert platform.reader.count("orders") == 110
    assert broken_blocks(session, "eventsql", "orders") == []
    seen = session.execute("SELECT count(*), min(eql_id), max(eql_id) FROM eventsql.orders_event").fetchone()
    assert seen == (110, events[0].id, events[-1].id)
    ranged = session.execute("SELECT eql_id FROM eventsql.events('orders', %s, %s)", [events[35].id, events[85].id])
    assert [row[0] for row in ranged] == [event.id for event in events[36:86]]


def test_a_publisher_that_has_not_noticed_a_change_publishes_in_order(
    platform: EventSQL, dsn: str, storage: Storage
) -> None:
    publish(platform, 0, 100)
    with EventSQL(dsn) as other:
        other.registry.set_storage("orders", OTHER[storage])
    publish(platform, 100, 100)
    publish(platform, 200, 100)
    check_whole(platform.reader.read("orders"), 300)


def test_a_consumer_goes_on_over_changes(platform: EventSQL, storage: Storage) -> None:
    platform.registry.register_consumer(Consumer("orders", "billing", partitioned=True))
    seen: list[Event] = []

    def take(events: Sequence[Event], _: Connection) -> None:
        seen.extend(events)

    published = 0
    for form in (OTHER[storage], storage, OTHER[storage]):
        publish(platform, published, 25)
        stage(platform, published + 25, 5)
        platform.transfer.run_once()
        published += 30
        platform.consumers.consume_once("orders", "billing", take, max_events=7)
        platform.registry.set_storage("orders", form)
        assert sum(lag.events for lag in platform.lag("orders")) == published - len(seen)
    while platform.consumers.consume_once("orders", "billing", take, max_events=7):
        pass
    check_whole(seen, published)


def test_a_log_without_events_changes_as_a_whole(platform: EventSQL, session: Connection, storage: Storage) -> None:
    platform.registry.set_storage("orders", OTHER[storage])
    form = log_form.form_now(session, "eventsql", "orders")
    assert (form.both, form.writes_blocks) == (False, OTHER[storage] == "blocks")
    publish(platform, 0, 10)
    check_whole(list(platform.reader.read("orders")), 10)


def test_retention_drops_segments_of_both_forms_and_a_reader_that_has_not_noticed_goes_on(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    publish(platform, 0, 90)
    platform.registry.set_storage("orders", OTHER[storage])
    for first in range(90, 390, 60):
        publish(platform, first, 60)
    both = log_form.form_now(session, "eventsql", "orders")
    assert both.both
    platform.registry.set_retention("orders", Retention(events=100))
    (dropped,) = platform.retention.run_once(["orders"])
    assert dropped.segments >= 1
    found = list(platform.reader.read("orders"))
    left = sorted(int(event.value) for event in found)
    assert left == list(range(left[0], 390))
    assert not log_form.form_now(session, "eventsql", "orders").both
    name = "both, new blocks" if both.writes_blocks else "both, new rows"
    for read in (platform.reader.read, lambda topic: platform.reader.read(topic, partition=1)):
        expected = list(read("orders"))
        log_form.learn(session, "eventsql", "orders", name)
        assert list(read("orders")) == expected
        log_form.learn(session, "eventsql", "orders", name)
        assert platform.reader.count("orders") == len(found)
    log_form.forget(session, "eventsql", "orders")
    publish(platform, 390, 10)
    # The view of blocks that a log in rows keeps is in the way of nothing.
    platform.registry.set_storage("orders", storage)
    publish(platform, 400, 10)
    assert platform.reader.count("orders") == len(found) + 20
    platform.registry.unregister_topic("orders", force=True)
    tables = session.execute("SELECT FROM pg_class WHERE relname ~ '^orders_(event|block|rows|array)'")
    assert tables.rowcount == 0


def test_retention_leaves_both_forms_while_events_are_erased(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    publish(platform, 0, 90)
    platform.registry.set_storage("orders", OTHER[storage])
    publish(platform, 90, 90)
    platform.registry.set_retention("orders", Retention(events=20))
    with session.transaction():
        assert try_change(session, "eventsql", "orders")
        (dropped,) = platform.retention.run_once(["orders"])
        assert dropped.segments >= 1
    assert log_form.form_now(session, "eventsql", "orders").both
    assert platform.reader.count("orders") == 90


def test_the_last_segment_of_the_former_form_leaves_the_log_only_while_nobody_reads_it(
    platform: EventSQL, session: Connection, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A query that meets a concurrent detach of this segment would end the server by a segmentation fault.
    monkeypatch.setattr(segment_drops, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(retention, "WAIT_SECONDS", 0.1)
    publish(platform, 0, 90)
    platform.registry.set_storage("orders", OTHER[storage])
    publish(platform, 90, 90)
    platform.registry.set_retention("orders", Retention(events=20))
    with session.transaction():
        session.execute("SELECT FROM eventsql.orders_event")
        with pytest.raises(DatabaseBusyError):
            platform.retention.run_once(["orders"])
        assert not any(each.detaching for each in segments.segments(session, "eventsql", "orders") or ())
    (dropped,) = platform.retention.run_once(["orders"])
    assert dropped.segments == 1
    assert not log_form.form_now(session, "eventsql", "orders").both


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (5, "orders_block has id 90: new ids would be smaller"),
        # As after a restore: the largest id in the log.
        (90, "the ids up to 99 are of segments of another form"),
    ],
)
def test_a_sequence_that_stands_behind_the_segments_of_the_former_form_is_found(
    platform: EventSQL, session: Connection, storage: Storage, last: int, reason: str
) -> None:
    publish(platform, 0, 90)
    platform.registry.set_storage("orders", OTHER[storage])
    assert sequences.faults(session, "eventsql", ["orders"]) == []
    table = log_form.written_table(session, "eventsql", "orders")
    session.execute("SELECT setval(pg_get_serial_sequence(%s, 'eql_id'), %s)", [f"eventsql.{table}", last])
    (fault,) = sequences.faults(session, "eventsql", ["orders"])
    assert f"is at {last}, and {reason}" in str(fault)
    assert "greatest(99," in str(fault), "new ids begin in a segment of the new form"
    publish(platform, 90, 10)
    assert sequences.faults(session, "eventsql", ["orders"]) == []
    check_whole(list(platform.reader.read("orders")), 100)


def test_an_erasure_finds_the_events_of_both_forms(platform: EventSQL, storage: Storage) -> None:
    publish(platform, 0, 21)
    platform.registry.set_storage("orders", OTHER[storage])
    publish(platform, 21, 21)
    assert platform.eraser.plan("orders", ["3"]).events == 6
    assert platform.eraser.execute("orders", ["3"]).events == 6
    assert [event.value for event in platform.reader.read("orders") if event.key == "3"] == [None] * 6
    assert platform.eraser.plan("orders", ["3"]).events == 0


def test_the_blocks_of_a_log_in_both_forms_are_compacted(
    platform: EventSQL, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacting, "WINDOW_IDS", 10)
    for first in range(0, 36, 12):
        for number in range(first, first + 12):
            publish(platform, number, 1)
        platform.registry.set_storage("orders", OTHER[storage] if first % 24 == 0 else storage)
    before = list(platform.reader.read("orders"))
    done = platform.compactor.execute("orders")
    assert done.blocks >= 8
    assert done.into is not None
    assert done.into < done.blocks
    assert list(platform.reader.read("orders")) == before
    check_whole(before, 36)


def test_a_topic_in_both_forms_is_deleted_with_all_its_tables(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    publish(platform, 0, 10)
    platform.registry.set_storage("orders", OTHER[storage])
    platform.registry.unregister_topic("orders", force=True)
    left = session.execute("SELECT relname FROM pg_class WHERE relname LIKE 'orders%'").fetchall()
    assert left == []


def test_a_change_waits_for_readers_no_longer_than_it_says(platform: EventSQL, dsn: str, storage: Storage) -> None:
    publish(platform, 0, 10)
    with psycopg.connect(dsn) as reading:
        reading.execute("SELECT count(*) FROM eventsql.orders_event")
        with pytest.raises(DatabaseBusyError, match="keeps its form, because it is in use: "):
            platform.registry.set_storage("orders", OTHER[storage], timeout=0)
        assert platform.registry.topic("orders").storage == storage
        publish(platform, 10, 10)
    assert platform.registry.set_storage("orders", OTHER[storage])
    check_whole(list(platform.reader.read("orders")), 20)


def test_a_change_gives_way_before_the_server_ends_a_reader_that_waits_for_it(
    session: Connection, storage: Storage
) -> None:
    look = session.execute(
        "SELECT extract(epoch FROM boot_val::int * interval '1 ms') FROM pg_settings WHERE name = 'deadlock_timeout'"
    ).fetchone()
    assert look is not None
    assert max(exchanging.WAIT_SECONDS, retention.SIMPLIFY_SECONDS) < look[0]


def test_an_open_publication_is_in_order_before_and_after(platform: EventSQL, storage: Storage) -> None:
    with platform.database.connection() as connection, connection.transaction():
        platform.publisher.publish(Publication("orders", b"0", key="0"), connection=connection)
        changing = threading.Thread(target=platform.registry.set_storage, args=("orders", OTHER[storage]))
        changing.start()
        changing.join(PATIENCE)
        assert not changing.is_alive()
    publish(platform, 1, 5)
    check_whole(list(platform.reader.read("orders")), 6)


def test_an_object_of_others_on_the_table_keeps_the_form(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    stored = "orders_event" if storage == "rows" else "orders_block"
    session.execute(f"CREATE VIEW mine AS SELECT eql_id FROM eventsql.{stored}")
    with pytest.raises(RegistryError):
        platform.registry.set_storage("orders", OTHER[storage])
    session.execute("DROP VIEW mine")
    assert platform.registry.set_storage("orders", OTHER[storage])


def test_roles_that_may_read_a_log_may_read_it_in_both_forms_and_in_one_again(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    role = f"reads_{uuid.uuid4().hex}"
    session.execute(f"CREATE ROLE {role}")
    try:
        stored = ["orders_event"] if storage == "rows" else ["orders_event", "orders_block"]
        for relation in stored:
            session.execute(f"GRANT SELECT ON eventsql.{relation} TO {role}")
        publish(platform, 0, 90)
        platform.registry.set_storage("orders", OTHER[storage])
        publish(platform, 90, 90)
        readable = "SELECT has_table_privilege(%s, %s, 'SELECT')"
        for relation in ("orders_event", "orders_block"):
            assert session.execute(readable, (role, f"eventsql.{relation}")).fetchone() == (True,)
        platform.registry.set_retention("orders", Retention(events=20))
        platform.retention.run_once(["orders"])
        assert not log_form.form_now(session, "eventsql", "orders").both
        relation = log_form.stored_table(session, "eventsql", "orders")
        assert session.execute(readable, (role, f"eventsql.{relation}")).fetchone() == (True,)
    finally:
        session.execute(f"DROP OWNED BY {role}")
        session.execute(f"DROP ROLE {role}")


def test_roles_are_dropped_after_a_log_has_one_form_again(platform: EventSQL, storage: Storage) -> None:
    roles = Roles(platform.database)
    roles.create(prefix=f"r{uuid.uuid4().hex[:8]}", topics=["orders"])
    try:
        publish(platform, 0, 90)
        platform.registry.set_storage("orders", OTHER[storage])
        publish(platform, 90, 90)
        platform.registry.set_retention("orders", Retention(events=20))
        platform.retention.run_once(["orders"])
    finally:
        assert roles.drop()


def test_a_table_with_a_name_that_the_log_needs_keeps_the_form(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    publish(platform, 0, 10)
    session.execute("CREATE TABLE eventsql.orders_rows (id int)")
    with pytest.raises(RegistryError):
        platform.registry.set_storage("orders", OTHER[storage])
    assert platform.registry.topic("orders").storage == storage


def test_a_program_that_inserts_rows_itself_is_refused(
    platform: EventSQL, session: Connection, storage: Storage
) -> None:
    publish(platform, 0, 10)
    platform.registry.set_storage("orders", OTHER[storage])
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        session.execute(
            "INSERT INTO eventsql.orders_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
            "VALUES (0, '', now(), '{}')"
        )


def test_a_form_that_there_is_not_is_refused(platform: EventSQL, storage: Storage) -> None:
    with pytest.raises(ValidationError):
        platform.registry.set_storage("orders", "columns")  # type: ignore[arg-type]


@pytest.mark.parametrize("statement", ["read", "read_partition"])
def test_both_forms_are_read_in_the_order_of_their_indexes(
    platform: EventSQL, session: Connection, storage: Storage, statement: str
) -> None:
    publish(platform, 0, 40)
    platform.registry.set_storage("orders", OTHER[storage])
    publish(platform, 40, 40)
    # The tables are small: the planner would rather sort them.
    session.execute("SET enable_seqscan TO off")
    session.execute("SET enable_sort TO off")
    session.execute("SET enable_bitmapscan TO off")
    query = LogQueries("read", "eventsql")(statement, topic="orders", form=FORMS["both, new rows"])
    values = {"partition": 1, "after": 3, "upto": 500, "limit": 10, "blocks": 64, "bytes": 2**25}
    cursor = psycopg.ClientCursor(session)
    plan = "\n".join(line for (line,) in cursor.execute(sql.SQL("EXPLAIN ") + query, values).fetchall())
    assert "Merge Append" in plan
    assert "Seq Scan" not in plan
    # The result of at most 64 blocks is put in order once more.
    assert plan.count("Sort  ") <= 1
