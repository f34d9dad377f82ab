"""The worker of the commands of accepted rides: it charges, and answers with events."""

from collections.abc import Sequence

import dagster as dg

from assets.range_sums import check_result
from assets.rides import verification
from assets.rides.commands import RIDE_ANSWERS, RIDE_COMMANDS, carry_out
from assets.rides.service import DISPATCH_QUEUE
from eventsql_orchestration import Connection, Publication
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLResource,
    WorkLimits,
    queue_asset,
    topic_key,
    worker_asset,
)
from eventsql_orchestration.queue import Message, QueueOptions

QUEUES = [queue_asset(name, deps=[topic_key("ride_orders")]) for name in (DISPATCH_QUEUE, RIDE_COMMANDS)]


@worker_asset(
    queue=RIDE_COMMANDS,
    queue_options=QueueOptions(ordered=True, max_receives=5),
    publishes=RIDE_ANSWERS,
    limits=WorkLimits(max_wait=2.0),
    options=AssetOptions(group_name="rides"),
)
def ride_charges(messages: Sequence[Message], connection: Connection) -> list[Publication]:
    """Table rides.charge: the price of each accepted ride, charged once."""
    return carry_out(messages, connection)


@dg.asset_check(
    asset=ride_charges.key, description="Each accepted ride was notified and charged once, or its commands still wait."
)
def ride_charges_match_log(eventsql: EventSQLResource) -> dg.AssetCheckResult:
    """Compare the answers and the table with the log of ride_orders."""
    return check_result(verification.ride_charges_match_log(eventsql.platform))
