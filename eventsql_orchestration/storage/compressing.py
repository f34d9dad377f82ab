"""The compression of a log's blocks: a setting of the columns of their tables, for new blocks."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.errors import RegistryError
from eventsql_orchestration.model import UNCOMPRESSED, Compression
from eventsql_orchestration.storage.log_form import ROOM


def available(connection: psycopg.Connection[Any], schema: str) -> tuple[Compression, ...]:
    """The compressions that the server has, and "none"."""
    (methods,) = fetch_one(connection, Queries("forms", schema, room=ROOM)("compressions"))
    return (*methods, UNCOMPRESSED)


def default(connection: psycopg.Connection[Any], schema: str) -> Compression:
    """The compression of a new topic that names none.

    With lz4, an event takes half the disk and no more processor time (docs/benchmarks.md); pglz takes more time.
    """
    return "lz4" if "lz4" in available(connection, schema) else UNCOMPRESSED


def check_available(connection: psycopg.Connection[Any], schema: str, compression: Compression | None) -> None:
    """Raise `RegistryError` if the server is built without a compression."""
    if compression not in {None, UNCOMPRESSED}:
        check_among(compression, available(connection, schema), "this PostgreSQL server")


def check_among(compression: Compression | None, methods: tuple[Compression, ...], server: str) -> None:
    """Raise `RegistryError` if a compression is not among those of a server."""
    if compression is not None and compression not in methods:
        raise RegistryError(
            f"{server} is built without {compression}: use {' or '.join(methods)} for the compression, "
            f"or a server that has {compression}"
        )


def compress(connection: psycopg.Connection[Any], schema: str, table: str, compression: Compression) -> None:
    """Set the compression of new blocks in a table of blocks, or in one segment of it.

    Later segments inherit the setting of their table.
    """
    queries = Queries("forms", schema, room=ROOM)
    if compression == UNCOMPRESSED:
        connection.execute(queries("store_apart", table=table))
    else:
        connection.execute(queries("compress", table=table, method=compression))


def change(
    connection: psycopg.Connection[Any], schema: str, topic: str, tables: list[str], compression: Compression
) -> None:
    """Note the compression of a topic, and change it in the tables of its blocks, in the caller's transaction.

    The first of `tables` is the whole log, the others are its segments. Readers and writers of the log wait.
    """
    queries = Queries("forms", schema, room=ROOM)
    connection.execute(queries("note_compression"), {"topic": topic, "compression": compression})
    if tables:
        # Lock all tables at once: a wait for one of them must not keep the others locked.
        log = sql.Identifier(schema, tables[0])
        connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(log))
    for table in tables:
        compress(connection, schema, table, compression)
