"""A code location whose worker takes its time over each batch: it writes at once, and commits late."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from eventsql_orchestration.dagster import WorkLimits, build_definitions, worker_asset
from eventsql_orchestration.database import Connection
from eventsql_orchestration.queue import Message, QueueOptions

TIMEOUT = 1.5
BATCH = 5


@worker_asset(
    queue="pictures",
    queue_options=QueueOptions(visibility_timeout=TIMEOUT, max_receives=4),
    limits=WorkLimits(batch=BATCH, max_wait=0.0, drain_idle=0.0, lease=2.0),
)
def thumbnails(messages: Sequence[Message], connection: Connection) -> None:
    """One row for each time that a message takes effect."""
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO effect (id, partition) VALUES (%s, 0)", [(each.id,) for each in messages])
    time.sleep(float(os.environ.get("EVENTSQL_TEST_DELAY", "0")))


defs = build_definitions([], workers=[thumbnails])
