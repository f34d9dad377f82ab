"""Seeking: moving a consumer to another place in its topic's log, after a plan that says what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, func, select, text

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database, Queries, driver_connection
from eventsql_orchestration.errors import ConsumerNotFoundError, DatabaseBusyError, PartitionLeasedError
from eventsql_orchestration.log import layouts
from eventsql_orchestration.log.consumption import ConsumerPartition
from eventsql_orchestration.log.positions import Position, resolve
from eventsql_orchestration.log.reader import Reader
from eventsql_orchestration.log.registry import (
    LOCK_SECONDS,
    Registry,
    choose_partitions,
    consumer_states,
    lock_registry,
)
from eventsql_orchestration.model import NOT_PARTITIONED, ConsumerState
from eventsql_orchestration.sharding import HELD


@dataclass(frozen=True, slots=True)
class Move:
    """What a seek does to one consumer partition: its offset goes from `offset` to `target`.

    `again` are the events between the two that are to be consumed again, or for the first time where the consumer began
    after them; `skipped` are those that never will be. Whether they match the consumer's filter is not looked at.
    `clamped` says that the place which was asked for lies outside of the log, and `target` is the end that is nearest.
    `owner` is who leases the partition, if anybody does. `shard` is where it is, of several.
    """

    topic: str
    consumer: str
    partition: int
    offset: int
    target: int
    again: int
    skipped: int
    clamped: bool
    owner: str | None
    shard: str | None = None


@checked
class Seeker:
    """Moves consumers. Who consumes by the old offset meanwhile commits nothing any more."""

    def __init__(
        self, database: Database, registry: Registry, *, announce: Callable[[Iterable[str]], None] | None = None
    ) -> None:
        """`announce` is told the topic of a consumer that was moved."""
        self._database = database
        self._announce = announce or (lambda _topics: None)
        self._registry = registry
        self._reader = Reader(database, registry)
        self._queries = Queries("seek", database.schema)

    def plan(self, topic: str, consumer: str, position: Position, *, partition: int | None = None) -> list[Move]:
        """What a seek of a consumer to `position` would do now, in one partition or in all; nothing is changed.

        Raises `TopicNotFoundError`, `ConsumerNotFoundError`, `PartitionOutOfRangeError`.
        """
        states = self._registry.consumer(topic, consumer)
        wanted = choose_partitions(states, partition)
        with self._database.core() as connection:
            moves = self._moves(connection, [state for state in states if state.partition in wanted], position)
        return [self._counted(move) for move in moves]

    def execute(
        self,
        topic: str,
        consumer: str,
        position: Position,
        *,
        partition: int | None = None,
        force: bool = False,
        choose: Callable[[Sequence[ConsumerState]], Sequence[ConsumerState]] | None = None,
    ) -> list[Move]:
        """Move a consumer to `position`, in one partition or in all of them at once; gives what was done.

        `choose` is given the partitions as they stand when nobody can move them any more, and gives those to be moved;
        what it raises leaves all where they are.

        Consumptions go on from there, whether they are running or started later: nothing else is needed. What is known
        of a failing event is forgotten, and a claim that is not committed is released. The counts of consumed events
        stay: they count handlings.

        Waits at most 10 seconds for batches under way, else `DatabaseBusyError`. Raises `PartitionLeasedError` while
        somebody leases a partition, unless `force` is set: then that owner is fenced off and commits nothing more.
        Raises as `plan` otherwise. When it raises, no partition has moved.
        """
        wanted = choose_partitions(self._registry.consumer(topic, consumer), partition)
        with self._database.core() as connection:
            before, known = self._lock(connection, topic, consumer, wanted)
            states: Sequence[ConsumerState] = [state for state in before if state.partition in wanted]
            states = states if choose is None else list(choose(states))
            if not states:
                return []
            moves = self._moves(connection, states, position)
            if not force:
                _refuse_leased(moves)
            own = {"topic": topic, "consumer": consumer, "partitions": [move.partition for move in moves]}
            driver = driver_connection(connection)
            driver.execute(self._queries("release_claims"), own)
            driver.execute(self._queries("seek"), {**own, "offsets": [move.target for move in moves]})
            self._settle(connection, before, moves, known)
        self._announce([topic])
        # Counting takes its time, and the past does not change.
        return [self._counted(move) for move in moves]

    def _lock(
        self, connection: Connection, topic: str, consumer: str, partitions: Sequence[int]
    ) -> tuple[list[ConsumerState], list[layouts.Layout]]:
        """Keep retention from dropping what is looked at, and consumptions from moving the offsets.

        Gives the partitions that are asked for, or all of them where the topic was repartitioned, and its layouts,
        which nobody changes meanwhile either.
        """
        connection.execute(text(f"SET LOCAL statement_timeout TO '{LOCK_SECONDS}s'"))
        try:
            with self._database.errors():
                lock_registry(connection)
                # Of a topic that was repartitioned, all: `_settle` has to do with them.
                schema, wide = self._database.schema, NOT_PARTITIONED not in partitions
                known = layouts.layouts(driver_connection(connection), schema, topic) if wide else []
                locked = consumer_states(
                    connection, topic, consumer, partitions=None if known else partitions, lock=True
                )
        except DatabaseBusyError as error:
            raise DatabaseBusyError(
                f"consumer {consumer!r} of topic {topic!r} did not move: for {LOCK_SECONDS} s a batch under way, or a "
                "change of the registry, kept its partitions; stop the consumption, or try again"
            ) from error
        connection.execute(text("SET LOCAL statement_timeout TO DEFAULT"))
        if not {state.partition for state in locked}.issuperset(partitions):
            raise ConsumerNotFoundError(
                f"consumer {consumer!r} of topic {topic!r} did not move: its partitions were deleted meanwhile"
            )
        return locked, known

    def _moves(self, connection: Connection, states: Sequence[ConsumerState], position: Position) -> list[Move]:
        """The moves, with nothing counted yet."""
        topic, now = states[0].topic, connection.execute(select(func.clock_timestamp())).scalar_one()
        offsets = {state.partition: state.last_event_id for state in states}
        targets = resolve(driver_connection(connection), self._database.schema, topic, position, offsets)
        return [
            Move(
                topic, state.name, state.partition,
                offset=state.last_event_id,
                target=targets[state.partition].offset,
                again=0,
                skipped=0,
                clamped=targets[state.partition].clamped,
                owner=state.lease_owner if state.leased(now) else None,
            )
            for state in states
        ]  # fmt: skip

    def _settle(
        self,
        connection: Connection,
        before: Sequence[ConsumerState],
        moves: Sequence[Move],
        known: Sequence[layouts.Layout],
    ) -> None:
        """Give a consumer the partitions of the place that it has gone to, where those of its topic have changed.

        `before` are all of its partitions, which are locked, as they were.
        """
        topic, consumer, driver = before[0].topic, before[0].name, driver_connection(connection)
        if not known:
            return
        targets = [move.target for move in moves]
        whole = {state.partition for state in before} == {move.partition for move in moves}
        until = before[0].until
        if until == HELD:
            # How far it may consume when it is let go: as the one that is behind all others.
            until = layouts.place(known, min(state.last_event_id for state in before)).until
        layouts.check_same_layout(known, layouts.bounded(known, until).after, targets, whole=whole)
        if whole:
            # Each keeps the offset that it has got; a partition that is new begins with the first of them.
            layouts.move(driver, self._database.schema, topic, consumer, offset=min(targets), until=until)

    def _counted(self, move: Move) -> Move:
        after, upto = sorted((move.offset, move.target))
        partition = None if move.partition == NOT_PARTITIONED else move.partition
        between = self._reader.count(move.topic, after=after, upto=upto, partition=partition) if after < upto else 0
        back = move.target < move.offset
        return replace(move, again=between if back else 0, skipped=0 if back else between)


def _refuse_leased(moves: Sequence[Move]) -> None:
    for move in moves:
        if move.owner is not None:
            key = ConsumerPartition(move.topic, move.consumer, move.partition)
            raise PartitionLeasedError(
                f"{key} did not move: {move.owner} leases it; stop that one first, or force the seek to fence it off"
            )
