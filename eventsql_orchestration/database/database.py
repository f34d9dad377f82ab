"""One PostgreSQL database: its connection pool, its schema, and its errors as errors of this package."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import psycopg
import sqlalchemy

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import migrations
from eventsql_orchestration.database.connections import (
    CallersConnection,
    Connection,
    Home,
    begin,
    identity,
    joinable_connection,
    plain_cursors,
    readable_times,
)
from eventsql_orchestration.database.grants import ADMIN, may_not_migrate, permission_error
from eventsql_orchestration.database.installation import CurrentRole, has_tables, revision_of
from eventsql_orchestration.database.pool import Pool, plain
from eventsql_orchestration.database.queries import statement
from eventsql_orchestration.database.sessions import ISOLATION, connect, leave_read_only
from eventsql_orchestration.database.single_statement import RawRow, SingleStatement
from eventsql_orchestration.database.translation import (
    IF_LOST,
    IF_OF_JAVA,
    describe,
    driver_error,
    ran_by_us,
    translate,
    translate_own,
)
from eventsql_orchestration.database.urls import connect_arguments, label, parse_dsn, render, split_direct
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    PermissionDeniedError,
    SchemaOutdatedError,
)
from eventsql_orchestration.forks import ProcessLock
from eventsql_orchestration.model import check_schema_name
from eventsql_orchestration.validation import DEFAULT_SCHEMA, check_kind

logger = logging.getLogger(__name__)

SILENCE: Final = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""Options of libpq: the kernel finds out within half a minute that the server's machine is gone. By default, that takes
two hours while a connection waits for an answer, and 15 minutes while it sends. The statement `open` in `sessions.sql`
limits how long the server waits for a client's machine.
"""

_IN_THE_WAY: Final = (
    psycopg.errors.DuplicateTable, psycopg.errors.DuplicateColumn, psycopg.errors.DuplicateObject,
    psycopg.errors.UndefinedColumn,
)  # fmt: skip
"""Errors of a migration that meets tables, columns and constraints of a later revision than the schema's, or a table of
another program."""

Result = TypeVar("Result")


