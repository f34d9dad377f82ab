"""Rows of statements as tuples, also on a caller's connection, which may have a row factory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.rows import TupleRow, tuple_row

Query: TypeAlias = sql.SQL | sql.Composed

Values: TypeAlias = Mapping[str, object] | None
"""The values of a statement's placeholders."""


class Connections(Protocol):
    """A `Database`. The class itself imports this module, through migrations and roles."""

    def connection(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]: ...


def fetch_all(
    connection: psycopg.Connection[Any], query: Query, values: Values = None, *, prepare: bool | None = None
) -> list[TupleRow]:
    """All rows of a statement."""
    return connection.cursor(row_factory=tuple_row).execute(query, values, prepare=prepare).fetchall()


def fetch_first(
    connection: psycopg.Connection[Any], query: Query, values: Values = None, *, prepare: bool | None = None
) -> TupleRow | None:
    """The first row of a statement; None if it gives none."""
    return connection.cursor(row_factory=tuple_row).execute(query, values, prepare=prepare).fetchone()


def fetch_one(
    connection: psycopg.Connection[Any], query: Query, values: Values = None, *, prepare: bool | None = None
) -> TupleRow:
    """The row of a statement that always gives one, as an aggregate does."""
    row = fetch_first(connection, query, values, prepare=prepare)
    assert row is not None, "the statement gives a row"
    return row


def in_copy(cursor: psycopg.Cursor[Any], query: Query, use: Callable[[psycopg.Copy], object]) -> None:
    """Begin a COPY, and hand it to `use`, which reads or writes it.

    psycopg keeps a lock of the connection in the block of `copy`. After Ctrl-C right at the end of that block, the lock
    would stay taken, and the rollback in the same thread would wait for ever.
    """
    copying = cursor.copy(query)
    try:
        with copying as copy:
            use(copy)
    finally:
        copying.gen.close()


def send_copy(cursor: psycopg.Cursor[Any], query: Query, data: Iterable[Buffer]) -> None:
    """COPY data to the server, by `in_copy`."""

    def send(copy: psycopg.Copy) -> None:
        for piece in data:
            copy.write(piece)

    in_copy(cursor, query, send)


def query_all(
    database: Connections, query: Query, values: Values = None, *, prepare: bool | None = None
) -> list[TupleRow]:
    """All rows of a statement, on a pooled connection."""
    with database.connection() as connection:
        return fetch_all(connection, query, values, prepare=prepare)


def query_first(database: Connections, query: Query, values: Values, *, prepare: bool | None = None) -> TupleRow | None:
    """The first row of a statement, on a pooled connection; None if it gives none."""
    with database.connection() as connection:
        return fetch_first(connection, query, values, prepare=prepare)
