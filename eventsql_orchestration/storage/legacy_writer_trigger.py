"""Guards of repartitioned logs against writers without layouts, such as EventSQL's Java library.

That library reads a topic's partitions once per process, and its transfer moves events into the log as they were
published. No consumer would get an event of a partition that is gone. So the log of a topic that lost partitions has a
trigger that moves such an event to another partition. For our own writers the trigger costs a comparison per event.
Measured: COPY takes 227,000 to 255,000 events/s with it, 220,000 to 276,000 without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.migrations import definitions
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.storage.log_form import form_in_transaction, in_blocks, store, written_table
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.log_table import identifier

GUARD: Final = "eql_place_in_layout"
"""The name of the trigger on a guarded log."""


@dataclass(frozen=True, slots=True)
class Stranded:
    """`events` events, from offset `first` to `last`, in a partition that the topic no longer had."""

    partition: int
    events: int
    first: int
    last: int


def stranded(database: Database, topic: str) -> list[Stranded]:
    """Events of a topic that no consumer will ever get, because the log was not guarded when they came."""
    queries = LogQueries("legacy_writers", database.schema)
    with database.connection() as connection:
        log = sql.Identifier(database.schema, written_table(connection, database.schema, topic)).as_string(connection)
        found = fetch_all(connection, queries("stranded", topic=topic), {"topic": topic}, prepare=False)
        known = fetch_first(connection, Queries("layouts", database.schema)("layouts"), {"topic": topic})
        if known is None and fetch_first(connection, queries("has_partition_index"), {"log": log}) == (True,):
            found = fetch_all(connection, queries("beyond", topic=topic), {"topic": topic}, prepare=False)
        return [Stranded(*row) for row in found]


@dataclass(frozen=True, slots=True)
class Order:
    """Signs of the transfer of EventSQL's Java library among the newest events of a topic.

    That library published `java` of them. `behind` of them come after a later event of their key. Its transfer causes
    this, and so do publishers' transactions of the same moment. `connected`: a session has the name of Java's driver.
    """

    java: int
    behind: int
    connected: bool


NEWEST: Final = 10_000
"""The number of newest events that `order` looks at."""


def order(database: Database, topic: str) -> Order:
    """Look at the order of a topic's newest events."""
    query = LogQueries("legacy_writers", database.schema)("java_order", topic=topic)
    with database.connection() as connection:
        if in_blocks(connection, database.schema, topic):
            return Order(0, 0, connected=False)
        return Order(*fetch_one(connection, query, {"limit": NEWEST}, prepare=False))


def is_guarded(connection: Connection, schema: str, topic: str) -> bool:
    """Whether a trigger moves events for partitions that a topic does not have."""
    log = identifier(schema, topic).as_string(connection)
    return fetch_first(connection, LogQueries("legacy_writers", schema)("is_guarded"), {"log": log}) == (True,)


def hold(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Lock a topic's log against writers until the caller's transaction ends, before `guard` does. Reading goes on."""
    form = form_in_transaction(connection, schema, topic)
    log = sql.Identifier(schema, store(topic, form, blocks=form.writes_blocks))
    connection.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(log))


def guard(connection: psycopg.Connection[Any], schema: str, topic: str, partitions: int) -> None:
    """From now on, move events of partition `partitions` and above to the partitions below it.

    The caller's transaction holds the registry and the topic. A log with blocks refuses such writers anyway.
    """
    if form_in_transaction(connection, schema, topic).blocks:
        return
    queries = Queries("guards", schema)
    function = sql.Identifier(schema, "place_in_layout")
    named = {"name": f"{function.as_string(connection)}()"}
    if fetch_first(connection, queries("has_guard_function"), named) != (True,):
        connection.execute(definitions("guards", schema).encode())
    connection.execute(
        sql.SQL(
            "CREATE OR REPLACE TRIGGER {guard} BEFORE INSERT ON {log} FOR EACH ROW "
            "WHEN (NEW.eql_partition OPERATOR(pg_catalog.>=) {partitions}) EXECUTE FUNCTION {function}({argument})"
        ).format(
            guard=sql.Identifier(GUARD), log=identifier(schema, topic), function=function,
            partitions=sql.Literal(partitions), argument=sql.Literal(str(partitions)),
        )
    )  # fmt: skip


def release(connection: Connection, schema: str, topic: str) -> int | None:
    """End the guard of a log whose table is about to change; returns the partitions for `guard`, None without a guard.

    The caller's transaction holds the topic.
    """
    if not is_guarded(connection, schema, topic):
        return None
    log = identifier(schema, topic)
    connection.execute(sql.SQL("DROP TRIGGER {} ON {}").format(sql.Identifier(GUARD), log))
    row = fetch_first(connection, LogQueries("legacy_writers", schema)("partitions"), {"topic": topic})
    return None if row is None else int(row[0])
