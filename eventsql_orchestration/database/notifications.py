"""Notifications between processes by LISTEN and NOTIFY: a topic's log, or its part of the buffer, has new events.

They carry no events and only save waiting. A notification may be lost with a connection or with the sending process, so
every listener polls as well.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from multiprocessing.connection import wait
from typing import Final, TypeAlias

import psycopg
from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.database import Database
from eventsql_orchestration.database.queries import Queries
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.database.sessions import is_pooled
from eventsql_orchestration.errors import ClosedError, EventSQLError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.retry import pause_while_away
from eventsql_orchestration.threads import log_recovery, start_thread

logger = logging.getLogger(__name__)

LOG: Final = "log"
"""The kind of a notification of new events in a topic's log."""

BUFFER: Final = "buffer"
"""The kind of a notification of new events in the buffer."""

UNCOMMITTED: Final = "uncommitted"
"""Stands for the topic in a notification of events in the buffer whose transaction may still be open."""

STORE: Final = "store"
"""The kind of a notification of new changes in the event store."""

TEST_SECONDS: Final = 2.0
"""How long a listener waits for the notification that it sends to itself. It takes a millisecond, or never arrives."""

RETEST_SECONDS: Final = 60.0
"""Seconds until a listener without notifications tries again."""

CLOSE_SECONDS: Final = 2.0
"""How long closing waits for a thread, in seconds; a thread that is connecting ends by itself afterwards."""

_LOOKS: Final = 4
"""How often a connection is asked which server process answers: in a busy pooler, a single answer can be misleading."""

_MAX_CHANNEL_BYTES: Final = 63

Callback: TypeAlias = Callable[[], None]


def channel_of(schema: str) -> str:
    """The channel of a schema's notifications."""
    channel = f"eventsql_{schema}"
    if len(channel.encode()) <= _MAX_CHANNEL_BYTES:
        return channel
    return f"eventsql_{hashlib.sha256(schema.encode()).hexdigest()[:32]}"


