"""Parts that the assets share: summing up a claimed range with Spark, and checks of the tables."""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import DataFrame

from assets.comparison import Comparison
from assets.keyed_rows import keyed_rows
from eventsql_orchestration import Claim, Topic
from eventsql_orchestration.dagster import EventSQLResource, RangeLimits, publish_dataframe, spark_progress

SPARK_LIMITS = RangeLimits(min_events=5_000, max_events=100_000, max_wait=5.0)
"""A session may take seconds to start: events that come within 5 s go to one session instead of two."""


def publish_sums(
    context: dg.AssetExecutionContext,
    claim: Claim,
    *,
    eventsql: EventSQLResource,
    spark: LazyPySparkResource,
    compute: Callable[[DataFrame], DataFrame],
    topic: Topic,
    key: str,
) -> Mapping[str, Any]:
    """Let Spark compute sums of the claimed events and publish each row, as JSON, together with the consumer's offset.

    `key` is the column that the rows are keyed by. Gives the metadata of the run.
    """
    rows = compute(eventsql.read_range(spark.spark_session, claim, columns="value binary"))
    with spark_progress(context, spark.spark_session) as progress:
        published = publish_dataframe(context, keyed_rows(rows, key), eventsql=eventsql, topic=topic.name, claim=claim)
    return {**published, **progress.metadata()}


def check_result(comparison: Comparison) -> dg.AssetCheckResult:
    """A comparison as the result of an asset check."""
    return dg.AssetCheckResult(passed=comparison.passed, metadata=comparison.figures)
