"""Ride hailing in Airflow: the pipeline of `assets/rides`, with its own consumers beside those of Dagster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import DAG, AssetWatcher, Param, get_current_context, task

from assets.rides.effects import ZONE_FARES, add_fares, write_orders
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Claim, Connection, Event, Topic
from eventsql_orchestration.airflow import (
    EventSQLConsumeOperator,
    EventSQLHook,
    EventSQLTrigger,
    eventsql_consume,
    publish_output,
    topic_asset,
)
from eventsql_orchestration.airflow.provenance import TaskOrigin
from eventsql_orchestration.spark import spark_config

OPTIONS: dict[str, Any] = {"catchup": False, "tags": ["eventsql", "rides"], "max_active_runs": 2}


def watched(topic: Topic, consumer: str, **options: Any) -> Any:
    """The asset of the claims of a consumer, which schedules a DAG."""
    trigger = EventSQLTrigger(topic=topic.name, consumer=consumer, max_wait=2.0, **options)
    name = f"{topic.name}_for_{consumer}"
    return topic_asset(
        topic.name, name=name, uri=f"eventsql://eventsql_default/{name}",
        watchers=[AssetWatcher(name=name, trigger=trigger)],
    )  # fmt: skip


with DAG("simulate_rides", schedule=None, params={"orders": Param(200, type="integer", minimum=1)}, **OPTIONS):

    @task(outlets=[topic_asset(RIDE_ORDERS.name)])
    def simulate(params: Mapping[str, Any] | None = None) -> int:
        """Place orders and drive each to its end; gives the number of events."""
        from assets.rides.service import RideSimulation  # noqa: PLC0415 - a DAG file imports what its tasks share

        assert params is not None, "Airflow gives the parameters"
        metadata = TaskOrigin.of(get_current_context()).metadata()
        with EventSQLHook() as hook:
            return RideSimulation(hook.platform, seed=2026, metadata=metadata).run(params["orders"])

    simulate()

with DAG("order_status", schedule=[watched(RIDE_ORDERS, "airflow_order_status")], **OPTIONS):

    @eventsql_consume(topic=RIDE_ORDERS.name, consumer="airflow_order_status")
    def order_status(events: Sequence[Event], connection: Connection, eventsql: EventSQLHook) -> None:
        """Table rides.order_status: how each order stands now, its timeline and the changes per minute."""
        write_orders(events, connection, eventsql.platform.database)

    order_status()

with DAG("zone_fares", schedule=[watched(RIDE_ORDERS, "airflow_zone_fares", max_events=50_000)], **OPTIONS):

    def sum_fares(claim: Claim, eventsql: EventSQLHook, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let Spark sum up a claimed range, and publish each row together with the consumer's offset."""
        # The task imports Spark, not the parsing of this file.
        from pyspark.sql import SparkSession  # noqa: PLC0415

        from assets.keyed_rows import keyed_rows  # noqa: PLC0415
        from assets.rides import sums  # noqa: PLC0415

        spark = SparkSession.builder.config(map=dict(spark_config())).getOrCreate()
        try:
            fares = sums.fares(sums.orders_of(eventsql.read_range(spark, claim)))
            return publish_output(
                context, keyed_rows(fares, "zone"), topic=ZONE_FARES.name, eventsql=eventsql, claim=claim
            )
        finally:
            spark.stop()

    EventSQLConsumeOperator(
        task_id="sum_fares", topic=RIDE_ORDERS.name, consumer="airflow_zone_fares", python_callable=sum_fares,
        gets="claim", outlets=[topic_asset(ZONE_FARES.name)],
    )  # fmt: skip

with DAG("zone_fares_table", schedule=[watched(ZONE_FARES, "airflow_zone_fares_table")], **OPTIONS):
    eventsql_consume(topic=ZONE_FARES.name, consumer="airflow_zone_fares_table")(add_fares)()
