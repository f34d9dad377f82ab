"""Layouts: the partitions that a topic has from an offset on, and how consumers go from one layout to the next.

The events of a log keep the partition that they were published to. If the number of partitions changes, a key's
events lie in one partition up to an offset and in another after it. To keep a key's order, a consumer stops at that
offset (`consumer.eql_until`) until all of its partitions have consumed the events before it. Then it goes on with the
partitions of the next layout.

A consumer has a row for every partition of its layout and of all later layouts: events that wait there count as lag,
and retention keeps them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all, query_all
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import Topic
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.topics.side_consumers import MARK

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """`partitions` of a topic hold its events after offset `after`, up to the offset of the next layout."""

    number: int
    partitions: int
    after: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Settled:
    """Whether a consumer that waited at the end of a layout has entered the next; if not, `reason` says why."""

    entered: bool
    reason: str = ""


NOT_WAITING: Final = Settled(False, "the consumer does not wait for a layout")

HELD_BACK: Final = Settled(
    False, "the consumer is held back until it has consumed the earlier events of the other shards"
)


@checked
class Layouts:
    """Reads the layouts of topics, and lets consumers go from one to the next."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("layouts", database.schema)
        self._on_log = LogQueries("consumers", database.schema)

    def of(self, topic: str) -> list[Layout]:
        """The layouts of a topic, oldest first; empty if its partitions never changed while it had events."""
        with self._database.connection() as connection:
            return layouts(connection, self._database.schema, topic)

    def most_partitions(self, topic: Topic) -> int:
        """The most partitions that a topic ever had. Events of a former partition keep their partition."""
        return max([topic.partitions, *(each.partitions for each in self.of(topic.name))])

    def unsettled(self, topic: str) -> dict[str, int]:
        """The consumers that are not in the newest layout yet, each with the offset where it waits."""
        return dict(query_all(self._database, self._queries("unsettled"), {"topic": topic}))

    def settle(self, topic: str, consumer: str) -> Settled:
        """Let a consumer enter the next layout, if all of its partitions have consumed the events before it.

        The call does not wait: if a consumption has one of the partitions, the next call tries again. The function
        `enter_layout` in the database decides, because a role that consumes may not delete a consumer's rows.
        """
        own = {"topic": topic, "consumer": consumer}
        with self._database.transaction() as connection:
            # While events are left, nothing is locked.
            if (behind := self._behind(connection, topic, own)) is not None:
                return behind
            locked = connection.execute(self._queries("lock_consumers"), own).fetchall()
            if connection.execute(self._queries("consumer_size"), own).fetchone() != (len(locked),):
                return Settled(False, "a consumption has one of its partitions")
            if connection.execute(self._queries("enter"), own).fetchone() != (True,):
                return self._behind(connection, topic, own) or _refusal(locked)
        logger.info("consumer %r of topic %r enters its next layout after offset %s", consumer, topic, locked[0][1])
        return Settled(True)

    def _behind(self, connection: Connection, topic: str, own: dict[str, str]) -> Settled | None:
        rows = connection.execute(self._on_log.on(connection, "behind", topic), own, prepare=False).fetchall()
        if not rows:
            return None
        return Settled(False, f"{named([partition for partition, _ in rows])} must come to offset {rows[0][1]} first")


def _refusal(locked: Sequence[tuple[int, int | None, bool]]) -> Settled:
    """Why a consumer that has consumed everything up to its bound does not enter the next layout."""
    untils = {until for _, until, _ in locked}
    if len(untils) != 1 or None in untils:
        return NOT_WAITING
    if leased := [partition for partition, _, leased in locked if leased]:
        return Settled(False, f"{named(leased)} must be given back first")
    if untils == {HELD}:
        return HELD_BACK
    return Settled(False, f"the events after offset {untils.pop()} may not be consumed yet")


def layouts(connection: Connection, schema: str, topic: str) -> list[Layout]:
    """`Layouts.of`, on the caller's connection."""
    return [Layout(*row) for row in fetch_all(connection, Queries("layouts", schema)("layouts"), {"topic": topic})]


@dataclass(frozen=True, slots=True)
class LayoutBounds:
    """A partitioned consumer's layout, its number of rows, and the offset up to which it may consume."""

    layout: int
    partitions: int
    until: int | None


def bounds_at(known: Sequence[Layout], offset: int) -> LayoutBounds:
    """The bounds of the layout that has this offset. `known` are the topic's layouts, at least one."""
    at = max(index for index, each in enumerate(known) if each.after <= offset or index == 0)
    rows = max(each.partitions for each in known[at:])
    return LayoutBounds(known[at].number, rows, known[at + 1].after if at + 1 < len(known) else None)


def bounded(known: Sequence[Layout], until: int | None) -> Layout:
    """The layout of a consumer that may consume up to offset `until`; None for a consumer without a bound."""
    return next((each for each in reversed(known) if until is None or each.after < until), known[0])


def move(connection: Connection, schema: str, topic: str, consumer: str, *, offset: int, until: int | None) -> None:
    """Give a partitioned consumer the partitions with which it goes on from `offset`.

    The consumer's rows are locked and stand at `offset`. `until` was their bound before, and shows their layout. A
    consumer that lacks partitions of that layout, as a backfill of a single partition does, gets no others.
    """
    known = layouts(connection, schema, topic)
    if not known:
        return
    at, queries = bounds_at(known, offset), Queries("layouts", schema)
    own = {"topic": topic, "consumer": consumer}
    connection.execute(queries("hold"), {**own, "until": at.until})
    connection.execute(queries("release_beyond"), {**own, "partitions": at.partitions})
    connection.execute(queries("delete_beyond"), {**own, "partitions": at.partitions})
    added = {"partitions": at.partitions, "after": offset, "least": bounded(known, until).partitions}
    connection.execute(queries("add_partitions"), {**own, **added})


def complete(connection: psycopg.Connection[Any], schema: str, topic: str, consumer: str) -> None:
    """Give a partitioned consumer the partitions that it lacks, from their first events on.

    It lacks some if it was registered by the layouts of a former topic of this name. The caller's transaction holds the
    registry.
    """
    lacking = Queries("leftovers", schema)("lacking")
    for name, _, needed in fetch_all(connection, lacking, {"topic": topic, "window": MARK}):
        if name == consumer:
            added = {"topic": topic, "consumer": consumer, "partitions": needed, "after": None, "least": 0}
            connection.execute(Queries("layouts", schema)("add_partitions"), added)


def check_same_layout(known: Sequence[Layout], offset: int, targets: Sequence[int], *, whole: bool) -> None:
    """Make sure that a seek leaves a consumer's partitions in one layout.

    `whole` says that all of them move. Raises `ValidationError` if the `targets` lie in different layouts, or if only
    some partitions move, and leave the layout of `offset`.
    """
    places = {bounds_at(known, target).layout for target in targets}
    if not whole:
        places.add(bounds_at(known, offset).layout)
    if len(places) > 1:
        raise ValidationError(
            "the topic was repartitioned between these offsets: seek all partitions to one offset or time"
        )


def named(partitions: Sequence[int]) -> str:
    """Some partitions in words: at most the first ten."""
    numbers = ", ".join(map(str, partitions[:10])) + (", …" if len(partitions) > 10 else "")
    return f"partition{'s' if len(partitions) > 1 else ''} {numbers}"
