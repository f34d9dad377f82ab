"""Where a log holds events, when they came, and who published them, without reading their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from psycopg.rows import TupleRow

from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.storage.log_queries import LogQueries


class Sample(NamedTuple):
    """A range of a log: its first and last offset, and the number of its first events, counted up to offset `upto`."""

    first: int
    last: int
    events: int
    upto: int


class Content(NamedTuple):
    """The events of one partition in a range that ends at `upto`: number, and times when they entered the log."""

    upto: int
    partition: int
    events: int
    first_at: datetime
    last_at: datetime


class Publisher(NamedTuple):
    """The events of a range that one run published: run, asset and partition, number, offsets, times of publication."""

    run: str | None
    asset: str | None
    run_partition: str | None
    events: int
    first: int
    last: int
    since: datetime
    until: datetime


class LoggedPublication(NamedTuple):
    """The events of a publication in the log: number, first and last offset, run."""

    events: int
    first: int | None
    last: int | None
    run: str | None


class LogRanges:
    """Looks into ranges of the logs of one database schema, on its callers' connections.

    A range is `after < offset <= upto`, of one partition or, with -1, of all partitions.
    """

    def __init__(self, schema: str) -> None:
        self._queries = LogQueries("ranges", schema)

    def samples(
        self, connection: Connection, topic: str, partition: int, ranges: Sequence[tuple[int, int]], *, sample: int
    ) -> list[Sample]:
        """The ranges that hold events, in order, each with its first `sample` events counted."""
        values = {**_arrays(ranges), "sample": sample}
        return [Sample(*row) for row in self._rows(connection, "samples", topic, partition, values)]

    def firsts(
        self, connection: Connection, topic: str, partition: int, ranges: Sequence[tuple[int, int]]
    ) -> list[int | None]:
        """The first offset in each range; None for a range without events."""
        return [first for (first,) in self._rows(connection, "firsts", topic, partition, _arrays(ranges))]

    def occupied(self, connection: Connection, topic: str, ranges: Sequence[tuple[int, int, int]]) -> set[int]:
        """The numbers of the ranges that hold events, counted from 0. A range is (partition, after, upto).

        The ranges are all of single partitions, or all of the whole log.
        """
        partitions, afters, uptos = ([each[column] for each in ranges] for column in range(3))
        name = "occupied_topic" if NOT_PARTITIONED in partitions else "occupied"
        values = {"numbers": list(range(len(ranges))), "partitions": partitions, "after": afters, "upto": uptos}
        query = self._queries.on(connection, name, topic)
        return {number for (number,) in fetch_all(connection, query, values, prepare=False)}

    def first(self, connection: Connection, topic: str, *, after: int, upto: int) -> int | None:
        """The first offset in a range of a whole log; None without events."""
        values = {"after": after, "upto": upto}
        (first,) = fetch_one(connection, self._queries.on(connection, "first", topic), values, prepare=False)
        return None if first is None else int(first)

    def ends_of_events(self, connection: Connection, topic: str, *, after: int, upto: int, events: int) -> list[int]:
        """The last offset of each window of `events` events of a range of a whole log."""
        return self._ends(connection, "ends_of_events", topic, after=after, upto=upto, events=events)

    def ends_of_periods(
        self, connection: Connection, topic: str, *, after: int, upto: int, seconds: float
    ) -> list[int]:
        """The last offset of each period with events of a whole log. Periods of `seconds` are counted from 1970."""
        return self._ends(connection, "ends_of_periods", topic, after=after, upto=upto, seconds=seconds)

    def contents(self, connection: Connection, topic: str, ranges: Sequence[tuple[int, int]]) -> list[Content]:
        """The contents of each range and partition that has events."""
        rows = self._rows(connection, "contents", topic, NOT_PARTITIONED, _arrays(ranges))
        return [Content(*row) for row in rows]

    def publishers(
        self, connection: Connection, topic: str, *, partition: int, after: int, upto: int
    ) -> list[Publisher]:
        """The publishers of the events of a range, in the order of their first events."""
        rows = self._rows(connection, "publishers", topic, partition, {"after": after, "upto": upto})
        return [Publisher(*row) for row in rows]

    def publication(
        self, connection: Connection, topic: str, *, after: int, at: datetime, asset: str | None,
        run_partition: str | None, events: int,
    ) -> LoggedPublication:  # fmt: skip
        """The events after an offset that one transaction published at `at` for a Dagster asset, at most `events`."""
        values = {"after": after, "at": at, "asset": asset, "partition": run_partition, "events": events}
        query = self._queries.on(connection, "publication", topic)
        return LoggedPublication(*fetch_one(connection, query, values, prepare=False))

    def _ends(self, connection: Connection, name: str, topic: str, **values: float) -> list[int]:
        rows = fetch_all(connection, self._queries.on(connection, name, topic), values, prepare=False)
        return [int(end) for (end,) in rows]

    def _rows(
        self, connection: Connection, name: str, topic: str, partition: int, values: Mapping[str, Any]
    ) -> list[TupleRow]:
        # Plan for the values: a generic plan does not know how small the range is.
        name = name if partition == NOT_PARTITIONED else f"{name}_partition"
        query = self._queries.on(connection, name, topic)
        return fetch_all(connection, query, {**values, "partition": partition}, prepare=False)


def _arrays(ranges: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    return {"after": [after for after, _ in ranges], "upto": [upto for _, upto in ranges]}
