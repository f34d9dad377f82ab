"""A position says where to consume from; the offset that it stands for is found by ids alone, whatever their gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row

from eventsql_orchestration import NOT_PARTITIONED, EventSQL, Publication, Topic
from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.storage import log_form
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.topics.offsets import Target, resolve
from eventsql_orchestration.topics.positions import (
    AtOffset,
    AtTime,
    Back,
    Earliest,
    Latest,
    Position,
    ShiftBy,
    parse_place,
    starting_at,
)
from tests.forms import in_blocks, stored
from tests.plans import custom_plan

if TYPE_CHECKING:
    from tests.fixtures import SaidBy

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))


pytestmark = pytest.mark.prepared.with_args(prepare)


def log(database: Database, events: Iterable[tuple[int, int, datetime]]) -> None:
    """Let the log hold these events alone: id, partition and time of entering it."""
    with database.transaction() as connection, connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM eventsql.{stored('orders')}")
        cursor.executemany(
            "INSERT INTO eventsql.orders_block (eql_id, eql_partition, eql_events, eql_values, eql_buffered_at, "
            "eql_created_at) VALUES (%s, %s, 1, '{\"\"}', %s, %s)"
            if in_blocks()
            else "INSERT INTO eventsql.orders_event (eql_id, eql_partition, eql_value, eql_metadata, eql_buffered_at, "
            "eql_created_at) VALUES (%s, %s, '', '{}', %s, %s)",
            [(event, partition, at, at) for event, partition, at in events],
        )


def target(database: Database, position: Position, *, partition: int = NOT_PARTITIONED, offset: int = 0) -> Target:
    with database.connection() as connection:
        return resolve(connection, "eventsql", "orders", position, {partition: offset})[partition]


def test_the_ends_of_a_log_are_those_of_what_it_holds(database: Database) -> None:
    log(database, [(id_, 0, NOON) for id_ in (5_001, 5_002, 7_000)])
    assert target(database, Earliest()) == Target(5_000)
    assert target(database, Latest()) == Target(7_000)


@pytest.mark.parametrize("position", [Earliest(), Latest(), AtOffset(1), AtTime(NOON), Back(SECOND)])
def test_an_empty_log_has_one_place(database: Database, position: Position) -> None:
    assert target(database, position, offset=0) == Target(0)


@pytest.mark.parametrize(
    ("asked", "found", "clamped"),
    [
        (10, 9, False),
        (11, 10, False),
        (15, 14, False),
        (20, 19, False),
        (21, 20, False),
        (22, 20, True),
        (2**63 - 1, 20, True),
        (9, 9, True),
        (0, 9, True),
    ],
)
def test_an_offset_is_the_first_event_from_there_on(database: Database, asked: int, found: int, clamped: bool) -> None:
    log(database, [(10, 0, NOON), (20, 0, NOON)])
    assert target(database, AtOffset(asked)) == Target(found, clamped)


def test_offset_0_is_the_same_place_as_offset_1(database: Database) -> None:
    log(database, [(1, 0, NOON)])
    assert target(database, AtOffset(0)) == target(database, AtOffset(1)) == Target(0)


@pytest.mark.parametrize(
    ("events", "start", "found", "clamped"),
    [
        (1, 0, 11, False),
        (2, 11, 17, False),
        (3, 11, 20, True),
        (2**62, 0, 20, True),
        (1, 30, 30, True),
        (-1, 17, 16, False),
        (-1, 20, 16, False),
        (-3, 17, 10, False),
        (-4, 17, 9, True),
        (1 - 2**63, 17, 9, True),
        (-1, 0, 0, True),
    ],
)
def test_a_shift_counts_the_events_of_its_partition(
    database: Database, events: int, start: int, found: int, clamped: bool
) -> None:
    log(database, [(id_, int(id_ in (11, 14, 17)), NOON) for id_ in range(10, 21)])
    assert target(database, ShiftBy(events), partition=1, offset=start) == Target(found, clamped)


def test_a_shift_of_the_whole_topic_counts_all_events(database: Database) -> None:
    log(database, [(id_, id_ % 3, NOON) for id_ in range(10, 21)])
    assert target(database, ShiftBy(3), offset=11) == Target(14)
    assert target(database, ShiftBy(-3), offset=14) == Target(11)


def test_a_time_is_the_first_event_that_entered_the_log_then_or_later(database: Database) -> None:
    log(database, [(10, 0, NOON), (12, 0, NOON + SECOND), (13, 0, NOON + SECOND), (40, 0, NOON + 3 * SECOND)])
    for time, found in [
        (NOON - timedelta(days=700_000), 9),
        (NOON, 9),
        (NOON + SECOND / 2, 10),
        (NOON + SECOND, 10),
        (NOON + 2 * SECOND, 13),
        (NOON + 3 * SECOND, 13),
        (NOON + 4 * SECOND, 40),
        (datetime.max.replace(tzinfo=UTC), 40),
    ]:
        assert target(database, AtTime(time)) == Target(found), time


def test_a_position_by_time_misses_no_event_that_was_published_then_or_later(platform: EventSQL) -> None:
    platform.publisher.publish_all(Publication("orders", b"%d" % n) for n in range(3))
    platform.transfer.run_once()
    with platform.database.connection() as connection:
        (now,) = connection.execute("SELECT clock_timestamp()").fetchone() or ()
    platform.publisher.publish_all(Publication("orders", b"%d" % n) for n in range(3, 6))
    platform.transfer.run_once()
    after = target(platform.database, AtTime(now)).offset
    found = [event.value for event in platform.reader.read("orders", after=after)]
    assert sorted(found) == [b"3", b"4", b"5"]


def test_a_duration_goes_back_by_the_clock_of_the_database(database: Database) -> None:
    with database.connection() as connection:
        (now,) = connection.execute("SELECT clock_timestamp()").fetchone() or ()
    log(database, [(1, 0, now - timedelta(hours=3)), (2, 0, now - timedelta(hours=1)), (3, 0, now)])
    assert target(database, Back(timedelta(hours=2))) == Target(1)
    assert target(database, Back(timedelta(hours=4))) == Target(0)
    assert target(database, Back(timedelta(days=36_525))) == Target(0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.integers(1, 90_000), st.integers(0, 3)), max_size=40),
    probes=st.lists(st.integers(-1, 125), min_size=1, max_size=10),
)
def test_the_search_by_time_finds_what_looking_at_every_event_finds(
    database: Database, steps: list[tuple[int, int]], probes: list[int]
) -> None:
    events, id_, at = [], 0, NOON
    for gap, seconds in steps:
        id_, at = id_ + gap, at + seconds * SECOND
        events.append((id_, 0, at))
    log(database, events)
    first = events[0][0] if events else 1
    for probe in probes:
        time = NOON + probe * SECOND
        older = [event for event, _, created_at in events if created_at < time]
        assert target(database, AtTime(time)) == Target(max(older, default=first - 1))


@pytest.mark.parametrize(
    ("position", "statements"),
    [(Earliest(), 1), (Latest(), 1), (AtOffset(7), 1), (AtTime(NOON), 1), (Back(SECOND), 2), (ShiftBy(-2), 4)],
)
def test_a_position_costs_few_statements_for_all_partitions(
    database: Database,
    said_by: SaidBy,
    position: Position,
    statements: int,
) -> None:
    log(database, [(id_, id_ % 3, NOON + id_ * SECOND) for id_ in range(1, 100)])
    with database.connection() as connection:
        # A process learns the form of a log at its first look.
        log_form.form_now(connection, "eventsql", "orders")
        said = said_by(connection)
        targets = resolve(connection, "eventsql", "orders", position, {0: 50, 1: 50, 2: 50})
    assert targets.keys() == {0, 1, 2}
    assert len(said.statements()) == statements


def test_a_position_is_found_on_a_connection_with_rows_of_the_callers_own(database: Database) -> None:
    log(database, [(10, 0, NOON)])
    with database.connection() as connection:
        connection.row_factory = dict_row  # type: ignore[assignment]  # as a handler may do
        assert resolve(connection, "eventsql", "orders", AtTime(NOON), {0: 0}) == {0: Target(9)}


def prepare_rows(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("rows", 3, storage="rows"))
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.rows_event (eql_partition, eql_value, eql_buffered_at, eql_metadata) "
            "SELECT n % 3, 'x', now(), '{}' FROM generate_series(1, 20000) n"
        )
        connection.execute("VACUUM ANALYZE eventsql.rows_event")


@pytest.mark.prepared.with_args(prepare_rows)
@pytest.mark.parametrize(
    "statement",
    [
        "bounds",
        "before_time",
        "nth",
        "nth_partition",
        "nth_before",
        "nth_before_partition",
    ],
)
def test_the_statements_go_by_the_indexes_on_ids(database: Database, statement: str) -> None:
    # tests/log/test_plans_at_scale.py has those of blocks.
    with database.connection() as connection:
        text = custom_plan(
            connection,
            LogQueries("read", "eventsql")(statement, topic="rows"),
            {
                "time": NOON,
                "partition": 1,
                "offset": 10_000,
                "after": 10_000,
                "upto": 2**63 - 1,
                "skip": 5,
                "most": 20_000,
            },
        )
    scans = [line for line in text.splitlines() if "Scan" in line and "segment" in line]
    assert scans
    assert all("Index" in line for line in scans), text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AtOffset(-1), "an offset must be a whole number from 0"),
        (lambda: AtOffset(2**63), "an offset must be"),
        (lambda: AtTime(datetime(2024, 1, 1)), "no time zone"),  # noqa: DTZ001 - what is refused
        (lambda: Back(timedelta()), "must be above 0"),
        (lambda: Back(timedelta(days=40_000)), "at most a hundred years"),
        (lambda: Back(60), "must be above 0"),  # type: ignore[arg-type]  # refused
        (lambda: ShiftBy(0), "moves nothing"),
        (lambda: ShiftBy(-(2**63)), "whole number"),
        (lambda: ShiftBy(1.5), "whole number"),  # type: ignore[arg-type]  # refused
        (lambda: starting_at("now"), "'earliest', 'latest', an offset, a time .*, not 'now'"),  # type: ignore[arg-type]  # refused
        (lambda: starting_at(True), "not True"),
        (lambda: starting_at(-1), "start must be a whole number from 0"),
        (lambda: parse_place("1" * 5_000), "neither earliest"),
    ],
)
def test_an_impossible_position_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make()


def test_something_else_in_the_place_of_a_position_is_refused(database: Database) -> None:
    with pytest.raises(ValidationError, match="a position is needed"):
        target(database, "earliest")  # type: ignore[arg-type]  # refused


def test_a_start_is_a_position() -> None:
    assert starting_at("earliest") == Earliest()
    assert starting_at("latest") == Latest()
    assert starting_at(7) == AtOffset(7)
    assert starting_at(NOON) == AtTime(NOON)
