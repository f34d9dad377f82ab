"""Sends notifications to other processes. See `notifications`."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, closing, suppress
from typing import Final

import psycopg

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.database import Database
from eventsql_orchestration.database.notifications import CLOSE_SECONDS, channel_of, payload_of
from eventsql_orchestration.database.queries import Queries
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.retry import pause_while_away
from eventsql_orchestration.threads import Wake, start_thread

logger = logging.getLogger(__name__)

NOTIFY_INTERVAL: Final = 0.005
"""Seconds between two notifications of the same kind and topic: each commits under a lock of the whole database. The
calls within this time become one notification at its end."""

QUIET_INTERVAL: Final = 0.05
"""Seconds between two notifications after nobody listened. A notification that nobody listens to is a statement without
a commit."""

HEARD_INTERVAL: Final = 1.0
"""Seconds until a caller of `notify` looks again after somebody listened."""


@checked
class Notifier:
    """Notifies other processes, outside of the transactions of publishers and transfers.

    `notify` returns at once. A thread with its own connection sends the first notification right away. Further calls
    within `NOTIFY_INTERVAL` become one notification at the end of the interval. If nobody listened, the interval is
    `QUIET_INTERVAL`: a listener that begins meanwhile first looks by itself. While the database is away, each
    notification is kept once.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._channel = channel_of(database.schema)
        self._notify = Queries("notifications", database.schema)("notify")
        self._listening = SingleStatement("listening", Queries("notifications", database.schema)("listening"))
        self._lock = threading.Lock()
        self._look_at = self._quiet_until = 0.0
        self._pending: dict[str, None] = {}
        self._next_at: dict[str, float] = {}
        """When the next notification of a kind and topic may be sent."""
        self._wake = Wake()
        self._stop = Wake()
        self._thread: threading.Thread | None = None
        after_fork(self, Notifier._after_fork)

    def _after_fork(self) -> None:
        self._lock, self._wake, self._stop = threading.Lock(), Wake(), Wake()
        self._pending, self._thread = {}, None

    @checks_itself
    def notify(self, kind: str, topic: str | None, *, look: bool = False) -> None:
        """Tell all listeners, from any thread, that events of a topic have come, or `UNCOMMITTED` may come.

        With None, only listeners to all topics are told. With `look`, the caller looks by itself whether anybody
        listens: a connection takes 8 ms of processor time. Raises `ClosedError` if the database was closed.
        """
        self._pending[payload_of(kind, topic or "")] = None
        if look and time.monotonic() >= self._look_at and self._nobody_listens():
            return
        # The thread clears the event before it looks at what is pending.
        if not self._wake.is_set():
            self._wake.set()
        if self._thread is None or not self._thread.is_alive():
            self._database.check_open()
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    self._stop = Wake()
                    self._thread = start_thread("notifier", self._run, self._stop)

    def _nobody_listens(self) -> bool:
        """Look whether anybody listens. If not, forget what is pending: a new listener looks for events first."""
        now = time.monotonic()
        # Remove before the look: a later call may be about later events.
        pending = {payload: self._pending.pop(payload, None) for payload in list(self._pending)}
        heard = True
        with suppress(psycopg.Error, EventSQLError):
            heard = bool(self._database.fetch(self._listening, {"channel": self._channel.encode()}))
        if heard:
            self._look_at, self._quiet_until = now + HEARD_INTERVAL, 0.0
            self._pending.update(pending)
        else:
            # A call after the first interval looks. Without a call, the thread looks after the second interval.
            self._look_at, self._quiet_until = now + QUIET_INTERVAL, now + 2 * QUIET_INTERVAL
        return not heard

    def close(self) -> None:
        """Send the remaining notifications, if the database is there, and end. The next `notify` begins anew."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
            self._wake.set()
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        with self._lock:
            if self._thread is not threading.current_thread() and not stop.is_set():
                # Ctrl-C came before the thread was noted, and the next call starts another one.
                return
        connection: Connection | None = None
        self._next_at = {}
        failures = 0
        try:
            while not stop.is_set() or self._pending:
                self._wake.wait()
                self._wake.clear()
                while self._pending:
                    now = time.monotonic()
                    ready_at = {
                        payload: now if stop.is_set() else max(self._next_at.get(payload, now), self._quiet_until)
                        for payload in list(self._pending)
                    }
                    if not (due := [payload for payload, at in ready_at.items() if at <= now]):
                        stop.wait(min(ready_at.values(), default=now) - now)
                        continue
                    # A caller has found that nobody listens. To look again is cheaper than to open a connection.
                    if connection is None and self._quiet_until and self._nobody_listens():
                        continue
                    # Remove before sending: a later call may be about later events. A thread that outlives `close` may
                    # send beside its successor.
                    for payload in due:
                        self._pending.pop(payload, None)
                    try:
                        connection, heard = self._send(connection, due)
                    except (psycopg.Error, EventSQLError, OSError) as error:
                        connection = None
                        if failures == 0:
                            logger.warning(
                                "no notification can be sent to %s, so consumers poll: %s", self._database, error
                            )
                        failures += 1
                        self._pending.update(dict.fromkeys(due))
                        if stop.wait(pause_while_away(failures)):
                            self._wake.set()
                            return
                    else:
                        failures = 0
                        pause = NOTIFY_INTERVAL if heard else QUIET_INTERVAL
                        # There may be any number of topics: remember only those whose interval lasts.
                        lasting = {payload: at for payload, at in self._next_at.items() if at > now}
                        self._next_at = lasting | dict.fromkeys(due, time.monotonic() + pause)
        finally:
            if connection is not None:
                connection.close()

    def _send(self, connection: Connection | None, payloads: list[str]) -> tuple[Connection, bool]:
        """Send, on a new connection if the given one is lost. Gives the connection, and whether anybody listens."""
        parameters = {"channel": self._channel, "payloads": payloads}
        if connection is not None:
            with suppress(psycopg.Error):
                return connection, connection.execute(self._notify, parameters).rowcount > 0
            connection.close()
        with ExitStack() as opened:
            connection = opened.enter_context(closing(self._database.dedicated()))
            heard = connection.execute(self._notify, parameters).rowcount > 0
            opened.pop_all()
        return connection, heard
