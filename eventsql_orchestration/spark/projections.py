"""Rebuilding projections of the event store in bulk, with PySpark."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from eventsql_orchestration.errors import ProjectionError
from eventsql_orchestration.spark import FORMAT
from eventsql_orchestration.spark.change_options import ALL
from eventsql_orchestration.spark.copying import copy_frame
from eventsql_orchestration.spark.options import AGGREGATES, Source
from eventsql_orchestration.store import Filling, Projection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SparkProjection(Projection):
    """A projection that PySpark can compute from all changes at once, for rebuilds in bulk.

    `frames` has to give the rows that `apply` writes for the same changes::

        class Payments(SparkProjection):
            ...

            def frames(self, changes: DataFrame) -> Mapping[str, DataFrame]:
                times = changes.groupBy("aggregate_id").count()
                return {"payment": times.toDF("account", "times")}
    """

    @abstractmethod
    def frames(self, changes: DataFrame) -> Mapping[str, DataFrame]:
        """The rows of each of `tables` after `changes`, of the projection's types and kinds.

        `changes` has the columns of a read with the option `aggregates` (docs/spark_reading.md). A frame has columns
        of its table, by name; columns of the table that the frame leaves out get their defaults.
        """


class SparkFill:
    """Fills the tables of a rebuild with the frames of a `SparkProjection`: `rebuild(name, fill=SparkFill(spark))`.

    The tasks connect to the database of the projection's store by the URL that this process has for it.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, filling: Filling) -> None:
        """Raises `ProjectionError` for a projection without fitting frames, and errors of Spark and the database."""
        projection = filling.projection
        if not isinstance(projection, SparkProjection):
            raise ProjectionError(
                f"projection {projection.name!r} has no frames for PySpark: derive it from SparkProjection, or rebuild "
                "it without fill"
            )
        source = Source.of([filling.database.dsn], filling.database.schema)
        frames = projection.frames(changes_frame(self._spark, source, projection, upto=str(filling.upto)))
        if set(frames) != set(projection.tables):
            raise ProjectionError(
                f"projection {projection.name!r} has frames for {', '.join(sorted(frames)) or 'no table'}, and its "
                f"tables are {', '.join(projection.tables)}: give one frame for each table"
            )
        for table in projection.tables:
            copy_frame(frames[table], source, filling.schema, table, filling.ledger)


def changes_frame(spark: SparkSession, source: Source, projection: Projection, *, upto: str) -> DataFrame:
    """The changes of a projection's types and kinds up to a checkpoint."""
    options = {"dsn": source.dsn, "schema": source.schema, "uptoCheckpoint": upto}
    for option, names in ((AGGREGATES, projection.types), ("kinds", projection.kinds)):
        options[option] = ALL if names is None else json.dumps(list(names))
    return spark.read.format(FORMAT).options(**options).load()
