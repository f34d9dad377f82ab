"""Sums of file changes, computed by Spark. Sums of ranges add up: together they are the sums of all changes."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

CHANGE_SCHEMA = "repo string, commit string, committed_at string, path string, added long, deleted long"


def changes_of(events: DataFrame) -> DataFrame:
    """The file changes that events of topic file_changes carry in `value`."""
    change = f.from_json(f.col("value").cast("string"), CHANGE_SCHEMA)
    # An erased event has no value, and belongs to no directory.
    return events.where("value IS NOT NULL").select(change.alias("change")).select("change.*")


def churn(changes: DataFrame) -> DataFrame:
    """Changes, lines added and lines deleted per repository, directory and month."""
    # Everything before the last slash; files at the top belong to ".".
    above = f.regexp_replace("path", "/[^/]*$", "")
    directory = f.when(f.contains("path", f.lit("/")), above).otherwise(".")
    # The month as the commit says it, in its author's own time zone.
    month = f.substring("committed_at", 1, 7)
    return changes.groupBy("repo", directory.alias("directory"), month.alias("month")).agg(
        f.count("*").alias("changes"),
        f.coalesce(f.sum("added"), f.lit(0)).alias("added"),
        f.coalesce(f.sum("deleted"), f.lit(0)).alias("deleted"),
    )
