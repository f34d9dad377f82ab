"""Sums of orders, computed by Spark. Sums of ranges add up: together they are the sums of all events.

Each function takes and gives a DataFrame and knows neither claims nor topics: a consumer's range, a backfill of all
history and a test use the same.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

ORDER_SCHEMA = (
    "order_id string, change string, driver string, zone string, price_cents long, placed_at timestamp, at timestamp"
)


def orders_of(events: DataFrame) -> DataFrame:
    """The states of orders that events of topic ride_orders carry in `value`."""
    order = f.from_json(f.col("value").cast("string"), ORDER_SCHEMA)
    return events.select(order.alias("order")).select("order.*")


def fares(orders: DataFrame) -> DataFrame:
    """Demand and fares: orders placed, rides completed and what those earned, per zone and quarter of an hour.

    An order counts in the quarter in which it was placed, a ride in the one in which it ended.
    """
    completed = f.col("change") == "completed"
    return (
        orders.where(f.col("change").isin("placed", "completed"))
        .groupBy("zone", f.window("at", "15 minutes").start.alias("quarter_hour"))
        .agg(
            f.count_if(~completed).alias("orders"),
            f.count_if(completed).alias("rides"),
            f.sum(f.when(completed, f.col("price_cents")).otherwise(0)).alias("fares_cents"),
        )
    )


def utilisation(orders: DataFrame) -> DataFrame:
    """How much drivers drove: rides accepted, ended and completed, and the time between, per driver and day.

    A ride belongs to the day in UTC on which its order was placed, which each of its events states. Its beginning and
    its end may lie in different ranges: the one is subtracted, the other added, as microseconds since the order was
    placed. So `busy_micros` is the time driven where as many rides have ended as were accepted.
    """
    accepted = f.col("change") == "accepted"
    since_placed = f.unix_micros("at") - f.unix_micros("placed_at")
    return (
        orders.where(f.col("driver").isNotNull() & f.col("change").isin("accepted", "completed", "cancelled"))
        .groupBy("driver", f.to_date("placed_at").alias("day"))
        .agg(
            f.count_if(accepted).alias("accepted"),
            f.count_if(~accepted).alias("ended"),
            f.count_if(f.col("change") == "completed").alias("completed"),
            f.sum(f.when(accepted, -since_placed).otherwise(since_placed)).alias("busy_micros"),
        )
    )
