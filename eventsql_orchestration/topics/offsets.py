"""Positions in a topic's log where consuming can begin, and their offsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Literal, TypeAlias

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_AGE
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.validation import check_time, check_whole, shown


@dataclass(frozen=True, slots=True)
class Earliest:
    """The oldest event that the log holds."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Events that enter the log from now on, including events that are in the buffer now."""


@dataclass(frozen=True, slots=True)
class AtOffset:
    """The first event whose id is `offset` or larger. Raises `ValidationError` for a negative offset."""

    offset: int

    def __post_init__(self) -> None:
        check_whole("an offset", self.offset, least=0)


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first event that entered the log at `time` or later.

    Events that were published at that time or later come after it, because they entered the log later. So may events
    that were published shortly before. Raises `ValidationError` for a time without a zone.
    """

    time: datetime

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", check_time("a position's time", self.time))


@dataclass(frozen=True, slots=True)
class Back:
    """`AtTime` for the time `duration` before now, by the database's clock.

    Raises `ValidationError` for a duration that is not positive, or above a hundred years.
    """

    duration: timedelta

    def __post_init__(self) -> None:
        duration: object = self.duration
        if not isinstance(duration, timedelta) or not timedelta() < duration <= MAX_AGE:
            raise ValidationError(f"a duration must be above 0 and at most a hundred years, not {shown(duration)}")


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """So many events of the partition after the offset, or before it where `events` is negative.

    Every event of the partition counts, whether it matches the consumer's filter or not. Raises `ValidationError` for
    0.
    """

    events: int

    def __post_init__(self) -> None:
        if not check_whole("the number of events to shift by", self.events):
            raise ValidationError("a shift by 0 events moves nothing")


Position: TypeAlias = Earliest | Latest | AtOffset | AtTime | Back | ShiftBy

Place: TypeAlias = Earliest | Latest | AtOffset | AtTime | Back
"""A position that is the same wherever one stands."""

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime | Place
"""Where a new consumer begins: a place, or in short "earliest", "latest", an offset or a time."""


def starting_at(start: Start) -> Place:
    """The position of a start. Raises `ValidationError`, also for `ShiftBy`: there is nothing to count from yet."""
    match start:
        case Earliest() | Latest() | AtOffset() | AtTime() | Back():
            return start
        case "earliest":
            return Earliest()
        case "latest":
            return Latest()
        case int() if not isinstance(start, bool):
            return AtOffset(check_whole("start", start, least=0))
        case datetime():
            return AtTime(check_time("start", start))
    raise ValidationError(
        "start must be 'earliest', 'latest', an offset, a time with its zone, or one of Earliest(), Latest(), "
        f"AtOffset(…), AtTime(…) and Back(…), not {shown(start)}"
    )


@dataclass(frozen=True, slots=True)
class Target:
    """An offset to store: that of the last event which counts as consumed.

    `clamped` says that the position lies outside of the log, and this is the end of the log that is nearest to it.
    """

    offset: int
    clamped: bool = False


def resolve(
    connection: Connection, schema: str, topic: str, position: Position, offsets: Mapping[int, int]
) -> dict[int, Target]:
    """The offsets that `position` stands for in the partitions of `offsets`, which maps each to where it is now.

    Takes one or two statements, and one more for each partition that is shifted; all go by the indexes on ids. Except
    for a shift, the offset is the same in every partition: ids grow over the whole topic.
    """
    given: object = position
    if not isinstance(given, Position):
        raise ValidationError(f"a position is needed, such as Earliest() or AtOffset(7), not {given!r}")
    look = _Look(connection, schema, topic)
    if isinstance(position, ShiftBy):
        return {partition: look.shifted(partition, offset, position.events) for partition, offset in offsets.items()}
    return dict.fromkeys(offsets, look.target(position))


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
        """From an offset over so many events of a partition, to an end of the log where there are fewer."""
        before, end = self.extent
        if events > 0:
            at = self._log.nth(self._connection, self._topic, events, partition=partition, after=offset)
        else:
            at = self._log.nth_before(self._connection, self._topic, -events, partition=partition, offset=offset)
        if at is None:
            return Target(max(offset, end) if events > 0 else min(offset, before), clamped=True)
        return Target(at if events > 0 else at - 1)
