"""The values of backfills: the range to replay, its plan, its windows, and how far each window is."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from eventsql_orchestration import NOT_PARTITIONED
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_AGE
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Latest, Place
from eventsql_orchestration.topics.side_consumers import MARK
from eventsql_orchestration.validation import advised, check_name, check_whole

DEFAULT_MAX_FAILURES: Final = 10
"""A backfill stops after this number of dead letters. An event that keeps failing takes some 15 s until it becomes a
dead letter, so a function that fails for every event stops its backfill within minutes."""

MAX_RUNS: Final = 1_000
"""Maximum number of runs of a backfill. A run takes seconds to start. Its window has a row for each partition, and
every look at lag reads these rows."""

_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,39}", re.ASCII)
_KEY: Final = re.compile(
    r"(?P<id>[a-z0-9][a-z0-9-]*):(?P<after>\d+)-(?P<upto>\d+)(?::(?P<partition>\d+))?(?:@(?P<shard>[^\s@]+))?", re.ASCII
)


def check_id(backfill_id: str) -> str:
    """Return the id of a backfill. Raises `ValidationError` unless it is 1 to 40 of `a-z`, `0-9` and hyphens."""
    if not _ID.fullmatch(backfill_id):
        raise ValidationError(
            f"backfill id {backfill_id!r} is not usable: use at most 40 lower-case letters, digits and hyphens"
        )
    return backfill_id


def new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%d}-{secrets.token_hex(3)}"


def is_recent(backfill_id: str, now: datetime) -> bool:
    """Whether `new_id` gave this id on the day of `now`, in UTC, or on the day before."""
    return backfill_id[:8] in {f"{now - timedelta(days=days):%Y%m%d}" for days in (0, 1)}


@dataclass(frozen=True, slots=True)
class ReplayRange:
    """The part of a topic to replay, and how it is cut into windows.

    The range includes the events at the offsets `start` and `end`. A time as `end` is exclusive. Windows have
    `window_events` events each, or the events that entered the log in the same `window` of time, counted from 1970 in
    UTC; by default there is one window. `partition` limits the range to one partition.

    Raises `ValidationError` for a range that ends before it begins, and for impossible windows.
    """

    start: Place
    end: Place = field(default_factory=Latest)
    window_events: int | None = None
    window: timedelta | None = None
    partition: int | None = None

    def __post_init__(self) -> None:
        if self.window_events is not None and self.window is not None:
            raise ValidationError("windows are cut by events or by time, not by both")
        if self.window_events is not None:
            check_whole("the events of a window", self.window_events, least=1)
        if self.window is not None and not timedelta(seconds=1) <= self.window <= MAX_AGE:
            raise ValidationError(f"a window lasts from a second to a hundred years, not {self.window}")
        match self.start, self.end:
            case AtOffset(offset=first), AtOffset(offset=last):
                reversed_ = first > last
            case AtTime(time=begin), AtTime(time=finish):
                reversed_ = begin >= finish
            case Back(duration=longer), Back(duration=shorter):
                reversed_ = longer <= shorter
            case _:
                reversed_ = False
        if reversed_:
            raise ValidationError("the range ends before it begins")


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A part of a range: the offsets from `after` (exclusive) to `upto` (inclusive), of all partitions of one log.

    `shard` is the shard of the log, None if there is one database.
    """

    after: int
    upto: int
    shard: str | None = None

    def consumer(self, consumer: str, backfill_id: str, into: str | None) -> str:
        """The name of its side consumer. Raises `InvalidNameError` if that is too long."""
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
        return partition_key(backfill_id, self.window, self.partition)


def partition_key(backfill_id: str, window: Window, partition: int) -> str:
    """`<id>:<after>-<upto>`, `:<partition>` if the consumer is partitioned, `@<shard>` if there are several."""
    of = "" if partition == NOT_PARTITIONED else f":{partition}"
    at = "" if window.shard is None else f"@{window.shard}"
    return f"{backfill_id}:{window.after}-{window.upto}{of}{at}"


