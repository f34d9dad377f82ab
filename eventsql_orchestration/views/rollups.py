"""Rollups: counts and sums per bucket of time. Events add to them, and nothing is recomputed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg.rows import class_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import check_name, check_range, check_text, check_time, check_whole

MAX_DIMENSION_LENGTH: Final = 200


@dataclass(frozen=True, slots=True)
class RollupBucket:
    """Count and sum of the bucket of time that begins at `bucket`, for one value of the dimension.

    A rollup without dimensions has the dimension ''.
    """

    bucket: datetime
    dimension: str
    count: int
    sum: int


@checked
class Rollups:
    """The rollups of one database. A rollup exists as soon as something is added to it.

    Additions commute: any order and any batches give the same buckets. Adding takes the caller's connection: an event's
    handler counts it exactly once, in the transaction that moves its offset.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("views", database.schema)

    def add(self, connection: CallersConnection, rollup: str, rows: Iterable[tuple[datetime, str, int, int]]) -> None:
        """Add `(bucket, dimension, count, sum)` rows in the caller's transaction, with one statement.

        Rows of the same bucket and dimension are added up; negative numbers subtract. The buckets stay locked until the
        transaction ends. Transactions with one call each cannot deadlock; transactions with several calls can.

        Raises `ValidationError`, with no row added, for values that cannot be stored.
        """
        check_name("rollup", rollup)
        added: dict[tuple[datetime, str], tuple[int, int]] = {}
        for bucket, dimension, count, total in rows:
            key = (check_time("bucket", bucket), _check_dimension(dimension))
            count_before, sum_before = added.get(key, (0, 0))
            added[key] = (
                check_whole("count", check_whole("count", count) + count_before),
                check_whole("sum", check_whole("sum", total) + sum_before),
            )
        if not added:
            return
        # Lock buckets in one order, so that two additions cannot deadlock.
        keys = sorted(added)
        values = {
            "rollup": rollup,
            "buckets": [bucket for bucket, _ in keys], "dimensions": [dimension for _, dimension in keys],
            "counts": [added[key][0] for key in keys], "sums": [added[key][1] for key in keys],
        }  # fmt: skip
        with self._database.callers(connection) as joined:
            joined.execute(self._queries("add_to_rollup"), values)

    def read(
        self, rollup: str, since: datetime | None = None, until: datetime | None = None, dimension: str | None = None
    ) -> list[RollupBucket]:
        """The buckets with `since <= bucket < until`, of one dimension or of all, ordered by both."""
        check_range(since, until)
        values = {
            "rollup": check_name("rollup", rollup),
            "since": since,
            "until": until,
            "dimension": None if dimension is None else _check_dimension(dimension),
        }
        with self._database.connection() as connection, connection.cursor(row_factory=class_row(RollupBucket)) as found:
            return found.execute(self._queries("read_rollup"), values, prepare=False).fetchall()


def _check_dimension(dimension: str) -> str:
    if len(check_text("dimension", dimension)) > MAX_DIMENSION_LENGTH:
        raise ValidationError(
            f"dimension {dimension[:40]!r}… has {len(dimension)} characters; {MAX_DIMENSION_LENGTH} are allowed"
        )
    return dimension
