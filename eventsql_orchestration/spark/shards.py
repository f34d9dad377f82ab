"""A shard as a read knows it, and the shard's name in errors.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, ShardUnavailableError
from eventsql_orchestration.spark import plain_kind
from eventsql_orchestration.spark.options import Source

ALONE: Final = "0"
"""The name, in a stream's checkpoint, of a database that is not a shard."""


@dataclass(frozen=True, slots=True)
class ReadShard:
    """One of several databases: its name, and the index of its URL among those of the source."""

    name: str
    place: int

    def alone(self, source: Source) -> Source:
        """Its database by itself."""
        return Source(source.urls[self.place], source.schema, "its database")


@contextmanager
def naming(shard: ReadShard | None) -> Iterator[None]:
    """Add the shard's name to errors of the block that do not have it. None for one database."""
    try:
        yield
    except EventSQLError as error:
        if shard is None or str(error).startswith(f"shard {shard.name!r}"):
            raise
        if isinstance(error, DatabaseUnavailableError):
            raise ShardUnavailableError(f"shard {shard.name!r} is down: {error}", shard=shard.name) from error
        kind = plain_kind(type(error))
        raise kind(f"shard {shard.name!r}: {error}") from error
