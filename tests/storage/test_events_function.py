"""`eventsql.events(topic, after, upto)`: a range of a topic's log in SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from tests.forms import in_blocks, stored

EVENTS = 20_000

RANGE = "SELECT eql_id FROM eventsql.events(%s, %s, %s)"


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))


pytestmark = [pytest.mark.both_forms, pytest.mark.prepared.with_args(prepare)]


def fill(session: Connection, events: int) -> None:
    columns, values = ("eql_metadata, eql_value", "'{}', 'x'")
    if in_blocks():
        columns, values = "eql_created_at, eql_events, eql_values", "now(), 1, ARRAY['x'::bytea]"
    session.execute(
        f"INSERT INTO eventsql.{stored('orders')} (eql_partition, eql_buffered_at, {columns}) "
        f"SELECT n %% 3, now(), {values} FROM generate_series(1, %s) n".encode(),
        [events],
    )


def test_the_function_gives_what_the_reader_gives(platform: EventSQL, session: Connection) -> None:
    platform.publisher.publish_all(
        Publication("orders", b"%d" % number, key=str(number), metadata={"n": str(number)}) for number in range(60)
    )
    rows = session.execute(
        "SELECT eql_id, eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata "
        "FROM eventsql.events('orders', 20, 40)"
    ).fetchall()
    assert rows == [
        (each.id, each.partition, each.key, each.value, each.buffered_at, each.created_at, each.metadata)
        for each in platform.reader.read("orders", after=20, upto=40)
    ]
    assert len(rows) == 20


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ("'orders'", [1, 2, 3, 4, 5]),
        ("'orders', 3", [4, 5]),
        ("'orders', upto => 2", [1, 2]),
        ("'orders', 3, 3", []),
        ("'orders', 4, 2", []),
        ("'orders', 9", []),
    ],
)
def test_a_bound_that_is_left_out_is_that_of_the_log(session: Connection, arguments: str, ids: list[int]) -> None:
    fill(session, 5)
    rows = session.execute(f"SELECT eql_id FROM eventsql.events({arguments})".encode()).fetchall()
    assert [number for (number,) in rows] == ids


def test_the_order_is_that_of_offsets_over_all_segments(platform: EventSQL, session: Connection) -> None:
    fill(session, 3)
    session.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 5000001)")
    fill(session, 3)
    rows = session.execute("SELECT eql_id FROM eventsql.events('orders')").fetchall()
    assert [number for (number,) in rows] == [1, 2, 3, 5_000_002, 5_000_003, 5_000_004]


@pytest.mark.parametrize("topic", ["nowhere", "Orders", "topic; DROP TABLE eventsql.topic", None])
def test_a_topic_that_does_not_exist_is_refused(session: Connection, topic: str | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        session.execute("SELECT FROM eventsql.events(%s)", [topic])
    assert refused.value.diag.message_hint == 'The table "eventsql".topic lists the topics.'
    assert repr(topic) in str(refused.value) or topic is None


@pytest.mark.parametrize("bounds", ["NULL", "0, NULL"])
def test_a_bound_that_is_null_is_refused(session: Connection, bounds: str) -> None:
    with pytest.raises(psycopg.errors.NullValueNotAllowed):
        session.execute(f"SELECT FROM eventsql.events('orders', {bounds})".encode())


def test_a_name_with_capitals_has_the_log_of_its_topic(platform: EventSQL, session: Connection) -> None:
    # EventSQL's Java library registers them.
    session.execute("UPDATE eventsql.topic SET eql_name = 'Orders'")
    fill(session, 2)
    assert session.execute("SELECT count(*) FROM eventsql.events('Orders')").fetchone() == (2,)


def test_times_without_a_zone_are_in_utc(platform: EventSQL, session: Connection) -> None:
    platform.registry.unregister_topic("orders")
    platform.registry.register_topic(Topic("orders", 3, storage="rows"))
    session.execute("ALTER TABLE eventsql.orders_event ALTER COLUMN eql_buffered_at TYPE timestamp")
    session.execute(
        "INSERT INTO eventsql.orders_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
        "VALUES (0, 'x', '2024-03-01 12:00', '{}')"
    )
    session.execute("SET timezone TO 'Asia/Tokyo'")
    row = session.execute("SELECT eql_buffered_at FROM eventsql.events('orders')").fetchone()
    assert row == (datetime(2024, 3, 1, 12, tzinfo=UTC),)
    assert session.execute("SHOW timezone").fetchone() == ("Asia/Tokyo",)


@contextmanager
def reads(session: Connection) -> Iterator[dict[str, int]]:
    """The rows of the log that the block reads in one transaction, by sequential and by index scans."""
    read: dict[str, int] = {}
    with session.transaction():
        yield read
        row = session.execute(
            "SELECT sum(seq_tup_read), sum(idx_tup_fetch) FROM pg_stat_xact_user_tables "
            "WHERE schemaname = 'eventsql' AND relname ~ '^orders_.*_segment_'"
        ).fetchone()
        assert row is not None
        read["sequential"], read["index"] = (int(each) for each in row)


@pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
def test_a_range_is_read_by_the_index_on_ids_in_a_log_that_filled_after_the_first_call(
    session: Connection, *, analyzed: bool
) -> None:
    # The caller's statement has its plan from here on, and so has the function's session.
    session.prepare_threshold = 0
    for _ in range(6):
        assert session.execute(RANGE, ["orders", 0, 10]).fetchall() == []
    fill(session, EVENTS)
    if analyzed:
        session.execute(f"ANALYZE eventsql.{stored('orders')}")
    with reads(session) as read:
        assert len(session.execute(RANGE, ["orders", EVENTS - 200, EVENTS - 100]).fetchall()) == 100
    assert read["sequential"] == 0
    # The planner looks up the ends of the index, too. A block with events of a range may end 20,000 offsets behind it.
    assert 100 <= read["index"] <= 110 + (100 if in_blocks() else 0)


def test_segments_outside_of_a_range_are_not_even_locked(session: Connection) -> None:
    fill(session, 100)
    session.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 5000000)")
    fill(session, 100)
    with session.transaction():
        assert len(session.execute(RANGE, ["orders", 5_000_000, 5_000_010]).fetchall()) == 10
        locked = session.execute(
            "SELECT relation::regclass::text FROM pg_locks "
            "WHERE pid = pg_backend_pid() AND relation::regclass::text ~ '_segment_[0-9]+$'"
        ).fetchall()
    (segment,) = [name for (name,) in locked]
    assert segment.endswith("_segment_5000000")
