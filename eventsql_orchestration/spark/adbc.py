"""The connection over which a task reads: what a query gives, as Arrow record batches, copied by ADBC.

Of ADBC it takes the low-level interface alone. The one of PEP 249 loads `pyarrow.dataset`, and that loads pandas: a
second of work for every process that Spark starts, and it starts several for a query.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import lru_cache
from types import TracebackType
from typing import Final

import adbc_driver_postgresql  # type: ignore[import-untyped]  # it has no types
import psycopg
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement, Error
from psycopg import conninfo

from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.redaction import hiding

BATCH_BYTES: Final = 4 * 1024 * 1024
"""What a record batch should hold; bounds a task's memory, whatever its range. Measured with 200-byte events on two
cores: 1 MiB reads 2.7 million events/s, 4 MiB 2.8 and 16 MiB 3.0."""

_BATCH_SIZE: Final = {adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}

_DATABASES: Final = 8
"""Databases that a process remembers. Those of one session of Spark share its Python processes."""


@lru_cache(maxsize=_DATABASES)
def known_database(dsn: str) -> AdbcDatabase:
    """What ADBC knows of a database. It goes with the process, and holds no connection.

    ADBC asks the server for all of its types, those of tables too, over a connection that it closes. Measured with 20
    tables: 25 ms, which every task would wait for; the task's own connection takes 7.
    """
    database: AdbcDatabase = adbc_driver_postgresql.connect(_confined(dsn))
    return database


_PATH: Final = "pg_catalog,pg_temp"

_CAPTURES: Final = qualified("""
SELECT n.nspname
FROM pg_namespace n
WHERE n.nspname = ANY (current_schemas(false)) AND n.nspname <> 'pg_catalog' AND (
    EXISTS (
        SELECT FROM pg_operator o
        JOIN pg_type l ON l.oid = o.oprleft AND l.typnamespace = 'pg_catalog'::regnamespace
        JOIN pg_type r ON r.oid = o.oprright AND r.typnamespace = 'pg_catalog'::regnamespace
        WHERE o.oprnamespace = n.oid AND o.oprname = '<>'
    )
    OR EXISTS (SELECT FROM pg_proc p WHERE p.pronamespace = n.oid AND p.proname = 'version')
    OR EXISTS (SELECT FROM pg_type t WHERE t.typnamespace = n.oid AND t.typname = 'text')
)
""")
"""The schemas on a session's search_path with names that the driver's own queries would find."""


def _confined(dsn: str) -> str:
    """The same database with a search_path of the system's names alone: the driver's own queries are not qualified.

    A pooler may refuse or ignore the option. Then the path must hold nothing that captures those queries. Raises
    `ConfigurationError` where it does.
    """
    given = conninfo.conninfo_to_dict(dsn).get("options") or ""
    plain = conninfo.make_conninfo(dsn, client_encoding="UTF8")
    confined = conninfo.make_conninfo(plain, options=f"{given} -c search_path={_PATH}".strip())
    try:
        captures = _captures(confined)
    except psycopg.OperationalError as error:
        if "unsupported startup parameter" not in str(error):
            raise
        confined, captures = plain, _captures(plain)
    if captures:
        raise ConfigurationError(
            f"schema {captures[0][0]!r} on the search_path has an operator <>, a function version or a type text of "
            "the system's types, which the Arrow driver would use, and the pooler sets no search_path: remove it from "
            "the path or from the schema, or connect past the pooler"
        )
    return confined


def _captures(dsn: str) -> list[tuple[str]]:
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        return connection.execute(_CAPTURES).fetchall()


class RefusedError(Exception):
    """A query that came to an error among its rows, of a server that stands. Its state is not known."""


class CopyConnection:
    """A connection in a transaction. Close it, or use it as a context manager.

    Raises `adbc_driver_manager.Error` or `psycopg.Error`, with the server's `sqlstate` where it said one, and
    `ConfigurationError` for a pooler before a database with names that are not the system's; among the rows of a query
    `RefusedError`, or what pyarrow raises where the connection is gone.
    """

    def __init__(self, dsn: str) -> None:
        with hiding(dsn), ExitStack() as opened:
            self._connection = opened.enter_context(AdbcConnection(known_database(dsn)))
            self._connection.set_autocommit(False)
            self._statement = opened.enter_context(AdbcStatement(self._connection))
            self._statement.set_options(**_BATCH_SIZE)
            self._opened = opened.pop_all()

    def __enter__(self) -> CopyConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and with it a transaction that is not committed."""
        self._opened.close()

    def execute(self, statement: str) -> None:
        """Execute a statement that gives no rows."""
        self._statement.set_sql_query(statement)
        self._statement.execute_update()

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """The rows of a query without parameters, as they come; none may be left to read when the next is executed."""
        self._statement.set_sql_query(query)
        stream, _ = self._statement.execute_query()
        try:
            with closing(pa.RecordBatchReader.from_stream(stream)) as reader:
                yield from reader
        except (pa.ArrowException, OSError) as error:
            # Arrow has no place for the server's state, which would say whether the connection is gone.
            if self._stands():
                raise RefusedError(str(error)) from error
            raise

    def _stands(self) -> bool:
        """Whether the server still answers; ends the transaction."""
        try:
            self._connection.rollback()
        except Error:
            return False
        return True

    def commit(self) -> None:
        """End the transaction; the next statement begins another."""
        self._connection.commit()
