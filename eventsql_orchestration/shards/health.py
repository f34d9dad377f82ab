"""Health of shards: ask all shards at once, and find out when a shard that is down is back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from psycopg.conninfo import timeout_from_conninfo

from eventsql_orchestration.database import Database
from eventsql_orchestration.database.translation import ended_for_time
from eventsql_orchestration.database.urls import connect_arguments
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    ShardUnavailableError,
)
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.shards.shard_state import ShardState
from eventsql_orchestration.threads import Wake, in_thread, start_thread

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 15.0
"""Seconds for all shards together to answer: longer than the default timeout of one connection, 10 s. For a shard whose
URL names several hosts, add the connection timeout of each further host."""

FIRST_PROBE: Final = 0.25
LAST_PROBE: Final = 5.0
"""Seconds between two attempts to reach a shard that is down; the first attempts come sooner."""


class Health:
    """Remembers the shards that are down, and probes each until it is back."""

    def __init__(self, *, wait: bool, on_return: Callable[[Shard, ShardState], object]) -> None:
        """With `wait`, `reach` waits for shards that are down.

        `on_return` gets the state of a shard that answers again, and raises if it is another database.
        """
        self._wait = wait
        self._on_return = on_return
        self._after_fork()
        after_fork(self, Health._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self.stop = Wake()

    def reach(self, shard: Shard, deadline: float = 0.0) -> None:
        """Make sure that a shard can be reached. With `wait`, wait until `deadline` of `time.monotonic`.

        Raises `ShardUnavailableError`.
        """
        while True:
            try:
                return self._connect(shard)
            except ShardUnavailableError:
                seconds = deadline - time.monotonic()
                if not self._wait or seconds <= 0:
                    raise
                with self._lock:
                    back = self._returned.wait_for(lambda: shard.down is None, seconds)
                if not back:
                    raise

    def _connect(self, shard: Shard) -> None:
        if shard.down is None:
            try:
                with shard.database.connection():
                    return
            except DatabaseUnavailableError as error:
                self.lose(shard, error)
                raise shard.unavailable() from error
        raise shard.unavailable()

    @contextmanager
    def watching(self, shard: Shard) -> Iterator[None]:
        """Count the shard as down if the block finds it down."""
        try:
            yield
        except DatabaseUnavailableError as error:
            # A server that ended a transaction which idled or took too long is there for others.
            if not ended_for_time(error):
                self.lose(shard, error)
            raise

    def lose(self, shard: Shard, error: EventSQLError) -> None:
        """Count a shard as down until it answers again."""
        with self._lock:
            if shard.down is not None:
                return
            # First: if no thread can be started, the next loss of the shard tries again.
            start_thread("shard-probe", self._probe, shard, self.stop)
            shard.down, shard.down_since = error, time.monotonic()
        logger.warning("shard %s is down: %s", shard.label, error)

    def _probe(self, shard: Shard, stop: threading.Event) -> None:
        delay = FIRST_PROBE
        while not stop.wait(delay):
            delay = min(delay * 2, LAST_PROBE)
            try:
                self._on_return(shard, shard.store.state())
            except EventSQLError as error:
                self._note(shard, error, stop)
            except Exception as error:
                # If the thread died, the shard would stay down for ever.
                logger.exception("shard %s cannot be checked; trying again", shard.label)
                self._note(shard, DatabaseError(str(error)), stop)
            else:
                self._note(shard, None, stop)
                logger.warning("shard %s is back", shard.label)
                return

    def _note(self, shard: Shard, down: EventSQLError | None, stop: threading.Event) -> None:
        with self._returned:
            # After `close`, no thread would find out that the shard is back.
            if not stop.is_set():
                shard.down = down
                self._returned.notify_all()

    def close(self, shards: Iterable[Shard]) -> None:
        """End the threads that probe shards. A platform that is opened again finds out anew which of them are down."""
        with self._lock:
            self.stop.set()
            self.stop = Wake()
            for shard in shards:
                shard.down = None
            self._returned.notify_all()


def ask(shards: Iterable[Shard]) -> dict[Shard, ShardState | DatabaseUnavailableError]:
    """The state of each shard, or why it cannot be reached. A shard that does not answer delays no other shard.

    Raises any other error of a shard, and `DatabaseBusyError` if this process has no connection left to ask a shard.
    """
    begun = time.monotonic()
    answers = {shard: in_thread(f"ask-{shard.label}", shard.store.state) for shard in shards}
    found: dict[Shard, ShardState | DatabaseUnavailableError] = {}
    for shard, answer in answers.items():
        database = shard.database
        seconds = _bound(database)
        try:
            found[shard] = answer.result(max(0.0, begun + seconds - time.monotonic()))
        except TimeoutError:
            if database.exhausted:
                raise DatabaseBusyError(
                    f"every connection of this process to {database} was in use for {seconds:.0f} s: use fewer threads"
                ) from None
            found[shard] = DatabaseUnavailableError(f"{database} has not answered for {seconds:.0f} seconds")
        except DatabaseUnavailableError as error:
            found[shard] = error
    return found


def _bound(database: Database) -> float:
    """Seconds for a database to answer. Its hosts are tried in turn, and the last host needs time too."""
    options = connect_arguments(database.url)
    further = str(options.get("host", "")).count(",")
    if not further:
        return ANSWER_SECONDS
    return ANSWER_SECONDS + further * timeout_from_conninfo({"connect_timeout": options.get("connect_timeout", 10)})
