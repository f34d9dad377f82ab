"""The logs of a read in every database that it names: one, or all shards of a set."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing
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
from eventsql_orchestration.spark.log_planner import Extent, Logs, TopicPartition
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.shards import ALONE, ReadShard, naming

Log: TypeAlias = tuple[str | None, str]
"""A topic on a shard; the shard is None for one database."""


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard that is read, and its state."""

    database: Database
    shard: ReadShard
    state: ShardState

    @property
    def joined(self) -> tuple[int, frozenset[str]]:
        """The generation with which it joined, and the shards before that; 0 and none for a first shard."""
        return self.state.before(self.shard.name) or (0, frozenset())


@dataclass(frozen=True, slots=True)
class Barrier:
    """The log of a shard that joined with a generation, and the logs that have older events of its keys."""

    log: Log
    generation: int
    before: frozenset[Log]


class AllLogs:
    """The logs of each database. Close it, or use it as a context manager."""

    def __init__(self, options: ReadOptions, shards: Collection[str] | None = None) -> None:
        """`shards` are the shards to read, None for all.

        Raises `ShardSetError` if the databases are not the shards of one set, `ShardUnavailableError` if a shard to
        read is down, `TopicNotFoundError`, `PartitionOutOfRangeError`, `ValidationError`.
        """
        self._options = options
        self._chosen = shards is not None
        with ExitStack() as opened:
            databases = [opened.enter_context(closing(_database(options, url))) for url in options.source.urls]
            members = _members(databases, shards) if len(databases) > 1 else []
            if members or self._chosen:
                self._logs = [_shard_logs(options, member) for member in members]
            else:
                self._logs = [Logs(options, databases[0])]
            self._opened = opened.pop_all()
        self._states = [member.state for member in members]
        self._barriers = [
            Barrier((member.shard.name, topic), generation, frozenset((name, topic) for name in before))
            for member in members
            for generation, before in [member.joined]
            for topic in options.topics
        ]

    def __enter__(self) -> AllLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Logs]:
        return iter(self._logs)

    def close(self) -> None:
        self._opened.close()

    @property
    def topic_partitions(self) -> list[TopicPartition]:
        return [tp for logs in self._logs for tp in logs.topic_partitions]

    def of(self, tp: TopicPartition) -> Logs:
        """The logs of the database that holds a topic partition."""
        return next(logs for logs in self._logs if tp.shard is None or tp.shard == logs.name)

    def marks(self, tp: TopicPartition) -> tuple[str, ...]:
        """The names under which a checkpoint may have an offset; the first is the name that is written.

        If the database became a shard after the stream began, the offset belongs to the set's first shard.
        """
        mark = self.of(tp).mark
        if tp.shard is None:
            return tuple(dict.fromkeys((mark, ALONE)))
        return (mark, ALONE) if self._states[0].generations[0] == {mark} else (mark,)

    def refresh(self) -> None:
        """Look at the topics again, as `Logs.refresh`. Raises `ShardSetError` if a shard was added whose URL is not
        given.
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
                    f"option dsn: shard {', '.join(sorted(missing))} was added, which no URL names: start the query "
                    "again with the URLs of all shards"
                )

    def check_bounds(self) -> None:
        """Raise `ValidationError` if some shards or partitions have bounds of their own and others have none."""
        # A filter may have chosen no shard, and then nobody knows their names.
        names = sorted(set[str]().union(*(state.generations[-1] for state in self._states)))
        for bounds in (self._options.starting, self._options.ending) if names else ():
            bounds.check_shards(names)
        for logs in self._logs:
            logs.check_bounds()

    def extents(self) -> dict[Log, Extent]:
        """The bounds of each log."""
        return {log: extent for logs in self._logs for log, extent in logs.extents().items()}

    def starts(self, extents: Mapping[Log, Extent]) -> dict[TopicPartition, int]:
        """The first offset to read of each topic partition.

        Raises `ValidationError` for an offset that is out of range, and for a time after the events of all shards,
        unless a stream should then begin at the log's end.
        """
        starts = {tp: self.of(tp).start(tp, extents[tp.log]) for tp in self.topic_partitions}
        if not self._options.start_late and not self._chosen:
            self._check_times({tp for tp, start in starts.items() if start > extents[tp.log].end})
        return starts

    def _check_times(self, at_end: Collection[TopicPartition]) -> None:
        bounds = self._options.starting
        times: dict[tuple[str, int], list[datetime | None]] = {}
        for tp in self.topic_partitions:
            bound = bounds.on(tp.shard).at(tp.topic, tp.partition)
            missed = bound if isinstance(bound, datetime) and tp in at_end else None
            times.setdefault((tp.topic, tp.partition), []).append(missed)
        for (topic, _), missed_on in times.items():
            if missed_on[0] is not None and None not in missed_on:
                raise ValidationError(
                    f"option {bounds.option}: topic {topic!r} has no event since {missed_on[0].isoformat()}; a stream "
                    "with startingOffsetsByTimestampStrategy=latest begins at the log's end instead"
                )

    def held_back(self, starts: Mapping[TopicPartition, int]) -> frozenset[Log]:
        """The logs of joined shards that a stream must not read yet.

        Their keys have older events on the earlier shards, up to the fences there. After a stream has read the events
        up to all of these fences, the log is not held back any more.
        """
        self._barriers = [
            barrier
            for barrier in self._barriers
            if not all(self._passed(barrier, tp, start) for tp, start in starts.items() if tp.log in barrier.before)
        ]
        return frozenset(barrier.log for barrier in self._barriers)

    def _passed(self, barrier: Barrier, tp: TopicPartition, start: int) -> bool:
        logs = self.of(tp)
        fence = logs.fence(barrier.generation, tp.topic)
        return fence is not None and (start > fence or not logs.waiting(tp, start - 1, fence, 1))


def _database(options: ReadOptions, url: str) -> Database:
    return Database(url, schema=options.source.schema, migrate=False, application_name="eventsql-spark")


def _shard_logs(options: ReadOptions, member: OpenShard) -> Logs:
    with naming(member.shard):
        return Logs(options.on(member.shard.name), member.database, member.shard)


def _members(databases: Collection[Database], shards: Collection[str] | None) -> list[OpenShard]:
    """The shards to read, the oldest first."""
    # A read of one database does not load this.
    from eventsql_orchestration.shards.bootstrap import compare  # noqa: PLC0415

    states: list[tuple[int, Database, ShardState]] = []
    down: list[tuple[str, DatabaseUnavailableError]] = []
    for place, database in enumerate(databases):
        try:
            states.append((place, database, ShardStore(database).state()))
        except DatabaseUnavailableError as error:
            down.append((str(database), error))
    if not states:
        raise down[0][1]
    try:
        compared = compare([(str(database), state) for _, database, state in states], [name for name, _ in down])
    except ShardSetError as error:
        raise ShardSetError(f"option dsn: {error}") from None
    if compared.incomplete:
        raise SchemaOutdatedError(
            "option dsn: these databases are not a set of shards yet: run `eventsql migrate` with the URLs of all of "
            "them"
        )
    if lost := sorted(compared.missing if shards is None else compared.missing & set(shards)):
        raise ShardUnavailableError(f"shard {', '.join(map(repr, lost))} is down: {down[0][1]}", shard=lost[0])
    members = [OpenShard(database, ReadShard(state.name or "", place), state) for place, database, state in states]
    return sorted(
        (member for member in members if shards is None or member.shard.name in shards),
        key=lambda member: (member.joined[0], member.shard.name),
    )
