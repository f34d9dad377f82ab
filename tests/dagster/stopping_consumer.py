"""A consumer whose runs may stop at each of their steps. A test may import it; only its processes stop."""

from __future__ import annotations

from collections.abc import Sequence

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.dagster import AssetOptions, RunLimits, TickOptions, consumer_asset
from eventsql_orchestration.database import Connection
from tests.dagster.location import record
from tests.dagster.stopping import AFTER_EFFECTS, IN_PROCESSING, stop_at

LEASE = 2.0


@consumer_asset(
    topic=Topic("orders", 2),
    consumer="steps",
    limits=RunLimits(max_wait=0.0, drain_seconds=0.0, lease=LEASE),
    options=AssetOptions(tags={"dagster/max_retries": "2"}),
    ticks=TickOptions(adopt_timeout=LEASE),
)
def steps(events: Sequence[Event], connection: Connection) -> None:
    """Effects in the database, in one batch."""
    stop_at(IN_PROCESSING)
    record(events, connection)
    stop_at(AFTER_EFFECTS)
