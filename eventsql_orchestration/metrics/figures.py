"""The figures of one database: its topics, consumers, claims, subscriptions and queues, read in one transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from psycopg.rows import TupleRow

from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.lag import LagCause, cause_of
from eventsql_orchestration.database import Connection, Database, Queries, driver_connection
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, RestoredStoreError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, NOT_PARTITIONED, Retention, Topic
from eventsql_orchestration.queue.lag import QueueLag, QueueLagReader
from eventsql_orchestration.storage.metrics import COUNTED, LogFigures, LogMetrics, Place, Waiting
from eventsql_orchestration.store.lag import SubscriptionLag, SubscriptionLagReader
from eventsql_orchestration.topics.catalog import all_topics, consumer_states
from eventsql_orchestration.topics.side_consumers import backfill_of

Buffered: TypeAlias = Mapping[int, tuple[int, float]]
"""The number of a topic's events in the buffer, and seconds since the oldest came, by partition."""


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """A topic: `transferred` is the newest offset of its log, and `published` counts the buffered events too.

    `identity` changes if the topic is deleted and created again. `oldest_seconds` is the age of the oldest event in the
    log, None if the log is empty. `open_letters` is None for a topic without a dead letter topic; more than `COUNTED`
    letters are not counted.
    """

    topic: str
    identity: int
    partitions: int
    transferred: int
    published: int
    buffered: int
    buffered_seconds: float
    oldest_seconds: float | None
    bytes: int
    retention: Retention | None
    open_letters: int | None


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """A consumer partition: how far it is behind in events and seconds, why, and what it has handled.

    `detail` is a sentence about the cause.

    From `COUNTED` waiting rows or blocks on, `events` is an estimate by the density of the partition's next events.
    """

    topic: str
    consumer: str
    partition: int
    events: int
    seconds: float
    cause: LagCause
    detail: str
    consumed: int
    given_up: int


