"""ADBC's connections, which give the rows of a query as Arrow record batches, and the errors of a read.

Uses ADBC's low-level interface. Its DBAPI interface loads `pyarrow.dataset` and thereby pandas: a second of work for
each of the processes that Spark starts, and it starts several for a query.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache
from typing import Final

import psycopg
from psycopg import conninfo

from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
    MissingExtraError,
)
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.redaction import hiding
from eventsql_orchestration.spark.options import Source

try:
    import adbc_driver_postgresql  # type: ignore[import-untyped]  # it has no types
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
    from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement, Error, ProgrammingError
except ModuleNotFoundError:
    raise MissingExtraError("spark", "the data source of Spark") from None

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 4 * 1024 * 1024
"""The size of a record batch. It bounds a task's memory, whatever its range. Measured with 200-byte events on two
cores: 1 MiB reads 2.7 million events/s, 4 MiB 2.8 and 16 MiB 3.0."""

_BATCH_SIZE: Final = {adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}

_DATABASES: Final = 8
"""The databases that a process remembers. All queries of a Spark session share its Python processes."""


@lru_cache(maxsize=_DATABASES)
def known_database(dsn: str) -> AdbcDatabase:
    """ADBC's knowledge of a database's types, for the life of the process. It holds no connection.

    Without this, each task would wait for it. Measured with 20 tables: 25 ms. The task's own connection takes 7 ms.
    """
    database: AdbcDatabase = adbc_driver_postgresql.connect(_confined(dsn))
    return database


_NO_ROOM: Final = ("53100", "53200", "53400")
"""SQLSTATEs of a full disk, of full memory, and of a limit such as `temp_file_limit`."""

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
"""The schemas on the search_path whose objects would shadow those that the driver's own queries name."""


def _confined(dsn: str) -> str:
    """The same database with only the system's schemas on the search_path: the driver's queries are not qualified.

    A pooler may refuse or ignore the option. Raises `ConfigurationError` if the path captures names of these queries
    then.
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
            f"the Arrow driver would use an operator <>, a function version or a type text of schema "
            f"{captures[0][0]!r}, and the pooler sets no search_path: remove the schema from the role's search_path, "
            "or connect past the pooler"
        )
    return confined


def _captures(dsn: str) -> list[tuple[str]]:
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        return connection.execute(_CAPTURES).fetchall()


class RefusedError(Exception):
    """A query failed among its rows, and the server still answers. The SQLSTATE is not known."""


class CutOffError(Exception):
    """The connection was lost among the rows of a query."""


class CopyConnection:
    """A connection in a transaction, for a `with` block, whose end rolls back an open transaction.

    Raises `adbc_driver_manager.Error` or `psycopg.Error`, with the server's `sqlstate` if there is one, and
    `ConfigurationError` as `_confined`. Among the rows of a query it raises `RefusedError` or `CutOffError`.
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

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def execute(self, statement: str) -> None:
        """Execute a statement that gives no rows."""
        self._statement.set_sql_query(statement)
        self._statement.execute_update()

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """The rows of a query without parameters, as they come. Read all of them before the next statement."""
        self._statement.set_sql_query(query)
        stream, _ = self._statement.execute_query()
        try:
            with closing(pa.RecordBatchReader.from_stream(stream)) as reader:
                yield from reader
        except (pa.ArrowException, OSError) as error:
            # Arrow errors have no SQLSTATE. A rollback shows whether the server still answers.
            try:
                self._connection.rollback()
            except Error:
                raise CutOffError(str(error)) from error
            raise RefusedError(str(error)) from error

    def commit(self) -> None:
        """Commit. The next statement begins another transaction."""
        self._connection.commit()


@contextmanager
def read_errors(source: Source, what: object) -> Iterator[None]:
    """Raise the database's errors of a read of `what` as errors of this package."""
    try:
        yield
    except (Error, psycopg.Error, RefusedError, CutOffError) as error:
        raise translate(error, source, f"{what} could not be read") from error


def behind(what: object, lacking: str) -> DatabaseError:
    """The error of a read of `what` from a server that is `lacking` a part of it."""
    return DatabaseError(
        f"{what} could not be read: this server lacks {lacking} that were there when the read was planned. It is a "
        "standby that is behind, or was restored: read again"
    )


def translate(error: Exception, source: Source, what: str) -> DatabaseError:
    """An error of ADBC or psycopg as an error of this package."""
    state = getattr(error, "sqlstate", None)
    said = str(error).strip()
    detail = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
    if state is None and isinstance(error, ProgrammingError | psycopg.ProgrammingError | psycopg.DataError):
        # The driver itself raised it. For example, ADBC's library is missing, or a text has a NUL character.
        return DatabaseError(f"{what}: {detail}")
    if state in _NO_ROOM:
        return DatabaseFullError(f"{what}: {source.label} has no room left: {detail}")
    if not isinstance(error, RefusedError) and (state is None or state.startswith(("08", "57P", "53"))):
        return DatabaseUnavailableError(f"{what}: {source.label} cannot be reached, or went away: {detail}")
    if state == "42501":
        # The right is missing. Loaded only here, so that tasks without this error start faster.
        from eventsql_orchestration.database.grants import permission_error  # noqa: PLC0415

        return permission_error(detail.removeprefix("ERROR:").strip(), f"{what}: {source.label}", None, None)
    return DatabaseError(f"{what}: {source.label} refused: {detail}")
