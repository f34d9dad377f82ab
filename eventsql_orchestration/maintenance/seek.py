"""Seeking: moving a consumer to another position in its topic's log, after a plan that shows the effect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sqlalchemy import Connection, text

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.database import Database, Queries, driver_connection
from eventsql_orchestration.database.held_by_handlers import check_not_held
from eventsql_orchestration.errors import ConsumerNotFoundError, DatabaseBusyError, EventSQLError, PartitionLeasedError
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.publishing.transfer import Announce
from eventsql_orchestration.sharding import HELD
from eventsql_orchestration.threads import after_commit
from eventsql_orchestration.topics import layouts
from eventsql_orchestration.topics.catalog import LOCK_SECONDS, choose_partitions, consumer_states, lock_registry
from eventsql_orchestration.topics.offsets import resolve
from eventsql_orchestration.topics.positions import Position
from eventsql_orchestration.topics.reader import Reader
from eventsql_orchestration.topics.registry import Registry

logger = logging.getLogger(__name__)

Choose: TypeAlias = Callable[[Sequence[ConsumerState]], Sequence[ConsumerState]]
"""Takes the locked partitions of a consumer. Returns the partitions to move."""


@dataclass(frozen=True, slots=True)
class Move:
    """The effect of a seek on one consumer partition: its offset goes from `offset` to `target`.

    `again` counts the events between the two that will be consumed again, or for the first time if the consumer began
    after them. `skipped` counts the events that will not be consumed. Both ignore the consumer's filter, and are None
    if the consumer has moved and the database then failed to count. `clamped` says that the requested position is
    outside of the log and `target` is its nearest end. `owner` leases the partition, if anybody does. `shard` is the
    partition's shard, if there are several.
    """

    topic: str
    consumer: str
    partition: int
    offset: int
    target: int
    again: int | None
    skipped: int | None
    clamped: bool
    owner: str | None
    shard: str | None = None


@checked
class Seeker:
    """Moves consumers. A batch that was read at the old offset cannot be committed any more."""

    def __init__(self, database: Database, registry: Registry, *, announce: Announce) -> None:
        """`announce` is called with the topic of a moved consumer."""
        self._database = database
        self._announce = after_commit(announce)
        self._registry = registry
        self._reader = Reader(database, registry)
        self._queries = Queries("seek", database.schema)
        self._deliveries = Queries("deliveries", database.schema)

    def plan(self, topic: str, consumer: str, position: Position, *, partition: int | None = None) -> list[Move]:
        """See `ClusterSeeker.plan`."""
        states = self._registry.consumer(topic, consumer)
        wanted = choose_partitions(states, partition)
        with self._database.core() as connection:
            moves = self._moves(connection, [state for state in states if state.partition in wanted], position)
        return [self._counted(move) for move in moves]

    def execute(
        self, topic: str, consumer: str, position: Position,
        *, partition: int | None = None, force: bool = False, choose: Choose | None = None,
    ) -> list[Move]:  # fmt: skip
        """See `ClusterSeeker.execute`.

        `choose` gets the locked partitions and gives the partitions to move. If it raises, nothing moves.
        """
        wanted = choose_partitions(self._registry.consumer(topic, consumer), partition)
        with self._database.core() as connection:
            before, known = self._lock(connection, topic, consumer, wanted)
            states: Sequence[ConsumerState] = [state for state in before if state.partition in wanted]
            states = states if choose is None else list(choose(states))
            if not states:
                return []
            moves = self._moves(connection, states, position)
            leased = next((move for move in moves if move.owner is not None and not force), None)
            if leased is not None:
                key = ConsumerPartition(topic, consumer, leased.partition)
                raise PartitionLeasedError(f"{key} did not move: {leased.owner} leases it; stop it, or force the seek")
            own = {"topic": topic, "consumer": consumer, "partitions": [move.partition for move in moves]}
            driver = driver_connection(connection)
            driver.execute(self._queries("release_claims"), own)
            driver.execute(self._queries("seek"), {**own, "offsets": [move.target for move in moves]})
            driver.execute(self._deliveries("forget"), own)
            self._settle(connection, before, moves, known)
        self._announce([topic])
        # Count after the transaction: counting takes time, and the past does not change.
        try:
            return [self._counted(move) for move in moves]
        except EventSQLError as error:
            # An error would look as if nothing had moved.
            logger.warning(
                "consumer %r of topic %r moved, over a number of events that is unknown: %s", consumer, topic, error
            )
            return moves

    def _lock(
        self, connection: Connection, topic: str, consumer: str, partitions: Sequence[int]
    ) -> tuple[list[ConsumerState], list[layouts.Layout]]:
        """Keep retention from dropping segments, consumptions from moving offsets, and the layouts from changing.

        Gives the requested partitions, or all of them if the topic was repartitioned, and the topic's layouts.
        """
        connection.execute(text(f"SET LOCAL statement_timeout TO '{LOCK_SECONDS}s'"))
        try:
            with self._database.errors():
                lock_registry(connection)
                # `_settle` needs all partitions of a topic that was repartitioned.
                schema, wide = self._database.schema, NOT_PARTITIONED not in partitions
                known = layouts.layouts(driver_connection(connection), schema, topic) if wide else []
                locked = consumer_states(
                    connection, topic, consumer, partitions=None if known else partitions, lock=True
                )
                own = {"topic": topic, "consumer": consumer, "partitions": [state.partition for state in locked]}
                driver = driver_connection(connection)
                for state in locked:
                    check_not_held(driver, schema, "delivery", topic, consumer, str(state.partition))
                driver.execute(self._deliveries("hold"), own)
        except DatabaseBusyError as error:
            raise DatabaseBusyError(
                f"consumer {consumer!r} of topic {topic!r} did not move, because other transactions held its "
                f"partitions for {LOCK_SECONDS} s: stop its consumption, or try again"
            ) from error
        connection.execute(text("SET LOCAL statement_timeout TO DEFAULT"))
        if not {state.partition for state in locked}.issuperset(partitions):
            raise ConsumerNotFoundError(
                f"consumer {consumer!r} of topic {topic!r} did not move: its partitions were deleted meanwhile"
            )
        return locked, known

    def _moves(self, connection: Connection, states: Sequence[ConsumerState], position: Position) -> list[Move]:
        """The moves, without counts."""
        topic = states[0].topic
        offsets = {state.partition: state.last_event_id for state in states}
        targets = resolve(driver_connection(connection), self._database.schema, topic, position, offsets)
        return [
            Move(
                topic, state.name, state.partition, again=None, skipped=None,
                offset=state.last_event_id, target=targets[state.partition].offset,
                clamped=targets[state.partition].clamped, owner=state.lease_owner if state.leased else None,
            )
            for state in states
        ]  # fmt: skip

    def _settle(
        self, connection: Connection, before: Sequence[ConsumerState], moves: Sequence[Move],
        known: Sequence[layouts.Layout],
    ) -> None:  # fmt: skip
        """Give a consumer the partitions of its new position's layout, if its topic was repartitioned.

        `before` are all of its partitions as they were, locked.
        """
        if not known:
            return
        topic, consumer, driver = before[0].topic, before[0].name, driver_connection(connection)
        targets = [move.target for move in moves]
        whole = {state.partition for state in before} == {move.partition for move in moves}
        until = before[0].until
        if until == HELD:
            # The partition furthest behind says how far the consumer may go when it is released.
            until = layouts.bounds_at(known, min(state.last_event_id for state in before)).until
        layouts.check_same_layout(known, layouts.bounded(known, until).after, targets, whole=whole)
        if whole:
            # Each partition keeps its new offset. An added partition begins at the smallest of them.
            layouts.move(driver, self._database.schema, topic, consumer, offset=min(targets), until=until)

    def _counted(self, move: Move) -> Move:
        after, upto = sorted((move.offset, move.target))
        partition = None if move.partition == NOT_PARTITIONED else move.partition
        between = self._reader.count(move.topic, after=after, upto=upto, partition=partition) if after < upto else 0
        back = move.target < move.offset
        return replace(move, again=between if back else 0, skipped=0 if back else between)
