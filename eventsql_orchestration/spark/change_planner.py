"""The driver's part of a read of the event store: the ranges of the global order that the tasks read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.spark.change_options import ChangeOptions
from eventsql_orchestration.spark.change_tasks import ChangeRange
from eventsql_orchestration.spark.options import naming_option
from eventsql_orchestration.store import StoreCheckpoint
from eventsql_orchestration.store.order import GlobalOrder
from eventsql_orchestration.validation import MAX_BIGINT


def plan_changes(options: ChangeOptions, columns: Sequence[str]) -> list[ChangeRange]:
    """The ranges of the tasks, in the global order, each with about as many changes.

    Raises `ValidationError` for a checkpoint beyond the horizon or an end before the begin, `DatabaseError` for a
    checkpoint of another era and for a restored dump that is not adopted, and `SchemaOutdatedError`.
    """
    (url,) = options.source.urls
    database = Database(url, schema=options.source.schema, migrate=False, application_name="eventsql-spark")
    with closing(database):
        return _Planner(options, database).plan(columns)


class _Planner:
    def __init__(self, options: ChangeOptions, database: Database) -> None:
        self._options = options
        self._database = database
        self._order = GlobalOrder(database)
        self._queries = Queries("store_read", database.schema)
        self._only = {
            "types": None if options.types is None else list(options.types),
            "kinds": None if options.kinds is None else list(options.kinds),
        }

    def plan(self, columns: Sequence[str]) -> list[ChangeRange]:
        with self._database.transaction() as connection:
            after, upto = self._bounds(connection)
            ranges = []
            for adopted, start, end in _parts(after, upto):
                places = self._places(connection, start, end, adopted=adopted)
                ranges += [
                    self._range(connection, low, high, columns, adopted=adopted) for low, high in pairwise(places)
                ]
        return ranges

    def _bounds(self, connection: Connection) -> tuple[StoreCheckpoint, StoreCheckpoint]:
        newest = self._order.newest(connection)
        after, upto = StoreCheckpoint(newest.era, 0, 0), newest
        with naming_option("option afterCheckpoint"):
            if self._options.after is not None:
                after = self._order.home.place(connection, StoreCheckpoint.parse(self._options.after))
        with naming_option("option uptoCheckpoint"):
            if self._options.upto is not None:
                upto = self._order.home.place(connection, StoreCheckpoint.parse(self._options.upto))
                values = {"transaction": str(upto.transaction)}
                if not fetch_one(connection, self._queries("ended"), values)[0]:
                    raise ValidationError(
                        f"changes may still appear before {upto}: give a checkpoint that `read_all` or `newest` "
                        "has returned"
                    )
                if after > upto:
                    raise ValidationError(f"{upto} lies before afterCheckpoint, {after}")
        return after, upto

    def _places(
        self, connection: Connection, after: StoreCheckpoint, upto: StoreCheckpoint, *, adopted: bool
    ) -> list[StoreCheckpoint]:
        """The bounds of the tasks, `after` and `upto` included; one place if there is nothing between them."""
        values = {**_between(after, upto), **self._only}
        count = int(fetch_one(connection, self._queries("count_adopted" if adopted else "count_changes"), values)[0])
        if not count:
            return [after]
        wanted = self._options.tasks.number(count)
        # An index has the places of all types and kinds, so these places cut the tasks. The number of tasks is about
        # `wanted`.
        if self._only != {"types": None, "kinds": None}:
            every = {**values, "types": None, "kinds": None}
            count = int(fetch_one(connection, self._queries("count_adopted" if adopted else "count_changes"), every)[0])
        tasks = min(wanted, count)
        step = {**_between(after, upto), "step": -(-count // tasks)}
        query = self._queries("every_adopted_place" if adopted else "every_place")
        found = [StoreCheckpoint(after.era, int(row[0]), row[1]) for row in fetch_all(connection, query, step)]
        return [after, *(place for place in found[: tasks - 1] if place < upto), upto]

    def _range(
        self, connection: Connection, after: StoreCheckpoint, upto: StoreCheckpoint, columns: Sequence[str],
        *, adopted: bool,
    ) -> ChangeRange:  # fmt: skip
        query = sql.SQL("SELECT {} FROM ({}) changes").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)), self._queries("adopted_changes" if adopted else "changes")
        )
        values: dict[str, Any] = {**_between(after, upto), **self._only}
        # ADBC copies only queries without parameters.
        filled = psycopg.ClientCursor(connection).mogrify
        return ChangeRange(
            era=after.era,
            after=str(after),
            upto=str(upto),
            query=filled(query, values),
            era_query=filled(self._queries("era"), values),
        )


def _parts(after: StoreCheckpoint, upto: StoreCheckpoint) -> Iterator[tuple[bool, StoreCheckpoint, StoreCheckpoint]]:
    """The part of a range with changes that have no transaction, and the rest, each with its bounds."""
    if after.transaction == 0:
        end = upto if upto.transaction == 0 else StoreCheckpoint(after.era, 0, MAX_BIGINT)
        yield True, after, end
        after = end
    if after < upto:
        yield False, after, upto


def _between(after: StoreCheckpoint, upto: StoreCheckpoint) -> dict[str, Any]:
    return {
        "after_transaction": str(after.transaction), "after_position": after.position,
        "upto_transaction": str(upto.transaction), "upto_position": upto.position,
    }  # fmt: skip
