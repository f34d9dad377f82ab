"""Connections that a handler loses, and conflicts that may pass: which of them count as failures of its event."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.load import disk_is_full
from eventsql_orchestration.database.translation import ended_for_time
from eventsql_orchestration.model import how_often

logger = logging.getLogger(__name__)

FREE_LOSSES: Final = 5
FREE_SECONDS: Final = 60.0
"""The first 5 losses of an event or a message are no failures, and neither are later losses in the 60 seconds after the
first: a server that restarts makes no dead letters. The cause of more losses is likely the handler."""

_MOST_KNOWN: Final = 10_000
"""The most events whose losses are remembered."""


def lost(connection: Connection, error: BaseException) -> bool:
    """Whether the connection of a block that failed is gone: it was lost, or the block closed it.

    psycopg's `with connection:` closes it, too, whatever the error. The block is not to blame for a full disk.
    """
    return connection.broken or (connection.closed and not disk_is_full(error))


class LostConnections:
    """The lost connections of the events or messages that this process handles, each named by a key.

    They are kept in memory, because the process outlives its connections. Its methods may be called from any thread. A
    topic consumed as a queue notes conflicts here, too.
    """

    def __init__(self) -> None:
        # Without a lock: a process handles an event in one thread at a time.
        self._known: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def so_far(self, key: Hashable) -> int:
        """How often an event or a message has lost its connection."""
        return self._known.get(key, (0, 0.0))[0]

    def counts(self, key: Hashable, what: str, connection: Connection, error: BaseException) -> bool:
        """Note that a handler has lost its connection; gives whether that is a failure of its event or message.

        The loss is a failure if the handler closed the connection or kept its transaction open for too long, or if the
        event has lost its connection again and again. `what` names the event, for the log.
        """
        if not connection.broken or ended_for_time(error):
            return True
        if self.too_often(key, f"{what} lost its connection"):
            return True
        logger.warning(
            "%s lost its connection %s, which counts as a failure only after %d times and %.0f s: %s",
            what, how_often(self.so_far(key)), FREE_LOSSES, FREE_SECONDS, error,
        )  # fmt: skip
        return False

    def too_often(self, key: Hashable, what: str) -> bool:
        """Note an error that may pass by itself; gives whether the event or message has met too many of them.

        `what` says what has happened to which event, for the log.
        """
        now = time.monotonic()
        losses, first = self._known.get(key, (0, now))
        self._known[key] = (losses + 1, first)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        if losses >= FREE_LOSSES and now - first >= FREE_SECONDS:
            logger.warning("%s %d times, and has failed: see the server's log", what, losses + 1)
            return True
        return False
