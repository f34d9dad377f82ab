"""One PostgreSQL database: its connection pool, its schema, and its failures as errors of ours."""

from __future__ import annotations

import logging
import os
import re
import select
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy.pool import QueuePool

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import migrations
from eventsql_orchestration.database.connections import (
    UTF8,
    Connection,
    Home,
    begin,
    driver_connection,
    identity,
    joinable_connection,
)
from eventsql_orchestration.database.grants import ADMIN, DEFAULT_PREFIX
from eventsql_orchestration.database.permissions import permission_error
from eventsql_orchestration.database.queries import Queries, statement
from eventsql_orchestration.database.urls import connect_arguments, label, parse_dsn, render, split_direct
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
    EventSQLError,
    PermissionDeniedError,
    SchemaOutdatedError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import check_schema_name
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.redaction import hiding
from eventsql_orchestration.rules import DEFAULT_SCHEMA, check_kind

logger = logging.getLogger(__name__)

_ISOLATION: Final = psycopg.IsolationLevel.READ_COMMITTED
"""Contracts of this package are written for it: a statement after a row lock must see what the previous holder of the
lock committed, whatever the server's default."""


_SERVER_ENCODING: Final = "UTF8"


def _open_session(connection: Connection) -> None:
    """Make a new connection independent of what the server, the database, the role and the URL set for sessions.

    A pooler gives a client a process number of its own making. The next transaction of such a connection may be
    another session's: nothing is prepared on it, and only what the pooler keeps for each client is set. Raises
    `ConfigurationError` for a database that cannot hold every text.
    """
    own = connection.info.backend_pid
    autocommit, connection.autocommit = connection.autocommit, True
    row = connection.execute(statement("sessions", "open"), {"pid": own}, prepare=False).fetchone()
    assert row is not None, "a SELECT without FROM gives a row"
    answering, encoding, _ = row
    if encoding != _SERVER_ENCODING:
        raise ConfigurationError(
            f"database {connection.info.dbname!r} has the encoding {encoding}, which cannot hold every text: use "
            f"another database, made with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
    if answering != own:
        connection.prepare_threshold = None
        if not (connection.info.parameter_status("DateStyle") or "").startswith("ISO"):
            connection.execute("SET DateStyle TO ISO")
    connection.autocommit = autocommit


def is_pooled(connection: Connection) -> bool:
    """Whether a connection of `Database` leads to a pooler, so that nothing of a session outlasts a transaction."""
    return connection.prepare_threshold is None


_SHUT_OUT: Final = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "53300", "25P03", "25P04"})
"""SQLSTATEs of a server that shuts down or starts, has no connection left, or ended the session for being idle."""


_DAMAGED: Final = ("58", "XX001", "XX002")
"""Of files that are gone or cannot be used, and of data and indexes that are damaged."""

_CONFLICT: Final = "40"
"""The class of SQLSTATEs of transactions that were rolled back for another one's sake."""

_CONNECTION: Final = "08"
"""The class of SQLSTATEs about connections; a pooler whose server does not answer says 08P01."""


