"""The offsets that positions in a topic's log stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest, Place, Position, ShiftBy


@dataclass(frozen=True, slots=True)
class Target:
    """An offset to store: the offset of the last event that counts as consumed.

    `clamped` says that the position lies outside of the log, and that `offset` is the nearest end of the log.
    """

    offset: int
    clamped: bool = False


def resolve(
    connection: Connection, schema: str, topic: str, position: Position, offsets: Mapping[int, int]
) -> dict[int, Target]:
    """The offsets that `position` stands for in the partitions of `offsets`, which maps each to its present offset.

    Takes one or two statements, and one more for each partition that is shifted; all use the indexes on ids. Except for
    a shift, the offset is the same in every partition: ids grow over the whole topic.
    """
    given: object = position
    if not isinstance(given, Position):
        raise ValidationError(f"a position is needed, such as Earliest() or AtOffset(7), not {given!r}")
    look = _Look(connection, schema, topic)
    if isinstance(position, ShiftBy):
        return {partition: look.shifted(partition, offset, position.events) for partition, offset in offsets.items()}
    return dict.fromkeys(offsets, look.target(position))


def offset_of(connection: Connection, schema: str, topic: str, position: Position) -> int:
    """The offset that `position` stands for in a topic, for a consumer that has consumed nothing."""
    return resolve(connection, schema, topic, position, {NOT_PARTITIONED: 0})[NOT_PARTITIONED].offset


class _Look:
    """The statements of `resolve`, on a connection that may be a caller's."""

    def __init__(self, connection: Connection, schema: str, topic: str) -> None:
        self._connection = connection
        self._queries = Queries("seek", schema)
        self._log = LogReader(schema)
        self._topic = topic

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The offset from which everything is consumed, and the id of the newest event; both 0 for an empty log."""
        first, end = self._log.bounds(self._connection, self._topic)
        return first - 1, end

    def target(self, position: Place) -> Target:
        match position:
            case Earliest():
                return Target(self.extent[0])
            case Latest():
                return Target(self.extent[1])
            case AtOffset(offset=offset):
                (before, end), asked = self.extent, max(0, offset - 1)
                nearest = min(max(asked, before), end)
                return Target(nearest, clamped=nearest != asked)
            case AtTime(time=time):
                return Target(self._log.before_time(self._connection, self._topic, time))
            case Back(duration=duration):
                (now,) = fetch_one(self._connection, self._queries("now"), prepare=False)
                return Target(self._log.before_time(self._connection, self._topic, now - duration))

    def shifted(self, partition: int, offset: int, events: int) -> Target:
        """The offset that lies `events` events of a partition away; the end of the log if there are fewer."""
        before, end = self.extent
        if events > 0:
            at = self._log.nth(self._connection, self._topic, events, partition=partition, after=offset)
        else:
            at = self._log.nth_before(self._connection, self._topic, -events, partition=partition, offset=offset)
        if at is None:
            return Target(max(offset, end) if events > 0 else min(offset, before), clamped=True)
        return Target(at if events > 0 else at - 1)
