"""The pool of connections to a database, on SQLAlchemy's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import sqlalchemy
from psycopg.adapt import AdaptersMap
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy.engine import URL
from sqlalchemy.pool import PoolProxiedConnection, QueuePool

from eventsql_orchestration.database.connections import UTF8, Connection
from eventsql_orchestration.database.fair_pool import FairPool
from eventsql_orchestration.database.sessions import ISOLATION, is_fresh, watch
from eventsql_orchestration.database.urls import connect_arguments, render
from eventsql_orchestration.errors import ClosedError
from eventsql_orchestration.forks import OF_PARENTS, after_fork


@dataclass(frozen=True, slots=True)
class Loan:
    """A connection that is taken from a pool, with the notes about it, which last as long as the connection."""

    connection: Connection
    notes: dict[Any, Any]
    proxied: PoolProxiedConnection
    pool: sqlalchemy.Pool
    """SQLAlchemy's pool that gave it. A forked process has another pool."""
    closings: int


LEAST_BESIDE_SPARES: Final = 4
"""The least number of connections that the pool may have beside the spares: a user of the engine, who waits for a free
connection, does not get a spare connection."""


class Pool:
    """Connections in autocommit mode to one database. Its methods raise the errors of SQLAlchemy and of the driver.

    Connections that are given back are kept as spares, past SQLAlchemy's pool, for the next `take`, unless there are as
    many connections as there may be: then somebody may wait for one. Measured for sending a message, where the wait for
    the disk empties the processor's caches: 117 of 275 µs went into SQLAlchemy's pool.

    `size` bounds the connections that are kept, half of them as spares, and `overflow` the further connections under
    load. `note` is called with each new connection.
    """

    def __init__(
        self, url: URL, connect_args: Mapping[str, Any], *, size: int, overflow: int, note: Callable[[Connection], None]
    ) -> None:
        # 0 and -1 mean no bound.
        self.most_connections: Final = math.inf if size == 0 or overflow < 0 else size + overflow
        self._most_spares = int(max(0, min(size // 2, self.most_connections - LEAST_BESIDE_SPARES)))
        self.engine: Final = sqlalchemy.create_engine(
            # An engine shows its URL, so the parts of the database's URL are in `connect_args`.
            "postgresql+psycopg://",
            poolclass=FairPool,
            isolation_level="AUTOCOMMIT",
            pool_size=size - self._most_spares,
            max_overflow=overflow if overflow < 0 else overflow + self._most_spares,
            # `watch` rolls back a connection that is in a transaction.
            pool_reset_on_return=None,
            # SQLAlchemy would look that type up on the session's search_path.
            use_native_hstore=False,
            connect_args={**connect_arguments(url), **connect_args},
        )
        self.closed = False
        """Whether it was closed, and not opened again."""
        self._closings = 0
        self._spares: list[Loan] = []
        self._asking: list[None] = []
        """An element for each thread that asks for a connection. Lists change at once, counts do not."""
        # Before the listener that connects.
        sqlalchemy.event.listen(self.engine, "do_connect", self._refuse_to_connect)
        watch(self.engine, render(url), note)
        sqlalchemy.event.listen(self.engine, "engine_disposed", self._close_spares)
        after_fork(self, Pool._after_fork)

    @property
    def exhausted(self) -> bool:
        """Whether every connection that this process may have is in use."""
        pool = self.engine.pool
        return isinstance(pool, QueuePool) and pool.checkedout() - len(self._spares) >= self.most_connections

    def take(self) -> Loan:
        """Take a connection. `give_back` returns it. Raises `ClosedError`."""
        # Note the pool and the count before the check whether it is closed. So a connection that is taken while `close`
        # runs is closed when it is given back.
        pool, closings = self.engine.pool, self._closings
        self.check_open()
        # Asking before the look for a spare: see `give_back`.
        try:
            self._asking.append(None)
            if (spare := self._spare()) is not None:
                if is_fresh(spare.connection, spare.notes["unused_since"]):
                    return spare
                self._return_spare(spare)
            proxied = self.engine.raw_connection()
        finally:
            self._asking.pop()
        connection = proxied.driver_connection
        assert isinstance(connection, psycopg.Connection)
        return Loan(connection, proxied.info, proxied, pool, closings)

    def give_back(self, loan: Loan) -> None:
        """Give a connection back. It is closed if `close` was called meanwhile: its pool was replaced."""
        if self._may_spare(loan):
            loan.notes["unused_since"] = time.monotonic()
            self._spares.append(loan)
            # `close` may have looked for spares before.
            if self._closings != loan.closings:
                self._return_spares()
            elif self._asking and not self._has_idle():
                # A thread that found no spare may wait in SQLAlchemy's pool.
                self._return_spare(self._spare())
        else:
            self._return(loan)

    def _may_spare(self, loan: Loan) -> bool:
        pool = self.engine.pool
        return (
            loan.pool is pool
            and loan.connection.pgconn.transaction_status == TransactionStatus.IDLE
            and not _counts_wrongly(loan.connection)
            and isinstance(pool, FairPool)
            and len(self._spares) < self._most_spares
            # A user of the engine may wait for a connection if there can be no more. A full pool would close this one.
            and (pool.size() + pool.overflow() < self.most_connections or pool.idle() >= pool.size())
        )

    def _has_idle(self) -> bool:
        """Whether SQLAlchemy's pool has a connection at hand that is for no waiting thread."""
        pool = self.engine.pool
        return isinstance(pool, FairPool) and pool.idle() > 0

    def _spare(self) -> Loan | None:
        """Take a spare connection, if there is one."""
        try:
            return self._spares.pop()
        except IndexError:
            return None

    def _close_spares(self, _engine: sqlalchemy.Engine) -> None:
        """A program has disposed of the engine by itself: the pool of the spare connections was replaced."""
        while (spare := self._spare()) is not None:
            spare.connection.close()
            self._return(spare)

    def _return_spares(self) -> None:
        while (spare := self._spare()) is not None:
            self._return_spare(spare)

    def _return_spare(self, spare: Loan | None) -> None:
        """Give a spare connection to SQLAlchemy's pool, which pings it at its next use if it was unused for long."""
        if spare is not None:
            unused_since = spare.notes["unused_since"]
            self._return(spare)
            spare.notes["unused_since"] = unused_since

    def _return(self, loan: Loan) -> None:
        """Give a connection back to SQLAlchemy's pool."""
        # A `cursor.stream()` that was left open keeps a lock of psycopg's: a rollback would wait for ever.
        in_use = loan.connection.pgconn.transaction_status == TransactionStatus.ACTIVE
        closed = self._closings != loan.closings
        if in_use or closed or _counts_wrongly(loan.connection):
            loan.connection.close()
        if loan.connection.closed:
            loan.proxied.invalidate()
        loan.proxied.close()
        if not closed:
            self._returned(loan.pool, loan.closings)

    def _returned(self, pool: sqlalchemy.Pool, closings: int) -> None:
        """Call it after an open connection was given back: `close` may have emptied and replaced its pool just before.

        A closed one has to stay in the pool: it ends the wait of another thread, by `_refuse_to_connect`.
        """
        if self._closings != closings:
            pool.dispose()

    def _refuse_to_connect(self, *_: object) -> None:
        """Raise `ClosedError` in a thread that waited for a connection while `close` was called."""
        self.check_open()

    @contextmanager
    def alchemy(self, engine: sqlalchemy.Engine) -> Iterator[sqlalchemy.Connection]:
        """A connection of SQLAlchemy, which is closed at the end if `close` was called meanwhile.

        `engine` is the pool's, or the pool's with options of its own. Raises `ClosedError`.
        """
        pool, closings = self.engine.pool, self._closings
        self.check_open()
        try:
            self._asking.append(None)
            if not self._has_idle():
                self._return_spare(self._spare())
            connected = engine.connect()
        finally:
            self._asking.pop()
        closed = False
        try:
            with connected as connection:
                try:
                    yield connection
                finally:
                    closed = self._closings != closings
                    if closed:
                        connection.invalidate()
        finally:
            if not closed:
                self._returned(pool, closings)

    def check_open(self) -> None:
        """Raise `ClosedError` if it is closed."""
        if self.closed:
            raise ClosedError

    def open(self) -> None:
        """Let connections be taken again after `close`."""
        self.closed = False

    def close(self) -> None:
        """Close every connection. A connection in use is closed when it is given back."""
        self.closed = True
        self._closings += 1
        self._return_spares()
        self.engine.dispose()
        # A second time, for a connection that was taken from the old pool meanwhile.
        self._closings += 1

    def _after_fork(self) -> None:
        # Never given back: a thread of the parent can have held the lock of its pool.
        OF_PARENTS.extend(self._spares)
        self._spares = []
        self._asking = []
        self.engine.dispose(close=False)


def _counts_wrongly(connection: Connection) -> bool:
    """Whether psycopg's count of a connection's open transactions is wrong after the end of all of them.

    Ctrl-C at the begin of a transaction makes it wrong, and later transactions would fail.
    """
    return connection._num_transactions != 0  # noqa: SLF001


@contextmanager
def plain(connection: Connection) -> Iterator[Connection]:
    """Give a connection the platform's own settings, before and after its use in the block."""
    # A tool that traces statements may have replaced psycopg's cursors.
    cursors, adapters, threshold = connection.cursor_factory, connection.adapters, connection.prepare_threshold
    # psycopg cannot take a registration back. The copy takes up to 4 µs (measured on a busy machine).
    connection._adapters = AdaptersMap(adapters)  # noqa: SLF001
    try:
        # SQLAlchemy's own transactions change these settings of the connection.
        if not connection.autocommit:
            connection.autocommit = True
        if connection.isolation_level is not ISOLATION:
            connection.isolation_level = ISOLATION
        yield connection
    finally:
        # A handler may have changed these settings. SQLAlchemy and the next user read tuples, and send parameters to
        # the server.
        connection.row_factory, connection.cursor_factory = tuple_row, cursors
        connection.prepare_threshold = threshold
        connection._adapters = adapters  # noqa: SLF001
        if not connection.closed and (
            connection.info.encoding != UTF8 or connection.read_only is not None or connection.deferrable is not None
        ):
            connection.close()
