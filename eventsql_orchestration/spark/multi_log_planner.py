"""The logs of a read in every database that it names: one, or all shards of a set."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import (
    DatabaseUnavailableError,
    SchemaOutdatedError,
    ShardSetError,
    ShardUnavailableError,
    ValidationError,
)
from eventsql_orchestration.shards.shard_state import ShardState, ShardStore
from eventsql_orchestration.spark.log_planner import Extent, Lane, Logs
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.shards import ALONE, ReadShard, naming

Log: TypeAlias = tuple[str | None, str]
"""A shard, where there are several databases, and a topic."""


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard that is read, and what it says of itself."""

    database: Database
    shard: ReadShard
    state: ShardState

    @property
    def before(self) -> tuple[int, frozenset[str]]:
        """The generation with which it joined, and the shards that were there already: none if it always was."""
        return self.state.before(self.shard.name) or (0, frozenset())


@dataclass(frozen=True, slots=True)
class Barrier:
    """The log of a shard that joined with a generation, and the logs in which its keys have older events."""

    log: Log
    generation: int
    before: frozenset[Log]


class AllLogs:
    """The logs of each database. Close it, or use it as a context manager."""

    def __init__(self, options: ReadOptions, shards: Collection[str] | None = None) -> None:
        """Of several databases, only the logs of `shards` are asked where these are given.

        Raises `ShardSetError` where they are not the shards of one set, `ShardUnavailableError` where one of those that
        are asked is down, `TopicNotFoundError`, `PartitionOutOfRangeError`, `ValidationError`.
        """
        self._options = options
        self._chosen = shards is not None
        with ExitStack() as opened:
            databases = [_database(each, opened) for each in options.source.each]
            members = _members(databases, shards) if len(databases) > 1 else []
            if members or shards is not None:
                self._logs = [_shard_logs(options, member.database, member.shard) for member in members]
            else:
                self._logs = [Logs(options, databases[0])]
            self._close = opened.pop_all().close
        self._states = [member.state for member in members]
        self._barriers = [
            Barrier((member.shard.name, topic), generation, frozenset((name, topic) for name in before))
            for member in members
            for generation, before in [member.before]
            for topic in options.topics
            if before
        ]

    def __enter__(self) -> AllLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Logs]:
        return iter(self._logs)

    def close(self) -> None:
        self._close()

    @property
    def lanes(self) -> list[Lane]:
        return [lane for logs in self._logs for lane in logs.lanes]

    def of(self, lane: Lane) -> Logs:
        """The logs of the database that a lane is in."""
        return next(logs for logs in self._logs if lane.shard is None or lane.shard == logs.name)

    def marks(self, lane: Lane) -> tuple[str, ...]:
        """Under which names a checkpoint may have a lane's offset; the first is the one that is written.

        What a stream read before its database became a shard is that shard's, which was the only one then.
        """
        mark = self.of(lane).mark
        if lane.shard is None:
            return tuple(dict.fromkeys((mark, ALONE)))
        return (mark, ALONE) if self._states[0].generations[0] == {mark} else (mark,)

    def refresh(self) -> None:
        """Find the partitions that topics have got since.

        Raises `ShardSetError` where a shard was added meanwhile whose URL nobody gave.
        """
        for logs in self._logs:
            logs.refresh()
        if self._states:
            known = max(self._states, key=lambda state: (state.active, state.generation))
            logs = next(logs for logs in self._logs if logs.name == known.name)
            with naming(logs.shard):
                names = ShardStore(logs.database).state().generations[-1]
            if missing := names - {state.name for state in self._states}:
                raise ShardSetError(
                    f"option dsn: shard {', '.join(sorted(missing))} was added, and no URL leads there: start the "
                    "query again with the URLs of all shards"
                )

    def check_bounds(self) -> None:
        """Raises `ValidationError` where shards or partitions have bounds of their own, and one of them has none."""
        names = sorted(set[str]().union(*(state.generations[-1] for state in self._states)))
        for bounds in (self._options.starting, self._options.ending):
            bounds.check_shards(names)
        for logs in self._logs:
            logs.check_bounds()

    def extents(self) -> dict[Log, Extent]:
        """How far each log reaches."""
        return {log: extent for logs in self._logs for log, extent in logs.extents().items()}

    def starts(self, extents: Mapping[Log, Extent]) -> dict[Lane, int]:
        """The first offset to read of each lane of logs that reach so far.

        Raises `ValidationError` for one that is out of range, and for a time since when no shard has an event, unless
        a stream is to begin at the log's end then.
        """
        starts = {lane: self.of(lane).start(lane, extents[lane.log]) for lane in self.lanes}
        if not self._options.start_late and not self._chosen:
            self._check_times({lane for lane in self.lanes if starts[lane] > extents[lane.log].end})
        return starts

    def _check_times(self, at_end: Collection[Lane]) -> None:
        bounds = self._options.starting
        times: dict[tuple[str, int], list[datetime | None]] = {}
        for lane in self.lanes:
            bound = bounds.on(lane.shard).at(lane.topic, lane.partition)
            missed = bound if isinstance(bound, datetime) and lane in at_end else None
            times.setdefault((lane.topic, lane.partition), []).append(missed)
        for (topic, _), missed_on in times.items():
            if missed_on[0] is not None and None not in missed_on:
                raise ValidationError(
                    f"option {bounds.option}: topic {topic!r} has no event since {missed_on[0].isoformat()}; a stream "
                    "with startingOffsetsByTimestampStrategy=latest begins at the log's end instead"
                )

    def held_back(self, starts: Mapping[Lane, int]) -> frozenset[Log]:
        """The logs of shards that joined which a stream has to leave alone for now.

        Their keys have older events on the shards that were there before, up to the fences there. Once what lies before
        `starts` is beyond these, the log is not held back any more.
        """
        for barrier in list(self._barriers):
            if all(self._passed(barrier, lane, starts[lane]) for lane in self.lanes if lane.log in barrier.before):
                self._barriers.remove(barrier)
        return frozenset(barrier.log for barrier in self._barriers)

    def _passed(self, barrier: Barrier, lane: Lane, start: int) -> bool:
        logs = self.of(lane)
        fence = logs.fence(barrier.generation, lane.topic)
        return fence is not None and (start > fence or not logs.waiting(lane, start - 1, fence, 1))