@checked
class Listener:
    """Receives the notifications of this process and others.

    A thread with its own connection listens from the first subscription on. After connecting, it sends a notification
    to itself through another connection: with a pooler in transaction mode, LISTEN succeeds but no notification
    arrives.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._channel = channel_of(database.schema)
        queries = Queries("notifications", database.schema)
        self._notify, self._announce = queries("notify"), queries("announce")
        self._lock = threading.Lock()
        self._callbacks: dict[str, tuple[Callback, ...]] = {}
        self._thread: threading.Thread | None = None
        self._ending: socket.socket | None = None
        # A thread may outlive `close`.
        self._listening: threading.Thread | None = None
        after_fork(self, Listener._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. The subscribers are threads of the parent."""
        self._lock = threading.Lock()
        self._callbacks = {}
        if self._ending is not None:
            self._ending.close()
        self._thread = self._ending = self._listening = None

    @property
    def listening(self) -> bool:
        """Whether notifications arrive here, as far as this is known."""
        return self._listening is not None and self._listening is self._thread

    def subscribe(self, kind: str, topic: str | None, callback: Callback) -> Callback:
        """Call `callback` upon each notification of a kind for one topic, or for all with None.

        Returns a function that ends the subscription. The callback also runs after listening has begun or ended,
        because a notification may have been missed. It runs in the listener's thread and must return at once.

        Raises `ClosedError` if the database was closed.
        """
        self._database.check_open()
        subscription = payload_of(kind, topic or "")
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._start()
            self._callbacks[subscription] = (*self._callbacks.get(subscription, ()), callback)
        return lambda: self._unsubscribe(subscription, callback)

    def _start(self) -> None:
        """Start the thread. Call with the lock held."""
        ending, own = socket.socketpair()
        try:
            thread = start_thread("listener", self._run, ending)
        except BaseException as error:
            # After Ctrl-C, the thread may run. It ends by this, and closes its end by itself.
            own.close()
            if not isinstance(error, KeyboardInterrupt):
                ending.close()
            raise
        self._thread, self._ending = thread, own

    def _unsubscribe(self, subscription: str, callback: Callback) -> None:
        with self._lock:
            left = list(self._callbacks.get(subscription, ()))
            with suppress(ValueError):
                left.remove(callback)
            if left:
                self._callbacks[subscription] = tuple(left)
            else:
                self._callbacks.pop(subscription, None)

    def close(self) -> None:
        """End the thread and its connection; another subscription starts them again."""
        with self._lock:
            thread, ending = self._thread, self._ending
            self._thread = self._ending = None
        if thread is not None and ending is not None:
            with closing(ending), suppress(OSError):
                # A byte, because closing is not noticed while a forked process keeps this end open.
                ending.send(b".")
                thread.join(CLOSE_SECONDS)

    def _run(self, ending: socket.socket) -> None:
        failures = 0
        deaf = False
        with closing(ending):
            while True:
                try:
                    with closing(self._database.dedicated()) as connection:
                        if wait([ending], 0.0):
                            return
                        if not self._shared(connection) and self._listen(connection, ending):
                            if failures or deaf:
                                log_recovery(logger, "notifications arrive from %s again", self._database)
                            else:
                                logger.info("notifications arrive from %s", self._database)
                            failures, deaf = 0, False
                            self._become(listening=True)
                            while ending not in wait([connection.fileno(), ending]):
                                self._hear(connection)
                            return
                        failures, delay = 0, RETEST_SECONDS
                        if not deaf and not wait([ending], 0.0):
                            logger.log(
                                # Without notifications, consumers poll.
                                logging.WARNING if self._has_consumers() else logging.INFO,
                                "no notification arrives from %s (is it a pooler in transaction mode?), so consumers "
                                "poll: name the server behind it by the option direct=host:port of the URL",
                                self._database,
                            )
                            deaf = True
                except ClosedError:
                    return
                except (psycopg.Error, EventSQLError, OSError) as error:
                    failures += 1
                    delay = pause_while_away(failures)
                    if failures == 1:
                        told = " ".join(str(error).split())
                        logger.warning("no notifications from %s, trying again: %s", self._database, told)
                finally:
                    self._become(listening=False)
                if wait([ending], delay):
                    return

    def _has_consumers(self) -> bool:
        with self._lock:
            return any(subscription.startswith(f"{LOG}:") for subscription in self._callbacks)

    def _become(self, *, listening: bool) -> None:
        own = threading.current_thread()
        with self._lock:
            if listening is (self._listening is own) or (listening and self._thread is not own):
                return
            self._listening = own if listening else None
        for callbacks in list(self._callbacks.values()):
            _call(callbacks)

    def _shared(self, connection: Connection) -> bool:
        """Whether several server processes answer a pooled connection, or one process answers several connections.

        LISTEN would stay with one process. A pooler may choose any free process, so one look is not enough.
        """
        if not is_pooled(connection):
            return False
        own, others = set(), set()
        with self._database.connection() as other:
            for _ in range(_LOOKS):
                own |= {_answering(connection), _answering(connection)}
                others.add(_answering(other))
        return len(own) > 1 or bool(own & others)

    def _listen(self, connection: Connection, ending: socket.socket) -> bool:
        """Listen, and return whether a notification of another connection arrives on this one."""
        connection.execute(self._announce, {"channel": self._channel})
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        token = payload_of("test", uuid.uuid4().hex)
        with self._database.connection() as other:
            other.execute(self._notify, {"channel": self._channel, "payloads": [token]})
        deadline = time.monotonic() + TEST_SECONDS
        while True:
            left = deadline - time.monotonic()
            ready = wait([connection.fileno(), ending], max(0.0, left))
            if ending in ready:
                return False
            if ready and token in self._hear(connection):
                return True
            # Check the time after the look: if the machine stood still, the notification may have arrived nevertheless.
            if left <= 0:
                return False

    def _hear(self, connection: Connection) -> set[str]:
        """Call the subscribers of notifications that have arrived, and return their payloads."""
        payloads = {notification.payload for notification in connection.notifies(timeout=0)}
        for subscription in payloads | {payload_of(payload.partition(":")[0], "") for payload in payloads}:
            _call(self._callbacks.get(subscription, ()))
        return payloads


def _answering(connection: Connection) -> int:
    """The server process that answers a connection just now."""
    return int(fetch_one(connection, sql.SQL("SELECT pg_catalog.pg_backend_pid()"))[0])


def payload_of(kind: str, topic: str) -> str:
    return f"{kind}:{topic}"


def _call(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            # The other callbacks must still run.
            logger.exception("a subscriber failed to handle a notification")