def translate(error: Exception, where: str, schema: str) -> EventSQLError | None:
    """The error of ours that says what a driver's error means for its user, or None where it is not known.

    `where` names the database without its password. A table or column that is missing counts only where it is one of
    `schema`: statements of the caller's own may miss others.
    """
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return DatabaseBusyError(f"{where}: every connection of this process is taken: use fewer threads at once")
    cause = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
    if not isinstance(cause, psycopg.Error):
        return None
    detail = describe(cause)
    meaning: tuple[type[EventSQLError], str] | None = None
    match cause:
        case psycopg.errors.DiskFull() | psycopg.errors.OutOfMemory() | psycopg.errors.ConfigurationLimitExceeded():
            meaning = DatabaseFullError, f"has no room left ({detail}): nothing of this call was stored"
        case psycopg.errors.ReadOnlySqlTransaction():
            meaning = DatabaseError, f"takes no writes ({detail}): is it a standby, or set to read only?"
        case psycopg.Error(sqlstate=str(sqlstate)) if sqlstate.startswith(_DAMAGED):
            meaning = DatabaseError, f"cannot read or write what it has stored ({detail}): look at the server's log"
        case psycopg.errors.QueryCanceled() | psycopg.errors.LockNotAvailable() | psycopg.errors.DeadlockDetected():
            meaning = DatabaseBusyError, f"did not get to it in time ({detail}): try again"
        # By the name alone: the words and quotes around it are in the language that the server speaks.
        case psycopg.errors.UndefinedTable() if re.search(rf"\b{re.escape(schema)}\.\S*_event\W", detail):
            meaning = TopicNotFoundError, f"lacks the log of a topic ({detail}): the topic was deleted"
        case psycopg.errors.UndefinedTable() | psycopg.errors.UndefinedColumn() | psycopg.errors.InvalidSchemaName():
            if re.search(rf"\b{re.escape(schema)}\b|eql_", detail):
                meaning = (
                    SchemaOutdatedError,
                    f"lacks a table of the events platform ({detail}): run `eventsql migrate`",
                )
        case psycopg.ProgrammingError(sqlstate=None) if "connection option" in detail:
            meaning = ConfigurationError, f"has a URL that cannot be used ({detail})"
        case psycopg.OperationalError(sqlstate=sqlstate) if sqlstate is None or sqlstate.startswith(_CONNECTION):
            meaning = (
                DatabaseUnavailableError,
                f"cannot be reached ({detail}): is the server running, is the URL right?",
            )
        case psycopg.Error(sqlstate=sqlstate) if sqlstate in _SHUT_OUT:
            meaning = DatabaseUnavailableError, f"closed the connection ({detail}): is the server running?"
    return None if meaning is None else meaning[0](f"{where} {meaning[1]}")


def translate_own(error: psycopg.Error, where: str) -> EventSQLError:
    """The error of ours for any other error of a statement that this package ran."""
    detail = describe(error)
    match error:
        case psycopg.errors.InFailedSqlTransaction():
            return DatabaseError(f"{where}: the transaction was aborted by an earlier error: roll it back, begin anew")
        case psycopg.Error(sqlstate=str(sqlstate)) if sqlstate.startswith(_CONFLICT):
            return DatabaseBusyError(f"{where} refused a transaction that conflicts with another ({detail}): try again")
        case psycopg.Error(sqlstate=None) if isinstance(error, psycopg.DataError) or detail.startswith("cannot adapt"):
            # Of the driver itself: nothing was sent.
            return ValidationError(f"a value cannot be sent to {where}: {detail}")
        case psycopg.ProgrammingError(sqlstate=None):
            # What this package says of a handler that ended its transaction.
            return DatabaseError(f"{where}: {detail}")
    return DatabaseError(f"{where} refused a statement: {detail}")


_DRIVERS: Final = ("psycopg", "sqlalchemy", "contextlib")


def ran_by_us(error: BaseException) -> bool:
    """Whether the statement that failed is one of this package, and not one of a caller's function or block.

    The innermost frame outside of the driver ran it. This module runs none itself but COMMIT, for what others wrote.
    """
    ran_by = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _DRIVERS:
            ran_by = module
    return ran_by != __name__ and ran_by.partition(".")[0] == __name__.partition(".")[0]


def describe(error: psycopg.Error) -> str:
    """A driver's error in one line, without the details that repeat values."""
    return error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__


ASKED_AFTER: Final = 10.0
"""Seconds without use after which a pooled connection is asked whether it is alive: a proxy may drop one silently.
Sooner, a look at its socket is enough, which says when the server has ended the session or died. To ask each time is a
round trip. Measured: a third of the time of publishing one event."""


