"""Cancellation: taking transactions and leases from handlers that do not end in time."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, TypeVar

import psycopg

from eventsql_orchestration.database import Connection, is_pooled
from eventsql_orchestration.errors import ClaimLostError, EventSQLError
from eventsql_orchestration.threads import join_all, start_thread

Held = TypeVar("Held")

logger = logging.getLogger(__name__)

CANCEL_SECONDS: Final = 3.0
"""Seconds that `Cancellation.cancel` waits for the server. A slower server notices later that the connection is
closed."""


class Cancellation:
    """The transactions and leases of a consumption, which `cancel` ends.

    `stopping` is set when no further batch is to begin.
    """

    def __init__(self, stopping: threading.Event | None = None) -> None:
        self.stopping = stopping or threading.Event()
        self._lock = threading.Lock()
        self.cancelled = False
        self._connections: list[Connection] = []
        self._leases: list[tuple[threading.Event, Callable[[], object]]] = []

    def connection(self, connection: Connection) -> AbstractContextManager[None]:
        """Have `cancel` roll back the transaction on `connection`. Raises `ClaimLostError` after `cancel`."""
        return self._among(self._connections, connection)

    def lease(self, lost: threading.Event, release: Callable[[], object]) -> AbstractContextManager[None]:
        """Have `cancel` set `lost` and call `release`. Raises as `connection`."""
        return self._among(self._leases, (lost, release))

    @contextmanager
    def _among(self, held: list[Held], one: Held) -> Iterator[None]:
        with self._lock:
            if self.cancelled:
                raise ClaimLostError("the consumption was stopped and had to give its partitions up")
            held.append(one)
        try:
            yield
        finally:
            with self._lock:
                held.remove(one)

    def cancel(self) -> None:
        """Roll back every transaction and release every lease. The handlers find out by their next statement."""
        releases: list[Callable[[], object]] = []
        with self._lock:
            self.cancelled = True
            # Hold the lock: a connection may belong to somebody else once its batch has finished with it.
            releases += filter(None, map(_shut, self._connections))
            for lost, release in self._leases:
                lost.set()
                releases.append(release)

        join_all([start_thread("cancel", _try, each) for each in releases], time.monotonic() + CANCEL_SECONDS)


def _shut(connection: Connection) -> Callable[[], object] | None:
    """Shut the socket of a connection that another thread uses. Returns a function that cancels its statement.

    Only the socket is shut, because closing the connection would free memory that libpq uses in the other thread. The
    server rolls back between two statements, so a running statement is cancelled, after the socket is shut: otherwise
    the thread would take the cancellation for a failure of its event. A pooler cancels only for clients that it has not
    lost. So with a pooler, the receiving side is shut first, and the rest after the cancellation.
    """
    with suppress(psycopg.Error, OSError):
        if psycopg.capabilities.has_cancel_safe():
            cancel: Callable[[], object] = connection.pgconn.cancel_conn().blocking
        else:
            cancel = connection.pgconn.get_cancel().cancel
        wire = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            wire.shutdown(socket.SHUT_RD if is_pooled(connection) else socket.SHUT_RDWR)
        except OSError:
            # Shut by an earlier call.
            wire.close()
            return None

        def end() -> None:
            with wire:
                try:
                    cancel()
                finally:
                    with suppress(OSError):
                        wire.shutdown(socket.SHUT_RDWR)

        return end
    return None


def _try(release: Callable[[], object]) -> None:
    try:
        release()
    except (psycopg.Error, EventSQLError) as error:
        logger.warning("a partition may stay taken until the server notices: %s", error)
