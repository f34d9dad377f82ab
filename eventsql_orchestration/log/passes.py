"""A pass over a consumer partition: what it holds of the database while it lasts, and what it came to."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psycopg

from eventsql_orchestration.database import Connection, is_pooled
from eventsql_orchestration.errors import ClaimLostError, EventSQLError
from eventsql_orchestration.log.consumption import Progress

logger = logging.getLogger(__name__)

CUT_SECONDS: Final = 3.0
"""How long giving back what passes held may take; where the server does not answer, it finds out for itself."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass came to, and when the next over the same partition may be worth its while.

    With `more`, a full batch was consumed and the next may wait. `due_in` is in how many seconds to look again at the
    latest, None when nothing is known to wait; with `deaf`, not before either, whatever is notified. `least` is the
    number of events that must wait for a pass to come to anything before then. With `last`, the partition has consumed
    all that its topic's layout holds.
    """

    progress: Progress | None = None
    more: bool = False
    due_in: float | None = None
    deaf: bool = False
    least: int = 1
    last: bool = False


class Hold:
    """What the passes of a consumption hold: transactions and leases, which `cut` takes from those that do not end.

    `stopping` is set when no pass is to begin any more.
    """

    def __init__(self, stopping: threading.Event | None = None) -> None:
        self.stopping = stopping or threading.Event()
        self._lock = threading.Lock()
        self._cut = False
        self._connections: list[Connection] = []
        self._leases: list[tuple[threading.Event, Callable[[], object]]] = []

    @property
    def is_cut(self) -> bool:
        return self._cut

    @contextmanager
    def connection(self, connection: Connection) -> Iterator[None]:
        """The block works in a transaction on `connection`. Raises `ClaimLostError` when the hold was cut before."""
        with self._lock:
            self._check()
            self._connections.append(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.remove(connection)

    @contextmanager
    def lease(self, lost: threading.Event, release: Callable[[], object]) -> Iterator[None]:
        """The block has a lease, which `release` gives back; `lost` says that it was. Raises as `connection`."""
        held = (lost, release)
        with self._lock:
            self._check()
            self._leases.append(held)
        try:
            yield
        finally:
            with self._lock:
                self._leases.remove(held)

    def _check(self) -> None:
        if self._cut:
            raise ClaimLostError("the consumption was stopped and had to give its partitions up")

    def cut(self) -> None:
        """Roll every transaction back and give every lease back, while those who work in them go on to find out."""
        returns: list[Callable[[], object]] = []
        with self._lock:
            self._cut = True
            # Under the lock: a connection that its pass has finished with is another's.
            returns += filter(None, map(_shut, self._connections))
            for lost, release in self._leases:
                lost.set()
                returns.append(release)
        threads = [threading.Thread(target=_try, args=(each,), daemon=True) for each in returns]
        deadline = time.monotonic() + CUT_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _shut(connection: Connection) -> Callable[[], object] | None:
    """End a connection that another thread uses; gives what ends the statement that it runs, if it runs one.

    Only the socket is shut: closing the connection would free what libpq works with in that thread. The server rolls
    the transaction back when it notices, between two statements, and so a statement under way is cancelled. Not before
    the socket is shut, or the thread would take it for a failure of its event. A pooler cancels for those alone whom it
    has not lost: there, the thread hears nothing any more from the beginning, and the pooler notices after the cancel.
    """
    with suppress(psycopg.Error, OSError):
        if psycopg.capabilities.has_cancel_safe():
            cancel: Callable[[], object] = connection.pgconn.cancel_conn().blocking
        else:
            cancel = connection.pgconn.get_cancel().cancel
        wire = socket.socket(fileno=os.dup(connection.fileno()))
        wire.shutdown(socket.SHUT_RD if is_pooled(connection) else socket.SHUT_RDWR)

        def end() -> None:
            with wire:
                try:
                    cancel()
                finally:
                    with suppress(OSError):
                        wire.shutdown(socket.SHUT_RDWR)

        return end
    return None


def _try(give_back: Callable[[], object]) -> None:
    try:
        give_back()
    except (psycopg.Error, EventSQLError) as error:
        logger.warning("a partition may stay taken until the server notices: %s", error)
