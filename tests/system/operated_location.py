"""A code location for the tests of what an operator sees: a consumer that gives an event up, one that is backfilled."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from eventsql_orchestration import Event, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    SPARK_POOL,
    AssetOptions,
    CheckAlert,
    EventSQLResource,
    RangeLimits,
    RunLimits,
    build_alert_sensor,
    build_backfill,
    build_delivered_check,
    build_lag_check,
    build_lag_sensor,
    consumer_asset,
    publish_events,
    range_asset,
)
from eventsql_orchestration.database import Connection

ORDERS = Topic("ride_orders", 2)
FARES = Topic("zone_fares")
CHARGES = Topic("ride_charges")

TIPS = Topic("ride_tips")
TIP_TOTALS = Topic("tip_totals")

BROKEN = b"not a ride order"
GATE = b"a slow one"
MAX_LAG = 10

GATE_FILE = "EVENTSQL_TEST_GATE"
"""The environment variable that names a file; while it is not there, an event of value GATE takes its time."""

SESSION_FILE = "EVENTSQL_TEST_SESSION"
"""The same of a file that ends the runs of `session` and `other_session`."""

CARD_FILE = "EVENTSQL_TEST_CARD"
"""The same of a file without which consumer charges fails."""

CHARGED = "CREATE TABLE public.charged (place bigserial, id bigint NOT NULL)"
"""The effects of consumer charges."""

SPOILT_FILE = "EVENTSQL_TEST_SPOILT"
"""The same of a file with which consumer tips fails."""

TIPPED = "CREATE TABLE public.tipped (place bigserial, id bigint NOT NULL)"
"""The effects of consumer tips."""

ALERTS_FILE = "EVENTSQL_TEST_ALERTS"


def refuse_broken(events: Sequence[Event]) -> None:
    if any(event.value == BROKEN for event in events):
        raise ValueError(BROKEN.decode())


@consumer_asset(
    topic=ORDERS,
    consumer="order_status",
    partitioned=True,
    sensor="consumer",
    max_attempts=1,
    limits=RunLimits(max_wait=0.0, drain_seconds=0.0),
    options=AssetOptions(description="The newest status of each order."),
)
def order_status(events: Sequence[Event], connection: Connection) -> None:
    refuse_broken(events)


@consumer_asset(
    topic=FARES,
    consumer="fare_totals",
    max_attempts=1,
    limits=RunLimits(max_wait=0.0),
    options=AssetOptions(description="What was paid, by zone and day."),
)
def fare_totals(events: Sequence[Event], connection: Connection) -> None:
    refuse_broken(events)
    while any(event.value == GATE for event in events) and not Path(os.environ[GATE_FILE]).exists():
        time.sleep(0.05)


@consumer_asset(topic=CHARGES, consumer="charges", limits=RunLimits(max_wait=0.0, drain_seconds=0.0))
def charges(events: Sequence[Event], connection: Connection) -> None:
    for event in events:
        connection.execute("INSERT INTO public.charged (id) VALUES (%s)", [event.id])
    if not Path(os.environ[CARD_FILE]).exists():
        raise ConnectionError("the bank does not answer")


@consumer_asset(
    topic=TIPS,
    consumer="tips",
    limits=RunLimits(max_wait=0.0, drain_seconds=0.0),
    options=AssetOptions(tags={"dagster/max_retries": "2"}),
)
def tips(events: Sequence[Event], connection: Connection) -> None:
    for event in events:
        connection.execute("INSERT INTO public.tipped (id) VALUES (%s)", [event.id])
    if Path(os.environ[SPOILT_FILE]).exists():
        raise ConnectionError("the till does not answer")


@range_asset(
    topic=TIPS,
    consumer="tip_totals",
    publishes=TIP_TOTALS,
    limits=RangeLimits(max_wait=0.0, drain_seconds=0.0),
    options=AssetOptions(tags={"dagster/max_retries": "2"}),
)
def tip_totals(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, object]:
    events = eventsql.platform.reader.read(TIPS.name, after=claim.remaining.after, upto=claim.remaining.upto)
    total = [Publication(TIP_TOTALS.name, str(len(events)).encode())]
    return publish_events(context, total, eventsql=eventsql, topic=TIP_TOTALS.name, claim=claim)


tips_backfill = build_backfill(tips)


@dg.asset
def bonus(context: dg.AssetExecutionContext, eventsql: EventSQLResource) -> dg.MaterializeResult[None]:
    published = publish_events(context, [{"value": b"a bonus"}], eventsql=eventsql, topic=TIP_TOTALS.name)
    return dg.MaterializeResult(metadata=published)


@dg.asset(pool=SPARK_POOL)
def session() -> None:
    while not Path(os.environ[SESSION_FILE]).exists():
        time.sleep(0.05)


@dg.asset(pool=SPARK_POOL)
def other_session() -> None: ...


@dg.asset
def without_session() -> None: ...


def notify(alert: CheckAlert) -> None:
    with Path(os.environ[ALERTS_FILE]).open("a", encoding="utf-8") as alerts:
        alerts.write(f"{alert}\n")


CHECKS = [build_delivered_check(order_status), build_lag_check(order_status, max_events=MAX_LAG)]

fare_totals_backfill = build_backfill(fare_totals)

defs = dg.Definitions(
    assets=[
        order_status.asset,
        fare_totals.asset,
        fare_totals_backfill.asset,
        charges.asset,
        tips.asset,
        tips_backfill.asset,
        tip_totals.asset,
        bonus,
        session,
        other_session,
        without_session,
    ],
    asset_checks=[check.definition for check in CHECKS],
    jobs=[
        order_status.job,
        fare_totals.job,
        *fare_totals_backfill.jobs,
        charges.job,
        tips.job,
        *tips_backfill.jobs,
        tip_totals.job,
    ],
    sensors=[
        *order_status.sensors,
        *fare_totals.sensors,
        *charges.sensors,
        *tips.sensors,
        *tip_totals.sensors,
        build_lag_sensor([order_status, fare_totals], checks=CHECKS, interval_seconds=1),
        build_alert_sensor(CHECKS, notify, interval_seconds=1),
    ],
    resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
)
