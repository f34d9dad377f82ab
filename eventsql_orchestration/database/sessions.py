"""Sessions of pooled connections: how each begins, and how it is checked before it is used again."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from eventsql_orchestration.database.connections import Connection, gives_readable_times
from eventsql_orchestration.database.queries import statement
from eventsql_orchestration.errors import ConfigurationError, DatabaseUnavailableError
from eventsql_orchestration.forks import OF_PARENTS, ProcessLock, after_fork
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.redaction import hiding

logger = logging.getLogger(__name__)

ISOLATION: Final = psycopg.IsolationLevel.READ_COMMITTED
"""A statement after a row lock must see the commit of the lock's last holder, whatever the server's default is."""

_OF_ANOTHER_LEVEL: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()
"""Connections that lead through a pooler to a server whose transactions begin at another level. No setting of such a
connection would last."""

ENCODING: Final = "UTF8"
"""The encoding that a database must have: it holds every text."""

ASKED_AFTER: Final = 10.0
"""Seconds without use until a pooled connection is pinged: a proxy may drop it silently. Until then, its socket tells
whether the server has ended the session. A ping each time would take a third of the time of publishing one event."""

_TIMELINES: Final[dict[tuple[str, str], int]] = {}
"""The newest timeline that this process has found, by the servers of a URL and their common identity. A standby begins
another timeline when it is promoted."""

_TURN: Final = ProcessLock()
"""For `_TIMELINES`: a thread that found an older timeline must not replace a newer one."""


def connect(dsn: str, *arguments: Any, **options: Any) -> Connection:
    """Connect with arguments of `psycopg.connect`, and open the session. Errors hide the secrets of the URL `dsn`.

    Raises as `open_session`, and `DatabaseUnavailableError` for a primary that came back after its standby was promoted
    (see `_check_timeline`).
    """
    try:
        with hiding(dsn):
            connection = psycopg.connect(*arguments, **options)
    except OSError as error:
        # psycopg opens a file to wait for the server, and the process may have too many.
        raise psycopg.OperationalError(f"connection failed: {error}") from error
    try:
        open_session(connection)
        servers = ";".join(str(options.get(name, "")) for name in ("host", "hostaddr", "port"))
        if "," in servers:
            _check_timeline(connection, servers)
    except BaseException:
        connection.close()
        raise
    return connection


def open_session(connection: Connection) -> None:
    """Make a new connection independent of settings of the server, the database, the role and the URL.

    A pooler gives a client its own process number. The next transaction of such a connection may run in another
    session: it prepares no statements, and makes only settings that the pooler keeps for each client. Raises
    `ConfigurationError` for a database that cannot hold every text.
    """
    after_fork(connection, _leave_to_parent)
    own = connection.info.backend_pid
    autocommit, connection.autocommit = connection.autocommit, True
    try:
        row = _opened(connection, own)
    except psycopg.errors.FeatureNotSupported:
        # A standby takes no statement at the level SERIALIZABLE, at which the database may begin transactions.
        connection.isolation_level = ISOLATION
        with connection.transaction():
            row = _opened(connection, own)
    assert row is not None, "a SELECT without FROM gives a row"
    answering, encoding, read_committed, array_nulls, _ = row

    if encoding != ENCODING:
        raise ConfigurationError(
            f"database {connection.info.dbname!r} has the encoding {encoding}, which cannot hold every text: make "
            "another database by CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
    if answering != own:
        connection.prepare_threshold = None
        if not array_nulls:
            raise ConfigurationError(
                f"database {connection.info.dbname!r} or the role has array_nulls off, which a pooler's sessions "
                "keep: arrays would have the text NULL for each null. Run ALTER DATABASE … RESET array_nulls, or "
                "ALTER ROLE … RESET array_nulls"
            )
        if not gives_readable_times(connection):
            connection.execute("SET DateStyle TO ISO")
        if not read_committed:
            _OF_ANOTHER_LEVEL.add(connection)
    connection.autocommit = autocommit


def let_last(connection: Connection) -> None:
    """Let the caller's transaction and its statements last as long as they take, whatever limits the session has."""
    connection.execute(statement("sessions", "let_last"))


def wait_at_most(connection: Connection, seconds: float) -> None:
    """Let the caller's transaction wait at most this long for each lock."""
    # 0 would be no limit.
    connection.execute(f"SET LOCAL lock_timeout TO {max(1, round(seconds * 1000))}")


def _opened(connection: Connection, own: int) -> TupleRow | None:
    return connection.execute(statement("sessions", "open"), {"pid": own}, prepare=False).fetchone()