@checked
class Database:
    """A pool of connections to one database and the schema in it that holds the platform's tables.

    The first call that needs a connection connects. It finds the schema up to date, or brings it up to date
    (`migrate=True`), or raises `SchemaOutdatedError`.

    A forked process, such as a web server's worker, begins with an empty pool.

    `dsn` is a PostgreSQL URL. `pool_size` bounds the connections that are kept, `max_overflow` the further connections
    under load. If the URL leads to a pooler in transaction mode, such as PgBouncer, its option `direct=host:port` names
    the server itself, for the few connections that keep a session.
    """

    def __init__(
        self, dsn: str,
        *, schema: str = DEFAULT_SCHEMA, migrate: bool = True, pool_size: int = 10, max_overflow: int = 20,
        application_name: str = "eventsql",
    ) -> None:  # fmt: skip
        self.given_url = parse_dsn(dsn)
        """The URL with its option `direct`, which libpq does not know."""
        self.url, self._direct_url = split_direct(self.given_url)
        self.schema = check_schema_name(schema)
        self._migrate = migrate
        self._ready = False
        self._turn = ProcessLock()
        self._role: CurrentRole | None = None
        options = {"application_name": application_name, "connect_timeout": 10, **SILENCE}
        self._connect_args = {name: value for name, value in options.items() if name not in self.url.query}
        self._home = Home()
        self._pool = Pool(self.url, self._connect_args, size=pool_size, overflow=max_overflow, note=self._home.note)

    def __repr__(self) -> str:
        return f"Database({self})"

    def __str__(self) -> str:
        return label(self.url)

    @property
    def dsn(self) -> str:
        """The URL with its password, as libpq reads it."""
        return render(self.url)

    @property
    def given_dsn(self) -> str:
        """The URL with its password and its option `direct`, for another process that uses this package."""
        return render(self.given_url)

    @property
    def engine(self) -> sqlalchemy.Engine:
        """The engine of SQLAlchemy that holds the pooled connections.

        It keeps half of `pool_size` for those who connect by the engine; the other half is for the platform's own
        calls. A program that uses SQLAlchemy much makes an engine of its own: the platform's methods take its
        connections, too.
        """
        return self._pool.engine

    @property
    def most_connections(self) -> float:
        """The most pooled connections that this process may have at once; infinity without a bound."""
        return self._pool.most_connections

    @property
    def exhausted(self) -> bool:
        """Whether every pooled connection that this process may have is in use."""
        return self._pool.exhausted

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """One pooled connection in autocommit mode; `with connection.transaction():` spans a transaction on it.

        Raises `DatabaseUnavailableError` when the server cannot be reached or goes away, `DatabaseFullError`,
        `SchemaOutdatedError`, and `ClosedError` after `close`.
        """
        self.ensure_schema()
        with self.pooled() as connection:
            yield connection

    @contextmanager
    def urgent(self) -> Iterator[Connection]:
        """A connection in autocommit mode for work that cannot wait for handlers, such as the renewal of a lease.

        While handlers have all connections of the pool, it is a connection outside the pool.
        """
        if not self.exhausted:
            with self.connection() as connection:
                yield connection
            return
        with closing(self.dedicated()) as connection, self.errors(connection):
            yield connection

    @checks_itself
    def joined(self, connection: CallersConnection | None) -> AbstractContextManager[Connection]:
        """A caller's connection, whose transaction the block joins, or a pooled connection for None."""
        return self.connection() if connection is None else self.callers(connection)

    @checks_itself
    @contextmanager
    def callers(self, connection: CallersConnection) -> Iterator[Connection]:
        """A caller's connection of psycopg or SQLAlchemy, in whose transaction the block takes part.

        With a psycopg connection in autocommit mode, outside of a transaction, each statement commits by itself. Raises
        `ValidationError`, before anything is written, for a connection to another database, a SQLAlchemy connection in
        AUTOCOMMIT, a connection in pipeline mode, and anything else; otherwise as `connection()`.
        """
        driver = joinable_connection(connection)
        self.ensure_schema()
        with self.errors(driver), plain_cursors(driver):
            self._home.check(driver, self, self._identity)
            begin(connection)
            with readable_times(driver):
                yield driver

    def _identity(self) -> str | None:
        with self.pooled() as connection:
            return identity(connection)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One pooled connection inside a transaction that commits when the block ends well."""
        with self.connection() as connection, connection.transaction():
            yield connection

    @contextmanager
    def core(self, *, one_snapshot: bool = False) -> Iterator[sqlalchemy.Connection]:
        """A transaction for SQLAlchemy Core, in which the module `tables` describes the tables in this schema.

        With `one_snapshot`, all its statements see the database as it was at the first of them. SQLAlchemy does not
        qualify functions and operators, so the transaction's search_path has only the system's schemas.
        """
        self.ensure_schema()
        engine = self.engine.execution_options(
            isolation_level="REPEATABLE READ" if one_snapshot else "READ COMMITTED",
            schema_translate_map={None: self.schema},
        )
        with self.errors(), self._pool.alchemy(engine) as connection:
            try:
                with connection.begin():
                    connection.exec_driver_sql(statement("sessions", "plain"))
                    yield connection
            except (psycopg.Error, DatabaseError) as error:
                # As `leave_read_only`, for statements of the driver's connection, which SQLAlchemy does not see.
                if any(isinstance(each, psycopg.errors.ReadOnlySqlTransaction) for each in (error, error.__cause__)):
                    connection.invalidate()
                raise

    @contextmanager
    def pooled(self) -> Iterator[Connection]:
        """As `connection()`, without a look at the schema, which may be missing."""
        with self.errors():
            loan = self._pool.take()
        try:
            with self.errors(loan.connection), plain(loan.connection) as connection:
                yield connection
        except DatabaseError as error:
            leave_read_only(loan.connection, error.__cause__)
            raise
        finally:
            self._pool.give_back(loan)

    def _run(
        self,
        run: Callable[[Connection, dict[Any, Any], Mapping[str, bytes | None]], Result],
        values: Mapping[str, bytes | None],
    ) -> Result:
        self.ensure_schema()
        connection = None
        try:
            loan = self._pool.take()
            connection = loan.connection
            try:
                return run(connection, loan.notes, values)
            except psycopg.Error as error:
                leave_read_only(connection, error)
                raise
            finally:
                self._pool.give_back(loan)
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError):
            # Enter it only after an error: the context manager would add 5 µs to each message that is sent.
            with self.errors(connection):
                raise

    @checks_itself
    def execute(self, statement: SingleStatement, values: Mapping[str, bytes | None]) -> int:
        """Execute a statement in its own transaction on a pooled connection; gives the number of rows that it wrote.

        `values` are in PostgreSQL's binary format. Raises as `connection()`.
        """
        return self._run(statement.execute, values)

    @checks_itself
    def fetch(self, statement: SingleStatement, values: Mapping[str, bytes | None]) -> list[RawRow]:
        """Execute a statement that gives rows in its own transaction on a pooled connection. See `execute`."""
        return self._run(statement.fetch, values)

    @checks_itself
    def fetch_values(self, statement: SingleStatement, values: Mapping[str, bytes | None]) -> list[tuple[Any, ...]]:
        """As `fetch`, with the columns as Python's values. See `SingleStatement.fetch_values`."""
        return self._run(statement.fetch_values, values)

    def dedicated(self) -> Connection:
        """A connection outside the pool, in autocommit mode; the caller closes it.

        It leads past a pooler if the URL says how. Otherwise it leads to the pooler: ask `is_pooled` before using
        anything that a session keeps.
        """
        self.ensure_schema()
        arguments = {**connect_arguments(self._direct_url), **self._connect_args}
        with self.errors():
            connection = connect(self.dsn, **arguments, autocommit=True)
        connection.isolation_level = ISOLATION
        return connection

    @checks_itself
    @contextmanager
    def errors(self, connection: Connection | None = None) -> Iterator[None]:
        """Raise the driver's errors of the block as errors of this package.

        An error of a caller's own statement stays as it is, unless its meaning is known. If a caller's code runs in the
        block, pass the platform's `connection`. While this connection is open, an error that a database cannot be
        reached is about another database, and stays as it is.
        """
        if connection is not None:
            check_kind("connection", connection, psycopg.Connection)
        try:
            yield
        except (psycopg.Error, sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError) as error:
            known = translate(error, str(self), self.schema)
            # A caller's own statement may name a table that nobody has made, such as a view.
            if known is None or isinstance(known, SchemaOutdatedError):
                cause = driver_error(error)
                if not isinstance(cause, psycopg.Error) or not ran_by_us(error, __name__):
                    raise
                known = self.meaning(cause, connection)
            if isinstance(known, DatabaseUnavailableError) and connection is not None and not connection.closed:
                raise
            raise known from error

    @checks_itself
    def meaning(self, error: psycopg.Error, connection: Connection | None = None) -> EventSQLError:
        """The error of this package for a driver's error. A statement of this package on `connection` caused it."""
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            role, prefix = self._role_names()
            held = frozenset[str]() if self._role is None else self._role.kinds
            if connection is not None and not connection.closed and connection.info.user != self.url.username:
                role, held = connection.info.user, frozenset()
            return permission_error(describe(error), str(self), role, prefix, held)
        return translate_own(error, str(self), self.schema)

    @checks_itself
    @contextmanager
    def by_admin(self) -> Iterator[None]:
        """Raise a refusal in the block, which is the work of the admin role, as an error that names this role alone."""
        try:
            yield
        except PermissionDeniedError as error:
            cause = driver_error(error.__cause__) if error.__cause__ is not None else None
            if not isinstance(cause, psycopg.Error) or self._role is None or ADMIN in self._role.kinds:
                raise
            role, prefix = self._role_names()
            raise permission_error(describe(cause), str(self), role, prefix, by_admin=True) from error.__cause__

    def ensure_schema(self) -> None:
        """Check once that the tables are there and not older than this package; migrate them if `migrate` is set.

        Raises `ClosedError` after `close`.
        """
        self.check_open()
        if not self._ready:
            with self._turn.lock:
                if not self._ready:
                    self._check_schema()
                    self._ready = True

    def _check_schema(self) -> None:
        revision = self.revision()
        if revision is not None and (revision == migrations.HEAD or not migrations.known(revision)):
            return
        if not self._migrate:
            found, more = "missing", f", or `eventsql topic create` makes the tables; {IF_LOST}"
            if revision is not None:
                found, more = f"at revision {revision}, this package needs {migrations.HEAD}", ""
            elif self.has_tables():
                found, more = "not migrated yet", f", {IF_OF_JAVA}"
            raise SchemaOutdatedError(f"schema {self.schema!r} of {self} is {found}: run `eventsql migrate`{more}")
        self.migrate()
        # The migration may have changed the role's rights.
        self.revision()

    def revision(self) -> str | None:
        """The schema's revision, or None if it was never migrated."""
        with self.pooled() as connection:
            return self.revision_on(connection)

    def revision_on(self, connection: Connection) -> str | None:
        """As `revision`, on a connection. From here on, errors know the current role."""
        self._role = CurrentRole.of(connection, self.schema)
        return revision_of(connection, self.schema)

    def has_tables(self) -> bool:
        """Whether the schema has tables of the platform, also those of EventSQL's Java library."""
        with self.pooled() as connection:
            return has_tables(connection, self.schema)

    @property
    def may_transfer(self) -> bool:
        """Whether the current role may take events out of the buffer, as an owner or a transfer role.

        The right is read at the first connection: a GRANT counts for programs that start after it.
        """
        self.ensure_schema()
        return self._role is not None and self._role.may_transfer

    def _role_names(self) -> tuple[str | None, str | None]:
        """The current role, and the prefix of the installation's roles, as far as they are known."""
        return (self.url.username, None) if self._role is None else (self._role.name, self._role.prefix)

    def migrate(self, *, times_in: str = "UTC") -> None:
        """Bring the schema up to date; safe from many processes at once.

        `times_in` is the time zone of times in existing tables of EventSQL's Java library. For any zone but UTC, the
        first migration rewrites these tables and locks them meanwhile. Raises `ConfigurationError` for a zone that the
        server does not know.
        """
        engine = self.engine.execution_options(isolation_level="READ COMMITTED")
        with self.errors():
            try:
                migrations.upgrade(self._pool.alchemy(engine), self.schema, times_in=times_in)
            except (sqlalchemy.exc.DBAPIError, psycopg.Error) as error:
                cause = driver_error(error)
                if isinstance(cause, psycopg.errors.InvalidParameterValue):
                    raise ConfigurationError(
                        f"the server does not know the time zone {times_in!r}: the view pg_timezone_names lists "
                        "the zones that it knows"
                    ) from None
                if isinstance(cause, _IN_THE_WAY):
                    raise DatabaseError(
                        f"schema {self.schema!r} of {self} has tables that the migration cannot use "
                        f"({describe(cause)}), and nothing was changed: rename those that are yours; if they are of a "
                        "restore that did not end, drop the database that was made for the restore, and restore again"
                    ) from error
                if isinstance(cause, psycopg.errors.InsufficientPrivilege):
                    with self.pooled() as connection:
                        self._role = CurrentRole.of(connection, self.schema)
                    role, prefix = self._role_names()
                    raise may_not_migrate(
                        describe(cause), str(self), schema=self.schema, revision=migrations.HEAD,
                        role=role, prefix=prefix,
                    ) from error  # fmt: skip
                raise
        logger.info("schema %s of %s is up to date", self.schema, self)

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        self._pool.check_open()

    def open(self) -> None:
        """Open it again after `close`; the next use connects."""
        self._pool.open()

    def close(self) -> None:
        """Close every pooled connection. One in use is closed when it is given back. Later uses raise `ClosedError`."""
        self._pool.close()

    def __enter__(self) -> Database:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@runtime_checkable
class Platform(Protocol):
    """A platform (`EventSQL`) on one database, or a `Shard`."""

    @property
    def database(self) -> Database: ...


def database_of(source: Database | Platform) -> Database:
    """The database of a platform or shard, or the database itself. Raises `SingleShardError` for several databases."""
    return source if isinstance(source, Database) else source.database
