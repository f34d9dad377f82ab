"""Connections that callers hand in: which are accepted, and whether they lead to the platform's own database."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeAlias

import psycopg
import sqlalchemy
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import TupleRow, tuple_row

from eventsql_orchestration.database.queries import statement
from eventsql_orchestration.errors import ValidationError

Connection: TypeAlias = psycopg.Connection[TupleRow]
"""A psycopg connection as handlers and publishers take it."""

CallersConnection: TypeAlias = psycopg.Connection[Any] | sqlalchemy.Connection
"""A connection that a caller hands in, of psycopg with any kind of rows, or of SQLAlchemy."""

UTF8: Final = "utf-8"
"""The encoding of connections, as Python calls it."""

BUSY_SECONDS: Final = 10.0
"""Seconds to wait for a statement that is under way on a caller's connection in another thread. In the caller's own
thread, as within `cursor.stream()`, that wait would never end."""


def driver_connection(connection: CallersConnection) -> Connection:
    """The psycopg connection of a transaction that a caller runs with psycopg or with SQLAlchemy.

    Raises `ValidationError` for anything else.
    """
    driver = _driver(connection)
    begin(connection)
    return driver


def joinable_connection(connection: CallersConnection) -> Connection:
    """The psycopg connection whose transaction the caller commits or rolls back; this begins no transaction on it.

    Raises `ValidationError` also for a SQLAlchemy connection in AUTOCOMMIT, whose `rollback()` does nothing, and for a
    connection in psycopg's pipeline mode, which does not tell at once how many rows a statement has written.
    """
    driver = _driver(connection)
    if driver.pgconn.pipeline_status != PipelineStatus.OFF:
        raise ValidationError(
            "the connection is in pipeline mode, which delays the outcome of statements: leave the block of "
            "`connection.pipeline()` first"
        )
    if driver.info.transaction_status is TransactionStatus.INERROR:
        raise ValidationError(
            "an earlier error has aborted the connection's transaction, nothing was written: roll back and repeat it"
        )
    if (
        isinstance(connection, sqlalchemy.Connection)
        and driver.autocommit
        and driver.info.transaction_status is TransactionStatus.IDLE
    ):
        raise ValidationError(
            "the SQLAlchemy connection is in AUTOCOMMIT, so a rollback would do nothing: pass one of "
            '`engine.execution_options(isolation_level="READ COMMITTED")`, or omit `connection`'
        )
    return driver


def _driver(connection: object) -> Connection:
    driver: Any = connection
    if isinstance(connection, sqlalchemy.Connection):
        driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        _refuse(driver)
    _check_free(driver)
    check_encoding(driver)
    return driver


def _check_free(connection: psycopg.Connection[Any]) -> None:
    """Raise `ValidationError` for a connection that takes no statement now: psycopg itself would wait for ever."""
    busy = connection.lock.locked()
    if busy and connection.lock.acquire(timeout=BUSY_SECONDS):
        connection.lock.release()
        busy = False
    if not busy:
        # Not by a call: after Ctrl-C at its end, the lock would stay taken, and the caller's rollback would never end.
        with connection.lock:
            # No thread executes a statement now: an active connection is in the middle of a COPY.
            pgconn = connection.pgconn
            active = pgconn.transaction_status == TransactionStatus.ACTIVE
            busy = active and pgconn.pipeline_status == PipelineStatus.OFF
    if busy:
        raise ValidationError(
            "the connection is in the middle of a statement, such as `cursor.stream()`, `cursor.copy()` or "
            "`connection.notifies()`: end it first, or pass another connection"
        )


def check_encoding(connection: psycopg.Connection[Any]) -> None:
    """Raise `ValidationError` for a caller's connection with another encoding than UTF-8, the encoding of events."""
    if not connection.closed and connection.info.encoding != UTF8:
        raise ValidationError(
            f"the connection has the client_encoding {connection.info.parameter_status('client_encoding')}, and events "
            "are written in UTF-8: connect with client_encoding=UTF8, or execute `SET client_encoding TO 'UTF8'`"
        )


@contextmanager
def plain_cursors(connection: Connection) -> Iterator[None]:
    """Run the block's statements with cursors that send parameters to the server.

    A caller's connection may make cursors that bind on the client's side, as Django's do, which give no binary results,
    or cursors with other placeholders. Other cursors of the caller stay: they may trace statements.
    """
    theirs = connection.cursor_factory
    if not issubclass(theirs, psycopg.ClientCursor | psycopg.RawCursor):
        yield
        return
    connection.cursor_factory = psycopg.Cursor
    try:
        yield
    finally:
        connection.cursor_factory = theirs


