"""A platform as an orchestrator's runs reach it: shard by shard, and from Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from eventsql_orchestration import EventSQL, OffsetRange, Shard
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.orchestration.shards import shard_named, shards_of
from eventsql_orchestration.spark import FORMAT, range_options
from eventsql_orchestration.spark.options import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class PlatformAccess:
    """Methods that resources and hooks share. A subclass has the platform, and the schema of its tables."""

    if TYPE_CHECKING:
        # Do not declare it at run time: a subclass may be a pydantic model with a field of that name.
        @property
        def platform(self) -> EventSQL: ...

        @property
        def db_schema(self) -> str: ...

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Each database by itself; see `EventSQL.shards`.

        If there are several, raises `ShardSetError` if they are not the shards of one set, and
        `DatabaseUnavailableError` if none can be reached.
        """
        return shards_of(self.platform)

    def shard(self, name: str | None) -> Shard:
        """One shard by its name. A single database has no name: pass None.

        Raises `ShardSetError` if no shard has the name, and for None if there are several shards. Raises
        `ShardUnavailableError` if the shard cannot be found because shards are down.
        """
        return shard_named(self.shards, name)

    def read_range(
        self, spark: SparkSession, events: Claim | OffsetRange, *, columns: str | None = None, shard: str | None = None
    ) -> DataFrame:
        """The events of a claim, or of a range, as a DataFrame of the `eventsql` data source.

        For a claim, the frame holds the uncommitted events that match the consumer's filter, on the claim's shard.
        Spark reads them when the frame is first evaluated; this raises `ClaimLostError` if the claim is over by then.
        For a range, the frame holds every event, claimed or not. Offsets belong to one `shard`: name it if there are
        several. `columns` is a schema, for example `"key string, value binary"`: no other column is fetched.
        """
        if isinstance(events, Claim):
            wanted, on = {"claim": str(events.id)}, events.shard
        else:
            wanted, on = range_options(events), shard
        reader = spark.read.format(FORMAT).options(**self.spark_options(self.shard(on).name), **wanted)
        if columns is not None:
            reader = reader.schema(columns)
        return reader.load()

    def spark_options(self, shard: str | None = None) -> Mapping[str, str]:
        """The options of the `eventsql` data source that name all shards, or one shard. They hold passwords."""
        source = self.source(shard)
        return {"dsn": source.dsn, "schema": source.schema}

    def source(self, shard: str | None = None) -> Source:
        """All shards, or one shard, as Spark's tasks know them, with passwords. Raises as `shard`."""
        shards = self.platform.shards if shard is None else (self.shard(shard),)
        databases = [each.database for each in shards]
        return Source(" ".join(each.dsn for each in databases), self.db_schema, ", ".join(map(str, databases)))
