"""Rows of Spark as events: the same for every orchestrator."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def keyed_rows(rows: DataFrame, key: str) -> DataFrame:
    """Each row as JSON in `value`, keyed by one of its columns."""
    return rows.select(f.col(key).alias("key"), f.to_json(f.struct(*rows.columns)).alias("value"))
