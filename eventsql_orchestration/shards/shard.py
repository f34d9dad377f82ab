"""`Shard`: everything on one database, in one object."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.claims import Claims
from eventsql_orchestration.consuming.consumers import Consumers
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.lag import ConsumerLag, LagReader
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.notifications import BUFFER, LOG, UNCOMMITTED, Listener
from eventsql_orchestration.database.notifier import Notifier
from eventsql_orchestration.errors import ClosedError, EventSQLError, ShardUnavailableError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.maintenance.compaction import Compactor
from eventsql_orchestration.maintenance.erasure import Eraser
from eventsql_orchestration.maintenance.repartitioning import Repartitioner
from eventsql_orchestration.maintenance.retention import Retainer
from eventsql_orchestration.maintenance.seek import Seeker
from eventsql_orchestration.publishing.publisher import Publisher
from eventsql_orchestration.publishing.transfer import Delay, OnMoved, Transfer
from eventsql_orchestration.sharding import pending
from eventsql_orchestration.shards.shard_state import ShardStore
from eventsql_orchestration.threads import Wake, start_thread
from eventsql_orchestration.topics.layouts import Layouts
from eventsql_orchestration.topics.reader import Reader
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import DEFAULT_SCHEMA, Duration, in_seconds

logger = logging.getLogger(__name__)


@checked
class Shard:
    """Everything on one database: one shard of several, or the only database of a platform. See `EventSQL`.

    `name` is the shard's name among several, once it is known.
    """

    def __init__(
        self, dsn: str,
        *, schema: str = DEFAULT_SCHEMA, migrate: bool = True, transfer: bool = True, straight: bool = True,
    ) -> None:  # fmt: skip
        self.name: str | None = None
        self.active = False
        """Whether the shard takes events, as far as its cluster knows."""
        self.down: EventSQLError | None = None
        """Why the cluster counts the shard as down; None while it is up."""
        self.down_since = 0.0
        """When it went down, by `time.monotonic`."""
        self.database = Database(dsn, schema=schema, migrate=migrate)
        self.store = ShardStore(self.database)
        self.listener = Listener(self.database)
        self.notifier = Notifier(self.database)
        self.registry = Registry(self.database)
        on_published = self._wake_transfer if transfer else self._announce_buffered
        self.publisher = Publisher(
            self.database, self.registry, straight=straight, on_published=on_published, on_appended=self._announce
        )
        self.reader = Reader(self.database, self.registry)
        self.dead_letters = DeadLetters(self.database, self.registry, self.publisher, self.reader)
        self.transfer = Transfer(self.database, announce=self.announce)
        self.layouts = Layouts(self.database)
        self.repartitioner = Repartitioner(self.database, self.registry, self.transfer, announce=self.announce)
        self.eraser = Eraser(self.database, self.registry)
        self.compactor = Compactor(self.database, self.registry)
        self.retention = Retainer(self.database, self.registry, self.dead_letters, self.compactor)
        self.consumers = Consumers(self.database, self.registry, self.dead_letters, listener=self.listener)
        self.claims = Claims(self.database, self.dead_letters)
        self.seeker = Seeker(self.database, self.registry, announce=self.announce)
        self._lag = LagReader(self.database, self.registry)
        self._background: threading.Thread | None = None
        self._background_lock = threading.Lock()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._stop = Wake()
        self._wake, self._uncommitted = Wake(), Wake()
        after_fork(self, Shard._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. This process finds out by itself whether the shard is down."""
        self.down, self._background, self._unsubscribe = None, None, lambda: None
        self._background_lock, self._stop = threading.Lock(), Wake()
        self._wake, self._uncommitted = Wake(), Wake()

    def __repr__(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"<{type(self).__name__} on {self.database}{name}>"

    # As one of several

    @property
    def label(self) -> str:
        """The shard's name, or its database while the name is not known."""
        return self.name or str(self.database)

    def unavailable(self) -> ShardUnavailableError:
        """The error for an event or a change that needs this shard while it is down."""
        return ShardUnavailableError(f"shard {self.label!r} is down: {self.down}", shard=self.label)

    def check_active(self) -> None:
        """Raise `ShardPendingError` if the shard takes no events, as far as its cluster knows."""
        if not self.active:
            raise pending(self.label)

    # Lag and notifications

    def lag(self, topic: str | None = None, consumer: str | None = None) -> list[ConsumerLag]:
        """The lag of every consumer partition, of one topic or consumer or of all. Raises `TopicNotFoundError`."""
        return self._lag.read(topic, consumer)

    def buffered(self) -> dict[str, int]:
        """The number of events of each topic that wait in the buffer; topics without buffered events are left out."""
        return self._lag.buffered()

    def longest_buffered(self, topic: str) -> float:
        """Seconds since the oldest event of a topic that waits in the buffer came; 0 if none waits."""
        return self._lag.longest_buffered(topic)

    def _transfer_delay(self) -> float:
        # Only outboxes publish without a notification, and their publishers wake their own transfer.
        return 1.0 if self.listener.listening else 0.2

    def announce(self, topics: Iterable[str]) -> None:
        """Notify consumers in all processes that events were moved into the logs of these topics."""
        for topic in topics:
            self._announce(topic)

    def _announce(self, topic: str) -> None:
        self.notifier.notify(LOG, topic)

    def _announce_buffered(self, committed: bool) -> None:
        # Notify the process that transfers.
        self.notifier.notify(BUFFER, None if committed else UNCOMMITTED)

    @property
    def _transferring(self) -> bool:
        return self._background is not None and self._background.is_alive()

    def _wake_transfer(self, committed: bool) -> None:
        if not self.database.may_transfer:
            # This role may only publish; a transfer runs in another process.
            self._announce_buffered(committed)
            return
        if not committed:
            self._uncommitted.set()
        # The transfer clears the event before it looks into the buffer.
        if not self._wake.is_set():
            self._wake.set()
        if not self._transferring:
            with self._background_lock:
                if not self._transferring:
                    self._unsubscribe()
                    self._unsubscribe = self._subscribe_to_buffer(self._wake, self._uncommitted)
                    self._background = start_thread("transfer", self._transfer_in_background, self._stop)

    def _transfer_in_background(self, stop: threading.Event) -> None:
        # A publication beside `close` starts this thread once more: it ends when the database is closed.
        with suppress(ClosedError):
            self.transfer.run(stop, wake=self._wake, uncommitted=self._uncommitted, polling_delay=self._transfer_delay)

    def _subscribe_to_buffer(self, wake: threading.Event, uncommitted: threading.Event) -> Callable[[], None]:
        """Set `wake` on each notification of buffered events, after `uncommitted` if they may be uncommitted.

        Returns a function that ends it.
        """

        def expect() -> None:
            uncommitted.set()
            wake.set()

        with ExitStack() as ends:
            ends.callback(self.listener.subscribe(BUFFER, None, wake.set))
            ends.callback(self.listener.subscribe(BUFFER, UNCOMMITTED, expect))
            return ends.pop_all().close

    def transfer_until(
        self, stop: threading.Event,
        *, polling_delay: Delay = 0.2, wake: threading.Event | None = None, on_moved: OnMoved | None = None,
    ) -> None:  # fmt: skip
        """Transfer until `stop` is set, at once on a notification of buffered events; see `Transfer.run`."""
        wake, uncommitted = wake or Wake(), Wake()
        unsubscribe = self._subscribe_to_buffer(wake, uncommitted)
        try:
            self.transfer.run(stop, polling_delay=polling_delay, wake=wake, uncommitted=uncommitted, on_moved=on_moved)
        finally:
            unsubscribe()

    def close(self, timeout: Duration = 10.0) -> bool:
        """Stop the consumers and the transfer of this object and close its connections, in about `timeout` seconds.

        Consumers may finish their current batches; gives False if some were rolled back. Published events are
        transferred as far as time allows.
        """
        deadline = time.monotonic() + in_seconds(timeout)
        ended = self.consumers.close(timeout)
        with self._background_lock:
            self._stop.set()
            self._wake.set()
            if self._background is not None:
                self._unsubscribe()
                self._background.join(max(0.0, deadline - time.monotonic()))
                if self._background.is_alive():
                    # The thread waits for the database, and ends with the process.
                    logger.warning("the transfer of %s does not end in time", self.database)
                else:
                    try:
                        # Another transfer may have looked before these events came, and may be closing, too.
                        self.transfer.run_once(deadline=deadline, retry_held=True)
                    except EventSQLError as error:
                        logger.warning("events stay in the buffer for the next transfer: %s", error)
                self._background = None
            self._stop = Wake()
        self.notifier.close()
        self.listener.close()
        # Close the database first: a thread that still publishes or transfers must not open its connection again.
        self.database.close()
        self.transfer.close()
        self.publisher.close()
        return ended

    def __enter__(self) -> Shard:
        self.database.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