def _database(source: Source, opened: ExitStack) -> Database:
    database = Database(source.dsn, schema=source.schema, migrate=False, application_name="eventsql-spark")
    opened.callback(database.close)
    return database


def _shard_logs(options: ReadOptions, database: Database, shard: ReadShard) -> Logs:
    with naming(shard):
        return Logs(options.on(shard.name), database, shard)


def _members(databases: Sequence[Database], shards: Collection[str] | None) -> list[OpenShard]:
    """The shards of one set that the databases are, or those of `shards`; the oldest first."""
    # Whoever has one database does not load what many need.
    from eventsql_orchestration.shards.bootstrap import compare  # noqa: PLC0415

    states: list[tuple[int, Database, ShardState]] = []
    down: list[tuple[Database, DatabaseUnavailableError]] = []
    for place, database in enumerate(databases):
        try:
            states.append((place, database, ShardStore(database).state()))
        except DatabaseUnavailableError as error:
            down.append((database, error))
    if not states:
        raise down[0][1]
    try:
        compared = compare(
            [(str(database), state) for _, database, state in states], [str(database) for database, _ in down]
        )
    except ShardSetError as error:
        raise ShardSetError(f"option dsn: {error}") from None
    if compared.incomplete:
        raise SchemaOutdatedError(
            "option dsn: these databases are no set of shards yet: run `eventsql migrate` with the URLs of all of them"
        )
    if lost := sorted(compared.missing if shards is None else compared.missing & set(shards)):
        raise ShardUnavailableError(f"shard {', '.join(map(repr, lost))} is down: {down[0][1]}", shard=lost[0])
    members = [OpenShard(database, ReadShard(state.name or "", place), state) for place, database, state in states]
    return sorted(
        (member for member in members if shards is None or member.shard.name in shards),
        key=lambda member: (member.before[0], member.shard.name),
    )
