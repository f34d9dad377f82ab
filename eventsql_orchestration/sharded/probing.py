"""Finding out when a shard that is down is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from eventsql_orchestration.errors import DatabaseError, EventSQLError
from eventsql_orchestration.log.shard_store import ShardState
from eventsql_orchestration.sharded.member import Member

logger = logging.getLogger(__name__)

FIRST_PROBE: Final = 0.25
LAST_PROBE: Final = 5.0
"""Seconds between two attempts to reach a shard that is down; the first ones come sooner."""


def probe(member: Member, stop: threading.Event, check: Callable[[ShardState], object]) -> bool:
    """Try again and again to reach a shard; True when it is back, False when `stop` was set before.

    `check` is given what it says of itself then, and raises where it is not the one that it was.
    """
    delay = FIRST_PROBE
    while not stop.wait(delay):
        delay = min(delay * 2, LAST_PROBE)
        try:
            check(member.store.state())
        except EventSQLError as error:
            member.down = error
        except Exception as error:
            # A thread that dies would leave the shard down for ever.
            logger.exception("shard %s cannot be looked at", member.name)
            member.down = DatabaseError(str(error))
        else:
            return True
    return False