def _check_at_checkout(engine: sqlalchemy.Engine, home: Home) -> None:
    """See to it that a server that restarted, or a dropped connection, costs a reconnect and no error.

    And that whoever gets a connection finds no transaction in it.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        try:
            _open_session(connection)
        except BaseException:
            connection.close()
            raise
        home.note(connection)

    @sqlalchemy.event.listens_for(engine, "do_execute")
    def executing(cursor: Any, text: str, parameters: Any, _context: object) -> bool:
        # SQLAlchemy asks a new engine's first connection for it, and another schema may have such a function.
        if text != "select current_schema()":
            return False
        cursor.execute(qualified(text), parameters)
        return True

    @sqlalchemy.event.listens_for(engine, "reset")
    def reset(connection: Any, _record: object, _state: object) -> None:
        # Of one that is closed it is unknown.
        if connection.pgconn.transaction_status not in {TransactionStatus.IDLE, TransactionStatus.UNKNOWN}:
            connection.rollback()

    @sqlalchemy.event.listens_for(engine, "checkin")
    def checked_in(_connection: object, record: sqlalchemy.pool.ConnectionPoolEntry) -> None:
        record.info["unused_since"] = time.monotonic()

    @sqlalchemy.event.listens_for(engine, "checkout")
    def checked_out(connection: Any, record: sqlalchemy.pool.ConnectionPoolEntry, _proxied: object) -> None:
        unused_since = record.info.get("unused_since")
        if unused_since is None or (time.monotonic() - unused_since < ASKED_AFTER and _is_quiet(connection)):
            return
        try:
            engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            raise sqlalchemy.exc.InvalidatePoolError from error


def _connect_discreetly(engine: sqlalchemy.Engine, dsn: str) -> None:
    """Let no error of connecting repeat a secret of the URL."""

    @sqlalchemy.event.listens_for(engine, "do_connect")
    def connect(_dialect: object, _record: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> Connection:
        with hiding(dsn):
            return psycopg.connect(*arguments, **options)


def _is_quiet(connection: Connection) -> bool:
    """Whether an idle connection has nothing to read; one that its server has closed has its end."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)


