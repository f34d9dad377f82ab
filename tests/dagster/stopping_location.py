"""A code location whose ticks and runs may stop at each of their steps.

It changes the package for the whole process that imports it, so no test may.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.claims import Claim, Claims, NoClaim
from eventsql_orchestration.dagster import EventSQLResource
from tests.dagster.stopping import (
    AFTER_LAUNCH,
    AFTER_THE_CLAIM,
    AFTER_THE_OFFSET,
    AFTER_THE_PROBE,
    stop_at,
)
from tests.dagster.stopping_consumer import steps

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


def stopping_process(claims: Claims, *given: Any, **options: Any) -> BatchResult:
    processed = process(claims, *given, **options)
    stop_at(AFTER_THE_OFFSET)
    return processed


for name, stopping in (("claim", stopping_claim), ("adopt", stopping_adopt), ("process", stopping_process)):
    setattr(Claims, name, stopping)


defs = dg.Definitions(
    assets=[steps.asset],
    jobs=[steps.job],
    sensors=steps.sensors,
    resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
)
