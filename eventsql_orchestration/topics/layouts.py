"""Layouts: which partitions a topic has after which offset, and how consumers come from one to the next.

The events of a log keep the partition that they were published to. Where the number of partitions changes, a key's
events lie in one partition up to an offset and in another after it. To keep a key's order, a consumer stops at that
offset (`consumer.eql_until`) until all of its partitions have consumed what comes before, and only then goes on with
the partitions of the next layout.

A consumer has a row for every partition of its layout and of all later ones, so that what waits in those counts as lag
and is kept by retention.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.rows import tuple_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.log.side_consumers import MARK
from eventsql_orchestration.sharding import HELD

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """`partitions` of a topic hold its events after offset `after`, up to that of the next layout."""

    number: int
    partitions: int
    after: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Settled:
    """Whether a consumer that waited at the end of a layout has entered the next, and if not, why."""

    entered: bool
    reason: str = ""


NOT_WAITING: Final = Settled(False, "the consumer does not wait for a layout")

HELD_BACK: Final = Settled(
    False, "the consumer is held back, until it has consumed what was before on the other shards"
)


@checked
class Layouts:
    """Reads the layouts of topics, and lets consumers come from one to the next."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("layouts", database.schema)

    def of(self, topic: str) -> list[Layout]:
        """The layouts of a topic, oldest first; empty where its partitions never changed while it had events."""
        with self._database.connection() as connection:
            return layouts(connection, self._database.schema, topic)

    def unsettled(self, topic: str) -> dict[str, int]:
        """The consumers that have not come to the newest layout, each with the offset where it is to wait."""
        with self._database.connection() as connection:
            return dict(connection.execute(self._queries("unsettled"), {"topic": topic}).fetchall())

    def settle(self, topic: str, consumer: str) -> Settled:
        """Let a consumer enter the next layout, if all of its partitions have consumed what comes before.

        Waits for nothing: where a consumption has one of the partitions, it is for the next look.
        """
        own = {"topic": topic, "consumer": consumer}
        with self._database.transaction() as connection:
            # While others are behind, nothing is locked.
            until = self._behind(connection, topic, own) or self._locked(connection, topic, own)
            if isinstance(until, Settled):
                return until
            if until == HELD:
                return HELD_BACK
            later = [each for each in layouts(connection, self._database.schema, topic) if each.after >= until]
            if not later or later[0].after != until:
                return Settled(False, f"what comes after offset {until} is not to be consumed yet")
            # No event may have come between two changes.
            while len(later) > 1 and later[1].after == until:
                del later[0]
            # A role that consumes may not delete a consumer's rows: the function checks once more that these are over.
            if connection.execute(self._queries("enter"), own).fetchone() != (True,):
                return Settled(False, "it came to another place meanwhile")
        logger.info(
            "consumer %r of topic %r goes on after offset %d with %d partitions",
            consumer, topic, until, later[0].partitions,
        )  # fmt: skip
        return Settled(True)

    def _locked(self, connection: Connection, topic: str, own: dict[str, str]) -> int | Settled:
        """Lock all partitions of a consumer, where they are free and have consumed what comes before; their bound."""
        row = connection.execute(self._queries("consumer_size"), own).fetchone()
        assert row is not None, "an aggregate gives one row"
        locked = connection.execute(self._queries("lock_consumers"), own).fetchall()
        if len(locked) != row[0]:
            return Settled(False, "a consumption has one of its partitions")
        untils = {until for _, until, _ in locked}
        if len(untils) != 1 or None in untils:
            return NOT_WAITING
        if leased := [partition for partition, _, leased in locked if leased]:
            return Settled(False, f"{_named(leased)} be given back first")
        return self._behind(connection, topic, own) or int(untils.pop())

    def _behind(self, connection: Connection, topic: str, own: dict[str, str]) -> Settled | None:
        rows = connection.execute(self._queries("behind", topic=topic), own, prepare=False).fetchall()
        if not rows:
            return None
        return Settled(False, f"{_named([partition for partition, _ in rows])} come to offset {rows[0][1]} first")


def layouts(connection: Connection, schema: str, topic: str) -> list[Layout]:
    """As `Layouts.of`, on a connection of the caller's."""
    cursor = connection.cursor(row_factory=tuple_row)
    return [Layout(*row) for row in cursor.execute(Queries("layouts", schema)("layouts"), {"topic": topic})]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a partitioned consumer stands in a topic: its number of rows, and the offset up to which it may consume."""

    layout: int
    partitions: int
    until: int | None


def place(known: Sequence[Layout], offset: int) -> Place:
    """The place of an offset among the layouts of a topic, of which there are some."""
    at = max(index for index, each in enumerate(known) if each.after <= offset or index == 0)
    rows = max(each.partitions for each in known[at:])
    return Place(known[at].number, rows, known[at + 1].after if at + 1 < len(known) else None)


def bounded(known: Sequence[Layout], until: int | None) -> Layout:
    """The layout of a consumer that may consume up to `until`, an offset that it has events up to, or all there is."""
    return next((each for each in reversed(known) if until is None or each.after < until), known[0])


def move(connection: Connection, schema: str, topic: str, consumer: str, *, offset: int, until: int | None) -> None:
    """Give a partitioned consumer, whose rows are locked and stand at `offset`, what it needs to go on from there.

    `until` is how far it might consume before, and so tells the layout that its rows are of: one that has not all
    partitions of that, as a backfill of a single one leaves it, is not given any others.
    """
    known = layouts(connection, schema, topic)
    if not known:
        return
    at, queries = place(known, offset), Queries("layouts", schema)
    own = {"topic": topic, "consumer": consumer}
    connection.execute(queries("hold"), {**own, "until": at.until})
    connection.execute(queries("release_beyond"), {**own, "partitions": at.partitions})
    connection.execute(queries("delete_beyond"), {**own, "partitions": at.partitions})
    added = {"partitions": at.partitions, "after": offset, "least": bounded(known, until).partitions}
    connection.execute(queries("add_partitions"), {**own, **added})


def complete(connection: psycopg.Connection[Any], schema: str, topic: str, consumer: str) -> None:
    """Give a partitioned consumer the partitions that it lacks, from their first events on.

    It lacks some where it was registered by layouts of a former topic of this name. In the caller's transaction that
    holds the registry.
    """
    queries = Queries("leftovers", schema)
    cursor = connection.cursor(row_factory=tuple_row)
    for name, _, needed in cursor.execute(queries("lacking"), {"topic": topic, "window": MARK}).fetchall():
        if name == consumer:
            added = {"topic": topic, "consumer": consumer, "partitions": needed, "after": None, "least": 0}
            connection.execute(Queries("layouts", schema)("add_partitions"), added)


def check_same_layout(known: Sequence[Layout], offset: int, targets: Sequence[int], *, whole: bool) -> None:
    """Make sure that a seek leaves a consumer's partitions in one layout.

    `whole` says that all of them move. Raises `ValidationError` where the `targets` lie in different layouts, or where
    only some move, out of the layout of `offset`.
    """
    places = {place(known, target).layout for target in targets}
    if not whole:
        places.add(place(known, offset).layout)
    if len(places) > 1:
        raise ValidationError(
            "the partitions of the topic changed between these offsets, and a consumer is in one layout as a whole: "
            "seek all of its partitions to one offset or time"
        )


def _named(partitions: Sequence[int]) -> str:
    named = ", ".join(map(str, partitions[:10])) + (", …" if len(partitions) > 10 else "")
    return f"partition{'s' if len(partitions) > 1 else ''} {named} must"