def _check_timeline(connection: Connection, servers: str) -> None:
    """Raise `DatabaseUnavailableError` if a server has an older timeline than this process has found among `servers`.

    Otherwise a process would publish to both servers, and the events on the former primary would be lost.
    """
    autocommit, connection.autocommit = connection.autocommit, True
    row = None
    with suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.FeatureNotSupported):
        row = connection.execute(statement("sessions", "timeline"), prepare=False).fetchone()
    connection.autocommit = autocommit
    if row is None:
        return

    identity, timeline, _ = row
    with _TURN.lock:
        newest = _TIMELINES.get((servers, identity), timeline)
        _TIMELINES[servers, identity] = max(newest, timeline)
    place = f"{connection.info.host}:{connection.info.port}"
    if timeline < newest:
        raise DatabaseUnavailableError(
            f"the server at {place} is a former primary: its timeline is {timeline}, and this process has used a "
            f"promoted standby with the timeline {newest}. Stop the former primary, or make it a standby. If a backup "
            "was restored there, start this process again"
        )
    if timeline > newest:
        logger.warning(
            "the server at %s was promoted or restored: its timeline is %d, after %d. If it lacks the newest commits, "
            "it gives their ids again: start this process again if it works on a queue, or keeps a position of its own",
            place, timeline, newest,
        )  # fmt: skip


def _leave_to_parent(connection: Connection) -> None:
    """See `forks`. A dead socket takes the place of this process's copy of the socket.

    With a copy, the session and its locks would outlive the parent for as long as this process runs, and a statement of
    this process would run in the parent's session.
    """
    OF_PARENTS.append(connection)
    if not connection.closed:
        dead, peer = socket.socketpair()
        peer.close()
        with dead:
            os.dup2(dead.fileno(), connection.fileno(), inheritable=False)


def is_pooled(connection: Connection) -> bool:
    """Whether a connection of `Database` leads to a pooler: session state ends with the transaction then."""
    return connection.prepare_threshold is None


def begins_read_committed(connection: Connection) -> bool:
    """Whether a statement outside of a transaction runs as READ COMMITTED on a connection of `Database`."""
    return connection not in _OF_ANOTHER_LEVEL


def read_committed(connection: Connection) -> AbstractContextManager[object]:
    """Run the block's one statement as READ COMMITTED, on a connection of `Database` that is in no transaction.

    At another level, it fails if it has to wait for another transaction's change of the same row.
    """
    return nullcontext() if begins_read_committed(connection) else connection.transaction()


def watch(engine: sqlalchemy.Engine, dsn: str, noted: Callable[[Connection], None]) -> None:
    """Open and check the sessions of an engine's connections; calls `noted` with each new connection.

    After a restart of the server or a dropped connection, the pool reconnects without an error. A connection from the
    pool is in no transaction. Errors of connecting hide the secrets of the URL.
    """

    @sqlalchemy.event.listens_for(engine, "do_connect")
    def connecting(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> Connection:
        # SQLAlchemy's own first statements come afterwards, in the session as it is then.
        connection = connect(dsn, *arguments, **options)
        noted(connection)
        return connection

    @sqlalchemy.event.listens_for(engine, "do_execute")
    def executing(cursor: Any, text: str, parameters: Any, _context: object) -> bool:
        # SQLAlchemy runs this on a new engine's first connection, and another schema may have such a function.
        if text != "select current_schema()":
            return False
        cursor.execute(qualified(text), parameters)
        return True

    @sqlalchemy.event.listens_for(engine, "handle_error")
    def failed(context: sqlalchemy.engine.ExceptionContext) -> None:
        # As `leave_read_only`.
        if isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
            context.is_disconnect = True

    @sqlalchemy.event.listens_for(engine, "reset")
    def reset(connection: Any, _record: object, _state: object) -> None:
        # The status of a closed connection is unknown.
        if connection.pgconn.transaction_status not in {TransactionStatus.IDLE, TransactionStatus.UNKNOWN}:
            connection.rollback()

    ping_unused(engine)


def ping_unused(engine: sqlalchemy.Engine) -> None:
    """Ping a connection of an engine's pool before its use, unless it is fresh. A lost connection is replaced."""

    @sqlalchemy.event.listens_for(engine, "checkin")
    def checked_in(_connection: object, record: sqlalchemy.pool.ConnectionPoolEntry) -> None:
        record.info["unused_since"] = time.monotonic()

    @sqlalchemy.event.listens_for(engine, "checkout")
    def checked_out(connection: Any, record: sqlalchemy.pool.ConnectionPoolEntry, _proxied: object) -> None:
        unused_since = record.info.get("unused_since")
        if unused_since is None or is_fresh(connection, unused_since):
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise sqlalchemy.exc.InvalidatePoolError from error


def leave_read_only(connection: Connection, error: BaseException | None) -> None:
    """Close a pooled connection whose server takes no writes any more: another server may have taken over.

    The next connection leads to the server that the URL asks for.
    """
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        connection.close()


def is_fresh(connection: Connection, unused_since: float) -> bool:
    """Whether a connection needs no ping: unused for a short time, since a reading of `time.monotonic`, and quiet."""
    return time.monotonic() - unused_since < ASKED_AFTER and is_quiet(connection)


def is_quiet(connection: Connection) -> bool:
    """Whether an idle connection is open and has nothing to read: if the server has closed it, the end can be read."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)
