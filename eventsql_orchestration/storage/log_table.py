"""The table of a topic's log: its columns, its name in SQL, making and dropping it."""

from __future__ import annotations

from typing import Any, Final

import psycopg
import sqlalchemy
from psycopg import sql
from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.schema import DropTable

from eventsql_orchestration.database import tables
from eventsql_orchestration.database.log_names import event_table
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.storage.log_queries import LogQueries

_TIME: Final = DateTime(timezone=True)


def event_log(topic: str, *, partitioned: bool) -> Table:
    """The table of one topic's log, in a `MetaData` of its own; `segments.py` makes its segments."""
    table = Table(
        event_table(topic),
        MetaData(),
        Column("eql_id", BigInteger, primary_key=True, autoincrement=True),
        Column("eql_partition", SmallInteger, nullable=False),
        Column("eql_key", Text),
        Column("eql_value", LargeBinary, nullable=False),
        Column("eql_buffered_at", _TIME, nullable=False),
        Column("eql_created_at", _TIME, nullable=False, server_default=text("now()")),
        Column("eql_metadata", JSON, nullable=False),
        postgresql_partition_by="RANGE (eql_id)",
    )
    if partitioned:
        Index(None, table.c.eql_partition, table.c.eql_id)
    return table


def table_name(topic: str) -> str:
    """The name of the table that holds a topic's log, for `copy_out` and for programs that show it."""
    return event_table(topic)


def identifier(schema: str, topic: str) -> sql.Identifier:
    """A topic's log, to be composed into a statement of this room."""
    return sql.Identifier(schema, event_table(topic))


def is_usable_name(topic: str) -> bool:
    """Whether a topic may have this name: the platform has tables too, and the log's table would have the same name."""
    return event_table(topic) not in tables.NAMES


def drop_log(connection: sqlalchemy.Connection, topic: str, *, if_exists: bool = False) -> None:
    """Drop a topic's log with its segments, in the caller's transaction."""
    connection.execute(DropTable(event_log(topic, partitioned=False), if_exists=if_exists))


def holds_events(connection: sqlalchemy.Connection, topic: str) -> bool:
    """Whether a topic's log has an event."""
    stored = select(event_log(topic, partitioned=False).c.eql_id).limit(1)
    return connection.execute(stored).first() is not None


def check_readable(connection: psycopg.Connection[Any], schema: str, topic: str) -> None:
    """Fail where the current role may not read a topic's log: row security hides the topic's consumers from it."""
    queries, log = LogQueries("read", schema), {"log": identifier(schema, topic).as_string(connection)}
    if fetch_first(connection, queries("is_refused"), log) == (True,):
        connection.execute(queries("check_readable", topic=topic))
