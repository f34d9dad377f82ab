"""`EventSQL`: the whole platform on one database, in one object."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, Unpack

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.notifications import BUFFER, LOG, Listener, Notifier
from eventsql_orchestration.errors import ConfigurationError, EventSQLError
from eventsql_orchestration.log.asynchronous import AsyncPublisher
from eventsql_orchestration.log.buffered import BoundOptions, BufferedPublisher
from eventsql_orchestration.log.claims import Claims
from eventsql_orchestration.log.consumer import Consumers
from eventsql_orchestration.log.dead_letters import DeadLetters
from eventsql_orchestration.log.lag import ConsumerLag, LagReader
from eventsql_orchestration.log.layouts import Layouts
from eventsql_orchestration.log.publisher import Publisher
from eventsql_orchestration.log.reader import Reader
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.log.repartition import Repartitioner
from eventsql_orchestration.log.retention import Retainer
from eventsql_orchestration.log.seek import Seeker
from eventsql_orchestration.log.transfer import Transfer
from eventsql_orchestration.rules import DEFAULT_SCHEMA

logger = logging.getLogger(__name__)


@checked
class EventSQL:
    """Events over a PostgreSQL database, or over several that are its shards.

    `dsn` is its URL, `more` are those of further shards (docs/shards.md). Nothing connects before it is used; the first
    use brings the tables in `schema` up to date unless `migrate` is False. With `transfer`, a thread moves buffered
    events into their logs from the first publication of this object on. With `straight`, batches may be written to
    their log directly where no other process holds the topic (log/publisher.py). One object serves any number of
    threads; close it, or use it as a context manager.

    Of several: an event whose shard is down fails, or with `on_shard_down="wait"` waits for up to `shard_timeout`
    seconds; so long waits one whose shard is being added.
    """

    def __new__(cls, dsn: str, *more: str, **options: Any) -> EventSQL:  # noqa: ARG004 - for __init__
        if more and cls is EventSQL:
            # Whoever has one database does not load what many need.
            from eventsql_orchestration.sharded import ShardedEventSQL  # noqa: PLC0415

            return super().__new__(ShardedEventSQL)
        return super().__new__(cls)

    def __init__(
        self,
        dsn: str,
        *more: str,
        schema: str = DEFAULT_SCHEMA,
        migrate: bool = True,
        transfer: bool = True,
        straight: bool = True,
        on_shard_down: Literal["fail", "wait"] = "fail",  # noqa: ARG002 - of the class that takes several
        shard_timeout: float = 10.0,  # noqa: ARG002 - likewise
    ) -> None:
        if more:
            raise ConfigurationError(f"{type(self).__name__} is on one database: EventSQL itself takes several URLs")
        self.shard: str | None = None
        self.database = Database(dsn, schema=schema, migrate=migrate)
        self.listener = Listener(self.database)
        self.notifier = Notifier(self.database)
        self.registry = Registry(self.database)
        self.publisher = Publisher(
            self.database,
            self.registry,
            straight=straight,
            on_published=self._wake_transfer if transfer else self._announce_buffered,
            on_appended=self._announce,
        )
        self.reader = Reader(self.database, self.registry)
        self.dead_letters = DeadLetters(self.database, self.registry, self.publisher, self.reader)
        self.transfer = Transfer(self.database, announce=self.announce)
        self.layouts = Layouts(self.database)
        self.repartitioner = Repartitioner(self.database, self.registry, self.transfer, announce=self.announce)
        self.retention = Retainer(self.database, self.registry, self.dead_letters)
        self.consumers = Consumers(self.database, self.registry, self.dead_letters, listener=self.listener)
        self.claims = Claims(self.database, self.dead_letters)
        self.seeker = Seeker(self.database, self.registry, announce=self.announce)
        self._lag = LagReader(self.database, self.registry, self.reader)
        self._buffering: weakref.WeakSet[BufferedPublisher | AsyncPublisher] = weakref.WeakSet()
        self._background: threading.Thread | None = None
        self._background_lock = threading.Lock()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._wake = threading.Event()

    def __repr__(self) -> str:
        shard = "" if self.shard is None else f", shard={self.shard!r}"
        return f"<{type(self).__name__} on {self.database}{shard}>"

    def open(self) -> EventSQL:
        """Connect now, and not at the first use, and find the tables as they are needed. Raises database errors."""
        self.database.ensure_schema()
        return self

    @property
    def shards(self) -> tuple[EventSQL, ...]:
        """The platform on each of its databases by itself; `shard` is the name of each among several."""
        return (self,)

    def shard_of(self, key: str) -> EventSQL:  # noqa: ARG002 - where there are several
        """The one of `shards` that takes events of a key."""
        return self

    def buffered_publisher(self, **options: Unpack[BoundOptions]) -> BufferedPublisher:
        """A publisher for threads that commits many events together; `close()` closes it. See `log.buffered.Bounds`."""
        publisher = BufferedPublisher(self.publisher, self.registry, **options)
        self._buffering.add(publisher)
        return publisher

    def async_publisher(self, **options: Unpack[BoundOptions]) -> AsyncPublisher:
        """The same for asyncio."""
        publisher = AsyncPublisher(self.publisher, self.registry, **options)
        self._buffering.add(publisher)
        return publisher

    def lag(self, topic: str | None = None) -> list[ConsumerLag]:
        """The lag of every consumer partition, of one topic or of all. Raises `TopicNotFoundError`."""
        return self._lag.read(topic)

    def buffered(self) -> dict[str, int]:
        """How many events of each topic are published and not transferred yet; topics without any are left out."""
        return self._lag.buffered()

    def _transfer_delay(self) -> float:
        # Outboxes alone are published without a notification, and their publishers wake their own transfer.
        return 1.0 if self.listener.listening else 0.2

    def announce(self, topics: Iterable[str]) -> None:
        """Notify consumers, wherever they run, that events were moved into the logs of these topics."""
        for topic in topics:
            self._announce(topic)

    def _announce(self, topic: str) -> None:
        self.notifier.notify(LOG, topic)

    def _announce_buffered(self) -> None:
        # To whichever process transfers.
        self.notifier.notify(BUFFER, None)

    @property
    def _transferring(self) -> bool:
        # A process that was forked after the first publication has no such thread.
        return self._background is not None and self._background.is_alive()

    def _wake_transfer(self) -> None:
        if not self.database.may_transfer:
            # This role publishes alone; a transfer runs elsewhere.
            self._announce_buffered()
            return
        self._wake.set()
        if not self._transferring:
            with self._background_lock:
                if not self._transferring:
                    self._unsubscribe()
                    self._unsubscribe = self.listener.subscribe(BUFFER, None, self._wake.set)
                    self._background = threading.Thread(
                        target=self.transfer.run,
                        args=(self._stop,),
                        kwargs={"wake": self._wake, "polling_delay": self._transfer_delay},
                        name="eventsql-transfer",
                        daemon=True,
                    )
                    self._background.start()

    def transfer_until(
        self,
        stop: threading.Event,
        *,
        polling_delay: float | Callable[[], float] = 0.2,
        on_moved: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        """Transfer until `stop` is set, at once where somebody tells of events in the buffer; see `Transfer.run`."""
        wake = threading.Event()
        unsubscribe = self.listener.subscribe(BUFFER, None, wake.set)
        try:
            self.transfer.run(stop, polling_delay=polling_delay, wake=wake, on_moved=on_moved)
        finally:
            unsubscribe()

    def _transfer_the_last(self, deadline: float) -> None:
        try:
            self.transfer.run_once(deadline=deadline)
        except EventSQLError as error:
            logger.warning("events are left in the buffer for the next transfer: %s", error)

    def close(self, timeout: float = 10.0) -> bool:
        """Stop the consumers and the transfer of this object and close its connections, in about `timeout` seconds.

        The consumers' batches under way may finish; False when some had to be rolled back. Events that wait in buffered
        publishers are committed first, and what is published is transferred as far as time allows.
        """
        deadline = time.monotonic() + timeout
        ended = self.consumers.close(timeout)
        for publisher in list(self._buffering):
            publisher.close(max(0.0, deadline - time.monotonic()))
        with self._background_lock:
            self._stop.set()
            self._wake.set()
            if self._background is not None:
                self._unsubscribe()
                self._background.join(max(0.0, deadline - time.monotonic()))
                if self._background.is_alive():
                    # It waits for the database, and ends with the process.
                    logger.warning("the transfer of %s does not end in time", self.database)
                else:
                    self._transfer_the_last(deadline)
                    self.transfer.close()
                self._background = None
            else:
                self.transfer.close()
            self._stop = threading.Event()
        self.notifier.close()
        self.listener.close()
        self.publisher.close()
        self.database.close()
        return ended

    def __enter__(self) -> EventSQL:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