@dataclass(frozen=True, slots=True)
class ClaimFigures:
    """The live claims of a consumer, how many of them have no valid lease, and the age of the oldest."""

    topic: str
    consumer: str
    live: int
    expired: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that one reading found. Side consumers of backfills are left out."""

    topics: tuple[TopicFigures, ...]
    partitions: tuple[PartitionFigures, ...]
    claims: tuple[ClaimFigures, ...]
    subscriptions: tuple[SubscriptionLag, ...]
    queues: tuple[QueueLag, ...]


class FiguresReader:
    """Reads the figures of one database.

    A reading has eleven statements, three or four more with subscriptions, and two to four for each topic.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("metrics", database.schema)
        self._log_queries = Queries("log", database.schema)
        self._logs = LogMetrics(database.schema)
        self._subscriptions = SubscriptionLagReader(database)
        self._queues = QueueLagReader(database)

    def read(self) -> Figures:
        """The figures of now. A role that may read some topics gets the figures of these. Raises database errors."""
        try:
            return self._read()
        except DatabaseUnavailableError:
            raise
        except EventSQLError:
            # A topic may have been deleted meanwhile.
            return self._read()

    def _read(self) -> Figures:
        # In one snapshot, an event is either in the buffer or in the log.
        with self._database.core(one_snapshot=True) as core:
            topics = {topic.name: topic for topic in all_topics(core)}
            states = [state for state in consumer_states(core, None) if backfill_of(state.name) is None]
            connection = driver_connection(core)
            given_up = {(topic, name, part): number for topic, name, part, number in self._rows(connection, "given_up")}
            claims = self._rows(connection, "claims")
            buffered = self._buffered(connection, list(topics))
            readable = self._logs.readable(connection, list(topics))
            logs = {name: self._logs.log(connection, name) for name in readable}
            places: dict[str, set[Place]] = defaultdict(set)
            for state in states:
                places[state.topic].add((state.partition, state.last_event_id))
            waiting = {name: self._waiting(connection, name, places[name]) for name in readable if name in places}
            letters = {
                name: self._logs.open_letters(connection, name + DEAD_LETTER_SUFFIX)
                for name in readable
                if name + DEAD_LETTER_SUFFIX in logs
            }
            subscriptions = self._subscription_lags(connection)
            queues = self._queues.read(connection) if self._queues.is_allowed(connection) else []

        return Figures(
            tuple(_topic(topics[name], logs[name], buffered[name], letters.get(name)) for name in readable),
            tuple(
                _partition(
                    state, logs[state.topic], waiting[state.topic][state.partition, state.last_event_id],
                    buffered[state.topic], given_up[state.topic, state.name, state.partition],
                )
                for state in states
                if state.topic in logs
            ),
            tuple(ClaimFigures(*row) for row in claims if row[0] in logs and backfill_of(row[1]) is None),
            tuple(subscriptions),
            tuple(queues),
        )  # fmt: skip

    def _waiting(self, connection: Connection, topic: str, places: set[Place]) -> dict[Place, Waiting]:
        ends = self._logs.ends(connection, topic, {partition for partition, _ in places})
        return self._logs.waiting(connection, topic, places, ends)

    def _subscription_lags(self, connection: Connection) -> list[SubscriptionLag]:
        """The lag of the event store's subscriptions; none if the role may not read them."""
        if not self._subscriptions.is_allowed(connection):
            return []
        try:
            return self._subscriptions.read(connection, counted=COUNTED)
        except RestoredStoreError:
            # The store's order means nothing until it is adopted: `eventsql doctor` says so.
            return []

    def _rows(self, connection: Connection, name: str) -> list[TupleRow]:
        return fetch_all(connection, self._queries(name))

    def _buffered(self, connection: Connection, topics: list[str]) -> dict[str, dict[int, tuple[int, float]]]:
        found: dict[str, dict[int, tuple[int, float]]] = defaultdict(dict)
        for topic, partition, count, seconds in fetch_all(
            connection, self._log_queries("buffered"), {"topics": topics}, prepare=False
        ):
            found[topic][partition] = (count, max(0.0, seconds))
        return found


def _topic(topic: Topic, log: LogFigures, buffered: Buffered, letters: int | None) -> TopicFigures:
    number = sum(count for count, _ in buffered.values())
    return TopicFigures(
        topic.name,
        log.identity,
        topic.partitions,
        transferred=log.end,
        published=log.end + number,
        buffered=number,
        buffered_seconds=max((seconds for _, seconds in buffered.values()), default=0.0),
        oldest_seconds=None if log.oldest_seconds is None else max(0.0, log.oldest_seconds),
        bytes=log.bytes,
        retention=topic.retention,
        open_letters=letters,
    )


def _partition(
    state: ConsumerState, log: LogFigures, waiting: Waiting, buffered: Buffered, given_up: int
) -> PartitionFigures:
    whole = state.partition == NOT_PARTITIONED
    own = list(buffered.values()) if whole else [buffered.get(state.partition, (0, 0.0))]
    not_moved = sum(count for count, _ in own)
    cause, detail = cause_of(state, waiting.events, not_moved)
    if cause is LagCause.WAITING and state.until is not None and waiting.first > state.until:
        cause, detail = LagCause.HELD_BACK, "`eventsql lag` says by what"
    return PartitionFigures(
        state.topic,
        state.name,
        state.partition,
        events=_estimated(waiting, state.last_event_id, log.end) + not_moved,
        seconds=max([waiting.seconds, *(seconds for _, seconds in own)]),
        cause=cause,
        detail=detail,
        consumed=state.consumed_events,
        given_up=given_up,
    )


def _estimated(waiting: Waiting, after: int, end: int) -> int:
    """The number of waiting events. Uncounted events are assumed to be as dense as the counted events."""
    if waiting.total is not None:
        return waiting.total
    return round(waiting.events * (end - after) / (waiting.furthest - after))
