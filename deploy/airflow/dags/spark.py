"""Sums by Spark in Airflow: each task sums up a claimed range, and publishes the sums together with the claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import DAG

from assets.churn.effects import DIRECTORY_CHURN, FILE_CHANGES
from assets.rides.effects import DRIVER_UTILISATION, ZONE_FARES
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Claim, Topic
from eventsql_orchestration.airflow import (
    EventSQLConsumeOperator,
    EventSQLHook,
    RunLimits,
    claims_asset,
    publish_output,
    topic_asset,
)
from eventsql_orchestration.spark import spark_config

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# A session of one's own takes some 20 s to start: events that come within 10 s go to one instead of two.
MOST: Final = 100_000
CLAIMS: Final[dict[str, Any]] = {"min_events": 5_000, "max_events": MOST, "max_wait": 10.0}
LIMITS: Final = RunLimits(max_events=MOST, drain_events=10_000_000)


def fares(events: DataFrame) -> DataFrame:
    """Demand and fares per zone and quarter of an hour."""
    # The task imports Spark, not the parsing of this file.
    from assets.rides import sums  # noqa: PLC0415

    return sums.fares(sums.orders_of(events))


def utilisation(events: DataFrame) -> DataFrame:
    """Rides and time driven per driver and day."""
    from assets.rides import sums  # noqa: PLC0415

    return sums.utilisation(sums.orders_of(events))


def churn(events: DataFrame) -> DataFrame:
    """Changes, lines added and lines deleted per directory and month."""
    from assets.churn import sums  # noqa: PLC0415

    return sums.churn(sums.changes_of(events))


def sum_up(consumer: str, topic: Topic, output: Topic, compute: Any, key: str) -> None:
    """A DAG that sums up the claims of a consumer, and publishes each row as JSON, keyed by a column."""

    def publish_sums(claim: Claim, eventsql: EventSQLHook, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the claimed range with Spark, and publish its sums in the transaction that commits the claim."""
        from pyspark.sql import SparkSession  # noqa: PLC0415

        from assets.keyed_rows import keyed_rows  # noqa: PLC0415

        spark = SparkSession.builder.config(map=dict(spark_config())).getOrCreate()
        try:
            rows = keyed_rows(compute(eventsql.read_range(spark, claim, columns="value binary")), key)
            return publish_output(context, rows, topic=output.name, eventsql=eventsql, claim=claim)
        finally:
            spark.stop()

    with DAG(
        consumer, schedule=[claims_asset(topic.name, consumer, **CLAIMS)], catchup=False, max_active_runs=1,
        default_args={"retries": 2, "retry_delay": 10.0}, tags=["spark"],
    ):  # fmt: skip
        EventSQLConsumeOperator(
            task_id="publish_sums", topic=topic.name, consumer=consumer, python_callable=publish_sums, gets="claim",
            limits=LIMITS, outlets=[topic_asset(output.name)],
        )  # fmt: skip


sum_up("zone_fares", RIDE_ORDERS, ZONE_FARES, fares, "zone")
sum_up("driver_utilisation", RIDE_ORDERS, DRIVER_UTILISATION, utilisation, "driver")
sum_up("directory_churn", FILE_CHANGES, DIRECTORY_CHURN, churn, "directory")
