"""The form of a log: a row for each event, or blocks of events.

The relation `{topic}_event` has EventSQL's columns in both forms. In the form of rows it is the table that holds the
events. In the form of blocks it is a view, and the table `{topic}_block` holds the events. So a statement that takes a
log for rows is right for blocks too, and slow.
"""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.log_names import block_table, event_table
from eventsql_orchestration.database.rows import fetch_one

ROOM: Final = __package__
"""The package that has the SQL files of this room."""

BLOCKS_SECONDS: Final = 5.0
"""How long a log is taken for blocks until its form is looked up again. After that time at most, reading a topic that
was deleted and made anew with rows does not fail any more."""

ROWS_SECONDS: Final = 60.0
"""How long a log is taken for rows. Meanwhile reading a topic that was made anew with blocks is slow."""

_known: Final[dict[tuple[object, ...], tuple[float, bool]]] = {}
"""By server, database, schema and topic: until when the form is known, and whether it is blocks."""

_MOST_KNOWN: Final = 10_000


def in_blocks(connection: psycopg.Connection[Any], schema: str, topic: str) -> bool:
    """Whether a topic's log is in blocks, as far as is known from a short while ago. False for a missing log."""
    key = _key(connection, schema, topic)
    known = _known.get(key)
    if known is not None and time.monotonic() < known[0]:
        return known[1]
    return is_in_blocks(connection, schema, topic)


def is_in_blocks(connection: psycopg.Connection[Any], schema: str, topic: str) -> bool:
    """Whether a topic's log is in blocks now."""
    log = sql.Identifier(schema, event_table(topic)).as_string(connection)
    (blocks,) = fetch_one(connection, Queries("forms", schema, room=ROOM)("form"), {"log": log}, prepare=False)
    learn(connection, schema, topic, blocks=bool(blocks))
    return bool(blocks)


def learn(connection: psycopg.Connection[Any], schema: str, topic: str, *, blocks: bool) -> None:
    """Note the form of a log that a statement has found."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    until = time.monotonic() + (BLOCKS_SECONDS if blocks else ROWS_SECONDS)
    _known[_key(connection, schema, topic)] = (until, blocks)


def forget(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Look the form of a log up anew at its next use, as its table has changed."""
    _known.pop(_key(connection, schema, topic), None)


def _key(connection: psycopg.Connection[Any], schema: str, topic: str) -> tuple[object, ...]:
    server = connection.pgconn
    return (server.host, server.port, server.db, schema, topic)


def stored_table(connection: psycopg.Connection[Any], schema: str, topic: str) -> str:
    """The name of the table that holds a log: its column `eql_id` has the ids of events, or of blocks' last events."""
    return block_table(topic) if in_blocks(connection, schema, topic) else event_table(topic)


def stored(connection: psycopg.Connection[Any], schema: str, topic: str) -> sql.Identifier:
    """The table that holds a log, to be composed into a statement of this room."""
    return sql.Identifier(schema, stored_table(connection, schema, topic))
