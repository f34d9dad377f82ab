"""Windows: what a backfill consists of, what it is called, and how far it is."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from eventsql_orchestration import NOT_PARTITIONED
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.log.positions import AtOffset, AtTime, Back, Place
from eventsql_orchestration.log.side_consumers import MARK
from eventsql_orchestration.model import MAX_AGE
from eventsql_orchestration.rules import check_name, check_whole

DEFAULT_MAX_FAILURES: Final = 10
"""An event that keeps failing takes some 15 s until it is given up: a function that fails for every event is noticed
within minutes."""

MAX_RUNS: Final = 1_000
"""A run takes seconds to start; and its window is a row for each partition, which every look at lag reads."""

_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,39}", re.ASCII)
_KEY: Final = re.compile(
    r"(?P<id>[a-z0-9][a-z0-9-]*):(?P<after>\d+)-(?P<upto>\d+)(?::(?P<partition>\d+))?(?:@(?P<shard>[^\s@]+))?",
    re.ASCII,
)


def check_id(backfill_id: str) -> str:
    """Return the id of a backfill, or raise `ValidationError`: lower-case letters, digits and hyphens, 40 at most."""
    if not _ID.fullmatch(backfill_id):
        raise ValidationError(
            f"backfill id {backfill_id!r} is not usable: take at most 40 lower-case letters, digits and hyphens"
        )
    return backfill_id


def new_id() -> str:
    """An id that no other backfill has."""
    return f"{datetime.now(UTC):%Y%m%d}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A part of a backfill's range: the offsets after `after` up to and with `upto`, of all partitions.

    Offsets are those of `shard`, where there are several.
    """

    after: int
    upto: int
    shard: str | None = None

    def consumer(self, consumer: str, backfill_id: str, into: str | None) -> str:
        """The name of its side consumer. Raises `InvalidNameError` where that would be too long."""
        kept = "" if into is None else f"__into_{into}"
        name = f"{consumer}{MARK}{backfill_id}_{self.after}_{self.upto}{kept}"
        return check_name("the name of a backfill's side consumer", name)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A window of one partition, as one run replays it."""

    window: Window
    partition: int
    events: int

    def key(self, backfill_id: str) -> str:
        """The partition key of the run in Dagster."""
        return partition_key(backfill_id, self.window, self.partition)


def partition_key(backfill_id: str, window: Window, partition: int) -> str:
    """`<id>:<after>-<upto>`, `:<partition>` where the consumer is partitioned, `@<shard>` where there are several."""
    of = "" if partition == NOT_PARTITIONED else f":{partition}"
    at = "" if window.shard is None else f"@{window.shard}"
    return f"{backfill_id}:{window.after}-{window.upto}{of}{at}"


def read_key(key: str) -> tuple[str, Window, int]:
    """The id, window and partition of a partition key. Raises `ValidationError`."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValidationError(
            f"{key!r} is no window of a backfill: it would be ID:AFTER-UPTO or ID:AFTER-UPTO:PARTITION, and @SHARD "
            "where there are several"
        )
    partition = NOT_PARTITIONED if match["partition"] is None else int(match["partition"])
    return match["id"], Window(int(match["after"]), int(match["upto"]), match["shard"]), partition


@dataclass(frozen=True, slots=True)
class Plan:
    """What a backfill would replay: `runs` in order, their events by the time at which they entered the log.

    `partitions` are those that are meant, with events in the range or without; `first_event` and `topic_created_at`
    tell whether the log is still the same. `remarks` say what the range does not hold, or what else a person should
    know before it runs.
    """

    topic: str
    consumer: str
    partitions: tuple[int, ...]
    after: int
    upto: int
    windows: tuple[Window, ...]
    runs: tuple[PlannedRun, ...]
    first_event: int | None
    topic_created_at: datetime | None
    first_at: datetime | None
    last_at: datetime | None
    remarks: tuple[str, ...]

    @property
    def events(self) -> int:
        return sum(run.events for run in self.runs)


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far a window is in one partition.

    `owner` leases it now. `failure` is of the event that it is retrying. `given_up` counts its dead letters since the
    backfill was begun or resumed.
    """

    window: Window
    partition: int
    name: str
    offset: int
    consumed: int
    done: bool
    paused: bool
    owner: str | None
    lease_ends_at: datetime | None
    failed_event: int | None
    spent: bool
    failure: str | None
    retry_in: float
    given_up: int = 0


@dataclass(frozen=True, slots=True)
class Backfill:
    """A backfill that is registered."""

    id: str
    topic: str
    consumer: str
    into: str | None
    created_at: datetime
    parts: tuple[Replayed, ...] = field(repr=False)

    @property
    def range(self) -> Window:
        """From the first window's beginning to the last one's end."""
        return Window(min(part.window.after for part in self.parts), max(part.window.upto for part in self.parts))

    @property
    def done(self) -> bool:
        return all(part.done for part in self.parts)

    @property
    def given_up(self) -> int:
        """How many events became dead letters since it was begun or resumed."""
        return sum(part.given_up for part in self.parts)

    @property
    def names(self) -> list[str]:
        """The side consumers of its windows."""
        return sorted({part.name for part in self.parts})

    def part(self, window: Window, partition: int) -> Replayed | None:
        """One partition of one of its windows; None where it has no such."""
        return next((each for each in self.parts if (each.window, each.partition) == (window, partition)), None)


def resume_command(topic: str, consumer: str, backfill_id: str) -> str:
    """What runs the rest of a backfill."""
    return f"eventsql backfill {topic} {consumer} --resume {backfill_id} --execute"


def letters_command(topic: str, backfill_id: str) -> str:
    """What lists the events that a backfill gave up."""
    return f"eventsql dlt list {topic} --backfill {backfill_id}"


def check_cut(window_events: int | None, window: timedelta | None) -> None:
    """Refuse windows that cannot be. Raises `ValidationError`."""
    if window_events is not None and window is not None:
        raise ValidationError("windows are cut by events or by time, not by both")
    if window_events is not None:
        check_whole("the events of a window", window_events, least=1)
    if window is not None and not timedelta(seconds=1) <= window <= MAX_AGE:
        raise ValidationError(f"a window lasts a second at least and a hundred years at most, not {window}")


def check_order(start: Place, end: Place) -> None:
    """Refuse a range that is the wrong way round whatever the log holds. Raises `ValidationError`.

    It ends with the event at an offset, and before the first that was logged at a time.
    """
    match start, end:
        case AtOffset(offset=first), AtOffset(offset=last):
            wrong = first > last
        case AtTime(time=begin), AtTime(time=finish):
            wrong = begin >= finish
        case Back(duration=longer), Back(duration=shorter):
            wrong = longer <= shorter
        case _:
            wrong = False
    if wrong:
        raise ValidationError("the range ends before it begins")