def read_key(key: str) -> tuple[str, Window, int]:
    """The id, window and partition of a partition key. Raises `ValidationError`."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValidationError(
            f"{key!r} is not a window of a backfill: write ID:AFTER-UPTO or ID:AFTER-UPTO:PARTITION, then @SHARD "
            "if there are several shards"
        )
    partition = NOT_PARTITIONED if match["partition"] is None else int(match["partition"])
    return match["id"], Window(int(match["after"]), int(match["upto"]), match["shard"]), partition


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The part of a plan on one log: `runs` in order, between the offsets `after` (exclusive) and `upto` (inclusive).

    `partitions` are the partitions of the range, with events or without. `first_event` and `topic_created_at` tell
    whether the log is still the same. The events entered the log from `first_at` to `last_at`.
    """

    shard: str | None
    partitions: tuple[int, ...]
    after: int
    upto: int
    runs: tuple[PlannedRun, ...]
    first_event: int | None
    topic_created_at: datetime | None
    first_at: datetime | None
    last_at: datetime | None
    remarks: tuple[str, ...]

    @property
    def windows(self) -> list[Window]:
        return sorted({run.window for run in self.runs})


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a backfill, log by log: a topic has one log on each shard."""

    topic: str
    consumer: str
    logs: tuple[LogPlan, ...]

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        return tuple(run for log in self.logs for run in log.runs)

    @property
    def events(self) -> int:
        return sum(run.events for run in self.runs)

    @property
    def range(self) -> tuple[int, int] | None:
        """The offsets (after, upto); None over several shards, whose offsets are not comparable."""
        return (self.logs[0].after, self.logs[0].upto) if len(self.logs) == 1 else None

    @property
    def first_at(self) -> datetime | None:
        return min((log.first_at for log in self.logs if log.first_at is not None), default=None)

    @property
    def last_at(self) -> datetime | None:
        return max((log.last_at for log in self.logs if log.last_at is not None), default=None)

    @property
    def remarks(self) -> list[str]:
        """Notes for a person before the backfill runs, such as events that the range does not hold any more."""
        return [f"{log.shard}: {each}" if log.shard else each for log in self.logs for each in log.remarks]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The progress of a window in one partition.

    `owner` leases it now. `failure` is the error of the event that is being retried. `given_up` counts its dead letters
    since the backfill began or was resumed.
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
    given_up: int


@dataclass(frozen=True, slots=True)
class Backfill:
    """A backfill that is registered: the parts that are left of it, on all shards."""

    id: str
    topic: str
    consumer: str
    into: str | None
    created_at: datetime
    parts: tuple[Replayed, ...] = field(repr=False)

    @classmethod
    def merge(cls, found: Sequence[Backfill]) -> Backfill:
        """The backfill of one id from its parts on each shard."""
        parts = tuple(part for each in found for part in each.parts)
        return replace(found[0], created_at=min(each.created_at for each in found), parts=parts)

    def by_shard(self) -> dict[str | None, Backfill]:
        shards = dict.fromkeys(part.window.shard for part in self.parts)
        return {
            shard: replace(self, parts=tuple(part for part in self.parts if part.window.shard == shard))
            for shard in shards
        }

    @property
    def range(self) -> tuple[int, int] | None:
        """The offsets (after, upto); None over several shards, whose offsets are not comparable."""
        if len({part.window.shard for part in self.parts}) > 1:
            return None
        return min(part.window.after for part in self.parts), max(part.window.upto for part in self.parts)

    @property
    def done(self) -> bool:
        return all(part.done for part in self.parts)

    @property
    def given_up(self) -> int:
        """How many events became dead letters since it began or was resumed."""
        return sum(part.given_up for part in self.parts)

    @property
    def names(self) -> list[str]:
        """The side consumers of its windows."""
        return sorted({part.name for part in self.parts})

    def part(self, window: Window, partition: int) -> Replayed | None:
        """One partition of one of its windows; None if it has no such window."""
        return next((each for each in self.parts if (each.window, each.partition) == (window, partition)), None)


def resume_command(topic: str, consumer: str, backfill_id: str, options: str = "") -> str:
    return advised(f"backfill --resume {backfill_id} --execute{options}", topic, consumer)


def letters_command(topic: str, backfill_id: str) -> str:
    return f"eventsql dlt list {topic} --backfill {backfill_id}"
