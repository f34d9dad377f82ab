"""The simulation of riders and drivers as an asset."""

import dagster as dg

from assets.rides.commands import RIDE_COMMANDS
from assets.rides.order import RIDE_ORDERS
from assets.rides.service import RideSimulation
from eventsql_orchestration.dagster import PUBLISHED_EVENTS, PUBLISHED_TOPIC, EventSQLResource, lineage, topic_key
from eventsql_orchestration.queue import Queue


class SimulationConfig(dg.Config):
    """How much a round simulates."""

    orders: int = 200
    seed: int = 2026


@dg.asset(
    key=topic_key(RIDE_ORDERS.name),
    group_name="topics",
    kinds={"topic", "postgresql", "python"},
    description="Orders of rides as a simulation places, prices, drives and cancels them; one event for each change.",
    metadata={"partitions": RIDE_ORDERS.partitions},
)
def ride_orders(
    context: dg.AssetExecutionContext, config: SimulationConfig, eventsql: EventSQLResource
) -> dg.MaterializeResult[None]:
    """Simulate `orders` orders from placing to their end."""
    commands = Queue(eventsql.platform, RIDE_COMMANDS, ordered=True)
    simulation = RideSimulation(eventsql.platform, seed=config.seed, metadata=lineage(context), commands=commands)
    published = simulation.run(config.orders)
    context.log.info("published %d events of %d orders to topic %s", published, config.orders, RIDE_ORDERS.name)
    return dg.MaterializeResult(
        metadata={PUBLISHED_TOPIC: RIDE_ORDERS.name, PUBLISHED_EVENTS: published, "orders": config.orders}
    )