_USED: Final[weakref.WeakSet[Database]] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a process that was just forked: leave every pooled connection to the one that it is a copy of."""
    for database in list(_USED):
        database.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@checked
class Database:
    """A pool of connections to one database and the schema in it that holds the platform's tables.

    Nothing connects before the first connection is asked for. The first one finds the schema up to date, or brings it
    up to date (`migrate=True`), or raises `SchemaOutdatedError`.

    A process that is forked, as a web server's workers are, begins with an empty pool.

    `dsn` is a PostgreSQL URL; `pool_size` bounds the connections that are kept, and `max_overflow` those that are
    opened beyond it under load. Where it leads to a pooler by transactions, such as PgBouncer, its option
    `direct=host:port` names the server itself, for the few connections that keep a session: see `dedicated`.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        migrate: bool = True,
        pool_size: int = 10,
        max_overflow: int = 20,
        application_name: str = "eventsql",
    ) -> None:
        self.url, self._direct_url = split_direct(parse_dsn(dsn))
        self.schema = check_schema_name(schema)
        self._migrate = migrate
        self._ready = False
        self._ready_lock = threading.Lock()
        self._role: str | None = None
        self._prefix: str | None = None
        self._may_transfer = False
        options = {"application_name": application_name, "connect_timeout": 10}
        self._connect_args = {name: value for name, value in options.items() if name not in self.url.query}
        self.engine = sqlalchemy.create_engine(
            # Without the parts, which are its arguments: an engine shows its URL.
            "postgresql+psycopg://",
            isolation_level="AUTOCOMMIT",
            pool_size=pool_size,
            max_overflow=max_overflow,
            # By the listener below, and only where there is something to roll back.
            pool_reset_on_return=None,
            # It would look that type up by names of the session's search_path.
            use_native_hstore=False,
            connect_args={**connect_arguments(self.url), **self._connect_args},
        )
        _connect_discreetly(self.engine, self.dsn)
        self._most = pool_size + max_overflow
        self._home = Home()
        _check_at_checkout(self.engine, self._home)
        _USED.add(self)

    def __repr__(self) -> str:
        return f"Database({self})"

    def __str__(self) -> str:
        return label(self.url)

    @property
    def dsn(self) -> str:
        """The URL with its password, as libpq reads it."""
        return render(self.url)

    @property
    def exhausted(self) -> bool:
        """Whether every pooled connection that this process may have is in use."""
        pool = self.engine.pool
        return isinstance(pool, QueuePool) and pool.checkedout() >= self._most

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """One pooled connection in autocommit mode; `with connection.transaction():` spans a transaction on it.

        Raises `DatabaseUnavailableError` when the server cannot be reached or goes away, `DatabaseFullError`,
        `SchemaOutdatedError`.
        """
        self.ensure_schema()
        with self._pooled() as connection:
            yield connection

    @checks_itself
    def joined(self, connection: Connection | sqlalchemy.Connection | None) -> AbstractContextManager[Connection]:
        """The `callers(connection)`, whose transaction the block joins, or a `connection()` where there is none."""
        return self.connection() if connection is None else self.callers(connection)

    @checks_itself
    @contextmanager
    def callers(self, connection: Connection | sqlalchemy.Connection) -> Iterator[Connection]:
        """A caller's connection of psycopg or SQLAlchemy, in whose transaction the block takes part.

        One of psycopg in autocommit mode outside of a transaction has none: each statement commits by itself. Raises
        `ValidationError`, before anything is written, for what leads to another database, for one of SQLAlchemy in
        AUTOCOMMIT, for one in pipeline mode, and for what is no such connection; otherwise as `connection()`.
        """
        driver = joinable_connection(connection)
        self.ensure_schema()
        with self.errors(driver):
            self._home.check(driver, self, self._identity)
            begin(connection)
            yield driver

    def _identity(self) -> str | None:
        with self._pooled() as connection:
            return identity(connection)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One pooled connection inside a transaction that commits when the block ends well."""
        with self.connection() as connection, connection.transaction():
            yield connection

    @contextmanager
    def core(self) -> Iterator[sqlalchemy.Connection]:
        """A transaction for SQLAlchemy Core in which the tables of `tables` are those of `schema`.

        SQLAlchemy qualifies no names of functions and operators, so those of the system alone are found in it.
        """
        self.ensure_schema()
        engine = self.engine.execution_options(
            isolation_level="READ COMMITTED", schema_translate_map={None: self.schema}
        )
        with self.errors(), engine.begin() as connection:
            connection.exec_driver_sql(statement("sessions", "plain"))
            yield connection

    @contextmanager
    def _pooled(self) -> Iterator[Connection]:
        with self.errors():
            proxied = self.engine.raw_connection()
        connection = proxied.driver_connection
        assert isinstance(connection, psycopg.Connection)
        try:
            with self.errors(connection):
                # SQLAlchemy's own transactions leave it as they need it.
                if not connection.autocommit:
                    connection.autocommit = True
                if connection.isolation_level is not _ISOLATION:
                    connection.isolation_level = _ISOLATION
                yield connection
        finally:
            # A handler may have set another; SQLAlchemy and what comes next read tuples.
            connection.row_factory = tuple_row
            if connection.closed or connection.info.encoding != UTF8:
                proxied.invalidate()
            proxied.close()

    def dedicated(self) -> Connection:
        """A connection of its own outside the pool, in autocommit mode; the caller closes it.

        It leads past a pooler where the URL says how, and to the pooler otherwise: ask `is_pooled` before it is given
        anything that a session keeps.
        """
        self.ensure_schema()
        arguments, options = self.engine.dialect.create_connect_args(self._direct_url)
        with self.errors(), hiding(self.dsn):
            connection = psycopg.connect(*arguments, **{**options, **self._connect_args}, autocommit=True)
            try:
                connection.isolation_level = _ISOLATION
                _open_session(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    @checks_itself
    @contextmanager
    def errors(self, connection: Connection | None = None) -> Iterator[None]:
        """Turns the driver's errors of the block into errors of ours.

        Those of statements of the caller's own stay as they are, unless it is known what they mean.

        Where code of a caller runs in the block, name the `connection` that it is about: a database that is gone while
        this connection stands is another one.
        """
        if connection is not None:
            check_kind("connection", connection, psycopg.Connection)
        try:
            yield
        except (psycopg.Error, sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError) as error:
            known = translate(error, str(self), self.schema)
            if known is None:
                cause = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
                if not isinstance(cause, psycopg.Error) or not ran_by_us(error):
                    raise
                known = self.meaning(cause, connection)
            if isinstance(known, DatabaseUnavailableError) and connection is not None and not connection.closed:
                raise
            raise known from error

    @checks_itself
    def meaning(self, error: psycopg.Error, connection: Connection | None = None) -> EventSQLError:
        """The error of ours for a driver's error of a statement of this package, that `connection` has run."""
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            role = self._role or self.url.username
            if connection is not None and not connection.closed and connection.info.user != self.url.username:
                role = connection.info.user
            return permission_error(describe(error), str(self), role, self._prefix)
        return translate(error, str(self), self.schema) or translate_own(error, str(self))

    def ensure_schema(self) -> None:
        """Check once that the tables are there and not older than this package; migrate if that was asked for."""
        if not self._ready:
            with self._ready_lock:
                self._check_schema()

    def _check_schema(self) -> None:
        if self._ready:
            return
        revision = self.revision()
        if revision is None or (revision != migrations.head() and migrations.known(revision)):
            if not self._migrate:
                raise SchemaOutdatedError(
                    f"schema {self.schema!r} of {self} is "
                    f"{'missing' if revision is None else f'at revision {revision}'}, this package needs "
                    f"{migrations.head()}: run `eventsql migrate`"
                )
            self.migrate()
            # What its role may do is known now.
            self.revision()
        self._ready = True

    def revision(self) -> str | None:
        """The schema's revision, or None where it was never migrated."""
        with self.errors(), self.engine.connect() as connection:
            driver = driver_connection(connection)
            try:
                return self._revision(driver, Queries("sessions", self.schema))
            except psycopg.Error as error:
                raise self.meaning(error, driver) from error

    def _revision(self, connection: Connection, queries: Queries) -> str | None:
        self._note_role(connection, queries)
        table = f'"{self.schema}".{migrations.VERSION_TABLE}'
        if connection.execute(queries("has_table"), {"table": table}).fetchone() != (True,):
            return None
        row = connection.execute(queries("revision")).fetchone()
        return None if row is None else str(row[0])

    def _note_role(self, connection: Connection, queries: Queries) -> None:
        """Take note of the current role, what it may do, and how the names of the installation's roles begin."""
        row = connection.execute(queries("role"), {"schema": self.schema}).fetchone()
        assert row is not None, "a left join gives a row"
        self._role, owner, may_transfer = row
        admin = f"_{ADMIN}"
        self._prefix = owner.removesuffix(admin) if owner is not None and owner.endswith(admin) else None
        self._may_transfer = bool(may_transfer)

    @property
    def may_transfer(self) -> bool:
        """Whether the current role may take events out of the buffer, as an owner and a role that transfers may.

        As it was when this object connected first: a GRANT counts for programs that start after it.
        """
        self.ensure_schema()
        return self._may_transfer

    def migrate(self, *, times_in: str = "UTC") -> None:
        """Bring the schema up to date; safe from many processes at once.

        `times_in` names the time zone whose clock EventSQL's Java library wrote by, in tables that it made before. Any
        other than UTC rewrites them once, while nobody else can use them; it matters the first time alone. Raises
        `ConfigurationError` for a zone that the server does not know.
        """
        with self.errors():
            try:
                migrations.upgrade(
                    self.engine.execution_options(isolation_level="READ COMMITTED"), self.schema, times_in=times_in
                )
            except sqlalchemy.exc.DBAPIError as error:
                if isinstance(error.orig, psycopg.errors.InvalidParameterValue):
                    raise ConfigurationError(f"the server knows no time zone {times_in!r}") from None
                if isinstance(error.orig, psycopg.errors.InsufficientPrivilege):
                    raise self._may_not_migrate(error.orig) from error
                raise
        logger.info("schema %s of %s is at revision %s", self.schema, self, migrations.head())

    def _may_not_migrate(self, error: psycopg.Error) -> PermissionDeniedError:
        role, admin = self._role or self.url.username, f"{self._prefix or DEFAULT_PREFIX}_{ADMIN}"
        return PermissionDeniedError(
            f"schema {self.schema!r} of {self} must be migrated to revision {migrations.head()}, and role {role!r} may "
            f"not do that ({describe(error)}): run `eventsql migrate` as a member of {admin}, or "
            f'`GRANT {admin} TO "{role}"`; where there are no tables yet, as a role with CREATE on the database',
            role=role,
            object=self.schema,
        )

    def close(self) -> None:
        """Close every pooled connection; the database can be used again afterwards."""
        self.engine.dispose()

    def leave_to_parent(self) -> None:
        """Begin with an empty pool in a process that was forked: two would speak on one connection otherwise.

        The connections stay open in the other; psycopg does not end those of another process either.
        """
        self._ready_lock = threading.Lock()
        self.engine.dispose(close=False)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