def gives_readable_times(connection: psycopg.Connection[Any]) -> bool:
    """Whether psycopg can read the times of a session. The server reports `DateStyle`, so this sends no query."""
    return (connection.info.parameter_status("DateStyle") or "").startswith("ISO")


@contextmanager
def readable_times(connection: Connection) -> Iterator[None]:
    """Let the block's statements give times that psycopg can read. Then a caller's session gets its own style back."""
    if gives_readable_times(connection):
        yield
        return
    theirs = connection.info.parameter_status("DateStyle")
    local = not connection.autocommit or connection.info.transaction_status is TransactionStatus.INTRANS
    _set_style(connection, "ISO", local=local)
    try:
        yield
    finally:
        # If the transaction has ended, or has to be rolled back, that restores the caller's style.
        expected = TransactionStatus.INTRANS if local else TransactionStatus.IDLE
        if connection.info.transaction_status is expected:
            _set_style(connection, theirs, local=local)


def _set_style(connection: Connection, style: str | None, *, local: bool) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement("sessions", "set_style"), {"style": style, "local": local}, prepare=False)


def begin(connection: CallersConnection) -> None:
    """Begin a transaction on a SQLAlchemy connection that is in none. psycopg's connections begin theirs themselves."""
    if isinstance(connection, sqlalchemy.Connection) and not connection.in_transaction():
        # SQLAlchemy would roll back a transaction that it did not begin itself.
        connection.begin()


def _refuse(given: object) -> NoReturn:
    # Only a caller with a session has loaded the ORM.
    from sqlalchemy.orm import Session, scoped_session  # noqa: PLC0415

    if isinstance(given, Session | scoped_session):
        raise ValidationError(
            "a SQLAlchemy session is not a connection: pass `session.connection()`, which is in its transaction"
        )
    kind = type(given)
    raise ValidationError(
        f"a psycopg or SQLAlchemy (postgresql+psycopg) connection is needed, not {kind.__module__}."
        f"{kind.__qualname__}: for asyncio and other drivers, `publisher.statement(…)` makes an event's SQL, "
        "and the function `queue_send` sends a message"
    )


def identity(connection: Connection) -> str | None:
    """The identity of a connection's database; None if its role may not ask. An open transaction stays open.

    A physical copy of the server, such as a promoted standby or a restored base backup, has the same identity.
    """
    try:
        with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(statement("shards", "identity"), prepare=False).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return None
    return None if row is None else str(row[0])


Address: TypeAlias = tuple[str, str, int, str]
"""The host, its IP address, the port, and the name of a database."""


def address(connection: Connection) -> Address:
    """The address of a connection's database. By an alias, a socket or a pooler, the same database has another one."""
    info = connection.info
    return info.host, info.hostaddr, info.port, info.dbname


class Home:
    """Finds out whether a connection leads to the platform's database.

    A connection with the host, port, name and user of the platform's connections is accepted at once. Another
    connection may lead to the same database by an alias, a socket or a pooler: it asks the server once.
    """

    def __init__(self) -> None:
        self._logins: Final[set[tuple[Address, str]]] = set()
        self._own: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()
        self._identity: str | None = None

    def note(self, connection: Connection) -> None:
        """Note the address and the user of a connection of the platform's own."""
        self._logins.add(_login(connection))

    def check(self, connection: Connection, database: object, ask: Callable[[], str | None]) -> None:
        """Raise `ValidationError` for a connection to another database than `database`, whose identity `ask` gives."""
        if connection in self._own:
            return
        if _login(connection) not in self._logins:
            theirs = identity(connection)
            if theirs is not None and theirs != self._identity:
                # Ask for it again: behind a pooler or a name, another server may have taken over since the last call.
                self._identity = ours = ask()
                if ours is not None and theirs != ours:
                    info = connection.info
                    raise ValidationError(
                        f"the connection leads to {info.dbname!r} at {info.host}:{info.port}, not to the platform's "
                        f"database {database}, and nothing was written: pass a connection to the platform's database, "
                        "or omit `connection`"
                    )
        self._own.add(connection)


def _login(connection: Connection) -> tuple[Address, str]:
    # Some poolers choose the database by the user.
    return address(connection), connection.info.user
