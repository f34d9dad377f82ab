"""Consumers whose runs Dagster retries. A test may import them; only the processes of `pausing_location` stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLResource,
    RangeLimits,
    RunLimits,
    TickOptions,
    build_backfill,
    consumer_asset,
    range_asset,
    share_runs,
)
from eventsql_orchestration.database import Connection
from tests.dagster import windows
from tests.dagster.stopping import stop_at

ORDERS, STEADY = Topic("orders", 2), Topic("steady")
TICKS = TickOptions(lead=windows.LEAD, adopt_timeout=2 * windows.LEASE)
RETRIED = {"dagster/max_retries": "2"}


def consumer(name: str, topic: Topic = ORDERS, **limits: Any) -> ConsumerDefinition:
    def consume(events: Sequence[Event], connection: Connection) -> None:
        windows.record_for(name, events, connection)
        if name == windows.IN_HANDLER:
            stop_at(name)

    return consumer_asset(
        topic=topic, consumer=name, name=name, batch=windows.BATCH, ticks=TICKS, options=AssetOptions(tags=RETRIED),
        limits=RunLimits(**{"max_wait": 0.0, "drain_seconds": 0.0, "lease": windows.LEASE, **limits}),
    )(consume)  # fmt: skip


@range_asset(
    topic=ORDERS,
    consumer=windows.IN_RANGE,
    limits=RangeLimits(max_wait=0.0, drain_seconds=0.0, lease=windows.LEASE),
    options=AssetOptions(tags=RETRIED, kinds=()),
    ticks=TICKS,
)
def in_range(claim: Claim, eventsql: EventSQLResource) -> None:
    platform = eventsql.platform
    events = platform.claims.read(claim)
    stop_at(windows.IN_RANGE)
    with platform.database.transaction() as connection:
        platform.claims.check(connection, claim)
        windows.record_for(windows.IN_RANGE, events, connection)
        platform.claims.commit(connection, claim)


# A second range waits when the first is consumed.
DRAINING: dict[str, Any] = {"max_events": 2 * windows.BATCH, "drain_seconds": 30.0, "drain_idle": 0.0}
SHARERS = share_runs("consume_shared", [consumer(windows.SHARED), consumer(windows.SHARING)], ticks=TICKS)
replayed = consumer(windows.REPLAYED)
replayed_backfill = build_backfill(replayed)
CONSUMERS = {
    each.consumer.name: each
    for each in (
        consumer(windows.BEFORE_ADOPTION),
        consumer(windows.AFTER_ADOPTION),
        consumer(windows.BETWEEN_BATCHES),
        consumer(windows.IN_HANDLER),
        consumer(windows.BEFORE_NEXT_CLAIM, **DRAINING),
        consumer(windows.AFTER_NEXT_CLAIM, **DRAINING),
        consumer(windows.AFTER_LAST_COMMIT),
        in_range,
        *SHARERS,
        # Its run waits for its successor long enough, whether or not events come.
        consumer(windows.HANDED_OVER, STEADY, drain_seconds=2 * windows.LEAD, drain_idle=60.0),
    )
}
