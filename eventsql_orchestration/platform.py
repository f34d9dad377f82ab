"""`EventSQL`: the whole platform on one database, in one object."""

from __future__ import annotations

import logging
import threading

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.log.claims import Claims
from eventsql_orchestration.log.consumer import Consumers
from eventsql_orchestration.log.dead_letters import DeadLetters
from eventsql_orchestration.log.lag import ConsumerLag, LagReader
from eventsql_orchestration.log.publisher import Publisher
from eventsql_orchestration.log.reader import Reader
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.log.transfer import Transfer
from eventsql_orchestration.settings import DEFAULT_SCHEMA

logger = logging.getLogger(__name__)


class EventSQL:
    """Events over one PostgreSQL database.

    `dsn` is its URL. Nothing connects before it is used; the first use brings the tables in `schema` up to date unless
    `migrate` is False. With `transfer`, a thread moves buffered events into their logs from the first publication of
    this object on. One object serves any number of threads; close it, or use it as a context manager.
    """

    def __init__(self, dsn: str, *, schema: str = DEFAULT_SCHEMA, migrate: bool = True, transfer: bool = True) -> None:
        self.database = Database(dsn, schema=schema, migrate=migrate)
        self.registry = Registry(self.database)
        self.publisher = Publisher(self.database, self.registry, on_published=self._wake_transfer if transfer else None)
        self.reader = Reader(self.database, self.registry)
        self.dead_letters = DeadLetters(self.database, self.registry, self.publisher, self.reader)
        self.transfer = Transfer(self.database)
        self.consumers = Consumers(self.database, self.registry, self.dead_letters)
        self.claims = Claims(self.database, self.dead_letters)
        self._lag = LagReader(self.database, self.registry, self.reader)
        self._background: threading.Thread | None = None
        self._background_lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()

    def lag(self, topic: str | None = None) -> list[ConsumerLag]:
        """The lag of every consumer partition, of one topic or of all. Raises `TopicNotFoundError`."""
        return self._lag.read(topic)

    def buffered(self) -> dict[str, int]:
        """How many events of each topic are published and not transferred yet; topics without any are left out."""
        return self._lag.buffered()

    @property
    def _transferring(self) -> bool:
        # A process that was forked after the first publication has no such thread.
        return self._background is not None and self._background.is_alive()

    def _wake_transfer(self) -> None:
        self._wake.set()
        if not self._transferring:
            with self._background_lock:
                if not self._transferring:
                    self._background = threading.Thread(
                        target=self.transfer.run,
                        args=(self._stop,),
                        kwargs={"wake": self._wake},
                        name="eventsql-transfer",
                        daemon=True,
                    )
                    self._background.start()

    def _transfer_the_last(self) -> None:
        try:
            self.transfer.run_once()
        except EventSQLError as error:
            logger.warning("events are left in the buffer for the next transfer: %s", error)

    def close(self) -> None:
        """Stop the consumers and the transfer of this object, and close its connections."""
        self.consumers.close()
        with self._background_lock:
            self._stop.set()
            self._wake.set()
            if self._background is not None:
                self._background.join()
                self._background = None
                self._transfer_the_last()
            self._stop = threading.Event()
        self.transfer.close()
        self.database.close()

    def __enter__(self) -> EventSQL:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
