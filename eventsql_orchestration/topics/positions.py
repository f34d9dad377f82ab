"""Positions in a topic's log where consuming can begin, as values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_AGE
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
    that were published shortly before. If the database's clock went back by some seconds near this time, events may be
    passed over: give a time that is as much earlier. Raises `ValidationError` for a time without a zone.
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
    """A shift of a consumer partition's offset by `events` events, backwards if `events` is negative.

    Every event of the partition counts, whether it matches the consumer's filter or not. Raises `ValidationError` for
    0.
    """

    events: int

    def __post_init__(self) -> None:
        # The smallest bigint has no positive counterpart.
        if not check_whole("the number of events to shift by", self.events, least=1 - 2**63):
            raise ValidationError("a shift by 0 events moves nothing")


Position: TypeAlias = Earliest | Latest | AtOffset | AtTime | Back | ShiftBy

Place: TypeAlias = Earliest | Latest | AtOffset | AtTime | Back
"""A position that does not depend on the present offset."""

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime | Place
"""Where a new consumer begins: a place, or in short "earliest", "latest", an offset or a time."""


def parse_place(text: str) -> Place:
    """The place that a text names: `earliest`, `latest`, an offset, or a time. Raises `ValidationError`."""
    if text == "earliest":
        return Earliest()
    if text == "latest":
        return Latest()
    try:
        found = int(text) if text.isdecimal() else datetime.fromisoformat(text)
    except ValueError:
        given = shown(text)
        raise ValidationError(f"{given} is neither earliest, latest, an offset nor a time with its zone") from None
    return AtOffset(found) if isinstance(found, int) else AtTime(found)


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
