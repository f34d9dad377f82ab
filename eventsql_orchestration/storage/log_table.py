"""The table of a topic's log: its name in SQL, making and dropping it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from eventsql_orchestration.database import tables
from eventsql_orchestration.database.log_names import block_table, event_table
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.errors import RegistryError
from eventsql_orchestration.model import UNCOMPRESSED, Topic
from eventsql_orchestration.storage import compressing, log_form
from eventsql_orchestration.storage.log_queries import LogQueries

ROW_COLUMNS: Final = (
    "eql_id", "eql_partition", "eql_key", "eql_value", "eql_buffered_at", "eql_created_at", "eql_metadata",
)  # fmt: skip
"""The columns of a log in rows."""


def table_name(topic: str) -> str:
    """The name of the relation with the events of a topic's log, for programs that read it in SQL."""
    return event_table(topic)


def identifier(schema: str, topic: str) -> sql.Identifier:
    """A topic's log with EventSQL's columns, to be composed into a statement of this room."""
    return sql.Identifier(schema, event_table(topic))


def is_usable_name(topic: str) -> bool:
    """Whether a topic may have this name: the platform has tables too, and the log's table would have the same name."""
    return event_table(topic) not in tables.NAMES


def exists(connection: psycopg.Connection[Any], schema: str, topic: str) -> bool:
    """Whether a topic has a log."""
    log = {"name": identifier(schema, topic).as_string(connection)}
    return fetch_first(connection, LogQueries("forms", schema)("exists"), log) == (True,)


def create_row_table(connection: psycopg.Connection[Any], schema: str, topic: Topic, table: str) -> None:
    """Create the table of this name for the rows of a topic's log, without segments."""
    for step in ("create_rows", "create_partition_index") if topic.partitioned else ("create_rows",):
        connection.execute(LogQueries("forms", schema)(step, topic=topic.name, table=table))


def create_blocks(connection: psycopg.Connection[Any], schema: str, topic: Topic) -> None:
    """Create a topic's log in blocks, without segments, in the caller's transaction."""
    check_free(connection, schema, block_table(topic.name))
    create_block_table(connection, schema, topic, block_table(topic.name))
    queries = LogQueries("forms", schema)
    for step in ("create_view", "refuse_rows"):
        connection.execute(queries(step, topic=topic.name))
    log_form.learn(connection, schema, topic.name, "blocks")


def create_block_table(connection: psycopg.Connection[Any], schema: str, topic: Topic, table: str) -> None:
    """Create the table of this name for the blocks of a topic's log, without segments."""
    queries = LogQueries("forms", schema)
    steps = ["create_blocks", "store_apart", "create_gap_index"]
    for step in steps + (["create_partition_index"] if topic.partitioned else []):
        connection.execute(queries(step, topic=topic.name, table=table))
    # A topic that was restored from another server may have a compression that this server lacks.
    if topic.compression != UNCOMPRESSED and topic.compression in compressing.available(connection, schema):
        compressing.compress(connection, schema, table, topic.compression)


def check_free(connection: psycopg.Connection[Any], schema: str, table: str) -> None:
    """Raise `RegistryError` if there is a relation of this name, which a log needs."""
    name = sql.Identifier(schema, table).as_string(connection)
    if fetch_first(connection, LogQueries("forms", schema)("exists"), {"name": name}) == (True,):
        raise RegistryError(f"there is a table {name} already, which no log uses: rename it")


class BrokenBlock(NamedTuple):
    """A block that is not whole, overlaps the one before it, or is of a partition that its topic never had.

    `offset` is the offset of its last event.
    """

    offset: int
    partition: int
    finding: str


def broken_blocks(connection: psycopg.Connection[Any], schema: str, topic: str) -> list[BrokenBlock]:
    """The first broken blocks of a topic's log, and none for a log in rows. Looks into the newest 1,000 blocks."""
    if not log_form.in_blocks(connection, schema, topic):
        return []
    query = LogQueries("forms", schema).on(connection, "broken_blocks", topic)
    return [BrokenBlock(*row) for row in fetch_all(connection, query, {"topic": topic}, prepare=False)]


def hold_log(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Keep readers away from a topic's log until the end of the caller's transaction, which holds the topic.

    It locks the views first, as their readers do: otherwise the two could wait for each other. Call it before the
    buffer is locked, if the log may be dropped: a transaction that reads the log may publish too, and the publishers of
    other topics must not wait for it.
    """
    if exists(connection, schema, topic):
        views = (event_table(topic), block_table(topic)) if log_form.form_now(connection, schema, topic).blocks else ()
        names = dict.fromkeys((*views, *log_form.tables(connection, schema, topic)))
        relations = sql.SQL(", ").join(sql.Identifier(schema, name) for name in names)
        connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(relations))


def drop_log(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Drop a topic's log with its segments, in the caller's transaction."""
    form = log_form.form_now(connection, schema, topic)
    steps: tuple[str, ...] = ("drop_view", "drop_blocks") if form.blocks else ("drop_rows",)
    if form.both:
        steps = ("drop_view", "drop_view_of_blocks", "drop_rows", "drop_blocks")
    if not form.blocks:
        drop_left_view(connection, schema, topic)
    for step in steps:
        connection.execute(LogQueries("forms", schema)(step, topic=topic, form=form))
    log_form.forget(connection, schema, topic)


def drop_left_view(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Drop the view of blocks that a log in rows has kept from the time when it was in both forms.

    Raises `RegistryError` if another object depends on the view.
    """
    queries = LogQueries("forms", schema)
    if fetch_first(connection, queries("has_view_of_blocks", topic=topic)) != (True,):
        return
    try:
        connection.execute(queries("drop_view_of_blocks", topic=topic))
    except psycopg.errors.DependentObjectsStillExist as error:
        raise RegistryError(
            f"an object depends on the view of topic {topic!r}: drop the object first ({error})"
        ) from error


def holds_events(connection: psycopg.Connection[Any], schema: str, topic: str) -> bool:
    """Whether a topic's log has an event."""
    return fetch_one(connection, LogQueries("altering", schema)("holds_events", table=event_table(topic))) == (True,)


def check_readable(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Fail if the current role may not read a topic's log: otherwise row security would silently hide its consumers."""
    queries = LogQueries("read", schema)
    log = {"log": sql.Identifier(schema, log_form.stored_table(connection, schema, topic)).as_string(connection)}
    if fetch_first(connection, queries("is_refused"), log) == (True,):
        connection.execute(queries.on(connection, "check_readable", topic))
