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
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import QueuePool

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import migrations
from eventsql_orchestration.database.connections import Connection, Home, begin, identity, joinable_connection
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabasePermissionError,
    DatabaseUnavailableError,
    EventSQLError,
    SchemaOutdatedError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import check_schema_name
from eventsql_orchestration.rules import DEFAULT_SCHEMA, check_kind

logger = logging.getLogger(__name__)

_ISOLATION: Final = psycopg.IsolationLevel.READ_COMMITTED
"""Contracts of this package are written for it: a statement after a row lock must see what the previous holder of the
lock committed, whatever the server's default."""


def parse_dsn(dsn: str) -> URL:
    """The database URL with psycopg as its driver.

    Raises `ConfigurationError`, without the password in it, for anything but a PostgreSQL URL.
    """
    if re.search(r"\s\w[\w+]*://", dsn):
        # The second one would be taken for a part of the first, and repeated with its password.
        raise ConfigurationError("several database URLs are given where one is to be used")
    try:
        url = make_url(dsn)
    except sqlalchemy.exc.ArgumentError:
        raise ConfigurationError(
            "the database must be named by a URL such as postgresql://user:password@host:5432/database"
        ) from None
    except ValueError:
        raise ConfigurationError("the database URL has a port that is not a number") from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigurationError(f"the database must be PostgreSQL, not {url.get_backend_name()}: postgresql://…")
    if "@" in (url.host or ""):
        # What stands before it belongs to the password, and libpq would repeat it.
        raise ConfigurationError("the database URL has more than one @: write one in a user or password as %40")
    return url.set(drivername="postgresql+psycopg")


DIRECT: Final = "direct"
"""The option of a URL that leads to a pooler which names the server behind it: `?direct=host:port`."""

_DIRECT_FORM: Final = re.compile(
    r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/@,\[\]]+)(?::(?P<port>\d{1,5}))?(?:/(?P<database>[^/]+))?"
)


def split_direct(url: URL) -> tuple[URL, URL]:
    """A database's URL without the option `direct`, and the one that leads past a pooler: the same where it is absent.

    The option names `host`, `host:port` or `host:port/database`; user, password and other options are shared. Raises
    `ConfigurationError` for anything else.
    """
    direct = url.query.get(DIRECT)
    if direct is None:
        return url, url
    pooled = url.difference_update_query([DIRECT])
    found = _DIRECT_FORM.fullmatch(direct) if isinstance(direct, str) else None
    if found is None or int(found["port"] or 5432) not in range(1, 65_536):
        raise ConfigurationError(
            f"the option {DIRECT} of the database URL names the server behind a pooler as host:port, not {direct!r}"
        )
    past = pooled.difference_update_query(["host", "port"])
    return pooled, past.set(
        host=found["host"].strip("[]"), port=int(found["port"] or 5432), database=found["database"] or pooled.database
    )


def _detect_pooler(connection: Connection) -> None:
    """Prepare no statements on a connection that a pooler answers: its next transaction may be another session's.

    A pooler gives a client a process number of its own making; the server knows better.
    """
    autocommit, connection.autocommit = connection.autocommit, True
    answering = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
    connection.autocommit = autocommit
    if answering != (connection.info.backend_pid,):
        connection.prepare_threshold = None


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
        case psycopg.errors.UndefinedTable() if f'"{schema}.' in detail and detail.endswith('_event" does not exist'):
            meaning = TopicNotFoundError, f"lacks the log of a topic ({detail}): the topic was deleted"
        case psycopg.errors.UndefinedTable() | psycopg.errors.UndefinedColumn() | psycopg.errors.InvalidSchemaName():
            if any(name in detail for name in (f'"{schema}.', f'schema "{schema}"', "eql_")):
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


def translate_own(error: psycopg.Error, where: str, role: str) -> EventSQLError:
    """The error of ours for any other error of a statement that this package ran; `role` is the one that ran it."""
    detail = describe(error)
    match error:
        case psycopg.errors.InsufficientPrivilege():
            return DatabasePermissionError(
                f"{where} refuses role {role!r} a statement ({detail}): let the owner of the object GRANT the role the "
                "missing privilege"
            )
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
        _detect_pooler(connection)
        home.note(connection)

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
        options = {"application_name": application_name, "connect_timeout": 10}
        self._connect_args = {name: value for name, value in options.items() if name not in self.url.query}
        self.engine = sqlalchemy.create_engine(
            self.url,
            isolation_level="AUTOCOMMIT",
            pool_size=pool_size,
            max_overflow=max_overflow,
            # By the listener below, and only where there is something to roll back.
            pool_reset_on_return=None,
            connect_args=self._connect_args,
        )
        self._most = pool_size + max_overflow
        self._home = Home()
        _check_at_checkout(self.engine, self._home)
        _USED.add(self)

    def __repr__(self) -> str:
        return f"Database({self})"

    def __str__(self) -> str:
        return self.url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)

    @property
    def dsn(self) -> str:
        """The URL with its password, as libpq reads it."""
        # SQLAlchemy leaves spaces as they are; libpq refuses them, and repeats the password that holds one.
        return self.url.set(drivername="postgresql").render_as_string(hide_password=False).replace(" ", "%20")

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
        """A transaction for SQLAlchemy Core in which the tables of `tables` and unqualified names mean `schema`."""
        self.ensure_schema()
        engine = self.engine.execution_options(
            isolation_level="READ COMMITTED", schema_translate_map={None: self.schema}
        )
        with self.errors(), engine.begin() as connection:
            connection.exec_driver_sql(f'SET LOCAL search_path TO "{self.schema}"')
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
            if connection.closed:
                proxied.invalidate()
            proxied.close()

    def dedicated(self) -> Connection:
        """A connection of its own outside the pool, in autocommit mode; the caller closes it.

        It leads past a pooler where the URL says how, and to the pooler otherwise: ask `is_pooled` before it is given
        anything that a session keeps.
        """
        self.ensure_schema()
        arguments, options = self.engine.dialect.create_connect_args(self._direct_url)
        with self.errors():
            connection = psycopg.connect(*arguments, **{**options, **self._connect_args}, autocommit=True)
            connection.isolation_level = _ISOLATION
            _detect_pooler(connection)
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
        role = self.url.username if connection is None or connection.closed else connection.info.user
        return translate(error, str(self), self.schema) or translate_own(error, str(self), role or "")

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
        self._ready = True

    def revision(self) -> str | None:
        """The schema's revision, or None where it was never migrated."""
        with self.errors(), self.engine.connect() as connection:
            table = f'"{self.schema}".{migrations.VERSION_TABLE}'
            if connection.scalar(text("SELECT to_regclass(:table)"), {"table": table}) is None:
                return None
            revision = connection.scalar(text(f"SELECT version_num FROM {table}"))  # noqa: S608 - a checked identifier
            return None if revision is None else str(revision)

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
                raise
        logger.info("schema %s of %s is at revision %s", self.schema, self, migrations.head())

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
