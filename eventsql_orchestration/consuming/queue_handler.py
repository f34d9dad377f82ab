"""Handling one event of a topic consumed as a queue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.commit_retry import is_transient
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.consuming.delivery import Delivery
from eventsql_orchestration.consuming.handlers import EventHandler, check_handler, check_returned
from eventsql_orchestration.consuming.lost_connections import LostConnections, lost
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.load import disk_is_full
from eventsql_orchestration.database.translation import ended_for_time
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseFullError, DatabaseUnavailableError
from eventsql_orchestration.model import Event
from eventsql_orchestration.signatures import signature_of

logger = logging.getLogger(__name__)

PlainHandler: TypeAlias = Callable[[Event], object]
"""Takes one event, which is acknowledged after it returns."""

QueueHandler: TypeAlias = EventHandler | PlainHandler


def takes_connection(handler: QueueHandler) -> bool:
    """Whether a handler takes the connection of the acknowledgement beside the event. Raises `ValidationError`."""
    try:
        signature_of(handler, follow_wrapped=False).bind("event")
    except (TypeError, ValueError):
        check_handler(handler, "event", "connection")
        return True
    check_handler(handler, "event")
    return False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a handler's call ended: without an error, the event is acknowledged. `counts`: the failure is an attempt."""

    delivery: Delivery
    error: BaseException | None = None
    counts: bool = True


class HandlerOfOne:
    """Calls a handler for one event after another, from any thread. `name` is the consumption's, for the log.

    Raises `ValidationError` for a handler that takes neither an event nor an event and a connection.
    """

    def __init__(self, handler: QueueHandler, deliveries: Deliveries, cancellation: Cancellation, *, name: str) -> None:
        self.in_transaction = takes_connection(handler)
        self._handler: Callable[..., object] = handler
        self._deliveries = deliveries
        self._cancellation = cancellation
        self._name = name
        self._lost = LostConnections()

    def handle(self, delivery: Delivery) -> Outcome | None:
        """Handle an event; None if it is acknowledged already, or if the consumption was stopped meanwhile."""
        begun: list[Connection] = []

        def handle(event: Event, connection: Connection) -> object:
            begun.append(connection)
            return self._handler(event, connection)

        try:
            if not self.in_transaction:
                check_returned(self._handler(delivery.event))
                return Outcome(delivery)
            self._deliveries.handle(delivery, handle, self._cancellation)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything, and ends no thread
            if self._cancellation.cancelled:
                logger.info("%s was stopped in the middle of event %d: %s", self._name, delivery.event.id, error)
                return None
            return Outcome(delivery, error, counts=self._counts(delivery, begun, error))
        return None

    def _counts(self, delivery: Delivery, begun: Sequence[Connection], error: BaseException) -> bool:
        """Whether an error is a failed attempt of its event. `begun`: the connection that the handler was given."""
        if self.in_transaction and not begun:
            # The handler was not called, for example because the database takes no writes.
            return False
        key, what = (delivery.cursor, delivery.event.id), f"event {delivery.event.id} of {self._name}"
        if begun and lost(begun[0], error):
            return self._lost.counts(key, what, begun[0], error)
        if isinstance(error, DatabaseUnavailableError | DatabaseFullError) or disk_is_full(error):
            return ended_for_time(error)
        if isinstance(error, DatabaseBusyError) or is_transient(error):
            return self._lost.too_often(key, f"{what} met a conflict or a timeout")
        return True
