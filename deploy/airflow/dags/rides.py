"""Ride hailing in Airflow: the pipeline of `assets/rides`, with the consumers of the Dagster location."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from airflow.sdk import DAG, Metadata, Param, get_current_context, task

from assets.rides.effects import DRIVER_UTILISATION, ZONE_FARES, add_fares, add_utilisation, write_orders
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Connection, Event
from eventsql_orchestration.airflow import EventSQLHook, claims_asset, eventsql_consume, topic_asset
from eventsql_orchestration.airflow.provenance import TaskOrigin

OPTIONS: Final[dict[str, Any]] = {"catchup": False, "default_args": {"retries": 2, "retry_delay": 10.0}}
ORDERS: Final = topic_asset(RIDE_ORDERS.name)
SECONDS: Final = 2.0
"""Events wait so long for others that one run consumes with them."""

with DAG(
    "simulate_rides", schedule=None, params={"orders": Param(200, type="integer", minimum=1)}, catchup=False,
    max_active_runs=1, tags=["rides", "eventsql:simulation"],
):  # fmt: skip

    @task(outlets=[ORDERS])
    def simulate(params: Mapping[str, Any] | None = None) -> Iterator[Metadata]:
        """Place orders and drive each to its end."""
        from assets.rides.service import RideSimulation  # noqa: PLC0415 - a DAG file imports what its tasks share

        assert params is not None, "Airflow gives the parameters"
        metadata = TaskOrigin.of(get_current_context()).metadata()
        with EventSQLHook() as hook:
            published = RideSimulation(hook.platform, seed=2026, metadata=metadata).run(params["orders"])
        yield Metadata(ORDERS, {"topic": RIDE_ORDERS.name, "events": published})

    simulate()

with DAG(
    "order_status", schedule=[claims_asset(RIDE_ORDERS.name, "order_status", max_wait=SECONDS)], tags=["rides"],
    **OPTIONS,
):  # fmt: skip

    @eventsql_consume(topic=RIDE_ORDERS.name, consumer="order_status")
    def order_status(events: Sequence[Event], connection: Connection, eventsql: EventSQLHook) -> None:
        """Table rides.order_status: how each order stands now, its timeline and the changes per minute."""
        write_orders(events, connection, eventsql.platform.database)

    order_status()

with DAG(
    "zone_fares_table", schedule=[claims_asset(ZONE_FARES.name, "zone_fares_table", max_wait=SECONDS)], tags=["rides"],
    **OPTIONS,
):  # fmt: skip
    eventsql_consume(topic=ZONE_FARES.name, consumer="zone_fares_table")(add_fares)()

with DAG(
    "driver_utilisation_table",
    schedule=[claims_asset(DRIVER_UTILISATION.name, "driver_utilisation_table", max_wait=SECONDS)], tags=["rides"],
    **OPTIONS,
):  # fmt: skip
    eventsql_consume(topic=DRIVER_UTILISATION.name, consumer="driver_utilisation_table")(add_utilisation)()
