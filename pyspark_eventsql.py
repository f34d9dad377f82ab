"""Where Spark finds the data source `eventsql`: it imports every top-level module named `pyspark_*`."""

from eventsql_orchestration.spark.source import EventSQLDataSource as DefaultSource

__all__ = ["DefaultSource"]
