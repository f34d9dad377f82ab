"""The capture of a table that was restored from a dump goes on by the names of the columns."""

from __future__ import annotations

import pytest
from psycopg import sql

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.database import Connection
from tests.capture.replay import differences, events


@pytest.fixture
def orders(platform: EventSQL, session: Connection) -> EventSQL:
    """A platform with a table `orders`, and a topic `changes`."""
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, status text, secret text)")
    platform.registry.register_topic(Topic("changes"))
    return platform


def restore(session: Connection) -> None:
    """Make the table as a restore does: the same names, with another oid and without the numbers of dropped columns."""
    session.execute("CREATE TABLE restored (LIKE orders INCLUDING ALL)")
    definitions = session.execute(
        "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = 'orders'::regclass"
    ).fetchall()
    session.execute("DROP TABLE orders")
    session.execute("ALTER TABLE restored RENAME TO orders")
    for (definition,) in definitions:
        session.execute(sql.SQL(definition))


def test_a_dump_that_is_restored_goes_on_with_other_numbers(orders: EventSQL, session: Connection) -> None:
    orders.capture("orders", "changes")
    session.execute("ALTER TABLE orders ADD COLUMN last text")
    session.execute("ALTER TABLE orders DROP COLUMN secret")
    restore(session)
    # Another table has the former oid.
    session.execute("CREATE TABLE other (id integer PRIMARY KEY, status text)")
    session.execute("UPDATE eventsql.capture SET eql_relation = 'other'::regclass")
    assert orders.captures.list()[0].problem is None
    session.execute("INSERT INTO orders VALUES (1, 'new', 'last')")
    assert orders.capture("orders", "changes").id == orders.captures.list()[0].id
    other = orders.capture("other", "changes")
    assert [each.table for each in orders.captures.list()] == ["public.orders", other.table]
    orders.captures.drop("other", "changes")
    session.execute("UPDATE orders SET last = 'more'")
    assert differences(session, "orders", "id::text") == []
    session.execute("ALTER TABLE orders RENAME TO purchase")
    orders.captures.drop("purchase", "changes")
    assert orders.captures.list() == []


def note_state(orders: EventSQL) -> None:
    """Let the capture, which is outdated, note that its column is called `state` now."""
    (capture,) = orders.captures.list()
    assert (capture.columns, capture.outdated, capture.problem) == (("state",), True, None)
    assert not orders.capture("orders", "changes", columns=["state"]).outdated


def test_a_renamed_column_is_captured_after_a_restore_once_the_capture_has_noted_it(
    orders: EventSQL, session: Connection
) -> None:
    orders.capture("orders", "changes", columns=["status"])
    session.execute("ALTER TABLE orders RENAME COLUMN status TO state")
    note_state(orders)
    restore(session)
    note_state(orders)
    # The restored table is known by its numbers again.
    session.execute("ALTER TABLE orders RENAME COLUMN state TO condition")
    session.execute("INSERT INTO orders VALUES (1, 'new', 'x')")
    assert events(session)[-1]["after"] == {"id": 1, "condition": "new"}


def test_a_dropped_column_is_not_missed_after_a_restore_once_the_capture_has_noted_the_others(
    orders: EventSQL, session: Connection
) -> None:
    orders.capture("orders", "changes", columns=["secret", "status"])
    session.execute("ALTER TABLE orders DROP COLUMN secret")
    session.execute("ALTER TABLE orders RENAME COLUMN status TO state")
    note_state(orders)
    restore(session)
    (capture,) = orders.captures.list()
    assert (capture.columns, capture.problem) == (("state",), None)


@pytest.mark.parametrize("column", ["status", "id"], ids=["captured column", "key"])
@pytest.mark.parametrize("renamed", ["before", "after"])
def test_a_column_that_a_restored_table_has_under_another_name_is_a_problem(
    orders: EventSQL, session: Connection, renamed: str, column: str
) -> None:
    orders.capture("orders", "changes", columns=["status"])
    rename = f"ALTER TABLE orders RENAME COLUMN {column} TO other"
    if renamed == "before":
        session.execute(rename)
    restore(session)
    if renamed == "after":
        session.execute(rename)
    (capture,) = orders.captures.list()
    assert capture.problem is not None
    assert f"no column {column}," in capture.problem
    orders.captures.drop("orders", "changes")
    assert orders.capture("orders", "changes").problem is None
