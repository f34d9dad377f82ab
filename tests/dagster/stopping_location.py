"""A code location whose ticks and runs may stop at each of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.dagster import EventSQLResource, consumer_asset, watch
from eventsql_orchestration.database import Connection
from eventsql_orchestration.log.claims import Claim, Claims, NoClaim, Processed
from tests.dagster.location import record
from tests.dagster.stopping import (
    AFTER_EFFECTS,
    AFTER_LAUNCH,
    AFTER_THE_CLAIM,
    AFTER_THE_OFFSET,
    AFTER_THE_PROBE,
    IN_PROCESSING,
    stop_at,
)

LEASE = 2.0

watch.ADOPT_TIMEOUT = LEASE  # type: ignore[misc]  # a minute is too long for a test


claim, adopt, process = Claims.claim, Claims.adopt, Claims.process


def stopping_claim(claims: Claims, *given: Any, **options: Any) -> Claim | NoClaim:
    stop_at(AFTER_THE_PROBE)
    found = claim(claims, *given, **options)
    if isinstance(found, Claim):
        stop_at(AFTER_THE_CLAIM)
    return found


def stopping_adopt(claims: Claims, *given: Any, **options: Any) -> Claim:
    stop_at(AFTER_LAUNCH)
    return adopt(claims, *given, **options)


def stopping_process(claims: Claims, *given: Any, **options: Any) -> Processed:
    processed = process(claims, *given, **options)
    stop_at(AFTER_THE_OFFSET)
    return processed


for name, stopping in (("claim", stopping_claim), ("adopt", stopping_adopt), ("process", stopping_process)):
    setattr(Claims, name, stopping)


@consumer_asset(topic=Topic("orders", 2), consumer="steps", max_wait=0.0, drain_seconds=0.0, lease=LEASE)
def steps(events: Sequence[Event], connection: Connection) -> None:
    """Effects in the database, in one batch."""
    stop_at(IN_PROCESSING)
    record(events, connection)
    stop_at(AFTER_EFFECTS)


defs = dg.Definitions(
    assets=[steps.asset],
    jobs=[steps.job],
    sensors=steps.sensors,
    resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
)
